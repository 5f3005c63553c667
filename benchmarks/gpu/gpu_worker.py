"""One rank of the rows that share their processes: runs the jobs in order; rank 0 adds a line for each to a file.

gpu_worker.py '{"backends": ["hybridps", "gloo"], "device": "cuda", "results": FILE, "jobs": [...]}' --store FILE
"""

import ctypes
import gc
import json
import os
import sys
import time

import gpt
import torch
import torch.distributed as dist
from hybridps.backend.load import load_extension
from hybridps.tools.bench.figures import paired_ratio, summarise
from hybridps.tools.bench.session import Session
from hybridps.tools.output import load_of_machine

SYNCHRONISATIONS = {
    f"{prefix}{what}Synchronize" for prefix, whats in (("cuda", ("Device", "Stream", "Event")),
                                                       ("cu", ("Ctx", "Stream", "Event"))) for what in whats
} | {"cudaMemcpy"}  # fmt: skip


def synchronize(session) -> None:
    if session.device != "cpu":
        torch.cuda.synchronize()


def everyones(session, value) -> list:
    return session._everyones(value)


def usable(session, attempt) -> tuple[dict, dict]:
    """The groups in which `attempt(name, group)` succeeds on every rank; and what the others say instead."""
    groups, refused = {}, {}
    for name, group in session.groups.items():
        said = ""
        try:
            attempt(name, group)
        except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
            said = str(error).splitlines()[0][:200] or type(error).__name__
        said = next(filter(None, everyones(session, said)), "")
        if said and name == "hybridps":
            raise RuntimeError(said)
        if said:
            refused[name] = said
        else:
            groups[name] = group
    return groups, refused


def compared(session, times: dict[str, list[float]]) -> dict:
    """Seconds of the same operations in each backend, in turns -> the figures of each, ours beside the others."""
    all_times = everyones(session, times)
    result = {name: summarise([ranks[name] for ranks in all_times]) for name in times}
    ours, *others = times
    for other in others:
        pair = [[ranks[name] for ranks in all_times] for name in (ours, other)]
        result[other]["ours_is_faster_by"] = paired_ratio(*pair, 1)
    return result


# The limits ------------------------------------------------------------------------------------------------------


def staging_rates(session, size: int, seconds: float = 0.2) -> dict:
    """bytes/s of one rank while all do the same: from the device to pinned memory, back; each way of both at once."""
    on_gpu = session.device != "cpu"
    count = max(1, size)
    there, back = (torch.zeros(count, dtype=torch.uint8, device=session.device) for _ in range(2))
    host, other_host = (torch.zeros(count, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2))
    streams = [torch.cuda.Stream() for _ in range(2)] if on_gpu else []

    def to_host():
        host.copy_(there, non_blocking=True)

    def to_device():
        back.copy_(other_host, non_blocking=True)

    def both():
        if not on_gpu:
            to_host(), to_device()
            return
        for stream, copy in zip(streams, (to_host, to_device), strict=True):
            with torch.cuda.stream(stream):
                copy()

    rates = {}
    for name, work in (("to_host", to_host), ("to_device", to_device), ("both", both)):
        work()
        synchronize(session)
        session.align()
        times, end = [], time.perf_counter() + seconds
        while not times or time.perf_counter() < end:
            begin = time.perf_counter()
            work()
            synchronize(session)
            times.append(time.perf_counter() - begin)
        rates[name] = count / sorted(times)[len(times) // 2]
    of_all = everyones(session, rates)
    return {name: sum(rank[name] for rank in of_all) / len(of_all) for name in rates}


def network_rate(session, size: int, iterations: int) -> float:
    """bytes/s each way of one rank by send and recv of CPU tensors in a circle: the same transport, and no sum."""
    row = session.measure("sendrecv", size, iterations=iterations, backends=["hybridps"], device="cpu", check=False)
    return row["bytes"] / row["backends"]["hybridps"]["seconds"]


# Jobs ------------------------------------------------------------------------------------------------------------


def allreduce(session, job):
    size = job["bytes"]
    tensor = torch.zeros(16, device=session.device)
    groups, refused = usable(session, lambda name, group: dist.all_reduce(tensor, group=group))
    row = session.measure("allreduce", size, iterations=job["iterations"], backends=list(groups))
    row["refused"] = refused
    if session.node_count > 1 and size >= 2**20 or session.device == "cpu":
        rates = row["staging_rates"] = staging_rates(session, size)
        wire = row["network_rate"] = network_rate(session, size, max(3, job["iterations"] // 2))
        nodes = session.node_count
        # A node is client and owner: 2 (n - 1) / n of the bytes leave it, and as many come.
        row["limits"] = {"staging": size / rates["both"], "network": 2 * (nodes - 1) / nodes * size / wire}
        row["limit_seconds"] = max(row["limits"].values())
        for figures in row["backends"].values():
            figures["of_limit"] = row["limit_seconds"] / figures["seconds"]
    return row


def seen_synchronisations(session, group, tensor, count: int) -> dict:
    """What of SYNCHRONISATIONS torch's profiler sees while `count` operations are enqueued; and whether it sees at all
    one that is made on purpose, by CUDA's runtime and by the driver."""
    if session.device == "cpu":
        return {"unknown": "CPU tensors"}
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile, record_function

    driver = ctypes.CDLL("libcuda.so.1")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        with record_function("on purpose, runtime"):
            torch.cuda.synchronize()
        with record_function("on purpose, driver"):
            driver.cuCtxSynchronize()
        with record_function("enqueueing"):
            works = [dist.all_reduce(tensor, group=group, async_op=True) for _ in range(count)]
            for work in works:
                work.wait()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CPU]
    spans = {event.name: event.time_range for event in events}

    def inside(name):
        span = spans[name]
        return sorted(
            event.name
            for event in events
            if event.name in SYNCHRONISATIONS
            and span.start <= event.time_range.start
            and event.time_range.end <= span.end
        )

    if not {"on purpose, runtime", "on purpose, driver", "enqueueing"} <= spans.keys():
        return {"unknown": "the profiler lost what it was to watch"}
    if not inside("on purpose, runtime"):
        return {"unknown": "the profiler does not even see torch.cuda.synchronize()"}
    return {"found": inside("enqueueing"), "operations": count, "sees_driver": bool(inside("on purpose, driver"))}


def waits_for_stream(session, group, tensor) -> bool | None:
    """Whether the call holds its thread up while the stream still computes what the operation is to have."""
    if session.device == "cpu":
        return None
    session.align()
    torch.cuda._sleep(400_000_000)  # a quarter of a second at 1.6 GHz
    computed = torch.cuda.Event()
    computed.record()
    dist.all_reduce(tensor, group=group, async_op=True).wait()
    waited = computed.query()
    torch.cuda.synchronize()
    return waited


def enqueue(session, job):
    tensor = torch.zeros(max(1, job["bytes"] // 4), device=session.device)
    groups, refused = usable(session, lambda name, group: dist.all_reduce(tensor, group=group))
    calls = {name: [] for name in groups}
    for index in range(5 + job["iterations"]):
        for name, group in groups.items():
            synchronize(session)
            session.align()
            begin = time.perf_counter()
            work = dist.all_reduce(tensor, group=group, async_op=True)
            took = time.perf_counter() - begin
            work.wait()
            if index >= 5:
                calls[name].append(took)
    synchronize(session)
    result = {"bytes": tensor.nbytes, "refused": refused, "backends": compared(session, calls)}
    for name, group in groups.items():
        own = {"seen": seen_synchronisations(session, group, tensor, 20)}
        own["waits_for_stream"] = waits_for_stream(session, group, tensor)
        of_all = everyones(session, own)
        result["backends"][name] |= {"synchronisations": [rank["seen"] for rank in of_all]}
        result["backends"][name] |= {"waits_for_stream": [rank["waits_for_stream"] for rank in of_all]}
    return result


def largest_difference(ours: list, theirs: list) -> float:
    """Largest difference of two lists of tensors, in units of the largest value."""
    apart = max(float((a.float() - b.float()).abs().max()) for a, b in zip(ours, theirs, strict=True))
    return apart / max(float(a.abs().max()) for a in ours)


def train(session, job, modules: dict, gradients) -> dict:
    """Steps of each module in turn, on the same tokens. `gradients(module)`: whole, on every rank."""
    optimizers = {name: torch.optim.SGD(module.parameters(), lr=1e-3) for name, module in modules.items()}
    times = {name: [] for name in modules}
    first = {}
    for step in range(3 + job["iterations"]):
        tokens = gpt.batch_of(job["model"], job["batch"], session.rank, step).to(session.device)
        for name, module in modules.items():
            synchronize(session)
            session.align()
            begin = time.perf_counter()
            torch.use_deterministic_algorithms(step == 0, warn_only=True)  # it is compared with other backends'
            optimizers[name].zero_grad()
            module(tokens).backward()
            if step == 0:
                first[name] = [gradient.cpu() for gradient in gradients(module)]
            optimizers[name].step()
            synchronize(session)
            if step >= 3:
                times[name].append(time.perf_counter() - begin)
    tokens = session.world * job["batch"] * gpt.SHAPES[job["model"]].context
    result = {"backends": compared(session, times), "tokens": tokens}
    for figures in result["backends"].values():
        figures["tokens_per_second"] = tokens / figures["seconds"]
    backends = [name for name in session.groups if name in first]
    apart = [largest_difference(first[backends[0]], first[other]) for other in backends[1:]]
    if apart:
        result["apart"] = max(max(ranks) for ranks in everyones(session, apart))
    return result


def parameters_of(module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def ddp(session, job):
    """DistributedDataParallel; the same without communication; the communication of its buckets alone."""
    dtype = getattr(torch, job["dtype"])
    probe = torch.zeros(16, dtype=dtype, device=session.device)
    groups, refused = usable(session, lambda name, group: dist.all_reduce(probe, group=group))

    def make():
        return gpt.make(job["model"]).to(session.device, dtype)

    modules = {
        name: torch.nn.parallel.DistributedDataParallel(make(), process_group=group) for name, group in groups.items()
    }
    modules["alone"] = make()
    result = train(session, job, modules, lambda module: [p.grad for p in module.parameters()])
    # Which of the backends compares with "alone" is no matter of ours.
    alone = result["backends"].pop("alone")
    logged = modules["hybridps"]._get_ddp_logging_data().get("rebuilt_bucket_sizes")
    sizes = [int(part) for part in logged.split(",")] if logged else [parameters_of(modules["alone"]) * dtype.itemsize]
    buckets = [torch.zeros(size // dtype.itemsize, dtype=dtype, device=session.device) for size in sizes]
    times = {name: [] for name in groups}
    for index in range(2 + job["iterations"]):
        for name, group in groups.items():
            synchronize(session)
            session.align()
            begin = time.perf_counter()
            for work in [dist.all_reduce(bucket, group=group, async_op=True) for bucket in buckets]:
                work.wait()
            synchronize(session)
            if index >= 2:
                times[name].append(time.perf_counter() - begin)
    communication = compared(session, times)
    for name in groups:
        figures = result["backends"][name]
        figures["communication_seconds"] = communication[name]["seconds"]
        shown = max(0.0, figures["seconds"] - alone["seconds"])
        figures["hidden"] = 1 - min(1.0, shown / communication[name]["seconds"])
    result |= {"refused": refused, "bytes": sum(sizes), "buckets": sizes, "alone_seconds": alone["seconds"]}
    return result | {"parameters": parameters_of(modules["alone"])}


def fsdp2(session, job):
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    kind = torch.device(session.device).type
    # Sums in fp32, so that gradients of two backends can be compared; what is gathered is half of that on a GPU.
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if kind == "cuda" else MixedPrecisionPolicy()

    def make(model, group):
        mesh = DeviceMesh.from_group(group, kind)
        module = gpt.make(model).to(session.device)
        for block in module.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        return fully_shard(module, mesh=mesh, mp_policy=policy)

    def attempt(name, group):
        module = make("tiny", group)
        module(gpt.batch_of("tiny", 1, session.rank, 0).to(session.device)).backward()
        for parameter in module.parameters():
            parameter.grad.full_tensor()

    groups, refused = usable(session, attempt)
    modules = {name: make(job["model"], group) for name, group in groups.items()}
    result = train(session, job, modules, lambda module: [p.grad.full_tensor() for p in module.parameters()])
    parameters = sum(parameter.numel() for parameter in modules["hybridps"].parameters())
    return result | {"refused": refused, "parameters": parameters}


def memory(session, job):
    """Bytes that this process holds, while many operations of three sizes go on."""
    extension = load_extension()
    group = session.groups["hybridps"]
    tensors = [torch.ones(count, device=session.device) for count in (10, 10_000, max(1, job["bytes"] // 4))]

    def held():
        synchronize(session)
        session.align()
        gc.collect()
        with open("/proc/self/statm") as file:
            bytes_ = {"resident": int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")}
        bytes_["pinned"] = extension.stats().get("pinned_bytes", 0)
        if session.device != "cpu":
            free, total = torch.cuda.mem_get_info()
            bytes_ |= {"allocated": torch.cuda.memory_allocated(), "device": total - free}
        return bytes_

    before, first = held(), None
    begin = time.perf_counter()
    for turn in range(job["rounds"]):
        dist.all_reduce(tensors[turn % 3], op=dist.ReduceOp.MAX, group=group, async_op=True)
        if turn % 50 == 49:
            synchronize(session)
            dist.barrier(group=group)
        if turn == job["rounds"] // 5:
            first = held()
    last = held()
    seconds = time.perf_counter() - begin
    wrong = sum(int((tensor != 1).sum()) for tensor in tensors)
    of_all = everyones(session, (before, first, last, wrong))
    result = {"bytes": tensors[2].nbytes, "rounds": job["rounds"], "wrong": sum(ranks[3] for ranks in of_all)}
    result |= {"backends": {"hybridps": {"seconds": seconds / job["rounds"]}}}
    return result | {"held": [{"before": b, "after_a_fifth": f, "at_the_end": e} for b, f, e, _ in of_all]}


JOBS = {"allreduce": allreduce, "enqueue": enqueue, "ddp": ddp, "fsdp2": fsdp2, "memory": memory}


def main() -> None:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or its sums are not the same each time
    context, store = json.loads(sys.argv[1]), sys.argv[sys.argv.index("--store") + 1]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    session = Session(
        context["backends"],
        context["timeout"],
        context["device"],
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
    )
    for job in context["jobs"]:
        before = load_of_machine()
        result = JOBS[job["do"]](session, job)
        result |= {"name": job["name"], "job": job, "load_before": before, "load_after": load_of_machine()}
        if session.device != "cpu":
            result["gpu"] = torch.cuda.get_device_name()
        if session.rank == 0:
            with open(context["results"], "a") as file:
                file.write(json.dumps(result) + "\n")
    session.close()


if __name__ == "__main__":
    main()
