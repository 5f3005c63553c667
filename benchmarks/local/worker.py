"""One rank of benchmarks/local: worker.py JOB; prints a line with what it measured. The task is benchmarks/convergence's GPT."""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "convergence"))

MARK = "RESULT "


def train(job: dict, way: dict, seed: int) -> dict:
    import hybridps
    import torch
    import torch.distributed as dist
    from torch import nn
    from worker import GPT, Text

    rank, world = dist.get_rank(), dist.get_world_size()
    task = Text()
    task.batch = job["batch"]
    torch.manual_seed(seed)
    bare = GPT(task.letters, job["width"], task.window)
    optimizer = torch.optim.AdamW(bare.parameters(), lr=job["lr"])
    call, local = bare, None
    if way["kind"] == "ddp":
        group = dist.new_group(backend=way["backend"])
        call = nn.parallel.DistributedDataParallel(bare, process_group=group)
    else:
        local = hybridps.LocalSteps(bare, optimizer, job["every"], **way.get("options", {}))
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    slow = way.get("slow", 1) if rank == world - 1 else 1
    steps = way.get("steps", job["steps"]) // slow
    dist.barrier()
    before, began = hybridps.stats()["net_tx_payload_bytes"], time.perf_counter()
    for _ in range(steps):
        step_began = time.perf_counter()
        optimizer.zero_grad()
        task.loss(call, generator).backward()
        # A step as long as a device's would be: on this machine ranks share cores, and one that waits makes others faster.
        time.sleep(max(0.0, step_began + slow * way.get("step_s", 0.0) - time.perf_counter()))
        if local is None:
            optimizer.step()
        else:
            local.step()
    seconds = time.perf_counter() - began
    ages = []
    if local is not None:
        ages = local.ages
        local.close()
    dist.barrier()
    _, loss = task.judge(bare)
    return {
        "steps": steps,
        "seconds": seconds,
        "loss": loss,
        "sent": hybridps.stats()["net_tx_payload_bytes"] - before,
        "parameters": sum(p.numel() for p in bare.parameters()),
        "absent": sum(row[-1] < 0 for row in ages) / len(ages) if ages else 0.0,
    }


def main() -> None:
    job = json.loads(sys.argv[1])
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("hybridps")
    for seed in range(job["seeds"]):
        for way in job["ways"]:
            found = {"way": way["name"], "seed": seed, "rank": dist.get_rank(), **train(job, way, seed)}
            print(MARK + json.dumps(found), flush=True)
    with contextlib.suppress(Exception):
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
