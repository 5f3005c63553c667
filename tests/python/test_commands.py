"""What the documents tell a reader to run is there and takes the options shown; every program explains itself."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache

import pytest
from repo import ROOT, tracked_files

PAGES = [path for path in tracked_files() if path.suffix == ".md"]
# Programs that start with "#!" and are run by name, from anywhere in the checkout.
PROGRAMS = sorted(
    str(path.relative_to(ROOT))
    for path in tracked_files()
    if os.access(path, os.X_OK) and path.read_bytes().startswith(b"#!")
)
# The programs that installing brings: name -> command.
INSTALLED = {
    "hybridps": [sys.executable, "-m", "hybridps"],
    "hybridps-server": [sys.executable, "-c", "from hybridps.backend.server import main; raise SystemExit(main())"],
}
OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*")


def shown_commands() -> list[tuple[str, list[str]]]:
    """(page, words) of each command in a fenced block or between backticks that starts one of these programs."""
    found = []
    for page in PAGES:
        text = page.read_text()
        fenced = re.findall(r"^```.*?\n(.*?)^```", text, re.M | re.S)
        lines = [line for block in fenced for line in block.splitlines()]
        lines += re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
        for line in lines:
            for part in re.split(r"\s&&\s|;\s", re.split(r"\s{2,}|\s#", line.strip())[0]):
                words = re.sub(r"^(\w+\$\s+)?([A-Z_]+=\S*\s+)*", "", part).split()
                if words and (words[0] in PROGRAMS or words[0] in INSTALLED) and len(words) > 1:
                    found.append((str(page.relative_to(ROOT)), words))
    return found


@cache
def run(*command: str) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HYBRIDPS_")}
    return subprocess.run(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )


def help_of(*command: str) -> str:
    program = INSTALLED.get(command[0], [str(ROOT / command[0])])
    done = run(*program, *command[1:], "--help")
    assert done.returncode == 0, f"{shlex.join(command)} --help: {done.stderr[-500:]}"
    assert not done.stderr, done.stderr
    return done.stdout


def test_there_are_programs_and_pages_that_show_them():
    assert {"scripts/demo", "scripts/test", "benchmarks/lab/run", "benchmarks/gpu/run", "tests/rdma/run"} <= set(
        PROGRAMS
    )
    shown = {words[0] for _, words in shown_commands()}
    assert {"scripts/test", "scripts/faults", "tests/rdma/run", "hybridps", "hybridps-server"} <= shown


@pytest.mark.parametrize("program", [*PROGRAMS, *INSTALLED])
def test_every_program_says_what_it_does(program):
    text = help_of(program)
    assert len(text.splitlines()) >= 3, text


def test_the_documents_name_no_file_that_is_not_there():
    wrong = []
    named = re.compile(r"(?<![\w./-])(?:scripts|benchmarks|examples|tests|\.ci)/[\w./-]*\w")
    for page in PAGES:
        for name in named.findall(page.read_text()):
            if name.split("/")[-1].isupper():
                continue  # stands for any: tests/unit/ROOM
            # A page of a folder may mean its own, and a name may lack its ending.
            if not any((folder / name).exists() or list(folder.glob(f"{name}.*")) for folder in (ROOT, page.parent)):
                wrong.append(f"{page.relative_to(ROOT)}: {name}")
    assert not wrong


def test_options_in_the_documents_are_options_of_their_program():
    wrong = []
    for page, words in shown_commands():
        words = words[: words.index("--")] if "--" in words else words
        subcommand = [words[0]]
        if words[0] == "hybridps" and re.fullmatch(r"[a-z]+", words[1]):
            subcommand.append(words[1])
        known = set(OPTION.findall(help_of(*subcommand))) | {"--help"}
        wrong += [
            f"{page}: {shlex.join(words)}: no {word}" for word in words if OPTION.fullmatch(word) and word not in known
        ]
    assert not wrong, "\n".join(wrong)


# What a minimal system has, and these programs use. No Python, no compiler, nothing to install packages with.
SYSTEM = "bash env sh sed dirname cut grep find cat mkdir rm head tail nproc awk date tr sleep mktemp timeout".split()


@pytest.fixture
def bare(tmp_path):
    """bare("scripts/demo"): runs a program of a copy of this checkout without .venv, on a system that has nothing else,
    as a user who is not root. bare.offer("sudo", "exit 1") puts a program there."""
    folder, checkout = tmp_path / "bin", tmp_path / "checkout"
    folder.mkdir()
    for name in SYSTEM:
        (folder / name).symlink_to(shutil.which(name))
    for path in tracked_files():
        if (
            path.relative_to(ROOT).parts[0] in ("scripts", "benchmarks", "tests", "examples", ".ci")
            and path.stat().st_size < 1 << 20
        ):
            copy = checkout / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)

    def offer(name: str, script: str) -> None:
        (folder / name).unlink(missing_ok=True)  # else a link's target is written to
        (folder / name).write_text(f"#!{folder}/bash\n{script}\n")
        (folder / name).chmod(0o755)

    def run_there(*command: str, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [folder / "bash", checkout / command[0], *command[1:]],
            cwd=checkout,
            env={"PATH": str(folder), "HOME": str(tmp_path), "LC_ALL": "C", **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    offer("id", "echo 1000")
    run_there.offer = offer
    return run_there


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_says_what_it_does_where_nothing_is_installed(bare, program):
    if program == "tests/rdma/run":  # a Python program of its own
        bare.offer("python3", f'exec {shlex.quote(sys.executable)} "$@"')
    done = bare(program, "--help")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 3
    assert not done.stderr


NEED_PACKAGES = ("scripts/setup", "scripts/demo", "scripts/test", ".ci/run", "scripts/torch-versions 2.11")
NEED_SETUP = (
    "scripts/demo --no-setup",
    "scripts/test --no-setup --unit",
    "scripts/faults --list",
    "benchmarks/lab/run --list",
    "benchmarks/gpu/run --list",
    "examples/cases/run --list",
)


@pytest.mark.parametrize("command", NEED_PACKAGES)
@pytest.mark.parametrize("sudo", ["no", "wants a password"])
def test_without_root_a_program_says_which_packages_to_install(bare, command, sudo):
    bare.offer("apt-get", "echo not allowed >&2; exit 100")
    if sudo != "no":
        bare.offer("sudo", "echo 'sudo: a password is required' >&2; exit 1")
    done = bare(*command.split())
    assert done.returncode != 0
    assert re.search(
        r"run this as root, then .*:\n +apt-get update && apt-get install -y .*\bg\+\+ .*\bpython3-venv\b", done.stderr
    )
    assert "not allowed" not in done.stderr + done.stdout


def test_without_a_package_manager_that_is_known_the_packages_are_named(bare):
    done = bare("scripts/setup")
    assert done.returncode != 0
    assert re.search(r"please install .*: .*g\+\+ .*python3\b", done.stderr)


def test_as_root_the_packages_are_installed_and_a_failure_is_shown(bare, tmp_path):
    bare.offer("id", "echo 0")
    bare.offer("apt-get", 'echo "apt-get $*" >>"$HOME/asked"; exit 100')
    done = bare("scripts/setup", "--system")
    assert done.returncode != 0
    assert "apt-get failed" in done.stderr
    assert re.search(r"install -y .*\bg\+\+ .*\bpython3-venv\b", (tmp_path / "asked").read_text())


@pytest.mark.skipif(not shutil.which("apt-get"), reason="there is no apt-get")
def test_setup_waits_while_another_program_holds_a_lock_of_apt(bare, tmp_path):
    lock = tmp_path / "lists" / "lock"
    hold = (
        "import fcntl, os, signal, sys\n"
        f"lock = open({str(lock)!r}, 'w')\n"
        "fcntl.lockf(lock, fcntl.LOCK_EX)\n"
        "print('held', flush=True)\n"
        "signal.pause()\n"
    )
    (tmp_path / "lists" / "partial").mkdir(parents=True)
    # The real one, with lists of its own and nowhere to get them from. DPkg::Lock::Timeout does not help it with their lock.
    places = f"-o Dir::State::Lists={lock.parent} -o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts=/dev/null"
    bare.offer("id", "echo 0")
    bare.offer(
        "apt-get",
        f'echo "$1" >>"$HOME/asked"; [ "$1" = install ] && exit 100; exec {shutil.which("apt-get")} {places} "$@"',
    )
    with subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout.readline() == b"held\n"
            bare.offer("sleep", f"kill {holder.pid}; exec {shutil.which('sleep')} 0.1")  # who waits is let in
            done = bare("scripts/setup", "--system")
        finally:
            holder.kill()
    assert "waiting for it, 600 s at most" in done.stdout, done.stdout + done.stderr
    assert re.search(rf"Could not get lock {lock}", done.stdout)
    asked = (tmp_path / "asked").read_text().split()
    assert asked[-1] == "install" and set(asked[:-1]) == {"update"} and len(asked) >= 3, done.stderr


def test_setup_waits_for_a_lock_of_apt_as_long_as_it_was_told(bare):
    bare.offer("id", "echo 0")
    held = "E: Could not get lock /var/lib/dpkg/lock-frontend. It is held by process 7 (unattended-upgr)"
    bare.offer("apt-get", f"[ $1 = update ] || {{ echo '{held}' >&2; exit 100; }}")
    done = bare("scripts/setup", "--system", APT_WAIT_S="0")
    assert done.returncode != 0
    assert "was not free within 0 s" in done.stdout
    assert held in done.stderr and "apt-get failed" in done.stderr


@pytest.mark.parametrize("command", NEED_SETUP)
def test_without_an_environment_a_program_says_what_makes_one(bare, command):
    done = bare(*command.split())
    assert done.returncode != 0
    assert "run scripts/setup" in done.stderr + done.stdout
    assert len((done.stderr + done.stdout).splitlines()) <= 10


def test_without_python_the_rdma_test_says_so(bare):
    done = bare("tests/rdma/run", "--ucx", "ucx")
    assert done.returncode == 2
    assert done.stdout == "cannot run: this host lacks python3 (Debian package python3)\n"


def test_without_clang_nothing_is_fuzzed_and_the_package_is_named(bare):
    done = bare("scripts/fuzz")
    assert done.returncode == 0
    assert "apt-get install clang" in done.stdout
    assert done.stdout.endswith("0 passed, 0 failed, 1 skipped\n")
