"""Allreduce of several sizes: hybridps and gloo taking turns in the same processes; medians, ratio, bytes per node.

    python benchmarks/allreduce.py                      two nodes of two ranks, emulated on this machine over loopback
    python benchmarks/allreduce.py --nodes 1 --ranks 2  one node
    torchrun ... benchmarks/allreduce.py --child        the same on real machines, one line a size on rank 0

On loopback the CPU is the limit, not a network: the figures say what the software costs, no more.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="per node")
    parser.add_argument("--sizes", default="64,65536,1048576,16777216", help="bytes")
    parser.add_argument("--seconds", type=float, default=2.0, help="per size and backend, about")
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def parent(options):
    world = options.nodes * options.ranks
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world),
               os.path.abspath(__file__), *sys.argv[1:], "--child"]
    environment = dict(os.environ, OMP_NUM_THREADS="1", HYBRIDPS_EMULATED_RANKS=str(options.ranks))
    raise SystemExit(subprocess.run(command, env=environment).returncode)


def child(options):
    emulated = os.environ.pop("HYBRIDPS_EMULATED_RANKS", None)
    if emulated:
        os.environ["HYBRIDPS_NODE"] = f"node{int(os.environ['RANK']) // int(emulated)}"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("hybridps")
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = {"hybridps": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
    from hybridps import _C

    rows = []
    if rank == 0:
        print(f"# {world} ranks, {options.nodes} nodes; times are medians in ms; sent: bytes leaving this rank over the "
              "network per allreduce")
        print(f"{'bytes':>10} {'hybridps':>10} {'gloo':>10} {'gloo/hybridps':>14} {'sent':>10}")
    for size in map(int, options.sizes.split(",")):
        tensor = torch.ones(max(1, size // 4))
        times = {name: [] for name in groups}
        for group in groups.values():
            for _ in range(3):
                dist.all_reduce(tensor, group=group)
        begin = time.monotonic()
        sent = 0
        while True:
            for name, group in groups.items():
                before = _C.stats()["net_tx_payload_bytes"] if name == "hybridps" else 0
                tensor.fill_(1.0)
                dist.barrier(group=group)
                start = time.perf_counter()
                dist.all_reduce(tensor, group=group)
                times[name].append((time.perf_counter() - start) * 1e3)
                if name == "hybridps":
                    sent = _C.stats()["net_tx_payload_bytes"] - before
                assert tensor[0].item() == world and tensor[-1].item() == world, "wrong sum"
            go_on = torch.tensor([float(time.monotonic() - begin < 2 * options.seconds or len(times["gloo"]) < 5)])
            dist.broadcast(go_on, 0, group=groups["hybridps"])
            if go_on.item() == 0 or len(times["gloo"]) >= 2000:
                break
        # The slowest rank's median counts.
        medians = torch.tensor([statistics.median(times["hybridps"]), statistics.median(times["gloo"])])
        dist.all_reduce(medians, op=dist.ReduceOp.MAX)
        ours, gloo = medians.tolist()
        rows.append({"bytes": size, "hybridps_ms": ours, "gloo_ms": gloo, "ratio": gloo / ours, "rounds": len(times["gloo"]),
                     "sent_bytes": sent})
        if rank == 0:
            print(f"{size:>10} {ours:>10.3f} {gloo:>10.3f} {gloo / ours:>14.2f} {sent:>10}", flush=True)
    if rank == 0 and options.json:
        with open(options.json, "w") as file:
            json.dump({"world": world, "nodes": options.nodes, "rows": rows}, file, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    arguments = parse()
    child(arguments) if arguments.child else parent(arguments)
