"""Everything at once against one plain server.

Prefill over 4 ranks and decode over 2, fp8 KV, index top-k shared between layers and between draft steps, drafts of 3 tokens,
host tiers in layer_page_first order, storage, chunks of 2048, 10 requests at a time that share a long prefix or add a few
tokens to an earlier prompt. Passes: cold; warm; l2 after other prompts have pushed them out of the device tier; l3 after all
instances were started again. Tokens and logprobs must be those of one rank without caches and drafts.
"""
import argparse
import gzip
import json
import os
import random
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

from cluster import Cluster, call, single

DATA = os.path.join(os.path.dirname(__file__), "../data/eval/ledger_qa_long.jsonl.gz")
TIER = {"warm": "device", "l2": "host", "l3": "storage"}
L1_TOKENS = 24576


def prompts(sessions, turns):
    """Waves of prompts. Those of a wave are asked at once; later ones go on where earlier ones ended."""
    with gzip.open(DATA, "rt") as f:
        base = next(s for s in map(json.loads, f) if s["bucket"] == 4096)
    pairs = [(m["content"], a["content"]) for m, a in zip(base["messages"], base["messages"][1:])
             if m["role"] == "user" and a["role"] == "assistant"]
    head = "".join(m["content"] for m in base["messages"] if m["role"] == "system")
    waves = []
    texts = [head] * sessions
    for turn in range(turns):
        wave, tiny = [], []
        for k in range(sessions):
            question, answer = pairs[(k + turn) % len(pairs)]
            texts[k] += f"\nQ: {question}\nA:"
            wave.append(texts[k])
            tiny.append(texts[k] + " so" * (1 + (k + turn) % 9))
            texts[k] += " " + answer
        waves += [wave, tiny]
    return waves


def body(text, number):
    sampling = {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}
    if number % 4 == 3:
        sampling = {"temperature": 0.8, "top_p": 0.95, "seed": number, "max_new_tokens": 16, "repetition_penalty": 1.1}
    return {"text": text, "return_logprob": True, "top_logprobs_num": 3, "return_cached_tokens_details": True,
            "sampling_params": sampling}


def ask(url, waves):
    answers = []
    for wave in waves:
        with ThreadPoolExecutor(len(wave)) as pool:
            asked = [pool.submit(call, url, "/generate", body(text, i), 300) for i, text in enumerate(wave)]
            answers += [a.result() for a in asked]
    for status, answer in answers:
        assert status == 200, answer
    return [a for _, a in answers]


def said(answer):
    meta = answer["meta_info"]
    return answer["text"], answer.get("output_ids"), meta["output_token_logprobs"], meta.get("output_top_logprobs")


def settle(cluster, seconds=60):
    """Until all that is on its way to host or storage has arrived."""
    cluster.check_idle(seconds)
    until = time.time() + seconds
    while time.time() < until:
        states = [call(p.url, "/server_info")[1]["internal_states"][0]["cache"] for p in cluster.instances()]
        if all(s["pending_backups"] == 0 for s in states):
            return
        time.sleep(0.05)
    raise AssertionError(f"copies did not end within {seconds} s: {states}")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--sessions", type=int, default=10)
    p.add_argument("--turns", type=int, default=3)
    p.add_argument("--prefill-ranks", default="4")
    p.add_argument("--decode-ranks", default="2")
    p.add_argument("--transport", default="auto")
    o = p.parse_args()
    numbers = ["--kv-cache-dtype", "fp8_e4m3", "--chunked-prefill-size", "2048", "--max-running-requests", "16"]
    override = ["--json-model-override-args", json.dumps({"index_share_for_mtp_iteration": True})]
    waves = prompts(o.sessions, o.turns)
    one = single(*numbers, "--disable-radix-cache")
    begin = time.time()
    want = [said(call(one.url, "/generate", body(text, i), 300)[1]) for wave in waves for i, text in enumerate(wave)]
    print(f"one rank: {len(want)} answers in {time.time() - begin:.0f} s", flush=True)
    one.stop()
    folder = tempfile.mkdtemp(prefix="sluice-combined-")

    def tier(name):
        return ["--enable-hierarchical-cache", "--hicache-ratio", "8", "--hicache-mem-layout", "layer_page_first",
                "--hicache-io-backend", "direct", "--hicache-storage-backend", "file",
                "--hicache-storage-backend-extra-config", json.dumps({"directory": os.path.join(folder, name)}),
                "--hicache-storage-prefetch-policy", "wait_complete"]

    def start():
        return Cluster(common=[*numbers, *override, "--max-total-tokens", str(L1_TOKENS), "--speculative-algorithm", "NEXTN",
                               "--speculative-num-steps", "3", "--speculative-adaptive", "off", "--disaggregation-self-check",
                               "--disaggregation-transfer-backend", o.transport],
                       prefill=["--attn-cp-size", o.prefill_ranks, *tier("prefill")],
                       decode=["--attn-cp-size", o.decode_ranks, *tier("decode")])

    wrong = 0
    cluster = start()
    for name in ("cold", "warm", "l2", "l3"):
        if name == "l2":
            rng = random.Random(2)
            left = 3 * L1_TOKENS
            while left > 0:
                ids = [rng.randrange(10, 2000) for _ in range(4096)]
                status, text = call(cluster.url, "/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}, 300)
                assert status == 200, text
                left -= len(ids)
        if name == "l3":
            settle(cluster)
            cluster.stop()
            cluster = start()
        begin = time.time()
        answers = ask(cluster.url, waves)
        different = [i for i, (a, b) in enumerate(zip(answers, want)) if said(a) != b]
        cached = {t: sum(a["meta_info"]["cached_tokens_details"].get(t, 0) for a in answers) for t in ("device", "host", "storage")}
        metrics = call(cluster.decodes[0].url, "/metrics")[1].splitlines()
        stood = sum(float(m.split()[-1]) for m in metrics if m.startswith("sluice:spec_accepted_tokens_total"))
        print(f"{name}: {len(answers)} answers, {len(different)} different; cached on prefill {cached}; "
              f"{stood:.0f} drafts have stood; {time.time() - begin:.0f} s", flush=True)
        for i in different[:3]:
            print(f"DIFFERENT {name} {i}\n  one {want[i]}\n  all {said(answers[i])}")
        wrong += len(different)
        if stood == 0:
            wrong += 1
            print(f"WRONG {name}: no draft stood")
        if name in TIER and cached[TIER[name]] == 0:
            wrong += 1
            print(f"WRONG {name}: nothing came from {TIER[name]}")
        settle(cluster)
    cluster.stop()
    shutil.rmtree(folder, ignore_errors=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
