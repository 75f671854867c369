#!/usr/bin/env python3
"""Compares the include graph of src/ with docs/modules.txt.

Fails on an include that no line allows, on a module without a line, on a cycle, and on any include of apps/; with --exact also
on an allowed edge that nothing uses. Test files (*_test.cc, *_fixture.h, testing/) may include every module, but not apps/.

  check_deps.py [--exact] [ROOT]
"""

import pathlib
import re
import sys

INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"')
SOURCES = {".h", ".cc", ".cu", ".cuh", ".inc"}


def read_allowed(path):
    allowed = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        line = line.split("#")[0].strip()
        if not line:
            continue
        name, colon, rest = line.partition(":")
        if not colon or name in allowed:
            raise SystemExit(f"{path}:{number}: not 'module: modules', or a module that has a line already")
        allowed[name] = set(rest.split())
    return allowed


def is_test(path):
    return path.stem.endswith(("_test", "_fixture", "_testing")) or "testing" in path.parts


def module_of(parts, modules):
    """The longest module name that a path inside src/ starts with."""
    for length in range(len(parts) - 1, 0, -1):
        name = "/".join(parts[:length])
        if name in modules:
            return name
    return None


def folders(src):
    """Module folders that exist: those with a CMakeLists.txt, or with sources of their own."""
    found = set()
    for file in src.rglob("*"):
        if file.name == "CMakeLists.txt" and file.parent != src:
            found.add(file.parent.relative_to(src).as_posix())
    for folder in src.iterdir():
        if folder.is_dir() and any(f.suffix in SOURCES for f in folder.iterdir()):
            found.add(folder.name)
    return found


def find_cycle(graph):
    state, trail = {}, []

    def visit(node):
        state[node] = 1
        trail.append(node)
        for target in sorted(graph.get(node, ())):
            if state.get(target) == 1:
                return trail[trail.index(target):] + [target]
            if target not in state:
                cycle = visit(target)
                if cycle:
                    return cycle
        state[node] = 2
        trail.pop()
        return None

    for node in sorted(graph):
        if node not in state:
            cycle = visit(node)
            if cycle:
                return cycle
    return None


def check(root, exact=False):
    src = root / "src"
    allowed = read_allowed(root / "docs" / "modules.txt")
    existing = folders(src)
    problems = [f"docs/modules.txt: src/{name} has no line" for name in sorted(existing - set(allowed))
                if not any(name.startswith(m + "/") for m in allowed)]
    used = {name: set() for name in allowed}
    for file in sorted(src.rglob("*")):
        if file.suffix not in SOURCES:
            continue
        relative = file.relative_to(src)
        module = module_of(relative.parts, set(allowed) | existing)
        for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
            match = INCLUDE.match(line)
            if not match:
                continue
            include = match.group(1)
            place = f"src/{relative}:{number}"
            if include.startswith("apps/") or (root / "apps" / include).is_file():
                problems.append(f"{place}: nothing includes apps/")
                continue
            target = module_of(pathlib.PurePosixPath(include).parts, set(allowed) | existing)
            if target is None or target == module or not (src / include).is_file():
                continue  # a library's header, or one of the module's own
            if is_test(file):
                continue
            if target not in allowed.get(module, set()):
                problems.append(f'{place}: {module} includes "{include}"; docs/modules.txt does not allow {module}: {target}')
            elif module in used:
                used[module].add(target)
    for module, targets in allowed.items():
        if module not in existing or not exact:
            continue
        for target in sorted(targets - used[module]):
            problems.append(f"docs/modules.txt: {module}: {target} is allowed but no file uses it")
    cycle = find_cycle(allowed)
    if cycle:
        problems.append("docs/modules.txt: cycle " + " > ".join(cycle))
    return problems


if __name__ == "__main__":
    words = [w for w in sys.argv[1:] if w != "--exact"]
    top = pathlib.Path(words[0] if words else pathlib.Path(__file__).resolve().parent.parent)
    found = check(top, exact="--exact" in sys.argv)
    print("\n".join(found) if found else "check_deps: the include graph is what docs/modules.txt allows")
    sys.exit(1 if found else 0)
