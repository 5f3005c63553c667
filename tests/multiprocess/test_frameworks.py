"""More of what sits on top of c10d, each compared with gloo, with one process, or with the same thing done plainly.
test_ddp.py has the common cases; here are the ones that combine layers or wait in unusual places.
"""

import os
import subprocess
import sys
import tempfile
import textwrap

import harness
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from harness import IS_GLOO
from test_ddp import compare, data_of, flat, model_of, run, single_process, train

# ------------------------------------------------------------------------------------------- attention and experts


def context_parallel(rank, world):
    """Ring attention: keys and values travel, by all_gather or by permutations; gradients travel back."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    aten = torch.ops.aten
    generator = torch.Generator().manual_seed(3)
    whole = [torch.randn(2, 2, 4 * world, 8, generator=generator) for _ in range(4)]
    mine = [tensor.chunk(world, dim=2)[rank].contiguous() for tensor in whole]

    def forward(query, key, value, is_causal):
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, is_causal)
        return out, lse

    def backward(grad_out, query, key, value, out, logsumexp, is_causal):
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out, query, key, value, out, logsumexp, 0.0, is_causal
        )

    results = {}
    options = ring._cp_options
    for rotation in ["allgather", "alltoall"]:
        ring.set_rotate_method(rotation)
        for causal in [False, True]:
            options.enable_load_balance = False
            query, key, value, grad = mine
            group = dist.group.WORLD
            out, lse = ring._templated_ring_attention(group, 2, forward, query, key, value, is_causal=causal)
            grads = ring._templated_ring_attention_backward(
                group, 2, backward, grad, "grad_out", query, key, value, out, lse, causal
            )
            leaves = [tensor.clone().requires_grad_() for tensor in whole[:3]]
            want = nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal)
            want.backward(whole[3])
            for got, full in zip([out, *grads[:3]], [want.detach(), *(leaf.grad for leaf in leaves)], strict=True):
                torch.testing.assert_close(got, full.chunk(world, dim=2)[rank], rtol=1e-4, atol=1e-5)
            results[f"{rotation} causal {causal}"] = out.reshape(-1).tolist()
    return results


@pytest.mark.parametrize("nodes", ["2+2", "1+1"])
def test_context_parallel_attention(nodes):
    compare(context_parallel, nodes)


def functional_gradients(rank, world):
    """torch.distributed.nn.functional: collectives whose backward is a collective."""
    import torch.distributed.nn.functional as functional

    results = {}

    def leaf(rows=world):
        return (torch.arange(rows * 3.0).reshape(rows, 3) + rank).requires_grad_()

    def note(name, out, *leaves):
        weights = torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape) + rank
        (out * weights).sum().backward()
        results[name] = torch.cat([out.detach().reshape(-1), *(x.grad.reshape(-1) for x in leaves)]).tolist()

    x = leaf()
    note("all_reduce", functional.all_reduce(x * 2), x)
    x = leaf()
    note("all_gather", torch.cat(functional.all_gather(x * 2)), x)
    x = leaf()
    note("reduce_scatter", functional.reduce_scatter(torch.empty(1, 3), list((x * 2).split(1))), x)
    x = leaf()
    note("all_to_all_single", functional.all_to_all_single(torch.empty(world, 3), x * 2), x)
    x = leaf()
    note("broadcast", functional.broadcast(x * 2, 0), x)
    return results


def test_collectives_with_gradients():
    compare(functional_gradients)


# ------------------------------------------------------------------------------------------------ shards and meshes


def shards_of_shards(rank, world):
    """Fully sharded data parallel around tensor parallel, on a 2-D mesh; then DTensor's loss and norms."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(model_of(), mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        x, y = data_of(rank // 2, step)  # ranks of one tensor-parallel group see the same data
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    results = {"same 2-D": flat(model.parameters())}
    want = torch.tensor(single_process(2))
    torch.testing.assert_close(torch.tensor(results["same 2-D"]), want, rtol=1e-4, atol=1e-5)

    torch.manual_seed(1)
    tokens, labels = torch.randn(6, 8), torch.arange(6) % 12
    head = nn.Linear(8, 12)
    reference = nn.functional.cross_entropy(head(tokens), labels)
    flat_mesh = init_device_mesh("cpu", (world,))
    plan = ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=False)
    head = parallelize_module(head, flat_mesh, plan)
    with loss_parallel():
        loss = nn.functional.cross_entropy(head(tokens), labels)
        loss.backward()
    loss = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
    torch.testing.assert_close(loss.detach(), reference.detach())
    results["same loss"] = [loss.item()]
    return results


def test_sharding_around_tensor_parallel():
    compare(shards_of_shards)


def fsdp1_more(rank, world):
    """Mixed precision, hybrid sharding and full state dictionaries of the first FSDP."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, StateDictType

    results = {}
    device = torch.device("cpu")
    low = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    for name, options in {
        "hybrid": {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh},
        "bf16": {"mixed_precision": low},
    }.items():
        model = FSDP(model_of(), device_id=device, use_orig_params=True, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        train(model, rank, optimizer=optimizer)
        model.clip_grad_norm_(1.0)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            state = model.state_dict()
        results[f"same {name}"] = flat(state.values())
    return results


def test_fsdp1_hybrid_and_bf16():
    results = compare(fsdp1_more, rtol=3e-2, atol=1e-2)
    want = torch.tensor(single_process(len(results)))
    torch.testing.assert_close(torch.tensor(results[0]["same hybrid"]), want, rtol=1e-4, atol=1e-5)


def fsdp2_accumulation(rank, world):
    """Gradients gathered over several backward passes, no reshard in between, and explicit prefetching."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = model_of()
    mesh = init_device_mesh("cpu", (world,))
    layers = [layer for layer in model if isinstance(layer, nn.Linear)]
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    layers[0].set_modules_to_forward_prefetch(layers[1:])
    layers[2].set_modules_to_backward_prefetch(layers[:2])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(4):
        model.set_requires_gradient_sync(step % 2 == 1)
        x, y = data_of(rank, step)
        nn.functional.mse_loss(model(x), y).backward()
        if step % 2 == 1:
            optimizer.step()
            optimizer.zero_grad()
    return {"same accumulation": flat(model.parameters())}


def test_fsdp2_accumulates_gradients():
    compare(fsdp2_accumulation)


def checkpoints_reshard(rank, world, folder):
    """Saved from one layout, also asynchronously, and loaded into others."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel as DDP

    mesh = init_device_mesh("cpu", (world,))
    grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    source = fully_shard(model_of(), mesh=mesh)
    want = flat(source.parameters())
    path = os.path.join(folder, dist.get_backend())
    dcp.save(get_model_state_dict(source), checkpoint_id=path)
    # A thread saves, over a group of its own, while training goes on.
    state = get_model_state_dict(source)
    saving = dcp.async_save(state, checkpoint_id=path + "-async", process_group=dist.new_group())
    for _ in range(20):
        dist.all_reduce(torch.ones(10))
    saving.result()
    for place in [path, path + "-async"]:
        for target in [fully_shard(model_of(seed=5), mesh=grid), DDP(model_of(seed=6))]:
            state = get_model_state_dict(target)
            dcp.load(state, checkpoint_id=place)
            set_model_state_dict(target, state)
            assert flat(target.parameters()) == want, type(target)
    return {"same checkpoint": want}


def test_distributed_checkpoint_into_other_layouts():
    with tempfile.TemporaryDirectory() as folder:
        compare(checkpoints_reshard, args=(folder,))


# ----------------------------------------------------------------------------------- hooks, joins, compiled training


def overlapped_zero(rank, world):
    """The optimizer's step, with its broadcasts, runs inside the futures of DDP's hook. torch refuses it for gloo.

    The interleaved one broadcasts between the all-reduces of other buckets: only one bucket gives it an order.
    """
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel as DDP

    results = {}
    for name, bucket_mb in [("hook_with_zero_step", 0.002), ("hook_with_zero_step_interleaved", 25)]:
        model = DDP(model_of(32), bucket_cap_mb=bucket_mb)
        zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
        hook = getattr(ddp_zero_hook, name)(default_hooks.allreduce_hook, model, zero)
        model.register_comm_hook(None, hook)
        steps, idle = 6, 2  # the first two steps build the buckets' assignment, and change nothing
        for step in range(idle + steps):
            x, y = data_of(rank, max(step - idle, 0))
            model.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
        reference = model_of(32)
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
        for step in range(steps):
            batches = [data_of(peer, step) for peer in range(world)]
            optimizer.zero_grad()
            x, y = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
            nn.functional.mse_loss(reference(x), y).backward()
            optimizer.step()
        results[f"same {name}"] = flat(model.parameters())
        got, want = torch.tensor(results[f"same {name}"]), torch.tensor(flat(reference.parameters()))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    return results


@pytest.mark.skipif(IS_GLOO, reason="torch refuses overlap_with_ddp for the name gloo")
def test_zero_overlapped_with_ddp():
    results = run(overlapped_zero, "2+2")
    for result in results[1:]:
        assert result == results[0]


def power_sgd(rank, world):
    """PowerSGD waits for two further all-reduces in the callbacks of the first. One bucket: see docs/frameworks.md."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel as DDP

    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.ReLU())]
    model = DDP(nn.Sequential(nn.Linear(8, 32), *layers, nn.Linear(32, 4)))
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1, use_error_feedback=True
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return {"same power": train(model, rank, steps=8, optimizer=optimizer)[8:]}


def test_power_sgd_in_one_bucket():
    compare(power_sgd)


def power_sgd_in_many_buckets(rank, world):
    """Rank 1 of the approximation: factors and biases of a bucket have equal sizes, and cannot be told apart."""
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel as DDP

    torch.manual_seed(0)
    layers = [layer for _ in range(10) for layer in (nn.Linear(32, 32), nn.ReLU())]
    model = DDP(nn.Sequential(*layers), bucket_cap_mb=0.001)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    try:
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.randn(6, 32, generator=generator)).square().mean().backward()
            optimizer.step()
    except RuntimeError as error:
        return str(error)
    return flat(model.parameters())


@pytest.mark.skipif(IS_GLOO, reason="gloo deadlocks")
def test_power_sgd_in_many_buckets_never_sums_different_things_in_silence():
    for result in (results := run(power_sgd_in_many_buckets, "2+2", destroy=False)):
        if isinstance(results[0], list):
            assert result == results[0]
        else:
            assert "hybridps" in result


def joined(rank, world):
    """Join around DDP and ZeRO at once: ranks with fewer inputs shadow the collectives of both."""
    from torch.distributed.algorithms.join import Join
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel as DDP

    model = DDP(model_of(), bucket_cap_mb=0.001)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    with Join([model, optimizer]):
        for step in range(2 + rank):
            x, y = data_of(rank, step)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
    return {"same join": flat(model.parameters())}


def test_join_of_ddp_and_zero():
    compare(joined)


def compiled_training(rank, world):
    """DDP under torch.compile, with and without dynamo's cuts of the graph at bucket borders."""
    from torch.nn.parallel import DistributedDataParallel as DDP

    results = {}
    for optimize in ["ddp_optimizer", "no_optimization"]:
        torch._dynamo.reset()
        torch._dynamo.config.optimize_ddp = optimize
        model = torch.compile(DDP(model_of(), bucket_cap_mb=2), backend="aot_eager")
        results[f"same {optimize}"] = train(model, rank, steps=2)[2:]
    return results


def test_compiled_ddp():
    compare(compiled_training)


def more_pipelines(rank, world):
    """Schedules with several stages per rank, and the one that splits the backward pass."""
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble, ScheduleLoopedBFS

    def layer(index):
        torch.manual_seed(index)
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    y = torch.randn(8, 8, generator=torch.Generator().manual_seed(2))
    results = {}
    for name, make in [("looped bfs", ScheduleLoopedBFS), ("zero bubble", ScheduleInterleavedZeroBubble)]:
        count = 2 * world
        modules = {index: layer(index) for index in range(rank, count, world)}
        stages = [PipelineStage(module, index, count, torch.device("cpu")) for index, module in modules.items()]
        schedule = make(stages, n_microbatches=2 * world, loss_fn=nn.functional.mse_loss)
        losses = []
        for _ in range(2):
            losses.clear()
            for module in modules.values():
                module.zero_grad()
            if rank == world - 1:
                schedule.step(target=y, losses=losses)
            else:
                schedule.step(*((x,) if rank == 0 else ()))
        layers = [layer(index) for index in range(count)]
        nn.functional.mse_loss(nn.Sequential(*layers)(x), y).backward()
        for index, module in modules.items():
            for got, want in zip(module.parameters(), layers[index].parameters(), strict=True):
                torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-6)
        results[name] = [float(loss) for loss in losses]
    return results


def test_pipelines_of_several_stages():
    compare(more_pipelines, "1+1")


# --------------------------------------------------------------------------------------------------------- torchrun


PROGRAM = """
    import os, sys, time, torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as DDP

    # An agent must hear of another agent's failure before one of its own.
    sys.excepthook = lambda *error: (sys.__excepthook__(*error), sys.stderr.flush(), time.sleep(float(os.environ["TEST_SLEEP_S"])))
    backend, path = sys.argv[1:]
    dist.init_process_group(backend)
    rank, restarts = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.manual_seed(0)
    model = DDP(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = 0
    if os.path.exists(path):
        first, state = torch.load(path)
        model.load_state_dict(state)
    for step in range(first, 6):
        if rank == 1 and step == 3 and restarts == 0:
            os._exit(9)
        x = torch.full((3, 4), float(rank + step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if rank == 0:
            torch.save((step + 1, model.state_dict()), path + ".part")
            os.rename(path + ".part", path)
        dist.barrier()
    if rank == 0:
        numbers = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()
        os.write(1, f"restarts {restarts} resumed {first} {numbers}\\n".encode())
    dist.destroy_process_group()
"""


@pytest.mark.skipif(IS_GLOO, reason=harness.GLOO_LACKS["restart"])
@pytest.mark.parametrize("agents", [1, 2])
def test_torchrun_restarts_and_training_goes_on_from_the_checkpoint(agents):
    """With two agents each counts the restarts of its own worker, and the Store is the one of before."""
    with tempfile.TemporaryDirectory() as folder:
        program, path = os.path.join(folder, "program.py"), os.path.join(folder, "checkpoint.pt")
        with open(program, "w") as file:
            file.write(textwrap.dedent(PROGRAM))
        meeting = f"--nnodes 2 --rdzv-backend c10d --rdzv-id restart --rdzv-endpoint 127.0.0.1:{harness.free_port()}"
        torchrun = [*("-m", "torch.distributed.run", "--max-restarts", "1", "--monitor-interval", "0.1")]
        torchrun += ["--standalone"] if agents == 1 else meeting.split()
        torchrun += ["--nproc-per-node", str(2 // agents), program, harness.BACKEND, path]
        started, told = [], os.path.join(folder, "output")
        for agent in range(agents):
            env = {**os.environ, "OMP_NUM_THREADS": "1", "HYBRIDPS_NODE": f"node {agent}"}
            env["TEST_SLEEP_S"] = str(30 * harness.TIME_SCALE)
            with open(told, "a") as output:
                command = [sys.executable, *torchrun]
                started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output, text=True, env=env))
        try:
            done = "".join(process.communicate(timeout=200 * harness.TIME_SCALE)[0] for process in started)
        finally:
            for process in started:
                process.terminate()
            for process in started:
                process.wait(60)
            with open(told) as output:
                errors = output.read()[-8000:]
                print(errors)
    assert [process.returncode for process in started] == [0] * agents, errors
    words = done.split(maxsplit=4)
    # Rank 0 prints what its own agent has counted: nothing if the rank of another agent died.
    assert words[:3] == ["restarts", "1" if agents == 1 else "0", "resumed"] and int(words[3]) >= 2, done

    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        sum(model(torch.full((3, 4), float(rank + step))).square().mean() / 2 for rank in range(2)).backward()
        optimizer.step()
    got = torch.tensor([float(number) for number in words[4].strip()[1:-1].split(",")])
    torch.testing.assert_close(got, torch.tensor(flat(model.parameters())), rtol=1e-4, atol=1e-5)
