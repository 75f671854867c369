"""The server over an engine that does what the prompt says: exact texts, malformed input, clients that leave, shutdown."""

import json
import random
import signal
import socket
import threading
import time

import openai
import pytest

from client import SCRIPTED, Server, dechunk, parse, read_all, read_until, records, request_bytes


@pytest.fixture(scope="module")
def server():
    with Server([SCRIPTED]) as s:
        yield s


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def script(**fields):
    return json.dumps(fields)


def chat(server, content, **more):
    return server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **more})


# ---- the real client ----

def test_openai_chat_and_models(client):
    answer = client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "hello"}])
    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert [m.id for m in client.models.list()] == ["scripted"]


def test_openai_streaming_with_usage(client):
    stream = client.chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": "hello"}], stream=True, n=2,
        stream_options={"include_usage": True})
    texts, finishes, usages, roles = {0: "", 1: ""}, {0: [], 1: []}, [], {0: 0, 1: 0}
    for chunk in stream:
        if chunk.usage:
            usages.append(chunk.usage)
            assert chunk.choices == []
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role == "assistant"
            if choice.finish_reason:
                finishes[choice.index].append(choice.finish_reason)
    assert texts == {0: "hello", 1: "hello"} and finishes == {0: ["stop"], 1: ["stop"]} and roles == {0: 1, 1: 1}
    assert len(usages) == 1 and usages[0].completion_tokens == 12 and usages[0].prompt_tokens == 5


def test_openai_logprobs(client):
    answer = client.chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": script(tokens=[[240, 159, 164, 151]])}], logprobs=True,
        top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert bytes(b for entry in content for b in entry.bytes).decode() == "🤗" == answer.choices[0].message.content
    assert [len(entry.top_logprobs) for entry in content] == [2, 2, 2, 2]
    assert content[1].logprob == -0.25
    old = client.completions.create(model="scripted", prompt="ab", max_tokens=1, logprobs=0, echo=True)
    assert old.choices[0].text == "aba"
    assert old.choices[0].logprobs.token_logprobs == [None, -0.125, -0.125]


def test_openai_errors(client):
    with pytest.raises(openai.BadRequestError) as e:
        client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "x"}], temperature=9)
    assert e.value.param == "temperature" and "9" in e.value.message
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.APIError) as e:
        for _ in client.chat.completions.create(model="scripted", stream=True, messages=[
                {"role": "user", "content": script(say="abc", end="error", code=77, message="broke")}]):
            pass
    assert "broke" in e.value.message
    with pytest.raises(openai.InternalServerError):
        client.chat.completions.create(model="scripted", messages=[
            {"role": "user", "content": script(say="abc", end="error", code=0)}])


# ---- framing of streams ----

def test_raw_stream_is_strict(server):
    with Server([SCRIPTED, "--ping-interval", "0.05"]) as slow:
        body = json.dumps({"messages": [{"role": "user", "content": script(say="a\nb", prefill_steps=300)}],
                           "stream": True}).encode()
        status, headers, answer = slow.call("POST", "/v1/chat/completions", body)
        assert status == 200 and headers["content-type"] == "text/event-stream" and headers["whole"]
        assert b": ping\n\n" in answer
        got = records(answer)
        assert got[-1] == "[DONE]"
        chunks = [json.loads(r) for r in got[:-1]]
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == "a\nb"
        assert [c["choices"][0]["finish_reason"] for c in chunks].count("stop") == 1
        assert len({c["id"] for c in chunks}) == 1


def test_failure_in_the_middle_is_an_error_record_and_no_stop(server):
    body = {"messages": [{"role": "user", "content": script(say="abc", end="error", code=13, message="lost it")}],
            "stream": True}
    status, headers, answer = server.call("POST", "/v1/chat/completions", body)
    got = [json.loads(r) for r in records(answer)]
    assert status == 200 and headers["whole"] and set(got[-1]) == {"error"}
    assert got[-1]["error"]["message"] == "lost it"
    assert all(c["choices"][0]["finish_reason"] is None for c in got[:-1])


def test_held_text_makes_no_empty_chunks(server):
    body = {"prompt": script(say="ABCDEFGHIJKLM"), "stream": True, "stop": ["HIJKLMZ"], "max_tokens": 10}
    chunks = [json.loads(r) for r in records(server.call("POST", "/v1/completions", body)[2])[:-1]]
    texts = [c["choices"][0]["text"] for c in chunks]
    assert "".join(texts) == "ABCDEFGHIJ" and all(texts)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


# ---- edge values and malformed bodies ----

def test_edge_values_leave_other_streams_alone(server):
    sockets = []
    for _ in range(4):
        s = server.connect()
        s.sendall(request_bytes("POST", "/v1/completions", json.dumps(
            {"prompt": script(say="x" * 400), "stream": True, "max_tokens": 1000}).encode()))
        sockets.append(s)
    for echo in (False, True):
        for value, want in [(0, 200), (1, 200), (None, 200), (-1, 400), (1.5, 400), ("5", 400), (2**31, 400), (2**63, 400)]:
            status, answer = server.post("/v1/completions", {"prompt": "ab", "max_tokens": value, "echo": echo})
            assert status == want, (value, echo, answer)
            if status == 400:
                assert answer["error"]["param"] == "max_tokens"
            elif value == 0:
                assert answer["choices"][0]["text"] == ("ab" if echo else "")
                assert answer["choices"][0]["finish_reason"] == "length"
    for prompt, want in [("", 400), ([""], 400), ([], 400), ([[]], 400), (["a", ""], 400), ([1, 2, 3], 200), ([[1], [2]], 200)]:
        assert server.post("/v1/completions", {"prompt": prompt})[0] == want, prompt
    assert server.post("/v1/chat/completions", {"messages": []})[0] == 400
    assert chat(server, "")[0] == 400  # this template makes no token of it
    for s in sockets:
        with s:
            got = records(parse(read_all(s))[2])
            assert got[-1] == "[DONE]" and "".join(json.loads(r)["choices"][0]["text"] for r in got[:-1]) == "x" * 400


MALFORMED = [b"{:", b"", b"null", b"[]", b'"x"', b'{"prompt":"\xff\xfe"}', '{"prompt":"中文"}'.encode("gbk"),
             b'{"prompt":"\\ud800"}', b'{"prompt":"a","prompt":"b"}', b'{"prompt":"a",}',
             b'{"' + b"k" * 60 + "é".encode() * 70 + b'":1,"prompt":5}',
             b'{"prompt":"a","temperature":NaN}', b'{"prompt":"a","temperature":1e999}', b'{"prompt":[-1]}',
             b'{"prompt":[4294967296]}', b'{"prompt":[259]}']


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate", "/tokenize"])
def test_malformed_bodies(server, path):
    for depth in (3000, 100000):
        for key in (b"x", b"tools"):
            MALFORMED.append(b'{"' + key + b'":' + b"[" * depth + b"]" * depth + b"}")
    for body in MALFORMED:
        status, headers, answer = server.call("POST", path, body)
        if path == "/tokenize" and status == 200:
            assert b"temperature" in body  # ignored there
            continue
        assert status == 400, body[:80]
        error = json.loads(answer.decode())["error"]
        assert error["message"] and {"message", "type", "param", "code"} == set(error)
    assert server.alive()


def test_any_content_type_will_do_but_for_pages_of_other_sites(server):
    body = b'{"prompt":"a"}'
    for header in ("text/plain", "application/x-www-form-urlencoded", "", "application/json; charset=utf-8"):
        assert server.call("POST", "/v1/completions", body, headers=["Content-Type: " + header])[0] == 200
    foreign = ["Content-Type: text/plain", "Origin: https://other.example"]
    assert server.call("POST", "/v1/completions", body, headers=foreign)[0] == 400


def test_large_bodies_are_refused_early_in_both_framings(server):
    limit = 16 << 20
    with server.connect() as s:
        s.sendall(f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {limit + 1}"
                  "\r\n\r\n".encode())
        assert read_until(s, b"\r\n").startswith(b"HTTP/1.1 413 ")  # before a byte of it was sent
    with server.connect() as s:
        s.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        piece = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
        for _ in range(16):
            s.sendall(piece)
        s.sendall(b"1\r\n")
        assert parse(read_all(s))[0] == 413
    assert server.alive()


def test_one_small_request_does_not_take_the_machine(server):
    assert server.alive()
    before = server.rss_kib()
    for fields in [{"logprobs": 10**9}, {"n": 5000000}, {"temperature": 999999}, {"top_p": -1}, {"repetition_penalty": 0},
                   {"n": 0}, {"best_of": 10**6}, {"logit_bias": {"259": 1}}, {"logit_bias": {"1": 1e30}},
                   {"stop": ["a", "b", "c", "d", "e"]}, {"min_p": 2}, {"stop_token_ids": [10**6]}]:
        status, answer = server.post("/v1/completions", {"prompt": "a", **fields})
        assert status == 400 and next(iter(fields)) in answer["error"]["message"], fields
    assert chat(server, "a", logprobs=True, top_logprobs=10**9)[0] == 400
    assert server.call("POST", "/v1/completions", b'{"prompt":"a","seed":18446744073709551616}')[0] == 400
    assert server.post("/v1/completions", {"prompt": "a", "temperature": -0.0})[0] == 200
    many = "{" + ",".join(f'"{i}":1' for i in range(500000)) + "}"
    assert server.call("POST", "/v1/completions", b'{"prompt":"a","logit_bias":' + many.encode() + b"}")[0] == 400
    assert server.alive()
    assert server.rss_kib() - before < 50 * 1024


def test_api_ranges_of_sampling(server):
    for ok in [{"temperature": 0}, {"temperature": 1e-30}, {"top_k": 0}, {"top_k": -1}, {"top_k": 10**6}, {"top_p": 1e-9},
               {"min_p": 1}, {"seed": -5}, {"seed": 2**64 - 1}]:
        assert server.post("/v1/completions", {"prompt": "a", **ok})[0] == 200, ok
    for bad in [{"top_p": 0}, {"top_k": -2}, {"repetition_penalty": 0}, {"temperature": -1}, {"seed": "1"}]:
        assert server.post("/v1/completions", {"prompt": "a", **bad})[0] == 400, bad


def test_keys_from_a_raw_socket():
    with Server([SCRIPTED, "--api-key", "sesame"]) as s:
        want = None
        for headers in [[], ["Authorization: Bearer"], ["Authorization: bearer sesame"], ["Authorization: Bearer  sesame"],
                        ["Authorization: Bearer sesame\0"], ["Authorization: Bearer sesam"],
                        ["Authorization: Bearer " + "k" * (1 << 20)],
                        ["Authorization: Bearer sesame", "Authorization: Bearer sesame"]]:
            for path in ["/metrics", "/v1/models", "/v1/models?api_key=sesame", "/server_info", "/flush_cache"]:
                status, _, body = s.call("GET", path, headers=headers)
                want = want or body
                assert (status, body) == (401, want), (headers[:1], path)
        assert s.call("GET", "/metrics", headers=["Authorization: Bearer sesame"])[0] == 200
        assert s.call("GET", "/health")[0] == 200
        assert "sesame" not in s.log_text()


# ---- long text ----

def test_short_requests_stay_fast_beside_a_long_one():
    with Server([SCRIPTED, "--context", "4000000"]) as s:
        long_body = json.dumps({"prompt": "a" * (1 << 20), "max_tokens": 1}).encode()
        long_status = []
        threads = [threading.Thread(target=lambda: long_status.append(s.call("POST", "/v1/completions", long_body)[0]))
                   for _ in range(3)]
        for t in threads:
            t.start()
        slowest = 0
        for _ in range(10):
            begin = time.monotonic()
            assert s.post("/v1/completions", {"prompt": "a", "max_tokens": 1})[0] == 200
            slowest = max(slowest, time.monotonic() - begin)
        for t in threads:
            t.join()
        assert long_status == [200] * 3 and slowest < 0.2
    with Server([SCRIPTED, "--context", "1000"]) as s:
        for stream in (False, True):
            status, answer = s.post("/v1/completions", {"prompt": "a" * (1 << 20), "stream": stream})
            assert status == 400 and answer["error"]["code"] == "context_length_exceeded"


# ---- clients that leave ----

STEP_S = 0.02
LONG_STEP_S = 0.1  # so long that what a test needs to look twice is far less than a step
HANG = dict(say="abcdefgh", end="hang")


@pytest.fixture(scope="module")
def slow_server():
    with Server([SCRIPTED, "--step-us", str(int(STEP_S * 1e6)), "--max-running", "2", "--write-stall", "1"]) as s:
        yield s


@pytest.fixture(scope="module")
def stepping_server():
    with Server([SCRIPTED, "--step-us", str(int(LONG_STEP_S * 1e6)), "--max-running", "2"]) as s:
        yield s


def wait_for(condition, seconds=20):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


def steps_until_idle(server):
    before = server.info()["steps"]
    return server.wait_idle()["steps"] - before


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("phase", ["queued", "prefill", "streaming", "decode"])
def test_a_closed_client_ends_its_work_within_two_steps(stepping_server, phase, n):
    server = stepping_server
    server.wait_idle()
    blockers = []
    if phase == "queued":
        for _ in range(2):
            s = server.connect()
            s.sendall(request_bytes("POST", "/generate", json.dumps({"text": script(**HANG)}).encode()))
            blockers.append(s)
        wait_for(lambda: server.info()["num_running_reqs"] == 2)
    aborted = server.info()["requests_aborted"]
    s = server.connect()
    body = {"prompt": script(**{**HANG, "prefill_steps": 1000 if phase == "prefill" else 0}), "n": n, "max_tokens": 1000,
            "stream": phase in ("streaming", "queued")}
    s.sendall(request_bytes("POST", "/v1/completions", json.dumps(body).encode()))
    if phase == "queued":
        wait_for(lambda: server.info()["num_queue_reqs"] == 1)
    elif phase == "streaming":
        read_until(s, b'"text":"c"')
    else:
        wait_for(lambda: server.info()["num_running_reqs"] == 1)
        time.sleep(2 * LONG_STEP_S)
    steps = server.info()["steps"]
    s.close()
    wait_for(lambda: server.info()["requests_aborted"] == aborted + 1)
    assert server.info()["steps"] - steps <= 2
    for b in blockers:
        b.close()
    server.wait_idle()


def test_a_half_closed_client_is_answered(slow_server):
    for stream in (False, True):
        with slow_server.connect() as s:
            s.sendall(request_bytes("POST", "/v1/completions", json.dumps(
                {"prompt": script(say="abcdefgh", prefill_steps=20), "stream": stream, "max_tokens": 100}).encode()))
            s.shutdown(socket.SHUT_WR)
            raw = read_all(s)
        status, headers, body = parse(raw)
        assert status == 200 and raw.startswith(b"HTTP/1.1 200 OK\r\n")
        if stream:
            assert records(body)[-1] == "[DONE]"
        else:
            assert json.loads(body)["choices"][0]["text"] == "abcdefgh"


def test_a_client_that_stops_reading_is_dropped():
    with Server([SCRIPTED, "--step-us", "200", "--write-stall", "1"]) as server:
        before = server.rss_kib()
        with server.connect(receive_buffer=4096) as s:
            body = json.dumps({"text": script(say="A" * 20000, per_step=20, end="hang"), "stream": True,
                               "sampling_params": {"max_new_tokens": 30000}}).encode()
            s.sendall(request_bytes("POST", "/generate", body))
            wait_for(lambda: server.info()["requests_aborted"] == 1, seconds=20)
        server.wait_idle()
        assert server.rss_kib() - before < 20 * 1024
        assert b'reason="slow_reader"' in server.call("GET", "/metrics")[2]


def test_two_hundred_clients_that_leave_at_random_moments(slow_server):
    server = slow_server
    server.wait_idle()
    rng = random.Random(5)
    finished = server.info()["requests_finished"]
    aborted = server.info()["requests_aborted"]
    for i in range(200):
        s = server.connect()
        body = {"prompt": script(**{**HANG, "prefill_steps": rng.randrange(3)}), "n": rng.choice([1, 4]), "max_tokens": 1000,
                "stream": rng.random() < 0.5}
        s.sendall(request_bytes("POST", "/v1/completions", json.dumps(body).encode()))
        if i % 4:
            time.sleep(rng.random() * 0.01)
        s.close()
    state = server.wait_idle()
    assert state["requests_finished"] == finished
    assert aborted <= state["requests_aborted"] <= aborted + 200
    assert server.alive()


# ---- shutdown ----

def test_sigterm_finishes_or_ends_every_stream():
    with Server([SCRIPTED, "--step-us", "20000", "--max-running", "8", "--shutdown-timeout", "1"]) as server:
        sockets = []
        for i in range(16):
            s = server.connect()
            text = script(say="abcdef") if i < 4 else script(say="ab", end="hang")
            s.sendall(request_bytes("POST", "/v1/completions", json.dumps({"prompt": text, "stream": True}).encode()))
            sockets.append(s)
            if i == 7:
                wait_for(lambda: server.info()["num_running_reqs"] == 8)
        wait_for(lambda: server.info()["num_queue_reqs"] > 0)
        server.terminate()
        wait_for(lambda: server.call("GET", "/health")[0] == 503)
        assert server.post("/v1/completions", {"prompt": "x"})[0] == 503
        ends = []
        for s in sockets:
            with s:
                status, headers, body = parse(read_all(s))
                assert status == 200 and headers["whole"]
                ends.append(records(body)[-1])
        assert ends[:4] == ["[DONE]"] * 4
        assert all("error" in json.loads(e) for e in ends[4:])
        assert server.process.wait(timeout=30) == 0


def test_a_second_sigterm_ends_every_request_with_its_error():
    with Server([SCRIPTED, "--shutdown-timeout", "600", "--max-running", "8"]) as server:
        sockets = []
        for i in range(16):  # eight run, eight wait
            s = server.connect()
            s.sendall(request_bytes("POST", "/v1/completions", json.dumps(
                {"prompt": script(say="ab", end="hang"), "stream": i % 2 == 0, "max_tokens": 1000}).encode()))
            sockets.append(s)
        wait_for(lambda: server.info()["num_queue_reqs"] == 8)
        server.terminate()
        wait_for(lambda: server.call("GET", "/health")[0] == 503)
        assert server.info()["num_running_reqs"] == 8  # the first signal lets them run
        server.terminate()
        for i, s in enumerate(sockets):
            with s:
                status, headers, body = parse(read_all(s))
                assert headers.get("whole", True)
                if i % 2 == 0:
                    assert status == 200 and "error" in json.loads(records(body)[-1])
                else:
                    assert status == 503 and json.loads(body)["error"]["message"]
        assert server.process.wait(timeout=30) == 0


def listens(server):
    try:
        server.connect().close()
        return True
    except ConnectionError:
        return False


def test_a_third_sigterm_leaves_at_once():
    with Server([SCRIPTED, "--shutdown-timeout", "600", "--write-stall", "600"]) as server:
        with server.connect(receive_buffer=4096) as s:  # never reads: its answer's end cannot get out
            s.sendall(request_bytes("POST", "/generate", json.dumps(
                {"text": script(say="A" * 20000, per_step=20, end="hang"), "stream": True,
                 "sampling_params": {"max_new_tokens": 30000}}).encode()))
            wait_for(lambda: server.info()["num_running_reqs"] == 1)
            server.terminate()
            wait_for(lambda: server.call("GET", "/health")[0] == 503)
            server.terminate()
            wait_for(lambda: not listens(server))  # it waits for this client to take its bytes
            server.terminate()
            assert server.process.wait(timeout=30) == 128 + signal.SIGTERM


def test_ten_thousand_requests_write_no_line_each(server):
    lines = server.log_text().count("\n")
    request = request_bytes("POST", "/v1/completions", b'{"prompt":"a","max_tokens":1}', close=False)

    def run():
        with server.connect() as s:
            for _ in range(1250):
                s.sendall(request)
                answer = read_until(s, b"\r\n\r\n")
                length = int(answer.split(b"Content-Length: ")[1].split(b"\r\n")[0])
                body = answer.split(b"\r\n\r\n", 1)[1]
                while len(body) < length:
                    body += s.recv(65536)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert server.info()["requests_finished"] >= 10000
    assert server.log_text().count("\n") - lines < 10
