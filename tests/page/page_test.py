"""The page at / in a browser: chat, the drawn cache against /server_info, keyboard, contrast, keys, and nothing from elsewhere."""

import json
import os
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "api"))
from cdp import Browser  # noqa: E402
from checks import CONTRAST, LABELS, say  # noqa: E402
from client import SLUICE, Server  # noqa: E402

SHOTS = pathlib.Path(os.environ["SLUICE_BUILD_DIR"]) / "page"
FLAGS = ["--port", "0", "--max-total-tokens", "16384"]
PROMPT = "Ledger: " + "Mara has red apples: 17. Ivo has green cups: 4. " * 9

@pytest.fixture(scope="module")
def server():
    with Server([SLUICE, "serve", *FLAGS, "--attn-cp-size", "2", "--enable-hierarchical-cache"]) as s:
        yield s


def test_chat_and_the_drawn_cache(server):
    with Browser() as b:
        b.open(server.url + "/")
        b.until("document.querySelector('#live').classList.contains('on')")
        b.screenshot(SHOTS / "start.png")
        body = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0}
        want = server.post("/v1/chat/completions", {**body, "max_tokens": 40})[1]["choices"][0]["message"]["content"]
        b.click("#gear")
        b.js("document.querySelector('#temperature').value = 0; document.querySelector('#max-tokens').value = 40")
        b.click("#gear")
        got = say(b, PROMPT)
        assert got.split() == want.split()
        assert "cached" in b.js("document.querySelector('.meta').textContent")
        say(b, "How many red apples does Mara have?")
        server.wait_idle()
        # What is drawn is what the server says it has.
        b.until("now && now.running === 0 && now.nodes.every(n => n.lock === 0)")
        info = server.info()
        server_says = info["cache"]
        b.until(f"now.steps === {info['steps']} && now.tree_nodes === {server_says['nodes']}")
        drawn = b.js("now.nodes.map(n => n.pages).join('')")
        assert sum(c in "01" for c in drawn) == server_says["device_pages"]["cached"] > 2
        assert {"0", "1"} <= set(drawn)
        assert b.js("boxes.length") == server_says["nodes"]
        lanes = b.js("now.lanes")
        for name in ("all", "free", "cached", "leased"):
            assert sum(lane[name] for lane in lanes) == server_says["device_pages"][name]
        assert b.js("now.host.cached") == server_says["host_pages"]["cached"]
        # Nodes do not overlap, and children begin where parents end.
        assert b.js("boxes.every(k => k.n.parent < 0 || boxes[k.n.parent].n.start + boxes[k.n.parent].n.pages.length === k.n.start)")
        b.screenshot(SHOTS / "light.png")
        b.click("#theme")
        assert b.js("document.documentElement.dataset.theme") == "dark"
        b.screenshot(SHOTS / "dark.png")
        assert b.complaints() == []
        assert all(u.startswith((server.url, "data:", "about:")) for u in b.requested()), b.requested()


def test_a_running_request_lights_up_and_can_be_stopped(server):
    with Browser() as b:
        b.open(server.url + "/")
        b.until("document.querySelector('#live').classList.contains('on')")
        # An answer that does not end by itself.
        b.js("(() => { const real = fetch; window.fetch = (u, o) => real(u, o && o.body ? {...o, body: JSON.stringify("
             "{...JSON.parse(o.body), ignore_eos: true, max_tokens: 9000})} : o); })()")
        b.js("document.querySelector('#input').focus()")
        b.type(PROMPT)
        b.key("Enter", text="\r")
        b.until("now && now.requests.length === 1 && now.requests[0].output > 0", 30)
        b.until("lit.size > 0 || now.running === 0", 30)
        b.screenshot(SHOTS / "running.png")
        b.key("Escape")
        b.until("document.querySelector('#stop').classList.contains('hidden')")
        server.wait_idle()
        b.until("now.running === 0 && document.querySelectorAll('#requests tbody tr').length === 0")
        assert b.complaints() == []


def test_it_can_be_used_and_read(server):
    with Browser() as b:
        b.open(server.url + "/")
        say(b, "Hello")
        b.until("now && now.nodes.length > 0")
        for theme in ("light", "dark"):
            b.js(f"setTheme({json.dumps(theme == 'dark')})")
            for open_settings in (False, True):
                b.js(f"document.querySelector('#settings').classList.toggle('hidden', {json.dumps(not open_settings)})")
                assert b.js(CONTRAST) == [], theme
        assert b.js(LABELS) == []
        # Tab reaches everything, in order, and what has the focus shows it.
        b.js("document.activeElement.blur(); document.body.focus()")
        reached = []
        for _ in range(40):
            b.key("Tab")
            reached.append(b.js("document.activeElement.id || document.activeElement.className"))
            if reached[-1] != "skip":
                outline = b.js("(() => { const s = getComputedStyle(document.activeElement); const f = getComputedStyle(document.activeElement.form || document.activeElement); return s.outlineStyle !== 'none' || f.borderColor !== ''; })()")
                assert outline, reached[-1]
        for wanted in ("skip", "new", "theme", "log", "input", "gear", "send", "tree"):
            assert wanted in reached, (wanted, reached)
        b.js("document.querySelector('#tree').focus()")
        b.key("ArrowDown")
        assert "Tokens 0 to" in b.js("document.querySelector('#tree-text').textContent")
        assert not b.js("document.querySelector('#tip').classList.contains('hidden')")
        for width in (390, 800):
            b.do("Emulation.setDeviceMetricsOverride", width=width, height=844, deviceScaleFactor=1, mobile=False)
            assert b.js("document.documentElement.scrollWidth <= innerWidth"), width
            b.screenshot(SHOTS / f"width-{width}.png")
        assert b.complaints() == []


def test_text_is_never_read_as_html(server):
    with Browser() as b:
        b.open(server.url + "/")
        evil = "<img src=x onerror=alert(1)><script>window.evilRan=1</script>"
        b.js(f"(() => {{ const d = document.createElement('div'); markdown(d, {json.dumps('a ' + evil + ' `' + evil + '` **' + evil + '**' + chr(10) * 2 + '- ' + evil + chr(10) * 2 + '```' + chr(10) + evil + chr(10) + '```')});"
             " document.body.append(d); window.made = [...d.querySelectorAll('*')].map(e => e.tagName); })()")
        assert set(b.js("window.made")) <= {"P", "CODE", "STRONG", "UL", "LI", "PRE"}
        assert b.js("window.evilRan === undefined")


def test_a_key_is_asked_for():
    with Server([SLUICE, "serve", *FLAGS, "--api-key", "sesame"]) as s, Browser() as b:
        assert s.call("GET", "/live")[0] == 401
        b.open(s.url + "/")
        b.until("document.querySelector('#key-dialog').open")
        b.js("document.querySelector('#key').focus()")
        b.type("wrong")
        b.key("Enter", text="\r")
        b.until("document.querySelector('#key-text').textContent.includes('not accepted')")
        b.screenshot(SHOTS / "key.png")
        b.js("document.querySelector('#key').focus()")
        b.type("sesame")
        b.key("Enter", text="\r")
        b.until("document.querySelector('#live').classList.contains('on')")
        assert say(b, "Hello")


def test_the_page_can_be_turned_off():
    with Server([SLUICE, "serve", *FLAGS, "--disable-page"]) as s:
        assert s.call("GET", "/")[0] == 404
        assert s.call("GET", "/live")[0] == 404


def test_viewers_are_bounded_and_leave_the_engine_alone(server):
    held = []
    try:
        for _ in range(16):
            c = server.connect()
            c.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in c.recv(200)
            held.append(c)
        assert server.call("GET", "/live")[0] == 503
        status, answer = server.post("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 20, "ignore_eos": True})
        assert status == 200 and answer["usage"]["completion_tokens"] == 20
    finally:
        for c in held:
            c.close()
