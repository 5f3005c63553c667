"""What a trace costs: the CPU time of a rank per all-reduce, with a trace and without, block by block in one job.

    benchmarks/trace/run [--bytes 4096,1048576] [--nodes A,B] [--pairs 20] [--switch]

Two ranks (or as many as --nodes names nodes; those of one node share memory) make all-reduces one after the other, over
loopback. Before each block rank 0 draws whether it is traced, so that both kinds see the same noise; a block's figure is the
CPU time of a rank's process (all threads, the one that writes the file included) per operation. Printed: the medians, the
median of the ratios of neighbouring blocks, and the events per operation. --switch: nothing is traced at all, blocks are
only called "on" and "off": what the noise is.
"""

import argparse
import os
import random
import resource
import statistics
import sys
import tempfile
from pathlib import Path

from hybridps.tools import status


def cpu_us():
    used = resource.getrusage(resource.RUSAGE_SELF)
    return 1e6 * (used.ru_utime + used.ru_stime)


def rank(number, arguments, place, port):
    world = len(arguments.nodes)
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(world), "LOCAL_RANK": str(number), "OMP_NUM_THREADS": "1"}
    os.environ |= {"LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"HYBRIDPS_NODE": arguments.nodes[number], "HYBRIDPS_INTERFACE": "lo", "HYBRIDPS_STATUS": str(place / f"s{number}")}
    import torch
    import torch.distributed as dist

    dist.init_process_group("hybridps")
    (own,) = (place / f"s{number}").glob("*.sock")
    for size in arguments.bytes:
        trace = place / f"trace{size}"
        tensor = torch.ones(max(1, size // 4))
        count = max(50, min(2000, 400_000_000 // (size + 65536)))
        found = {True: [], False: []}
        for _ in range(arguments.pairs):
            order = torch.tensor([float(random.random() < 0.5)])
            dist.broadcast(order, 0)
            for is_on in (bool(order.item()), not order.item()):
                if is_on and not arguments.switch:
                    error = status.ask(own, f"trace start {trace}", 10).get("error")
                    assert not error, error
                tensor.fill_(1)
                for _ in range(10):
                    dist.all_reduce(tensor)
                tensor.fill_(1)
                dist.barrier()
                began = cpu_us()
                for _ in range(count):
                    dist.all_reduce(tensor)
                found[is_on].append((cpu_us() - began) / count)
                if is_on and not arguments.switch:
                    status.ask(own, "trace stop", 10)
        if number == 0:
            on, off = (statistics.median(found[kind]) for kind in (True, False))
            ratio = statistics.median(a / b for a, b in zip(found[True], found[False], strict=True))
            files = [path.stat().st_size for path in trace.glob("rank0-*")]  # one for each block that was traced
            events = f", {statistics.median(files) / 48 / (count + 11):.0f} events" if files else ""
            print(f"{size:>9} B  off {off:7.1f} us  on {on:7.1f} us  {100 * (ratio - 1):+.1f} %{events}", flush=True)
    dist.destroy_process_group()


def main():
    def numbers(text):
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=numbers, default=[4096, 1 << 20], help="sizes (4096,1048576)")
    parser.add_argument("--nodes", type=lambda text: text.split(","), default=["A", "B"], help="of each rank (A,B)")
    parser.add_argument("--pairs", type=int, default=20, help="of blocks (20)")
    parser.add_argument("--switch", action="store_true", help="trace nothing: how large the noise is")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        port = random.randrange(20000, 30000)
        children = []
        for number in range(len(arguments.nodes)):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    rank(number, arguments, Path(folder), port)
                    code = 0
                finally:
                    sys.stdout.flush()
                    os._exit(code)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    main()
