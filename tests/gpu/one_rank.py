"""A rank of a short program, for tools that must start it themselves: one_rank.py DEVICE --store FILE"""

import os
import sys

import bodies
import torch
import torch.distributed as dist


def main() -> None:
    device, store = sys.argv[1], sys.argv[sys.argv.index("--store") + 1]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("hybridps", init_method=f"file://{store}", rank=rank, world_size=world)
    assert bodies.collectives(rank, world, device, torch.float32, 1023) > 10
    bodies.stream_order(rank, world, device, 5)
    bodies.freed_at_once(rank, world, device, 5)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
