"""HSDP: sharded inside each machine, replicated between machines, where dedicated servers help with the all-reduce.

    spare$ hybridps-server --listen 10.0.0.9:7000                  # HYBRIDPS_TOKEN_FILE here and there
    boxN$  HYBRIDPS_SERVERS=10.0.0.9:7000 torchrun --nnodes 3 --node-rank N ... --nproc-per-node 2 examples/train_hsdp.py

What crosses the network is one all-reduce of each shard's gradients over the machines: what hybridps is made for. Servers
are used from three machines on; rank 0 says at the end how many were. --machines N: takes the ranks for N machines' (to try
it on one).
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hybridps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--machines", type=int, help="default: WORLD_SIZE / LOCAL_WORLD_SIZE")
    arguments = parser.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    machines = arguments.machines or world // int(os.environ["LOCAL_WORLD_SIZE"])
    if arguments.machines:
        os.environ["HYBRIDPS_NODE"] = f"machine {rank * machines // world}"

    dist.init_process_group("hybridps")
    mesh = init_device_mesh("cpu", (machines, world // machines), mesh_dim_names=("between", "inside"))
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)), nn.Linear(32, 1))
    for block in model:
        fully_shard(block, mesh=mesh)  # the first dimension replicates, the second shards
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
    if rank == 0:
        between = hybridps.topology(mesh.get_group("between"))
        print(f"between machines: {len(between.servers)} dedicated servers: {between.servers_why}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
