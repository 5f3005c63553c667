"""Fields that name the mutex that guards them (core/mutex.h) are used with that mutex only, as clang sees it."""

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
from repo import CSRC, ROOT

CLANG = shutil.which("clang++")
NAMES_MUTEX = re.compile(r"HYBRIDPS_(GUARDED_BY|REQUIRES)\(")
WRONG = """
#include "hybridps/core/mutex.h"
struct Counted {
  int next() { return ++count; }
  hybridps::core::Mutex mutex;
  int count HYBRIDPS_GUARDED_BY(mutex) = 0;
};
"""


def users() -> list:
    """The .cpp file beside each header that names a mutex, or all of its room that include it; without torch's."""
    named = [path for path in sorted((CSRC / "hybridps").rglob("*.[hc]*")) if NAMES_MUTEX.search(path.read_text())]
    named = [path for path in named if path.name != "mutex.h"]
    found = {path for path in named if path.suffix == ".cpp"}
    for header in (path for path in named if path.suffix == ".h"):
        include = f'#include "{header.relative_to(CSRC)}"'
        found |= {path for path in header.parent.glob("*.cpp") if include in path.read_text()}
    return sorted(path for path in found if "/pg/" not in str(path) and "/bindings/" not in str(path))


def check(source: str, *more: str) -> str:
    flags = ["-std=c++20", "-fsyntax-only", "-Wthread-safety", "-Werror=thread-safety", f"-I{CSRC}"]
    done = subprocess.run([CLANG, *flags, *more, "-x", "c++", source], input=WRONG, capture_output=True, text=True, cwd=ROOT)
    return "" if done.returncode == 0 else done.stderr


@pytest.mark.skipif(CLANG is None, reason="clang++ is not installed: apt-get install clang")
def test_guarded_fields_are_used_with_their_mutex(tmp_path):
    assert "requires holding mutex 'mutex'" in check("-")  # the check finds what it is for
    generated = tmp_path / "hybridps" / "build_info.h"
    generated.parent.mkdir()
    generated.write_text(re.sub("@[^@]+@", "0", (ROOT / "cmake" / "build_info.h.in").read_text()))
    files = users()
    assert len(files) >= 5
    with ThreadPoolExecutor(2) as pool:
        for path, errors in zip(files, pool.map(lambda path: check(str(path), f"-I{tmp_path}"), files), strict=True):
            assert not errors, f"{path.relative_to(ROOT)}:\n{errors}"
