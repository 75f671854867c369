#!/usr/bin/env python3
"""Writes tests/data/text/byte_level_small.json: a byte-level BPE with hand-picked merges and one added token of each kind."""
import json
import os
import sys

PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+")


def byte_alphabet():
    same = list(range(0x21, 0x7F)) + list(range(0xA1, 0xAD)) + list(range(0xAE, 0x100))
    table, extra = {}, 0
    for b in range(256):
        if b in same:
            table[b] = chr(b)
        else:
            table[b] = chr(256 + extra)
            extra += 1
    return table


def main(path):
    vocab = {c: b for b, c in byte_alphabet().items()}
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "a a", "aa aa", "1 2", "12 3", "3 4", "123 4"]
    for i, m in enumerate(merges):
        vocab[m.replace(" ", "")] = 256 + i
    def added(i, content, **flags):
        base = {"id": i, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
                "special": True}
        return base | flags
    tokens = [added(267, "<|user|>"), added(268, "<|mask|>", lstrip=True), added(269, "<|r|>", rstrip=True),
              added(270, "tool", single_word=True, normalized=True, special=False), added(271, "<|ab"), added(272, "<|abc|>")]
    doc = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": tokens, "normalizer": None,
           "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
               {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False},
               {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]},
           "post_processor": None,
           "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
           "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                     "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                     "vocab": vocab, "merges": merges}}
    with open(path, "w", encoding="utf-8") as f:
        json.dump(doc, f, ensure_ascii=False, indent=1)
        f.write("\n")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else os.path.join(os.path.dirname(__file__), "../data/text/byte_level_small.json"))
