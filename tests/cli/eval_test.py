"""sluice eval as users and tools call it: JSON keys, passes, output files, question-and-answer files, exit codes."""
import json
import os
import subprocess
import sys
import tempfile
import unittest

from other_server import other_server

SLUICE = sys.argv[1]
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
DATA = os.path.join(ROOT, "tests", "data")
SESSIONS = os.path.join(DATA, "eval", "ledger_qa.jsonl")


def run(*args):
    p = subprocess.run([SLUICE, "eval", *args], capture_output=True, text=True, timeout=600)
    return p.returncode, p.stdout, p.stderr


def load(path):
    with open(path) as f:
        return json.load(f)


class EvalTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def test_all_passes_give_the_bits_of_the_cold_one(self):
        for kv in ("bf16", "fp8_e4m3"):
            code, out, err = run("bundled", "--dataset", SESSIONS, "--limit", "2", "--passes", "cold,warm,l2,l3",
                                 "--enable-hierarchical-cache", "--hicache-storage-backend", "file",
                                 "--hicache-storage-prefetch-policy", "wait_complete", "--kv-cache-dtype", kv,
                                 "--json", self.path("r.json"), "--outputs", self.path("o.jsonl"))
            self.assertEqual(code, 0, err)
            self.assertIn("cold", out)
            report = load(self.path("r.json"))
            passes = {p["name"]: p for p in report["passes"]}
            self.assertEqual(list(passes), ["cold", "warm", "l2", "l3"])
            for p in passes.values():
                for key in ("accuracy", "accuracy_sure", "by_bucket", "by_kind", "identical_to_cold",
                            "logits_identical_to_cold", "cached_tokens", "cached_by_tier", "prompt_tokens",
                            "output_tokens", "seconds", "accept_length", "draft_share"):
                    self.assertIn(key, p)
                self.assertEqual(p["identical_to_cold"], 1.0, p["name"])
                self.assertEqual(p["logits_identical_to_cold"], 1.0, p["name"])
                self.assertEqual(p["accuracy_sure"], 1.0)
            self.assertEqual(passes["cold"]["cached_tokens"], 0)
            self.assertGreater(passes["warm"]["cached_by_tier"]["l1"], 1000)
            self.assertGreater(passes["l2"]["cached_by_tier"]["l2"], 300)
            self.assertGreater(passes["l3"]["cached_by_tier"]["l3"], 300)
            for key in ("attn_cp_size", "lane_pages", "rank_bytes_moved", "kv_tokens", "kv_cache_dtype"):
                self.assertIn(key, report["engine"])
            self.assertEqual(report["engine"]["kv_cache_dtype"], kv)
            with open(self.path("o.jsonl")) as f:
                lines = [json.loads(line) for line in f]
            self.assertEqual(len(lines), 4 * passes["cold"]["answers"])
            for line in lines:
                self.assertEqual(set(line), {"pass", "id", "turn", "text", "finish", "prompt_tokens", "cached_tokens", "output_ids",
                                             "logits_hash"})
            by_turn = {}
            for line in lines:
                by_turn.setdefault((line["id"], line["turn"]), set()).add((line["text"], line["logits_hash"]))
            self.assertTrue(all(len(answers) == 1 for answers in by_turn.values()))

    def test_another_process_says_the_same_from_what_is_stored(self):
        with open(self.path("storage.json"), "w") as f:
            json.dump({"directory": self.path("kv")}, f)
        flags = ["bundled", "--dataset", SESSIONS, "--limit", "2", "--enable-hierarchical-cache", "--hicache-storage-backend", "file",
                 "--hicache-storage-backend-extra-config", "@" + self.path("storage.json"),
                 "--hicache-storage-prefetch-policy", "wait_complete", "--kv-cache-dtype", "fp8_e4m3"]
        code, _, err = run(*flags, "--passes", "cold,l3", "--outputs", self.path("o.jsonl"), "--hicache-write-policy", "write_back")
        self.assertEqual(code, 0, err)
        more = ["--passes", "l3", "--filled", "--hicache-mem-layout", "layer_page_first", "--json", self.path("r.json")]
        code, _, err = run(*flags, *more, "--compare-with", self.path("o.jsonl"))
        self.assertEqual(code, 0, err)
        [l3] = load(self.path("r.json"))["passes"]
        self.assertEqual((l3["identical_to_cold"], l3["logits_identical_to_cold"]), (1.0, 1.0))
        self.assertGreater(l3["cached_by_tier"]["l3"], 300)
        self.assertTrue(os.listdir(self.path("kv")))
        # Nobody has filled this one: every answer is right, and nothing is shown.
        elsewhere = ["--hicache-storage-backend-extra-config", json.dumps({"directory": self.path("empty")})]
        code, _, err = run(*flags, "--passes", "l3", "--filled", *elsewhere)
        self.assertEqual(code, 1, err)
        self.assertIn("sluice eval: pass l3: no token came from that tier, so the pass shows nothing; was its folder filled", err)
        with open(self.path("o.jsonl")) as f:
            lines = [json.loads(line) for line in f]
        lines[0]["logits_hash"] = "0" * 16
        with open(self.path("o.jsonl"), "w") as f:
            f.writelines(json.dumps(line) + "\n" for line in lines)
        code, _, err = run(*flags, *more, "--compare-with", self.path("o.jsonl"))
        self.assertEqual(code, 0, err)
        self.assertLess(load(self.path("r.json"))["passes"][0]["logits_identical_to_cold"], 1)

    def test_passes_are_judged_against_expected_accuracies(self):
        expected = os.path.join(DATA, "eval", "expected.json")
        files = ("--dataset", SESSIONS, "--dataset", os.path.join(DATA, "eval", "ledger_qa_long.jsonl.gz"))
        code, out, err = run("bundled", *files, "--sample", "1", "--sample-seed", "3", "--passes", "warm", "--expected", expected,
                             "--json", self.path("v.json"))
        self.assertIn("bucket 8192", out, err)
        report = load(self.path("v.json"))
        verdicts = {v["name"]: v for v in report["passes"][0]["verdicts"]}
        self.assertEqual(set(verdicts), {f"bucket {n}" for n in (512, 1024, 2048, 4096, 8192)} | {"core kinds", "sure", "agreement"})
        self.assertEqual(code, 0 if all(v["holds"] for v in verdicts.values()) else 1)
        self.assertTrue(verdicts["core kinds"]["holds"] and verdicts["sure"]["holds"], out)
        # Expectations that cannot hold: exit code 1, and the table says so.
        with open(expected) as f:
            wrong = json.load(f)
        wrong["bf16"]["index"]["buckets"]["512"] = 0.01
        with open(self.path("wrong.json"), "w") as f:
            json.dump(wrong, f)
        code, out, err = run("bundled", "--dataset", SESSIONS, "--sample", "1", "--passes", "warm", "--expected",
                             self.path("wrong.json"))
        self.assertEqual(code, 1, out + err)
        self.assertIn("DOES NOT HOLD", out)

    def test_compressed_sessions_of_four_thousand_tokens(self):
        code, out, err = run("bundled", "--dataset", os.path.join(DATA, "eval", "ledger_qa_long.jsonl.gz"), "--limit", "1",
                             "--passes", "warm", "--json", "-")
        self.assertEqual(code, 0, err)
        report = json.loads(out)  # nothing but the document on standard output
        self.assertIn("4096", report["passes"][0]["by_bucket"])
        self.assertEqual(report["passes"][0]["accuracy_sure"], 1.0)
        self.assertIsNone(report["passes"][0]["identical_to_cold"])

    def test_question_and_answer_files_are_scored_by_their_number(self):
        # Prompts both shorter and longer than the 128 tokens that the model selects.
        code, out, err = run("bundled", "--dataset", os.path.join(DATA, "eval", "gsm8k_style.jsonl"), "--chat-format",
                             "--num-shots", "1", "--parallel", "4", "--json", self.path("g.json"))
        self.assertEqual(code, 0, err)
        for word in ("Accuracy:", "Invalid:", "Latency:", "Output throughput:"):
            self.assertIn(word, out)
        report = load(self.path("g.json"))
        self.assertEqual(report["problems"], 17)
        self.assertGreaterEqual(report["accuracy"], 0.85)
        self.assertEqual(report["invalid"], 0)
        with open(os.path.join(ROOT, "models", "ledger-28m-fp8", "config.json")) as f:
            topk = json.load(f)["index_topk"]
        self.assertGreaterEqual(sum(n < topk for n in report["prompt_tokens"]), 5)
        self.assertGreaterEqual(sum(n > topk for n in report["prompt_tokens"]), 5)
        # Plain prompts: the reference model was not made for them, the format still works. The limit counts what is asked.
        code, out, err = run("bundled", "--dataset", os.path.join(DATA, "eval", "gsm8k_style.jsonl"), "--num-shots", "2",
                             "--limit", "4", "--max-new-tokens", "16", "--json", self.path("p.json"))
        self.assertEqual(code, 0, err)
        self.assertIn("Accuracy:", out)
        self.assertEqual(load(self.path("p.json"))["problems"], 4)

    def test_goldens_have_their_keys_and_exit_code(self):
        tiny = os.path.join(DATA, "tiny-random", "glm-moe-dsa")
        code, out, err = run(tiny, "--golden", tiny, "--dtype", "float32", "--json", "-")
        self.assertEqual(code, 0, err)
        report = json.loads(out)
        for key in ("max_rel_err", "greedy_equal", "topk_rows", "topk_rows_differing"):
            self.assertIn(key, report)
        self.assertLess(report["max_rel_err"], 2e-4)
        # What these goldens do not hold is said, not counted as nought.
        self.assertEqual(report["topk_sets"], "not compared: the folder holds none")
        self.assertIsNone(report["topk_rows"])
        code, out, err = run("bundled", "--golden", os.path.join(DATA, "golden"), "--dtype", "float32", "--json", "-")
        self.assertEqual(code, 0, err)
        trained = json.loads(out)
        self.assertEqual((trained["topk_sets"], trained["topk_rows"], trained["topk_rows_differing"]), ("compared", 2048, 0))
        # The goldens of another model: the command runs and its check does not hold.
        other = os.path.join(DATA, "tiny-random", "deepseek-v32")
        code, out, err = run(tiny, "--golden", other, "--dtype", "float32")
        self.assertEqual(code, 1, out + err)

    def test_goldens_that_cannot_be_read_name_file_and_field(self):
        tiny = os.path.join(DATA, "tiny-random", "glm-moe-dsa")
        good = load(os.path.join(tiny, "golden.json"))
        for change, what in [
                (lambda g: "{", "golden.json: parse error at line 1"),
                (lambda g: json.dumps({}), "golden.json: key 'prompts' not found"),
                (lambda g: json.dumps({**g, "prompts": []}), "golden.json: holds no list of prompts"),
                (lambda g: json.dumps({**g, "prompts": [7]}), "golden.json: prompts[0]: not an object"),
                (lambda g: json.dumps({**g, "prompts": [g["prompts"][0], {**g["prompts"][1], "ids": [1, "x"]}]}),
                 'golden.json: prompts[1].ids[1]: "x" is not a token id'),
                (lambda g: json.dumps({**g, "prompts": [{**g["prompts"][0], "greedy": None}]}),
                 "golden.json: prompts[0].greedy: not a list of token ids")]:
            with open(self.path("golden.json"), "w") as f:
                f.write(change(good))
            code, out, err = run(tiny, "--golden", self.folder.name, "--dtype", "float32")
            self.assertEqual((code, out), (2, ""), err)
            self.assertIn(f"sluice eval: {self.folder.name}/{what}", err)
            self.assertIn("(export the goldens again)", err)
            self.assertNotIn("exception", err)
            self.assertEqual(err.count("\n"), 1, err)

    def test_a_server_of_another_kind_is_named_as_such(self):
        url, answers = other_server(self)
        for method, status, body, what in [
                ("GET", 200, "<html>", f"{url}/v1/models: the answer is not a JSON object; give the URL of a sluice server"),
                ("GET", 404, '{"error": {"message": 7}}', f"{url}/v1/models: HTTP 404"),
                ("POST", 200, '{"data": [7]}', "the answer is not one of this API (key 'choices' not found); give the URL"),
                ("POST", 200, '{"choices": [{"message": 3}]}', "the answer is not one of this API (cannot use at() with number)")]:
            answers.clear()
            answers[method] = (status, body)
            for spelling in (url, url + "/v1"):
                code, out, err = run(spelling, "--dataset", SESSIONS, "--limit", "1")
                self.assertEqual((code, out), (3, ""), err)
                self.assertIn(what, err)
                self.assertNotIn("exception", err)
                self.assertEqual(err.count("\n"), 1, err)

    def test_errors_are_one_line_with_the_right_exit_code(self):
        cases = [
            (2, "host tier", "bundled", "--dataset", SESSIONS, "--passes", "l2"),
            (2, "needs storage", "bundled", "--dataset", SESSIONS, "--passes", "cold,l3"),
            (2, "cold and warm", "http://127.0.0.1:9", "--dataset", SESSIONS, "--passes", "l3"),
            (2, "is not a pass", "bundled", "--dataset", SESSIONS, "--passes", "hot"),
            (2, "--dataset FILE or --golden", "bundled"),
            (2, "only http:// is supported", "ftp://x", "--dataset", SESSIONS),
            (2, "--sample", "bundled", "--dataset", SESSIONS, "--sample", "0"),
            (2, "only files of chat sessions", "bundled", "--dataset", SESSIONS, "--dataset",
             os.path.join(DATA, "eval", "gsm8k_style.jsonl")),
            (3, "--expected", "bundled", "--dataset", SESSIONS, "--expected", self.path("missing.json")),
            (2, "--limit", "bundled", "--dataset", SESSIONS, "--limit", "x"),
            (2, "--limit: 0 is too small; at least 1", "bundled", "--dataset", SESSIONS, "--limit", "0"),
            (2, "--num-shots 20: the dataset holds 18 problems, which leaves none to ask; use at most 17 shots", "bundled",
             "--dataset", os.path.join(DATA, "eval", "gsm8k_style.jsonl"), "--limit", "8", "--num-shots", "20"),
            (2, "--bogus", "bundled", "--dataset", SESSIONS, "--bogus"),
            (3, "cannot open", "bundled", "--dataset", self.path("missing.jsonl")),
            (3, "does not exist", self.path("model"), "--dataset", SESSIONS),
            (3, "refused", "http://127.0.0.1:9", "--dataset", SESSIONS),
        ]
        for want, words, *args in cases:
            code, out, err = run(*args)
            self.assertEqual(code, want, f"{args}: {err}")
            self.assertIn(words, err)
            self.assertNotIn("Traceback", err)
            self.assertEqual(out, "")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
