"""Frameworks on top of c10d: the same training with the backend under test and with gloo (or in one process) ends in
the same parameters. Models are tiny; what matters is which collectives they issue, when and from where.
"""

import copy
import functools
import os
import tempfile

import harness
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness import lacks, run_ranks

run = functools.partial(run_ranks, fork_server=harness.framework_zygote)


def model_of(width=16, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))


def data_of(rank, step, rows=6):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, 8, generator=generator), torch.randn(rows, 4, generator=generator)


def flat(parameters):
    """Small enough to send back: one list of floats."""
    tensors = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in parameters]
    return torch.cat([t.detach().float().reshape(-1) for t in tensors]).tolist()


def train(model, rank, steps=4, optimizer=None, parameters=None, dtype=torch.float32):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        x, y = data_of(rank, step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x.to(dtype)).float(), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses + flat(parameters or model.parameters())


def single_process(world, steps=4):
    """The same training on the whole batch: with equal shards the mean gradient is the same."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        batches = [data_of(rank, step) for rank in range(world)]
        optimizer.zero_grad()
        x, y = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return flat(model.parameters())


def compare(function, nodes="2+2", rtol=1e-5, atol=1e-6, **options):
    """Runs on the backend under test and on gloo; results are {scenario: numbers}, compared rank by rank."""
    ours = run(function, nodes, destroy=not lacks("exit_in_callback"), **options)
    theirs = ours
    if harness.IS_HYBRIDPS:
        theirs = run(function, nodes, backend="gloo", destroy=False, **options)
    for rank, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for name, numbers in mine.items():
            if name in other:
                got, want = torch.tensor(numbers, dtype=torch.float64), torch.tensor(other[name], dtype=torch.float64)
                torch.testing.assert_close(
                    got, want, rtol=rtol, atol=atol, msg=lambda m, r=rank, n=name: f"rank {r}, {n}: {m}"
                )
            if name.startswith("same"):
                assert numbers == ours[0][name], f"{name}: ranks 0 and {rank} differ"
    print(f"{function.__name__} on {nodes}: {len(ours[0])} scenarios, {ours.seconds:.1f} s, cpu {ours.cpu_s:.1f} s")
    return ours


# --------------------------------------------------------------------------------------------------------- DDP


class Branches(nn.Module):
    """A branch that only even steps use."""

    def __init__(self):
        super().__init__()
        self.body, self.extra, self.step = model_of(), nn.Linear(4, 4), 0

    def forward(self, x):
        self.step += 1
        out = self.body(x)
        return self.extra(out) if self.step % 2 else out


class WithBuffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm = model_of(), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.body(x))


def ddp_all(rank, world):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel as DDP

    results = {}

    def scenario(name, model=None, prepare=None, **options):
        wrapped = DDP(model or model_of(), **options)
        if prepare:
            prepare(wrapped)
        numbers = train(wrapped, rank)
        results[f"{name}: losses"], results[f"same {name}"] = numbers[:4], numbers[4:]

    scenario("plain")
    scenario("small buckets", bucket_cap_mb=0.001)
    scenario("bucket views", gradient_as_bucket_view=True, bucket_cap_mb=0.001)
    scenario("static graph", static_graph=True, bucket_cap_mb=0.001)
    scenario("unused parameters", Branches(), find_unused_parameters=True, bucket_cap_mb=0.001)
    scenario("no broadcast of buffers", WithBuffers(), broadcast_buffers=False)
    scenario("larger", model_of(512), bucket_cap_mb=0.5)

    # Accumulation under no_sync.
    model = DDP(model_of(), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        x, y = data_of(rank, step)
        if step % 2 == 0:
            optimizer.zero_grad()
            with model.no_sync():
                nn.functional.mse_loss(model(x), y).backward()
        else:
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    results["same no_sync"] = flat(model.parameters())

    # Buffers follow rank 0.
    model = DDP(WithBuffers())
    train(model, rank)
    with torch.no_grad():
        model(data_of(rank, 9)[0])
    results["buffers"] = flat(model.module.norm.buffers())

    # Uneven inputs.
    model = DDP(model_of(), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for step in range(2 + rank):
            x, y = data_of(rank, step)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    results["same join"] = flat(model.parameters())

    # Hooks.
    scenario("allreduce hook", prepare=lambda m: m.register_comm_hook(None, default_hooks.allreduce_hook))

    def own_hook(state, bucket):
        future = dist.all_reduce(bucket.buffer().div_(world), async_op=True).get_future()
        return future.then(lambda f: f.value()[0] * 1.0)

    scenario("own hook", prepare=lambda m: m.register_comm_hook(None, own_hook), bucket_cap_mb=0.001)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )
    scenario("powerSGD", prepare=lambda m: m.register_comm_hook(state, powerSGD_hook.powerSGD_hook))
    return results


@pytest.mark.parametrize("nodes", ["2+2", "2+1+1"])
def test_ddp(nodes):
    results = compare(ddp_all, nodes)
    want = torch.tensor(single_process(len(results)))
    got = torch.tensor(results[0]["same plain"])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def ddp_half_hooks(rank, world):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from torch.nn.parallel import DistributedDataParallel as DDP

    results = {}
    for name in ["fp16_compress_hook", "bf16_compress_hook"]:
        model = DDP(model_of(), bucket_cap_mb=0.001)
        model.register_comm_hook(None, getattr(default_hooks, name))
        results[f"same {name}"] = train(model, rank)[4:]
    return results


def test_ddp_with_half_precision_hooks():
    compare(ddp_half_hooks, rtol=2e-2, atol=5e-3)


def zero_all(rank, world):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel as DDP

    model = DDP(model_of(32))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    numbers = train(model, rank, optimizer=optimizer)
    reference = DDP(model_of(32))
    plain = train(reference, rank, optimizer=torch.optim.Adam(reference.parameters(), lr=0.01))
    difference = (torch.tensor(numbers) - torch.tensor(plain)).abs().max().item()
    assert difference < 1e-6, difference
    optimizer.consolidate_state_dict(to=0)
    return {"same zero": numbers[4:]}


def test_zero_redundancy_optimizer():
    compare(zero_all)


def post_local_sgd(rank, world):
    import torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook as post_local
    import torch.distributed.algorithms.model_averaging.averagers as averagers
    from torch.distributed.optim import PostLocalSGDOptimizer
    from torch.nn.parallel import DistributedDataParallel as DDP

    node, _ = dist.new_subgroups(2)
    model = DDP(model_of())
    state = post_local.PostLocalSGDState(process_group=None, subgroup=node, start_localSGD_iter=2)
    model.register_comm_hook(state, post_local.post_localSGD_hook)
    averager = averagers.PeriodicModelAverager(period=2, warmup_steps=2)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), averager)
    return {"post-local SGD": train(model, rank, steps=6, optimizer=optimizer)[6:]}


def test_post_local_sgd():
    compare(post_local_sgd)


# -------------------------------------------------------------------------------------------------------- FSDP


def fsdp2(rank, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    results = {}

    def scenario(name, mesh, policy=None, factor=None, force_sum=False, **options):
        model = model_of()
        if policy:
            options["mp_policy"] = policy
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
        if factor:
            for module in model.modules():
                if hasattr(module, "set_gradient_divide_factor"):
                    module.set_gradient_divide_factor(factor)
        if force_sum:
            for module in model.modules():
                if hasattr(module, "set_force_sum_reduction_for_comms"):
                    module.set_force_sum_reduction_for_comms(True)
        results[f"same {name}"] = train(model, rank)[4:]

    flat_mesh = init_device_mesh("cpu", (world,))
    grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    scenario("fsdp2 fp32", flat_mesh)
    scenario("fsdp2 no reshard", flat_mesh, reshard_after_forward=False)
    scenario("hsdp fp32", grid)
    scenario("fsdp2 sums", flat_mesh, force_sum=True)
    if dist.get_backend() != "gloo":  # PREMUL_SUM
        scenario("fsdp2 premul", flat_mesh, factor=2.0 * world)
        scenario("hsdp premul", grid, factor=2.0 * world)
    return results


@pytest.mark.parametrize("nodes", ["2+2", "1+1+1+1"])
def test_fsdp2_and_hsdp(nodes):
    results = compare(fsdp2, nodes)
    want = torch.tensor(single_process(len(results)))
    for name in ["same fsdp2 fp32", "same hsdp fp32", "same fsdp2 sums"]:
        torch.testing.assert_close(torch.tensor(results[0][name]), want, rtol=1e-4, atol=1e-5)
    if harness.IS_HYBRIDPS:
        a, b = (torch.tensor(results[0][name]) for name in ["same fsdp2 premul", "same hsdp premul"])
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def fsdp2_bf16(rank, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    results = {}
    for name, reduce_dtype in [("bf16", torch.bfloat16), ("bf16 reduced in fp32", torch.float32)]:
        model = model_of()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)), mp_policy=policy)
        results[f"same {name}"] = train(model, rank)[4:]
    return results


def test_fsdp2_in_bf16():
    compare(fsdp2_bf16, rtol=3e-2, atol=1e-2)


def fsdp1(rank, world):
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    results = {}
    for strategy in [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]:
        model = FullyShardedDataParallel(
            model_of(), sharding_strategy=strategy, device_id=torch.device("cpu"), use_orig_params=True
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        results[strategy.name] = train(model, rank, optimizer=optimizer)[:4]
        with FullyShardedDataParallel.summon_full_params(model):
            results[f"same {strategy.name}"] = flat(model.parameters())
    return results


def test_fsdp1():
    results = compare(fsdp1)
    want = torch.tensor(single_process(len(results)))
    torch.testing.assert_close(torch.tensor(results[0]["same FULL_SHARD"]), want, rtol=1e-4, atol=1e-5)


# -------------------------------------------------------------------------------------- DTensor, TP, pipelines


def dtensors(rank, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("x", "y"))
    whole = torch.arange(float(10 * 12)).reshape(10, 12)  # 10 is not divisible by 4: uneven shards
    for source in [[Shard(0)], [Shard(1)], [Replicate()]]:
        for target in [[Shard(0)], [Shard(1)], [Replicate()]]:
            got = distribute_tensor(whole, mesh, source).redistribute(mesh, target).full_tensor()
            assert torch.equal(got, whole), (source, target)
    for target in [[Shard(0)], [Replicate()]]:
        partial = DTensor.from_local(whole * (rank + 1), mesh, [Partial()])
        got = partial.redistribute(mesh, target).full_tensor()
        assert torch.equal(got, whole * (world * (world + 1) // 2)), target
    for source in [[Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(1), Replicate()]]:
        got = distribute_tensor(whole, grid, source)
        assert torch.equal(got.full_tensor(), whole)
        assert torch.equal((got @ got.T.redistribute(grid, [Replicate(), Replicate()])).full_tensor(), whole @ whole.T)
    a = distribute_tensor(whole, mesh, [Shard(0)])
    assert torch.equal(a.sum().full_tensor(), whole.sum())
    assert torch.allclose(a.mean(0).full_tensor(), whole.mean(0))
    return {"same dtensor": [1.0]}


def tensor_parallel(rank, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (world,))

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(3)
            self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

        def forward(self, x):
            return self.down(torch.relu(self.up(self.norm(x))))

    x = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(5))
    reference = Block()
    reference(x).square().sum().backward()
    results = {}
    for name, plan in {
        "tensor parallel": {"up": ColwiseParallel(), "down": RowwiseParallel()},
        "sequence parallel": {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Replicate()),
        },
    }.items():
        model = parallelize_module(Block(), mesh, plan)
        if name == "sequence parallel":
            prepare = PrepareModuleInput(input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),))
            model = parallelize_module(model, mesh, prepare)
        out = model(x)
        out.square().sum().backward()
        assert torch.allclose(out.detach(), reference(x).detach(), atol=1e-5)
        for (label, got), want in zip(model.named_parameters(), reference.parameters(), strict=True):
            gradient = got.grad.full_tensor() if hasattr(got.grad, "full_tensor") else got.grad
            assert torch.allclose(gradient, want.grad, atol=1e-4), f"{name} {label}"
        results[name] = out.detach().reshape(-1).tolist()
    return results


@pytest.mark.parametrize("nodes", ["2+2", "2+1+1"])
def test_dtensor_and_tensor_parallel(nodes):
    compare(dtensors, nodes)
    compare(tensor_parallel, nodes)


def pipelines(rank, world):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    def layer(index):
        torch.manual_seed(index)
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    y = torch.randn(8, 8, generator=torch.Generator().manual_seed(2))
    device = torch.device("cpu")

    def reference(count):
        layers = [layer(i) for i in range(count)]
        loss = nn.functional.mse_loss(nn.Sequential(*layers)(x), y)
        loss.backward()
        return layers

    results = {}
    for name, make, per_rank in [
        ("gpipe", ScheduleGPipe, 1),
        ("1f1b", Schedule1F1B, 1),
        ("interleaved", ScheduleInterleaved1F1B, 2),
    ]:
        count = world * per_rank
        modules = {index: layer(index) for index in range(rank, count, world)}
        stages = [PipelineStage(module, index, count, device) for index, module in modules.items()]
        options = {"n_microbatches": 8 if per_rank > 1 else 4, "loss_fn": nn.functional.mse_loss}
        schedule = make(stages if per_rank > 1 else stages[0], **options)
        losses = []
        arguments = (x,) if rank == 0 else ()
        if rank == world - 1:
            schedule.step(*arguments, target=y, losses=losses)
        else:
            schedule.step(*arguments)
        whole = reference(count)
        for index, module in modules.items():
            for got, want in zip(module.parameters(), whole[index].parameters(), strict=True):
                assert torch.allclose(got.grad, want.grad, atol=1e-5), f"{name} stage {index}"
        results[name] = [float(loss) for loss in losses]
    return results


@pytest.mark.parametrize("nodes", ["2+2", "1+1"])
def test_pipelines(nodes):
    compare(pipelines, nodes)


# ----------------------------------------------------------------------------------------------- other patterns


def experts(rank, world):
    """Mixture of experts: uneven all_to_all there and back, with gradients, some experts idle."""
    import torch.distributed._functional_collectives as funcol

    torch.manual_seed(rank)
    tokens = torch.randn(20, 8, requires_grad=True)
    expert = nn.Linear(8, 8)
    with torch.no_grad():
        expert.weight.copy_(torch.eye(8) * (rank + 1))
        expert.bias.fill_(0.5)
    route = (torch.arange(20) * (rank + 1)) % max(world - 1, 1)  # the last expert gets nothing
    order = torch.argsort(route, stable=True)
    send = torch.bincount(route, minlength=world)
    receive = torch.empty_like(send)
    dist.all_to_all_single(receive, send)
    send, receive = send.tolist(), receive.tolist()
    inbox = funcol.all_to_all_single_autograd(tokens[order], receive, send, dist.group.WORLD)
    outbox = funcol.all_to_all_single_autograd(expert(inbox), send, receive, dist.group.WORLD)
    result = torch.empty_like(tokens).index_copy(0, order, outbox)
    want = tokens * (route + 1.0)[:, None] + 0.5
    assert torch.allclose(result, want, atol=1e-6)
    result.sum().backward()
    assert torch.allclose(tokens.grad, (route + 1.0)[:, None].expand(20, 8))
    return {"experts": result.detach().reshape(-1).tolist()}


def test_mixture_of_experts():
    compare(experts)


def checkpoints(rank, world, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (world,))
    model, fresh = model_of(), model_of(seed=9)
    fully_shard(model, mesh=mesh)
    fully_shard(fresh, mesh=mesh)
    path = os.path.join(folder, dist.get_backend())
    dcp.save({"model": model.state_dict(), "step": 7}, checkpoint_id=path)
    state = {"model": fresh.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=path)
    assert flat(fresh.parameters()) == flat(model.parameters()) and state["step"] == 7
    return {"same checkpoint": flat(fresh.parameters())}


def test_distributed_checkpoint():
    with tempfile.TemporaryDirectory() as folder:
        compare(checkpoints, args=(folder,))


def clip_and_debug(rank, world):
    """DETAIL wraps the group and checks every call; clip_grad_norm_ over shards reduces scalars."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = model_of()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    x, y = data_of(rank, 0)
    nn.functional.mse_loss(model(x), y).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return {"same norm": [norm.item()]}


@pytest.mark.parametrize("level", ["OFF", "DETAIL"])
def test_clipping_and_debug_levels(level):
    compare(clip_and_debug, env={"TORCH_DISTRIBUTED_DEBUG": level})


def compiled(rank, world):
    """Functional collectives inside torch.compile."""
    import torch.distributed._functional_collectives as funcol

    group = dist.group.WORLD

    def step(x):
        y = funcol.all_reduce(x * 2, "sum", group)
        z = funcol.all_gather_tensor(y + 1, 0, group)
        return funcol.reduce_scatter_tensor(z, "sum", 0, group) - x

    x = torch.arange(12.0).reshape(4, 3) + rank
    want = step(x)
    got = torch.compile(step, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(torch.as_tensor(got), torch.as_tensor(want + 0))
    return {"compiled": got.reshape(-1).tolist()}


def test_compiled_functional_collectives():
    compare(compiled)


def copies(rank, world):
    """Groups and meshes in places where frameworks copy or pickle things."""
    import pickle

    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world,))
    again = pickle.loads(pickle.dumps(mesh))
    assert again.size() == world
    if dist.get_backend() != "gloo":  # its options cannot be copied: "cannot pickle"
        options = copy.deepcopy(dist.group.WORLD._get_backend(torch.device("cpu")).options)
        assert options is not None
    return {"same copies": [1.0]}


def test_what_frameworks_copy():
    compare(copies)
