"""The build uses ccache only as far as it works.

  ccache_test.py CMAKE SOURCE_DIR CXX_COMPILER
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

CMAKE, SOURCE, COMPILER = sys.argv[1:4]
del sys.argv[1:4]
WORKS = 'exec "$@"\n'
NEEDS_A_FOLDER = '[ -n "$CCACHE_DIR" ] || { echo "ccache: error: Failed to create directory" >&2; exit 1; }\nexec "$@"\n'
BROKEN = "exit 1\n"


class Launcher(unittest.TestCase):
    def launcher(self, ccache):
        """What the build puts before the compiler when `ccache` (a shell script) is on the PATH."""
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            (folder / "bin").mkdir()
            if ccache is not None:
                (folder / "bin" / "ccache").write_text("#!/bin/sh\n" + ccache)
                (folder / "bin" / "ccache").chmod(0o755)
            (folder / "ask.cmake").write_text(
                f'include("{SOURCE}/cmake/sluice_ccache.cmake")\n'
                f'set(CMAKE_FIND_USE_CMAKE_SYSTEM_PATH FALSE)\nsluice_ccache_launcher(launcher "{COMPILER}")\n'
                'file(WRITE launcher.txt "${launcher}")\n')
            env = {k: v for k, v in os.environ.items() if k != "CCACHE_DIR"}
            env["PATH"] = f"{folder}/bin" if ccache is None else f"{folder}/bin:{env['PATH']}"
            subprocess.run([CMAKE, "-P", "ask.cmake"], cwd=folder, env=env, check=True, capture_output=True)
            return [w.replace(str(folder.resolve()), "B") for w in (folder / "launcher.txt").read_text().split(";") if w]

    def test_none_is_no_launcher(self):
        self.assertEqual(self.launcher(None), [])

    def test_one_that_works_is_used_as_it_is(self):
        self.assertEqual(self.launcher(WORKS), ["B/bin/ccache"])

    def test_one_that_cannot_write_its_folder_gets_one_in_the_build(self):
        self.assertEqual(self.launcher(NEEDS_A_FOLDER)[1:], ["-E", "env", "CCACHE_DIR=B/ccache", "B/bin/ccache"])

    def test_one_that_never_works_is_left_out(self):
        self.assertEqual(self.launcher(BROKEN), [])


if __name__ == "__main__":
    unittest.main()
