"""One rank of benchmarks/compress: worker.py '{"codecs": [...], "mib": [...], ...}'; rank 0 prints a line with what was
measured. Plain, compressed and gloo's groups take turns in the same processes."""

import json
import os
import statistics
import sys
import time

MARK = "RESULT "


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
        spec = codec + ("," if ":" in codec else ":") + "when=always"
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
    if rank == 0:
        print(MARK + json.dumps(results), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
