"""MPI as a peer: MPICH's MPI_Allreduce on the lab's hosts, over TCP, from an environment that is no part of the project's.

Hydra starts a process on each host by a script in the place of ssh, which enters the host's namespaces. Hosts have names,
/dev/shm and networks of their own, so MPICH takes them for machines; the bytes that their interfaces count show that.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import hosts
from hybridps.tools.bench.figures import SMALL_BYTES, summarise

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parents[1] / "build" / "mpi"
PYTHON = FOLDER / "bin" / "python"
PACKAGES = ("mpich==5.0.2", "mpi4py==4.1.2", "numpy")
BLOCK_MAX = 50
MARK = "RESULT "


def make() -> str:
    for command in ([sys.executable, "-m", "venv", str(FOLDER)], [str(PYTHON), "-m", "pip", "install", "-q", *PACKAGES]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise hosts.Failed(f"{shlex.join(command)}: {(done.stderr or done.stdout).strip()}")
    return f"{FOLDER} has {', '.join(PACKAGES)}"


def why_not(python: Path) -> str:
    if not python.is_file() or not (python.parent / "mpiexec.hydra").is_file():
        return f"no MPICH at {python.parent.name}/{python.name}: --make-mpi makes one"
    done = subprocess.run([python, "-c", "import mpi4py.MPI, numpy"], capture_output=True, text=True)
    return "" if done.returncode == 0 else f"mpi4py: {(done.stderr.strip().splitlines() or ['it ended'])[-1]}"


def launcher(network: hosts.Hosts, names: list[str]) -> str:
    """What Hydra calls as ssh: options, host, and a command for the host's shell. What it starts dies with Hydra, however that
    ends: by then the network may be gone that would tell it."""
    enter = {name: shlex.join(["setpriv", "--pdeathsig", "KILL", *network.command(name, [])]) for name in names}
    cases = "".join(f"  {name}) set -- {enter[name]} sh -c \"exec $*\" ;;\n" for name in names)
    return f'#!/bin/sh\nwhile [ "${{1#-}}" != "$1" ]; do shift; done\nhost=$1\nshift\ncase $host in\n{cases}  *) exit 1 ;;\nesac\nexec "$@"\n'


def figures(found: dict, size: int, block: int) -> dict:
    """Of one row, from what rank 0 has gathered."""
    ranks = len(found["times"])
    return {
        **summarise(found["times"], block),
        "library": found["library"],
        "wrong": found["wrong"],
        "sent": sum(found["sent"]) / ranks,  # bytes of a host and operation, headers included
        "sent_least": 2 * (ranks - 1) / ranks * size,
        "cpu_seconds": sum(found["cpu_seconds"]),
    }


def measure(network: hosts.Hosts, names: list[str], options, jobs: list[dict]) -> dict[str, dict]:
    """{row: {"mpi": figures}}"""
    for job in jobs:
        job["block"] = 1 if job["bytes"] > SMALL_BYTES else min(BLOCK_MAX, job["iterations"])
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "enter"
        script.write_text(launcher(network, names))
        script.chmod(0o755)
        command = [str(options.mpi.parent / "mpiexec.hydra"), "-launcher", "ssh", "-launcher-exec", str(script)]
        command += ["-iface", hosts.INTERFACE, "-hosts", ",".join(names), "-ppn", "1", "-n", str(len(names))]
        command += [str(options.mpi), str(HERE / "mpi_worker.py"), json.dumps(jobs)]
        environment = os.environ | {"FI_PROVIDER": "tcp", "FI_TCP_IFACE": hosts.INTERFACE, "OMP_NUM_THREADS": "1"}
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = network.popen(names[0], command, env=environment, **pipes)
        try:
            text, _ = process.communicate(timeout=options.limit_s)
        except subprocess.TimeoutExpired as error:
            raise hosts.Failed(f"MPI: not done after {options.limit_s} s") from error
        finally:
            if process.poll() is None:
                process.terminate()  # Hydra then ends the ranks
                process.wait(10)
    results = [json.loads(line[len(MARK) :]) for line in text.splitlines() if line.startswith(MARK)]
    if len(results) != len(jobs):
        raise hosts.Failed(f"MPI ended without all results:\n{text[-2000:]}")
    return {job["name"]: {"mpi": figures(r, job["bytes"], job["block"])} for job, r in zip(jobs, results, strict=True)}
