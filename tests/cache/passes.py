#!/usr/bin/env python3
"""The evaluation's cache passes for every host layout, write policy and KV type, with another process between the l3 passes.

  passes.py SLUICE MODEL DATASET [--sample N] [--kv bf16,fp8_e4m3] [--layouts ...] [--policies ...] [--threads N] [--keep DIR]

Of each KV type one process runs cold, and what it says is what all others are compared with. Of each combination: one process
runs warm, l2 and l3; a second one, started after it, runs l3 from the folder that the first left; a third one does so with another
host layout. Every pass must say what cold said, token for token and bit for bit, be right as often (which the expected accuracies
judge), take its hits from the tier that it is named after, and find nearly all that warm finds.
"""
import json
import pathlib
import shutil
import sys
import tempfile

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import cache_passes  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[2]
IO = {"layer_first": "direct", "page_first": "kernel", "page_first_direct": "direct", "layer_page_first": "direct"}


def evaluate(o, kv, layout, policy, folder, name, reference, *more):
    passes, code, said = cache_passes.evaluate(
        o, kv, folder / f"{name}.json", "--sample", str(o.sample), "--sample-seed", str(o.seed), "--expected", o.expected,
        "--enable-hierarchical-cache", "--hicache-ratio", str(o.ratio), "--hicache-mem-layout", layout, "--hicache-io-backend",
        IO[layout], "--hicache-write-policy", policy, "--hicache-storage-backend", "file", "--hicache-storage-backend-extra-config",
        json.dumps({"directory": str(folder / "kv")}), "--hicache-storage-prefetch-policy", "wait_complete", *more)
    if code not in (0, 1) or not passes:
        return [], [said]
    wrong = []
    if code == 1:
        wrong.append("an accuracy is not the expected one: " + said)
    for p in passes:
        wrong += [f"{p['name']}: {w}" for w in cache_passes.differences(p)]
        if p["accuracy"] != reference.setdefault("accuracy", p["accuracy"]):
            wrong.append(f"{p['name']}: accuracy {p['accuracy']}, cold has {reference['accuracy']}")
        found = sum(p["cached_by_tier"].values())
        if p["name"] == "warm":
            reference["found"] = found
        if p["name"] in cache_passes.TIER and found < 0.9 * reference["found"]:  # storage is not asked for prompts of less than 256 tokens
            wrong.append(f"{p['name']}: {found} tokens were hits, {reference['found']} of warm")
    return passes, wrong


def main():
    p = cache_passes.arguments(__doc__)
    p.add_argument("--sample", type=int, default=60, help="sessions of each length; 60 of three lengths are 1,000 turns")
    p.add_argument("--seed", type=int, default=5)
    p.add_argument("--expected", default=str(ROOT / "tests/data/eval/expected.json"))
    p.add_argument("--layouts", default=",".join(IO))
    p.add_argument("--policies", default="write_through,write_through_selective,write_back")
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
