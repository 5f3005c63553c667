"""Two builds of hybridps, timed against each other on this machine, block by block in turn.

    python3 benchmarks/paired.py [--nodes A,B] [--what all_reduce,all_gather] [--bytes 64,65536] [--launches 6] [--rounds 60] [--second NAME=VALUE] PYTHON PYTHON

PYTHON may be the same twice, with `--second` settings for the second alone. Operations above 64 KiB begin with Gaussian values each
time. `bytes` are those of the whole: what an all_gather gives, a reduce_scatter takes.

Each PYTHON is an interpreter of an environment that has a build. Ranks of both run at the same time; those of one are
asleep while the other's time a block, and which of them comes first is drawn for every pair of blocks. So both see the
same noise. The printed figure is the median, over pairs of blocks, of second / first - 1; each launch has an offset of
its own (memory layout), of 1 % or less for a build against itself: look at several.
"""

import argparse
import itertools
import math
import os
import random
import statistics
import subprocess
import sys
import time


def rank():
    import torch
    import torch.distributed as dist

    dist.init_process_group("hybridps")
    world = dist.get_world_size()
    calls = {
        "all_reduce": lambda whole, part, other: dist.all_reduce(whole),
        "all_gather": lambda whole, part, other: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda whole, part, other: dist.reduce_scatter_tensor(part, whole),
        "broadcast": lambda whole, part, other: dist.broadcast(whole, 0),
        "all_to_all": lambda whole, part, other: dist.all_to_all_single(other, whole),
    }
    tensors = {}
    print("ready", flush=True)
    for line in sys.stdin:
        what, *numbers = line.split()
        size, count = map(int, numbers)
        if size not in tensors:
            elements = max(1, size // 4 // world) * world
            values = [torch.randn(n) if size > 65536 else torch.ones(n) for n in (elements, elements // world)]
            tensors[size] = [*values, torch.ones(elements), values[0].clone()]
        whole, part, other, fresh = tensors[size]
        call = calls[what]
        whole.copy_(fresh)
        for _ in range(max(3, count // 10)):
            call(whole, part, other)
        whole.copy_(fresh)
        times = []
        for _ in range(count):
            if size > 65536:
                whole.copy_(fresh)  # sums of sums grow
                dist.barrier()
            start = time.perf_counter()
            call(whole, part, other)
            times.append(time.perf_counter() - start)
        print(statistics.median(times), flush=True)
    dist.destroy_process_group()


def start(python, nodes, port, more):
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(nodes))}
    common |= {"LOCAL_WORLD_SIZE": str(len(nodes)), "HYBRIDPS_INTERFACE": "lo", "OMP_NUM_THREADS": "1"}
    ranks = []
    for number, node in enumerate(nodes):
        own = {"RANK": str(number), "LOCAL_RANK": str(number), "HYBRIDPS_NODE": node}
        ranks.append(
            subprocess.Popen(
                [python, os.path.abspath(__file__), "--rank"],
                env=os.environ | common | own | more,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
        )
    return ranks


def block(ranks, what, size, count):
    for one in ranks:
        one.stdin.write(f"{what} {size} {count}\n")
    return float([one.stdout.readline() for one in ranks][0])


def launch(arguments, port):
    more = [{}, dict(pair.split("=", 1) for pair in arguments.second)]
    builds = [start(python, arguments.nodes, port + i, more[i]) for i, python in enumerate(arguments.pythons)]
    for ranks in builds:
        for one in ranks:
            if one.stdout.readline().strip() != "ready":
                sys.exit("a rank did not start: see above")
    found = {}
    for what, size in itertools.product(arguments.what, arguments.bytes):
        count = max(10, min(300, 30_000_000 // max(size, 1)))
        logs, first = [], []
        for _ in range(arguments.rounds):
            times = [0.0, 0.0]
            for i in random.sample([0, 1], 2):
                times[i] = block(builds[i], what, size, count)
            logs.append(math.log(times[1] / times[0]))
            first.append(times[0])
        found[what, size] = (statistics.median(first), math.exp(statistics.median(logs)) - 1)
    for ranks in builds:
        for one in ranks:
            one.stdin.close()
        for one in ranks:
            one.wait()
    return found


def main():
    def numbers(text):
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs=2, metavar="PYTHON")
    parser.add_argument("--nodes", type=lambda text: text.split(","), default=["A", "A"], help="of each rank (A,A)")
    parser.add_argument("--what", type=lambda text: text.split(","), default=["all_reduce"], help="(all_reduce)")
    parser.add_argument("--bytes", type=numbers, default=[64, 65536], help="sizes (64,65536)")
    parser.add_argument("--second", action="append", default=[], metavar="NAME=VALUE", help="setting of the second")
    parser.add_argument("--launches", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=60, help="pairs of blocks of each launch (60)")
    arguments = parser.parse_args()
    port = random.randrange(20000, 30000)
    results = [launch(arguments, port + 2 * i) for i in range(arguments.launches)]
    for what, size in itertools.product(arguments.what, arguments.bytes):
        changes = [100 * result[what, size][1] for result in results]
        micros = 1e6 * statistics.median(result[what, size][0] for result in results)
        each = " ".join(f"{change:+.1f}" for change in changes)
        print(f"{what:>14} {size:>9} B  first {micros:9.1f} us  second {statistics.median(changes):+.1f} %  ({each})")


if __name__ == "__main__":
    if sys.argv[1:] == ["--rank"]:
        rank()
    else:
        main()
