"""One rank of benchmarks/cost: worker.py '{"backend": "hybridps", "bytes": 67108864, "iterations": 8, ...}'; each rank
prints a line with what it measured. Backend "sockets": the same bytes through plain TCP sockets, the floor."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from plain_sockets import Sockets  # noqa: E402

MARK = "RESULT "


class Collective:
    def __init__(self, backend: str, size: int):
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group(backend)
        self.dist, self.torch = dist, torch
        # Small, since each sum is added up again. The mantissas are random.
        self.fresh = torch.randn(size // 4, generator=torch.Generator().manual_seed(dist.get_rank())) * 1e-30
        self.tensor = self.fresh.clone()

    def once(self):
        self.dist.all_reduce(self.tensor)

    def align(self):
        self.tensor.copy_(self.fresh)
        self.dist.barrier()

    def check(self) -> bool:
        ones = self.torch.ones_like(self.fresh)
        self.dist.all_reduce(ones)
        return bool((ones == self.dist.get_world_size()).all())


def sum_seconds(size: int, world: int) -> float:
    """CPU time of summing what a rank sums in one operation: world - 1 contributions to 1/world of the tensor."""
    import torch

    own, theirs = torch.ones(size // 4 // world), [torch.ones(size // 4 // world) for _ in range(world - 1)]
    times = []
    for _ in range(5):
        begin = time.process_time()
        for other in theirs:
            own.add_(other)
        times.append(time.process_time() - begin)
    return sorted(times)[len(times) // 2]


def packets() -> int:
    """Sent and received by this host so far, as its interfaces hand them over: up to 64 KiB each."""
    count = 0
    with open("/proc/net/dev") as table:
        for line in table.readlines()[2:]:
            fields = line.split(":")[1].split()
            count += int(fields[1]) + int(fields[9])
    return count


class Perf:
    """perf on this process, while it is entered; where there is none, or it may not, nothing is measured."""

    def __init__(self, *arguments: str):
        self.arguments, self.program, self.output = arguments, shutil.which("perf"), ""

    def __enter__(self):
        if self.program:
            self.process = subprocess.Popen(
                [self.program, *self.arguments, "-p", str(os.getpid())],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            time.sleep(0.5)
        return self

    def __exit__(self, *_):
        if self.program:
            self.process.send_signal(signal.SIGINT)
            self.output = self.process.communicate()[1]


def main() -> None:
    job = json.loads(sys.argv[1])
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    size, iterations = job["bytes"], job["iterations"]
    if job["backend"] == "sockets":
        runner = Sockets(size, rank, world, job["addresses"])
    else:
        runner = Collective(job["backend"], size)
    right = runner.check()
    for _ in range(job["warm_up"]):
        runner.once()
    runner.align()
    packets_before = packets()
    before, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for _ in range(iterations):
        runner.once()
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
    result = {
        "rank": rank,
        "right": right,
        "seconds": seconds / iterations,
        "user_seconds": (after.ru_utime - before.ru_utime) / iterations,
        "system_seconds": (after.ru_stime - before.ru_stime) / iterations,
        "switches": (after.ru_nvcsw - before.ru_nvcsw) / iterations,
        "preemptions": (after.ru_nivcsw - before.ru_nivcsw) / iterations,
        "packets": (packets() - packets_before) / iterations,
    }
    # What looking costs must not be in the figures above: further operations, of which only rank 0 is looked at.
    runner.align()
    calls = Perf("stat", "-x", ",", "-e", "raw_syscalls:sys_enter")
    samples = Perf("record", "-q", "-F", "4000", "-o", job["samples"])
    for perf in (calls, samples):
        if rank == 0:
            with perf:
                runner.align()
                for _ in range(iterations):
                    runner.once()
                runner.align()
        else:
            runner.align()
            for _ in range(iterations):
                runner.once()
            runner.align()
    if counted := re.search(r"^(\d+),", calls.output, re.MULTILINE):
        result["system_calls"] = int(counted[1]) / iterations
    if rank == 0 and world > 1:
        result["sum_seconds"] = sum_seconds(size, world)
    runner.align()
    print(MARK + json.dumps(result), flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
