"""tests/gpu/first-contact, the parts that need no GPU: what it does with a stage that hangs, and how it builds."""

import argparse
import json
import subprocess
import sys
import tarfile
import time

import pytest
from repo import ROOT

sys.path.insert(0, str(ROOT / "tests" / "gpu"))

import first_contact  # noqa: E402

# A program that starts another in a session of its own, as the harness does with ranks; both hang.
HANGS = """
import os, subprocess, sys, time
if len(sys.argv) == 1:
    subprocess.Popen([sys.executable, __file__, "rank"], start_new_session=True)
    print('{"probe": "started", "what": "a child"}', flush=True)
else:
    import faulthandler
    faulthandler.enable(open(os.environ["TMPDIR"] + "/stacks0", "w"))
    open(sys.argv[0] + ".pid", "w").write(str(os.getpid()))
def here_it_hangs():
    time.sleep(1000)
here_it_hangs()
"""


@pytest.fixture
def make_run(tmp_path):
    def make(limit_s=60.0, only=""):
        options = argparse.Namespace(out=str(tmp_path / "out"), limit_s=limit_s, only=only, cmake="-DA=1 -DB='2 3'")
        return first_contact.Run(options, tmp_path / "work")

    return make


def results(run):
    return [json.loads(line) for line in (run.out / "results.jsonl").read_text().splitlines()]


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_stage_that_hangs_ends_in_time_with_the_stacks_of_all_its_processes(make_run, tmp_path):
    program = tmp_path / "hangs.py"
    program.write_text(HANGS)
    run = make_run(limit_s=first_contact.STACKS_S + first_contact.PACK_S + 5)
    begin = time.monotonic()
    assert run.stage("it hangs", 100, [sys.executable, program]) is None
    assert time.monotonic() - begin < first_contact.STACKS_S + first_contact.PACK_S + 5
    assert not is_alive(int((tmp_path / "hangs.py.pid").read_text()))
    started, told = results(run)
    assert started["probe"] == "started"
    assert told["stage"] == "it hangs" and told["status"] == "hung"
    run.pack()
    with tarfile.open(run.out / "logs.tar.gz") as tar:
        texts = {member.name: tar.extractfile(member).read().decode() for member in tar if member.isfile()}
    (stacks,) = [text for name, text in texts.items() if name.endswith(".stacks")]
    assert stacks.count("== process ") == 2
    assert "here_it_hangs" in stacks.partition("== stacks0")[2], stacks
    assert "here_it_hangs" in texts["logs/" + told["log"]]  # of the first process, by SIGABRT
    assert run.stage("another", 100, ["true"]) is None  # no time is left for it
    assert results(run)[-1] == results(run)[-1] | {"stage": "another", "status": "left out: no time"}


def test_what_a_stage_leaves_behind_is_ended_and_no_device_is_no_failure(make_run):
    run = make_run()
    run.stage("leaves", 20, ["bash", "-c", "setsid sleep 1000 & echo $!"])
    assert not is_alive(int((run.logs / "001-leaves.log").read_text()))
    run.stage("no device", 20, ["bash", "-c", "echo 'no device: none'; exit 77"])
    run.stage("fails", 20, ["bash", "-c", "echo why; exit 3"])
    run.stage("is not there", 20, ["/nowhere"])
    told = {result["stage"]: result for result in results(run)}
    assert told["leaves"]["status"] == "passed"
    assert told["no device"]["status"] == "skipped" and told["no device"]["why"] == "no device: none"
    assert told["fails"]["status"] == "exit status 3" and told["fails"]["last"] == ["why"]
    assert told["is not there"]["status"] == "exit status 127"
    assert run.failed == ["fails", "is not there"]


@pytest.mark.parametrize("catch", [2, 3])
def test_the_cases_of_a_unit_program_are_listed_with_both_catch2s(tmp_path, catch):
    program = tmp_path / "unit"
    names = "printf 'room: one case, and more\\n  room: another [x]\\n'"
    if catch == 2:
        body = f'[ "$*" = --list-test-names-only ] || exit 1\n{names}\nexit 2'
    else:
        refused = 'printf "Error(s) in input:\\n  Unrecognised token: $1\\n" >&2; exit 255'
        body = f'if [ "$*" != "--list-tests --verbosity quiet" ]; then {refused}; fi\n{names}'
    program.write_text(f"#!/bin/bash\n{body}\n")
    program.chmod(0o755)
    assert first_contact.cases_of(program) == ["room: one case, and more", "room: another [x]"]


def test_torch_finds_the_backend_of_a_package_that_was_only_built(tmp_path):
    first_contact.write_metadata(tmp_path)
    code = (
        "from importlib.metadata import entry_points, version\nprint(version('hybridps'))\n"
        "for group in ('torch.backends', 'torch.distributed.backends'):\n"
        "    print([point.value for point in entry_points(group=group)])\n"
    )
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    version, at_import, by_name = done.stdout.splitlines()
    assert f'version = "{version}"' in (ROOT / "pyproject.toml").read_text()
    assert at_import == "['hybridps.backend.autoload:autoload']"
    assert by_name == "['hybridps.backend.register:register']"


def test_the_extension_is_configured_alone_and_the_tests_may_fail(make_run, monkeypatch, tmp_path):
    run = make_run()
    commands = []

    def stage(name, limit_s, command, env=None, always=False):
        commands.append(list(map(str, command)))
        return 1 if name == "configure the tests" else 0

    monkeypatch.setattr(first_contact, "DEPS", tmp_path / "deps")
    (tmp_path / "deps" / "ucx").mkdir(parents=True)
    (tmp_path / "deps" / "catch2").mkdir()
    monkeypatch.setattr(first_contact, "has_extension", lambda run: False)
    monkeypatch.setattr(run, "stage", stage)
    for name in ("assemble", "keep_built"):
        monkeypatch.setattr(first_contact, name, lambda run: None)
    first_contact.build(run)
    alone, extension, tests = commands
    assert "-DHYBRIDPS_BUILD_TESTS=OFF" in alone and "-DHYBRIDPS_BUILD_PYTHON=ON" in alone
    assert extension[-1] == "_C"
    assert "-DHYBRIDPS_BUILD_TESTS=ON" in tests
    for command in (alone, tests):
        assert command[-2:] == ["-DA=1", "-DB=2 3"]  # --cmake
        assert f"-DHYBRIDPS_UCX_ROOT={tmp_path}/deps/ucx" in command
        assert f"-DCMAKE_PREFIX_PATH={tmp_path}/deps/catch2" in command


def test_with_one_gpu_nothing_is_begun_that_needs_two(make_run, monkeypatch):
    run = make_run()
    run.devices = 1
    stages = {}
    monkeypatch.setattr(first_contact, "build", lambda run: None)
    monkeypatch.setattr(run, "stage", lambda name, limit_s, command, env=None: stages.update({name: command}))
    first_contact.figures(run)
    assert list(stages) == [f"benchmarks {kind}" for kind in ("enqueue", "allreduce", "ddp", "fsdp2")]
    folders = {str(command[command.index("--output") + 1]) for command in stages.values()}
    assert len(folders) == 4
    left_out = [result for result in results(run) if result["status"].startswith("left out")]
    assert [result["stage"] for result in left_out] == ["tests of NCCL inside the nodes", "benchmarks"]


def test_the_probes_have_a_kernel_that_is_compiled_before_anything_waits():
    torch = pytest.importorskip("torch")
    import probes

    if not torch.version.cuda:
        pytest.skip("this torch is for the CPU")
    assert probes.compiled(b"probe_0", "sm_90").raw.startswith(b"\x7fELF")
