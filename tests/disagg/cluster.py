"""Starts servers and routers of this build on free loopback ports, asks them, hurts them, and looks for leaks."""
import atexit
import json
import os
import signal
import socket
import struct
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request

BUILD = os.environ.get("SLUICE_BUILD_DIR", os.path.join(os.path.dirname(__file__), "../../build/release"))
SLUICE = os.path.join(BUILD, "bin", "sluice")


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Awake:
    """Seconds during which this process ran: whoever stops the whole test (a debugger, a busy machine's owner) stops
    this clock too."""

    def __init__(self):
        self.seconds = 0.0
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        last = time.monotonic()
        while True:
            time.sleep(0.05)
            now = time.monotonic()
            self.seconds += min(now - last, 0.5)
            last = now


awake = Awake()


class Middle:
    """Carries connections to a port, and resets them on request: the network between two instances that live."""

    def __init__(self, port):
        self.to, self.pairs, self.lock = port, [], threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        while True:
            near, _ = self.listener.accept()
            try:
                far = socket.create_connection(("127.0.0.1", self.to))
            except OSError:
                near.close()
                continue
            pair = (near, far)
            with self.lock:
                self.pairs.append(pair)
            for a, b in (pair, pair[::-1]):
                threading.Thread(target=self.carry, args=(a, b, pair), daemon=True).start()

    def carry(self, a, b, pair):
        try:
            while data := a.recv(1 << 16):
                b.sendall(data)
        except OSError:
            pass
        self.drop(pair)

    def drop(self, pair, how=socket.SHUT_RDWR):
        with self.lock:
            if pair in self.pairs:
                self.pairs.remove(pair)
        for s in pair:
            try:
                s.shutdown(how)
            except OSError:
                pass

    def cut(self):
        """How many connections there were."""
        with self.lock:
            pairs = list(self.pairs)
        for pair in pairs:
            for s in pair:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.drop(pair)
        return len(pairs)


class Process:
    def __init__(self, words, log):
        self.words, self.log_path = words, log
        self.port = int(words[words.index("--port") + 1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()
        atexit.register(lambda: self.process.poll() is None and self.process.kill())

    def start(self):
        self.log = open(self.log_path, "a")
        self.process = subprocess.Popen([SLUICE] + self.words, stdout=self.log, stderr=self.log)

    def wait_ready(self, seconds=60):
        until = time.time() + seconds
        while time.time() < until:
            if self.process.poll() is not None:
                raise AssertionError(f"{self.words} exited {self.process.returncode}: {self.text()[-2000:]}")
            try:
                if urllib.request.urlopen(self.url + "/health", timeout=2).status == 200:
                    return self
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.05)
        raise AssertionError(f"{self.words} is not ready: {self.text()[-2000:]}")

    def text(self):
        with open(self.log_path) as f:
            return f.read()

    def send(self, number):
        self.process.send_signal(number)

    def stop(self, seconds=30):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"{self.words} did not stop within {seconds} s: {self.text()[-2000:]}")
        self.log.close()
        return self.process.returncode

    def kill(self):
        self.process.kill()
        self.process.wait()


def call(url, path, body=None, timeout=60):
    """(status, parsed body); transport errors are raised."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data=data, headers={"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            return reply.status, parse(reply.read())
    except urllib.error.HTTPError as e:
        return e.code, parse(e.read())


def parse(text):
    try:
        return json.loads(text)
    except ValueError:
        return text.decode(errors="replace")


class Cluster:
    """NP prefill and ND decode instances behind a router; with `middles`, decode reaches each prefill through one."""

    def __init__(self, prefills=1, decodes=1, common=(), prefill=(), decode=(), router=(), policy="round_robin", middles=False):
        self.middles = []
        self.folder = tempfile.mkdtemp(prefix="sluice-pd-")
        base = ["serve", "--threads", "1", "--log-level", "info", "--max-total-tokens", "8192", *common]
        self.prefills, self.decodes = [], []
        words = ["router", "--policy", policy, "--port", str(free_port()), "--health-check-interval", "0.1", *router]
        for i in range(prefills):
            port = str(free_port())
            self.prefills.append(Process(
                base + ["--port", str(free_port()), "--disaggregation-mode", "prefill",
                        "--disaggregation-bootstrap-port", port, *prefill], f"{self.folder}/prefill{i}.log"))
            if middles:
                self.middles.append(Middle(int(port)))
                port = str(self.middles[-1].port)
            words += ["--prefill", self.prefills[-1].url, port]
        for i in range(decodes):
            self.decodes.append(Process(
                base + ["--port", str(free_port()), "--disaggregation-mode", "decode", *decode],
                f"{self.folder}/decode{i}.log"))
            words += ["--decode", self.decodes[-1].url]
        for p in self.prefills + self.decodes:
            p.wait_ready()
        self.router = Process(words, f"{self.folder}/router.log").wait_ready()
        self.url = self.router.url

    def instances(self):
        return self.prefills + self.decodes

    def flush(self, instances=None):
        """Empties caches, once nothing runs: a server that still ends a request refuses."""
        self.check_idle()
        for p in self.instances() if instances is None else instances:
            status, text = call(p.url, "/flush_cache")
            assert status == 200, (p.url, text)

    def check_idle(self, seconds=30):
        """Within that time nothing is leased, queued or open anywhere."""
        until = awake.seconds + seconds
        while True:
            wrong = []
            for p in self.instances():
                if p.process.poll() is not None:
                    continue
                info = call(p.url, "/server_info")[1]
                state, pd = info["internal_states"][0], info["disaggregation"]
                pages = state["cache"]["device_pages"]
                if pages["free"] + pages["cached"] + pages["leased"] != pages["all"]:
                    wrong.append(f"{p.url}: pages {pages} do not add up")
                for name, value in (("leased", pages["leased"]), ("running", state["num_running_reqs"]),
                                    ("queued", state["num_queue_reqs"]), ("rooms", pd["rooms"]["active"]),
                                    ("writes", pd["outstanding_writes"]), ("reserved", pd["leased_pages"])):
                    if value != 0:
                        wrong.append(f"{pd['instance_id']}: {name} {value}")
            if not wrong:
                return
            if awake.seconds > until:
                raise AssertionError("not idle: " + "; ".join(wrong))
            time.sleep(0.1)

    def stop(self):
        codes = [p.stop() for p in [self.router] + self.instances()]
        assert codes == [0] * len(codes), (codes, self.folder)


def single(*extra):
    folder = tempfile.mkdtemp(prefix="sluice-one-")
    return Process(["serve", "--threads", "1", "--max-total-tokens", "8192", "--port", str(free_port()), *extra],
                   f"{folder}/single.log").wait_ready()
