"""DistributedDataParallel: the backend's name is all that is hybridps.

    torchrun --nproc-per-node 2 examples/train_ddp.py
    torchrun --nnodes 2 --node-rank 0 --master-addr boxa --nproc-per-node 2 examples/train_ddp.py

--bucket-mb: DDP's buckets; larger ones use a slow network better, smaller ones start earlier.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="hybridps")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--bucket-mb", type=float, default=25)
    arguments = parser.parse_args()

    dist.init_process_group(arguments.backend)
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    model = DistributedDataParallel(model, bucket_cap_mb=arguments.bucket_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    data = torch.Generator().manual_seed(rank + 1)  # every rank has its own data
    for step in range(arguments.steps):
        x = torch.randn(64, 32, generator=data)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True) / 8)
        optimizer.zero_grad()
        loss.backward()  # gradients are averaged here, while it still computes
        optimizer.step()
        if rank == 0 and (step % 10 == 0 or step == arguments.steps - 1):
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
