"""What the tests of `sluice eval`'s cache passes share: the arguments of all of them, and one run of the program."""
import argparse
import json
import subprocess

TIER = {"warm": "l1", "l2": "l2", "l3": "l3"}  # the tier that a pass is named after


def arguments(description):
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("sluice")
    p.add_argument("model")
    p.add_argument("dataset")
    p.add_argument("--kv", default="bf16,fp8_e4m3")
    p.add_argument("--threads", type=int, default=1)
    p.add_argument("--tokens", type=int, default=65536, help="of the device tier")
    return p


def evaluate(o, kv, out, *more):
    """Runs `sluice eval` with the flags of `arguments` and `more`. Its passes (none where it wrote no document), its exit code,
    and one line of what it said."""
    out.unlink(missing_ok=True)
    command = [o.sluice, "eval", o.model, "--dataset", o.dataset, "--threads", str(o.threads), "--kv-cache-dtype", kv,
               "--max-total-tokens", str(o.tokens), "--json", str(out), *more]
    done = subprocess.run(command, capture_output=True, text=True)
    passes = json.loads(out.read_text())["passes"] if out.exists() else []
    said = f"exit {done.returncode}: {' '.join((done.stderr or done.stdout).split())[-2000:]} ({' '.join(command)})"
    return passes, done.returncode, said


def differences(result):
    """What is wrong with a pass by itself: not what cold said, or nothing from the tier that it is named after."""
    wrong = []
    if result["identical_to_cold"] != 1 or result["logits_identical_to_cold"] != 1:
        wrong.append(f"{result['identical_to_cold']} of the texts and {result['logits_identical_to_cold']} of the logits equal cold")
    tier = TIER.get(result["name"])
    if tier and result["cached_by_tier"][tier] == 0:
        wrong.append(f"no hit from {tier}: {result['cached_by_tier']}")
    return wrong
