"""Two builds of hybridps, timed against each other on this machine: all_reduce of small tensors, block by block in turn.

    python3 benchmarks/paired.py [--nodes A,B] [--bytes 64,65536] [--launches 6] [--rounds 60] PYTHON PYTHON

Each PYTHON is an interpreter of an environment that has a build. Ranks of both run at the same time; those of one are
asleep while the other's time a block, and which of them comes first is drawn for every pair of blocks. So both see the
same noise. The printed figure is the median, over pairs of blocks, of second / first - 1; each launch has an offset of
its own (memory layout), of 1 % or less for a build against itself: look at several.
"""

import argparse
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
    tensors = {}
    print("ready", flush=True)
    for line in sys.stdin:
        size, count = map(int, line.split())
        tensor = tensors.setdefault(size, torch.ones(max(1, size // 4)))
        tensor.fill_(1)
        for _ in range(max(3, count // 10)):
            dist.all_reduce(tensor)
        tensor.fill_(1)
        times = []
        for _ in range(count):
            start = time.perf_counter()
            dist.all_reduce(tensor)
            times.append(time.perf_counter() - start)
        print(statistics.median(times), flush=True)
    dist.destroy_process_group()


def start(python, nodes, port):
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(len(nodes))}
    common |= {"LOCAL_WORLD_SIZE": str(len(nodes)), "HYBRIDPS_INTERFACE": "lo", "OMP_NUM_THREADS": "1"}
    ranks = []
    for number, node in enumerate(nodes):
        own = {"RANK": str(number), "LOCAL_RANK": str(number), "HYBRIDPS_NODE": node}
        ranks.append(
            subprocess.Popen(
                [python, os.path.abspath(__file__), "--rank"],
                env=os.environ | common | own,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
        )
    return ranks


def block(ranks, size, count):
    for one in ranks:
        one.stdin.write(f"{size} {count}\n")
    return float([one.stdout.readline() for one in ranks][0])


def launch(arguments, port):
    builds = [start(python, arguments.nodes, port + i) for i, python in enumerate(arguments.pythons)]
    for ranks in builds:
        for one in ranks:
            if one.stdout.readline().strip() != "ready":
                sys.exit("a rank did not start: see above")
    found = {}
    for size in arguments.bytes:
        count = max(10, min(300, 30_000_000 // max(size, 1)))
        logs, first = [], []
        for _ in range(arguments.rounds):
            times = [0.0, 0.0]
            for i in random.sample([0, 1], 2):
                times[i] = block(builds[i], size, count)
            logs.append(math.log(times[1] / times[0]))
            first.append(times[0])
        found[size] = (statistics.median(first), math.exp(statistics.median(logs)) - 1)
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
    parser.add_argument("--bytes", type=numbers, default=[64, 65536], help="sizes (64,65536)")
    parser.add_argument("--launches", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=60, help="pairs of blocks of each launch (60)")
    arguments = parser.parse_args()
    port = random.randrange(20000, 30000)
    results = [launch(arguments, port + 2 * i) for i in range(arguments.launches)]
    for size in arguments.bytes:
        changes = [100 * result[size][1] for result in results]
        micros = 1e6 * statistics.median(result[size][0] for result in results)
        each = " ".join(f"{change:+.1f}" for change in changes)
        print(f"{size:>9} B  first {micros:9.1f} us  second {statistics.median(changes):+.1f} %  ({each})")


if __name__ == "__main__":
    if sys.argv[1:] == ["--rank"]:
        rank()
    else:
        main()
