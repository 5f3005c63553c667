"""Trains a perceptron with hybridps.LocalSteps: ranks exchange what they have learnt every 16 steps.

    torchrun --nproc-per-node 2 examples/train_local_steps.py
    torchrun --nproc-per-node 2 examples/train_local_steps.py --ddp                       # at every step
    torchrun --nproc-per-node 2 examples/train_local_steps.py --compress int8 --delay 2   # less, and meanwhile
    torchrun --nproc-per-node 2 examples/train_local_steps.py --checkpoint local.pt       # goes on from it if it is there

When it pays, and when not: docs/local-steps.md.
"""

import argparse
import os

import hybridps
import torch
import torch.distributed as dist
from torch import nn

CLASSES = 10


def batches(rank: int, first: int, last: int, size: int):
    """Points around ten centres, each rank its own."""
    centres = torch.randn(CLASSES, 64, generator=torch.Generator().manual_seed(2))
    for step in range(first, last):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        labels = torch.randint(CLASSES, (size,), generator=generator)
        yield centres[labels] + 3 * torch.randn(size, 64, generator=generator), labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ddp", action="store_true", help="DistributedDataParallel instead")
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--every", type=int, default=16)
    parser.add_argument("--compress", default="none")
    parser.add_argument("--delay", type=int, default=0)
    parser.add_argument("--checkpoint", default="", help="a file that all ranks can read, written by rank 0")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("hybridps")
    rank = dist.get_rank()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    first, call, local = 0, model, None
    if args.ddp:
        call = nn.parallel.DistributedDataParallel(model)
    else:
        local = hybridps.LocalSteps(model, optimizer, args.every, compress=args.compress, delay=args.delay)
        if os.path.exists(args.checkpoint):
            state = torch.load(args.checkpoint)
            local.load_state_dict(state)
            first = state["steps"]

    for step, (points, labels) in enumerate(batches(rank, first, args.steps, 32), first + 1):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(call(points), labels)
        loss.backward()
        if local is None:
            optimizer.step()
        else:
            local.step()
        if step % 32 == 0:
            total = loss.detach().clone()
            dist.all_reduce(total, dist.ReduceOp.AVG)
            if rank == 0:
                print(f"step {step:3d}  loss {total.item():.6f}", flush=True)
    if local is not None:
        state = local.state_dict()  # of all ranks; what is under way is merged first
        if rank == 0 and args.checkpoint:
            torch.save(state, args.checkpoint)
        local.close()
    if rank == 0:
        sent = hybridps.stats()["net_tx_payload_bytes"]
        norm = torch.stack([p.detach().norm() for p in model.parameters()]).norm()
        print(f"norm of the weights {norm:.6f}; sent to other nodes {sent} bytes", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
