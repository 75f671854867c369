"""Units, images, manifests, dashboard and the metrics reference, held against the program that they are for."""

import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import yaml

ROOT = pathlib.Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "api"))
from client import SLUICE, Server, request_bytes  # noqa: E402

KUBERNETES = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))


def starts(words):
    """The flags are right: with a model that is not there, the model is all that is missing."""
    command = [SLUICE, *words, "--model-path", "/nonexistent/model"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 3 and "/nonexistent/model" in result.stderr, (words, result.stderr)


def documents():
    return [d for path in KUBERNETES for d in yaml.safe_load_all(path.read_text())]


def test_kubernetes_flags_are_right():
    seen = set()
    for d in documents():
        for c in d.get("spec", {}).get("template", {}).get("spec", {}).get("containers", []):
            if not c["image"].startswith("sluice"):
                continue
            assert c["command"][0] == "/usr/local/bin/sluice"
            words = c["command"][1:] + [re.sub(r"\$\((\w+)\)", "value", a) for a in c["args"]]
            seen.add(words[0])
            if words[0] == "serve":
                starts(words)
                continue
            known = subprocess.run([SLUICE, words[0], "--help"], capture_output=True, text=True, check=True).stdout
            for flag in [w for w in words if w.startswith("--")]:
                assert re.search(re.escape(flag) + r"\b", known), flag
    assert seen == {"serve", "router"}


def test_the_router_knows_the_instances():
    docs = {(d["kind"], d["metadata"]["name"]): d for d in documents()}
    args = docs[("Deployment", "sluice-router")]["spec"]["template"]["spec"]["containers"][0]["args"]
    for role in ("prefill", "decode"):
        instances = docs[("StatefulSet", f"sluice-{role}")]
        service = instances["spec"]["serviceName"]
        assert docs[("Service", service)]["spec"]["clusterIP"] == "None"
        own = instances["spec"]["template"]["spec"]["containers"][0]
        ports = {p["name"]: p["containerPort"] for p in own["ports"]}
        urls = [args[i + 1] for i, a in enumerate(args) if a == f"--{role}"]
        assert urls == [f"http://sluice-{role}-{i}.{service}:{ports['http']}" for i in range(instances["spec"]["replicas"])]
        if role == "prefill":
            boots = [int(args[i + 2]) for i, a in enumerate(args) if a == "--prefill"]
            assert set(boots) == {ports["bootstrap"]}
            assert str(ports["bootstrap"]) == own["args"][own["args"].index("--disaggregation-bootstrap-port") + 1]


def test_kubernetes_names_meet():
    docs = documents()
    for d in docs:
        assert d["apiVersion"] and d["kind"] and re.fullmatch(r"[a-z0-9-]+", d["metadata"]["name"])
    names = {(d["kind"], d["metadata"]["name"]): d for d in docs}
    assert len(names) == len(docs)
    deployments = [d for d in docs if d["kind"] in ("Deployment", "StatefulSet")]
    for d in deployments:
        labels = d["spec"]["template"]["metadata"]["labels"]
        assert d["spec"]["selector"]["matchLabels"].items() <= labels.items()
        pod = d["spec"]["template"]["spec"]
        volumes = {v["name"] for v in pod.get("volumes", [])}
        for c in pod["containers"]:
            ports = {p["name"]: p["containerPort"] for p in c["ports"]}
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                target = c.get(probe, {})
                assert all(p["port"] in ports for p in [target.get("httpGet", target.get("tcpSocket"))] if p)
            assert all(m["name"] in volumes for m in c.get("volumeMounts", []))
            for e in c.get("env", []):
                ref = e["valueFrom"]["secretKeyRef"]
                assert ref["key"] in names[("Secret", ref["name"])]["stringData"]
            if "--port" in c.get("args", []):
                assert int(c["args"][c["args"].index("--port") + 1]) in ports.values()
            for a in c.get("args", []):
                if a.startswith("{") and "host" in json.loads(a):
                    extra = json.loads(a)
                    service = names[("Service", extra["host"])]
                    assert extra["port"] in [p["port"] for p in service["spec"]["ports"]]
            timeout = [float(c["args"][i + 1]) for i, a in enumerate(c.get("args", [])) if a == "--shutdown-timeout"]
            assert not timeout or d["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > timeout[0]
    for d in docs:
        if d["kind"] != "Service":
            continue
        matching = [x for x in deployments if d["spec"]["selector"].items() <= x["spec"]["template"]["metadata"]["labels"].items()]
        assert len(matching) == 1
        ports = {p["name"] for c in matching[0]["spec"]["template"]["spec"]["containers"] for p in c["ports"]}
        assert all(p["targetPort"] in ports for p in d["spec"]["ports"])


def test_systemd_unit():
    path = ROOT / "deploy" / "systemd" / "sluice.service"
    sections, section = {}, None
    for line in path.read_text().splitlines():
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            section[key] = value
    assert set(sections) == {"Unit", "Service", "Install"}
    words = shlex.split(sections["Service"]["ExecStart"])
    assert words[0] == "/usr/local/bin/sluice" and words[-1] == "$SLUICE_FLAGS"
    starts(words[1:-1])
    shutdown = float(words[words.index("--shutdown-timeout") + 1])
    assert float(sections["Service"]["TimeoutStopSec"]) > shutdown
    if shutil.which("systemd-analyze"):
        result = subprocess.run(["systemd-analyze", "verify", path], capture_output=True, text=True)
        assert "Unknown" not in result.stderr, result.stderr


def test_dockerfile():
    text = (ROOT / "deploy" / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    for source in re.findall(r"^COPY (?!--from)(\S+) ", text, re.M):
        assert (ROOT / source).exists(), source
    entry = json.loads(re.search(r"^ENTRYPOINT (.*)$", text, re.M).group(1))
    assert entry[0] == "/usr/local/bin/sluice"
    starts(entry[1:])
    json.loads(re.search(r"^HEALTHCHECK .*? CMD (.*)$", text, re.M).group(1))
    if not shutil.which("dpkg-query"):
        return
    # Every library that the program is linked with is installed by name, or comes with the base image or a named package.
    installed = re.search(r"--no-install-recommends (.*?) &&", text).group(1).split()
    needed = set()
    for library in re.findall(r"=> (/\S+)", subprocess.run(["ldd", SLUICE], capture_output=True, text=True).stdout):
        for name in (os.path.realpath(library), library):
            owner = subprocess.run(["dpkg-query", "-S", name], capture_output=True, text=True)
            if owner.returncode == 0:
                needed.add(owner.stdout.split(":")[0])
                break
    with_them = set(installed) | {"libc6", "libgcc-s1", "libstdc++6", "ocl-icd-libopencl1"}
    assert needed <= with_them, needed - with_them


def metrics_of_a_busy_server():
    with Server([SLUICE, "serve", "--port", "0", "--max-total-tokens", "16384", "--enable-sglang-metrics"]) as s:
        assert s.post("/v1/completions", {"prompt": "a", "max_tokens": 4})[0] == 200
        assert s.post("/v1/completions", {"prompt": "a", "top_p": 0})[0] == 400
        assert s.post("/v1/completions", {"prompt": "a", "max_tokens": 9000, "ignore_eos": True, "timeout": 0.05})[0] == 504
        c = s.connect()
        c.sendall(request_bytes("POST", "/v1/completions", b'{"prompt":"a","max_tokens":9000,"ignore_eos":true}'))
        while s.info()["num_running_reqs"] == 0:
            pass
        c.close()
        s.wait_idle()
        return s.call("GET", "/metrics")[2].decode()


@pytest.fixture(scope="module")
def metrics():
    text = metrics_of_a_busy_server()
    return dict(re.findall(r"^# TYPE (sluice:\w+) (\w+)$", text, re.M)), text


def test_metrics_reference_is_what_the_server_has(metrics):
    kinds, _ = metrics
    documented = dict(re.findall(r"^\| `(sluice:\w+)` \| (\w+) \|", (ROOT / "docs" / "metrics.md").read_text(), re.M))
    assert kinds.items() <= documented.items()
    # The others come with speculation or with a role: their names stand where metrics are made.
    sources = "".join(p.read_text() for p in (ROOT / "src" / "serve").glob("*.cc"))
    for name in documented.keys() - kinds.keys():
        assert name.startswith(("sluice:spec_", "sluice:pd_")) and name.removeprefix("sluice:") in sources, name


def test_sglang_names_are_aliases_of_all(metrics):
    kinds, text = metrics
    assert {n.replace("sluice:", "sglang:") for n in kinds} == set(re.findall(r"^# TYPE (sglang:\w+) ", text, re.M))


def test_dashboard_asks_for_what_there_is(metrics):
    kinds, text = metrics
    board = json.loads((ROOT / "deploy" / "grafana" / "sluice.json").read_text())
    expressions = [t["expr"] for p in board["panels"] for t in p["targets"]]
    used = set()
    for e in expressions:
        assert e.count("(") == e.count(")") and e.count("{") == e.count("}")
        for name in re.findall(r"sluice:\w+", e):
            base = name.removesuffix("_bucket")
            used.add(base)
            assert base in kinds, name
            assert name.endswith("_bucket") == (kinds[base] == "histogram")
        for name, label in re.findall(r"sum by \((\w+)\) .*?(sluice:\w+)", e):
            assert name == "le" or re.search(re.escape(label) + r"\{[^}]*" + name + "=", text), e
    assert len(used) > 20
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert len(set(places)) == len(places) and len({p["id"] for p in board["panels"]}) == len(places)
