"""The command line of the built program: exit codes, help, and that bad input is one clear line and never a trace.

  cli_test.py SLUICE
"""

import json
import os
import pty
import re
import subprocess
import sys
import tempfile
import unittest

from other_server import other_server

SLUICE = os.path.abspath(sys.argv.pop(1))
SOURCE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def run(*args, **kwargs):
    with tempfile.TemporaryDirectory() as elsewhere:  # nothing may depend on the working directory
        return subprocess.run([SLUICE, *args], capture_output=True, text=True, timeout=60, check=False,
                              cwd=elsewhere, **kwargs)


def commands():
    listed = re.findall(r"^  ([a-z]+(?: [a-z]+)?)  +\S", run("--help").stdout, re.M)
    assert listed, "no commands in --help"
    return listed


class CommandLine(unittest.TestCase):
    def assert_usage_error(self, result, *texts):
        self.assertEqual(result.returncode, 2, result.stderr)
        for text in texts:
            self.assertIn(text, result.stderr)
        self.assertNotIn(": check failed: ", result.stderr)
        self.assertNotIn("terminate called", result.stderr)

    def test_version(self):
        result = run("--version")
        self.assertEqual(result.returncode, 0)
        self.assertRegex(result.stdout, r"^sluice \d+\.\d+\.\d+\ncommit   \w+\S*\ncompiler \S+ \S+ \(\w+\)\nbackends \w+")

    def test_no_command_is_a_usage_error(self):
        self.assert_usage_error(run(), "usage: sluice <command>")

    def test_unknown_command(self):
        self.assert_usage_error(run("serv"), "unknown command 'serv'")

    def test_group_alone_lists_its_members(self):
        self.assertTrue(any(c.startswith("bench ") for c in commands()))
        self.assert_usage_error(run("bench"), "sluice bench ")
        self.assertEqual(run("bench", "--help").returncode, 0)

    def test_help_of_every_command(self):
        for command in commands():
            for words in [command.split() + ["--help"], ["help"] + command.split()]:
                result = run(*words)
                self.assertEqual(result.returncode, 0, f"{words}: {result.stderr}")
                self.assertIn(f"sluice {command}", result.stdout)
                self.assertEqual(result.stderr, "")

    def test_unknown_flag_of_every_command(self):
        for command in commands():
            result = run(*command.split(), "--no-such-flag")
            self.assert_usage_error(result, "--no-such-flag")
            lines = result.stderr.splitlines()
            self.assertTrue(lines[0].startswith(f"sluice {command}: "), result.stderr)
            self.assertEqual(lines[1:], [f"see: sluice {command} --help"])
            self.assertEqual(result.stdout, "")

    def test_help_has_one_form(self):
        for command in commands():
            text = run(*command.split(), "--help").stdout
            lines = text.splitlines()
            self.assertRegex(lines[0], rf"^usage: sluice {command}( [A-Z\[-].*)? \[options\]", text)
            self.assertEqual(lines[1], "")
            self.assertGreater(len(lines[2]), 10, text)  # what it does
            self.assertIn("\nOptions:\n  --" if command != "serve" else "\nHTTP:\n  --", text)
            self.assertTrue(all(c.isprintable() for line in lines for c in line), f"{command}: {text!r}")
            for foreign in ("ENUM", "INT", "FLOAT", "REQUIRED", "NONNEGATIVE", "OPTIONS"):
                self.assertNotRegex(text, rf"\b{foreign}\b")
        replay = run("replay", "--help").stdout
        self.assertIn("--hicache-storage-prefetch-policy best_effort|timeout|wait_complete", replay)
        self.assertIn("lanes of the pools; 1 to 8 [1]", replay)
        self.assert_usage_error(run("replay", "-", "--schedule-policy", "lof"), "lof", "fcfs")

    def test_what_is_missing_is_named(self):
        self.assert_usage_error(run("plan"), "sluice plan: CONFIG is missing; usage: sluice plan CONFIG [options]")
        self.assert_usage_error(run("simulate"), "sluice simulate: nothing to run; give --seeds A..B or --replay SEED")
        self.assert_usage_error(run("replay"), "sluice replay: TRACE is missing; give a file")
        self.assert_usage_error(run("bench", "serving"), "usage: sluice bench serving URL [options]")
        self.assert_usage_error(run("eval"), "usage: sluice eval MODEL|URL --dataset FILE|--golden DIR [options]")

    def test_urls_of_servers(self):
        dataset = os.path.join(SOURCE, "tests", "data", "eval", "gsm8k_style.jsonl")
        for words in (["chat"], ["bench", "serving"], ["eval", "--dataset", dataset], ["router", "--worker"]):
            self.assert_usage_error(run(*words, "ftp://x"), "ftp://x: only http:// is supported; write http://HOST:PORT")
            self.assert_usage_error(run(*words, "https://x"), "TLS proxy")
            if words[0] != "router":  # it waits for workers
                # As OpenAI's clients write it: the same server.
                result = run(*words, "http://127.0.0.1:9/v1")
                self.assertEqual(result.returncode, 3)
                self.assertIn("http://127.0.0.1:9: connecting: ", result.stderr)
                self.assertNotIn("--help", result.stderr)
        self.assert_usage_error(run("chat", "http://x:y"), 'port "y" is not a number')

    def test_a_server_of_another_kind_is_named_as_such(self):
        url, answers = other_server(self)
        sluice = "give the URL of a sluice server"
        load = ["bench", "serving", url, "--num-prompts", "2", "--warmup-requests", "0", "--vocab-size", "100"]
        for words, method, status, body, what in [
                (["chat", url], "GET", 200, "<html>", f"{url}/v1/models: the answer is not a JSON object; {sluice}"),
                (["chat", url + "/v1"], "GET", 404, "{}", f"{url}/v1/models: HTTP 404; {sluice}"),
                (["chat", url], "POST", 200, 'data: {"choices":[7]}\n\n', f"the answer is not one of this API (cannot use value() with number); {sluice}"),
                (["chat", url], "POST", 200, 'data: {"choices":{"a":1}}\n\ndata: {"error":{"message":7}}\n\n', "the answer is not one of this API"),
                (["chat", url], "POST", 200, 'data: {"error":{"message":7}}\n\n', "the server ended the answer"),
                (["chat", url], "POST", 500, '{"error":{"message":7}}', "HTTP status 500"),
                (load, "GET", 200, "[]", f"{url}/get_server_info: the answer is not a JSON object; {sluice}"),
                (load, "GET", 404, "no such page", f"{url}/health: HTTP 404; {sluice}"),
                (load, "POST", 200, 'data: {"text":"a"}\n\ndata: {"meta_info":7}\n\n', "the stream ended without [DONE]"),
                (load, "POST", 200, "data: nonsense\n\n", "a record is not JSON")]:
            answers.clear()
            answers[method] = (status, body)
            result = run(*words, input="hello\n/stats\n")
            self.assertEqual(result.returncode, 1 if words[0] == "bench" and method == "POST" else 3, f"{words} {body}: {result}")
            self.assertIn(what, result.stderr, f"{words} {body}")
            self.assertNotIn("exception", result.stderr)

    def test_overrides_are_read_before_any_model(self):
        for value in ["{", "[]", '{"a": nul}']:
            result = run("serve", "--model-path", "/no/such/model", "--json-model-override-args", value)
            self.assert_usage_error(result, "--json-model-override-args: ")
            self.assertNotIn("json.exception", result.stderr)

    def test_flags_without_effect_are_said_beside_the_output(self):
        words = ["--moe-a2a-backend", "deepep"]
        for command in (["run", "--prompt", "Mara has", "--max-tokens", "1"], ["bench", "model", "--prefill", "x"]):
            self.assertIn("--moe-a2a-backend has no effect here", run(*command, *words).stderr, command)
            self.assertNotIn("has no effect", run(*command).stderr, command)

    def test_bars_and_colour_are_for_terminals(self):
        words = [SLUICE, "run", "--prompt", "Mara has", "--max-tokens", "2"]
        piped = subprocess.run(words, capture_output=True, timeout=60, check=True)
        self.assertNotIn(b"\r", piped.stderr)
        self.assertNotIn(b"\033", piped.stderr + piped.stdout)
        here, there = pty.openpty()
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=there)
        os.close(there)
        seen = b""
        while True:
            try:
                data = os.read(here, 4096)
            except OSError:  # the other side is closed
                break
            if not data:
                break
            seen += data
        os.close(here)
        self.assertEqual(process.stdout.read(), piped.stdout)
        self.assertEqual(process.wait(timeout=60), 0)
        self.assertRegex(seen, rb"loading layers \[#+\] \d+ of \d+")
        self.assertRegex(seen, rb"\r +\r")  # wiped

    def test_plan_is_what_paper_and_pencil_say(self):
        """GLM-5.2 on devices of 141 GB: weights, rows and pages counted here from the shapes, by other means than the program's."""
        experts, attention, indexer = 256 * 3 * 6144 * 2048, 0, 2048 * 32 * 128 + 6144 * 128 + 6144 * 32
        for rows, columns in [(6144, 2048), (2048, 64 * (192 + 64)), (6144, 512 + 64), (512, 64 * (192 + 256)), (64 * 256, 6144)]:
            attention += rows * columns
        selecting = [layer for layer in range(78) if layer < 3 or (layer - 2) % 4 == 0]
        self.assertEqual(len(selecting), 21)
        embedding = 2 * 154880 * 6144
        layers = 78 * attention + len(selecting) * indexer + 3 * 3 * 6144 * 12288 + 75 * (3 * 6144 * 2048 + 256 * 6144)
        scales = 1 + 4 / 16384  # one float32 for 128 x 128 values
        row_bytes = {("fp8_e4m3", "latent"): 512 + 4 * 4 + 64 * 2, ("fp8_e4m3", "index"): 128 + 4,
                     ("bf16", "latent"): 2 * (512 + 64), ("bf16", "index"): 2 * 128}
        for ranks, memory, weights_dtype in [(8, 141, "fp8"), (4, 288, "fp8"), (8, 288, "bf16")]:
            result = run("plan", os.path.join(SOURCE, "tests", "data", "configs", "glm-5.2.json"), "--attn-cp-size", str(ranks),
                         "--gpu-memory-gb", str(memory), "--host-gb", "1500", "--storage-gb", "20000", "--weights-dtype", weights_dtype,
                         "--json", "-")
            self.assertEqual(result.returncode, 0, result.stderr)
            plan = json.loads(result.stdout)
            spread = layers + 75 * experts / ranks
            weights = 2 * (embedding + spread) if weights_dtype == "bf16" else 2 * embedding + scales * spread
            self.assertAlmostEqual(plan["weight_bytes_per_rank"] / weights, 1, delta=1e-9)
            left = memory * 1e9 * 0.9 - weights - 8e9  # activations
            seen = []
            for row in plan["rows"]:
                kv, index = row["kv_cache_dtype"], row["index_layers"]
                layers_with_index = len(selecting) if index == "compacted" else 78
                token = 78 * row_bytes[kv, "latent"] + layers_with_index * row_bytes[kv, "index"]
                self.assertEqual(row["bytes_per_token"], token)
                page = 64 * token
                # Whole pages of each rank's lane, of which one takes the rows of padding.
                self.assertEqual(row["tokens_l1"], (int(left // page) - 1) * ranks * 64)
                self.assertEqual(row["tokens_l2"], int(1500e9 / ranks // page) * ranks * 64)
                self.assertEqual(row["tokens_l3"], int(20000e9 // page) * 64)
                seen.append((kv, index))
            self.assertEqual(seen, [(kv, index) for kv in ("fp8_e4m3", "bf16") for index in ("compacted", "all layers")])
            by = {k: row["tokens_l1"] for k, row in zip(seen, plan["rows"])}
            self.assertGreater(by["fp8_e4m3", "compacted"], 1.13 * by["fp8_e4m3", "all layers"])
            self.assertGreater(by["fp8_e4m3", "compacted"], 1.75 * by["bf16", "compacted"])
        self.assert_usage_error(run("plan", os.path.join(SOURCE, "tests", "data", "configs", "glm-5.2.json"), "--weights-dtype", "bf16"),
                                "--gpu-memory-gb: 141 GB x 0.9 leaves nothing for the cache", "take more ranks")

    def test_plan_refuses_what_no_server_can_be_and_what_no_number_can_hold(self):
        plan = ["plan", os.path.join(SOURCE, "tests", "data", "configs", "glm-5.2.json")]
        for flag, value, says in [("--host-gb", "-1", "-1 is too small; at least 0"), ("--host-gb", "nan", "'nan' is not a number"),
                                  ("--host-gb", "1e30", "1e30 is too large; at most 1000000000"),
                                  ("--storage-gb", "1e10", "1e10 is too large; at most 1000000000"),
                                  ("--gpu-memory-gb", "1e30", "1e30 is too large; at most 1000000000"),
                                  ("--gpu-memory-gb", "0", "0 is too small; it must be above 0")]:
            self.assert_usage_error(run(*plan, flag, value), f"sluice plan: {flag}: {says}\n")
        largest = run(*plan, "--gpu-memory-gb", "1e9", "--host-gb", "1e9", "--storage-gb", "1e9", "--json", "-")
        self.assertEqual(largest.returncode, 0, largest.stderr)
        self.assertTrue(all(row[f"tokens_l{i}"] > 1e12 for row in json.loads(largest.stdout)["rows"] for i in (1, 2, 3)))
        for shape in (["--attn-cp-size", "8", "--ep-size", "3"], ["--attn-cp-size", "16", "--ep-size", "16"]):
            said = run(*plan, *shape)
            served = run("serve", "--tp-size", shape[1], *shape)
            self.assert_usage_error(said)
            for line in served.stderr.splitlines()[:1]:
                self.assert_usage_error(said, line.removeprefix("sluice serve: "))

    def test_a_replay_that_shows_nothing_fails(self):
        with tempfile.TemporaryDirectory() as folder:
            empty, long = os.path.join(folder, "empty.jsonl"), os.path.join(folder, "long.jsonl")
            open(empty, "w").close()
            with open(long, "w") as f:
                f.write('{"timestamp": 0, "input_length": 100, "output_length": 100, "hash_ids": [1]}\n')
            result = run("replay", empty)
            self.assertEqual((result.returncode, result.stderr), (1, f"sluice replay: {empty}: the trace holds no request, so nothing is shown\n"))
            result = run("replay", long, "--max-total-tokens", "128")
            self.assertEqual(result.returncode, 1)
            self.assertIn("sluice replay: all 1 requests (prompt and output) are longer than the device tier of 128 tokens", result.stderr)
            self.assertEqual(run("replay", long, "--max-total-tokens", "256").returncode, 0)
        for seeds in ("5..5", "6..5"):
            self.assert_usage_error(run("simulate", "--seeds", seeds), f"sluice simulate: --seeds: {seeds} holds no seed; ")

    def test_closed_output_is_not_a_signal(self):
        process = subprocess.Popen([SLUICE, "serve", "--help"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        process.stdout.close()
        self.assertGreaterEqual(process.wait(timeout=30), 0)


if __name__ == "__main__":
    unittest.main()
