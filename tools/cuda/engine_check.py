#!/usr/bin/env python3
"""What joins the device with the engine, against plain runs of one rank on the same device.

  engine_check.py SLUICE [PART]... [--model M] [--dataset D] [--limit N] [--device cuda|cpu]

Parts (all without one):
  ranks     two ranks on one device, cold and warm: token ids and logits bits of one rank
  drafts    speculation at 1, 2, 4 and 5 rows a request, adaptive, and with two ranks: the same of no speculation
  split     prefill and decode instances behind a router, with and without speculation, pages checked by digests
  sampling  requests whose rows are reduced on the device, and the same with logprobs, whose rows are sampled on the host

Every engine runs with --enable-deterministic-inference. Exit code 1 on any difference or failed run.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

failed = 0
running = []


def say(text):
    print(text, flush=True)


def fail(text):
    global failed
    failed += 1
    say(f"FAILED: {text}")


def post(url, body, timeout=120):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as reply:
        return json.loads(reply.read())


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Eval:
    def __init__(self, o, work):
        self.o, self.work = o, work
        self.engine = ["--device", o.device, "--enable-deterministic-inference", "--max-total-tokens", "65536", *o.engine.split()]

    def run(self, name, target, *more, engine=True):
        """The passes of one run; [] and a failure when it ends badly."""
        out = self.work / f"{name}.json"
        command = [self.o.sluice, "eval", target, "--dataset", self.o.dataset, "--limit", str(self.o.limit), "--json", str(out),
                   *(self.engine if engine else []), *more]
        begin = time.time()
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        if done.returncode != 0 or not out.exists():
            fail(f"{name}: exit {done.returncode}: {' '.join((done.stderr or done.stdout).split())[-1500:]} ({' '.join(command)})")
            return []
        self.seconds = time.time() - begin
        return json.loads(out.read_text())["passes"]

    def base(self, kv):
        """Outputs of one rank without anything."""
        path = self.work / f"base-{kv}.jsonl"
        if not path.exists():
            for r in self.run(f"base-{kv}", self.o.model, "--passes", "cold", "--kv-cache-dtype", kv, "--concurrency", "32", "--outputs", str(path)):
                say(row(f"one rank, {kv}", r))
        return path

    def compare(self, name, kv, *more, concurrency="32"):
        base = self.base(kv)
        passes = self.run(name.replace(" ", "-").replace(",", ""), self.o.model, "--passes", "cold,warm", "--kv-cache-dtype", kv,
                          "--concurrency", concurrency, "--compare-with", str(base), *more)
        for r in passes:
            say(row(f"{name}, {kv}", r))
            if r["identical_to_cold"] != 1 or r["logits_identical_to_cold"] != 1:
                fail(f"{name}, {kv}, {r['name']}: {r['identical_to_cold']} of the texts and {r['logits_identical_to_cold']} of the "
                     "logits are those of one rank")
            if "drafts" in name and r["draft_accepted"] == 0:
                fail(f"{name}, {kv}, {r['name']}: no draft stood")
        return passes


HEAD = f"{'run':<44} {'pass':<5} {'answers':>7} {'tokens':>7} {'bits':>7} {'accuracy':>8} {'length':>7} {'cached':>8} {'seconds':>8}"


def row(name, r):
    def share(key):
        return f"{r[key] * 100:.2f}%" if isinstance(r.get(key), (int, float)) else "-"
    length = f"{r['accept_length']:.3f}" if r.get("draft_accepted") else "-"
    return (f"{name:<44} {r['name']:<5} {r['answers']:>7} {share('identical_to_cold'):>7} {share('logits_identical_to_cold'):>7} "
            f"{share('accuracy'):>8} {length:>7} {r['cached_tokens']:>8} {r['seconds']:>8.1f}")


def ranks(e):
    for kv in ("bf16", "fp8_e4m3"):
        e.compare("two ranks", kv, "--attn-cp-size", "2")


DRAFTS = ["--speculative-algorithm", "NEXTN"]


def drafts(e):
    for steps in ("1", "3", "4"):
        e.compare(f"drafts, {int(steps) + 1} rows", "fp8_e4m3", *DRAFTS, "--speculative-adaptive", "off", "--speculative-num-steps", steps)
    e.compare("drafts, 4 rows", "bf16", *DRAFTS, "--speculative-adaptive", "off")
    e.compare("drafts, adaptive", "fp8_e4m3", *DRAFTS)
    e.compare("drafts, adaptive, one request", "fp8_e4m3", *DRAFTS, concurrency="1")
    e.compare("drafts, 4 rows, two ranks", "fp8_e4m3", *DRAFTS, "--speculative-adaptive", "off", "--attn-cp-size", "2")


class Server:
    def __init__(self, o, words, log):
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log_path = log
        with open(log, "w") as f:
            self.process = subprocess.Popen([o.sluice, *words, "--port", str(self.port)], stdout=f, stderr=f)
        running.append(self)

    def ready(self):
        for _ in range(1200):
            if self.process.poll() is not None:
                break
            try:
                if urllib.request.urlopen(self.url + "/health", timeout=2).status == 200:
                    return self
            except OSError:
                pass
            time.sleep(0.05)
        raise RuntimeError(f"{self.log_path}: not ready: {open(self.log_path).read()[-1500:]}")

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
        running.remove(self)
        if self.process.returncode != 0:
            fail(f"{self.log_path}: exit {self.process.returncode}: {open(self.log_path).read()[-1500:]}")


def texts(path, name):
    with open(path) as f:
        lines = [json.loads(line) for line in f]
    return {(r["id"], r["turn"]): r["text"] for r in lines if r["pass"] == name}


def split(e):
    for title, kv, more in (("prefill and decode", "fp8_e4m3", []), ("prefill and decode", "bf16", []),
                            ("prefill and decode, drafts", "fp8_e4m3", DRAFTS)):
        base = texts(e.base(kv), "cold")
        name = f"split-{kv}-{len(more)}"
        common = ["serve", "--model-path", e.o.model, *e.engine, "--kv-cache-dtype", kv, "--disaggregation-layer-group", "2",
                  "--disaggregation-self-check", *more]
        bootstrap = str(free_port())
        prefill = Server(e.o, [*common, "--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", bootstrap], e.work / f"{name}-p.log")
        decode = Server(e.o, [*common, "--disaggregation-mode", "decode"], e.work / f"{name}-d.log")
        prefill.ready(), decode.ready()
        router = Server(e.o, ["router", "--prefill", prefill.url, bootstrap, "--decode", decode.url], e.work / f"{name}-r.log").ready()
        out = e.work / f"{name}.jsonl"
        for r in e.run(name, router.url, "--passes", "cold,warm", "--concurrency", "16", "--outputs", str(out), engine=False):
            got = texts(out, r["name"])
            same = sum(got.get(k) == v for k, v in base.items())
            r["identical_to_cold"] = same / len(base)
            say(row(f"{title}, {kv}", r))
            if same != len(base):
                fail(f"{title}, {kv}, {r['name']}: {same} of {len(base)} texts are those of one instance")
        info = post(prefill.url + "/server_info", None)["disaggregation"]
        other = post(decode.url + "/server_info", None)["disaggregation"]
        rooms = info["rooms"]
        keys = ("bytes_sent", "bytes_before_forward_end", "bytes_by_component", "writes", "write_retries", "layers_sent_at_end", "outstanding_writes",
                "wait_layers_seconds", "exposed_seconds", "transfer_seconds")
        say("  prefill: " + ", ".join(f"{k} {info[k]}" for k in keys) + f", rooms {rooms['completed']} completed, {rooms['failed']} failed, "
            f"{rooms['per_layer']} layer by layer, {info['peers']}")
        say("  decode: " + ", ".join(f"{k} {other[k]}" for k in ("bytes_received", "digests_checked", "leased_pages")))
        if rooms["failed"] or info["bytes_sent"] != other["bytes_received"] or not info["bytes_sent"] or not info["bytes_before_forward_end"]:
            fail(f"{title}, {kv}: rooms failed, bytes sent and received differ, or none moved while the forward ran")
        for server in (router, prefill, decode):
            server.stop()


def sampling(e):
    """The same seeded requests, answered from reduced rows and, because they ask for logprobs, from whole ones."""
    for more in ([], DRAFTS):
        server = Server(e.o, ["serve", "--model-path", e.o.model, *e.engine, *more], e.work / "sampling.log").ready()
        filters = [{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.8}, {"temperature": 0}]
        bodies = []
        for i in range(48):
            bodies.append({"text": f"Mara has {i} coins. What", "sampling_params": {
                "temperature": 0.9, "max_new_tokens": 40, "ignore_eos": True, "seed": 1000 + i, **filters[i % len(filters)]}})
        with concurrent.futures.ThreadPoolExecutor(24) as pool:
            reduced = list(pool.map(lambda b: post(server.url + "/generate", b), bodies))
            whole = list(pool.map(lambda b: post(server.url + "/generate", {**b, "return_logprob": True}), bodies))
        same = sum(a["output_ids"] == b["output_ids"] for a, b in zip(reduced, whole))
        tokens = sum(len(a["output_ids"]) for a in reduced)
        say(f"sampled from reduced and from whole rows{', drafts' if more else ''}: {same} of {len(bodies)} answers equal, {tokens} tokens")
        if same != len(bodies) or tokens < 1000:
            fail("rows reduced on the device give other tokens than whole rows")
        server.stop()


PARTS = {"ranks": ranks, "drafts": drafts, "split": split, "sampling": sampling}


def main():
    here = pathlib.Path(__file__).resolve().parents[2]
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("sluice")
    p.add_argument("parts", nargs="*", metavar="PART", choices=[[], *PARTS])
    p.add_argument("--model", default=str(here / "models/ledger-28m-fp8"))
    p.add_argument("--dataset", default=str(here / "tests/data/eval/ledger_qa.jsonl"))
    p.add_argument("--limit", type=int, default=60, help="sessions")
    p.add_argument("--device", default="cuda")
    p.add_argument("--engine", default="", help="more flags of every engine")
    o = p.parse_args()
    o.sluice = os.path.abspath(o.sluice)
    e = Eval(o, pathlib.Path(tempfile.mkdtemp(prefix="sluice-engine-")))
    say(HEAD)
    try:
        for name in o.parts or PARTS:
            begin = time.time()
            try:
                PARTS[name](e)
            except (RuntimeError, OSError, KeyError, subprocess.TimeoutExpired) as why:
                fail(f"{name}: {why}")
            say(f"-- {name}: {time.time() - begin:.1f} s")
    finally:
        for server in list(running):
            server.process.kill()
    say("ALL EQUAL" if failed == 0 else f"{failed} FAILED")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
