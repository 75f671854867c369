"""What a bound answer costs: 16 at once under a JSON schema against 16 without, in alternating rounds of one run.

  bound_speed.py URL      a running server; prints tokens per second of both and their ratio. Not a test: times depend on
                          the machine.
"""

import json
import sys
import threading
import time
import urllib.request

ROW = {"type": "object", "properties": {"name": {"type": "string", "minLength": 4, "maxLength": 12},
                                        "n": {"type": "integer", "minimum": 0, "maximum": 9999}}, "required": ["name", "n"]}
SCHEMA = {"type": "object", "properties": {"rows": {"type": "array", "items": ROW, "minItems": 60, "maxItems": 60}},
          "required": ["rows"]}
BATCH, ROUNDS = 16, 5


def one(url, bound, seed, tokens):
    body = {"prompt": f"Ledger {seed}: Mara has red apples: 17.", "max_tokens": 300, "temperature": 1, "seed": seed}
    body.update({"json_schema": SCHEMA} if bound else {"ignore_eos": True})
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        tokens.append(json.load(answer)["usage"]["completion_tokens"])


def rate(url, bound):
    tokens, begin = [], time.monotonic()
    threads = [threading.Thread(target=one, args=(url, bound, i, tokens)) for i in range(BATCH)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return sum(tokens) / (time.monotonic() - begin)


def main():
    url = sys.argv[1].rstrip("/")
    rate(url, True), rate(url, False)
    ratios = []
    for _ in range(ROUNDS):
        bound, free = rate(url, True), rate(url, False)
        ratios.append(bound / free)
        print(f"bound {bound:.0f} tokens/s, free {free:.0f} tokens/s, ratio {bound / free:.3f}")
    print(f"median ratio {sorted(ratios)[ROUNDS // 2]:.3f}")


main()
