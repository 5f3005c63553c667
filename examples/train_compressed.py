"""Gradients compressed between machines: int8 with error feedback, for one group, by its options.

    torchrun --nnodes 2 ... examples/train_compressed.py --codec int8
    HYBRIDPS_COMPRESS=int8 torchrun --nnodes 2 ... train.py        # the same for a program that is not changed

Ranks of one machine exchange plain sums: on one machine nothing is compressed. --machines N takes the ranks for N
machines' (to try it on one). docs/compression.md says what each codec costs and what it does to training.
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hybridps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codec", default="int8", help="none, bf16, fp16, int8, int4, onebit, topk, ...")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--machines", type=int)
    arguments = parser.parse_args()
    if arguments.machines:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        os.environ["HYBRIDPS_NODE"] = f"machine {rank * arguments.machines // world}"

    codec = "" if arguments.codec == "none" else arguments.codec
    dist.init_process_group("hybridps", pg_options=hybridps.Options(compress=codec))
    rank = dist.get_rank()
    torch.manual_seed(0)
    # Gradients below 64 KiB are sent as they are.
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 1024), nn.Tanh(), nn.Linear(1024, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    data = torch.Generator().manual_seed(rank + 1)
    for step in range(arguments.steps):
        x = torch.randn(64, 32, generator=data)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True) / 8)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step % 10 == 0 or step == arguments.steps - 1):
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    counts = hybridps.stats()
    dist.barrier()
    if rank == 0:
        print(f"sent to other machines: {counts['net_tx_payload_bytes'] / arguments.steps:.0f} bytes a step", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
