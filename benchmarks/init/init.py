"""How long a group takes to make: init_process_group alone, and with the first all_reduce, beside another backend.

    benchmarks/init/run [--ranks 2,16] [--nodes 1,2] [--rounds 15] [--against gloo] [--again] [--breakdown]

A round is two jobs, one of each backend, in an order that is drawn; what is printed is the median of each and the median
of the ratios of the rounds. The ranks of a job are forked from one process that has imported torch (not hybridps'
extension, nor UCX: loading them is a part of what is measured), wait until all are there, and start at once; a job's time
is from then to the moment when the last rank has what it waits for. The Store is a TCPStore in a process of its own, as
under torchrun. --again measures a group that a process makes after it has destroyed one. --nodes divides the ranks into
emulated nodes (HYBRIDPS_NODE; gloo knows no nodes). CPU: user and system time of all ranks, from the start to the end of
the all_reduce. --breakdown prints what hybridps says of it at the level debug, of one job.
"""

import argparse
import json
import os
import random
import resource
import signal
import statistics
import sys
import time
from datetime import timedelta

os.environ["WORLD_SIZE"] = "2"  # as in every process of a launcher, while torch is imported
import torch
import torch.distributed as dist


def cpu_s():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def rank(number, world, backend, node, port, gate, ready, out, again, log):
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(world), "LOCAL_RANK": str(number)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"HYBRIDPS_NODE": node, "HYBRIDPS_INTERFACE": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    if log:
        os.environ["HYBRIDPS_LOG_LEVEL"] = log
    torch.set_num_threads(1)
    connected = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=120))
    tensor = torch.ones(16)
    life = iter(range(100))

    def make():
        store = dist.PrefixStore(f"life{next(life)}", connected)
        start, cpu = time.monotonic(), cpu_s()
        dist.init_process_group(backend, store=store, rank=number, world_size=world, timeout=timedelta(seconds=120))
        made = time.monotonic()
        dist.all_reduce(tensor)
        return {"start": start, "made": made, "reduced": time.monotonic(), "cpu": cpu_s() - cpu}

    if again:
        make()
        dist.destroy_process_group()
    os.write(ready, b".")
    os.read(gate, 1)  # ends when the parent closes its side
    with os.fdopen(out, "w") as file:
        json.dump(make(), file)
    dist.destroy_process_group()


def job(world, backend, nodes, again=False, log=""):
    """Seconds until the group is made, until the first all_reduce is through, and of CPU."""
    store_ready, store_says = os.pipe()
    store = os.fork()
    if store == 0:
        hosted = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=120), wait_for_workers=False)
        os.write(store_says, str(hosted.port).encode())
        signal.pause()
    port = int(os.read(store_ready, 10))
    gate, opener = os.pipe()
    ready, says = os.pipe()
    ranks = []
    try:
        for number in range(world):
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    os.close(opener)
                    signal.alarm(150)
                    node = f"n{number * nodes // world}"
                    rank(number, world, backend, node, port, gate, says, write, again, log)
                    code = 0
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            os.close(write)
            ranks.append((child, read))
        os.close(says)
        waiting = 0
        while waiting < world:
            more = os.read(ready, world)
            if not more:
                sys.exit(f"a rank of {backend} did not start: see above")
            waiting += len(more)
        time.sleep(0.05)
        os.close(opener)
        opener = -1
        told = []
        for _, read in ranks:
            with os.fdopen(read) as file:
                told.append(file.read())
        if not all(told):
            sys.exit(f"a rank of {backend} failed: see above")
        found = [json.loads(text) for text in told]
    finally:
        if opener >= 0:
            os.close(opener)
        for child, _ in ranks:
            os.waitpid(child, 0)
        os.kill(store, signal.SIGKILL)
        os.waitpid(store, 0)
        for fd in (store_ready, store_says, gate, ready):
            os.close(fd)
    begin = min(one["start"] for one in found)
    return (
        max(one["made"] for one in found) - begin,
        max(one["reduced"] for one in found) - begin,
        sum(one["cpu"] for one in found),
    )


def measure(world, nodes, arguments):
    both = ["hybridps", arguments.against]
    for backend in both:
        job(world, backend, nodes, arguments.again)  # files come into memory
    times = {backend: [] for backend in both}
    for _ in range(arguments.rounds):
        for backend in random.sample(both, 2):
            times[backend].append(job(world, backend, nodes, arguments.again))
    ours, theirs = times.values()
    print(f"{world} ranks on {nodes} node{'s' if nodes > 1 else ''}, {'again' if arguments.again else 'first'} group:")
    for at, what in enumerate(("init_process_group", "and first all_reduce", "CPU of all ranks")):
        mine, other = (statistics.median(one[at] for one in side) for side in (ours, theirs))
        ratio = statistics.median(a[at] / b[at] for a, b in zip(ours, theirs, strict=True))
        low, high = (f(a[at] for a in ours) for f in (min, max))
        print(
            f"  {what:<21} hybridps {1000 * mine:7.1f} ms ({1000 * low:.1f} to {1000 * high:.1f})  "
            f"{arguments.against} {1000 * other:7.1f} ms  ratio {ratio:.2f}",
            flush=True,
        )


def main():
    def numbers(text):
        return [int(part) for part in text.split(",")]

    sys.dont_write_bytecode = False  # an installation has it
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=numbers, default=[2, 16], help="(2,16)")
    parser.add_argument("--nodes", type=numbers, default=[1, 2], help="emulated nodes (1,2)")
    parser.add_argument("--rounds", type=int, default=15, help="pairs of jobs (15)")
    parser.add_argument("--against", default="gloo", help="a backend of torch's (gloo)")
    parser.add_argument("--again", action="store_true", help="the second group of a process")
    parser.add_argument("--breakdown", action="store_true", help="one job of hybridps with its own words about it")
    arguments = parser.parse_args()
    for world in arguments.ranks:
        for nodes in arguments.nodes:
            if arguments.breakdown:
                took = job(world, "hybridps", nodes, arguments.again, "debug")
                print(f"{world} ranks on {nodes} nodes: {1000 * took[0]:.1f} ms, {1000 * took[1]:.1f} ms", flush=True)
            else:
                measure(world, nodes, arguments)


if __name__ == "__main__":
    main()
