"""Overlap and host time as numbers, on the simulated device: emulated kernels of known length, two ranks as two nodes.

    python tests/simulated/measure.py

Host time: how long each collective's call takes, medians of 200, in microseconds; the stream is far behind meanwhile. Beside
it a call of gloo's on CPU tensors.
Overlap: a DDP step beside max(backward + last bucket, first bucket's backward + communication), of parts that were
measured alone, in turn with the steps; medians. No test asserts a time; a busy machine shows in both.
"""

import os
import statistics
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [HERE, os.path.join(os.path.dirname(HERE), "multiprocess"), os.path.join(os.path.dirname(HERE), "gpu")]

import harness  # noqa: E402
import on_device  # noqa: E402

LAYERS = 8
LAYER_MS = 12
LAYER_ELEMENTS = 1 << 20  # 4 MiB a bucket
HOST_CALLS = 200


def host_time(rank, world, device):
    import torch
    import torch.distributed as dist

    module = torch.get_device_module(device)
    many = 16_384
    t, out, wide = (torch.ones(n, device=device) for n in (many, many * world, many * world))
    part, sent, got = (torch.ones(many, device=device) for _ in range(3))
    after, before = (rank + 1) % world, (rank - 1) % world
    calls = {
        "all_reduce": lambda: dist.all_reduce(t, op=dist.ReduceOp.MAX, async_op=True),
        "broadcast": lambda: dist.broadcast(t, 0, async_op=True),
        "all_gather": lambda: dist.all_gather_into_tensor(out, part, async_op=True),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, wide, async_op=True),
        "all_to_all": lambda: dist.all_to_all_single(out, wide, async_op=True),
        "isend": lambda: dist.isend(sent, after),
        "irecv": lambda: dist.irecv(got, before),
    }
    times = {name: [] for name in calls}
    for turn in range(HOST_CALLS + 5):
        module.busy(3)
        works = []
        for name, call in calls.items():
            begin = time.perf_counter()
            work = call()
            times[name].append(1e6 * (time.perf_counter() - begin))
            works.append(work)
            work.wait() if name != "isend" else None
        for work in works:
            work.wait()
        if turn % 20 == 0:
            module.synchronize()
            dist.barrier()
    module.synchronize()
    return {name: statistics.median(values[5:]) for name, values in times.items()}


def peer(rank, world, device):
    """What such a call takes here with another backend, on tensors of the host: torch's own part of it, and this machine's."""
    import torch
    import torch.distributed as dist

    gloo, tensor = dist.new_group(backend="gloo"), torch.ones(16_384)
    times = []
    for turn in range(HOST_CALLS + 5):
        time.sleep(0.003)
        begin = time.perf_counter()
        work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=gloo, async_op=True)
        times.append(1e6 * (time.perf_counter() - begin))
        work.wait()
    return {"gloo, CPU": statistics.median(times[5:])}


def overlap(rank, world, device):
    import torch
    import torch.distributed as dist

    module = torch.get_device_module(device)

    class Busy(torch.autograd.Function):
        @staticmethod
        def forward(context, x, weight):
            context.save_for_backward(weight)
            return x * 1

        @staticmethod
        def backward(context, gradient):
            (weight,) = context.saved_tensors
            module.busy(LAYER_MS)
            return gradient, torch.ones_like(weight)

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(LAYER_ELEMENTS))

        def forward(self, x):
            return Busy.apply(x, self.weight)

    net = torch.nn.Sequential(*[Layer() for _ in range(LAYERS)]).to(device)
    ddp = torch.nn.parallel.DistributedDataParallel(
        net, bucket_cap_mb=4 * LAYER_ELEMENTS / 2**20, gradient_as_bucket_view=True
    )
    x = torch.ones(1, device=device, requires_grad=True)
    bucket = torch.ones(LAYER_ELEMENTS, device=device)

    def timed(body):
        module.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        body()
        module.synchronize()
        return 1e3 * (time.perf_counter() - begin)

    def step():
        ddp(x).sum().backward()

    def alone():
        with ddp.no_sync():
            ddp(x).sum().backward()

    def buckets(count):
        for work in [dist.all_reduce(bucket, op=dist.ReduceOp.MAX, async_op=True) for _ in range(count)]:
            work.wait()

    for _ in range(3):
        step()
        alone()
        buckets(LAYERS)
    rows = {"step": [], "backward": [], "one bucket": [], "all buckets": []}
    for _ in range(15):
        rows["step"].append(timed(step))
        rows["backward"].append(timed(alone))
        rows["one bucket"].append(timed(lambda: buckets(1)))
        rows["all buckets"].append(timed(lambda: buckets(LAYERS)))
    found = {name: statistics.median(values) for name, values in rows.items()}
    found["formula"] = max(
        found["backward"] + found["one bucket"], found["backward"] / LAYERS + found["all buckets"]
    )
    return found


def main():
    environment = {"SIMULATED_PAUSE_US": "0", "SIMULATED_QUEUES": "8"}
    for body in ("host_time", "peer", "overlap"):
        results = harness.run_ranks(
            on_device.on_simulated, "1+1", args=(f"measure:{body}", "sim:0"), env=environment, init=False
        )
        for name in results[0]:
            unit = "ms" if body == "overlap" else "us"
            print(f"{body:10} {name:16} {max(result[name] for result in results):9.1f} {unit}")
        if body == "overlap":
            worst = min(result["formula"] / result["step"] for result in results)
            print(f"overlap    formula / step   {100 * worst:9.1f} %")


if __name__ == "__main__":
    main()
