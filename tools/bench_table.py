#!/usr/bin/env python3
"""bench_table.py FILE...: reads figures that `sluice bench serving --output-file` or SGLang's bench_serving wrote (JSON lines with the same
field names) and prints them side by side. Exit 1: a field is missing, is no number, or contradicts another; all are named."""

import json
import math
import sys

COUNTS = ["completed", "total_input_tokens", "total_output_tokens", "total_output_tokens_retokenized"]
RATES = {"request_throughput": "completed", "input_throughput": "total_input_tokens", "output_throughput": "total_output_tokens"}
LATENCIES = [f"{statistic}_{name}_ms" for name in ("e2e_latency", "ttft", "tpot", "itl")
             for statistic in ("mean", "median", "std", "p99")] + ["p90_e2e_latency_ms", "p95_itl_ms", "max_itl_ms"]
FIELDS = ["duration", *COUNTS, *RATES, "total_throughput", "concurrency", *LATENCIES]
OPTIONAL = {"total_throughput", "p90_e2e_latency_ms", "p95_itl_ms", "max_itl_ms", "total_output_tokens_retokenized"}


def faults(run, where):
    """What is wrong with one run's figures."""
    out = []
    for name in FIELDS:
        value = run.get(name)
        if value is None and name in OPTIONAL:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            out.append(f"{where}: {name} is {value!r}, not a number from 0 on")
    if out:
        return out
    if run["duration"] > 0:
        for rate, total in RATES.items():
            want = run[total] / run["duration"]
            if abs(run[rate] - want) > 0.01 * max(want, 1e-9):
                out.append(f"{where}: {rate} is {run[rate]}, {total} / duration is {want:.4g}")
        if run.get("total_throughput") is not None and abs(
                run["total_throughput"] - run["input_throughput"] - run["output_throughput"]) > 0.01 * run["total_throughput"]:
            out.append(f"{where}: total_throughput is not input_throughput plus output_throughput")
    for name in ("e2e_latency", "ttft", "tpot", "itl"):
        if run[f"median_{name}_ms"] > run[f"p99_{name}_ms"] * (1 + 1e-9):
            out.append(f"{where}: median_{name}_ms is above p99_{name}_ms")
    if run["mean_ttft_ms"] > run["mean_e2e_latency_ms"] * (1 + 1e-9):
        out.append(f"{where}: mean_ttft_ms is above mean_e2e_latency_ms")
    return out


def main(paths):
    runs, wrong = [], []
    for path in paths:
        with open(path, encoding="utf-8") as f:
            for number, line in enumerate(f, 1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                run = json.loads(line)
                wrong += faults(run, where)
                runs.append((where, run))
    if not runs:
        wrong.append("no figures in " + ", ".join(paths))
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    width = max(len(name) for name in FIELDS)
    print(" " * width, *(f"{where[-18:]:>18}" for where, _ in runs))
    for name in FIELDS:
        if any(run.get(name) is not None for _, run in runs):
            print(f"{name:<{width}}", *(f"{run[name]:18.2f}" if run.get(name) is not None else f"{'-':>18}" for _, run in runs))
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
