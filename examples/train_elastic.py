#!/usr/bin/env python
"""Training that goes on when machines die and come back: torchft decides who is there, hybridps carries the gradients.

One lighthouse, and a torchrun for each replica group:

    torchft_lighthouse --bind 0.0.0.0:29510 --min_replicas 1 --join_timeout_ms 2000 --heartbeat_timeout_ms 1000
    TORCHFT_LIGHTHOUSE=http://HOST:29510 torchrun --nnodes 1 --nproc-per-node 1 --master-port 29500 \\
        --max-restarts 100 examples/train_elastic.py --replica 0           # on each machine, with its own number and port

Kill any of them: the others lose the step that they were in and go on without it. The one that comes back gets the parameters
from another and takes part from the next step. --write FILE writes a line for each step that counts: its number, how many replicas
had part in it, and a hash of the parameters, which is the same for all. Needs torchft; docs/elastic.md has more.
"""

import argparse
import hashlib
import logging
import os
import sys
import time
from datetime import timedelta

import torch
import torchft
from hybridps.torchft import ProcessGroupHybrid
from torch import nn


def hash_of(model):
    return hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]


def average(manager, model):
    """Over the replicas that take part. Where one has died meanwhile the step will not count, and the gradients are of no use.

    With torchft.DistributedDataParallel this runs in backward(); that of torchft 0.2.0 raises when a replica dies, later ones do not.
    """
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    if manager.allreduce(flat).wait():
        for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replica", default=os.environ.get("REPLICA_GROUP_ID", "0"), help="name of the replica group")
    parser.add_argument("--backend", default="hybridps", choices=["hybridps", "gloo"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="what a step takes at least")
    parser.add_argument("--min-replicas", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=20.0, help="seconds for an operation or a quorum")
    parser.add_argument("--write", help="file to add a line to for each step")
    args = parser.parse_args()

    logging.getLogger().setLevel(logging.ERROR)  # torchft tells of every step
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    teacher = torch.randn(64, 10)

    def load_state_dict(state):
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    groups = {"hybridps": ProcessGroupHybrid, "gloo": torchft.ProcessGroupGloo}
    timeout = timedelta(seconds=args.timeout)
    manager = torchft.Manager(
        pg=groups[args.backend](timeout=timeout),
        min_replica_size=args.min_replicas,
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"replica{args.replica}_",
        timeout=timeout,
        quorum_timeout=timeout,
    )
    optimizer = torchft.Optimizer(manager, inner)
    log = open(args.write, "a", buffering=1) if args.write else sys.stdout

    while manager.current_step() < args.steps:
        begin = time.monotonic()
        step = manager.current_step()
        optimizer.zero_grad()  # asks for the quorum
        data = torch.Generator().manual_seed(1000 * step + int(args.replica or 0))
        inputs = torch.randn(32, 64, generator=data)
        loss = nn.functional.cross_entropy(model(inputs), (inputs @ teacher).argmax(1))
        loss.backward()
        average(manager, model)
        optimizer.step()
        if manager.current_step() > step:
            line = f"{manager.current_step()} {manager.num_participants()} {hash_of(model)} {loss.item():.4f}"
            print(line, f"{time.time():.3f}", file=log)
        time.sleep(max(0.0, args.step_seconds - (time.monotonic() - begin)))
    manager.shutdown()


if __name__ == "__main__":
    main()
