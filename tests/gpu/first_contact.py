"""The first half hour on a GPU, as three commands of at most ten minutes each:

    tests/gpu/first-contact knowledge   inventory; what waits for the device (probes.py); contract suites; smoke
    tests/gpu/first-contact truth       tests/gpu, each test in a process of its own; compute-sanitizer last
    tests/gpu/first-contact figures     NCCL inside the nodes (with two GPUs or more), then benchmarks/gpu

    --out DIR      logs and results.jsonl (default build/first-contact)
    --limit-s N    the whole command's limit (default 570)
    --only PART    stages whose name contains PART

Builds the extension and the unit programs where it runs, if they are not there. Nothing stops at a failure. Each
process has a limit; when that is over its stacks are kept, then it is ended. One JSON line a result, on the output and
in results.jsonl. Without a GPU it goes as far as the first call of a device and says so: that is its rehearsal.
Exit status: 0 all passed, 1 something failed or hung, 77 there is no GPU.
"""

import argparse
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
os.chdir(ROOT)
PYTHON = next((p for p in (str(ROOT / ".venv/bin/python"),) if os.access(p, os.X_OK)), sys.executable)
PROBES = ["memory", "objects", "kernels", "torchs", "nccl", "copies", "queues", "latency", "costs"]
PROGRAMS = ["unit_device_cuda", "unit_intranode_nccl", "unit_staging_cuda"]


class Run:
    def __init__(self, options):
        self.end = time.monotonic() + options.limit_s
        self.begin = time.monotonic()
        self.only = options.only
        self.out = Path(options.out).resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.results = (self.out / "results.jsonl").open("a")
        self.lock = threading.Lock()
        self.failed = []
        self.env = os.environ | {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
        self.env["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # ranks are forked

    def tell(self, **result):
        with self.lock:
            line = json.dumps(result | {"at_s": round(time.monotonic() - self.begin, 1)})
            print(line, flush=True)
            print(line, file=self.results, flush=True)

    def stage(self, name, limit_s, command, env=None, ok=(0,)):
        """Runs a command. Its own JSON lines become results; then one says how it ended."""
        if self.only not in name:
            return None
        limit_s = min(limit_s, self.end - time.monotonic())
        if limit_s < 3:
            self.tell(stage=name, status="left out: no time")
            return None
        log = self.out / f"{''.join(c if c.isalnum() or c in '-_.' else '_' for c in name)[:80]}.log"
        begin = time.monotonic()
        status = None
        try:
            with log.open("wb") as output:
                process = subprocess.Popen(
                    list(map(str, command)), env=self.env | (env or {}), stdin=subprocess.DEVNULL, stdout=output,
                    stderr=subprocess.STDOUT, start_new_session=True)
                try:
                    status = process.wait(limit_s)
                except subprocess.TimeoutExpired:
                    (self.out / (log.stem + ".stacks")).write_text(stacks_of(process.pid))
                    end_session(process)
        except OSError as error:
            log.write_text(str(error))
            status = 127
        text = log.read_text(errors="replace")
        for line in text.splitlines():
            if line.startswith('{"probe"'):
                try:
                    self.tell(**json.loads(line))
                except ValueError:
                    pass
        how = "hung" if status is None else "passed" if status in ok else f"exit status {status}"
        result = {"stage": name, "status": how, "s": round(time.monotonic() - begin, 1)}
        if how == "passed":
            why = [line.strip() for line in text.splitlines() if line.startswith("SKIPPED ") or "  skipped: " in line]
            result |= {"status": "skipped", "why": why[0]} if why else {}
        else:
            result |= {"log": log.name, "last": text.strip().splitlines()[-3:]}
            with self.lock:
                self.failed.append(name)
        self.tell(**result)
        return status


def processes_of(session):
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == session:
                found.append(int(entry.name))
    return found


def stacks_of(session):
    """Of all processes of a stage, by what there is: cuda-gdb or gdb, py-spy, the kernel's view of the threads."""
    texts = []
    debugger = shutil.which("cuda-gdb") or shutil.which("gdb")
    for pid in processes_of(session)[:8]:
        texts.append(f"== process {pid}")
        if debugger:
            texts.append(said([debugger, "-p", pid, "-batch", "-ex", "thread apply all bt 20"]))
        if shutil.which("py-spy"):
            texts.append(said(["py-spy", "dump", "--pid", pid]))
        for thread in sorted(Path(f"/proc/{pid}/task").glob("*")):
            try:
                texts.append(f"{thread.name} {(thread / 'comm').read_text().strip()} {(thread / 'wchan').read_text()}")
            except OSError:
                pass
    return "\n".join(texts) + "\n"


def said(command):
    try:
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=20)
        return done.stdout + done.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)


def end_session(process):
    """Python writes its threads' stacks to the log at SIGABRT (faulthandler). Then all of the session ends."""
    for ends in (signal.SIGABRT, signal.SIGKILL):
        for pid in processes_of(process.pid):
            try:
                os.kill(pid, ends)
            except ProcessLookupError:
                pass
        time.sleep(0.5)
    process.wait()


def has_extension(run):
    command = [PYTHON, "-c", "from hybridps.backend import load; load.load_extension()"]
    return subprocess.run(command, env=run.env, capture_output=True).returncode == 0


def build(run):
    """The extension and the unit programs, of this tree. True: the extension can be loaded."""
    jobs = str(max(1, (os.cpu_count() or 4) - 2))
    if has_extension(run):
        run.tell(stage="extension", status="passed", note="it was there")
        targets = PROGRAMS
    else:
        targets = ["_C", *PROGRAMS]
    configure = ["cmake", "--preset", "release", f"-DPython_EXECUTABLE={PYTHON}", "-DHYBRIDPS_BUILD_PYTHON=AUTO"]
    if run.stage("configure", 120, configure) == 0:
        for target in targets:
            command = ["cmake", "--build", "--preset", "release", "-j", jobs, "--target", target]
            run.stage(f"build {target}", 480, command)
    if "_C" in targets:
        package = run.out / "package" / "hybridps"
        shutil.copytree("python/hybridps", package, dirs_exist_ok=True)
        for found in [*Path("build/release/python/hybridps").glob("_C*.so"),
                      *Path("build/release/generated/python").glob("_build_info.py")]:
            shutil.copy(found, package)
        before = run.env.get("PYTHONPATH")
        run.env["PYTHONPATH"] = str(package.parent) + (os.pathsep + before if before else "")
        run.tell(stage="extension", status="passed" if has_extension(run) else "cannot be loaded")


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


def cases_of(program):
    """Names of a unit program's test cases."""
    listed = said([program, "--list-test-names-only"])
    return [line.strip() for line in listed.splitlines() if line.strip() and "matching" not in line]


def knowledge(run):
    inventory(run)
    building = threading.Thread(target=build, args=(run,))
    building.start()
    for connections in ("8", "1", "32"):
        for probe in PROBES:
            run.stage(f"probe {probe} {connections}", 30, [PYTHON, "tests/gpu/probes.py", probe],
                      {"CUDA_DEVICE_MAX_CONNECTIONS": connections})
    blocking = {"CUDA_LAUNCH_BLOCKING": "1"}
    run.stage("probe kernels launch-blocking", 30, [PYTHON, "tests/gpu/probes.py", "kernels"], blocking)
    building.join()
    for program in PROGRAMS[:2]:
        path = Path("build/release/tests") / program
        for case in cases_of(path) if path.exists() else []:
            exact = case.replace(",", "\\,").replace("[", "\\[")
            run.stage(f"{program} {case}", 20, [path, exact])
    run.stage("unit_staging_cuda", 120, ["build/release/tests/unit_staging_cuda", "~[.long]"])
    run.stage("doctor", 60, [PYTHON, "-m", "hybridps", "doctor"])
    for name in ("test_every_collective[1+1]", "test_stream_order[1+1]", "test_the_host_does_not_wait"):
        test(run, f"tests/gpu/test_gpu.py::{name}", 60)


def test(run, name, limit_s):
    run.stage(name.partition("::")[2], limit_s, [PYTHON, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", name])


def tests(run, wanted):
    listed = said([PYTHON, "-m", "pytest", "-q", "--collect-only", "tests/gpu"])
    names = [line for line in listed.splitlines() if "::" in line and wanted(line)]
    if not names:
        run.tell(stage="collecting tests", status="found none", last=listed.splitlines()[-3:])
    for name in names:
        test(run, name, 400 if "sanitizer" in name else 40)


def has_nccl(name):
    return any(part in name for part in ("nccl", "same_node", "connected_before"))


def truth(run):
    build(run)
    tests(run, lambda name: not has_nccl(name) and "sanitizer" not in name and "cpu" not in name)
    tests(run, lambda name: "sanitizer" in name and "memcheck" in name)


def figures(run):
    build(run)
    tests(run, has_nccl)
    for rows in ("enqueue*", "allreduce*", "ddp*", "fsdp2*"):
        command = [PYTHON, "benchmarks/gpu/gpu_bench.py", "--quick", "--only", rows]
        run.stage(f"benchmarks {rows}", 150, [*command, "--output", run.out / "benchmarks"], ok=(0, 77))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["knowledge", "truth", "figures"])
    parser.add_argument("--out", default="build/first-contact")
    parser.add_argument("--limit-s", type=float, default=570)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    run = Run(options)
    try:
        ctypes.CDLL("libcuda.so.1")
        gpu = True
    except OSError as error:
        gpu = False
        run.tell(stage="driver", status=f"no GPU: {error}")
    {"knowledge": knowledge, "truth": truth, "figures": figures}[options.command](run)
    run.tell(stage=options.command, status=f"{len(run.failed)} failed", failed=run.failed, out=str(run.out))
    return 77 if not gpu else 1 if run.failed else 0


if __name__ == "__main__":
    sys.exit(main())
