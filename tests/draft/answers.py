#!/usr/bin/env python3
"""Answers with drafts against answers without, in every cache pass.

  answers.py SLUICE MODEL DATASET [--limit N] [--kv bf16,fp8_e4m3] [--ranks 1,2,4] [--batch 1,32] [--adaptive] [--expected F]

Of each KV type and number of requests at once: one cold run of one rank without speculation, then a run with drafts for every
number of ranks with the passes cold, warm, l2 and l3. Token ids and logits bits must be those of the run without. How often a
draft stands must not depend on where the cache rows came from: of the drafts whose predecessors stood, each place's share that
stands is shown, and l3's must be within 1% of cold's. The first draft of a run must stand as often as the reference
implementation's (--expected: within two points of its mtp_acceptance).

Drafts have a fixed length, so that the same ones are made in each pass and the length of accepted runs must be equal, too. With
--adaptive load and time decide how many are made: only their shares are compared, the first place's strictly, and of the others
what chance leaves.
"""
import itertools
import json
import pathlib
import sys
import tempfile
import time

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import cache_passes  # noqa: E402


def other_shares(got, cold, adaptive):
    """The places whose share of standing drafts is another one than cold's. Where other drafts are made than in the cold pass,
    the places behind the first are samples: what their number leaves to chance (3 sigma) is allowed besides."""
    wrong = []
    for place, (a, b) in enumerate(zip(got, cold), 1):
        share, want = a["acceptance"], b["acceptance"]
        spread = want * (1 - want) * (1 / a["reached"] + 1 / b["reached"]) if adaptive and place > 1 else 0
        if abs(share / want - 1) > 0.01 + 3 * spread**0.5 / want:
            wrong.append(f"place {place}: {share:.4f} of the drafts stood, cold {want:.4f}")
    return wrong


def main():
    p = cache_passes.arguments(__doc__)
    p.add_argument("--limit", type=int, default=40, help="sessions")
    p.add_argument("--ranks", default="1,2,4")
    p.add_argument("--batch", default="1,32")
    p.add_argument("--passes", default="cold,warm,l2,l3")
    p.add_argument("--max-tokens", type=int, default=256)
    p.add_argument("--expected", help="expected.json of the data set")
    p.add_argument("--adaptive", action="store_true", help="the default draft length instead of a fixed one")
    p.add_argument("--extra", default="", help="more flags of the drafting engine")
    o = p.parse_args()
    work = pathlib.Path(tempfile.mkdtemp(prefix="sluice-draft-"))

    def evaluate(name, kv, batch, *more):
        passes, code, said = cache_passes.evaluate(o, kv, work / f"{name}.json", "--limit", str(o.limit), "--max-tokens",
                                                   str(o.max_tokens), "--concurrency", str(batch), *more)
        if code != 0:
            sys.exit(said)
        return passes

    failed = answers = 0
    first = [0, 0.0]  # runs weighted by answers, over all cold passes
    print(f"{'kv':<9} {'batch':>5} {'ranks':>5} {'pass':<5} {'answers':>7} {'tokens':>7} {'bits':>6} {'length':>7} {'first':>7} "
          f"{'l1':>8} {'l2':>8} {'l3':>8} {'seconds':>8}  stood of reached, by place", flush=True)
    for kv, batch in itertools.product(o.kv.split(","), o.batch.split(",")):
        plain = str(work / "plain.jsonl")
        evaluate("plain", kv, batch, "--passes", "cold", "--outputs", plain)
        for ranks in o.ranks.split(","):
            begin = time.time()
            passes = evaluate("drafts", kv, batch, "--passes", o.passes, "--compare-with", plain, "--attn-cp-size", ranks,
                              "--speculative-algorithm", "NEXTN", "--speculative-adaptive", "on" if o.adaptive else "off",
                              "--enable-hierarchical-cache", "--hicache-storage-backend", "file",
                              "--hicache-storage-prefetch-policy", "wait_complete", *o.extra.split())
            cold = passes[0]
            for r in passes:
                wrong = cache_passes.differences(r)
                answers += r["answers"]
                if r["draft_accepted"] == 0:
                    wrong.append("no draft stood")
                if r["name"] == "l3":
                    wrong += other_shares(r["draft_places"], cold["draft_places"], o.adaptive)
                if r["name"] == "l3" and not o.adaptive and abs(r["accept_length"] / cold["accept_length"] - 1) > 0.01:
                    wrong.append(f"accept length {r['accept_length']:.4f}, cold {cold['accept_length']:.4f}")
                if r["name"] == "cold":
                    first[0] += r["answers"]
                    first[1] += r["answers"] * r["draft_first_acceptance"]
                t = r["cached_by_tier"]
                print(f"{kv:<9} {batch:>5} {ranks:>5} {r['name']:<5} {r['answers']:>7} {r['identical_to_cold']:>7} "
                      f"{r['logits_identical_to_cold']:>6} {r['accept_length']:>7.4f} {r['draft_first_acceptance']:>7.4f} "
                      f"{t['l1']:>8} {t['l2']:>8} {t['l3']:>8} {time.time() - begin:>8.1f}  "
                      + "  ".join(f"{a['accepted']}/{a['reached']}={a['acceptance']:.4f}" for a in r["draft_places"]), flush=True)
                for w in wrong:
                    failed += 1
                    print(f"WRONG kv {kv}, batch {batch}, ranks {ranks}, {r['name']}: {w}", flush=True)
    print(f"{answers} answers with drafts compared: {failed} passes wrong; first draft stood {first[1] / first[0]:.4f}")
    if o.expected:
        want = json.loads(pathlib.Path(o.expected).read_text())["bf16"]["index"]["mtp_acceptance"]
        if abs(first[1] / first[0] - want) > 0.02:
            failed += 1
            print(f"WRONG first draft stood {first[1] / first[0]:.4f}, expected {want}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
