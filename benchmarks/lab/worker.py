"""One rank on one host of the lab: runs the jobs that it is given, in order; rank 0 prints a line for each result.

worker.py '{"backends": ["hybridps", "gloo"], "interface": "net0", "jobs": [{"do": "collective", ...}]}'
"""

import json
import os
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

from hybridps.limits import bounds
from hybridps.tools.bench.figures import add_limits, paired_ratio, summarise
from hybridps.tools.bench.session import Session, is_lossless, limit
from hybridps.tools.output import load_of_machine

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from plain_sockets import Sockets  # noqa: E402

MARK = "RESULT "
BULK_BYTES = 2**20  # from here on the links decide, and not the cores


def plain_streams(limit_s: float, goodput: list[float], regions: tuple[list[int], list[float]] | None):
    """(bytes, step): each host sends so many to the one that is `step` further on, so that each card carries what the limit
    says; or each uplink, where uplinks are slower than cards. None: hosts or regions differ, and no circle of streams does it.
    """
    if len(goodput) < 2 or len(set(goodput)) > 1:
        return None
    if not regions:
        return round(limit_s * goodput[0]), 1
    region_of, uplinks = regions
    if len(set(Counter(region_of).values())) > 1 or len(set(uplinks)) > 1:
        return None
    hosts = region_of.count(0)
    return (round(limit_s * uplinks[0] / hosts), hosts) if uplinks[0] < goodput[0] else (round(limit_s * goodput[0]), 1)


def sockets_seconds(session, addresses: list[str], size: int, step: int, times: int) -> float:
    """How long plain sockets take for it, a process on each host: median, of each time the slowest host."""
    node = session.node_of[session.rank]
    streams = None
    if session.node_of.index(node) == session.rank:
        streams = Sockets(4 * len(addresses), node, len(addresses), addresses)
    taken = []
    for index in range(1 + times):  # the first finds the path's rate
        session.align()
        begin = time.perf_counter()
        if streams:
            streams.circle(size, step)
        if index:
            taken.append(time.perf_counter() - begin)
    session.align()
    if streams:
        streams.close()
    return statistics.median(map(max, zip(*session._everyones(taken), strict=True)))


def collective(session, job, context):
    row = session.measure(
        job["collective"],
        job.get("bytes", 0),
        iterations=job["iterations"],
        warmup=job.get("warmup", 3),
        warmup_of=job.get("warmup_of"),
        check=job.get("check", True),
        dtype=job.get("dtype", "float32"),
        interface=context["interface"],
    )
    add_limits(row, session.node_of, context["goodput"], context["servers_goodput"], context["regions"])
    if row["bytes"] >= BULK_BYTES and context["addresses"]:
        if streams := plain_streams(row["limit_seconds"], context["goodput"], context["regions"]):
            row["sockets_seconds"] = sockets_seconds(session, context["addresses"], *streams, min(5, job["iterations"]))
    return row


def loaded(session, job, context):
    """Small allreduces alone, then while large ones run in another group; for each backend."""
    import torch
    import torch.distributed as dist

    small, large = torch.zeros(job["bytes"] // 4), torch.zeros(job["bulk_bytes"] // 4)
    result = {"bytes": job["bytes"], "bulk_bytes": job["bulk_bytes"], "backends": {}}
    for name, group in session.groups.items():
        other = dist.new_group(backend=name)
        for _ in range(10):
            dist.all_reduce(small, group=group)
        dist.all_reduce(large[: 1 << 18], group=other)

        def once(group=group):
            begin = time.perf_counter()
            dist.all_reduce(small, group=group)
            return time.perf_counter() - begin

        session.align()
        alone = [once() for _ in range(job["iterations"])]
        session.align()
        # Paced, so that small ones do not slow the load down, and as many as are sure to fall inside it.
        under, begin = [], time.perf_counter()
        works = [dist.all_reduce(large, group=other, async_op=True) for _ in range(job["bulks"])]
        for _ in range(job["iterations"]):
            time.sleep(job["pause"])
            took = once()
            under.append((took, works[-1].is_completed()))
        small_seconds = time.perf_counter() - begin
        for work in works:
            work.wait()
        bulk_seconds = time.perf_counter() - begin
        everyones = session._everyones((alone, under))
        alone = [max(times) for times in zip(*(ranks[0] for ranks in everyones), strict=True)]
        inside = [
            max(took for took, _ in times)
            for times in zip(*(ranks[1] for ranks in everyones), strict=True)
            if not any(over for _, over in times)
        ]
        result["backends"][name] = {
            "alone": summarise([alone]),
            "loaded": summarise([inside]) if inside else None,
            "inside": len(inside),
            "small_seconds": small_seconds,
            "bulk_seconds": bulk_seconds,
            "bulk_ops": job["bulks"],
        }
    return result


def ddp(session, job, context):
    """Steps of DistributedDataParallel whose backward sleeps instead of computing; for each backend in turn.

    Gradients become ready at fixed times after the backward began, as from an accelerator: what allocating and copying
    them takes on the cores that the network also needs is part of that time, unless it takes longer.
    """
    import torch

    layers, layer_bytes = job["layers"], job["bytes"] // job["layers"]
    nap = job["backward_seconds"] / layers
    due = 0.0  # of the next layer's gradient

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(context, x, weight):
            context.save_for_backward(weight)
            return x + weight[0]

        @staticmethod
        def backward(context, gradient):
            nonlocal due
            due += nap
            time.sleep(max(0.0, due - time.perf_counter()))
            (weight,) = context.saved_tensors
            return gradient, torch.ones_like(weight)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = torch.nn.ParameterList(torch.zeros(layer_bytes // 4) for _ in range(layers))

        def forward(self, x):
            for weight in self.weights:
                x = Sleep.apply(x, weight)
            return x

    # The limit: gradients become ready at an even pace; buckets go in order, none before it is full.
    models, steps, buckets = {}, {name: [] for name in session.groups}, None
    cpu_s = dict.fromkeys(session.groups, 0.0)
    for name, group in session.groups.items():
        options = {"process_group": group, "bucket_cap_mb": job["bucket_bytes"] / 2**20}
        models[name] = torch.nn.parallel.DistributedDataParallel(Model(), **options)
    for index in range(job["warmup"] + job["iterations"]):
        for name, model in models.items():
            model.zero_grad(set_to_none=True)
            session.align()
            cpu, begin = time.process_time(), time.perf_counter()
            loss = model(torch.zeros(1, requires_grad=True)).sum()
            due = time.perf_counter()
            loss.backward()
            if index >= job["warmup"]:
                steps[name].append(time.perf_counter() - begin)
                cpu_s[name] += time.process_time() - cpu
    wrong = sum(int((w.grad != 1).sum()) for model in models.values() for w in model.parameters())
    text = next(iter(models.values()))._get_ddp_logging_data().get("rebuilt_bucket_sizes") or str(job["bytes"])
    buckets = [int(part) for part in text.split(",")]
    rates, servers = context["goodput"], context["servers_goodput"]

    def seconds(size):
        return bounds.limit_seconds("allreduce", size, session.node_of, rates, servers)

    backward, total = nap * layers, sum(buckets)
    ready, done = 0, 0.0
    for size in buckets:
        ready += size
        done = max(done, ready / total * backward) + seconds(size)
    formula = max(backward + seconds(buckets[-1]), buckets[0] / total * backward + seconds(total))
    everyones = session._everyones((steps, wrong, cpu_s))
    result = {"bytes": total, "buckets": buckets, "backward_seconds": backward, "communication_seconds": seconds(total)}
    result |= {"limit_seconds": formula, "pipeline_seconds": done, "wrong": sum(ranks[1] for ranks in everyones)}
    result["backends"] = {}
    for name in session.groups:
        figures = summarise([ranks[0][name] for ranks in everyones])
        figures["cpu_seconds"] = sum(ranks[2][name] for ranks in everyones) / job["iterations"]
        figures["of_limit"] = formula / figures["seconds"]
        result["backends"][name] = figures
    ours, *others = session.groups
    for other in others:
        pair = [[ranks[0][name] for ranks in everyones] for name in (ours, other)]
        result["backends"][other]["ours_is_faster_by"] = paired_ratio(*pair, 1)
    return result


def cross_barrier(session, job, context):
    """Steps of CrossBarrier over our backend ("hybridps"), of DDP over each backend ("hybridps DDP", "gloo"), in turn;
    of a model whose forward and backward sleep, as on an accelerator, and that SGD steps. A block of steps goes on
    without a pause, and counts from the begin of its second step's forward: by then each step has one before it.
    """
    import hybridps
    import torch

    layers, layer_bytes = job["layers"], job["bytes"] // job["layers"]
    forward_s, backward_s = (job[name] / layers for name in ("forward_seconds", "backward_seconds"))
    rate = 2.0**-10  # sums of it are exact
    due = 0.0  # of the next layer's gradient

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(context, x, weight):
            begin = time.perf_counter()
            context.save_for_backward(weight)
            y = x + weight[0]
            time.sleep(max(0.0, begin + forward_s - time.perf_counter()))
            return y

        @staticmethod
        def backward(context, gradient):
            nonlocal due
            due += backward_s
            time.sleep(max(0.0, due - time.perf_counter()))
            (weight,) = context.saved_tensors
            return gradient, torch.ones_like(weight)

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(layer_bytes // 4))

        def forward(self, x):
            return Sleep.apply(x, self.weight)

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=rate)

    ours = next(iter(session.groups))
    ways = {}
    for name in (ours, f"{ours} DDP", *list(session.groups)[1:]):
        group = session.groups[name.split()[0]]
        model = torch.nn.Sequential(*(Layer() for _ in range(layers)))
        if name == ours:
            optimizer = hybridps.CrossBarrier(model, sgd, process_group=group)
            ways[name] = (model, model, optimizer, optimizer.synchronize)
        else:
            call = torch.nn.parallel.DistributedDataParallel(
                model, process_group=group, bucket_cap_mb=job["bucket_bytes"] / 2**20
            )
            ways[name] = (model, call, sgd(model.parameters()), lambda: None)

    def step(call, optimizer) -> float:
        nonlocal due
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = call(torch.zeros(1, requires_grad=True)).sum()
        due = time.perf_counter()
        loss.backward()
        optimizer.step()
        return begin

    blocks, cpu_s = {name: [] for name in ways}, dict.fromkeys(ways, 0.0)
    steps = job["warmup"] + job["iterations"] * job["block"]
    for _, call, optimizer, end in ways.values():
        session.align()
        for _ in range(job["warmup"]):
            step(call, optimizer)
        end()
    for _ in range(job["iterations"]):
        for name, (_, call, optimizer, end) in ways.items():
            session.align()
            cpu = time.process_time()
            begins = [step(call, optimizer) for _ in range(job["block"])]
            blocks[name].append((begins[-1] - begins[1]) / (job["block"] - 2))
            end()
            cpu_s[name] += (time.process_time() - cpu) / job["block"]
    wrong = sum(int((p != -rate * steps).sum()) for model, *_ in ways.values() for p in model.parameters())

    def seconds(size):
        return bounds.limit_seconds("allreduce", size, session.node_of, context["goodput"], context["servers_goodput"])

    # Either the computation bounds a step, with the last gradient's way to the first layer, or the link, which is free
    # from the last layer's forward to its gradient.
    computing = forward_s * layers + backward_s * layers + seconds(layer_bytes)
    limit = max(computing, seconds(job["bytes"]) + backward_s + forward_s)
    everyones = session._everyones((blocks, wrong, cpu_s))
    result = {"bytes": job["bytes"], "limit_seconds": limit, "communication_seconds": seconds(job["bytes"])}
    result |= {"forward_seconds": forward_s * layers, "backward_seconds": backward_s * layers, "backends": {}}
    result["wrong"] = sum(ranks[1] for ranks in everyones)
    for name in ways:
        figures = summarise([ranks[0][name] for ranks in everyones])
        figures["cpu_seconds"] = sum(ranks[2][name] for ranks in everyones) / job["iterations"]
        figures["of_limit"] = limit / figures["seconds"]
        if name != ours:
            pair = [[ranks[0][which] for ranks in everyones] for which in (ours, name)]
            figures["ours_is_faster_by"] = paired_ratio(*pair, 1)
        result["backends"][name] = figures
    return result


def train(session, job, context):
    """Steps of DistributedDataParallel that compute: a perceptron that learns which of its inputs is the largest, its
    backward beside the communication on the cores that there are; for each backend in turn, and for each of the job's
    "ways": our backend with other options, by name.
    """
    import hybridps
    import torch
    import torch.distributed as dist

    def model():
        torch.manual_seed(0)
        width = job["width"]
        layers = [
            part for _ in range(job["layers"]) for part in (torch.nn.Linear(width, width, bias=False), torch.nn.ReLU())
        ]
        return torch.nn.Sequential(*layers[:-1])

    ways = job.get("ways", {})
    groups = dict(session.groups)
    for name, options in ways.items():
        groups[name] = dist.new_group(backend="hybridps", pg_options=hybridps.Options(**options))
    models = {
        name: torch.nn.parallel.DistributedDataParallel(
            model(), process_group=group, bucket_cap_mb=job.get("bucket_bytes", 25 * 2**20) / 2**20
        )
        for name, group in groups.items()
    }
    optimizers = {name: torch.optim.SGD(m.parameters(), lr=job.get("lr", 1e-3)) for name, m in models.items()}
    data = torch.Generator().manual_seed(session.rank)
    steps, cpu_s, losses = {name: [] for name in models}, dict.fromkeys(models, 0.0), {name: [] for name in models}
    # Others than ours need not find rates, or whether a codec pays.
    skipped = {name: job["warmup"] - job.get("warmup_of", {}).get(name, job["warmup"]) for name in models}
    for index in range(job["warmup"] + job["iterations"]):
        inputs = torch.randn(job["batch"], job["width"], generator=data)
        largest = inputs.argmax(1)
        for name, model_of in models.items():
            if index < skipped[name]:
                continue
            session.align()
            cpu, begin = time.process_time(), time.perf_counter()
            optimizers[name].zero_grad()
            loss = torch.nn.functional.cross_entropy(model_of(inputs), largest)
            loss.backward()
            optimizers[name].step()
            if index >= job["warmup"]:
                steps[name].append(time.perf_counter() - begin)
                cpu_s[name] += time.process_time() - cpu
                losses[name].append(loss.item())
    # Of ways that went through the same steps and round nothing: ours have the same bits, the peer's sums another order.
    same = [n for n in models if not skipped[n] and is_lossless(ways.get(n, {}).get("compress", "off"))]
    of_ways = {n: torch.cat([p.detach().flatten() for p in models[n].parameters()]) for n in same}
    first = next(iter(of_ways.values()))
    apart = {n: float((other - first).abs().max()) for n, other in of_ways.items()}
    everyones = session._everyones((steps, cpu_s, apart, losses))
    size = first.numel() * 4
    result = {"bytes": size, "apart": {n: max(ranks[2][n] for ranks in everyones) for n in same}, "backends": {}}
    tolerance = {n: 0 if n in ways else 0.01 * job.get("lr", 1e-3) for n in same}
    result["wrong"] = sum(result["apart"][n] > tolerance[n] for n in same)
    limits = (session.node_of, context["goodput"], context["servers_goodput"])
    for name in models:
        figures = summarise([ranks[0][name] for ranks in everyones])
        figures["cpu_seconds"] = sum(ranks[1][name] for ranks in everyones) / job["iterations"]
        figures["losses"] = [statistics.fmean(values) for values in zip(*(r[3][name] for r in everyones), strict=True)]
        servers = limits[2] if ways.get(name, {}).get("dedicated_servers", True) else []
        bound = bounds.limit_seconds("allreduce", size, *limits[:2], servers, regions=context["regions"] or None)
        if bound > 0:  # of bytes that are not packed
            figures["limit_seconds"], figures["of_limit"] = bound, bound / figures["seconds"]
        result["backends"][name] = figures
    ours, *others = models
    for other in others:
        pair = [[ranks[0][name] for ranks in everyones] for name in (ours, other)]
        result["backends"][other]["ours_is_faster_by"] = paired_ratio(*pair, 1)
    peers = [name for name in session.groups if name != ours]
    for name in (ours, *ways) if peers else ():
        pair = [[ranks[0][which] for ranks in everyones] for which in (name, peers[0])]
        result["backends"][name]["faster_than_peer"] = paired_ratio(*pair, 1)
    return result


def urgent(session, job, context):
    """An allreduce alone, beside bulk in another group, and beside it with a priority; in turn. Ours alone.

    The bound: 1.3 times its time alone, and what may be under way of the bulk when it comes: the window (once each for what
    was sent unasked and under grants of all chunks), and chunks that were granted, of two thirds of it.
    """
    import hybridps
    import torch
    import torch.distributed as dist

    ours = next(iter(session.groups))
    small, large = torch.zeros(job["bytes"] // 4), torch.zeros(job["bulk_bytes"] // 4)
    bulk = dist.new_group(backend=ours)
    times = {"alone": [], "beside": [], "urgent": []}
    for index in range(job["warmup"] + job["iterations"]):
        for way, took in times.items():
            session.align()
            work = None
            if way != "alone":
                work = dist.all_reduce(large, group=bulk, async_op=True)
                time.sleep(job["pause"])
            begin = time.perf_counter()
            with hybridps.priority(5 if way == "urgent" else None):
                dist.all_reduce(small, group=session.groups[ours])
            if index >= job["warmup"]:
                took.append(time.perf_counter() - begin)
            if work is not None:
                if way == "urgent":
                    assert not work.is_completed(), "the bulk is too short"
                work.wait()
    everyones = session._everyones(times)
    summary = {way: summarise([ranks[way] for ranks in everyones]) for way in times}
    window = limit("window_bytes")
    in_flight = (2 + 2 / 3) * window / min(context["goodput"])
    result = {"bytes": job["bytes"], "urgent_beside_bytes": job["bulk_bytes"], "in_flight_seconds": in_flight}
    result["bound_seconds"] = 1.3 * summary["alone"]["seconds"] + in_flight
    result["backends"] = {ours: summary["urgent"], f"{ours} alone": summary["alone"], f"{ours} plain": summary["beside"]}
    return result


def mesh(session, job, context):
    """Steps on a mesh of 2 x 2: data-parallel bulk is issued, then layers compute (sleep) and sum over the other dimension;
    at the end the bulk is waited for. In turn without classes, and with the classes "data" and "tensor". Ours alone.
    """
    import hybridps
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    ours = next(iter(session.groups))

    def dimensions(*priorities):
        override = {
            name: (ours, hybridps.Options(priority=priority))
            for name, priority in zip(("data", "tensor"), priorities, strict=True)
        }
        made = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"), backend_override=override)
        return made.get_group("data"), made.get_group("tensor")

    ways = {"plain": dimensions(0, 0), "classes": dimensions("data", "tensor")}
    gradients, activations = torch.zeros(job["bytes"] // 4), torch.zeros(job["layer_bytes"] // 4)
    ways["alone"] = ways["plain"]  # without the bulk
    steps = {way: [] for way in ways}
    for index in range(job["warmup"] + job["iterations"]):
        for way, (data, tensor) in ways.items():
            session.align()
            begin = time.perf_counter()
            bulk = gradients if way != "alone" else gradients[:0]
            work = dist.all_reduce(bulk, group=data, async_op=True)
            for _ in range(job["layers"]):
                time.sleep(job["layer_seconds"])
                dist.all_reduce(activations, group=tensor)
            work.wait()
            if index >= job["warmup"]:
                steps[way].append(time.perf_counter() - begin)
    everyones = session._everyones(steps)
    classes, plain, alone = (summarise([ranks[way] for ranks in everyones]) for way in ("classes", "plain", "alone"))
    # Between two hosts an allreduce of S sends S each way.
    rate = min(context["goodput"])
    layer = job["layer_seconds"] + job["layer_bytes"] / rate
    limit = max(job["layers"] * layer, (job["bytes"] + job["layers"] * job["layer_bytes"]) / rate + job["layer_seconds"])
    result = {"bytes": job["bytes"], "limit_seconds": limit, "backends": {ours: classes, f"{ours} plain": plain}}
    result["backends"][f"{ours} alone"] = alone
    classes["of_limit"] = limit / classes["seconds"]
    classes["ours_is_faster_by"] = paired_ratio(
        [ranks["classes"] for ranks in everyones], [ranks["plain"] for ranks in everyones], 1
    )
    return result


def sharded(session, job, context):
    """Steps as of FSDP's backward over all hosts: each layer gathers its parameters, computes (sleeps) and gives its gradients to
    a reduce_scatter, which is waited for at the end. In turn without a class, and with the class "sharded". Ours alone.
    """
    import hybridps
    import torch
    import torch.distributed as dist

    ours = next(iter(session.groups))
    ways = {"plain": 0, "classes": "sharded"}
    groups = {way: dist.new_group(backend=ours, pg_options=hybridps.Options(priority=p)) for way, p in ways.items()}
    whole = torch.zeros(job["layer_bytes"] // 4)
    part = torch.zeros(whole.numel() // session.world)
    gradients = [torch.zeros_like(whole) for _ in range(job["layers"])]
    steps = {way: [] for way in ways}
    for index in range(job["warmup"] + job["iterations"]):
        for way, group in groups.items():
            session.align()
            begin = time.perf_counter()
            works = []
            for gradient in gradients:
                dist.all_gather_into_tensor(whole, part, group=group)
                time.sleep(job["layer_seconds"])
                works.append(
                    dist.reduce_scatter_tensor(torch.empty_like(part), gradient, group=group, async_op=True)
                )
            for work in works:
                work.wait()
            if index >= job["warmup"]:
                steps[way].append(time.perf_counter() - begin)
    everyones = session._everyones(steps)
    classes, plain = (summarise([ranks[way] for ranks in everyones]) for way in ("classes", "plain"))
    way_s = job["layer_bytes"] * (1 - 1 / session.world) / min(context["goodput"])
    limit = max(job["layers"] * (way_s + job["layer_seconds"]) + way_s, 2 * job["layers"] * way_s + job["layer_seconds"])
    classes["of_limit"] = limit / classes["seconds"]
    classes["ours_is_faster_by"] = paired_ratio(
        [ranks["classes"] for ranks in everyones], [ranks["plain"] for ranks in everyones], 1
    )
    bytes_moved = 2 * job["layers"] * job["layer_bytes"]
    return {"bytes": bytes_moved, "limit_seconds": limit, "backends": {ours: classes, f"{ours} plain": plain}}


def main() -> None:
    context = json.loads(sys.argv[1])
    session = Session(context["backends"], context["timeout"])
    for job in context["jobs"]:
        before = load_of_machine()
        jobs = (collective, loaded, ddp, cross_barrier, train, urgent, mesh, sharded)
        result = {function.__name__: function for function in jobs}[job["do"]](session, job, context)
        result |= {"name": job["name"], "load_before": before, "load_after": load_of_machine()}
        if session.rank == 0:
            print(MARK + json.dumps(result), flush=True)
    session.close()
    # Interpreters that take their time to end would be measured by the next job of the lab.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
