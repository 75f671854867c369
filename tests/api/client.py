"""A server under test as a child process, and a client that sees every byte."""

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import tempfile
import time

BUILD = pathlib.Path(os.environ["SLUICE_BUILD_DIR"])
SLUICE = BUILD / "bin" / "sluice"
SCRIPTED = BUILD / "tests" / "api" / "scripted_server"


class Server:
    """Starts the command, waits for its ready line, ends it at exit."""

    def __init__(self, command, ready_s=60):
        self.log = tempfile.TemporaryFile(mode="w+")
        self.process = subprocess.Popen([str(c) for c in command], stdout=subprocess.PIPE, stderr=self.log, text=True)
        line = self.process.stdout.readline()
        match = re.search(r"http://(?:([\w.]+)|\[([\da-f:]+)\]):(\d+)$", line)
        if not match:
            self.process.kill()
            self.process.wait()
            raise RuntimeError(f"no ready line but {line!r}; log: {self.log_text()}")
        self.ready_line = line
        self.host, self.port = match.group(1) or match.group(2), int(match.group(3))
        self.url = match.group(0)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def log_text(self):
        self.log.seek(0)
        return self.log.read()

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    def rss_kib(self):
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status).group(1))

    def connect(self, receive_buffer=0, timeout=30):
        s = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET)
        if receive_buffer:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        s.settimeout(timeout)
        s.connect((self.host, self.port))
        return s

    def raw(self, data, **kwargs):
        """Sends bytes, returns all that comes back until the server closes."""
        with self.connect(**kwargs) as s:
            s.sendall(data)
            return read_all(s)

    def call(self, method, path, body=None, headers=(), timeout=30):
        """(status, headers, body) of one request; body is bytes, or what json.dumps takes."""
        if body is not None and not isinstance(body, (bytes, bytearray)):
            body = json.dumps(body).encode()
        with self.connect(timeout=timeout) as s:
            s.sendall(request_bytes(method, path, body, headers))
            return parse(read_all(s))

    def post(self, path, body, **kwargs):
        status, _, answer = self.call("POST", path, body, **kwargs)
        return status, json.loads(answer) if answer else None

    def alive(self):
        begin = time.monotonic()
        ok = self.call("GET", "/health")[0] == 200
        status, answer = self.post("/v1/completions", {"prompt": "hi", "max_tokens": 1})
        return ok and status == 200 and answer["usage"]["completion_tokens"] == 1 and time.monotonic() - begin < 2

    def info(self):
        return json.loads(self.call("GET", "/server_info")[2])["internal_states"][0]

    def wait_idle(self, seconds=30):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            state = self.info()
            pages = state["cache"]["device_pages"]
            if state["num_running_reqs"] + state["num_queue_reqs"] == 0 and pages["leased"] == 0:
                assert pages["free"] + pages["cached"] == pages["all"]
                return state
            time.sleep(0.01)
        raise AssertionError(f"not idle after {seconds} s: {self.info()}")


def request_bytes(method, path, body=None, headers=(), close=True):
    lines = [f"{method} {path} HTTP/1.1", "Host: test"]
    if close:
        lines.append("Connection: close")
    if body is not None:
        if not any(h.lower().startswith("content-type") for h in headers):
            lines.append("Content-Type: application/json")
        lines.append(f"Content-Length: {len(body)}")
    lines += headers
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + (body or b"")


def read_all(s):
    out = b""
    while True:
        try:
            data = s.recv(65536)
        except ConnectionResetError:
            return out
        if not data:
            return out
        out += data


def read_until(s, mark):
    out = b""
    while mark not in out:
        data = s.recv(4096)
        if not data:
            raise AssertionError(f"closed before {mark!r}: {out!r}")
        out += data
    return out


def dechunk(data):
    out = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        n = int(size, 16)
        if n == 0:
            return out, True
        out += data[:n]
        data = data[n + 2:]
    return out, False


def parse(raw):
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    status = int(lines[0].split(" ")[1])
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    if headers.get("transfer-encoding") == "chunked":
        body, whole = dechunk(body)
        headers["whole"] = whole
    return status, headers, body


def records(body):
    """The records of an event stream, strictly framed; comments are left out."""
    text = body.decode()
    assert text.endswith("\n\n")
    out = []
    for record in text[:-2].split("\n\n"):
        if record.startswith(":"):
            assert "\n" not in record
            continue
        assert record.startswith("data: ") and "\n" not in record, record
        out.append(record[len("data: "):])
    return out
