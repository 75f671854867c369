"""Bound answers are the same tokens however they are made: jump-ahead or not, in small pieces, after retractions, with drafts, in
one place or two."""

import json
import pathlib
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "disagg"))
from client import SLUICE, Server  # noqa: E402
from cluster import Cluster, call  # noqa: E402

PERSON = {"type": "object", "properties": {
    "first_name": {"type": "string", "maxLength": 12}, "birthday": {"type": "string", "format": "date"},
    "apples_by_color": {"type": "array", "minItems": 1, "maxItems": 3, "items": {
        "type": "object", "properties": {"color": {"enum": ["red", "green", "yellow"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["color", "count"]}}}, "required": ["first_name", "birthday", "apples_by_color"]}
TOOLS = [{"type": "function", "function": {"name": "count_the_apples", "parameters": {
    "type": "object", "properties": {"owner": {"type": "string", "enum": ["Mara", "Ivo"]}, "include_green": {"type": "boolean"}},
    "required": ["owner", "include_green"]}}}]


def requests():
    for seed in range(3):
        prompt = f"Ledger {seed}: Mara has red apples: 17. Ivo has green cups: {seed}."
        sampling = {"temperature": 1.3 if seed % 2 else 0, "seed": seed, "frequency_penalty": 0.4 if seed % 3 == 0 else 0}
        for form in ({"json_schema": PERSON}, {"regex": "Mara has (red|green) apples: [0-9]{1,3}\\. (And no cups\\.)?"},
                     {"ebnf": 'root ::= "The answer is " [a-z]{2,9} " and nothing else."'}):
            yield "/v1/completions", {"prompt": prompt, "max_tokens": 160, **sampling, **form, "n": 2 if seed == 1 else 1}
        yield "/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}], "max_tokens": 160, **sampling,
                                       "tools": TOOLS, "tool_choice": "required"}
        yield "/v1/completions", {"prompt": prompt, "max_tokens": 160, **sampling, "json_schema": PERSON, "logprobs": 1}
    yield "/v1/messages", {"model": "m", "max_tokens": 160, "messages": [{"role": "user", "content": "How many apples?"}], "temperature": 0,
                           "tools": [{"name": "count", "input_schema": TOOLS[0]["function"]["parameters"]}], "tool_choice": {"type": "any"}}


def answers(url):
    def one(request):
        status, answer = call(url, *request)
        assert status == 200, answer
        if request[0] == "/v1/messages":
            return [(b["type"], b["name"], b["input"]) for b in answer["content"]], answer["usage"]["output_tokens"]
        out = []
        for choice in answer["choices"]:
            message = choice.get("message") or {}
            calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []]
            out.append((choice.get("text"), message.get("content"), calls, choice["finish_reason"]))
        return out, answer["usage"]["completion_tokens"]
    with ThreadPoolExecutor(12) as pool:
        return list(pool.map(one, requests()))


def state(url):
    return call(url, "/server_info")[1]["internal_states"][0]


FLAGS = ["--port", "0", "--tool-call-parser", "glm47", "--max-total-tokens"]


@pytest.fixture(scope="module")
def expected():
    with Server([SLUICE, "serve", *FLAGS, "16384"]) as s:
        want = answers(s.url)
        assert state(s.url)["forced_tokens_total"] > 100
        s.wait_idle()
    for (path, body), (choices, _) in zip(requests(), want):
        if path == "/v1/messages":
            assert choices[0][:2] == ("tool_use", "count") and set(choices[0][2]) == {"owner", "include_green"}
            continue
        for text, _, calls, finish in choices:
            assert finish == ("stop" if path == "/v1/completions" else "tool_calls")
            if "json_schema" in body:
                assert list(json.loads(text)) == list(PERSON["properties"])
            for name, arguments in calls:
                assert name == "count_the_apples" and set(json.loads(arguments)) == {"owner", "include_green"}
    # A request that wants logprobs is not jumped; its tokens are those of the one that is.
    by_prompt = {}
    for (_, body), answer in zip(requests(), want):
        if "json_schema" in body and body.get("n", 1) == 1:
            by_prompt.setdefault(body["prompt"], []).append(answer)
    assert sum(len(same) == 2 for same in by_prompt.values()) == 2
    assert all(a == same[0] for same in by_prompt.values() for a in same)
    return want


def test_one_by_one(expected):
    with Server([SLUICE, "serve", *FLAGS, "16384", "--disable-jump-ahead"]) as s:
        assert answers(s.url) == expected
        assert state(s.url)["forced_tokens_total"] == 0


@pytest.mark.parametrize("flags", [["16384", "--chunked-prefill-size", "64", "--max-running-requests", "3"],
                                   ["16384", "--step-depth", "0"], ["16384", "--attn-cp-size", "2"]])
def test_in_other_steps(expected, flags):
    with Server([SLUICE, "serve", *FLAGS, *flags]) as s:
        assert answers(s.url) == expected
        assert state(s.url)["forced_tokens_total"] > 100
        s.wait_idle()


def test_after_retractions(expected):
    with Server([SLUICE, "serve", *FLAGS, "768", "--schedule-conservativeness", "0"]) as s:
        assert answers(s.url) == expected
        assert state(s.url)["retractions_total"] > 0
        s.wait_idle()


def test_with_drafts(expected):
    with Server([SLUICE, "serve", *FLAGS, "16384", "--speculative-algorithm", "NEXTN", "--speculative-adaptive", "off"]) as s:
        assert answers(s.url) == expected
        assert state(s.url)["forced_tokens_total"] == 0
        drafted = re.search(r"^sluice:spec_accepted_tokens_total\S* (\d+)", s.call("GET", "/metrics")[2].decode(), re.M)
        assert drafted and int(drafted[1]) > 0
        s.wait_idle()


def test_in_two_places(expected):
    cluster = Cluster(common=["--disaggregation-transfer-backend", "tcp", "--tool-call-parser", "glm47"])
    assert answers(cluster.url) == expected
    assert state(cluster.decodes[0].url)["forced_tokens_total"] > 100
    cluster.check_idle()
    cluster.stop()
