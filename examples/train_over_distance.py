"""Training between two sites, in four ways: what a step takes, what this machine sends, and the loss that is reached.

    torchrun --nnodes 4 --node-rank 0 --master-addr boxa examples/train_over_distance.py --way hybridps

    gloo        DistributedDataParallel over gloo
    hybridps    the same over hybridps, as it is: one sum of each site crosses, packed without loss where that helps
    int8        the same with gradients as int8, which changes results a little
    local       hybridps.LocalSteps: an exchange every 16 steps, which is another optimizer

Sites are found by their round trips; HYBRIDPS_REGION is not needed where these are clear. docs/over-distance.md.
"""

import argparse
import time

import hybridps
import torch
import torch.distributed as dist
from torch import nn

CLASSES, FEATURES = 10, 64
WAYS = ("gloo", "hybridps", "int8", "local")


def points(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Around ten centres, so far apart that no model can tell all of them."""
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(2))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    return centres[labels] + 3 * torch.randn(count, FEATURES, generator=generator), labels


def sent_bytes() -> int:
    """By all network interfaces of this machine but loopback."""
    with open("/proc/net/dev") as table:
        fields = [line.split(":") for line in table.readlines()[2:]]
    return sum(int(counts.split()[8]) for name, counts in fields if name.strip() != "lo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=WAYS, default="hybridps")
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--every", type=int, default=16, help="steps between exchanges of --way local")
    parser.add_argument("--width", type=int, default=1024, help="of the model's layers; 1024: 4.3 MiB of gradients")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    if arguments.way == "int8":
        dist.init_process_group("hybridps", pg_options=hybridps.Options(compress="int8"))
    else:
        dist.init_process_group("gloo" if arguments.way == "gloo" else "hybridps")
    rank, width = dist.get_rank(), arguments.width
    torch.manual_seed(1)
    layers = [nn.Linear(FEATURES, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, CLASSES)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    local, call = None, model
    if arguments.way == "local":
        local = hybridps.LocalSteps(model, optimizer, arguments.every)
    else:
        call = nn.parallel.DistributedDataParallel(model)

    begin, sent, first = 0.0, 0, min(arguments.every, arguments.steps - 1)  # the first steps find the path's rate
    for step in range(arguments.steps):
        if step == first:
            begin, sent = time.perf_counter(), sent_bytes()
        x, labels = points(10_000 * rank + step, 32)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(call(x), labels)
        loss.backward()
        (local or optimizer).step()
        if rank == 0 and (step % 16 == 0 or step == arguments.steps - 1):
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    if local is not None:
        local.synchronize()
    dist.barrier()
    seconds, counted = (time.perf_counter() - begin, sent_bytes() - sent)
    with torch.no_grad():
        x, labels = points(-1, 4096)
        loss = nn.functional.cross_entropy(model(x), labels).item()
    if rank == 0:
        steps = arguments.steps - first
        print(
            f"{arguments.way}: {seconds / steps * 1e3:.1f} ms a step; this machine sent {counted / steps / 1e6:.3f} MB a step; "
            f"loss on points not seen {loss:.4f}",
            flush=True,
        )
    if local is not None:
        local.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
