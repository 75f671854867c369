"""Fields and flags that clients send, each by what it does to a running server: priority, rid, timeout, batches, echo, usage, origins."""

import json
import threading
import time

import pytest

from client import SLUICE, Server, records

FLAGS = ["--port", "0", "--max-total-tokens", "32768"]
FOREVER = {"max_tokens": 30000, "ignore_eos": True}


@pytest.fixture(scope="module")
def server():
    with Server([SLUICE, "serve", *FLAGS, "--cors-origins", "http://a.example"]) as s:
        yield s


def complete(server, prompt, **more):
    status, answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 6, "temperature": 0, "ignore_eos": True, **more})
    assert status == 200, answer
    return answer


def test_prompts_as_text_and_ids_alone_and_in_batches(server):
    texts = ["Mara has red apples: 17.", "Ivo", "Ledger: green cups."]
    ids = [server.post("/tokenize", {"prompt": t})[1]["tokens"] for t in texts]
    alone = [complete(server, t)["choices"][0]["text"] for t in texts]
    assert len(set(alone)) > 1
    for prompts in (texts, ids):
        answer = complete(server, prompts)
        assert [c["index"] for c in sorted(answer["choices"], key=lambda c: c["index"])] == [0, 1, 2]
        assert [c["text"] for c in sorted(answer["choices"], key=lambda c: c["index"])] == alone
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids)) and answer["usage"]["completion_tokens"] == 18
    assert complete(server, ids[0])["choices"][0]["text"] == alone[0]
    # Choices of a prompt stand together.
    answer = complete(server, texts[:2], n=2, best_of=2)
    assert [c["text"] for c in sorted(answer["choices"], key=lambda c: c["index"])] == [alone[0]] * 2 + [alone[1]] * 2
    status, refused = server.post("/v1/completions", {"prompt": "a", "n": 1, "best_of": 3})
    assert status == 400 and refused["error"]["param"] == "best_of"


def test_echo_and_scores_of_batches(server):
    ids = server.post("/tokenize", {"prompt": "Mara has red apples: 17."})[1]["tokens"]
    whole = complete(server, [ids, ids[:4]], echo=True, logprobs=2, max_tokens=2)
    long, short = sorted(whole["choices"], key=lambda c: c["index"])
    assert long["text"].startswith("Mara has red apples: 17.") and len(long["logprobs"]["tokens"]) == len(ids) + 2
    assert long["logprobs"]["token_logprobs"][0] is None and len(short["logprobs"]["tokens"]) == 6
    assert short["logprobs"]["token_logprobs"][1:4] == long["logprobs"]["token_logprobs"][1:4]
    for choice in (long, short):
        for token, logprob, top in list(zip(*(choice["logprobs"][k] for k in ("tokens", "token_logprobs", "top_logprobs"))))[1:]:
            assert logprob <= 1e-6 and len(top) in (2, 3) and max(top.values()) >= logprob - 1e-6
    # The native form scores from where it is told to.
    native = server.post("/generate", {"input_ids": ids, "return_logprob": True, "logprob_start_len": 3,
                                       "sampling_params": {"max_new_tokens": 1, "temperature": 0}})[1]["meta_info"]
    scores = native["input_token_logprobs"]
    assert [s[1] for s in scores] == ids[3:]
    assert [round(s[0], 4) for s in scores[1:]] == [round(x, 4) for x in long["logprobs"]["token_logprobs"][4:len(ids)]]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_in_every_record_when_asked_for(server, path):
    # A slow reader gets several tokens in one record, but not all of so many.
    body = {"max_tokens": 200, "ignore_eos": True, "temperature": 0, "stream": True}
    body |= {"prompt": "Mara"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Mara"}]}

    def usages(**options):
        text = server.call("POST", path, {**body, "stream_options": options})[2]
        return [json.loads(r).get("usage") for r in records(text) if r != "[DONE]"]

    every = usages(include_usage=True, continuous_usage_stats=True)
    assert all(every) and every[-1]["completion_tokens"] == 200
    counts = [u["completion_tokens"] for u in every]
    assert counts == sorted(counts) and len(set(counts)) >= 3
    assert all(u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] for u in every)
    last = usages(include_usage=True)
    assert last[-1] == every[-1] and not any(last[:-1])
    assert not any(usages())


def test_names_are_unique_while_they_run_and_end_by_name(server):
    got = []
    thread = threading.Thread(target=lambda: got.append(server.post("/v1/completions", {"prompt": "a", "rid": "one", **FOREVER})))
    thread.start()
    while server.info()["num_running_reqs"] == 0:
        time.sleep(0.01)
    assert server.post("/v1/completions", {"prompt": "b", "rid": "one", "max_tokens": 1})[0] == 409
    assert server.post("/abort_request", {"rid": "other"})[1]["aborted"] == 0
    assert server.post("/abort_request", {"rid": "one"})[1]["aborted"] == 1
    thread.join()
    assert got[0][0] == 499 or got[0][1]["choices"][0]["finish_reason"] == "abort"
    server.wait_idle()
    assert server.post("/v1/completions", {"prompt": "b", "rid": "one", "max_tokens": 1})[0] == 200


def test_namespaces_of_the_cache(server):
    prompt = list(range(10, 210))

    def cached(**more):
        return complete(server, prompt, max_tokens=1, **more)["usage"]["prompt_tokens_details"]["cached_tokens"]

    first = {"cache_salt": "s", "extra_key": "e"}
    assert [cached(**first), cached(**first), cached(cache_salt="s"), cached(extra_key="e"), cached()] == [0, 192, 0, 0, 0]
    assert [cached(cache_salt="s"), cached(extra_key="e"), cached(**first), cached()] == [192, 192, 192, 192]


def test_a_request_may_take_its_time_and_no_more(server):
    for stream in (False, True):
        begin = time.monotonic()
        status, _, body = server.call("POST", "/v1/completions", {"prompt": "a", "timeout": 0.3, "stream": stream, **FOREVER})
        assert time.monotonic() - begin < 10
        assert status == (200 if stream else 504)
        if stream:
            assert b"[DONE]" not in body and "error" in json.loads(records(body)[-1])
    status, _ = server.post("/v1/messages", {"model": "m", "max_tokens": 30000, "timeout": 0.1, "messages": [{"role": "user", "content": "Count."}]})
    assert status in (200, 504)  # the model may end before
    server.wait_idle()
    with Server([SLUICE, "serve", *FLAGS, "--request-timeout", "0.3"]) as s:
        assert s.post("/v1/completions", {"prompt": "a", **FOREVER})[0] == 504
        assert s.post("/v1/completions", {"prompt": "a", "max_tokens": 2})[0] == 200
        s.wait_idle()


def test_pages_of_named_origins_may_call(server):
    def preflight(origin):
        status, headers, _ = server.call("OPTIONS", "/v1/chat/completions", headers=[
            f"Origin: {origin}", "Access-Control-Request-Method: POST", "Access-Control-Request-Headers: content-type,authorization"])
        return status, headers.get("access-control-allow-origin")

    status, allowed = preflight("http://a.example")
    assert status in (200, 204) and allowed == "http://a.example"
    assert preflight("http://b.example")[1] is None
    assert server.call("GET", "/v1/models", headers=["Origin: http://a.example"])[1]["access-control-allow-origin"] == "http://a.example"
    with Server([SLUICE, "serve", *FLAGS]) as s:
        assert "access-control-allow-origin" not in s.call("GET", "/v1/models", headers=["Origin: http://a.example"])[1]


@pytest.mark.parametrize("flags,order", [(["--enable-priority-scheduling"], ["high", "low"]), ([], ["low", "high"])])
def test_urgent_requests_go_first_where_the_server_is_told_to(flags, order):
    with Server([SLUICE, "serve", *FLAGS, "--max-running-requests", "1", *flags]) as s:
        ended = []

        def start(name, priority, **more):
            def run():
                s.post("/v1/completions", {"prompt": name, "rid": name, "priority": priority, "max_tokens": 3, "ignore_eos": True, **more})
                ended.append(name)
            thread = threading.Thread(target=run)
            thread.start()
            return thread

        def wait(**counts):
            while any(s.info()[k] != v for k, v in counts.items()):
                time.sleep(0.01)

        threads = [start("blocker", 9, **FOREVER)]
        wait(num_running_reqs=1)
        for queued, (name, priority) in enumerate([("low", -1), ("high", 5)], 1):
            threads.append(start(name, priority, max_tokens=400))
            wait(num_queue_reqs=queued)
        s.post("/abort_request", {"rid": "blocker"})
        for thread in threads:
            thread.join()
        assert [name for name in ended if name != "blocker"] == order
