"""Unmodified torch on the simulated device and on CPU tensors of the same group: the same program, the same bits."""

import contextlib
import time

import sim
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

MODEL = (24, 96, 32)


def model(where, seed=3):
    torch.manual_seed(seed)
    wide, inner, last = MODEL
    layers = [
        torch.nn.Linear(wide, inner),
        torch.nn.GELU(),
        torch.nn.Linear(inner, inner),
        torch.nn.Tanh(),
        torch.nn.Linear(inner, last),
    ]
    return torch.nn.Sequential(*layers).to(where)


def inputs(step, rank, where):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, MODEL[0], generator=generator).to(where)


def train(module, rank, where, steps=3, accumulate=1, context=None, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        for part in range(accumulate):
            last = part + 1 == accumulate
            with contextlib.nullcontext() if last or context is None else context():
                loss = module(inputs(10 * step + part, rank, where)).square().mean()
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).cpu(), [whole(p).detach().cpu().clone() for p in module.parameters()]


def whole(parameter):
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def same_bits(what, ours, theirs):
    assert torch.equal(ours[0], theirs[0]), f"{what}: losses {ours[0]} instead of {theirs[0]}"
    for number, (mine, other) in enumerate(zip(ours[1], theirs[1], strict=True)):
        assert torch.equal(mine, other), f"{what}: parameter {number} differs by {(mine - other).abs().max()}"


def both(what, device, body):
    """`body(where)` on both kinds of tensors, to the same bits."""
    same_bits(what, body(device), body("cpu"))


def ddp(rank, world, device):
    """Buckets, views of buckets, static graph, accumulation, hooks, join."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    def plain(where, **options):
        return DistributedDataParallel(model(where), bucket_cap_mb=0.02, **options)

    both("ddp", device, lambda where: train(plain(where), rank, where))
    both("views", device, lambda where: train(plain(where, gradient_as_bucket_view=True), rank, where))
    both("static graph", device, lambda where: train(plain(where, static_graph=True), rank, where))
    both("unused", device, lambda where: train(plain(where, find_unused_parameters=True), rank, where))

    def accumulated(where):
        module = plain(where, gradient_as_bucket_view=True)
        return train(module, rank, where, accumulate=3, context=module.no_sync)

    both("no_sync", device, accumulated)
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook):

        def hooked(where, hook=hook):
            module = plain(where)
            module.register_comm_hook(None, hook)
            return train(module, rank, where)

        both(hook.__name__, device, hooked)

    def own_hook(where):
        """Further work on the bucket in the future's callback, on its stream."""
        module = plain(where)

        def hook(state, bucket):
            buffer = bucket.buffer().mul_(2)
            future = dist.all_reduce(buffer, async_op=True).get_future()
            return future.then(lambda done: done.value()[0].div_(2 * world))

        module.register_comm_hook(None, hook)
        return train(module, rank, where)

    both("own hook", device, own_hook)

    def joined(where):
        module = plain(where)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with module.join():
            for step in range(2 + rank):
                module(inputs(step, rank, where)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return torch.zeros(1), [p.detach().cpu().clone() for p in module.parameters()]

    both("join", device, joined)


def fsdp(rank, world, device):
    """fully_shard over all ranks, and HSDP where there are four."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def sharded(where, shape, names, **options):
        kind = torch.device(where).type
        mesh = init_device_mesh(kind, shape, mesh_dim_names=names)
        module = model(where)
        for layer in module:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh, **options)
        fully_shard(module, mesh=mesh, **options)
        return module

    shapes = [((world,), ("shard",))] + ([((2, world // 2), ("replicate", "shard"))] if world % 2 == 0 else [])
    for shape, names in shapes:
        for reshard in (True, False):
            both(
                f"fsdp2 {shape} {reshard}",
                device,
                lambda where, s=shape, n=names, r=reshard: train(
                    sharded(where, s, n, reshard_after_forward=r), rank, where
                ),
            )


def coded(rank, world, device):
    """DDP whose gradients go between nodes by int8, with the bits of CPU tensors. Returns the elements of a step's gradients, and what
    a step copies between device and host."""
    both("buckets", device, lambda where: train(DistributedDataParallel(model(where), bucket_cap_mb=0.02), rank, where))

    def averaged(where):
        module = DistributedDataParallel(model(where))

        def hook(state, bucket):
            work = dist.all_reduce(bucket.buffer(), op=dist.ReduceOp.AVG, async_op=True)
            return work.get_future().then(lambda done: done.value()[0])

        module.register_comm_hook(None, hook)
        return train(module, rank, where)

    both("averages", device, averaged)
    module = DistributedDataParallel(model(device))  # one bucket
    copied = []
    for step in range(2):
        loss = module(inputs(step, rank, device)).square().mean()
        torch.sim.synchronize()
        before = sim.native().copied_bytes(0)
        loss.backward()
        torch.sim.synchronize()
        after = sim.native().copied_bytes(0)
        copied.append((after[0] - before[0], after[1] - before[1]))
    return sum(p.numel() for p in module.parameters()), copied


def functional(rank, world, device):
    import torch.distributed._functional_collectives as funcol

    group = dist.group.WORLD
    for turn in range(5):
        results = []
        for where in (device, "cpu"):
            generator = torch.Generator().manual_seed(50 * turn + rank)
            x = torch.randn(1000 * world, generator=generator).to(where)
            y = funcol.all_reduce(x * 2, "sum", group) + 1
            z = funcol.reduce_scatter_tensor(y, "sum", 0, group)
            w = funcol.all_gather_tensor(z * z, 0, group)
            v = funcol.all_to_all_single(w, None, None, group)
            results.append(funcol.broadcast(v, 0, group).cpu())
        assert torch.equal(*results)


def pipeline(rank, world, device):
    """A stage a rank; activations and gradients by send and recv, two microbatches under way."""
    results = []
    for where in (device, "cpu"):
        torch.manual_seed(7 + rank)
        stage = torch.nn.Linear(32, 32).to(where)
        optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
        for step in range(3):
            kept, sends = [], []
            for micro in range(2):
                if rank == 0:
                    x = torch.full((4, 32), float(step + micro), device=where)
                else:
                    x = torch.empty(4, 32, device=where)
                    dist.irecv(x, rank - 1).wait()
                    x.requires_grad_()
                y = torch.tanh(stage(x))
                kept.append((x, y))
                if rank + 1 < world:
                    sends.append(dist.isend(y.detach(), rank + 1))
            for x, y in reversed(kept):
                if rank + 1 == world:
                    y.square().mean().backward()
                else:
                    gradient = torch.empty_like(y)
                    dist.irecv(gradient, rank + 1).wait()
                    y.backward(gradient)
                if rank > 0:
                    sends.append(dist.isend(x.grad, rank - 1))
            for work in sends:
                work.wait()
            optimizer.step()
            optimizer.zero_grad()
        results.append([p.detach().cpu() for p in stage.parameters()])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def works(rank, world, device):
    """What c10d promises of Work and its future for devices."""
    module = torch.get_device_module(device)
    t = torch.ones(1 << 16, device=device)
    dist.all_reduce(t)  # streams and staging exist now
    module.synchronize()
    dist.barrier()
    t.fill_(1)
    module.busy(2000)
    begin = time.perf_counter()
    work = dist.all_reduce(t, async_op=True)
    future = work.get_future()
    seen = []
    after = future.then(lambda done: (seen.append(module.current_stream()), done.value()[0] + 1)[1])
    work.wait()
    assert future.done() and seen, "the callback runs when it is added: its value is the stream's matter"
    assert not work.is_completed(), "the stream has not come to it"
    waited = time.perf_counter() - begin
    assert seen[0] != module.current_stream(), "a callback has a stream of its own"
    assert torch.equal(after.wait().cpu(), torch.full((1 << 16,), float(world + 1)))
    module.synchronize()
    deadline = time.monotonic() + 20
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert work.is_completed() and work.is_success() and work.exception() is None
    result = work.get_future_result()
    assert result.wait() is not None
    assert torch.equal(t.cpu(), torch.full((1 << 16,), float(world)))
    return waited


def everything(rank, world, device):
    ddp(rank, world, device)
    functional(rank, world, device)
    pipeline(rank, world, device)
    return works(rank, world, device)


def by_rails(rank, world, device):
    """DDP and functional collectives where the ranks of a node have a library; that they use it is looked at."""
    ddp(rank, world, device)
    functional(rank, world, device)
    calls = sim.native().library_calls()
    assert calls > 20, f"{calls} calls of the library"


def as_nccl(rank, world):
    """HYBRIDPS_AS=nccl: a program of NCCL's with its own options, like Megatron. Returns whether torch has them."""
    from hybridps.backend import stand_in
    from zygote import context

    stand_in.install()
    sim.install()
    if not hasattr(dist, "ProcessGroupNCCL"):
        return False
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    context.init(backend="cpu:nccl,sim:nccl")
    named = dist.new_group(backend="cpu:nccl,sim:nccl", pg_options=options)
    for group in (None, dist.new_group(pg_options=options), named):
        t = torch.full((1000,), float(rank), device="sim:0")
        dist.all_reduce(t, group=group)
        assert torch.equal(t.cpu(), torch.full((1000,), float(sum(range(world)))))
        assert (group or dist.group.WORLD)._get_backend(torch.device("sim")).name() == "hybridps"
    return True
