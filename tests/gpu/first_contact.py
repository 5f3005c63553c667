"""The first half hour on a GPU, as three commands of at most ten minutes each; `first-contact --help` shows them.

Results    results.jsonl: a line for each result, written at once. logs.tar.gz: a log for each stage, and the stacks of
           what hung. built.tar.gz: the extension and the unit programs; unpacked into .deps/built they are used, and
           nothing is built.
Limits     nothing stops at a failure. Each process has a limit, and so has the command, the taking of stacks included.
           A stage's processes are known by a word in their environment, because ranks have sessions of their own.
Build      first the extension alone; then the unit programs, by a second configuration that may fail.
Without a GPU it goes as far as the first call of a device and says so: that is its rehearsal.
"""

import argparse
import ctypes
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "first-contact-work"
DEPS = ROOT / ".deps"
PYTHON = next((p for p in (str(ROOT / ".venv/bin/python"),) if os.access(p, os.X_OK)), sys.executable)
PROBES = ["memory", "objects", "kernels", "torchs", "nccl", "copies", "queues", "latency", "costs"]
PROGRAMS = ["unit_device_cuda", "unit_intranode_nccl", "unit_staging_cuda"]
NO_DEVICE = 77  # exit status of a program that found no device
STACKS_S, PACK_S = 12, 4
WORD = "FIRST_CONTACT_STAGE"  # of a stage's processes' environment. HYBRIDPS_... would be an unknown setting to ranks
TREE_BYTES_MAX = 60 << 20  # of what is carried to another machine


class Run:
    def __init__(self, options, work=WORK):
        self.begin = time.monotonic()
        self.end = self.begin + options.limit_s
        self.only = options.only
        self.cmake = shlex.split(options.cmake)
        self.out = Path(options.out).resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.results = (self.out / "results.jsonl").open("a")
        self.work = Path(work)
        self.logs = self.work / "logs"
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir(parents=True)
        self.built = self.work / "built"
        self.lock = threading.Lock()
        self.count = 0
        self.packed_at = 0.0
        self.failed = []
        self.devices = 0
        self.env = os.environ | {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
        self.env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # ranks are forked

    def left(self):
        return self.end - time.monotonic() - STACKS_S - PACK_S

    def tell(self, **result):
        with self.lock:
            line = json.dumps(result | {"at_s": round(time.monotonic() - self.begin, 1)})
            print(line, flush=True)
            print(line, file=self.results, flush=True)

    def stage(self, name, limit_s, command, env=None, always=False):
        """Runs a command. Its own JSON lines become results; then one says how it ended. The exit status, or None."""
        if self.only not in name and not always:
            return None
        limit_s = min(limit_s, self.left())
        if limit_s < 3:
            self.tell(stage=name, status="left out: no time")
            return None
        with self.lock:
            self.count += 1
            word = f"{os.getpid()}-{self.count}"
        log = self.logs / f"{self.count:03}-{''.join(c if c.isalnum() or c in '-_.' else '_' for c in name)[:80]}.log"
        folder = self.work / "tmp" / word  # where harness.py has its ranks' output
        folder.mkdir(parents=True)
        begin = time.monotonic()
        status = None
        try:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    list(map(str, command)), env=self.env | (env or {}) | {WORD: word, "TMPDIR": str(folder)},
                    cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
                try:
                    status = process.wait(limit_s)
                except subprocess.TimeoutExpired:
                    until = time.monotonic() + STACKS_S
                    log.with_suffix(".stacks").write_text(stacks_of(word, until - 3) + end_all(word, folder))
                    try:
                        process.wait(1)
                    except subprocess.TimeoutExpired:  # it hangs in the kernel
                        pass
                else:
                    end_all(word)  # what it has left behind
        except OSError as error:
            log.write_text(str(error))
            status = 127
        text = log.read_text(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        for line in lines:
            if line.startswith('{"probe"'):
                try:
                    self.tell(**json.loads(line))
                except ValueError:
                    pass
        result = {"stage": name, "status": "passed", "s": round(time.monotonic() - begin, 1)}
        why = [line for line in lines if line.startswith("SKIPPED ") or "skipped: " in line]
        if status == NO_DEVICE:
            result |= {"status": "skipped", "why": (why or lines or [""])[-1]}
        elif status == 0:
            result |= {"status": "skipped", "why": why[0]} if why else {}
        else:
            how = "hung" if status is None else f"exit status {status}"
            result |= {"status": how, "log": log.name, "last": lines[-3:]}
            with self.lock:
                self.failed.append(name)
        self.tell(**result)
        shutil.rmtree(folder, ignore_errors=True)
        if time.monotonic() > self.packed_at + 30:
            self.pack()
        return status

    def pack(self):
        """The logs so far, in one file: a command may be ended from outside at any time."""
        with self.lock:
            self.packed_at = time.monotonic()
            part = self.out / "logs.part"
            with tarfile.open(part, "w:gz", compresslevel=3) as tar:
                tar.add(self.logs, "logs")
            part.replace(self.out / "logs.tar.gz")


# What hangs ------------------------------------------------------------------------------------------------------


def processes_of(word):
    """Those that have the word in their environment, whatever session they are in."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if f"{WORD}={word}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return sorted(found)


def stacks_of(word, until):
    """Of all processes of a stage, by what there is: cuda-gdb or gdb, py-spy, the kernel's view of the threads."""
    texts = []
    debugger = shutil.which("cuda-gdb") or shutil.which("gdb")
    spy = shutil.which("py-spy")
    pids = processes_of(word)
    for pid in pids:
        try:
            texts.append(f"== process {pid} {Path(f'/proc/{pid}/cmdline').read_text().replace(chr(0), ' ')[:200]}")
        except OSError:
            continue
        for thread in sorted(Path(f"/proc/{pid}/task").glob("*")):
            try:
                texts.append(f"{thread.name} {(thread / 'comm').read_text().strip()} {(thread / 'wchan').read_text()}")
            except OSError:
                pass
    # The last are the ranks, which matter most.
    # Symbols of torch's libraries alone take a debugger half a minute.
    quick = ["-batch", "-iex", "set auto-solib-add off", "-iex", "set debuginfod enabled off"]
    libraries = ("_C[.]", "libcuda", "libnccl", "libc[.]", "libpython")
    symbols = [word for name in libraries for word in ("-ex", f"sharedlibrary {name}")]
    native = ["-ex", "thread apply all bt 20"]
    for name, before, after in ((spy, ["dump", "--pid"], []), (debugger, [*quick, "-p"], [*symbols, *native])):
        for pid in reversed(pids if name else []):
            if (within := until - time.monotonic()) > 0.5:
                texts += [f"== {Path(name).name} {pid}", said([name, *before, pid, *after], min(within, 5))]
    return "\n".join(texts) + "\n"


def said(command, within=20.0, env=None):
    try:
        done = subprocess.run(
            list(map(str, command)), capture_output=True, text=True, errors="replace", timeout=within, env=env,
            cwd=ROOT, stdin=subprocess.DEVNULL)
        return done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        return f"{(error.stdout or b'').decode(errors='replace')}{error}\n"
    except OSError as error:
        return f"{error}\n"


def end_all(word, folder=None):
    """Ends a stage's processes, the youngest first. Python writes its threads' stacks at SIGABRT (faulthandler): to
    the log, and ranks of harness.py to a file in `folder`. Their texts are returned."""
    texts = ""
    if folder and (pids := processes_of(word)):
        send(pids[0], signal.SIGSTOP)  # the first would remove what its ranks write
        for pid in reversed(pids):
            send(pid, signal.SIGABRT)
            time.sleep(0.05)
        time.sleep(0.3)
        for path in sorted([*folder.rglob("stacks*"), *folder.rglob("output*")]):
            if path.is_file() and path.stat().st_size:
                texts += f"== {path.name}\n{path.read_text(errors='replace')[-8000:]}\n"
        send(pids[0], signal.SIGCONT)
        time.sleep(0.2)
    # Until none is found three times in a row: a process that starts a program has no environment for a moment.
    until, quiet = time.monotonic() + 2, 0
    while quiet < 3 and time.monotonic() < until:
        pids = processes_of(word)
        quiet = 0 if pids else quiet + 1
        for pid in reversed(pids):
            send(pid, signal.SIGKILL)
        time.sleep(0.02)
    return texts


def send(pid, number):
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


# The build -------------------------------------------------------------------------------------------------------


def has_extension(run):
    code = "from hybridps.backend import load; load.load_extension(); print('it is', 'here')"
    return "it is here" in said([PYTHON, "-c", code], 60, run.env)


def program(name):
    """Where a unit program is."""
    places = [DEPS / "built" / "tests" / name, ROOT / "build" / "release" / "tests" / name]
    return next((path for path in places if path.exists()), None)


def use_package(run, folder):
    before = run.env.get("PYTHONPATH")
    run.env["PYTHONPATH"] = str(folder) + (os.pathsep + before if before else "")


def deps_arguments():
    """For CMake: what .deps has and the system lacks."""
    arguments = []
    if (DEPS / "ucx").is_dir():
        arguments.append(f"-DHYBRIDPS_UCX_ROOT={DEPS / 'ucx'}")
    if (DEPS / "openssl").is_dir() and not Path("/usr/include/openssl/ssl.h").exists():
        place = DEPS / "openssl"
        arguments += [f"-DOPENSSL_ROOT_DIR={place}", f"-DOPENSSL_INCLUDE_DIR={place / 'include'}"]
        for name in ("crypto", "ssl"):
            arguments.append(f"-DOPENSSL_{name.upper()}_LIBRARY={place / 'lib' / f'lib{name}.so.3'}")
    if (DEPS / "catch2").is_dir():
        arguments.append(f"-DCMAKE_PREFIX_PATH={DEPS / 'catch2'}")
    return arguments


def write_metadata(folder):
    """What an installation has beside the package: by the entry points torch learns of the backend."""
    text = (ROOT / "pyproject.toml").read_text()
    version = re.search(r'^version = "(.*)"', text, re.M).group(1)
    info = folder / f"hybridps-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: hybridps\nVersion: {version}\n")
    points = ""
    for group, names in re.findall(r'^\[project\.entry-points\."(.*?)"\].*\n((?:\w.*\n)+)', text, re.M):
        points += f"[{group}]\n" + re.sub(r'"', "", names) + "\n"
    (info / "entry_points.txt").write_text(points)


def assemble(run):
    """The package as an installation has it, from the build's folder."""
    folder = run.built / "package"
    shutil.rmtree(run.built, ignore_errors=True)
    shutil.copytree(ROOT / "python" / "hybridps", folder / "hybridps", ignore=shutil.ignore_patterns("__pycache__"))
    for found in [*(ROOT / "build/release/python/hybridps").glob("_C*.so"),
                  *(ROOT / "build/release/generated/python").glob("_build_info.py")]:
        shutil.copy(found, folder / "hybridps")
    write_metadata(folder)
    use_package(run, folder)


def keep_built(run):
    """built.tar.gz, so that a later machine need not build."""
    (run.built / "tests").mkdir(parents=True, exist_ok=True)
    for name in PROGRAMS:
        if path := program(name):
            shutil.copy(path, run.built / "tests")
    for path in [*run.built.glob("tests/*"), *run.built.glob("package/hybridps/_C*.so")]:
        said(["strip", "--strip-debug", path])  # names stay, for stacks
    with tarfile.open(run.out / "built.part", "w:gz", compresslevel=6) as tar:
        tar.add(run.built, "built")
    (run.out / "built.part").replace(run.out / "built.tar.gz")
    run.tell(stage="built.tar.gz", status="passed", bytes=(run.out / "built.tar.gz").stat().st_size)


def build(run, has_it=None):
    """The extension and the unit programs, of this tree. Sets `has_it` when an extension is there, or never will be."""
    has_it = has_it or threading.Event()
    try:
        if (DEPS / "built" / "package").is_dir():
            use_package(run, DEPS / "built" / "package")
        is_there = has_extension(run)
        if is_there:
            run.tell(stage="extension", status="passed", note="it was there")
            has_it.set()
            if all(map(program, PROGRAMS)):
                return
        jobs = str(max(1, (os.cpu_count() or 4) - 2))
        configure = ["cmake", "--preset", "release", f"-DPython_EXECUTABLE={PYTHON}", *deps_arguments()]

        def make(target):
            command = ["cmake", "--build", "--preset", "release", "-j", jobs, "--target", target]
            return run.stage(f"build {target}", 480, command, always=True) == 0

        if not is_there:
            alone = [*configure, "-DHYBRIDPS_BUILD_TESTS=OFF", "-DHYBRIDPS_BUILD_PYTHON=ON", *run.cmake]
            if run.stage("configure the extension", 120, alone, always=True) == 0 and make("_C"):
                assemble(run)
                run.tell(stage="extension", status="passed" if has_extension(run) else "cannot be loaded")
            has_it.set()
        wanted = [name for name in PROGRAMS if not run.only or name in run.only or run.only in name]
        if not wanted:
            return
        kind = "AUTO" if is_there else "ON"
        tests = [*configure, "-DHYBRIDPS_BUILD_TESTS=ON", f"-DHYBRIDPS_BUILD_PYTHON={kind}", *run.cmake]
        if run.stage("configure the tests", 120, tests, always=True) == 0:
            for name in wanted:
                make(name)
        if not is_there:
            keep_built(run)
    finally:
        has_it.set()


def copy_into(folder, paths):
    folder.mkdir(parents=True, exist_ok=True)
    for path in paths:
        if Path(path).is_dir():
            shutil.copytree(path, folder / Path(path).name, dirs_exist_ok=True)
        else:
            shutil.copy(path, folder)  # not the link but the file


def deps(run):
    """.deps: what this machine builds with and another may lack. Shared libraries without what debuggers read."""
    shutil.rmtree(DEPS, ignore_errors=True)
    missing = []
    code = "import importlib.util as u; s = u.find_spec('libucx'); print(s.submodule_search_locations[0] if s else '')"
    ucx = Path(said([PYTHON, "-c", code]).strip() or "/usr")
    places = [ucx / "lib", *Path("/usr/lib").glob("*-linux-gnu")]
    libraries = next((place for place in places if (place / "libucp.so").exists()), None)
    if libraries:
        copy_into(DEPS / "ucx" / "include", [ucx / "include" / name for name in ("ucp", "ucs", "uct", "ucm")])
        for name in ("ucp", "ucs", "uct", "ucm", "ucs_signal"):
            for ending in ("so", "so.0") if (libraries / f"lib{name}.so.0").exists() else ():
                copy_into(DEPS / "ucx" / "lib", [libraries / f"lib{name}.{ending}"])
    else:
        missing.append("UCX")
    crypto = next(iter(Path("/usr/lib").glob("*-linux-gnu/libcrypto.so.3")), None)
    if crypto and Path("/usr/include/openssl/ssl.h").exists():
        copy_into(DEPS / "openssl" / "include", ["/usr/include/openssl"])
        copy_into(DEPS / "openssl" / "include", Path("/usr/include").glob("*-linux-gnu/openssl"))
        copy_into(DEPS / "openssl" / "lib", [crypto, crypto.with_name("libssl.so.3")])
    else:
        missing.append("OpenSSL's headers")
    if Path("/usr/include/catch2").is_dir():
        copy_into(DEPS / "catch2" / "include", ["/usr/include/catch2"])
        copy_into(DEPS / "catch2" / "lib" / "cmake", Path("/usr/lib").rglob("cmake/Catch2"))
        copy_into(DEPS / "catch2" / "lib", Path("/usr/lib").rglob("libCatch2*.a"))
    else:
        missing.append("Catch2")
    for path in DEPS.rglob("*.so*"):
        said(["strip", "--strip-unneeded", path])
    carried = sum(path.stat().st_size for path in DEPS.rglob("*") if path.is_file())
    tracked = said(["git", "ls-files", "-z"]).split("\0")
    tree = sum((ROOT / name).stat().st_size for name in tracked if (ROOT / name).is_file())
    fits = carried + tree <= TREE_BYTES_MAX
    status = "passed" if fits and not missing else f"missing: {', '.join(missing)}" if missing else "too large"
    run.tell(stage="deps", status=status, deps_mib=round(carried / 2**20, 1), tree_mib=round(tree / 2**20, 1))
    if status != "passed":
        run.failed.append("deps")


# The commands ----------------------------------------------------------------------------------------------------


def inventory(run):
    run.stage("inventory machine", 20, ["bash", "-c", """
        nvidia-smi -q | grep -iE 'driver version|cuda version|product name|mig mode|current ecc|conf'
        nvidia-smi topo -m
        ulimit -a; df -h /dev/shm; nproc; free -g; g++ --version | head -1; cmake --version | head -1; ninja --version
        ls /usr/include/openssl/ssl.h /usr/include/catch2 2>&1; true"""])
    run.stage("inventory torch", 60, [PYTHON, "-c", """
import json, sys, sysconfig, os, torch
found = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda,
         "devices": torch.cuda.device_count(),
         "headers": os.path.exists(sysconfig.get_paths()["include"] + "/Python.h")}
if torch.cuda.is_available():
    found |= {"name": torch.cuda.get_device_name(), "nccl": list(torch.cuda.nccl.version())}
print(json.dumps({"probe": "inventory"} | found))"""])


def cases_of(path):
    """Names of a unit program's test cases, with Catch2 2 or 3."""
    listed = said([path, "--list-test-names-only"])
    if "nrecogni" in listed or not listed.strip():  # Catch2 3 has no such option
        listed = said([path, "--list-tests", "--verbosity", "quiet"])
    return [line.strip() for line in listed.splitlines() if line.strip() and "matching" not in line]


def probes(run, connections):
    for probe in PROBES:
        run.stage(f"probe {probe} {connections}", 25, [PYTHON, "tests/gpu/probes.py", probe],
                  {"CUDA_DEVICE_MAX_CONNECTIONS": connections})


def knowledge(run):
    inventory(run)
    has_it = threading.Event()
    building = threading.Thread(target=build, args=(run, has_it))
    building.start()
    probes(run, "8")
    has_it.wait(max(0, run.left()))
    run.stage("doctor", 60, [PYTHON, "-m", "hybridps", "doctor"])
    for name in ("test_every_collective[1+1]", "test_stream_order[1+1]", "test_the_host_does_not_wait"):
        test(run, f"tests/gpu/test_gpu.py::{name}", 60)
    building.join()
    for name in PROGRAMS[:2]:
        path = program(name)
        for case in cases_of(path) if path and run.only in f"{name} " else []:
            exact = case.replace(",", "\\,").replace("[", "\\[")
            run.stage(f"{name} {case}", 20, [path, exact])
    if path := program("unit_staging_cuda"):
        run.stage("unit_staging_cuda", 120, [path, "~[.long]"])
    if run.devices or run.only:  # elsewhere they would say the same again
        probes(run, "1")
        probes(run, "32")
        run.stage("probe kernels launch-blocking", 25, [PYTHON, "tests/gpu/probes.py", "kernels"],
                  {"CUDA_LAUNCH_BLOCKING": "1"})
    else:
        run.tell(stage="probes with 1 and 32 connections", status="left out: no GPU")


def test(run, name, limit_s):
    # harness.py tells more of ranks that hang than we do from outside, so its limits come first.
    run.stage(name.partition("::")[2], limit_s, [PYTHON, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", name],
              {"HYBRIDPS_TEST_TIMEOUT_SCALE": "0.4"})


def tests(run, wanted):
    listed = said([PYTHON, "-m", "pytest", "-q", "--collect-only", "tests/gpu"], min(60, max(5, run.left())), run.env)
    names = [line for line in listed.splitlines() if "::" in line and wanted(line)]
    if not names:
        run.tell(stage="collecting tests", status="found none", last=listed.splitlines()[-3:])
    for name in names:
        test(run, name, 400 if "sanitizer" in name else 50)


def has_nccl(name):
    return any(part in name for part in ("nccl", "same_node", "connected_before"))


def truth(run):
    build(run)
    tests(run, lambda name: not has_nccl(name) and "sanitizer" not in name and "cpu" not in name)
    tests(run, lambda name: "sanitizer" in name and "memcheck" in name)


def figures(run):
    build(run)
    there = f"there {'is' if run.devices == 1 else 'are'} {run.devices}"
    if run.devices > 1:
        tests(run, has_nccl)
    else:
        run.tell(stage="tests of NCCL inside the nodes", status=f"left out: two GPUs are needed, {there}")
    sys.path.insert(0, str(ROOT / "benchmarks" / "gpu"))
    import gpu_rows

    left_out = [row.name for row in gpu_rows.ROWS if row.gpus > run.devices]
    if left_out:
        run.tell(stage="benchmarks", status=f"left out: {there} GPUs", rows=left_out)
    for kind in ("enqueue", "allreduce", "ddp", "fsdp2"):
        names = [row.name for row in gpu_rows.ROWS if row.name.startswith(kind) and row.gpus <= run.devices]
        if not names:
            continue
        folder = run.logs / f"benchmarks-{kind}"
        command = [PYTHON, "benchmarks/gpu/gpu_bench.py", "--quick", "--only", ",".join(names), "--output", folder]
        run.stage(f"benchmarks {kind}", 150, command)
        for path in sorted(folder.glob("*.json")):
            result = json.loads(path.read_text())
            run.tell(row=path.stem, **{key: result[key] for key in ("figures", "doubts", "failed") if key in result})


def devices_here(run):
    """How many GPUs torch sees. Says why where there is no driver."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        run.tell(stage="driver", status=f"no GPU: {error}")
        return 0
    counted = said([PYTHON, "-c", "import torch; print('devices', torch.cuda.device_count())"], 60, run.env)
    found = re.search(r"^devices (\d+)", counted, re.M)
    run.tell(stage="driver", status=counted.strip().splitlines()[-1] if found is None else f"{found.group(1)} devices")
    return int(found.group(1)) if found else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["knowledge", "truth", "figures", "deps"])
    parser.add_argument("--out", default=str(ROOT / "build" / "first-contact"))
    parser.add_argument("--limit-s", type=float, default=570)
    parser.add_argument("--only", default="")
    parser.add_argument("--cmake", default="")
    options = parser.parse_args()
    run = Run(options)
    if options.command == "deps":
        deps(run)
        return 1 if run.failed else 0

    def stop(*_):
        run.pack()
        os._exit(143)

    signal.signal(signal.SIGTERM, stop)
    run.devices = devices_here(run)
    {"knowledge": knowledge, "truth": truth, "figures": figures}[options.command](run)
    run.pack()
    run.tell(stage=options.command, status=f"{len(run.failed)} failed", failed=run.failed, out=str(run.out))
    return NO_DEVICE if run.devices == 0 else 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
