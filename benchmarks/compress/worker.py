"""One rank of benchmarks/compress: worker.py '{"codecs": [...], "mib": [...], ...}'; rank 0 prints a line with what was
measured. Plain, compressed and gloo's groups take turns in the same processes."""

import json
import os
import statistics
import sys
import time

MARK = "RESULT "


def gradients(kind: str, size: int, rank: int):
    """`size` bytes of what a program may reduce, other values on each rank."""
    import torch

    generator = torch.Generator().manual_seed(rank)
    if kind == "bits":  # nothing to gain
        return torch.randint(-(1 << 31), 1 << 31, (size // 4,), generator=generator, dtype=torch.int64).to(torch.int32)
    values = torch.randn(size // (2 if kind == "bf16" else 4), generator=generator)
    if kind == "fp32":
        return values
    rounded = values.to(torch.bfloat16)
    return rounded if kind == "bf16" else rounded.float()


class Text:
    """A GPT of 13 million parameters and the batches of one rank."""

    def __init__(self, rank: int, precision: str, group) -> None:
        import torch
        from torch import nn

        torch.manual_seed(0)
        width, words = 384, 4096
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.model = nn.ModuleDict(
            {
                "words": nn.Embedding(words, width),
                "layers": nn.TransformerEncoder(layer, 5, enable_nested_tensor=False),
                "out": nn.Linear(width, words),
            }
        )
        if precision in ("bf16", "fsdp"):
            self.model = self.model.to(torch.bfloat16)
        self.precision = precision
        self.tokens = torch.randint(0, words, (64, 1, 17), generator=torch.Generator().manual_seed(rank))
        model = self.model

        class Whole(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.parts = model

            def forward(self, tokens):
                return self.parts["out"](self.parts["layers"](self.parts["words"](tokens)))

        if precision == "fsdp":
            from torch.distributed.device_mesh import DeviceMesh
            from torch.distributed.fsdp import fully_shard

            mesh = DeviceMesh.from_group(group, "cpu")
            self.whole = Whole()
            for part in (*self.model["layers"].layers, self.whole):
                fully_shard(part, mesh=mesh)
        else:
            self.whole = nn.parallel.DistributedDataParallel(Whole(), process_group=group)
        self.optimizer = torch.optim.SGD(self.whole.parameters(), lr=1e-2)
        self.losses: list[float] = []

    def step(self, turn: int) -> None:
        import torch

        tokens = self.tokens[turn % len(self.tokens)]
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "autocast"):
            out = self.whole(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(out.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())


def steps(groups: dict, precision: str, rounds: int, rank: int) -> dict[str, tuple[float, bool]]:
    """By group: seconds of a step of stock DDP or FSDP2, and whether its losses are those of the plain group bit for bit."""
    import torch.distributed as dist

    # gloo has no average for FSDP's reduce-scatter.
    models = {
        name: Text(rank, precision, group) for name, group in groups.items() if (name, precision) != ("gloo", "fsdp")
    }
    seconds = {name: [] for name in models}
    for turn in range(rounds + 3):  # buckets are rebuilt, codecs with feedback begin, and paths are measured
        for name, model in models.items():
            dist.barrier()
            began = time.perf_counter()
            model.step(turn)
            if turn >= 3:
                seconds[name].append(time.perf_counter() - began)
    return {
        name: (statistics.median(times), models[name].losses == models["off"].losses) for name, times in seconds.items()
    }


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
    groups = {"off": dist.new_group(everyone, pg_options=hybridps.Options(compress="off"))}
    for codec in job["codecs"]:
        lossless = codec.startswith(("exact", "default"))  # chooses by itself, as in a program
        spec = codec if lossless else codec + ("," if ":" in codec else ":") + "when=always,auto=0"
        groups[codec] = dist.new_group(
            everyone, pg_options=hybridps.Options(**({} if codec == "default" else {"compress": spec}))
        )
    if job["gloo"]:
        groups["gloo"] = dist.new_group(everyone, backend="gloo")
    results = []
    for mib in job["mib"]:
        own = gradients(job["data"], int(mib * (1 << 20)), rank)
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
                if turn == 0 and own.is_floating_point():
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
                    "nmse": error.get(name, 0.0),
                }
            )
    for precision in job["ddp"]:
        for name, (took, same) in steps(groups, precision, job["rounds"], rank).items():
            slowest = torch.tensor([took, float(not same)])
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            what = "FSDP2 bf16" if precision == "fsdp" else f"DDP {precision}"
            row = {"mib": what, "name": name, "seconds": float(slowest[0]), "same": not slowest[1]}
            results.append(row)
    if rank == 0:
        print(MARK + json.dumps(results), flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
