"""scripts/headers.py: a build that uses what a fresh machine does not have is found out, on a machine that has it."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repo import ROOT

spec = importlib.util.spec_from_file_location("headers", ROOT / "scripts" / "headers.py")
headers = importlib.util.module_from_spec(spec)
spec.loader.exec_module(headers)

NINJA = shutil.which("ninja") or str(Path(sys.executable).parent / "ninja")
COMPILER = shutil.which("g++") or shutil.which("c++")
pytestmark = pytest.mark.skipif(
    not COMPILER or not Path(NINJA).exists(), reason="needs a C++ compiler and Ninja: scripts/setup"
)


@pytest.fixture
def make_build(tmp_path):
    """make_build("-Ifolder"): a build folder where one file was compiled by Ninja, which notes its headers."""
    toolkit = tmp_path / "toolkit" / "include"
    (toolkit / "crt").mkdir(parents=True)
    (toolkit / "runtime.h").write_text('#pragma once\n#include "crt/host_config.h"\n')
    (toolkit / "crt" / "host_config.h").write_text("#pragma once\n")

    def make(source: str, flags: str = "", cache: str = "", old: str = "") -> Path:
        build = tmp_path / "build"
        build.mkdir()
        (build / "source.cpp").write_text(source)
        (build / "CMakeCache.txt").write_text(f"CMAKE_CXX_COMPILER:FILEPATH={COMPILER}\n{cache}\n")
        (build / "build.ninja").write_text(
            "rule compile\n"
            f"  command = {COMPILER} {flags} -MD -MF $out.d -c $in -o $out\n"
            "  depfile = $out.d\n"
            "  deps = gcc\n"
            "build source.o: compile source.cpp\n"
            "build old.o: compile old.cpp\n"
            "build all: phony source.o\n"
        )
        (build / "old.cpp").write_text(old)
        done = subprocess.run([NINJA, "-C", build, "source.o", "old.o"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        # The source stands for one of the checkout.
        headers.CHECKOUT = build
        return build

    checkout = headers.CHECKOUT
    make.toolkit = toolkit
    yield make
    headers.CHECKOUT = checkout


def test_headers_of_the_compiler_the_environment_and_setup_are_fine(make_build):
    build = make_build("#include <vector>\n#include <sys/epoll.h>\n#include <linux/errno.h>\n")
    assert headers.foreign_headers(build) == {}


def test_a_header_of_a_toolkit_is_named_with_the_file_that_includes_it(make_build):
    build = make_build("#include <runtime.h>\n", f"-isystem {make_build.toolkit}")
    assert headers.foreign_headers(build) == {
        make_build.toolkit / "runtime.h": (build / "source.cpp", build / "source.cpp"),
        make_build.toolkit / "crt" / "host_config.h": (make_build.toolkit / "runtime.h", build / "source.cpp"),
    }


def test_a_toolkit_that_a_variable_adds_to_the_compilers_own_folders_is_found(make_build, monkeypatch):
    monkeypatch.setenv("CPATH", str(make_build.toolkit))
    build = make_build("#include <runtime.h>\n")
    assert set(headers.foreign_headers(build)) == {
        make_build.toolkit / "runtime.h",
        make_build.toolkit / "crt" / "host_config.h",
    }


@pytest.mark.parametrize("option", headers.OPTIONS)
def test_a_toolkit_that_an_option_names_is_meant(make_build, option):
    root = make_build.toolkit.parent
    build = make_build("#include <runtime.h>\n", f"-isystem {make_build.toolkit}", f"{option}:PATH={root}")
    assert headers.foreign_headers(build) == {}


def test_what_the_target_does_not_need_may_be_older_than_the_options(make_build):
    build = make_build("", f"-isystem {make_build.toolkit}", old="#include <runtime.h>\n")
    assert headers.foreign_headers(build) == {}
    assert headers.foreign_headers(build, target="old.o")


def test_what_was_compiled_from_a_source_that_has_changed_since_counts_no_more(make_build):
    build = make_build("#include <runtime.h>\n", f"-isystem {make_build.toolkit}")
    (build / "source.o").unlink()
    with pytest.raises(headers.Failed, match="nothing was compiled"):
        headers.foreign_headers(build)


OPENSSL = Path("/usr/include/openssl/crypto.h")


@pytest.mark.skipif(not shutil.which("dpkg-query") or not OPENSSL.exists(), reason="needs Debian's libssl-dev")
def test_a_header_of_the_system_must_belong_to_a_package_that_setup_installs(make_build):
    build = make_build("#include <stdio.h>\n#include <openssl/crypto.h>\n")
    assert headers.foreign_headers(build) == {}
    others = [package for package in headers.PACKAGES if package != "libssl-dev"]
    found = headers.foreign_headers(build, others)
    assert found[OPENSSL] == (build / "source.cpp", build / "source.cpp")
    assert all(path.is_relative_to(OPENSSL.parent) or "openssl" in path.parts for path in found), found


def test_setup_installs_the_packages_that_headers_may_come_from():
    text = (ROOT / "scripts" / "setup").read_text()
    for package in headers.PACKAGES:
        assert re.search(rf"\bneed {re.escape(package)}(?=\s)", text), package


def test_the_command_names_both_files_and_the_way_out(make_build):
    build = make_build("#include <runtime.h>\n", f"-isystem {make_build.toolkit}")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "headers.py", build], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"source.cpp includes {make_build.toolkit}/runtime.h" in done.stdout
    assert f"runtime.h includes {make_build.toolkit}/crt/host_config.h, which a fresh machine" in done.stdout
    assert "HYBRIDPS_CUDA_ROOT" in done.stdout


def test_an_extension_for_a_torch_with_cuda_was_built_with_cuda_and_nccl():
    """Headers that do not compile leave them out, which nobody would notice on a machine without a GPU."""
    torch = importlib.util.find_spec("torch").submodule_search_locations[0]
    nvidia = importlib.util.find_spec("nvidia")
    wheels = [Path(folder) for folder in nvidia.submodule_search_locations] if nvidia else []
    if not Path(torch, "lib", "libc10_cuda.so").exists() or not any(
        (w / "nccl/include/nccl.h").exists() for w in wheels
    ):
        pytest.skip("a torch without CUDA, or whose CUDA is not in wheels")
    done = subprocess.run([sys.executable, "-m", "hybridps", "doctor"], capture_output=True, text=True, check=False)
    assert re.search(r"^built with CUDA +yes$", done.stdout, re.M), done.stdout
    assert "without NCCL's header" not in done.stdout
