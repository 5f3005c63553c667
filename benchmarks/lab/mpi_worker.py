"""One MPI rank of the lab, in the environment of mpich.py: mpi_worker.py '[{"name": "mpi-64B", "bytes": 64, ...}]'; rank 0 prints
a line for each job, with the times of all ranks. It imports nothing of hybridps."""

import json
import sys
import time
from pathlib import Path

import numpy
from mpi4py import MPI

sys.path[:0] = [str(Path(__file__).resolve().parents[2] / "scripts")]

from hosts import die_with_parent  # noqa: E402

MARK = "RESULT "
LEAD = 5  # operations in front of each block that are not counted, as in the bench's own blocks


def sent() -> int:
    with open("/sys/class/net/net0/statistics/tx_bytes") as file:
        return int(file.read())


def run(job: dict, world) -> dict:
    mine = numpy.full(job["bytes"] // 4, world.rank + 1, numpy.float32)
    total = numpy.empty_like(mine)
    for _ in range(job.get("warmup", 3)):
        world.Allreduce(mine, total, MPI.SUM)
    lead = LEAD if job["block"] > 1 else 0
    blocks = max(1, round(job["iterations"] / job["block"]))
    times, cpu_s = [], 0.0
    world.Barrier()
    before = sent()
    world.Barrier()
    for _ in range(blocks):
        world.Barrier()
        cpu, start = time.process_time(), time.perf_counter()
        for index in range(lead + job["block"]):
            world.Allreduce(mine, total, MPI.SUM)
            end = time.perf_counter()
            if index >= lead:
                times.append(end - start)
            start = end
        cpu_s += time.process_time() - cpu
    world.Barrier()
    calls = blocks * (lead + job["block"])
    wrong = int((total != world.size * (world.size + 1) // 2).sum())
    everyones = world.gather((times, wrong, (sent() - before) / calls, cpu_s / calls))
    if world.rank > 0:
        return {}
    times, wrong, moved, cpu_s = zip(*everyones, strict=True)
    version = MPI.Get_library_version().split()
    return {"times": times, "wrong": sum(wrong), "sent": moved, "cpu_seconds": cpu_s, "library": f"{version[0]} {version[2]}"}


def main() -> None:
    die_with_parent()
    for job in json.loads(sys.argv[1]):
        result = run(job, MPI.COMM_WORLD)
        if MPI.COMM_WORLD.rank == 0:
            print(MARK + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
