#!/usr/bin/env python3
"""make_venv.py DIR REQUIREMENTS: a virtual environment with exactly these packages; nothing to do when it has them."""

import hashlib
import pathlib
import shutil
import subprocess
import sys
import venv

folder, requirements = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
want = hashlib.sha256(requirements.read_bytes()).hexdigest()
stamp = folder / "requirements.sha256"
if stamp.is_file() and stamp.read_text() == want:
    sys.exit(0)
shutil.rmtree(folder, ignore_errors=True)
venv.create(folder, with_pip=True)
subprocess.run([folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "-r",
                requirements], check=True)
stamp.write_text(want)
