"""What agents call: tools, reasoning and the messages API, through the real openai and anthropic packages."""

import json
import random
import subprocess

import anthropic
import openai
import pytest

from client import SCRIPTED, SLUICE, Server, records

CALLS = ("<think>plan</think>ok<tool_call>get_weather\n<arg_key>p</arg_key>\n<arg_value>C:\\a\\worker.js</arg_value>\n"
         "</tool_call><tool_call>ping\n</tool_call>")
TOOLS = [{"type": "function", "function": {"name": name, "description": "d", "parameters": {
    "type": "object", "properties": {"p": {"type": "string"}}}}} for name in ("get", "get_weather", "ping")]
MESSAGES_TOOLS = [{"name": t["function"]["name"], "description": "d", "input_schema": t["function"]["parameters"]}
                  for t in TOOLS]


@pytest.fixture(scope="module")
def server():
    with Server([SCRIPTED, "--tool-call-parser", "glm47", "--step-us", "100"]) as s:
        yield s


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def claude(server):
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def script(say, **more):
    return [{"role": "user", "content": json.dumps({"say": say, **more})}]


def ask(client, say, script_fields=None, **more):
    return client.chat.completions.create(model="scripted", messages=script(say, **(script_fields or {})), **more)


def joined(stream):
    """What the chunks add up to: (content, reasoning, calls, finish reasons)."""
    content, reasoning, calls, finish = "", "", [], []
    for chunk in stream:
        for choice in chunk.choices:
            delta = choice.delta
            content += delta.content or ""
            reasoning += getattr(delta, "reasoning_content", None) or ""
            for piece in delta.tool_calls or []:
                if piece.id:
                    assert piece.index == len(calls) and piece.function.name and piece.type == "function"
                    calls.append([piece.id, piece.function.name, ""])
                assert piece.function.name is None or piece.id
                calls[piece.index][2] += piece.function.arguments or ""
            if choice.finish_reason:
                finish.append(choice.finish_reason)
    return content, reasoning, calls, finish


def test_calls_and_reasoning_come_apart(client):
    answer = ask(client, CALLS, tools=TOOLS)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert message.content == "ok" and message.reasoning_content == "plan"
    assert [(c.type, c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls] == [
        ("function", "get_weather", {"p": "C:\\a\\worker.js"}), ("function", "ping", {})]
    assert len({c.id for c in message.tool_calls}) == 2
    again = ask(client, CALLS, tools=TOOLS).choices[0].message
    assert not {c.id for c in message.tool_calls} & {c.id for c in again.tool_calls}


@pytest.mark.parametrize("per_step", [1, 2, 3, 7, 10000])
def test_streams_give_the_same_however_they_are_cut(client, per_step):
    whole = ask(client, CALLS, tools=TOOLS).choices[0].message
    content, reasoning, calls, finish = joined(
        ask(client, CALLS, {"per_step": per_step}, tools=TOOLS, stream=True))
    assert (content, reasoning, finish) == (whole.content, whole.reasoning_content, ["tool_calls"])
    assert [(name, arguments) for _, name, arguments in calls] == [
        (c.function.name, c.function.arguments) for c in whole.tool_calls]


def test_without_tools_markup_stays_text(client):
    for more in [{}, {"tools": TOOLS, "tool_choice": "none"}]:
        message = ask(client, CALLS, **more).choices[0].message
        assert message.tool_calls is None and message.content == CALLS.split("</think>")[1]
        assert message.reasoning_content == "plan"
    message = ask(client, CALLS, extra_body={"separate_reasoning": False}).choices[0].message
    assert message.content == CALLS and not hasattr(message, "reasoning_content")


def test_only_one_call_when_calls_may_not_be_parallel(client):
    for stream in (False, True):
        answer = ask(client, CALLS + "more", tools=TOOLS, parallel_tool_calls=False, stream=stream)
        if stream:
            _, _, calls, finish = joined(answer)
            assert [c[1] for c in calls] == ["get_weather"] and finish == ["tool_calls"]
        else:
            assert [c.function.name for c in answer.choices[0].message.tool_calls] == ["get_weather"]
            assert answer.choices[0].message.content == "ok"
            assert answer.usage.completion_tokens <= len(CALLS)


def test_broken_markup_is_text_and_a_stop(client):
    say = "a<tool_call>get\n<arg_key>p</arg_value>b"
    answer = ask(client, say, tools=TOOLS)
    assert answer.choices[0].message.content == say and answer.choices[0].finish_reason == "stop"
    cut = ask(client, CALLS, tools=TOOLS, max_tokens=60)
    assert cut.choices[0].finish_reason == "length" and cut.choices[0].message.tool_calls is None
    assert cut.choices[0].message.content.startswith("ok<tool_call>")


def test_reasoning_in_one_piece_on_request(server):
    body = {"messages": script("<think>abc</think>d"), "stream": True, "stream_reasoning": False}
    chunks = [json.loads(r) for r in records(server.call("POST", "/v1/chat/completions", body)[2])[:-1]]
    assert [c["choices"][0]["delta"]["reasoning_content"] for c in chunks
            if "reasoning_content" in c["choices"][0]["delta"]] == ["abc"]


def test_bad_tools_are_named(server):
    f = {"type": "function", "function": {"name": "f"}}
    for more, param in [({"tools": 5}, "tools"), ({"tools": [5]}, "tools[0]"), ({"tools": [{"type": "web"}]}, "tools[0].type"),
                        ({"tools": [{"type": "function"}]}, "tools[0].function"),
                        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
                        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
                        ({"tools": [f, f]}, "tools[1].function.name"),
                        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]},
                         "tools[0].function.parameters"),
                        ({"tool_choice": "required"}, "tool_choice"), ({"tool_choice": "some"}, "tool_choice"),
                        ({"tools": [f], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
                        ({"parallel_tool_calls": 1}, "parallel_tool_calls"), ({"separate_reasoning": "x"}, "separate_reasoning"),
                        ({"functions": [{}]}, "functions")]:
        status, answer = server.post("/v1/chat/completions", {"messages": script("x"), **more})
        assert status == 400 and answer["error"]["param"] == param, (more, answer)


# ---- the messages API ----

def test_messages_whole(claude):
    answer = claude.messages.create(model="m", max_tokens=500, messages=script(CALLS), tools=MESSAGES_TOOLS,
                                    system="", thinking={"type": "enabled", "budget_tokens": 1024})
    assert answer.type == "message" and answer.role == "assistant" and answer.stop_reason == "tool_use"
    assert [b.type for b in answer.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert answer.content[0].thinking == "plan" and answer.content[1].text == "ok"
    assert answer.content[2].name == "get_weather" and answer.content[2].input == {"p": "C:\\a\\worker.js"}
    assert answer.content[3].input == {} and answer.usage.output_tokens > 0
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == claude.messages.count_tokens(
        model="m", messages=script(CALLS), tools=MESSAGES_TOOLS).input_tokens


@pytest.mark.parametrize("per_step", [1, 5, 10000])
def test_messages_streamed(claude, per_step):
    with claude.messages.stream(model="m", max_tokens=500, messages=script(CALLS, per_step=per_step),
                                tools=MESSAGES_TOOLS) as stream:
        kinds = [event.type for event in stream]
        answer = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    assert answer.content[0].thinking == "plan" and answer.content[1].text == "ok"
    assert [(b.name, b.input) for b in answer.content[2:]] == [("get_weather", {"p": "C:\\a\\worker.js"}), ("ping", {})]
    assert answer.stop_reason == "tool_use" and answer.usage.output_tokens > 0


def test_messages_stop_reasons(claude):
    def end(say, **more):
        answer = claude.messages.create(model="m", messages=script(say), **{"max_tokens": 100, **more})
        return answer.stop_reason, answer.stop_sequence, "".join(b.text for b in answer.content)

    assert end("hello") == ("end_turn", None, "hello")
    assert end("hello", max_tokens=2) == ("max_tokens", None, "he")
    assert end("hello", stop_sequences=["ll"]) == ("stop_sequence", "ll", "he")


def test_messages_prefill_is_part_of_the_prompt(claude):
    said = json.dumps({"say": "abc"})
    answer = claude.messages.create(model="m", max_tokens=9, messages=[
        {"role": "user", "content": said[:5]}, {"role": "assistant", "content": said[5:]}])
    assert answer.content[0].text == "abc"


def test_messages_errors(server, claude):
    with pytest.raises(anthropic.BadRequestError) as e:
        claude.messages.create(model="m", max_tokens=0, messages=script("x"))
    assert e.value.body["error"]["type"] == "invalid_request_error" and "max_tokens" in e.value.body["error"]["message"]
    for more, what in [({"messages": []}, "messages"), ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
                       ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
                       ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
                       ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]}, "name"),
                       ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools[0].type"),
                       ({"tools": [{"name": "w"}]}, "input_schema"), ({"tool_choice": {"type": "x"}}, "tool_choice"),
                       ({"system": 5}, "system"), ({"temperature": 2}, "temperature"), ({"stop_sequences": [""]}, "stop_sequences"),
                       ({"max_tokens": None}, "max_tokens")]:
        status, answer = server.post("/v1/messages", {"model": "m", "max_tokens": 5, "messages": script("x"), **more})
        assert status == 400 and answer["type"] == "error" and what in answer["error"]["message"], (more, answer)
    for method, path, status in [("GET", "/v1/messages", 405), ("POST", "/v1/messages/batches", 404)]:
        got, _, body = server.call(method, path, b"{}")
        assert got == status and json.loads(body)["type"] == "error"
    with pytest.raises(anthropic.APIError):
        with claude.messages.stream(model="m", max_tokens=9, messages=script("abc", end="error", message="lost")) as stream:
            for _ in stream:
                pass


def test_messages_take_the_key_their_way():
    with Server([SCRIPTED, "--api-key", "sesame"]) as s:
        good = anthropic.Anthropic(base_url=s.url, api_key="sesame", max_retries=0)
        assert good.messages.create(model="m", max_tokens=9, messages=script("hi")).content[0].text == "hi"
        with pytest.raises(anthropic.AuthenticationError):
            anthropic.Anthropic(base_url=s.url, api_key="sesam", max_retries=0).messages.create(
                model="m", max_tokens=9, messages=script("hi"))
        body = json.dumps({"model": "m", "max_tokens": 1, "messages": script("x")}).encode()
        for headers in [["x-api-key: sesame", "x-api-key: sesame"], ["x-api-key: sesame", "Authorization: Bearer sesame"],
                        ["x-api-key: Bearer sesame"], []]:
            assert s.call("POST", "/v1/messages", body, headers=headers)[0] == 401


def test_responses_api_says_where_to_go(client):
    with pytest.raises(openai.NotFoundError) as e:
        client.responses.create(model="m", input="hi")
    assert "/v1/chat/completions" in e.value.message


# ---- with a real model: the same conversation in both forms makes one prompt ----

def test_forms_agree_on_the_prompt():
    with Server([SLUICE, "serve", "--port", "0", "--max-total-tokens", "16384"]) as s:
        openai_form = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q"}]
        messages_form = {"model": "m", "system": [{"type": "text", "text": "Be brief."}],
                         "messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}]}
        want = s.post("/tokenize", {"messages": openai_form, "chat_template_kwargs": {"enable_thinking": False, "thinking": False}})[1]
        got = s.post("/v1/messages/count_tokens", messages_form)[1]
        assert got["input_tokens"] == want["count"]
        a = s.post("/v1/chat/completions", {"messages": openai_form, "temperature": 0, "max_tokens": 20,
                                            "chat_template_kwargs": {"enable_thinking": False, "thinking": False}})[1]
        b = s.post("/v1/messages", {**messages_form, "max_tokens": 20, "temperature": 0})[1]
        assert "".join(c["text"] for c in b["content"]) == (a["choices"][0]["message"]["content"] or "")


def test_random_cuts(client):
    random.seed(5)
    text = CALLS + "".join(random.choice(["<tool_call>", "</think>", "é", "<arg_key>", "\n", "x", "</tool_call>", "🤗"])
                           for _ in range(60))
    whole = ask(client, text, tools=TOOLS).choices[0].message
    for _ in range(10):
        content, _, calls, _ = joined(ask(client, text, {"per_step": random.randrange(1, 40)}, tools=TOOLS, stream=True))
        assert content == whole.content and [c[1] for c in calls] == [c.function.name for c in whole.tool_calls]


# ---- bound answers, with the bundled model ----

@pytest.fixture(scope="module")
def real():
    with Server([SLUICE, "serve", "--port", "0", "--max-total-tokens", "32768", "--tool-call-parser", "glm47"]) as s:
        yield s


SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 30}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
                                            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
                                            "more": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
          "required": ["name", "age", "tags", "more"], "additionalProperties": False}


def check_schema(value, deep=0):
    assert set(value) == {"name", "age", "tags", "more"} and len(value["name"]) <= 30 and 0 <= value["age"] <= 150
    assert len(value["tags"]) <= 3 and set(value["tags"]) <= {"a", "b"} and deep < 300
    if value["more"] is not None:
        check_schema(value["more"], deep + 1)


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_structured_output(real, temperature):
    client = openai.OpenAI(base_url=real.url + "/v1", api_key="none", max_retries=0)

    def ask_for(max_tokens=200, **more):
        return client.chat.completions.create(model="x", messages=[{"role": "user", "content": "Mara has 17 red apples."}],
                                              temperature=temperature, max_tokens=max_tokens, seed=3, **more)

    fmt = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    for max_tokens in (60, 200):
        answer = ask_for(max_tokens, response_format=fmt, n=3)
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            check_schema(json.loads(choice.message.content))
    assert isinstance(json.loads(ask_for(response_format={"type": "json_object"}).choices[0].message.content), dict)
    content, _, _, finish = joined(ask_for(response_format=fmt, stream=True))
    check_schema(json.loads(content))
    assert finish == ["stop"]
    assert ask_for(extra_body={"regex": "(yes|no), \\d{3}"}).choices[0].message.content[:2] in ("ye", "no")
    assert ask_for(extra_body={"guided_choice": ["red (1)", "green"]}).choices[0].message.content in ("red (1)", "green")
    assert set(ask_for(extra_body={"ebnf": 'root ::= ("ab" | "c"){3}'}).choices[0].message.content) <= set("abc")


def test_forced_calls(real):
    client = openai.OpenAI(base_url=real.url + "/v1", api_key="none", max_retries=0)
    tools = [{"type": "function", "function": {"name": name, "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"]}}} for name in ("weather", "news")]

    def ask_for(choice, **more):
        return client.chat.completions.create(model="x", messages=[{"role": "user", "content": "weather in Oslo?"}], tools=tools,
                                              tool_choice=choice, max_tokens=120, temperature=1.2, seed=5, **more)

    for choice, names in [("required", {"weather", "news"}), ({"type": "function", "function": {"name": "news"}}, {"news"})]:
        answer = ask_for(choice, parallel_tool_calls=False).choices[0]
        assert answer.finish_reason == "tool_calls" and len(answer.message.tool_calls) == 1 and not answer.message.content
        call = answer.message.tool_calls[0].function
        arguments = json.loads(call.arguments)
        assert call.name in names and arguments["city"] in ("Rome", "Oslo") and 1 <= arguments["days"] <= 9
    _, _, calls, finish = joined(ask_for("required", stream=True))
    assert calls and finish == ["tool_calls"]
    claude = anthropic.Anthropic(base_url=real.url, api_key="none", max_retries=0)
    answer = claude.messages.create(model="m", max_tokens=120, messages=[{"role": "user", "content": "hi"}], tool_choice={"type": "any"},
                                    tools=[{"name": "news", "input_schema": tools[1]["function"]["parameters"]}])
    assert answer.stop_reason == "tool_use" and answer.content[0].input["city"] in ("Rome", "Oslo")


def test_bound_native_and_completions(real):
    status, answer = real.post("/generate", {"text": "x", "sampling_params": {"json_schema": json.dumps(SCHEMA), "max_new_tokens": 150}})
    assert status == 200
    check_schema(json.loads(answer["text"]))
    status, answer = real.post("/v1/completions", {"prompt": ["a", "b"], "regex": "[ab]{4}", "max_tokens": 20, "min_tokens": 10})
    assert status == 200 and all(len(c["text"]) == 4 and c["finish_reason"] == "stop" for c in answer["choices"])


def test_what_cannot_be_held_is_named(real):
    for more, param, says in [
            ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object", "patternProperties": {}}}}},
             "response_format.json_schema.schema", "patternProperties"),
            ({"regex": "a(?=b)"}, "regex", "look-around"), ({"ebnf": 'x ::= "1"'}, "ebnf", "root"), ({"regex": "("}, "regex", "character"),
            ({"response_format": {"type": "grammar"}}, "response_format.type", "grammar"), ({"response_format": {"type": "json_schema"}},
             "response_format.json_schema.schema", "missing"), ({"regex": "a", "ebnf": "b"}, "ebnf", "already"),
            ({"guided_json": 5}, "guided_json", "schema"), ({"structured_outputs": {"x": 1}}, "structured_outputs.x", "not supported")]:
        status, answer = real.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], **more})
        assert status == 400 and answer["error"]["param"] == param and says in answer["error"]["message"], (more, answer)


# ---- the terminal ----

def test_chat_in_the_terminal(server, real):
    def chat(url, text, *flags):
        return subprocess.run([SLUICE, "chat", url, *flags], input=text, capture_output=True, text=True, timeout=60)

    said = json.dumps({"say": "<think>hm</think>hello"})
    result = chat(server.url, said + "\n/stats\n/history\n/undo\n/history\n/nonsense\n/quit\nnever read\n")
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[:3] == ["hm", "", "hello"] and "first token" in lines[3] and "prompt" in lines[3]
    assert "user: " + said in lines and "assistant: hello" in lines and "0 messages are left" in lines
    assert "\033" not in result.stdout and "never" not in result.stdout and "/undo" in result.stdout
    first = "Mara has red apples: 17.\n"
    both = chat(real.url, first + "How many?\n/history\n", "--temperature", "0", "--max-tokens", "12")
    assert both.returncode == 0 and both.stdout.count("user: ") == 2 and both.stdout.count("assistant: ") == 2
    gone = chat("http://127.0.0.1:1", "x\n")
    assert gone.returncode == 3 and "sluice serve" in gone.stderr
    assert chat(server.url, "", "--temperature", "9").returncode == 2
    with Server([SCRIPTED, "--api-key", "sesame"]) as locked:
        refused = chat(locked.url, "x\n")
        assert refused.returncode == 3 and "--api-key" in refused.stderr
        assert chat(locked.url, json.dumps({"say": "in"}) + "\n", "--api-key", "sesame").stdout.startswith("in")
