"""Faults that users of split prefill and decode have reported, through the router and real processes: clients that are
gone, splits of other sizes on the two sides, numbers that cannot be, full queues, a shutdown under load."""
import argparse
import json
import os
import random
import re
import signal
import socket
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

from cluster import Cluster, Process, awake, call, free_port, single
from faults import Ask, body, expect, pd_info, wait_for

DATA = os.path.join(os.path.dirname(__file__), "../data")
SLOW = ["--disaggregation-rate-limit", "3", "--disaggregation-layer-group", "2"]  # MB/s


def raw(c, request, path="/v1/completions", receive=None):
    s = socket.socket()
    if receive:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive)
    s.settimeout(60)
    s.connect(("127.0.0.1", c.router.port))
    text = json.dumps(request).encode()
    s.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
              % (path.encode(), len(text)) + text)
    return s


def completion(length, seed, tokens, **extra):
    rng = random.Random(seed)
    return {"prompt": [rng.randrange(10, 2000) for _ in range(length)], "temperature": 0, "max_tokens": tokens,
            "ignore_eos": True, **extra}


def read_all(s):
    data = b""
    while chunk := s.recv(65536):
        data += chunk
    return data


def counter(p, name):
    text = urllib.request.urlopen(p.url + "/metrics", timeout=10).read().decode()
    return sum(float(v) for v in re.findall(rf"^sluice:{name}(?:{{[^}}]*}})? (\S+)$", text, re.M))


def state(p):
    return call(p.url, "/server_info")[1]["internal_states"][0]


def a_closed_client_ends_its_work(repeats):
    c = Cluster(common=["--chunked-prefill-size", "256", "--max-running-requests", "4"], prefill=SLOW)
    for phase in ("queued", "prefill", "streaming", "decode"):
        for i in range(repeats):
            n = 4 if i % 4 == 3 else 1
            # Queued: behind others on both sides. Prefill: in chunk 2 of 5. Streaming: after 3 tokens. Decode: no stream.
            blockers = [raw(c, completion(600, 900 + k, 400)) for k in range(5)] if phase == "queued" else []
            if blockers:
                wait_for("a queue", lambda: sum(state(p)["num_queue_reqs"] for p in c.instances()) > 0)
            s = raw(c, completion(1280 if phase == "prefill" else 200, i, 1500, n=n, stream=phase == "streaming"))
            if phase == "prefill":
                wait_for("the prefill", lambda: state(c.prefills[0])["num_running_reqs"] > 0)
                time.sleep(0.02)
            elif phase == "streaming":
                data = b""
                while data.count(b"data: ") < 3:
                    data += s.recv(4096)
            elif phase == "decode":
                wait_for("decode", lambda: state(c.decodes[0])["num_running_reqs"] > 0)
            began = awake.seconds
            s.close()
            for b in blockers:
                b.close()
            c.check_idle(10)
            expect(awake.seconds - began < 5, (phase, i, awake.seconds - began))
        print(f"  closed while {phase}: {repeats} times, all idle", flush=True)
    for stream in (False, True):
        s = raw(c, completion(300, 1, 8, stream=stream))
        s.shutdown(socket.SHUT_WR)
        answer = read_all(s)
        expect(answer.startswith(b"HTTP/1.1 200") and (b"[DONE]" in answer if stream else b'"usage"' in answer), answer[:300])
        s.close()
    c.check_idle()
    c.stop()


def a_client_that_stops_reading_is_dropped():
    c = Cluster(router=["--write-stall", "1"])
    s = raw(c, {**body(50, 1, 6000), "stream": True, "return_logprob": True, "top_logprobs_num": 20}, "/generate", 4096)
    wait_for("decode", lambda: state(c.decodes[0])["num_running_reqs"] > 0)
    wait_for("the drop", lambda: state(c.decodes[0])["num_running_reqs"] == 0, 60)
    c.check_idle()
    s.close()
    expect(call(c.url, "/generate", body(100, 4))[0] == 200, "others go on")
    c.stop()


def clients_that_leave_at_random(repeats):
    rng = random.Random(7)
    c = Cluster(prefills=2, decodes=2, common=["--chunked-prefill-size", "256"], prefill=SLOW)
    before = [(counter(p, "requests_finished_total"), counter(p, "request_success_total")) for p in c.instances()]
    for i in range(repeats):
        s = raw(c, completion(rng.randrange(1, 1200), i, 1000, n=rng.choice([1, 1, 4]), stream=rng.random() < 0.5))
        time.sleep(rng.random() * 0.15)
        s.close()
    c.check_idle()
    del before
    expect(call(c.url, "/generate", body(100, 4))[0] == 200, "others go on")
    c.check_idle()
    c.stop()


def splits_of_other_sizes(long):
    """Every pair of rank counts gives the answers of one server, 64 at once; what cannot be is refused with both values."""
    one = single()
    asks = [body(1 + 37 * i % 700, i, 6) for i in range(64)]
    right = [call(one.url, "/generate", a)[1]["output_ids"] for a in asks]
    one.stop()
    sizes = [(p, d) for p in (1, 2, 4) for d in (1, 2, 4)] if long else [(2, 1), (1, 2)]
    for p, d in sizes:
        c = Cluster(common=["--chunked-prefill-size", "256"], prefill=["--attn-cp-size", str(p), "--tp", str(p)],
                    decode=["--attn-cp-size", str(d), "--tp", str(d)])
        at_once = [Ask(c.url, a, seconds=240) for a in asks]  # ranks share few cores here
        for i, a in enumerate(at_once):
            status, answer, _ = a.result()
            expect(status == 200 and answer["output_ids"] == right[i], (p, d, i, status, answer))
        c.check_idle()
        c.stop()
        print(f"  prefill CP {p}, decode CP {d}: 64 answers equal", flush=True)
    for what, flags, words in (
            ("another KV type", ["--kv-cache-dtype", "fp8_e4m3"], ("fp8_e4m3", "bf16")),
            ("another norm", ["--json-model-override-args", '{"rms_norm_eps": 2e-5}'], ("fingerprint", "here", "there"))):
        c = Cluster(decode=flags)
        status, answer, seconds = Ask(c.url, body(100, 1)).result()
        expect(status == 503 and all(w in str(answer) for w in words), (what, status, answer))
        expect(seconds < 5, (what, seconds))
        c.check_idle()
        c.stop()
        print(f"  {what}: refused, {str(answer)[:140]}")


def numbers(requests, fan_out):
    """Normal requests, cache hits and aborts in every phase over 1 prefill and several decode instances."""
    limit = 40  # MB/s
    c = Cluster(decodes=fan_out, common=["--chunked-prefill-size", "256", "--disaggregation-transfer-backend", "tcp"],
                prefill=["--disaggregation-rate-limit", str(limit), "--disaggregation-layer-group", "2"])
    rng = random.Random(3)
    answered = left = 0
    for first in range(0, requests, 10):
        asks = []
        for i in range(first, min(requests, first + 10)):
            ask = body(rng.randrange(1, 700), i % 60, 4)
            if rng.random() < 0.25:
                s = raw(c, ask, "/generate")
                time.sleep(rng.random() * 0.1)
                s.close()
                left += 1
            else:
                asks.append((ask, Ask(c.url, ask)))
        for ask, a in asks:
            status, answer, _ = a.result()
            meta = answer["meta_info"]
            expect(status == 200 and meta["completion_tokens"] == 4, answer)
            expect(meta["prompt_tokens"] == len(ask["input_ids"]) and 0 <= meta["cached_tokens"] <= meta["prompt_tokens"], meta)
            expect(all(v >= 0 for v in meta.values() if isinstance(v, (int, float))), meta)
            answered += 1
    c.check_idle()
    time.sleep(0.3)
    page = sum(pd_info(c.prefills[0])["bytes_by_component"][k] for k in ("latent", "index", "draft"))
    sent, got = pd_info(c.prefills[0])["bytes_sent"], [pd_info(d)["bytes_received"] for d in c.decodes]
    expect(sent == page, (sent, page))
    expect(min(got) > 0 and sum(got) <= sent, (got, sent))  # what aborted rooms received is no answer's
    for p in c.instances():
        text = urllib.request.urlopen(p.url + "/metrics", timeout=10).read().decode()
        values = [float(v) for v in re.findall(r"^sluice:\S+ (\S+)$", text, re.M)]
        expect(values and min(values) >= 0, (p.url, min(values)))
        pd = pd_info(p)
        for room in pd["rooms"]["ended"]:
            expect(room["bytes"]["done"] <= room["bytes"]["of"], room)
            for value in room.get("seconds", {}).values():
                expect(0 <= value < 60, room)
            if room.get("result") == "ok" and room.get("seconds", {}).get("transfer", 0) > 0.05:
                speed = room["bytes"]["done"] / room["seconds"]["transfer"] / 1e6
                expect(speed <= limit * 1.05 + 5 / room["seconds"]["transfer"] * 0.05, (speed, room))
    ended = pd_info(c.prefills[0])["rooms"]
    expect(ended["completed"] >= answered, (ended, answered))
    print(f"  {answered} answered, {left} left; {sent} bytes to {fan_out} decode instances {got}; rooms "
          f"{ended['completed']} ok, {ended['failed']} failed, {ended['aborted']} aborted")
    c.stop()


def full_queues_and_shutdown():
    c = Cluster(common=["--max-running-requests", "2", "--max-queued-requests", "8", "--shutdown-timeout", "5"],
                router=["--retries", "0"])
    asks = [Ask(c.url, {**body(300, i, 40), "stream": i % 2 == 0}) for i in range(64)]
    statuses = [a.result()[0] for a in asks]
    expect(set(statuses) <= {200, 429, 503}, statuses)
    expect(statuses.count(200) >= 8, statuses)
    print(f"  64 clients, queue of 8: { {s: statuses.count(s) for s in set(statuses)} }")
    c.check_idle()
    # 8 streams open and 8 queued, then the decode instance and the router are told to go.
    streams = [raw(c, {**body(100, i, 3000), "stream": True}, "/generate") for i in range(8)]
    readers = ThreadPoolExecutor(8)  # one each: a client that does not read is cut off, and rightly so
    ends = [readers.submit(read_all, s) for s in streams]
    time.sleep(0.5)
    began = time.time()
    c.router.send(signal.SIGTERM)
    time.sleep(0.2)
    for p in c.instances():
        p.send(signal.SIGTERM)
    for end in (e.result() for e in ends):
        expect(b"[DONE]" in end or b'"error"' in end, end[-300:])
    codes = [p.process.wait(60) for p in [c.router] + c.instances()]
    expect(codes == [0, 0, 0], codes)
    print(f"  SIGTERM with 8 streams: all ended, exit codes {codes} after {time.time() - began:.1f} s")


def two_routers():
    """Two front doors of the same instances, a queue of 8 and 64 clients, streams and not: every client is answered."""
    one = single()
    asks = [{**body(100 + i % 5, i, 12), "stream": i % 2 == 0} for i in range(64)]
    right = [call(one.url, "/generate", {**a, "stream": False})[1]["output_ids"] for a in asks]
    one.stop()
    c = Cluster(common=["--max-running-requests", "2", "--max-queued-requests", "8"], router=["--retries", "0"])
    words = list(c.router.words)
    words[words.index("--port") + 1] = str(free_port())
    other = Process(words, f"{c.folder}/router2.log").wait_ready()
    for crowd in (asks, asks[:8]):  # more than fits; then what fits, which must all be right
        at_once = [Ask((c.router, other)[i // 2 % 2].url, a) for i, a in enumerate(crowd)]
        statuses = []
        for i, a in enumerate(at_once):
            status, answer, _ = a.result()
            statuses.append(status)
            expect(status in ((200, 429, 503) if len(crowd) == 64 else (200,)), (i, status, answer))
            if status == 200 and not crowd[i]["stream"]:
                expect(answer["output_ids"] == right[i], (i, answer["output_ids"], right[i]))
        c.check_idle()
        print(f"  {len(crowd)} clients of two routers: { {s: statuses.count(s) for s in set(statuses)} }")
    expect(other.stop() == 0, "the second router's exit code")
    c.stop()


def ends_inside_accepted_drafts():
    """A stop string or the last token in the middle of an accepted run ends the answer there, as without drafts."""
    one = single()
    c = Cluster(common=["--speculative-algorithm", "NEXTN"])
    with open(os.path.join(DATA, "eval/ledger_qa.jsonl")) as f:
        sessions = [json.loads(line)["messages"] for line, _ in zip(f, range(24))]
    stopped = 0
    for i, messages in enumerate(sessions):
        last = max(k for k, m in enumerate(messages) if m["role"] == "user")
        ask = {"messages": messages[:last + 1], "temperature": 0, "max_tokens": 32, "ignore_eos": True}

        def answer(p, **more):
            status, a = call(p.url, "/v1/chat/completions", {**ask, **more})
            expect(status == 200, (status, a))
            return a["choices"][0]["message"]["content"], a["choices"][0]["finish_reason"], a["usage"]["completion_tokens"]

        text = answer(one)[0]
        for more in ({"stop": [text[len(text) // 2:][:2]]}, {"max_tokens": 3 + i % 5}):
            want, got = answer(one, **more), answer(c, **more)
            expect(got == want, (i, more, got, want))
            stopped += got[1] == "stop"
    accepted = counter(c.decodes[0], "spec_accepted_tokens_total")
    expect(stopped >= 24 and accepted > 100, (stopped, accepted))
    print(f"  48 ends as without drafts, {stopped} by a stop string; {accepted:.0f} drafts were accepted")
    c.check_idle()
    c.stop()
    one.stop()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--only", nargs="*", default=[])
    o = parser.parse_args()
    tests = {"closed": lambda: a_closed_client_ends_its_work(100 if o.long else 4),
             "stalled": a_client_that_stops_reading_is_dropped,
             "random": lambda: clients_that_leave_at_random(200 if o.long else 30),
             "splits": lambda: splits_of_other_sizes(o.long),
             "numbers": lambda: numbers(500 if o.long else 60, 4 if o.long else 2),
             "full": full_queues_and_shutdown,
             "routers": two_routers,
             "drafts": ends_inside_accepted_drafts}
    for name, test in tests.items():
        if o.only and name not in o.only:
            continue
        began = time.time()
        test()
        print(f"{name}: right, {time.time() - began:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
