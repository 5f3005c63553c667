"""Trains a perceptron with hybridps.CrossBarrier: the next forward begins while gradients are still on their way.

    torchrun --nproc-per-node 2 examples/train_cross_barrier.py
    torchrun --nproc-per-node 2 examples/train_cross_barrier.py --ddp      # the same with DDP: the same losses

What is gained is described in docs/overlap.md; on one machine nothing is, as there is no network to wait for.
"""

import argparse
import time

import hybridps
import torch
import torch.distributed as dist
from torch import nn

WIDTH, CLASSES = 512, 10


def network() -> nn.Module:
    torch.manual_seed(1)
    layers: list[nn.Module] = [nn.Linear(64, WIDTH), nn.Tanh()]
    for _ in range(4):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def batches(rank: int, steps: int, size: int):
    """Points around ten centres, each rank its own."""
    centres = torch.randn(CLASSES, 64, generator=torch.Generator().manual_seed(2))
    generator = torch.Generator().manual_seed(100 + rank)
    for _ in range(steps):
        labels = torch.randint(CLASSES, (size,), generator=generator)
        yield centres[labels] + 2 * torch.randn(size, 64, generator=generator), labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="hybridps")
    parser.add_argument("--ddp", action="store_true", help="DistributedDataParallel and a stock optimizer instead")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group(args.backend)
    rank = dist.get_rank()
    model = network()

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    if args.ddp:
        call, optimizer = nn.parallel.DistributedDataParallel(model), sgd(model.parameters())
    else:
        call, optimizer = model, hybridps.CrossBarrier(model, sgd)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    started = time.perf_counter()
    for step, (points, labels) in enumerate(batches(rank, args.steps, args.batch_size), 1):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(call(points), labels)
        loss.backward()
        optimizer.step()  # CrossBarrier steps each layer when the next forward comes to it
        scheduler.step()
        if step % 20 == 0:
            total = loss.detach().clone()
            dist.all_reduce(total, dist.ReduceOp.AVG)
            if rank == 0:
                print(f"step {step:3d}  loss {total.item():.9f}", flush=True)
    state = model.state_dict()  # waits for what is on its way
    if rank == 0:
        norm = torch.stack([tensor.norm() for tensor in state.values()]).norm()
        seconds = time.perf_counter() - started
        print(f"norm of the weights {norm:.6f}; {args.steps} steps in {seconds:.2f} s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
