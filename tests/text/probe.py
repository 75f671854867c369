"""Talks to text_probe, one JSON request a line."""
import json
import subprocess


class Probe:
    def __init__(self, path):
        self.process = subprocess.Popen([path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def ask(self, **request):
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"text_probe ended on {json.dumps(request)[:2000]}")
        return json.loads(line)
