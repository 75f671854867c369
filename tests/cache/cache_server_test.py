"""`sluice serve` with all cache tiers, from outside. What it says must not depend on where the rows came from."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import time
import unittest

from client import SLUICE, Server, request_bytes

SMALL = ["--port", "0", "--threads", "1", "--max-total-tokens", "32768", "--chunked-prefill-size", "256",
         "--max-running-requests", "8"]


def tiers(folder, *more):
    return [*SMALL, "--enable-hierarchical-cache", "--hicache-storage-backend", "file",
            "--hicache-storage-backend-extra-config", json.dumps({"directory": str(folder)}),
            "--hicache-storage-prefetch-policy", "wait_complete", *more]


def prompt(n, salt=0):
    return [(i * 7 + salt * 131) % 1900 + 3 for i in range(n)]


def ask(server, ids, **more):
    """(what was said, cached tokens by tier) of a greedy answer."""
    status, answer = server.post("/generate", {"input_ids": ids, "return_logprob": True, "return_cached_tokens_details": True,
                                               "sampling_params": {"temperature": 0, "max_new_tokens": 4}, **more}, timeout=60)
    assert status == 200, answer
    meta = answer["meta_info"]
    cached = meta["cached_tokens_details"]
    assert meta["cached_tokens"] == sum(cached.get(t, 0) for t in ("device", "host", "storage")) < len(ids)
    return (answer["text"], meta["output_token_logprobs"]), cached


def metric(server, name):
    text = server.call("GET", "/metrics")[2].decode()
    return float(re.search(rf"^sluice:{name}(?:{{[^}}]*}})? (\S+)", text, re.M).group(1))


def objects(folder):
    """Written whole: temporary files lie in tmp/."""
    return {p for p in pathlib.Path(folder).rglob("*")
            if "tmp" not in p.relative_to(folder).parts and p.is_file() and p.stat().st_size > 100_000}


def settle(server, folder, want, seconds=20):
    """Waits until storage holds at least `want` objects and nothing is on its way."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if len(objects(folder)) >= want and server.wait_idle()["cache"]["pending_backups"] == 0:
            return
        time.sleep(0.02)
    raise AssertionError(f"{len(objects(folder))} objects after {seconds} s, {want} are wanted")


class Folder(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="sluice-cache-test-")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)


class Prefixes(unittest.TestCase):
    def test_prefixes_of_a_cached_prompt_say_what_they_say_alone(self):
        base = prompt(700)
        asked = [base[:n] for n in (1, 63, 64, 65, 127, 128, 255, 256, 257, 699, 700)]
        asked += [base + [11], base[:-1] + [base[-1] + 1]]
        other = prompt(2000, salt=5)
        with Server([SLUICE, "serve", *SMALL, "--disable-radix-cache"]) as plain:
            want = [ask(plain, ids)[0] for ids in asked]
            want_other = ask(plain, other)[0]
        for more in ([], ["--speculative-algorithm", "NEXTN"]):
            with Server([SLUICE, "serve", *SMALL, *more]) as server:
                ask(server, base)
                for ids, right in zip(asked, want):
                    for _ in range(2):
                        said, cached = ask(server, ids)
                        self.assertEqual(said, right, f"{len(ids)} tokens {more}")
                        self.assertEqual(cached["device"], min((len(ids) - 1) // 64, 10) * 64, f"{len(ids)} tokens {more}")
                # A client that leaves in the middle of the chunks: only what was computed may be a hit.
                body = json.dumps({"input_ids": other, "stream": True, "sampling_params": {"temperature": 0}}).encode()
                steps = metric(server, "engine_steps_total")
                with server.connect() as s:
                    s.sendall(request_bytes("POST", "/generate", body))
                    while metric(server, "engine_steps_total") < steps + 1:
                        time.sleep(0.002)
                server.wait_idle()
                said, cached = ask(server, other)
                self.assertEqual(said, want_other, more)
                self.assertEqual(cached["device"] % 64, 0)


class Salts(unittest.TestCase):
    def test_namespaces_share_nothing_and_bad_salts_are_refused(self):
        ids = prompt(20 * 64)
        with Server([SLUICE, "serve", *SMALL]) as server:
            hits = [ask(server, ids, cache_salt=s)[1]["device"] for s in ("a", "a", "b")]
            hits += [ask(server, ids)[1]["device"], ask(server, ids)[1]["device"], ask(server, ids, cache_salt="b")[1]["device"]]
            self.assertEqual(hits, [0, 19 * 64, 0, 0, 19 * 64, 19 * 64])
            computed = [metric(server, "engine_prompt_tokens_total"), metric(server, "cache_hit_rate")]
            self.assertAlmostEqual(computed[0] * computed[1], sum(hits), delta=1)  # nothing but what usage tells was spared
            for bad in (5, ["a"], "", "x" * 10_000):
                status, answer = server.post("/generate", {"input_ids": ids, "cache_salt": bad})
                self.assertEqual(status, 400, bad)
                self.assertIn("cache_salt", answer["error"]["message"])


class Storage(Folder):
    def test_another_process_hits_what_a_killed_one_stored(self):
        ids = prompt(700)
        with Server([SLUICE, "serve", *tiers(self.folder)]) as first:
            said, cached = ask(first, ids)
            self.assertEqual(sum(cached.values()), 0)
            settle(first, self.folder, 10)
            first.process.kill()
        for more in ([], ["--hicache-mem-layout", "page_first_direct"], ["--hicache-mem-layout", "layer_page_first"],
                     ["--hicache-mem-layout", "page_first", "--hicache-io-backend", "kernel"], ["--attn-cp-size", "2"]):
            with Server([SLUICE, "serve", *tiers(self.folder, *more)]) as second:
                again, cached = ask(second, ids)
                self.assertEqual(again, said, more)
                self.assertEqual(cached["storage"], 640, more)
        with Server([SLUICE, "serve", *tiers(self.folder, "--kv-cache-dtype", "fp8_e4m3")]) as other:
            self.assertEqual(sum(ask(other, ids)[1].values()), 0)

    def test_damaged_objects_are_misses_and_the_answer_is_the_same(self):
        def flip(p):
            data = bytearray(p.read_bytes())
            data[len(data) // 2] ^= 16
            p.write_bytes(data)

        def append(p):
            with p.open("ab") as f:
                f.write(b"x")

        def swap(p, q):
            a, b = p.read_bytes(), q.read_bytes()
            p.write_bytes(b)
            q.write_bytes(a)

        damage = {"empty": lambda p, q: os.truncate(p, 0), "one byte": lambda p, q: os.truncate(p, 1),
                  "short": lambda p, q: os.truncate(p, p.stat().st_size - 1), "long": lambda p, q: append(p),
                  "one bit": lambda p, q: flip(p), "swapped": swap,
                  "a folder": lambda p, q: (p.unlink(), p.mkdir()), "gone": lambda p, q: p.unlink()}
        said, files = {}, {}
        with Server([SLUICE, "serve", *tiers(self.folder)]) as first:
            for i, name in enumerate(damage):
                before = objects(self.folder)
                said[name] = ask(first, prompt(330, salt=i + 1))[0]
                settle(first, self.folder, len(before) + 5)
                files[name] = sorted(objects(self.folder) - before)
            first.terminate()
            first.process.wait(30)
        for name, harm in damage.items():
            harm(files[name][0], files[name][1])
        with Server([SLUICE, "serve", *tiers(self.folder)]) as second:
            for i, name in enumerate(damage):
                again, cached = ask(second, prompt(330, salt=i + 1))
                self.assertEqual(again, said[name], name)
                self.assertLess(cached["storage"], 320, name)
                self.assertEqual(cached["storage"] % 64, 0, name)
            self.assertGreaterEqual(metric(second, "storage_errors_total"), 5)
            self.assertTrue(second.alive())

    def test_killed_writers_leave_nothing_that_is_wrong(self):
        said = None
        for life in range(6):
            with Server([SLUICE, "serve", *tiers(self.folder)]) as server:
                for salt in range(3):
                    got = ask(server, prompt(700, salt=salt + 20))
                    if salt == 0:
                        said = said or got[0]
                        self.assertEqual(got[0], said)
                time.sleep(0.004 * life)
                server.process.send_signal(signal.SIGKILL)

    def test_two_servers_on_one_folder(self):
        ids = prompt(500, salt=3)
        with Server([SLUICE, "serve", *tiers(self.folder)]) as a, Server([SLUICE, "serve", *tiers(self.folder)]) as b:
            said = ask(a, ids)[0]
            settle(a, self.folder, 7)
            again, cached = ask(b, ids)
            self.assertEqual(again, said)
            self.assertEqual(cached["storage"], 448)
            self.assertEqual(a.call("POST", "/hicache/storage-backend/clear")[0], 200)
            self.assertEqual(b.call("POST", "/flush_cache")[0], 200)
            again, cached = ask(b, ids)
            self.assertEqual(again, said)
            self.assertEqual(sum(cached.values()), 0)

    def test_storage_is_attached_and_detached_while_the_server_runs(self):
        ids = prompt(500, salt=4)
        flags = [*SMALL, "--enable-hierarchical-cache", "--hicache-storage-prefetch-policy", "wait_complete",
                 "--admin-api-key", "boss"]
        admin = ["Authorization: Bearer boss"]
        with Server([SLUICE, "serve", *flags]) as server:
            def storage(method, body=None, headers=admin):
                status, _, text = server.call(method, "/hicache/storage-backend", body, headers=headers)
                return status, json.loads(text)

            self.assertEqual(storage("GET", headers=())[0], 401)
            self.assertEqual(storage("GET")[1]["attached"], False)
            self.assertEqual(storage("DELETE")[0], 404)
            self.assertEqual(storage("PUT", {"hicache_storage_backend": "nixl"})[0], 400)
            self.assertEqual(storage("PUT", {"hicache_storage_backend": "file", "typo": "x"})[0], 400)
            file = {"hicache_storage_backend": "file", "hicache_storage_backend_extra_config_json": {"directory": self.folder}}
            said = ask(server, ids)[0]  # in the host tier before there is storage
            server.wait_idle()
            status, state = storage("PUT", file)
            self.assertEqual((status, state["attached"]), (200, True), state)
            self.assertEqual(storage("PUT", file)[0], 409)
            settle(server, self.folder, 7)
            self.assertEqual(server.call("POST", "/flush_cache", headers=admin)[0], 200)
            again, cached = ask(server, ids)
            self.assertEqual((again, cached["storage"]), (said, 448))
            server.wait_idle()
            self.assertEqual(storage("DELETE")[1]["attached"], False)
            self.assertEqual(server.call("POST", "/flush_cache", headers=admin)[0], 200)
            again, cached = ask(server, ids)
            self.assertEqual((again, sum(cached.values())), (said, 0))


class Redis(Folder):
    def test_another_server_hits_what_lies_in_redis(self):
        address = f"{self.folder}/redis.sock"
        redis = subprocess.Popen(["redis-server", "--port", "0", "--unixsocket", address, "--save", "", "--appendonly", "no", "--dir",
                                  self.folder], stdout=subprocess.DEVNULL)
        self.addCleanup(redis.wait)
        self.addCleanup(redis.kill)
        until = time.monotonic() + 20
        while not os.path.exists(address) and time.monotonic() < until:
            time.sleep(0.02)
        flags = [*SMALL, "--enable-hierarchical-cache", "--hicache-storage-prefetch-policy", "wait_complete",
                 "--hicache-storage-backend", "redis", "--hicache-storage-backend-extra-config", json.dumps({"unix_socket": address})]
        ids = prompt(700, salt=9)
        with Server([SLUICE, "serve", *flags]) as first:
            said = ask(first, ids)[0]
            until = time.monotonic() + 20
            while not 0 < metric(first, "hicache_backup_bytes_total") == metric(first, "storage_write_bytes_total"):
                self.assertLess(time.monotonic(), until)
                time.sleep(0.02)
            first.process.kill()
        with Server([SLUICE, "serve", *flags, "--hicache-mem-layout", "page_first_direct"]) as second:
            again, cached = ask(second, ids)
            self.assertEqual((again, cached["storage"]), (said, 640))
            second.wait_idle()
            redis.kill()
            redis.wait()
            other = prompt(700, salt=10)  # storage that is gone costs misses only
            self.assertEqual(sum(ask(second, other)[1].values()), 0)
            self.assertTrue(second.alive())


class Checks(Folder):
    def test_verified_hits_are_counted_and_equal(self):
        with Server([SLUICE, "serve", *SMALL, "--verify-cache", "1", "--kv-cache-dtype", "fp8_e4m3"]) as server:
            for salt in range(3):
                said = ask(server, prompt(300, salt))[0]
                for _ in range(2):
                    self.assertEqual(ask(server, prompt(300, salt))[0], said)
            until = time.monotonic() + 20
            while metric(server, "verified_pages_total") < 12 and time.monotonic() < until:
                time.sleep(0.05)
            self.assertGreaterEqual(metric(server, "verified_pages_total"), 12)
            self.assertEqual(metric(server, "verify_differences_total"), 0)
            self.assertEqual(server.call("POST", "/flush_cache")[0], 200)  # also right behind a verification
            self.assertNotIn("verify-cache:", server.log_text())

    def test_records_are_written_under_the_requests_name_and_only_when_asked_for(self):
        with Server([SLUICE, "serve", *SMALL, "--debug-kv"]) as server:
            ask(server, prompt(300), rid="first")
            ask(server, prompt(300), rid="second")
            log = server.log_text()
        self.assertRegex(log, r"kv first match: 300 tokens #\w+; l1 0, l2 0, l3 0, to compute 300")
        self.assertRegex(log, r"kv first insert: ")
        self.assertRegex(log, r"kv second match: 300 tokens #\w+; l1 256, l2 0, l3 0, to compute 44")
        with Server([SLUICE, "serve", *SMALL]) as server:
            ask(server, prompt(300))
            self.assertNotIn("match:", server.log_text())

    def test_a_host_tier_that_cannot_be_is_refused_at_start(self):
        for flags, says in ((["--hicache-size", "100000"], "--hicache-size"),
                            (["--hicache-size", "0.0000001"], "--hicache-size"),
                            (["--hicache-mem-layout", "layer_page_first", "--hicache-io-backend", "kernel"], "use --hicache-io-backend direct"),
                            (["--hicache-mem-layout", "page_first"], "use --hicache-io-backend kernel")):
            done = subprocess.run([SLUICE, "serve", *SMALL, "--enable-hierarchical-cache", *flags], capture_output=True, text=True,
                                  timeout=60)
            self.assertNotEqual(done.returncode, 0, flags)
            self.assertIn(says, done.stderr, flags)

    def test_a_host_tier_too_small_for_a_request_is_said_at_start(self):
        with Server([SLUICE, "serve", *SMALL, "--enable-hierarchical-cache", "--hicache-ratio", "0.0001", "--speculative-num-steps",
                     "2"]) as server:
            log = server.log_text()
        self.assertRegex(log, r"the host tier holds 64 tokens, fewer than a request of \d+: .*; raise --hicache-ratio")
        self.assertIn("--speculative-num-steps 2 has no effect here: nothing is drafted; add --speculative-algorithm NEXTN", log)


if __name__ == "__main__":
    unittest.main(verbosity=2, warnings="ignore")
