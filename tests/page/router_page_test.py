"""The router's page in a browser: chat through it, every instance's cache, and when the layers of a request moved."""

import json
import os
import pathlib
import sys

import pytest

sys.path[:0] = [str(pathlib.Path(__file__).parent.parent / name) for name in ("api", "disagg")]
from cdp import Browser  # noqa: E402
from checks import CONTRAST, LABELS, say  # noqa: E402
from client import Server  # noqa: E402
from cluster import SLUICE, Cluster, call  # noqa: E402

SHOTS = pathlib.Path(os.environ["SLUICE_BUILD_DIR"]) / "page"
PROMPT = "Ledger: " + "Mara has red apples: 17. Ivo has green cups: 4. " * 30
LIVE = "document.querySelector('#live').classList.contains('on') && samples.length === {} && samples.every(Boolean)"


@pytest.fixture(scope="module")
def cluster():
    c = Cluster(common=["--disaggregation-transfer-backend", "tcp", "--chunked-prefill-size", "256"],
                prefill=["--disaggregation-layer-group", "2"])
    yield c
    c.stop()


def state(url):
    return call(url, "/server_info")[1]["internal_states"][0]


def test_chat_and_the_caches_of_both_sides(cluster):
    with Browser() as b:
        b.open(cluster.url + "/")
        b.until(LIVE.format(2))
        b.js("document.querySelector('#temperature').value = 0; document.querySelector('#max-tokens').value = 24")
        body = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0, "max_tokens": 24}
        want = call(cluster.url, "/v1/chat/completions", body)[1]["choices"][0]["message"]["content"]
        assert say(b, PROMPT).split() == want.split()
        assert "cached" in b.js("document.querySelector('.meta').textContent")
        cluster.check_idle()
        # Each instance's cache is drawn as its own /server_info has it.
        for i, instance in enumerate([cluster.prefills[0], cluster.decodes[0]]):
            b.click(f"#instances button:nth-child({i + 1})")
            has = state(instance.url)["cache"]
            b.until(f"chosen === {i} && now && now.tree_nodes === {has['nodes']} && now.nodes.every(n => n.lock === 0)")
            drawn = b.js("now.nodes.map(n => n.pages).join('')")
            assert sum(c in "01234567" for c in drawn) == has["device_pages"]["cached"] > 2
            assert b.js("boxes.length") == has["nodes"]
            assert b.js("now.lanes.reduce((a, l) => a + l.all, 0)") == has["device_pages"]["all"]
            pressed = b.js("[...document.querySelectorAll('#instances button')].map(e => e.getAttribute('aria-pressed'))")
            assert pressed == [str(k == i).lower() for k in range(2)]
        texts = b.js("[...document.querySelectorAll('#instances button')].map(e => e.textContent)")
        assert texts[0].startswith("Prefill") and texts[1].startswith("Decode") and all("healthy" in t for t in texts)
        assert b.complaints() == []
        assert all(u.startswith((cluster.url, "data:", "about:")) for u in b.requested()), b.requested()


def test_the_transfer_of_a_request_is_drawn_as_prefill_saw_it(cluster):
    cluster.flush()
    with Browser() as b:
        b.open(cluster.url + "/")
        b.until(LIVE.format(2))
        before = call(cluster.prefills[0].url, "/server_info")[1]["disaggregation"]["bytes_sent"]
        last = b.js("now && now.rooms.length ? now.rooms.at(-1).room : ''")
        say(b, PROMPT)
        cluster.check_idle()
        sent = call(cluster.prefills[0].url, "/server_info")[1]["disaggregation"]["bytes_sent"] - before
        # The page hears of a room while it still moves; it must end with every byte.
        b.until(f"now && now.role === 'prefill' && now.rooms.length > 0 && now.rooms.at(-1).room !== {json.dumps(last)} && "
                f"now.rooms.at(-1).moves.reduce((a, m) => a + m[3], 0) >= {sent} && "
                "document.querySelector('#room').value === now.rooms.at(-1).room")
        room = b.js("now.rooms.at(-1)")
        assert sum(m[3] for m in room["moves"]) == sent > 0 and room["transport"] == "tcp" and not room["failed"]
        assert len(room["forwards"]) == -(-room["tokens"] // 256) > 1, room["forwards"]
        assert room["forwards"][0][0] == 0 and room["forwards"][-1][1] == room["tokens"]
        for begin, end in [f[2:] for f in room["forwards"]] + [m[4:] for m in room["moves"]]:
            assert 0 <= begin <= end
        layers = {layer for m in room["moves"] for layer in range(m[0], m[1] + 1)}
        assert layers == set(range(max(layers) + 1)) and len(layers) > 2
        # One row for the forward, one a group of layers, one bar a move.
        rows = b.js("[...document.querySelectorAll('#timeline > span')].map(e => e.textContent).filter(Boolean)")
        assert rows[0] == "forward" and len(rows) == 1 + len({tuple(m[:2]) for m in room["moves"]})
        assert b.js("document.querySelectorAll('#timeline .forward').length") == len(room["forwards"])
        assert b.js("document.querySelectorAll('#timeline .early, #timeline .late').length") == len(room["moves"])
        late = sum(m[5] > room["forwards"][-1][3] for m in room["moves"])
        assert b.js("document.querySelectorAll('#timeline .late').length") == late
        assert f"{room['tokens']} tokens" in b.js("document.querySelector('#timeline').getAttribute('aria-label')")
        b.screenshot(SHOTS / "router-light.png")
        b.click("#theme")
        b.screenshot(SHOTS / "router-dark.png")
        b.click("#instances button:nth-child(2)")
        b.until("now && now.role === 'decode' && document.querySelector('#timeline').textContent.includes('waits')")
    # The prefill instance's own page shows the same.
    with Browser() as b:
        b.open(cluster.prefills[0].url + "/")
        b.until("now && now.rooms.length > 0 && !document.querySelector('#transfers').classList.contains('hidden')")
        assert b.js("now.rooms.at(-1).room") == room["room"]
        assert b.js("document.querySelector('#deployment').classList.contains('hidden')")
        assert b.complaints() == []


def test_it_can_be_used_and_read(cluster):
    with Browser() as b:
        b.open(cluster.url + "/")
        b.until(LIVE.format(2))
        say(b, PROMPT)
        b.until("!document.querySelector('#transfers').classList.contains('hidden')")
        for theme in ("light", "dark"):
            b.js(f"setTheme({json.dumps(theme == 'dark')})")
            assert b.js(CONTRAST) == [], theme
        assert b.js(LABELS) == []
        b.js("document.activeElement.blur(); document.body.focus()")
        reached = []
        for _ in range(40):
            b.key("Tab")
            reached.append(b.js("document.activeElement.id || document.activeElement.className"))
            assert b.js("(() => { const e = document.activeElement, s = getComputedStyle(e); return e === document.body || e.className === 'skip' || s.outlineStyle !== 'none' || e.form !== null && e.form !== undefined; })()"), reached[-1]
        for wanted in ("instance", "tree", "room"):
            assert wanted in reached, (wanted, reached)
        for width in (390, 800):
            b.do("Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=False)
            assert b.js("document.documentElement.scrollWidth <= innerWidth"), width
        assert b.complaints() == []


def test_an_ill_instance_is_named_and_comes_back(cluster):
    with Browser() as b:
        b.open(cluster.url + "/")
        b.until(LIVE.format(2))
        cluster.decodes[0].kill()
        b.until("document.querySelector('#instances').children[1]?.textContent.includes('ill:')")
        b.until("document.querySelector('#instances').children[1]?.textContent.includes('no live data')")
        assert "healthy" in b.js("document.querySelector('#instances').children[0].textContent")
        cluster.decodes[0].start()
        b.until("document.querySelector('#instances').children[1]?.textContent.includes('healthy') && fresh(1)", 60)
        assert say(b, "Hello")


def test_keys_pass_through_and_viewers_are_bounded():
    flags = ["--threads", "1", "--port", "0", "--max-total-tokens", "8192"]
    with Server([SLUICE, "serve", *flags, "--api-key", "sesame"]) as one:
        router = [SLUICE, "router", "--worker", one.url, "--port", "0", "--health-check-interval", "0.1"]
        with Server(router) as r, Browser() as b:
            assert r.call("GET", "/live")[0] == 401
            b.open(r.url + "/")
            b.until("document.querySelector('#key-dialog').open")
            b.js("document.querySelector('#key').focus()")
            b.type("sesame")
            b.key("Enter", text="\r")
            b.until(LIVE.format(1))
            assert say(b, "Hello")
            held = []
            for _ in range(15):
                held.append(r.connect())
                held[-1].sendall(b"GET /live HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sesame\r\n\r\n")
                assert b" 200 " in held[-1].recv(200)
            assert r.call("GET", "/live", headers=["Authorization: Bearer sesame"])[0] == 503
            for c in held:
                c.close()
        with Server(router + ["--disable-page"]) as r:
            assert r.call("GET", "/")[0] == r.call("GET", "/live")[0] == 404
