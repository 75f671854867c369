"""Bad input at start: one clear line that says what, where and what to do; exit code 2 or 3; never a trace.

  bad_input_test.py SLUICE SOURCE_DIR
"""

import json
import os
import pathlib
import signal
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

    def refused(self, code, texts, *flags, command="serve", model=True, user=None):
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
        for trace in ["check failed", "terminate called", "what():", "    at ", "Segmentation", "std::"]:
            self.assertNotIn(trace, said)
        complaints = [line for line in result.stderr.splitlines() if line.startswith(f"sluice {command}: ")]
        self.assertEqual(len(complaints), 1, said)

    def test_missing_folder(self):
        self.refused(3, ["/no/such/model"], "--model-path", "/no/such/model", model=False)

    def test_file_instead_of_folder(self):
        self.refused(3, ["config.json"], "--model-path", str(BUNDLED / "config.json"), model=False)

    def test_folder_without_config(self):
        self.replace("config.json", None)
        self.refused(3, [str(self.folder), "config.json"])

    def test_config_that_is_no_json(self):
        self.replace("config.json", "{\"architectures\": [")
        self.refused(2, ["config.json"])

    def test_unknown_architecture(self):
        self.change_config(architectures=["LlamaForCausalLM"], model_type="llama")
        self.refused(2, ["LlamaForCausalLM", "GlmMoeDsaForCausalLM"])

    def test_config_value_that_cannot_be(self):
        self.change_config(num_hidden_layers=-3)
        self.refused(2, ["num_hidden_layers", "-3"])

    def test_wrong_tensor_shape(self):
        self.change_config(intermediate_size=1056)
        self.refused(2, ["mlp", "1056"])

    def test_missing_tensor(self):
        self.change_config(num_hidden_layers=7)
        self.refused(2, ["model.layers."])

    def test_truncated_shard(self):
        name = self.first_shard()
        data = (BUNDLED / name).read_bytes()
        self.replace(name, data[: len(data) - 1000])
        self.refused(2, [name])

    def test_missing_shard(self):
        name = self.first_shard()
        self.replace(name, None)
        self.refused(3, [name])

    def test_shard_with_a_header_of_nonsense(self):
        name = self.first_shard()
        self.replace(name, struct.pack("<Q", 1 << 60) + b"{}")
        self.refused(2, [name])

    def test_missing_tokenizer(self):
        self.replace("tokenizer.json", None)
        self.refused(3, ["tokenizer.json"])

    def test_broken_tokenizer(self):
        self.replace("tokenizer.json", "[1, 2")
        self.refused(2, ["tokenizer.json"])

    def test_override_that_is_no_json(self):
        self.refused(2, ["--json-model-override-args"], "--json-model-override-args", "{index_topk_freq")

    def test_override_and_flag_that_differ(self):
        self.refused(2, ["index_topk_freq", "2", "4"], "--json-model-override-args", '{"index_topk_freq": 2}',
                     "--nsa-index-topk-freq", "4")

    def test_schedule_without_its_tensors(self):
        self.refused(2, ["indexer"], "--nsa-index-topk-freq", "1")

    def test_unknown_flag(self):
        self.refused(2, ["--mem-fraction", "did you mean --mem-fraction-static"], "--mem-fraction", "0.5")

    def test_illegal_combination(self):
        self.refused(2, ["--hicache-mem-layout page_first", "--hicache-io-backend kernel"], "--enable-hierarchical-cache",
                     "--hicache-mem-layout", "page_first", "--hicache-io-backend", "direct")

    def test_context_beyond_the_model(self):
        self.refused(2, ["--context-length 1000000", "max_position_embeddings"], "--context-length", "1000000")

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
        self.refused(3, ["192.0.2.1"], "--host", "192.0.2.1")

    def test_unreadable_folder(self):
        os.chmod(self.temp.name, 0o755)
        os.chmod(self.folder, 0)
        self.addCleanup(os.chmod, self.folder, 0o700)
        nobody = 65534
        self.refused(3, [str(self.folder)], user=nobody if os.geteuid() == 0 else None)  # root reads everything

    def test_unreadable_weights(self):
        os.chmod(self.temp.name, 0o755)
        os.chmod(self.folder, 0o755)
        name = self.first_shard()
        self.replace(name, (BUNDLED / name).read_bytes())
        os.chmod(self.folder / name, 0)
        nobody = 65534
        self.refused(3, [name], user=nobody if os.geteuid() == 0 else None)

    def test_bad_origin(self):
        self.refused(2, ["--cors-origins", "example.com"], "--cors-origins", "example.com")

    def test_value_of_the_wrong_kind(self):
        self.refused(2, ["--port", "70000"], "--port", "70000")
        self.refused(2, ["--request-timeout", "soon"], "--request-timeout", "soon")


if __name__ == "__main__":
    unittest.main()
