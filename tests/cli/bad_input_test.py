"""Bad input at start: one clear line that says what, where and what to do; exit code 2 or 3; never a trace.

  bad_input_test.py SLUICE SOURCE_DIR
"""

import json
import os
import pathlib
import signal
import re
import socket
import struct
import subprocess
import sys
import tempfile
import unittest

SLUICE = os.path.abspath(sys.argv.pop(1))
SOURCE = pathlib.Path(sys.argv.pop(1)).resolve()
BUNDLED = next(p for p in sorted((SOURCE / "models").iterdir()) if (p / "config.json").is_file())


class BadInput(unittest.TestCase):
    def setUp(self):
        self.temp = tempfile.TemporaryDirectory()
        self.addCleanup(self.temp.cleanup)
        self.folder = pathlib.Path(self.temp.name) / "model"
        self.folder.mkdir()
        for file in BUNDLED.iterdir():  # links: what a test changes, it replaces
            if file.is_file():
                (self.folder / file.name).symlink_to(file)

    def replace(self, name, data):
        path = self.folder / name
        path.unlink(missing_ok=True)
        if data is not None:
            path.write_bytes(data if isinstance(data, bytes) else data.encode())

    def change_config(self, **changes):
        config = json.loads((BUNDLED / "config.json").read_text())
        config.update(changes)
        self.replace("config.json", json.dumps(config))

    def first_shard(self):
        return sorted(f.name for f in BUNDLED.iterdir() if f.name.endswith(".safetensors"))[0]

    def refused(self, code, texts, *flags, command="serve", model=True, user=None, usage=False):
        """The command ends with `code` and a complaint that holds all of `texts`."""
        args = [SLUICE, command]
        if model:
            args += ["--model-path", str(self.folder)]
        result = subprocess.run([*args, "--port", "0", *flags], capture_output=True, text=True, timeout=60, check=False,
                                cwd=self.temp.name, user=user)
        said = result.stdout + result.stderr
        self.assertEqual(result.returncode, code, said)
        for text in texts:
            self.assertIn(text, said)
        for trace in ["check failed", "terminate called", "what():", "    at ", "Segmentation", "std::", "json.exception"]:
            self.assertNotIn(trace, said)
        # One line beside the log; behind a command line that cannot be read, a second one that names --help.
        lines = [line for line in result.stderr.splitlines() if not re.match(r"\d{4}-\d\d-\d\d ", line)]
        self.assertEqual(len(lines), 2 if usage else 1, said)
        self.assertTrue(lines[0].startswith(f"sluice {command}: "), said)
        if usage:
            self.assertEqual(lines[1], f"see: sluice {command} --help")
        for name in ["config.json", "tokenizer.json", ".safetensors", "index.json"]:
            self.assertNotRegex(lines[0], re.escape(name) + r":[^;(]*" + re.escape(name) + ":")  # named once
        self.assertLess(len(lines[0]), 600)
        return lines[0]

    def broken_file(self, code, what, remedy, *flags, **kwargs):
        """A complaint about a file of the folder: where, what, what to do."""
        line = self.refused(code, [str(self.folder), what, remedy], *flags, **kwargs)
        self.assertGreater(line.rindex(remedy), line.index(what), line)

    def test_missing_folder(self):
        self.refused(3, ["/no/such/model"], "--model-path", "/no/such/model", model=False)

    def test_file_instead_of_folder(self):
        self.refused(3, ["config.json"], "--model-path", str(BUNDLED / "config.json"), model=False)

    def test_folder_without_config(self):
        self.replace("config.json", None)
        self.broken_file(3, "config.json: is not there", "give a folder with config.json")

    def test_config_that_is_no_json(self):
        for text, what in [('{"architectures": [', "not valid JSON: parse error at line 1"), ("", "not valid JSON"),
                           ("null", "holds a JSON null"), ("[]", "holds a JSON array"), ("[" * 1000, "nested deeper")]:
            self.replace("config.json", text)
            self.broken_file(2, "config.json: " + what, "correct it there or with --json-model-override-args")

    def test_unknown_architecture(self):
        self.change_config(architectures=["LlamaForCausalLM"], model_type="llama")
        self.broken_file(2, '"LlamaForCausalLM" is not supported; supported are GlmMoeDsaForCausalLM', "take a model of a supported kind")

    def test_config_value_that_cannot_be(self):
        edit = "correct it there or with --json-model-override-args"
        take = "take a model of a supported kind"
        for key, value, what, remedy in [
                ("num_hidden_layers", -3, "num_hidden_layers: -3 is not a whole number from 1 to 4096", edit),
                ("vocab_size", None, "vocab_size: missing", edit),
                ("rope_parameters", {}, "rope_parameters.rope_theta: missing", edit),
                ("rope_parameters", {"rope_type": "default"}, "rope_parameters.rope_theta: missing", edit),
                ("eos_token_id", 99999, "eos_token_id: 99999 is not below vocab_size 2048", edit),
                ("eos_token_id", [2028, 2048], "eos_token_id: 2048 is not below vocab_size 2048", edit),
                ("dtype", "int8", 'dtype: "int8" is not supported; bfloat16, float16, float32', take),
                ("torch_dtype", "float64", '"float64"', edit),  # beside a dtype that says something else
                ("attention_bias", True, "attention_bias: true is not supported", take)]:
            with self.subTest(key=key, value=value):
                self.change_config(**{key: value})
                self.broken_file(2, what, remedy)

    def test_wrong_tensor_shape(self):
        self.change_config(intermediate_size=1056)
        self.broken_file(2, "config.json asks for [1056, 384]", "take weights and config.json from one model")

    def test_missing_tensor(self):
        self.change_config(first_k_dense_replace=100)
        self.broken_file(2, 'tensor "model.layers.2.mlp.gate_proj.weight" is missing', "take weights and config.json from one model")

    def test_tensor_that_is_not_of_the_model(self):
        self.change_config(n_shared_experts=0)
        self.broken_file(2, "is not part of GlmMoeDsaForCausalLM", "take weights and config.json from one model")

    def test_head_that_is_dropped_by_tied_embeddings(self):
        self.change_config(tie_word_embeddings=True)
        self.broken_file(2, 'tensor "lm_head.weight" differs from "model.embed_tokens.weight"', "set it to false")

    def test_truncated_shard(self):
        name = self.first_shard()
        data = (BUNDLED / name).read_bytes()
        for size in [0, 7, 8, 100, len(data) - 1000, len(data) - 1]:
            self.replace(name, data[:size])
            self.broken_file(2, name, "fetch the file again")
        self.replace(name, data + b"x")
        self.broken_file(2, "1 bytes follow the last tensor", "fetch the file again")

    def test_pointers_of_git_lfs(self):
        pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4700000\n"
        for name in [self.first_shard(), "config.json", "tokenizer.json", "model.safetensors.index.json"]:
            self.replace(name, pointer)
            self.broken_file(2, f"{name}: is a Git LFS pointer, not the file itself", f"run `git lfs pull` in {self.folder}")
            self.replace(name, (BUNDLED / name).read_bytes())

    def test_pipes_and_folders_in_place_of_files(self):
        for name in [self.first_shard(), "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]:
            self.replace(name, None)
            os.mkfifo(self.folder / name)
            self.broken_file(2, f"{name}: is a pipe, not a regular file", "put the file itself there")
            self.replace(name, None)
            (self.folder / name).mkdir()
            self.broken_file(2, f"{name}: is a folder, not a regular file", "put the file itself there")
            (self.folder / name).rmdir()
            self.replace(name, (BUNDLED / name).read_bytes())

    def test_missing_shard(self):
        name = self.first_shard()
        self.replace(name, None)
        self.broken_file(3, name, "fetch the missing file")

    def test_broken_index(self):
        name = "model.safetensors.index.json"
        for text, what in [("{", "cannot be read as JSON"), ("{}", '"weight_map" is missing'), ('{"weight_map":{}}', "is empty"),
                           ('{"weight_map":{"a":5}}', "is not a string")]:
            self.replace(name, text)
            self.broken_file(2, what, "fetch the file again")
        self.replace(name, None)
        self.broken_file(2, "but no model.safetensors.index.json", "fetch the index file too")

    def test_shard_with_a_header_of_nonsense(self):
        name = self.first_shard()
        self.replace(name, struct.pack("<Q", 1 << 60) + b"{}")
        self.broken_file(2, "the header is said to have", "fetch the file again")

    def test_missing_tokenizer(self):
        self.replace("tokenizer.json", None)
        self.broken_file(3, "tokenizer.json: is not there", "fetch it, or name the folder that has it by --tokenizer-path")

    def test_broken_tokenizer(self):
        again = "fetch the tokenizer's files again"
        for text, what in [("[1, 2", "not valid JSON"), ("", "not valid JSON"), ("{}", "model must be an object"),
                           ('{"model":{"type":"WordPiece"}}', "model type WordPiece is not supported")]:
            self.replace("tokenizer.json", text)
            self.broken_file(2, "tokenizer.json: " + what, again)
        self.replace("tokenizer.json", (BUNDLED / "tokenizer.json").read_bytes())
        self.replace("tokenizer_config.json", "[]")
        self.broken_file(2, "tokenizer_config.json: not a JSON object", again)

    def test_broken_chat_template(self):
        self.replace("chat_template.jinja", "{% for x in %}")
        self.broken_file(2, "chat_template.jinja: chat template: ", "correct it, or take it out")
        self.replace("chat_template.jinja", None)
        self.replace("tokenizer_config.json", '{"chat_template": 5}')
        self.broken_file(2, "tokenizer_config.json: chat_template must be a string", "correct it")

    def test_generation_config_that_cannot_be(self):
        for text, what in [('{"temperature":"hot"}', 'temperature: "hot" is not a number; write one from 0 to 2'),
                           ('{"temperature":-5,"top_p":9}', "temperature: -5 is out of range"),
                           ('{"top_p":9}', "top_p: 9 is out of range; write a number above 0 and at most 1"),
                           ('{"repetition_penalty":0}', "repetition_penalty: 0 is out of range"),
                           ('{"top_k":"all"}', 'top_k: "all" is not a whole number'),
                           ('{"do_sample":"no"}', 'do_sample: "no" is not a boolean')]:
            self.replace("generation_config.json", text)
            self.broken_file(2, "generation_config.json: " + what, "correct it, or start with --sampling-defaults openai")
        for text, what in [("{", "not valid JSON: parse error"), ("[]", "holds a JSON array"),
                           ('{"eos_token_id":99999999}', "eos_token_id: 99999999 is not below vocab_size 2048"),
                           ('{"eos_token_id":"x"}', 'eos_token_id: "x" is not a token id')]:
            self.replace("generation_config.json", text)
            self.broken_file(2, "generation_config.json: " + what, "correct it there", "--sampling-defaults", "openai")

    def test_override_that_is_no_json(self):
        self.refused(2, ["--json-model-override-args"], "--json-model-override-args", "{index_topk_freq", usage=True)

    def test_override_and_flag_that_differ(self):
        self.refused(2, ["index_topk_freq", "2", "4"], "--json-model-override-args", '{"index_topk_freq": 2}',
                     "--nsa-index-topk-freq", "4", usage=True)

    def test_schedule_without_its_tensors(self):
        self.refused(2, ["indexer"], "--nsa-index-topk-freq", "1")

    def test_unknown_flag(self):
        self.refused(2, ["--mem-fraction", "did you mean --mem-fraction-static"], "--mem-fraction", "0.5", usage=True)

    def test_illegal_combination(self):
        self.refused(2, ["--hicache-mem-layout page_first", "--hicache-io-backend kernel"], "--enable-hierarchical-cache",
                     "--hicache-mem-layout", "page_first", "--hicache-io-backend", "direct", usage=True)

    def test_context_beyond_the_model(self):
        self.refused(2, ["--context-length 1000000", "max_position_embeddings"], "--context-length", "1000000", usage=True)
        self.refused(2, ["--context-length 1: leaves no room", "give at least 2"], "--context-length", "1", usage=True)

    def test_more_cache_than_memory(self):
        self.refused(3, ["--max-total-tokens"], "--max-total-tokens", "100000000000")

    def test_port_in_use(self):
        with socket.socket() as busy:
            busy.bind(("127.0.0.1", 0))
            busy.listen()
            port = busy.getsockname()[1]
            self.refused(3, [str(port), "in use"], "--port", str(port))

    def test_port_and_tokenizer_are_tried_before_the_weights_are_read(self):
        self.replace(self.first_shard(), b"no weights at all")
        with socket.socket() as busy:
            busy.bind(("127.0.0.1", 0))
            busy.listen()
            port = busy.getsockname()[1]
            self.refused(3, [str(port), "in use"], "--port", str(port))
        self.replace("tokenizer.json", None)
        self.refused(3, ["tokenizer.json"])

    def test_a_pipe_in_place_of_a_file_is_no_wait(self):
        for name in ["config.json", "tokenizer.json", self.first_shard()]:
            with self.subTest(name):
                kept = (self.folder / name).readlink()
                self.replace(name, None)
                os.mkfifo(self.folder / name)
                self.refused(2, [name, "not a regular file"])
                (self.folder / name).unlink()
                (self.folder / name).symlink_to(kept)

    def test_a_signal_ends_the_start(self):
        pipe = pathlib.Path(self.temp.name) / "flags.yaml"
        os.mkfifo(pipe)
        for number in [signal.SIGTERM, signal.SIGINT]:
            with subprocess.Popen([SLUICE, "serve", "--config", str(pipe)], stderr=subprocess.DEVNULL) as starting:
                writer = os.open(pipe, os.O_WRONLY)  # returns once it reads: the start is on its way
                starting.send_signal(number)
                self.assertEqual(starting.wait(timeout=30), 128 + number)
                os.close(writer)

    def test_address_of_another_machine(self):
        self.refused(3, ["192.0.2.1", "use an address of this machine"], "--host", "192.0.2.1")

    def test_unreadable_folder(self):
        os.chmod(self.temp.name, 0o755)
        os.chmod(self.folder, 0)
        self.addCleanup(os.chmod, self.folder, 0o700)
        nobody = 65534
        self.refused(3, [str(self.folder), "Permission denied; make it readable"], user=nobody if os.geteuid() == 0 else None)  # root reads everything

    def test_unreadable_weights(self):
        os.chmod(self.temp.name, 0o755)
        os.chmod(self.folder, 0o755)
        name = self.first_shard()
        self.replace(name, (BUNDLED / name).read_bytes())
        os.chmod(self.folder / name, 0)
        nobody = 65534
        self.refused(3, [name, "Permission denied; make it readable"], user=nobody if os.geteuid() == 0 else None)

    def test_bad_origin(self):
        self.refused(2, ["--cors-origins", "example.com"], "--cors-origins", "example.com", usage=True)

    def test_value_of_the_wrong_kind(self):
        self.refused(2, ["--port", "70000"], "--port", "70000", usage=True)
        self.refused(2, ["--request-timeout", "soon"], "--request-timeout", "soon", usage=True)


if __name__ == "__main__":
    unittest.main()
