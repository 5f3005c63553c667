"""DistributedDataParallel that outlives a machine: with hybridps in the same processes, with gloo by a restart.

    torchrun --nnodes 3:4 --max-restarts 3 --nproc-per-node 2 --rdzv-id job1 --rdzv-backend c10d \\
        --rdzv-endpoint boxa:29500 --rdzv-conf last_call_timeout=5 examples/cases/killed-node/train.py

Start it on each machine, and then kill one of them, not boxa: the Store is there. --checkpoint FILE, that all machines
can read, is what a restart goes on from; hybridps goes on without it.
"""

import argparse
import copy
import os
import re
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).resolve().parents[2]))

from train_over_distance import CLASSES, FEATURES, points  # noqa: E402


def nodes_that_are_gone(error: Exception) -> list[int]:
    """All ranks of the nodes whose ranks the error names."""
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    nodes = {int(rank) // ranks for rank in re.findall(r"rank (\d+) \([^)]*\) is gone", str(error))}
    return [node * ranks + index for node in sorted(nodes) for index in range(ranks)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="hybridps")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--width", type=int, default=512, help="of the model's layers")
    parser.add_argument("--checkpoint", metavar="FILE", help="rank 0 writes it every 20 steps; read at the start")
    parser.add_argument("--write", metavar="FILE", help="rank 0 adds a line for each step: number, ranks, loss, time")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group(arguments.backend)
    torch.manual_seed(1)
    width = arguments.width
    layers = [nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, CLASSES)]
    model, step = nn.Sequential(*layers), 0
    if arguments.checkpoint and os.path.exists(arguments.checkpoint):
        saved = torch.load(arguments.checkpoint)
        model.load_state_dict(saved["model"])
        step = saved["step"]
    log = open(arguments.write, "a", buffering=1) if arguments.write else sys.stdout

    while step < arguments.steps:
        # Sends the parameters of rank 0 to all; those that go on may be a step apart.
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        of_rank_0 = torch.tensor([step])
        dist.broadcast(of_rank_0, 0)
        step, gone = int(of_rank_0), []
        while step < arguments.steps and not gone:
            x, labels = points(10_000 * dist.get_rank() + step, 32)
            try:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(ddp(x), labels)
                loss.backward()
            except dist.DistNetworkError as error:
                gone = nodes_that_are_gone(error)
                if not gone or arguments.backend != "hybridps":
                    raise  # torchrun starts all ranks again
                break
            optimizer.step()
            step += 1
            if dist.get_rank() == 0:
                print(f"{step} {dist.get_world_size()} {loss.item():.4f} {time.time():.4f}", file=log, flush=True)
                if arguments.checkpoint and step % 20 == 0:
                    torch.save({"model": model.state_dict(), "step": step}, arguments.checkpoint + ".part")
                    os.replace(arguments.checkpoint + ".part", arguments.checkpoint)  # never half a file
        if gone:
            dist.shrink_group(gone)
            model = copy.deepcopy(model)  # without the hooks of the DistributedDataParallel that failed
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
