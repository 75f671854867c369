"""The checks of tools/ find what they are for: each case plants one fault in a small tree and names the message."""

import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import check_deps  # noqa: E402
import tidy  # noqa: E402

SOUND = {
    "docs/modules.txt": "base:\nkv: base\ncache: base kv\n",
    "apps/main.cc": '#include "cache/cache.h"\n',
    "apps/commands.h": "#pragma once\n",
    "src/base/CMakeLists.txt": "x(SRCS ids.cc TESTS ids_test.cc)\n",
    "src/base/ids.h": "#pragma once\n#include <string>\n",
    "src/base/ids.cc": '#include "base/ids.h"\n',
    "src/base/ids_test.cc": '#include <gtest/gtest.h>\n#include "cache/cache.h"\n',
    "src/kv/CMakeLists.txt": "x()\n",
    "src/kv/page.h": '#pragma once\n#include "base/ids.h"\n',
    "src/cache/CMakeLists.txt": "x()\n",
    "src/cache/cache.h": '#pragma once\n#include "base/ids.h"\n#include "kv/page.h"\n',
}


def write(root, files):
    for name, text in files.items():
        path = pathlib.Path(root) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class Planted(unittest.TestCase):
    def problems(self, check, changes):
        with tempfile.TemporaryDirectory() as root:
            write(root, {**SOUND, **changes})
            return "\n".join(check(pathlib.Path(root)))

    def deps(self, changes):
        return self.problems(lambda root: check_deps.check(root, exact=True), changes)

    def tidy(self, changes):
        return self.problems(tidy.check, changes)

    def test_sound_tree_passes(self):
        self.assertEqual(self.deps({}), "")
        self.assertEqual(self.tidy({}), "")

    def test_edge_that_no_line_allows(self):
        found = self.deps({"src/kv/page.h": '#pragma once\n#include "base/ids.h"\n#include "cache/cache.h"\n'})
        self.assertIn("src/kv/page.h:3: kv includes", found)

    def test_edge_that_nothing_uses(self):
        self.assertIn("kv: base is allowed but no file uses it", self.deps({"src/kv/page.h": "#pragma once\n"}))

    def test_module_without_a_line(self):
        self.assertIn("src/radix has no line", self.deps({"src/radix/tree.h": "#pragma once\n"}))

    def test_cycle(self):
        found = self.deps({"docs/modules.txt": "base: cache\nkv: base\ncache: base kv\n",
                           "src/base/ids.h": '#pragma once\n#include "cache/cache.h"\n'})
        self.assertIn("cycle", found)

    def test_apps_is_never_included(self):
        self.assertIn("nothing includes apps/", self.deps({"src/kv/page.h": '#include "base/ids.h"\n#include "commands.h"\n'}))
        self.assertIn("nothing includes apps/", self.deps({"src/base/ids_test.cc": '#include "apps/commands.h"\n'}))

    def test_nested_module_is_its_own(self):
        changes = {"docs/modules.txt": SOUND["docs/modules.txt"] + "backends/cpu: base\n",
                   "src/backends/cpu/CMakeLists.txt": "x()\n", "src/backends/cpu/gemm.h": '#include "base/ids.h"\n'}
        self.assertEqual(self.deps(changes), "")
        changes["src/cache/cache.h"] = SOUND["src/cache/cache.h"] + '#include "backends/cpu/gemm.h"\n'
        self.assertIn("does not allow cache: backends/cpu", self.deps(changes))

    def test_long_file(self):
        self.assertIn("901 lines", self.tidy({"src/kv/page.h": "#pragma once\n" + "\n" * 900}))

    def test_vendor_headers(self):
        for header, place in [("dnnl.hpp", "src/backends/cpu/"), ("hwy/highway.h", "src/backends/cpu/"),
                              ("boost/asio.hpp", "src/http/"), ("hiredis/hiredis.h", "src/storage/"),
                              ("cuda_runtime.h", "src/backends/cuda/"), ("gtest/gtest.h", "tests/")]:
            found = self.tidy({"src/kv/page.h": f"#pragma once\n#include <{header}>\n"})
            self.assertIn(f"<{header}> belongs to {place}", found)
        self.assertEqual(self.tidy({"src/backends/cpu/gemm.h": "#pragma once\n#include <dnnl.hpp>\n"}), "")

    def test_http_never_sees_json(self):
        self.assertIn("http never sees JSON", self.tidy({"src/http/a.h": "#pragma once\n#include <nlohmann/json.hpp>\n"}))

    def test_marks(self):
        mark = "TO" + "DO"
        for text in [f"// {mark}(anna): fix", f"// {mark} later", f"// {mark}: faster", "// FIX" + "ME: x", "// XX" + "X"]:
            self.assertIn("write 'TO" + "DO: what", self.tidy({"src/kv/page.h": f"#pragma once\n{text}\n"}), text)
        good = f"#pragma once\n// {mark}: merge equal copies, when a profile shows them\n"
        self.assertEqual(self.tidy({"src/kv/page.h": good}), "")

    def test_machine_paths(self):
        for text in ["/ho" + "me/anna/x", "/wo" + "rk/main", "../sha" + "red/x"]:
            self.assertIn("a path of one machine", self.tidy({"docs/a.md": f"see {text}/y\n"}), text)

    def test_drawers(self):
        for name in ["utils.h", "string_utils.h", "common.h", "cache_manager.h", "test_helpers.h"]:
            self.assertIn("name the idea", self.tidy({f"src/kv/{name}": "#pragma once\n"}), name)
        self.assertEqual(self.tidy({"src/kv/commonality.h": "#pragma once\n"}), "")

    def test_dead_file(self):
        self.assertIn("src/base/old.cc: no CMakeLists.txt", self.tidy({"src/base/old.cc": "\n"}))

    def test_links(self):
        self.assertIn("README.md: gone.md does not exist", self.tidy({"README.md": "[a](gone.md#part)\n"}))
        self.assertIn("README.md: src/gone.cc does not exist", self.tidy({"README.md": "see `src/gone.cc`\n"}))
        self.assertEqual(self.tidy({"README.md": "[a](docs/modules.txt) [b](https://x.y/z) `src/kv/page.h`\n"}), "")

    def test_flags_that_nothing_reads(self):
        table = '{.names = "--port --p", .target = &S::port},\n{.names = "--x", .status = kNoEffect, .target = &S::x},\n'
        files = {"src/config/flag_table.cc": table, "src/config/CMakeLists.txt": "flag_table.cc"}
        self.assertIn("--port is said to work, but nothing reads port", self.tidy(files))
        files["src/kv/page.h"] = "#pragma once\nint p = config.port;\n"
        self.assertEqual(self.tidy(files), "")

    def test_device_conditions(self):
        text = "#pragma once\n#ifdef SLUICE_CUDA\n#endif\n"
        self.assertIn("devices are left out by CMake", self.tidy({"src/kv/page.h": text}))
        self.assertEqual(self.tidy({"src/backends/cpu/page.h": text}), "")

    def test_small_things(self):
        self.assertIn("without #pragma once", self.tidy({"src/kv/page.h": "\n"}))
        self.assertIn("trailing white space", self.tidy({"docs/a.md": "a \n"}))
        self.assertIn("using namespace", self.tidy({"src/kv/page.h": "#pragma once\nusing namespace std;\n"}))
        self.assertIn("time of a build", self.tidy({"src/kv/page.h": "#pragma once\nauto a = __DA" + "TE__;\n"}))
        disabled = "TEST(A, DIS" + "ABLED_B) {}\n"
        self.assertIn("never disabled", self.tidy({"src/base/ids_test.cc": disabled}))


if __name__ == "__main__":
    unittest.main()
