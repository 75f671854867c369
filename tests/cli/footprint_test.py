"""Memory of a server that has answered, and the installed tree.

  footprint_test.py SLUICE BUILD_DIR
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

SLUICE = os.path.abspath(sys.argv.pop(1))
BUILD = os.path.abspath(sys.argv.pop(1))
MIB = 1 << 20


class Footprint(unittest.TestCase):
    def start(self, *flags, sluice=SLUICE, cwd=None):
        r = subprocess.run([sluice, "bench", "start", "--fill-tokens", "8192", "--check-memory", "--json", "-", "--", "--threads",
                            "2", *flags], capture_output=True, text=True, timeout=120, check=False, cwd=cwd)
        self.assertEqual(r.returncode, 0, r.stdout + r.stderr)
        return json.loads(r.stdout)

    def test_memory_is_weights_and_used_cache_and_little_else(self):
        for flags in ([], ["--kv-cache-dtype", "fp8_e4m3"]):
            r = self.start(*flags)
            self.assertGreaterEqual(r["cached_tokens"], 8192)
            self.assertGreater(r["committed_kv_bytes"], 8 * MIB)
            # The weights are there once: 28 million, FP8 for the most part.
            self.assertLess(r["weight_bytes"], 60 * MIB)
            self.assertLess(r["rss_bytes"], r["weight_bytes"] + r["committed_kv_bytes"] + 300 * MIB)
            # The pool itself is far larger than what is used of it.
            self.assertLess(r["rss_bytes_idle"], r["weight_bytes"] + 300 * MIB)

    def test_an_installed_tree_serves_its_model_from_anywhere(self):
        with tempfile.TemporaryDirectory() as folder:
            prefix = pathlib.Path(folder) / "prefix"
            subprocess.run(["cmake", "--install", BUILD, "--prefix", prefix], check=True, capture_output=True, timeout=60)
            moved = pathlib.Path(folder) / "moved"
            prefix.rename(moved)
            sluice = moved / "bin" / "sluice"
            files = {str(p.relative_to(moved)) for p in moved.rglob("*") if p.is_file()}
            for name in ("bin/sluice", "share/doc/sluice/LICENSE", "share/sluice/models/ledger-28m-fp8/config.json"):
                self.assertIn(name, files)
            self.assertFalse([f for f in files if f.endswith((".a", ".h", ".cc"))])
            said = subprocess.run([sluice, "inspect"], capture_output=True, text=True, timeout=60, check=False, cwd=folder)
            self.assertEqual(said.returncode, 0, said.stderr)
            self.start(sluice=str(sluice), cwd=folder)
            # Not by way of the source tree that it was built from.
            (moved / "share" / "sluice" / "models").rename(moved / "share" / "sluice" / "gone")
            lost = subprocess.run([sluice, "inspect"], capture_output=True, text=True, timeout=60, check=False, cwd=folder)
            self.assertEqual(lost.returncode, 3, lost.stdout + lost.stderr)
            self.assertIn("--model-path", lost.stderr)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
