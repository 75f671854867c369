"""The guides against the program: every flag and command they name exists, links lead somewhere, messages are the program's own."""

import json
import pathlib
import re
import shlex
import socket
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "api"))
from client import SLUICE, Server  # noqa: E402

GUIDES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if p.name != "flags.md")]  # that one is generated
# Of other programs that the guides call.
FOREIGN = {"--preset", "--prefix", "--build", "--target", "--xla", "--gtest", "--output-on-failure", "--user"}


def help_of(*command):
    return subprocess.run([SLUICE, *command, "--help"], capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def flags():
    listed = re.findall(r"^  ([a-z]+(?: [a-z]+)?)  +\S", help_of(), re.M)
    out = {"": {"--help", "--version"}}
    for command in listed:
        text = help_of(*command.split())
        out[command] = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text)) | {"--help"}
    return out


def commands_in(text):
    """Words of every `sluice ...` line of a code block or of inline code."""
    blocks = re.findall(r"^ *```\w*\n(.*?)^ *```", text, re.M | re.S) + re.findall(r"(?:^    .*\n)+", text, re.M)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`([^`\n]+)`", text)
    for line in lines:
        found = re.match(r"\s*(?:\$ )?(?:\S*/)?sluice (.*)", line)
        if found:
            yield re.sub(r"\s+#.*", "", found.group(1))


def test_flags_exist(flags):
    known = set().union(*flags.values()) | FOREIGN
    scripts = "".join(p.read_text() for p in [*ROOT.glob("scripts/*"), *ROOT.glob("tests/**/*.py"), *ROOT.glob("tools/*.py"),
                                               *ROOT.glob("tests/fuzz/*.cc"), *ROOT.glob("models/*/scripts/*.py")] if p.is_file())
    wrong = []
    for guide in GUIDES:
        text = guide.read_text()
        for flag in set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w-]*(?:\.\.\.|\*))", text)):
            if flag not in known and f'"{flag}"' not in scripts:
                wrong.append(f"{guide.name}: {flag}")
    assert wrong == []


def test_commands_exist_and_take_their_flags(flags):
    seen = 0
    for guide in GUIDES:
        for line in commands_in(guide.read_text()):
            words = shlex.split(line.replace("...", " ").replace("'", '"') if line.count('"') % 2 == 0 else line.replace('"', ""))
            command = next((c for c in (" ".join(words[:2]), words[0] if words else "") if c in flags), None)
            if command is None:
                assert words and (words[0].startswith("<") or words[0].startswith("--") or "|" in words[0]), f"{guide.name}: sluice {line}"
                continue
            seen += 1
            for word in words:
                if word.startswith("--"):
                    assert word.split("=")[0] in flags[command], f"{guide.name}: sluice {line}: {word}"
    assert seen > 30, seen


def test_links_lead_somewhere():
    for guide in GUIDES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", guide.read_text()):
            if not re.match(r"[a-z]+://", target):
                assert (guide.parent / target).exists(), f"{guide.name}: {target}"


def test_messages_are_the_programs_own():
    sources = "\n".join(p.read_text() for folder in ("src", "apps") for p in (ROOT / folder).rglob("*") if p.suffix in (".cc", ".h", ".html"))
    sources = re.sub(r'"\s*\n?\s*(?:R)?"', "", sources)  # adjacent literals are one
    sources = re.sub(r"\{[^{}\n]*\}", "{}", sources)
    text = (ROOT / "docs" / "troubleshooting.md").read_text()
    seen, wrong = 0, []
    for row in re.findall(r"^\| (.*?) \|", text, re.M):
        for message in re.findall(r"`([^`]+)`", row):
            for piece in re.split(r"\.\.\.|\b[NMi]\b|--x\b|\b30000\b|: (?=\.)", message):
                piece = piece.strip(" :;[]()|")
                if len(piece) < 6:
                    continue
                seen += 1
                if piece not in sources:
                    wrong.append(f"{message}: {piece!r}")
    assert wrong == [], wrong  # no text of the program
    assert seen > 20, seen


def test_the_quick_start_works_as_written(tmp_path):
    text = (ROOT / "docs" / "quickstart.md").read_text()
    program = re.search(r"^```python\n(.*?)^```", text, re.M | re.S).group(1)
    with Server([SLUICE, "serve", "--port", "0", "--max-total-tokens", "16384"]) as server:
        assert "http://127.0.0.1:30000" in program
        run = subprocess.run([sys.executable, "-c", program.replace("http://127.0.0.1:30000", server.url)], capture_output=True,
                             text=True, cwd=tmp_path)
        assert run.returncode == 0, run.stderr
        assert set(json.loads(run.stdout)) == {"who", "apples"}


def test_the_walk_through_of_two_machines_works_as_written():
    """Both machines are this one: names become 127.0.0.1, ports free ones."""
    text = (ROOT / "docs" / "disaggregation.md").read_text()
    walk = text[text.index("## Two machines"):].split("\n## ")[0]
    lines = [line.strip() for block in re.findall(r"^ *```\w*\n(.*?)^ *```", walk, re.M | re.S)
             for line in block.replace("\\\n", " ").splitlines() if line.strip()]
    ports = {}

    def here(line):
        def free(match):
            if match.group(0) not in ports:
                with socket.socket() as s:
                    s.bind(("127.0.0.1", 0))
                    ports[match.group(0)] = str(s.getsockname()[1])
            return ports[match.group(0)]
        line = re.sub(r"\b(?:30000|30001|30002|8998)\b", free, line)
        return re.sub(r"\b(?:10\.0\.0\.\d+|0\.0\.0\.0)\b", "127.0.0.1", line).replace("/models/GLM-5", str(ROOT / "models" / "ledger-28m-fp8"))

    running = []
    try:
        for line in map(here, lines):
            words = shlex.split(line, comments=True)
            if words[0] == "sluice" and words[1] in ("serve", "router"):
                running.append(Server([SLUICE, *words[1:], *(["--max-total-tokens", "8192", "--threads", "1"] if words[1] == "serve" else [])]))
                continue
            assert words[0] == "curl", line
            out = subprocess.run([*words, "-sS", "--fail-with-body", "--retry", "20", "--retry-delay", "1", "--retry-connrefused",
                                  "--retry-all-errors"], capture_output=True, text=True, timeout=120)
            assert out.returncode == 0, (line, out.stdout, out.stderr)
        assert len(running) == 3
    finally:
        for server in running:
            server.__exit__()
