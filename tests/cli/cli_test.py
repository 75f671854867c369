"""The command line of the built program: exit codes, help, and that bad input is one clear line and never a trace.

  cli_test.py SLUICE
"""

import os
import pty
import re
import subprocess
import sys
import tempfile
import unittest

SLUICE = os.path.abspath(sys.argv.pop(1))


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
        dataset = os.path.join(os.path.dirname(__file__), "..", "data", "eval", "gsm8k_style.jsonl")
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

    def test_overrides_are_read_before_any_model(self):
        for value in ["{", "[]", '{"a": nul}']:
            result = run("serve", "--model-path", "/no/such/model", "--json-model-override-args", value)
            self.assert_usage_error(result, "--json-model-override-args: ")
            self.assertNotIn("json.exception", result.stderr)

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

    def test_closed_output_is_not_a_signal(self):
        process = subprocess.Popen([SLUICE, "serve", "--help"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        process.stdout.close()
        self.assertGreaterEqual(process.wait(timeout=30), 0)


if __name__ == "__main__":
    unittest.main()
