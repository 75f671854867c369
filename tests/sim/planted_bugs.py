#!/usr/bin/env python3
"""What the simulation finds of planted bugs.

  planted_bugs.py PROGRAM check PLANT SCENARIO SEEDS   exit 0 when the plant is found there and the same seeds are clean without
  planted_bugs.py PROGRAM table [END]                  seeds to detection of each plant in each scenario, as a Markdown table
"""
import json
import re
import subprocess
import sys

SCENARIOS = ["radix", "tiers", "engine"]


def simulate(program, scenario, seeds, plant=None, first=False):
    command = [program, "simulate", "--scenario", scenario, "--seeds", seeds, "--jobs", "1", "--json", "-"]
    command += ["--plant", plant] if plant else []
    command += ["--stop-at-first"] if first else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        sys.exit(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr}")
    return json.loads(done.stdout)


def plants(program):
    refused = subprocess.run([program, "simulate", "--seeds", "0..1", "--plant", "?"], capture_output=True, text=True)
    names = re.search(r"is none of ([a-z_ ]+)", refused.stderr)
    return names.group(1).split() if names else sys.exit(f"no list of plants: {refused.stderr}")


def check(program, plant, scenario, seeds):
    clean = simulate(program, scenario, seeds)
    planted = simulate(program, scenario, seeds, plant, first=True)
    for finding in planted["findings"]:
        print(f"{plant}: {scenario} seed {finding['seed']}: {finding['violation']}")
    if clean["violations"] != 0:
        sys.exit(f"without a plant the seeds are not clean: {clean['findings'][0]}")
    if planted["violations"] == 0:
        sys.exit(f"{plant} was not found on seeds {seeds} of {scenario}")


def table(program, end):
    print("| planted bug | radix | tiers | engine | first sign |\n| --- | ---: | ---: | ---: | --- |")
    missing = []
    for plant in plants(program):
        cells, best = [], None
        for scenario in SCENARIOS:
            found = simulate(program, scenario, f"0..{end}", plant, first=True)["findings"]
            cells.append(str(found[0]["seed"] + 1) if found else "-")
            if found and (best is None or found[0]["seed"] < best["seed"]):
                best = found[0]
        missing += [] if best else [plant]
        sign = re.sub(r"^.*\.h:\d+: |^.*\.cc:\d+: ", "", best["violation"])[:90].strip() if best else ""
        print(f"| `{plant}` | {' | '.join(cells)} | {best['scenario'] + ': ' + sign if best else 'not found'} |", flush=True)
    if missing:
        sys.exit(f"not found within {end} seeds: {', '.join(missing)}")


if __name__ == "__main__":
    if len(sys.argv) == 6 and sys.argv[2] == "check":
        check(sys.argv[1], *sys.argv[3:])
    elif len(sys.argv) in (3, 4) and sys.argv[2] == "table":
        table(sys.argv[1], int(sys.argv[3]) if len(sys.argv) == 4 else 10000)
    else:
        sys.exit(__doc__)
