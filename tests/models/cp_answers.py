#!/usr/bin/env python3
"""Answers over several ranks against one rank, in every pass.

Runs `sluice eval MODEL --passes cold,warm,l2,l3` with one rank and with each --attn-cp-size asked for, over KV dtypes,
prefill chunk sizes and host layouts, with batches of sessions that share a long prefix. Every pass of every run must give
the token ids and logits hashes of one rank's cold pass. Prints one line a run; exits 1 on the first difference it lists.
"""
import argparse, gzip, itertools, json, os, subprocess, sys, tempfile, time


def read_sessions(path):
    opened = gzip.open if path.endswith(".gz") else open
    with opened(path, "rt") as f:
        return [json.loads(line) for line in f]


def shared_prefix_sessions(sessions, count, turns, group):
    """Groups of `group` sessions that share one system text and differ from their first question on."""
    out = []
    for g in range((count + group - 1) // group):
        base = sessions[g]
        pairs = [(m, a) for m, a in zip(base["messages"], base["messages"][1:])
                 if m["role"] == "user" and a["role"] == "assistant"]
        head = [m for m in base["messages"] if m["role"] == "system"]
        for k in range(min(group, count - g * group)):
            order = pairs[k % len(pairs):] + pairs[:k % len(pairs)]
            messages = list(head)
            for i, (question, answer) in enumerate(order[:turns]):
                # Questions of different lengths, so that what is new after the cached pages is 1 token and more.
                text = question["content"] + " Please" * ((k + i) % 7)
                messages += [{"role": "user", "content": text}, answer]
            out.append({"id": f"{base['id']}-{k}", "bucket": base["bucket"], "messages": messages})
    return out


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--sluice", default="build/release/bin/sluice")
    p.add_argument("--model", default="models/ledger-28m-fp8")
    p.add_argument("--dataset", default="tests/data/eval/ledger_qa.jsonl")
    p.add_argument("--sessions", type=int, default=10)
    p.add_argument("--group", type=int, default=10, help="sessions that share one system text")
    p.add_argument("--turns", type=int, default=3)
    p.add_argument("--first", type=int, default=0, help="first session of the data set that is used")
    p.add_argument("--ranks", default="2,3,4,8")
    p.add_argument("--kv", default="bf16,fp8_e4m3")
    p.add_argument("--chunks", default="64,2048")
    p.add_argument("--layouts", default="default,layer_page_first,page_first_direct")
    p.add_argument("--passes", default="cold,warm,l2,l3")
    p.add_argument("--max-tokens", type=int, default=24)
    p.add_argument("--spread-experts", action="store_true", help="--ep-size of the number of ranks")
    p.add_argument("--extra", default="", help="more flags of the engine")
    a = p.parse_args()

    work = tempfile.mkdtemp(prefix="cp-answers-")
    data = os.path.join(work, "sessions.jsonl")
    sessions = shared_prefix_sessions(read_sessions(a.dataset)[a.first:], a.sessions, a.turns, a.group)
    with open(data, "w") as f:
        for s in sessions:
            f.write(json.dumps(s) + "\n")

    def run(ranks, kv, chunk, layout, passes):
        out = os.path.join(work, "outputs.jsonl")
        command = [a.sluice, "eval", a.model, "--dataset", data, "--passes", passes, "--outputs", out,
                   "--concurrency", str(a.group), "--max-tokens", str(a.max_tokens),
                   "--attn-cp-size", str(ranks), "--kv-cache-dtype", kv, "--chunked-prefill-size", str(chunk),
                   "--max-total-tokens", "65536", "--enable-hierarchical-cache",
                   "--hicache-storage-backend", "file"] + a.extra.split()
        if a.spread_experts and ranks != 1:
            command += ["--ep-size", str(ranks)]
        if layout != "default":
            command += ["--hicache-mem-layout", layout, "--hicache-io-backend", "direct"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}\nexit {done.returncode}: {done.stderr[-2000:]}")
        with open(out) as f:
            return [json.loads(line) for line in f]

    wrong = 0
    answers = 0
    for kv, chunk in itertools.product(a.kv.split(","), a.chunks.split(",")):
        reference = {(o["id"], o["turn"]): o for o in run(1, kv, chunk, "default", "cold")}
        for layout, ranks in itertools.product(a.layouts.split(","), a.ranks.split(",")):
            begin = time.time()
            outputs = run(ranks, kv, chunk, layout, a.passes)
            differ, tiny, hits = [], 0, {}
            for o in outputs:
                want = reference[(o["id"], o["turn"])]
                if (o["output_ids"], o["logits_hash"]) != (want["output_ids"], want["logits_hash"]):
                    differ.append(f"pass {o['pass']}, session {o['id']}, turn {o['turn']}")
                new = o["prompt_tokens"] - o["cached_tokens"]
                tiny += o["cached_tokens"] > 0 and 1 <= new <= 9
                hits[o["pass"]] = hits.get(o["pass"], 0) + o["cached_tokens"]
            answers += len(outputs)
            print(f"ranks {ranks} kv {kv} chunk {chunk} layout {layout}: {len(outputs)} answers, {len(differ)} differ; "
                  f"{tiny} extends of 1..9 tokens after cached pages; cached tokens "
                  + " ".join(f"{k} {v}" for k, v in hits.items()) + f"; {time.time() - begin:.1f} s", flush=True)
            for d in differ[:5]:
                print("  differs: " + d)
            wrong += len(differ)
    print(f"{answers} answers compared with one rank's cold answers: {wrong} differ")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
