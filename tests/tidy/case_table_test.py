"""The table of tests/README.md has every case, and every test that it names exists.

  case_table_test.py SOURCE_DIR
"""
import pathlib
import re
import sys

source = pathlib.Path(sys.argv[1])
table = [line for line in (source / "tests" / "README.md").read_text().splitlines() if re.match(r"\| A\d\d ", line)]
named = {name for line in table for name in re.findall(r"`(\w+)`", line)}
cases = [int(line[3:5]) for line in table]
assert cases == list(range(1, 34)), f"one row a case, in order: {cases}"
assert len(named) >= 60, "the table is gone"
text = "".join(p.read_text() for folder in ("src", "tests") for p in (source / folder).rglob("*")
               if p.suffix in (".cc", ".py", ".txt") and p.is_file())
defined = set(re.findall(r"^TEST\w*\(\w+,\s*(\w+)\)", text, re.M)) | set(re.findall(r"^\s*def (test_\w+)\(", text, re.M))
defined |= set(re.findall(r"add_test\(NAME (\w+)", text)) | set(re.findall(r"^fuzz_target\((\w+)", text, re.M))
missing = sorted(named - defined)
print(f"{len(named)} tests named; missing: {missing or 'none'}")
sys.exit(1 if missing else 0)
