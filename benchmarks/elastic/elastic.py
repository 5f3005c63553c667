"""Kill -9 of one of four ranks in an all_reduce: how long until the other three have the right sum, and until four have it again.

For each backend in turn: four processes of this machine (a node each), a group made with enable_reconfigure. One is killed at a
random moment of an all_reduce of --mib; the others get the exception, reconfigure() to three and reduce again; then a new process
joins. Handles go through pipes, so all time is the backend's, and torch's: at the first failure of a process its flight recorder looks
up the symbols of its stack traces, seconds of CPU time a rank (--fresh: at each; TORCH_INCLUDE_STACK_TRACE=0 spares it). Times are from
the kill (from the call, for growing) to the last rank's result. gloo finds a death only at its neighbours, the others wait for the timeout: --timeout is what it is given.

Columns: kill -> exception on all, kill -> right result of three, growing back to four; median and worst. Then what each of the
ranks that stay has of threads, descriptors and memory, after the first cycles and at the end.
"""

import argparse
import json
import multiprocessing
import os
import random
import signal
import statistics
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def rank_main(backend, rank, path, mib, timeout, abort, pipe):
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        world_size=4,
        rank=rank,
        store=dist.FileStore(path, -1),
        timeout=timedelta(seconds=timeout),
        enable_reconfigure=True,
    )
    pipe.send("here")
    tensor = torch.empty(mib * (1 << 20) // 4)
    while True:
        what, *arguments = pipe.recv()
        if what == "handle":
            pipe.send(dist._get_reconfigure_handle())
        elif what == "reconfigure":
            dist._reconfigure(*arguments, timeout=timedelta(seconds=60)).wait()
            pipe.send((dist.get_rank(), dist.get_world_size()))
        elif what == "until it fails":
            pipe.send("begun")
            try:
                while True:
                    dist.all_reduce(tensor.fill_(1.0))
            except RuntimeError as error:
                failed = time.monotonic()
                if abort:
                    dist.distributed_c10d._get_default_group().abort()
                pipe.send((failed, str(error).splitlines()[0][:200]))
        elif what == "once":
            dist.all_reduce(tensor.fill_(dist.get_rank() + 1.0))
            at = time.monotonic()
            pipe.send((at, tensor.min().item(), tensor.max().item()))
        elif what == "what it has":
            with open("/proc/self/statm") as file:
                pages = int(file.read().split()[1])
            pipe.send((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), pages * 4096 >> 20))
        else:
            dist.destroy_process_group()
            return


class Job:
    def __init__(self, backend, mib, timeout, abort):
        self.backend, self.mib, self.timeout, self.abort = backend, mib, timeout, abort
        self.path = os.path.join(tempfile.mkdtemp(prefix="hybridps-elastic-"), "store")
        self.context = multiprocessing.get_context("fork")  # of a process that has imported torch: a newcomer is there at once
        self.names = 0
        self.ranks = {}
        self.uuid = 0
        for rank in range(4):
            self.add(rank)
        for entry in self.ranks.values():
            entry["pipe"].recv()

    def add(self, rank):
        ours, theirs = self.context.Pipe()
        process = self.context.Process(
            target=rank_main,
            args=(self.backend, rank, self.path, self.mib, self.timeout, self.abort, theirs),
            daemon=True,
        )
        os.environ["HYBRIDPS_NODE"] = f"elastic{rank}"
        process.start()
        theirs.close()
        self.ranks[self.names] = {"process": process, "pipe": ours}
        self.names += 1
        return self.ranks[self.names - 1]

    def all(self, *command):
        for entry in self.ranks.values():
            entry["pipe"].send(command)
        answers = []
        for entry in self.ranks.values():
            if not entry["pipe"].poll(120):
                raise SystemExit(f"{self.backend}: a rank has not answered {command[0]} for 120 s")
            answers.append(entry["pipe"].recv())
        return answers

    def reconfigure(self):
        self.uuid += 1
        # gloo's handles are new each time, ours stay.
        return self.all("reconfigure", self.uuid, self.all("handle"))

    def right_sum(self):
        answers = self.all("once")
        want = len(self.ranks) * (len(self.ranks) + 1) / 2
        if any(answer[1:] != (want, want) for answer in answers):
            raise SystemExit(f"{self.backend}: a wrong sum: {answers}, expected {want}")
        return max(answer[0] for answer in answers)

    def end(self):
        for entry in self.ranks.values():
            entry["pipe"].send(("end",))
        for entry in self.ranks.values():
            entry["process"].join(30)
            if entry["process"].is_alive():
                entry["process"].kill()


def started(*of_job):
    job = Job(*of_job)
    job.reconfigure()
    job.right_sum()
    return job


def measure(cycles, fresh, *of_job):
    backend, mib = of_job[:2]
    job = started(*of_job)
    errors, results, grown, had = [], [], [], []
    text = ""
    for cycle in range(cycles):
        if fresh and cycle > 0:
            job.end()
            job = started(*of_job)
        victim = job.ranks[max(job.ranks)]
        for entry in job.ranks.values():
            entry["pipe"].send(("until it fails",))
        for entry in job.ranks.values():
            entry["pipe"].recv()
        time.sleep(0.1 + 0.3 * random.random())
        del job.ranks[max(job.ranks)]
        killed = time.monotonic()
        os.kill(victim["process"].pid, signal.SIGKILL)
        failures = [entry["pipe"].recv() for entry in job.ranks.values()]
        errors.append(max(at for at, _ in failures) - killed)
        text = text or failures[0][1]
        job.reconfigure()
        results.append(job.right_sum() - killed)
        victim["process"].join()
        entry = job.add(3)
        entry["pipe"].recv()
        begun = time.monotonic()
        job.reconfigure()
        grown.append(job.right_sum() - begun)
        if cycle in (min(4, cycles - 1), cycles - 1):
            had.append(job.all("what it has")[:3])
    job.end()
    return {"backend": backend, "cycles": cycles, "mib": mib, "error": errors, "result": results, "grown": grown, "had": had, "text": text}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--timeout", type=float, default=20.0, help="of the group, seconds: for gloo it is how long a cycle takes")
    parser.add_argument("--abort", action="store_true", help="who stays calls abort() of the group before reconfigure()")
    parser.add_argument("--fresh", action="store_true", help="new processes for each cycle")
    parser.add_argument("--against", default="gloo", help="backend beside hybridps, or nothing")
    parser.add_argument("--against-cycles", type=int, default=3)
    parser.add_argument("--json", help="file for all figures")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = [measure(args.cycles, args.fresh, "hybridps", args.mib, args.timeout, args.abort)]
    if args.against:
        rows.append(measure(args.against_cycles, args.fresh, args.against, args.mib, args.timeout, args.abort))
    print(f"all_reduce of {args.mib} MiB, 4 ranks, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print("| backend | cycles | kill to exception, s | kill to right result of 3, s | growing back, s |\n|---|---|---|---|---|")
    for row in rows:
        cells = [f"{statistics.median(row[key]):.3f} (worst {max(row[key]):.3f})" for key in ("error", "result", "grown")]
        print(f"| {row['backend']} | {row['cycles']} | {' | '.join(cells)} |")
    for row in rows:
        print(f"{row['backend']}: threads, descriptors, MiB of the ranks that stay: {row['had'][0]} then {row['had'][-1]}")
        print(f"  {row['text']}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
