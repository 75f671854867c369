"""Random kill -9, SIGSTOP and restarts of instances, and broken connections between them, under load with the router up. Every client gets an answer or an
error in time, every answer is right, and when all is quiet nothing has leaked."""
import argparse
import random
import signal
import sys
import threading
import time

from cluster import Cluster, awake, call, single
from faults import TIMES, body

DEADLINE = 30  # seconds in which every client must hear something


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--backend", default="auto")
    o = parser.parse_args()
    rng = random.Random(o.seed)
    cuts = o.backend in ("tcp", "ucx")  # pages never go by shared memory through a middle
    one = single()
    questions = [body(rng.randrange(1, 900), i, rng.randrange(1, 24)) for i in range(40)]
    right = [call(one.url, "/generate", q)[1]["output_ids"] for q in questions]
    one.stop()
    c = Cluster(prefills=2, decodes=2, policy="power_of_two",
                common=TIMES + ["--disaggregation-transfer-backend", o.backend, "--chunked-prefill-size", "256"],
                prefill=["--disaggregation-rate-limit", "20", "--disaggregation-layer-group", "2"],
                router=["--health-check-timeout", "1"], middles=cuts)
    counts, lock, over = {}, threading.Lock(), threading.Event()
    wrong = []

    def client(seed):
        mine = random.Random(seed)
        while not over.is_set():
            i = mine.randrange(len(questions))
            began = awake.seconds
            try:
                status, answer = call(c.url, "/generate", questions[i], timeout=DEADLINE + 5)
            except Exception as e:  # noqa: BLE001
                status, answer = -1, repr(e)
            seconds = awake.seconds - began
            with lock:
                counts[status] = counts.get(status, 0) + 1
                if status == 200 and answer["output_ids"] != right[i]:
                    wrong.append(f"question {i}: {answer['output_ids']} instead of {right[i]}")
                if status == -1 or seconds > DEADLINE:
                    wrong.append(f"question {i}: {answer} after {seconds:.1f} s")
            if status != 200:
                time.sleep(0.1)

    threads = [threading.Thread(target=client, args=(o.seed * 1000 + t,)) for t in range(6)]
    for t in threads:
        t.start()
    until, hurt = time.time() + o.minutes * 60, {}
    while time.time() < until and not wrong:
        time.sleep(rng.uniform(0.5, 3))
        for p in c.instances() + [c.router]:
            if p.process.poll() is not None:
                wrong.append(f"{p.words} ended by itself: {p.process.returncode}: {p.text()[-500:]}")
        victim = rng.choice(c.instances())
        what = rng.choice(["kill", "stop", "short stop", "restart"] + ["cut"] * cuts)
        hurt[what] = hurt.get(what, 0) + 1
        if what == "cut":
            for _ in range(rng.randrange(1, 6)):
                rng.choice(c.middles).cut()
                time.sleep(rng.uniform(0, 0.3))
        elif what == "kill":
            victim.kill()
            time.sleep(rng.uniform(0, 1))
            victim.start()
            victim.wait_ready()
        elif what == "restart":
            victim.stop(60)
            victim.start()
            victim.wait_ready()
        else:
            victim.send(signal.SIGSTOP)
            time.sleep(rng.uniform(1.5, 4) if what == "stop" else rng.uniform(0.05, 0.5))
            victim.send(signal.SIGCONT)
    over.set()
    for t in threads:
        t.join()
    resumes = [call(p.url, "/server_info")[1]["disaggregation"]["resumes"] for p in c.prefills]
    print(f"answers by status: {counts}; faults: {hurt}; rooms resumed since the last restarts: {sum(resumes)}")
    for w in wrong[:10]:
        print("WRONG", w)
    try:
        c.check_idle(60)
        c.stop()
    except AssertionError as e:
        print("LEFT BEHIND", e)
        return 1
    return 1 if wrong or not counts.get(200) else 0


if __name__ == "__main__":
    sys.exit(main())
