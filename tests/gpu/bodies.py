"""What each rank does in the tests of this folder. Every body takes its device, so that those without streams of their
own can be run on CPU tensors too: that proves the bodies, not the GPU.

Values are small whole numbers: sums are exact in every type and order.
"""

import contextlib
import datetime
import gc
import threading
import time

import torch
import torch.distributed as dist

DTYPES = [torch.float32, torch.bfloat16, torch.int64]
SIZES = [1, 1023, 300_007]
SLICED = 5_000_000  # 20 MB: five slices


def numbers(count, rank, turn, dtype, device):
    values = (torch.arange(count, dtype=torch.int64) * 7 + 3 * rank + turn) % 13
    return values.to(dtype).to(device)


def equal(what, got, expected):
    got, expected = got.cpu(), expected.cpu()
    assert got.shape == expected.shape, f"{what}: {got.shape} instead of {expected.shape}"
    if not torch.equal(got, expected):
        at = (got != expected).flatten().nonzero()[0].item()
        wrong = (got != expected).sum().item()
        raise AssertionError(
            f"{what}: {wrong} of {got.numel()} wrong, first at {at}: "
            f"{got.flatten()[at].item()} instead of {expected.flatten()[at].item()}"
        )


def total(count, world, turn, dtype, device="cpu"):
    return sum(numbers(count, r, turn, torch.int64, device) for r in range(world)).to(dtype)


def collectives(rank, world, device, dtype, count, turn=0):
    """All of them once; returns how many comparisons were made."""
    root = turn % world
    done = 0

    def mine(many=count):
        return numbers(many, rank, turn, dtype, device)

    def check(what, got, expected):
        nonlocal done
        done += 1
        equal(f"{what} of {count} {dtype}", got, expected)

    t = mine()
    dist.all_reduce(t)
    check("all_reduce", t, total(count, world, turn, dtype))
    t = mine()
    work = dist.all_reduce(t, op=dist.ReduceOp.MAX, async_op=True)
    work.wait()
    check("all_reduce max", t, torch.stack([numbers(count, r, turn, dtype, "cpu") for r in range(world)]).amax(0))
    t = mine()
    dist.reduce(t, root)
    if rank == root:
        check("reduce", t, total(count, world, turn, dtype))
    t = mine()
    dist.broadcast(t, root)
    check("broadcast", t, numbers(count, root, turn, dtype, "cpu"))

    everyone = [numbers(count, r, turn, dtype, "cpu") for r in range(world)]
    out = [torch.empty_like(t) for _ in range(world)]
    dist.all_gather(out, mine())
    check("all_gather", torch.stack(out), torch.stack(everyone))
    out = torch.empty(world * count, dtype=dtype, device=device)
    dist.all_gather_into_tensor(out, mine())
    check("all_gather_into_tensor", out, torch.cat(everyone))
    out[rank * count : (rank + 1) * count] = mine()
    dist.all_gather_into_tensor(out, out[rank * count : (rank + 1) * count])
    check("all_gather_into_tensor in place", out, torch.cat(everyone))

    whole = total(count * world, world, turn, dtype)
    out = torch.empty(count, dtype=dtype, device=device)
    dist.reduce_scatter_tensor(out, mine(count * world))
    check("reduce_scatter_tensor", out, whole[rank * count : (rank + 1) * count])
    dist.reduce_scatter(out, list(mine(count * world).chunk(world)))
    check("reduce_scatter", out, whole[rank * count : (rank + 1) * count])

    out = [torch.empty_like(t) for _ in range(world)] if rank == root else None
    dist.gather(mine(), out, dst=root)
    if rank == root:
        check("gather", torch.stack(out), torch.stack(everyone))
    out = torch.empty(count, dtype=dtype, device=device)
    parts = list(numbers(count * world, root, turn, dtype, device).chunk(world)) if rank == root else None
    dist.scatter(out, parts, src=root)
    check("scatter", out, numbers(count * world, root, turn, dtype, "cpu")[rank * count : (rank + 1) * count])

    splits = [count + r for r in range(world)]  # what rank r gets from each
    given = [numbers(sum(splits), r, turn, dtype, "cpu") for r in range(world)]
    begin = sum(splits[:rank])
    expected = torch.cat([values[begin : begin + splits[rank]] for values in given])
    out = torch.empty(world * splits[rank], dtype=dtype, device=device)
    dist.all_to_all_single(out, given[rank].to(device), [splits[rank]] * world, splits)
    check("all_to_all_single", out, expected)
    out = [torch.empty(splits[rank], dtype=dtype, device=device) for _ in range(world)]
    dist.all_to_all(out, [part.to(device) for part in given[rank].split(splits)])
    check("all_to_all", torch.cat(out), expected)

    after, before = (rank + 1) % world, (rank - 1) % world
    got = torch.empty_like(t)
    ops = [dist.P2POp(dist.irecv, got, before), dist.P2POp(dist.isend, mine(), after)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    check("batch_isend_irecv", got, everyone[before])
    if rank == 0:
        dist.send(mine(), 1, tag=5)
    elif rank == 1:
        got = torch.empty_like(t)
        assert dist.recv(got, tag=5) == 0
        check("recv from any source", got, everyone[0])

    strided = torch.zeros(count, 2, dtype=dtype, device=device)[:, 0]
    strided.copy_(mine())
    dist.all_reduce(strided)
    check("all_reduce of a strided tensor", strided, total(count, world, turn, dtype))
    several = [mine(), mine(count // 2 + 1)]
    with dist._coalescing_manager():
        for tensor in several:
            dist.all_reduce(tensor)
    for tensor in several:
        check("coalesced all_reduce", tensor, total(tensor.numel(), world, turn, dtype))
    dist.barrier()
    return done


def every_collective(rank, world, device, dtypes, sizes):
    done = 0
    for turn, count in enumerate(sizes):
        for dtype in dtypes:
            done += collectives(rank, world, device, dtype, count, turn)
    return done


def on_own_gpu(rank, world, body, *args):
    """A body of this file on the GPU with the rank's number."""
    torch.cuda.set_device(rank)
    return globals()[body](rank, world, f"cuda:{rank}", *args)


def nothing_through_shared_memory(rank, world, device):
    from hybridps.backend.load import load_extension

    def moved():
        return load_extension().stats()["shm_tx_payload_bytes"]

    dist.all_reduce(torch.ones(10, device=device))  # the ranks agree
    torch.cuda.synchronize()
    dist.barrier()
    before = moved()
    for turn in range(5):
        t = numbers(1_000_000, rank, turn, torch.float32, device)
        dist.all_reduce(t)
        equal("all_reduce", t, total(1_000_000, world, turn, torch.float32))
        given = numbers(1000 * world, rank, turn, torch.float32, device)
        got = torch.empty_like(given)
        dist.all_to_all_single(got, given)
        everyone = [numbers(1000 * world, r, turn, torch.float32, "cpu") for r in range(world)]
        equal("all_to_all_single", got, torch.cat([v[1000 * rank : 1000 * (rank + 1)] for v in everyone]))
    assert moved() == before


def connected_early(rank, world, device):
    """As torch does with device_id: then collectives, also of a group that was split off."""
    dist.group.WORLD._get_backend(torch.device("cpu")).eager_connect_single_device(torch.device(device))
    done = every_collective(rank, world, device, [torch.float32], SIZES)
    if device == "cpu" and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15):
        return done  # torch splits no group on CPU
    child = dist.split_group(split_ranks=[list(range(world))])
    t = numbers(1000, rank, 1, torch.float32, device)
    dist.all_reduce(t, group=child)
    equal("all_reduce of a split group", t, total(1000, world, 1, torch.float32))
    return done


def connecting_early_needs_a_gpu(rank, world):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend.eager_connect_single_device(torch.device("cpu"))  # nothing to do
    try:
        backend.eager_connect_single_device(torch.device("cuda", 0))
    except RuntimeError as error:
        text = str(error)
    else:
        raise AssertionError("there is a GPU")
    t = torch.ones(5)
    dist.all_reduce(t)
    assert t.tolist() == [world] * 5
    return text


def mixed_group(rank, world, device):
    """Operations on CPU and on GPU tensors of one group keep one order."""
    for turn in range(20):
        there = numbers(70_000, rank, turn, torch.float32, device)
        here = numbers(5_000, rank, turn, torch.float32, "cpu")
        first = dist.all_reduce(there, async_op=True)
        second = dist.all_reduce(here, async_op=True)
        objects = [None] * world
        dist.all_gather_object(objects, (rank, turn))
        dist.barrier()
        second.wait()
        first.wait()
        assert objects == [(r, turn) for r in range(world)]
        equal("on the device", there, total(70_000, world, turn, torch.float32))
        equal("on the host", here, total(5_000, world, turn, torch.float32))


def has_streams(device):
    return torch.device(device).type != "cpu"


def module_of(device):
    """torch.cuda, or the module of another kind of device (tests/simulated)."""
    return torch.get_device_module(device)


def busy(device, milliseconds):
    if torch.device(device).type == "cuda":
        torch.cuda._sleep(int(milliseconds * 1_500_000))  # about 1.5 GHz
    elif has_streams(device):
        module_of(device).busy(milliseconds)


def stream_for(device):
    if has_streams(device):
        return module_of(device).stream(module_of(device).Stream(device))
    return contextlib.nullcontext()


def stream_order(rank, world, device, rounds):
    """Inputs that are still being computed, results that are used at once, memory that is given up after the call."""
    random = __import__("random").Random(rank)
    for turn in range(rounds):
        with stream_for(device):
            if random.random() < 0.3:
                busy(device, random.random() * 3)
            t = numbers(100_003, rank, turn, torch.float32, device)
            work = dist.all_reduce(t, async_op=True)
            alive = torch.empty_like(t)  # may not take what the operation still uses
            alive.fill_(-1)
            if turn % 3 == 0:
                doubled = work.get_future().then(lambda f: f.value()[0] * 2).wait()
                equal("through the future", doubled, 2 * total(100_003, world, turn, torch.float32))
            work.wait()
            result = t + 0
            t.fill_(-9)
            equal("after wait", result, total(100_003, world, turn, torch.float32))
            dropped = numbers(50_000, rank, turn, torch.float32, device)
            dist.all_reduce(dropped, async_op=True)
            del dropped, alive
    dist.barrier()


def freed_at_once(rank, world, device, rounds):
    """Inputs are given up right after the call, and their memory is wanted again at once."""
    for turn in range(rounds):
        with stream_for(device):
            if turn % 2:
                busy(device, 2)
            count = 30_011 + 1000 * (turn % 5)
            gathered = torch.empty(world * count, device=device)
            given = numbers(count, rank, turn, torch.float32, device)
            first = dist.all_gather_into_tensor(gathered, given, async_op=True)
            del given
            part = torch.empty(count, device=device)
            given = numbers(world * count, rank, turn, torch.float32, device)
            second = dist.reduce_scatter_tensor(part, given, async_op=True)
            del given
            takers = [torch.full((size,), -1.0, device=device) for size in (count, world * count)]
            second.wait()
            first.wait()
            everyone = [numbers(count, r, turn, torch.float32, "cpu") for r in range(world)]
            equal("all_gather", gathered, torch.cat(everyone))
            whole = total(world * count, world, turn, torch.float32)
            equal("reduce_scatter", part, whole[rank * count : (rank + 1) * count])
            del takers


def strided_and_dropped(rank, world, device, rounds):
    """An output that is not contiguous is given up right after the call, with its Work, and its memory is wanted again
    at once: the operation's last copy may still be on its way."""
    for turn in range(rounds):
        with stream_for(device):
            count = 20_011 + 1000 * (turn % 5)
            whole = torch.zeros(count, 2, device=device)
            whole[:, 0].copy_(numbers(count, rank, turn, torch.float32, device))
            if turn % 2:
                busy(device, 2)
            work = dist.all_reduce(whole[:, 0], async_op=True)
            del work, whole
            taker = torch.full((count, 2), 7.0, device=device)
            check = torch.ones(100, device=device)
            dist.all_reduce(check)  # after it on the same streams
            equal("the next owner's memory", taker, torch.full((count, 2), 7.0))


def barrier_before_all_else(rank, world, device):
    """In a group that has had no tensor on the device, a barrier waits for the device's work if it is told the device.
    Otherwise it does not: so the wait is the barrier's own."""
    if not has_streams(device):
        return dist.barrier()
    module = module_of(device)
    # Another group leaves streams and flags to be used again. To allocate them would wait for the device in any case.
    other = dist.new_group()
    dist.all_reduce(torch.ones(10, device=device), group=other)
    module.synchronize()
    dist.destroy_process_group(other)
    time.sleep(0.3)
    for told in (False, True):
        group = dist.new_group()
        event = module.Event()
        dist.barrier()  # of CPU tensors: they begin together
        begin = time.monotonic()
        if rank == 0:
            busy(device, 4000)
        event.record()
        dist.barrier(group=group, device_ids=[torch.device(device).index] if told else None)
        seconds = time.monotonic() - begin
        assert event.query() == (told or rank != 0), (told, rank, seconds)
        assert (seconds > 2) == told, (told, rank, seconds)  # the other ranks wait for rank 0's device
        module.synchronize()


class SumOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


def from_other_threads(rank, world, device):
    """Calls from autograd's thread; and from two threads of the program, with a group and a stream each."""
    x = torch.ones(50_000, device=device, requires_grad=True)
    (SumOfGradients.apply(x) * (rank + 1)).sum().backward()
    equal("in backward", x.grad, torch.full((50_000,), world * (world + 1) / 2))

    failed = []

    def use(group, first):
        try:
            with stream_for(device):
                for turn in range(first, first + 10):
                    t = numbers(70_000, rank, turn, torch.float32, device)
                    dist.all_reduce(t, group=group)
                    equal("on a thread", t, total(70_000, world, turn, torch.float32))
        except BaseException as error:
            failed.append(error)

    groups = [dist.new_group() for _ in range(2)]
    threads = [threading.Thread(target=use, args=(group, 10 * index)) for index, group in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def several_devices(rank, world, devices):
    """One group, tensors of one process on several devices, under way at the same time."""
    for turn in range(10):
        tensors = [numbers(60_000 + index, rank, turn, torch.float32, d) for index, d in enumerate(devices)]
        works = [dist.all_reduce(t, async_op=True) for t in tensors]
        for work in reversed(works):
            work.wait()
        for tensor in tensors:
            equal(f"on {tensor.device}", tensor, total(tensor.numel(), world, turn, torch.float32))


def host_does_not_wait(rank, world, device):
    """The calls return while the input is still far from being ready; on a GPU."""
    on_gpu = has_streams(device)
    count = 1 << 20
    after, before = (rank + 1) % world, (rank - 1) % world

    def ones(many=count):
        return torch.ones(many, device=device)

    # Tensors of its own for each: several are under way at a time.
    spread, sent, received, parts, taken = (ones() for _ in range(5))
    reduced = [ones() for _ in range(8)]
    gathered, whole, part, given = ones(world * count), ones(world * count), ones(), ones()

    def every_kind():
        yield dist.broadcast(spread, 0, async_op=True)
        yield dist.all_gather_into_tensor(gathered, given, async_op=True)
        yield dist.reduce_scatter_tensor(part, whole, async_op=True)
        yield dist.all_to_all_single(parts, taken, async_op=True)
        yield from dist.batch_isend_irecv(
            [dist.P2POp(dist.irecv, received, before), dist.P2POp(dist.isend, sent, after)]
        )
        for tensor in reduced:
            yield dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True)

    def enqueue():
        for work in list(every_kind()):
            work.wait()

    enqueue()  # streams and staging exist now
    if on_gpu:
        module_of(device).synchronize()
    dist.barrier()
    begin = time.perf_counter()
    busy(device, 5000)
    if on_gpu:
        ready = module_of(device).Event()
        ready.record()
    enqueue()
    enqueued = time.perf_counter() - begin
    if on_gpu:
        still_computing = not ready.query()
        module_of(device).synchronize()
        assert still_computing, f"enqueueing took {enqueued:.3f} s, until the stream had come to it"
    equal("reduce_scatter", part, torch.full((count,), float(world)))
    for tensor in (*reduced, spread, received, parts, gathered):
        equal("ones", tensor, torch.ones(tensor.numel()))
    return enqueued


def capture_is_refused(rank, world, device):
    """GPU only."""
    t = torch.ones(100, device=device)
    dist.all_reduce(t)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    said = ""
    try:
        with torch.cuda.graph(graph):
            try:
                dist.all_reduce(t)
            except NotImplementedError as error:
                said = str(error)
    except RuntimeError:
        pass  # torch's own, for what the graph has become
    assert "CUDA graph" in said, said
    dist.barrier()


def absent_rank(rank, world, device):
    """A timeout is raised, no stream hangs, and the group goes on."""
    dist.all_reduce(torch.ones(10, device=device))
    if rank == 0:
        group = dist.distributed_c10d._get_default_group()
        group._get_backend(torch.device(device)).options  # noqa: B018  it exists
        said = ""
        options = dist.AllreduceOptions()
        options.timeout = datetime.timedelta(seconds=1)
        try:
            work = group.allreduce([torch.ones(10, device=device)], options)
            work.wait(datetime.timedelta(seconds=60))
        except RuntimeError as error:
            said = str(error)
        assert "imed out" in said, said
        if has_streams(device):
            module_of(device).synchronize()
    else:
        time.sleep(3)
        try:
            dist.all_reduce(torch.ones(10, device=device))
            if has_streams(device):
                module_of(device).synchronize()
                dist.all_reduce(torch.ones(1, device=device))  # told here, at the latest
        except RuntimeError:
            pass


def goes_on_after_an_error(rank, world, device):
    """After a failure the group is destroyed and another one works; see zygote.py for the context."""
    from zygote import context

    absent_rank(rank, world, device)
    dist.destroy_process_group()
    context.init(prefix="after the error")
    return collectives(rank, world, device, torch.float32, 1023)


def model(device):
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64)).to(device)


def train(module, device, samples, steps):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        generator = torch.Generator().manual_seed(100 + step)
        inputs = torch.randn(16, 64, generator=generator)[samples].to(device)
        loss = (module(inputs) - inputs).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def same_parameters(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.cpu(), other.cpu(), rtol=1e-4, atol=1e-5)


def ddp_equals_gloo_and_one_process(rank, world, device):
    alone = model(device)
    train(alone, device, slice(0, 16), 5)
    each = 16 // world
    mine = slice(rank * each, (rank + 1) * each)
    # gloo on CPU tensors: what it can do on a GPU is its own matter.
    for where, group in ((device, None), ("cpu", dist.new_group(backend="gloo"))):
        module = torch.nn.parallel.DistributedDataParallel(model(where), process_group=group, bucket_cap_mb=0.02)
        train(module, where, mine, 5)
        same_parameters(module.module.parameters(), alone.parameters())


def fsdp2_equals_gloo_and_one_process(rank, world, device):
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.fsdp import fully_shard

    alone = model(device)
    train(alone, device, slice(0, 16), 5)
    each = 16 // world
    mine = slice(rank * each, (rank + 1) * each)
    ours = init_device_mesh(torch.device(device).type, (world,))
    gloos = DeviceMesh.from_group(dist.new_group(backend="gloo"), "cpu")
    for where, mesh in ((device, ours), ("cpu", gloos)):
        module = model(where)
        for layer in (module[0], module[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)
        train(module, where, mine, 5)
        same_parameters([p.full_tensor() for p in module.parameters()], alone.parameters())


def soak(rank, world, device, rounds):
    """Memory stays flat: the process's, what it has pinned, and the device's."""
    from hybridps.backend.load import load_extension

    on_gpu = has_streams(device)

    def held():
        if on_gpu:
            module_of(device).synchronize()
        dist.barrier()
        gc.collect()
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * 4096
        pinned = load_extension().stats()["pinned_bytes"]
        return resident, pinned, module_of(device).memory_allocated() if on_gpu else 0

    tensors = [torch.ones(count, device=device) for count in (10, 10_000, 3_000_000)]
    after_warm_up = None
    for turn in range(rounds):
        dist.all_reduce(tensors[turn % 3], op=dist.ReduceOp.MAX, async_op=True)
        if turn % 50 == 49:
            dist.barrier()
        if turn == rounds // 5:
            after_warm_up = held()
    resident, pinned, allocated = (now - then for now, then in zip(held(), after_warm_up, strict=True))
    assert resident < 64 << 20, f"{resident / 2**20:.0f} MiB more after {rounds} operations"
    assert pinned == 0, f"{pinned} bytes more are pinned after {rounds} operations"
    assert allocated < 32 << 20, f"{allocated / 2**20:.0f} MiB more on the device after {rounds} operations"
    for tensor in tensors:
        equal("soak", tensor, torch.ones(tensor.numel()))
