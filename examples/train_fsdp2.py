"""FSDP2: parameters, gradients and optimizer states are cut into as many parts as there are ranks.

    torchrun --nproc-per-node 2 examples/train_fsdp2.py

FSDP sends reduce-scatters and all-gathers, which cost the same bytes in a ring: on one flat network hybridps gains with
these only what it saves inside a node. examples/train_hsdp.py has what is made for it.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="hybridps")
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()

    dist.init_process_group(arguments.backend)
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)), nn.Linear(32, 1))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    data = torch.Generator().manual_seed(rank + 1)
    for step in range(arguments.steps):
        x = torch.randn(64, 32, generator=data)
        loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True) / 8)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step % 10 == 0 or step == arguments.steps - 1):
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
