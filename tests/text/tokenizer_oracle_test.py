#!/usr/bin/env python3
"""Compares Sluice's tokenizer with the reference implementation (PyPI `tokenizers`, checked with 0.23.3): 0 differences allowed.

    tokenizer_oracle_test.py TEXT_PROBE SOURCE_DIR [--rounds N] [--seed S]
"""
import argparse
import copy
import json
import os
import random
import sys
import tempfile

from tokenizers import Tokenizer

from probe import Probe

FAILURES = 0
CHECKED = 0


def compare(probe, path, oracle, texts, special=True):
    global FAILURES, CHECKED
    got = probe.ask(op="encode", tokenizer=path, texts=texts, special=special)["ids"]
    for text, ids in zip(texts, got):
        want = oracle.encode(text, add_special_tokens=False).ids
        CHECKED += 1
        if ids != want:
            FAILURES += 1
            if FAILURES <= 10:
                at = next((i for i, (a, b) in enumerate(zip(ids, want)) if a != b), min(len(ids), len(want)))
                print(f"encode differs ({os.path.basename(path)}) at {at}: {text[:200]!r}\n  got  {ids[at:at + 20]}\n  want {want[at:at + 20]}")


def compare_decode(probe, path, oracle, lists):
    global FAILURES, CHECKED
    for skip in (False, True):
        got = probe.ask(op="decode", tokenizer=path, ids=lists, skip=skip)["texts"]
        for ids, text in zip(lists, got):
            want = oracle.decode(ids, skip_special_tokens=skip)
            CHECKED += 1
            if text != want:
                FAILURES += 1
                if FAILURES <= 10:
                    print(f"decode differs ({os.path.basename(path)}) {ids}: got {text!r} want {want!r}")


def assigned(cp):
    return not 0xD800 <= cp <= 0xDFFF


def random_text(r, added):
    kind = r.randrange(8)
    n = r.choice([1, 2, 5, 20, 80])
    if kind == 0:
        return "".join(r.choice("helo wrdHELOa1234'sST \n\r\t.,!?<|>") for _ in range(n))
    if kind == 1:
        return "".join(chr(r.choice([r.randrange(0x80), r.randrange(0x800), r.randrange(0x3000), r.randrange(0x4E00, 0x9FFF)])) for _ in range(n))
    if kind == 2:
        return "".join(chr(cp) for cp in (r.randrange(0x110000) for _ in range(n)) if assigned(cp))
    if kind == 3:
        return "".join(r.choice(added + ["a", " ", "  ", "\n", "tool", "x", "é", "_", "9", "\u3000"]) for _ in range(n))
    if kind == 4:
        return "".join(r.choice(["don't", "I'll", "we'VE", " 's", "'S", "\u017f", "'\u017f", "12345", "½", "²", "٣", " ", "\u00a0", "\u180e", "\u200b", "\u0301", "e\u0301"]) for _ in range(n))
    if kind == 5:
        return "def f(x):\n    return {'a': [x, 1.5e-3]}  # ok\n" * r.randrange(1, 4)
    if kind == 6:
        return "".join(r.choice(["日本語", "テスト", "한국어", "Привет", "العربية", "ไทย", "हिन्दी", "🤗", "👩‍👩‍👧", "é", " "]) for _ in range(n))
    return r.choice(["a", "ab", " ", "\n", "語", "QmFz", "aé"]) * r.choice([10, 100, 1000])


def every_character():
    """Each code point that may be assigned, in small contexts (of the large ideographic planes every 16th)."""
    texts, line = [], []
    for cp in [*range(0x20000), *range(0x20000, 0x34000, 16), *range(0xE0000, 0xE0200), 0xF0000, 0x10FFFF]:
        if not assigned(cp):
            continue
        c = chr(cp)
        line.append(f"a{c}b {c}{c}1{c} .{c}\n")
        if len(line) == 256:
            texts.append("".join(line))
            line = []
    texts.append("".join(line))
    return texts


def variants(base):
    """The small tokenizer with other components; each is (name, document)."""
    def make(name, **changes):
        doc = copy.deepcopy(base)
        for key, value in changes.items():
            doc[key] = value
        return name, doc
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    yield make("plain")
    yield make("nfc", normalizer={"type": "NFC"})
    yield make("nfc-sequence", normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}]})
    yield make("byte-level-regex", pre_tokenizer=dict(byte_level, use_regex=True))
    yield make("prefix-space", pre_tokenizer=dict(byte_level, use_regex=True, add_prefix_space=True))
    yield make("prefix-space-no-regex", pre_tokenizer=dict(byte_level, add_prefix_space=True))
    for individual in (False, True):
        yield make(f"digits-{individual}", pre_tokenizer={"type": "Sequence", "pretokenizers": [
            {"type": "Digits", "individual_digits": individual}, byte_level]})
    deepseek = ["\\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+",
                "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"]
    yield make("deepseek-splits", pre_tokenizer={"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": p}, "behavior": "Isolated", "invert": False} for p in deepseek] + [byte_level]})
    for behavior in ("Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"):
        for invert in (False, True):
            for pattern in ({"Regex": "\\s+|[aé]"}, {"String": "a."}, {"Regex": "(?=l)"}):
                yield make(f"split-{behavior}-{invert}-{list(pattern.values())[0]}", pre_tokenizer={"type": "Sequence", "pretokenizers": [
                    {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert}, byte_level]})
    doc = copy.deepcopy(base)
    doc["model"]["merges"] = [m.split(" ") for m in doc["model"]["merges"]]
    doc["model"]["ignore_merges"] = True
    # Ids must stay without gaps: the reference renumbers added tokens otherwise.
    doc["model"]["vocab"]["xyz"] = 267
    for token in doc["added_tokens"]:
        token["id"] += 1
    doc["added_tokens"] += [
        {"id": 274, "content": "é|", "single_word": False, "lstrip": True, "rstrip": True, "normalized": True, "special": False},
        {"id": 275, "content": "wörd", "single_word": True, "lstrip": False, "rstrip": False, "normalized": False, "special": False},
        {"id": 276, "content": "both", "single_word": True, "lstrip": True, "rstrip": True, "normalized": False, "special": True}]
    yield "added-flags", doc
    yield "added-flags-nfc", dict(doc, normalizer={"type": "NFC"})


def fallback_tokenizer():
    vocab = {"<unk>": 0}
    for b in range(256):
        vocab[f"<0x{b:02X}>"] = len(vocab)
    for c in "▁helowrdabc":
        vocab[c] = len(vocab)
    merges = []
    for left, right in [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "w"), ("▁", "hello")]:
        merges.append([left, right])
        vocab[left + right] = len(vocab)
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "pre_tokenizer": None,
            "post_processor": None,
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
            "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None, "end_of_word_suffix": None,
                      "fuse_unk": True, "byte_fallback": True, "ignore_merges": False, "vocab": vocab, "merges": merges}}


def random_tokenizer(r):
    """A vocabulary from random merges over a small alphabet: many overlapping rules, so order matters."""
    vocab, merges = {}, []
    alphabet = "abcd"
    import string
    base = json.load(open(os.path.join(SOURCE, "tests/data/text/byte_level_small.json")))
    for token, i in base["model"]["vocab"].items():
        if i < 256:
            vocab[token] = i
    tokens = list(alphabet)
    while len(merges) < 120:
        left, right = r.choice(tokens), r.choice(tokens)
        if left + right in vocab or len(left + right) > 9:
            continue
        vocab[left + right] = len(vocab)
        merges.append([left, right])
        tokens.append(left + right)
    r.shuffle(merges)
    base["model"]["vocab"], base["model"]["merges"], base["added_tokens"] = vocab, merges, []
    base["pre_tokenizer"] = base["pre_tokenizer"]["pretokenizers"][1]
    return base


def main():
    global SOURCE
    parser = argparse.ArgumentParser()
    parser.add_argument("probe")
    parser.add_argument("source")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    SOURCE = args.source
    probe = Probe(args.probe)
    r = random.Random(args.seed)
    bundled = os.path.join(args.source, "models/ledger-28m-fp8/tokenizer.json")
    small = json.load(open(os.path.join(args.source, "tests/data/text/byte_level_small.json")))

    with tempfile.TemporaryDirectory() as folder:
        def run(path, added, rounds, everything):
            oracle = Tokenizer.from_file(path)
            texts = [random_text(r, added) for _ in range(rounds)]
            compare(probe, path, oracle, texts)
            if everything:
                compare(probe, path, oracle, every_character())
            size = oracle.get_vocab_size(True)
            lists = [[r.randrange(size) for _ in range(r.choice([1, 3, 10]))] for _ in range(rounds)]
            lists += [[r.choice([r.randrange(0x80, 0x100), r.randrange(size)]) for _ in range(6)] for _ in range(rounds)]
            if "fallback" not in path:
                compare_decode(probe, path, oracle, lists)
            else:  # broken runs of byte tokens are kept better than the reference does, so only whole ones are compared
                compare_decode(probe, path, oracle, [oracle.encode(t, add_special_tokens=False).ids for t in texts])

        added = [t["content"] for t in json.load(open(bundled))["added_tokens"]]
        run(bundled, added, args.rounds * 4, True)
        docs = ["data/eval/ledger_qa.jsonl"]
        oracle = Tokenizer.from_file(bundled)
        for doc in docs:
            with open(os.path.join(args.source, "tests", doc), encoding="utf-8") as f:
                for line in f.readlines()[:40]:
                    compare(probe, bundled, oracle, [m["content"] for m in json.loads(line)["messages"]])
        long_runs = [unit * (20000 // len(unit)) for unit in ("a", "ab", "語", " ", "\n", "QmFz", "the", "aé", " a")]
        long_runs.append("".join(r.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(20000)))
        compare(probe, bundled, oracle, long_runs)

        cases = list(variants(small)) + [("fallback", fallback_tokenizer())]
        cases += [(f"random-{i}", random_tokenizer(r)) for i in range(8)]
        for name, doc in cases:
            path = os.path.join(folder, "".join(c if c.isalnum() else "_" for c in name) + f"_{len(name)}.json")
            with open(path, "w", encoding="utf-8") as f:
                json.dump(doc, f, ensure_ascii=False)
            added = [t["content"] for t in doc["added_tokens"]] or ["x"]
            run(path, added, args.rounds, name in ("plain", "nfc", "byte-level-regex", "deepseek-splits"))
            if name.startswith("random"):
                words = ["".join(r.choice("abcd") for _ in range(r.choice([3, 10, 47, 48, 49, 64, 65, 300]))) for _ in range(200)]
                compare(probe, path, Tokenizer.from_file(path), words)
    print(f"{CHECKED} texts compared, {FAILURES} differ")
    return 1 if FAILURES or not CHECKED else 0


if __name__ == "__main__":
    sys.exit(main())
