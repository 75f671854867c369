"""lm-eval's `local-completions` against the server: answers generated, and answers scored by echoed logprobs of token-id prompts.

The tasks are made here of the project's own questions; nothing is loaded from a hub."""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "api"))
from client import SLUICE, Server  # noqa: E402

QUESTIONS = pathlib.Path(__file__).parent.parent / "data" / "eval" / "ledger_qa.jsonl"
DOCUMENTS = 24
COMMON = """
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
target_delimiter: ""
metadata: {version: 1}
"""
GENERATE = """
task: ledger_generate
output_type: generate_until
doc_to_text: "{{prompt}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["<|user|>"], max_gen_toks: 60, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
CHOOSE = """
task: ledger_choose
output_type: multiple_choice
doc_to_text: "{{prompt}}"
doc_to_target: answer
doc_to_choice: choices
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


def documents():
    """Questions about one thing that somebody holds, each with the right number and three wrong ones."""
    for line in QUESTIONS.open():
        session = json.loads(line)
        prompt = "[gMASK]<sop>"
        for message in session["messages"]:
            prompt += f"<|{message['role']}|>\n{message['content']}"
            if message["role"] == "user":
                break
        answers = [i for i, (kind, sure) in enumerate(zip(session["kinds"], session["sure"])) if kind == "hold" and sure]
        if answers != [] and answers[0] == 0 and session["messages"][0]["role"] == "system":
            right = session["answers"][0]
            number = right.rsplit(" ", 1)[1]
            if number.isdigit() and right.count(number) == 2:
                wrong = [right.replace(number, str(int(number) + d)) for d in (1, 10, 3)]
                at = len(number) % 4
                yield {"prompt": prompt + "<|assistant|>\n", "choices": wrong[:at] + [right] + wrong[at:], "answer": at}


def main():
    with tempfile.TemporaryDirectory() as folder, Server([SLUICE, "serve", "--port", "0", "--max-total-tokens", "16384"]) as server:
        folder = pathlib.Path(folder)
        docs = [d for d, _ in zip(documents(), range(DOCUMENTS))]
        assert len(docs) == DOCUMENTS, len(docs)
        data = folder / "ledger.jsonl"
        data.write_text("".join(json.dumps(d) + "\n" for d in docs))
        for name, text in (("generate", GENERATE), ("choose", CHOOSE)):
            (folder / f"{name}.yaml").write_text(text + COMMON % data)
        command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args",
                   f"model=ledger,base_url={server.url}/v1/completions,num_concurrent=4,tokenizer_backend=auto,max_length=2048",
                   "--tasks", "ledger_generate,ledger_choose", "--include_path", str(folder), "--output_path", str(folder / "out"),
                   "--log_samples"]
        run = subprocess.run(command, capture_output=True, text=True, env={
            **os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hf")})
        assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-6000:]
        results = json.loads(next((folder / "out").rglob("results_*.json")).read_text())["results"]
        generated = results["ledger_generate"]["exact_match,none"]
        chosen = results["ledger_choose"]["acc,none"]
        print(f"exact match {generated}, choices {chosen}, {DOCUMENTS} questions")
        assert generated >= 0.95 and chosen >= 0.95
        # What lm-eval made of the logprobs is what the server says when it is asked for the same.
        samples = [json.loads(line) for line in next((folder / "out").rglob("samples_ledger_choose_*.jsonl")).read_text().splitlines()]
        for sample in samples[:3]:
            for choice, ((score, greedy),) in zip(sample["doc"]["choices"], sample["resps"]):
                def ids(text):
                    return server.post("/tokenize", {"prompt": text, "add_special_tokens": False})[1]["tokens"]
                context, whole = ids(sample["doc"]["prompt"]), ids(sample["doc"]["prompt"] + choice)
                answer = server.post("/v1/completions", {"prompt": whole, "max_tokens": 0, "echo": True, "logprobs": 1})[1]
                want = sum(answer["choices"][0]["logprobs"]["token_logprobs"][len(context):])
                assert abs(want - float(score)) < 1e-4 * max(1, abs(want)), (want, score)
        server.wait_idle()


main()
