"""A pipeline: each rank has one stage, activations and gradients go from rank to rank by send and recv (1F1B).

    torchrun --nproc-per-node 2 examples/train_pipeline.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="hybridps")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--microbatches", type=int, default=4)
    arguments = parser.parse_args()

    dist.init_process_group(arguments.backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    layers = [nn.Linear(32, 32), nn.Tanh()]
    part = nn.Sequential(*layers, nn.Linear(32, 1)) if rank == world - 1 else nn.Sequential(*layers)
    stage = PipelineStage(part, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, arguments.microbatches, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.Adam(part.parameters(), lr=0.01)

    data = torch.Generator().manual_seed(1)  # the first stage needs the inputs, the last one the targets
    for step in range(arguments.steps):
        x = torch.randn(64, 32, generator=data)
        losses: list[torch.Tensor] = []
        optimizer.zero_grad()
        if rank == world - 1:
            schedule.step(*([x] if rank == 0 else []), target=x.sum(1, keepdim=True) / 8, losses=losses)
        else:
            schedule.step(*([x] if rank == 0 else []))
        optimizer.step()
        if rank == world - 1 and (step % 10 == 0 or step == arguments.steps - 1):
            print(f"step {step}: loss {torch.stack(losses).mean().item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
