"""The memory budget of `sluice serve` in a control group of 2 GiB: what is planned fits, what cannot fit is refused before it is
reserved, and all of it is given back. `cgroup_test.py --can` tells by its exit status whether this process may make such a group.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import unittest

MIB, GIB = 1 << 20, 1 << 30
LIMIT = 2 * GIB


class Group:
    """A memory group below this process's own, v1 or v2."""

    def __init__(self):
        lines = [line.split(":", 2) for line in pathlib.Path("/proc/self/cgroup").read_text().split()]
        named = next((path for _, names, path in lines if "memory" in names.split(",")), None)
        self.v2 = named is None
        top = pathlib.Path("/sys/fs/cgroup" if self.v2 else "/sys/fs/cgroup/memory")
        own = top / (next((path for _, names, path in lines if not names), "/") if self.v2 else named).strip("/")
        self.path = (own if own.is_dir() else top) / f"sluice-test-{os.getpid()}"
        self.path.mkdir()
        try:
            (self.path / ("memory.max" if self.v2 else "memory.limit_in_bytes")).write_text(str(LIMIT))
        except OSError:
            self.path.rmdir()
            raise

    def command(self, *command):
        return ["/bin/sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$@"', "sh", *map(str, command)]

    def anonymous(self):
        stat = dict(line.split() for line in (self.path / "memory.stat").read_text().splitlines())
        return int(stat["anon" if self.v2 else "rss"])

    def close(self):
        for _ in range(100):
            try:
                return self.path.rmdir()
            except OSError:
                time.sleep(0.05)
        self.path.rmdir()


if __name__ == "__main__" and "--can" in sys.argv:
    try:
        Group().close()
    except OSError as e:
        sys.exit(f"no memory group: {e}")
    sys.exit(0)

from client import SLUICE, Server  # noqa: E402

FLAGS = ["--threads", "4", "--max-running-requests", "4", "--chunked-prefill-size", "256", "--enable-hierarchical-cache",
         "--speculative-algorithm", "NEXTN"]


def token_bytes(*flags):
    with tempfile.NamedTemporaryFile(suffix=".json") as f:
        subprocess.run([SLUICE, "inspect", *flags, "--json", f.name], check=True, capture_output=True, timeout=60)
        return json.load(f)["bytes_per_token"]["total"]


class Limited(unittest.TestCase):
    def setUp(self):
        self.group = Group()
        self.addCleanup(self.group.close)

    def serve(self, *flags):
        return self.group.command(SLUICE, "serve", "--port", "0", *FLAGS, *flags)

    def planned(self, server):
        """(bytes of everything, host tokens) of the plan that the log tells."""
        line = next(line for line in server.log_text().splitlines() if "memory: budget" in line)
        budget, weights, working, device, host = (float(v) * GIB for v in re.findall(
            r"budget ([\d.]+) GiB = weights ([\d.]+) \+ working ([\d.]+) \+ device pages ([\d.]+) .*? host pages ([\d.]+)", line)[0])
        self.assertLessEqual(budget, LIMIT, line)
        return weights + working + device + host, int(re.search(r"host pages [\d.]+ \((\d+) tokens", line).group(1))

    def test_one_budget_for_all_ranks_and_rows_is_kept_or_refused(self):
        each = token_bytes("--speculative-algorithm", "NEXTN")
        page = 64 * each
        for ranks in (1, 4):
            for stated in (100 * MIB, GIB, 4 * GIB, 0, (page - 1) * ranks):
                flags = ["--attn-cp-size", ranks, "--hicache-size", f"{stated / ranks / 1e9:.9f}"]
                if stated in (100 * MIB, GIB):
                    flags += ["--max-total-tokens", 32768]
                command = self.serve(*flags)
                if stated in (4 * GIB, (page - 1) * ranks):
                    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
                    self.assertNotEqual(done.returncode, 0, flags)
                    self.assertIn("--hicache-size", done.stderr, flags)
                    self.assertLess(self.group.anonymous(), 16 * MIB)
                    continue
                with Server(command) as server:
                    everything, host_tokens = self.planned(server)
                    self.assertLessEqual(everything, LIMIT, flags)
                    self.assertGreater(host_tokens, 0)
                    if stated:
                        self.assertLessEqual(host_tokens * each, stated, flags)
                        self.assertGreater(host_tokens * each, stated - ranks * page, flags)
                    self.assertLess(self.group.anonymous(), LIMIT)
                    self.assertTrue(server.post("/generate", {"input_ids": [5] * 200, "sampling_params": {"max_new_tokens": 4}})[0] == 200)

    def test_full_tiers_take_what_was_planned_and_give_it_back(self):
        flags = ["--max-total-tokens", 8192, "--hicache-size", f"{16 * MIB / 1e9:.9f}"]
        with Server(self.serve(*flags)) as server:
            host_tokens = self.planned(server)[1]
            self.assertTrue(server.post("/generate", {"input_ids": [7] * 300, "sampling_params": {"max_new_tokens": 2}})[0] == 200)
            before = self.group.anonymous()
            for turn in range((8192 + host_tokens) // 2048 + 1):
                ids = [(i * 7 + turn * 131) % 1900 + 3 for i in range(2048)]
                self.assertEqual(server.post("/generate", {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}}, timeout=60)[0], 200)
            pages = server.wait_idle()["cache"]["host_pages"]
            self.assertGreater(pages["cached"], 0.9 * pages["all"])
            each = token_bytes("--speculative-algorithm", "NEXTN")
            self.assertLess(self.group.anonymous(), before + (8192 + host_tokens) * each + 48 * MIB)
        self.assertLess(self.group.anonymous(), 16 * MIB)


if __name__ == "__main__":
    unittest.main(verbosity=2, warnings="ignore")
