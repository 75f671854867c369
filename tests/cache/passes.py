#!/usr/bin/env python3
"""The evaluation's cache passes for every host layout, write policy and KV type, with another process between the l3 passes.

  passes.py SLUICE MODEL DATASET [--sample N] [--kv bf16,fp8_e4m3] [--layouts ...] [--policies ...] [--threads N] [--keep DIR]

Of each KV type one process runs cold, and what it says is what all others are compared with. Of each combination: one process
runs warm, l2 and l3; a second one, started after it, runs l3 from the folder that the first left; a third one does so with another
host layout. Every pass must say what cold said, token for token and bit for bit, be right as often (which the expected accuracies
judge), take its hits from the tier that it is named after, and find nearly all that warm finds.
"""
import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
IO = {"layer_first": "direct", "page_first": "kernel", "page_first_direct": "direct", "layer_page_first": "direct"}
TIER = {"warm": "l1", "l2": "l2", "l3": "l3"}


def evaluate(o, kv, layout, policy, folder, name, reference, *more):
    out = folder / f"{name}.json"
    command = [o.sluice, "eval", o.model, "--dataset", o.dataset, "--sample", str(o.sample), "--sample-seed",
               str(o.seed), "--expected", o.expected, "--threads",
               str(o.threads), "--kv-cache-dtype", kv, "--max-total-tokens", str(o.tokens), "--enable-hierarchical-cache",
               "--hicache-ratio", str(o.ratio), "--hicache-mem-layout", layout, "--hicache-io-backend", IO[layout],
               "--hicache-write-policy", policy, "--hicache-storage-backend", "file", "--hicache-storage-backend-extra-config",
               json.dumps({"directory": str(folder / "kv")}), "--hicache-storage-prefetch-policy", "wait_complete", "--json",
               str(out), *more]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 1) or not out.exists():
        return [], [f"exit {done.returncode}: {done.stderr.strip()[-300:]}"]
    passes = json.loads(out.read_text())["passes"]
    wrong = []
    if done.returncode == 1:
        wrong.append("an accuracy is not the expected one: " + " ".join(done.stdout.split())[-600:])
    for p in passes:
        if p["identical_to_cold"] != 1 or p["logits_identical_to_cold"] != 1:
            wrong.append(f"{p['name']}: {p['identical_to_cold']} of the texts and {p['logits_identical_to_cold']} of the logits equal cold")
        tier = TIER.get(p["name"])
        if tier and p["cached_by_tier"][tier] == 0:
            wrong.append(f"{p['name']}: no hit from {tier}: {p['cached_by_tier']}")
        if p["accuracy"] != reference.setdefault("accuracy", p["accuracy"]):
            wrong.append(f"{p['name']}: accuracy {p['accuracy']}, cold has {reference['accuracy']}")
        found = sum(p["cached_by_tier"].values())
        if p["name"] == "warm":
            reference["found"] = found
        if tier and found < 0.9 * reference["found"]:  # storage is not asked for prompts of less than 256 tokens
            wrong.append(f"{p['name']}: {found} tokens were hits, {reference['found']} of warm")
    return passes, wrong


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("sluice")
    p.add_argument("model")
    p.add_argument("dataset")
    p.add_argument("--sample", type=int, default=60, help="sessions of each length; 60 of three lengths are 1,000 turns")
    p.add_argument("--seed", type=int, default=5)
    p.add_argument("--expected", default=str(ROOT / "tests/data/eval/expected.json"))
    p.add_argument("--kv", default="bf16,fp8_e4m3")
    p.add_argument("--layouts", default=",".join(IO))
    p.add_argument("--policies", default="write_through,write_through_selective,write_back")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--tokens", type=int, default=65536)
    p.add_argument("--ratio", type=float, default=4)
    p.add_argument("--keep", help="folder for the JSON documents and outputs; default: none is kept")
    o = p.parse_args()
    failed, names = 0, list(IO)
    print(f"{'kv':<9} {'layout':<18} {'policy':<24} {'process':<26} {'pass':<5} {'answers':>7} {'bits':>6} {'right':>7} "
          f"{'l1':>8} {'l2':>8} {'l3':>8} {'s':>6}", flush=True)
    for kv in o.kv.split(","):
        keep = pathlib.Path(o.keep) if o.keep else pathlib.Path(tempfile.mkdtemp(prefix="sluice-passes-"))
        outputs = keep / f"cold-{kv}.jsonl"
        reference = {}  # cold's accuracy and warm's hits
        for layout in o.layouts.split(","):
            for policy in o.policies.split(","):
                name = f"{kv}-{layout}-{policy}"
                folder = keep / name
                folder.mkdir(parents=True, exist_ok=True)
                other = names[(names.index(layout) + 1) % len(names)]
                same = ["--compare-with", str(outputs)]
                first = ["--passes", "warm,l2,l3", *same] if outputs.exists() else [
                    "--passes", "cold,warm,l2,l3", "--outputs", str(outputs)]
                runs = [("first", layout, first), ("second", layout, ["--passes", "l3", "--filled", *same]),
                        (f"third, {other}", other, ["--passes", "l3", "--filled", *same])]
                for process, used, more in runs:
                    passes, wrong = evaluate(o, kv, used, policy, folder, process.split(",")[0], reference, *more)
                    for r in passes:
                        t = r["cached_by_tier"]
                        print(f"{kv:<9} {layout:<18} {policy:<24} {process:<26} {r['name']:<5} {r['answers']:>7} "
                              f"{r['logits_identical_to_cold']:>6} {r['accuracy']:>7.4f} {t['l1']:>8} {t['l2']:>8} {t['l3']:>8} "
                              f"{r['seconds']:>6.1f}", flush=True)
                    for w in wrong:
                        failed += 1
                        print(f"WRONG {name}, {process} process: {w}", flush=True)
                shutil.rmtree(folder / "kv" if o.keep else folder, ignore_errors=True)
        if not o.keep:
            shutil.rmtree(keep, ignore_errors=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
