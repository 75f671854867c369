"""The router's answers are those of one server, token by token, with logprobs, stops, choices and usage."""
import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

from cluster import SLUICE, Cluster, call, single

ACCEPTED = "sluice:spec_accepted_tokens_total"
LENGTHS = [1, 63, 64, 65, 128, 255, 256, 257, 511, 512, 513, 1025]


def prompt(rng, length, vocab=2000):
    return [rng.randrange(10, vocab) for _ in range(length)]


def strip(answer):
    """What must be equal: everything but names, times, where cached tokens lay and what drafts did."""
    if isinstance(answer, list):
        return [strip(a) for a in answer]
    if isinstance(answer, dict):
        return {k: strip(v) for k, v in answer.items()
                if k not in ("id", "created", "e2e_latency", "cached_tokens", "prompt_tokens_details",
                             "completion_tokens_details") and not k.startswith("spec_")}
    return answer


def requests(lengths, seed):
    rng = random.Random(seed)
    for length in lengths:
        ids = prompt(rng, length)
        for max_tokens in (1, 2, 20):
            yield "/generate", {"input_ids": ids, "return_logprob": True, "top_logprobs_num": 3,
                                "sampling_params": {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}}
        yield "/generate", {"input_ids": ids, "return_logprob": True,
                            "sampling_params": {"temperature": 0.9, "top_p": 0.95, "seed": length,
                                                "max_new_tokens": 12, "presence_penalty": 0.4,
                                                "frequency_penalty": 0.3, "repetition_penalty": 1.1,
                                                "min_new_tokens": 3}}
        yield "/v1/completions", {"prompt": ids, "max_tokens": 10, "temperature": 0.8, "seed": 7, "n": 3, "logprobs": 2}
    ids = prompt(rng, 130)
    yield "/generate", {"input_ids": ids, "return_logprob": True, "logprob_start_len": 0,
                        "sampling_params": {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}}
    yield "/v1/completions", {"prompt": [prompt(rng, 70), prompt(rng, 10)], "max_tokens": 6, "temperature": 0.7, "seed": 3}
    for text in ("What does Ada hold?", "Say hello."):
        for extra in ({}, {"stop": ["a"]}, {"stop": ["e", "the"], "logprobs": True, "top_logprobs": 2},
                      {"n": 2, "temperature": 1.0, "seed": 11}, {"max_tokens": 1}):
            yield "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "temperature": 0,
                                           "max_tokens": 24, **extra}


def compare(cluster, one, cases, rounds):
    """rounds: what is emptied before each ('prefill', 'decode', 'both', 'none')."""
    expected = [call(one.url, path, body) for path, body in cases]
    wrong = 0
    for name in rounds:
        cluster.flush({"prefill": cluster.prefills, "decode": cluster.decodes, "both": cluster.instances(), "none": []}[name])
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda c: call(cluster.url, *c), cases))
        for (path, body), a, b in zip(cases, expected, answers):
            if a[0] == b[0] == 200 and strip(a[1]) == strip(b[1]):
                continue
            wrong += 1
            if wrong <= 5:
                print(f"DIFFERENT (emptied: {name}) {path} {str(body)[:300]}\n  one    {a[0]} {str(strip(a[1]))[:1500]}\n"
                      f"  router {b[0]} {str(strip(b[1]))[:1500]}")
        cluster.check_idle()
    return wrong


def evaluate(cluster, one, turns):
    """`sluice eval` of the router and of the one server: every text of every pass."""
    data = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../data/eval/ledger_qa.jsonl")
    answers = []
    for url in (one.url, cluster.url):
        with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as out:
            run = subprocess.run([SLUICE, "eval", url, "--dataset", data, "--limit", str(turns), "--passes", "cold,warm",
                                  "--concurrency", "8", "--outputs", out.name], capture_output=True, text=True)
            assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
            lines = [json.loads(line) for line in out]
        answers.append({(a["pass"], a["id"], a["turn"]): a["text"] for a in lines})
    cluster.check_idle()
    different = [k for k in answers[0] if answers[0][k] != answers[1].get(k)]
    for key in different[:3]:
        print(f"DIFFERENT {key}: one {answers[0][key]!r}, router {answers[1].get(key)!r}")
    assert len(answers[0]) == len(answers[1]) > 0
    return len(answers[0]), len(different)


def test_cached_tokens_are_those_of_prefill(cluster):
    """The number in usage is the prefill's, whatever decode has: whole pages, zero said as zero, the same in a stream."""
    ids = [(i * 7) % 1000 + 3 for i in range(200)]

    def ask(prompt, stream=False):
        body = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
        if not stream:
            usage = call(cluster.url, "/v1/completions", body)[1]["usage"]
        else:
            text = call(cluster.url, "/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})[1]
            records = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
            [usage] = [r["usage"] for r in records if r.get("usage")]
        return usage["prompt_tokens_details"]["cached_tokens"]

    cluster.flush()
    got = [ask(ids), ask(ids), ask(ids, stream=True), ask(ids[:100] + [5] * 100)]
    for side in (cluster.decodes, cluster.prefills):
        cluster.flush(side)
        got.append(ask(ids))
    if got == [0, 192, 192, 64, 192, 0]:
        return 0
    print(f"cached tokens through the router: {got}")
    return 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--eval", type=int, default=0, metavar="SESSIONS", help="also evaluate so many sessions on each shape")
    parser.add_argument("--backend", default="", help="only shapes of this transfer backend; else ucx comes with --long or --only")
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    options = parser.parse_args()
    chunk = ["--chunked-prefill-size", "256"]
    # `one` has none: they must not show. A fixed length drafts under any load.
    drafts = ["--speculative-algorithm", "NEXTN", "--speculative-adaptive", "off"]
    gather = ["--cp-kv-exchange", "gather"]
    cp2 = ["--attn-cp-size", "2", "--tp", "2"]
    shapes = [("1P1D tcp", dict(common=["--disaggregation-transfer-backend", "tcp"])),
              ("ucx", dict(common=["--disaggregation-transfer-backend", "ucx"])),
              ("gather, prefill CP 2, decode CP 2", dict(common=gather + cp2)),
              ("drafts", dict(common=["--disaggregation-transfer-backend", "tcp"] + drafts))]
    if options.long:
        shapes += [
            ("1P1D shm", {}),
            ("2P2D ucx", dict(prefills=2, decodes=2, common=["--disaggregation-transfer-backend", "ucx"])),
            ("2P2D", dict(prefills=2, decodes=2)),
            ("monolithic", dict(prefill=["--no-disaggregation-per-layer-transfer"])),
            ("prefill CP 4, decode CP 1", dict(prefill=["--attn-cp-size", "4", "--tp", "4"])),
            ("prefill CP 1, decode CP 2", dict(decode=["--attn-cp-size", "2", "--tp", "2"])),
            ("drafts, prefill CP 4, decode CP 2", dict(common=drafts, prefill=["--attn-cp-size", "4", "--tp", "4"],
                                                       decode=["--attn-cp-size", "2", "--tp", "2"])),
            ("drafts, gather, prefill CP 4, decode CP 2",
             dict(common=drafts + gather, prefill=["--attn-cp-size", "4", "--tp", "4"], decode=["--attn-cp-size", "2", "--tp", "2"])),
            ("drafts, fp8", dict(common=["--kv-cache-dtype", "fp8_e4m3"] + drafts)),
            ("fp8", dict(common=["--kv-cache-dtype", "fp8_e4m3"], prefill=["--attn-cp-size", "2", "--tp", "2"])),
        ]
    wrong = 0
    for name, shape in shapes:
        backend = shape["common"][1] if "--disaggregation-transfer-backend" in shape.get("common", []) else "auto"
        if options.backend:
            wanted = backend == options.backend
        else:
            wanted = backend != "ucx" or options.long or options.only
        if not wanted or options.only not in name:
            continue
        common = chunk + ["--disaggregation-layer-group", "3", "--disaggregation-self-check"] + shape.pop("common", [])
        kv = ["--kv-cache-dtype", "fp8_e4m3"] if "fp8_e4m3" in common else []
        one = single(*chunk, *kv)
        cluster = Cluster(common=common, **shape)
        lengths = LENGTHS if options.long else [65, 257] if name.startswith(("drafts", "gather", "ucx")) else [1, 64, 65, 257]
        cases = list(requests(lengths, seed=5))
        rounds = ["both", "none", "prefill", "decode"] if options.long else ["both", "none"]
        different = compare(cluster, one, cases, rounds)
        pd = call(cluster.prefills[0].url, "/server_info")[1]["disaggregation"]
        if "gather" in name:
            modes = {call(p.url, "/server_info")[1]["cp_kv_exchange"] for p in cluster.instances()}
            if modes != {"gather"}:
                wrong += 1
                print(f"WRONG {name}: the ranks exchange rows by {modes}")
        if "drafts" in name:
            metrics = call(cluster.decodes[0].url, "/metrics")[1]
            stood = sum(float(line.split()[-1]) for line in metrics.splitlines() if line.startswith(ACCEPTED))
            if stood == 0:
                wrong += 1
                print(f"WRONG {name}: no draft stood on the decode instance")
        print(f"{name}: {len(cases)} requests x {len(rounds)} rounds, {different} different; {pd['writes']} writes, "
              f"{pd['bytes_sent']} bytes, {pd['bytes_before_forward_end']} of them before the forward's end", flush=True)
        wrong += different
        if options.eval:
            turns, different = evaluate(cluster, one, options.eval)
            print(f"{name}: eval of {turns} answers, {different} different", flush=True)
            wrong += different
        if len(cluster.prefills) == 1:
            wrong += test_cached_tokens_are_those_of_prefill(cluster)
        cluster.stop()
        one.stop()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
