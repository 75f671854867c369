#!/usr/bin/env python3
"""Checks of the code base itself that neither the compiler nor clang-format makes.

  tidy.py [ROOT]      looks at every file that git tracks (every file, where ROOT is no git work tree)
"""

import pathlib
import re
import subprocess
import sys

LINES_MAX = 900  # a longer file holds more than one idea

CODE = {".h", ".cc", ".cu", ".cuh"}
TEXT = CODE | {".py", ".sh", ".cmake", ".txt", ".md", ".yml", ".yaml", ".toml", ".json", ""}

# A library's headers and the only places that may include them.
VENDORS = [
    (r"dnnl|oneapi/dnnl", ["src/backends/cpu/", "apps/machine_rates.cc"]),
    (r"hwy/", ["src/backends/cpu/"]),
    (r"immintrin\.h|x86intrin\.h", ["src/backends/cpu/", "src/radix/", "src/base/stream_copy.cc"]),
    (r"cuda|cublas|nccl|cutlass|cub/", ["src/backends/cuda/", "src/comm/nccl/"]),
    (r"boost/", ["src/http/", "src/router/", "src/transfer/", "apps/"]),
    (r"ucp/|uct/|ucs/", ["src/transfer/"]),
    (r"hiredis/", ["src/storage/"]),
    (r"liburing\.h", ["src/storage/"]),
    (r"pcre2\.h", ["src/text/"]),
    (r"openssl/", ["src/base/", "src/http/"]),
    (r"prometheus/", ["src/serve/", "src/router/"]),
    (r"simdjson", ["src/api/", "src/text/", "src/weights/", "src/serve/", "src/router/", "apps/", "tests/"]),
    (r"gtest/|gmock/|rapidcheck", ["tests/", "_test.cc", "_fixture.h", "_testing.h", "testing/", "_test.h"]),
]
# "src/http" moves bytes and knows nothing of what they say.
FORBIDDEN = [(r"nlohmann/|simdjson", "src/http/", "http never sees JSON")]

DEVICE_CONDITION = re.compile(r"^\s*#\s*(if|ifdef|elif)\b.*(CUDA|__NVCC__|ROCM|__HIP)")
DEVICE_PLACES = ("src/backends/", "src/comm/nccl/", "apps/")

# Written in pieces so that this file passes its own checks.
MACHINE_PATHS = re.compile(r"(?<![\w.])/(wo" + r"rk|ro" + r"ot|ho" + r"me/\w+)/|\.\./sha" + r"red")
MARK = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b(.*)")
MARK_FORM = re.compile(r"^: .+\b(when|once|if|until)\b.+")
BAD_NAMES = re.compile(r"(^|_)(utils?|helpers?|common|manager|misc)(_|\.|$)")
BUILD_TIME = re.compile(r"__(DA" + r"TE|TI" + r"ME|TIMEST" + r"AMP)__")


def tracked_files(root):
    git = subprocess.run(["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                         capture_output=True, check=False)
    if git.returncode == 0:
        return [root / name for name in git.stdout.decode().split("\0") if name and (root / name).is_file()]
    return [f for f in root.rglob("*") if f.is_file()]


def allowed_place(path, places):
    """A place is a folder from the root ("src/http/"), a file from the root, or a piece of a name ("_test.cc", "testing/")."""
    return any(path.startswith(p) if p.startswith(("src/", "apps/", "tests/")) else p in path for p in places)


def check_code(path, number, line):
    include = re.match(r'\s*#\s*include\s+[<"]([^">]+)[">]', line)
    if include:
        for pattern, places in VENDORS:
            if re.match(pattern, include.group(1)) and not allowed_place(path, places):
                yield f"<{include.group(1)}> belongs to {', '.join(places)} only"
        for pattern, place, why in FORBIDDEN:
            if re.match(pattern, include.group(1)) and path.startswith(place):
                yield f"<{include.group(1)}>: {why}"
    if DEVICE_CONDITION.match(line) and not path.startswith(DEVICE_PLACES):
        yield "devices are left out by CMake, not by #if, outside backends and apps"
    if BUILD_TIME.search(line):
        yield "the time of a build may not get into its output"
    if path.endswith(".h") and re.match(r"\s*using namespace ", line):
        yield "using namespace in a header"
    if "DISABLED_" in line and "TEST" in line:
        yield "a test is fixed or deleted, never disabled"


def check_line(path, number, line):
    if line != line.rstrip():
        yield "trailing white space"
    if MACHINE_PATHS.search(line):
        yield "a path of one machine: " + MACHINE_PATHS.search(line).group(0)
    mark = MARK.search(line)
    if mark and pathlib.PurePosixPath(path).suffix in CODE | {".py", ".sh", ".cmake"}:
        if mark.group(1) != "TO" + "DO" or not MARK_FORM.match(mark.group(2)):
            yield "write 'TO" + "DO: what is missing, when to do it' (when, once, if, until), no other mark and no name"


def check_file(root, file):
    path = file.relative_to(root).as_posix()
    suffix = file.suffix
    if suffix not in TEXT or path.startswith(("models/", "tests/data/")) or file.name == "LICENSE":
        return
    data = file.read_bytes()
    if b"\0" in data:
        return
    lines = data.decode("utf-8", errors="replace").splitlines()
    if suffix in CODE | {".py", ".sh", ".cmake"} and len(lines) > LINES_MAX:
        yield f"{path}: {len(lines)} lines; at most {LINES_MAX}"
    if suffix in CODE and BAD_NAMES.search(file.name):
        yield f"{path}: name the idea, not a drawer (utils, helpers, common, manager)"
    # Highway compiles an -inl.h once per instruction set, so it guards itself in another way.
    if suffix == ".h" and not path.endswith("-inl.h") and not any(line.strip() == "#pragma once" for line in lines):
        yield f"{path}: a header without #pragma once"
    for number, line in enumerate(lines, 1):
        for problem in check_line(path, number, line):
            yield f"{path}:{number}: {problem}"
        if suffix in CODE:
            for problem in check_code(path, number, line):
                yield f"{path}:{number}: {problem}"


def check_dead_files(root, files):
    """A source file that no CMakeLists.txt above it names and no glob of that file takes is never compiled."""
    for file in files:
        path = file.relative_to(root).as_posix()
        if file.suffix not in {".cc", ".cu"} or not path.startswith(("src/", "tests/", "bench/")):
            continue
        folder = file.parent
        named = False
        while folder != root and not named:
            listing = folder / "CMakeLists.txt"
            if listing.is_file():
                text = listing.read_text()
                named = file.name in text or re.search(r"GLOB[^)]*\*[\w.]*" + re.escape(file.suffix), text) is not None
            folder = folder.parent
        if not named:
            yield f"{path}: no CMakeLists.txt above it names this file"


def check_links(root, files):
    """A relative link in a document, or a path in backquotes that starts at a top folder, leads to something."""
    for file in files:
        if file.suffix != ".md" or file.relative_to(root).as_posix().startswith("models/"):
            continue
        text = file.read_text()
        targets = [(file.parent, t) for t in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)]
        targets += [(root, t) for t in re.findall(r"`((?:src|apps|docs|tools|tests|scripts|cmake)/[\w./-]+)`", text)]
        for base, target in targets:
            if not (base / target).exists():
                yield f"{file.relative_to(root)}: {target} does not exist"


def check_flags(root, files):
    """A flag that is said to work puts its value where something outside the flag table reads it."""
    table = root / "src/config/flag_table.cc"
    if not table.is_file():
        return
    readers = ""
    for file in files:
        path = file.relative_to(root).as_posix()
        if file.suffix in CODE and path.startswith(("src/", "apps/")) and not file.stem.endswith("_test"):
            if not path.startswith("src/config/") or path in ("src/config/legality.cc", "src/config/model_config.cc"):
                readers += file.read_text()
    rows = re.findall(r"\{\.names = \"(\S+?)[\s\"](.*?)\},\n", table.read_text(), re.S)
    for name, row in rows:
        target = re.search(r"\.target = &[SM]::(\w+)", row)
        if target and ".status" not in row and not re.search(r"(\.|->)" + target.group(1) + r"\b", readers):
            yield f"src/config/flag_table.cc: {name} is said to work, but nothing reads {target.group(1)}"


def check(root):
    files = tracked_files(root)
    problems = [p for file in files for p in check_file(root, file)]
    for walk in (check_dead_files, check_links, check_flags):
        problems += walk(root, files)
    return problems


if __name__ == "__main__":
    top = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parent.parent).resolve()
    found = check(top)
    print("\n".join(found) if found else "tidy: nothing to say")
    sys.exit(1 if found else 0)
