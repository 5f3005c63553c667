"""One rank of benchmarks/compress: worker.py '{"codecs": [...], "mib": [...], ...}'; rank 0 prints a line with what was
measured. Plain, compressed and gloo's groups take turns in the same processes."""

import json
import os
import statistics
import sys
import time

MARK = "RESULT "


def ddp_steps(groups: dict, rounds: int) -> dict[str, float]:
    """Seconds of a step of stock DDP: 32 MiB of gradients, next to nothing to compute; groups in turn."""
    import torch
    import torch.distributed as dist
    from torch import nn

    models = {}
    for name, group in groups.items():
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
        model = nn.parallel.DistributedDataParallel(layers, process_group=group, bucket_cap_mb=8)
        models[name] = model, torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(2, 1024)
    seconds = {name: [] for name in groups}
    for turn in range(rounds + 3):  # buckets are rebuilt, and codecs with feedback begin
        for name, (model, optimizer) in models.items():
            dist.barrier()
            began = time.perf_counter()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if turn >= 3:
                seconds[name].append(time.perf_counter() - began)
    return {name: statistics.median(times) for name, times in seconds.items()}


def main() -> None:
    job = json.loads(sys.argv[1])
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("hybridps")
    import hybridps
    from hybridps import _C

    rank, world = dist.get_rank(), dist.get_world_size()
    everyone = list(range(world))
    groups = {"fp32": None}
    for codec in job["codecs"]:
        spec = codec + ("," if ":" in codec else ":") + "when=always,auto=0"
        options = hybridps.Options(compress=spec)
        groups[codec] = dist.new_group(everyone, pg_options=options)
    if job["gloo"]:
        groups["gloo"] = dist.new_group(everyone, backend="gloo")
    results = []
    for mib in job["mib"]:
        size = int(mib * (1 << 20)) // 4
        own = torch.randn(size, generator=torch.Generator().manual_seed(rank))
        exact = own.double()
        dist.all_reduce(exact)
        tensor = torch.empty_like(own)
        seconds = {name: [] for name in groups}
        sent, cpu, error = {}, {name: [] for name in groups}, {}
        for turn in range(job["warm_up"] + job["rounds"]):
            for name, group in groups.items():
                tensor.copy_(own)
                dist.barrier()
                before, began, cpu_before = _C.stats(), time.perf_counter(), time.process_time()
                dist.all_reduce(tensor, group=group)
                took, used = time.perf_counter() - began, time.process_time() - cpu_before
                after = _C.stats()
                if turn >= job["warm_up"]:
                    seconds[name].append(took)
                    cpu[name].append(used)
                    sent[name] = after["net_tx_payload_bytes"] - before["net_tx_payload_bytes"]
                if turn == 0:
                    error[name] = float((tensor.double() - exact).square().sum() / exact.square().sum())
        for name in groups:
            mine = torch.tensor([statistics.median(seconds[name]), statistics.median(cpu[name]), float(sent[name])])
            dist.all_reduce(mine, dist.ReduceOp.MAX)
            results.append(
                {
                    "mib": mib,
                    "name": name,
                    "seconds": float(mine[0]),
                    "cpu_seconds": float(mine[1]),
                    "sent": int(mine[2]),
                    "nmse": error[name],
                }
            )
    if job["ddp"]:
        for name, took in ddp_steps(groups, job["rounds"]).items():
            slowest = torch.tensor([took])
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            results.append({"mib": "DDP step", "name": name, "seconds": float(slowest)})
    if rank == 0:
        print(MARK + json.dumps(results), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
