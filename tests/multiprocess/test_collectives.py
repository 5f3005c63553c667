"""Every collective x dtype x operation x size x memory layout, over several node maps, against reference.py.

One launch per collective and node map does all comparisons of that combination; operations are issued in batches, every
other batch asynchronously.
"""

import io
from functools import partial

import harness
import pytest
import reference
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from harness import lacks, run_ranks
from reference import BIG, FEW_SIZES, MOVED, REDUCED, SIZES, Checker, name_of

NEW_NAMES = harness.TORCH >= (2, 14)  # all_gather_single and its like; gather_single is no other name of an old one

# The thorough maps get all sizes of all dtypes, the others a few.
THOROUGH = ["2+2", "2+1+1"]
ALL_MAPS = [
    pytest.param(nodes, marks=pytest.mark.slow) if nodes in ("3+1", "2+1") else nodes for nodes in harness.LAYOUTS
]
FEW_MAPS = ["4", "2+2", "2+1+1", "1+1", "1"]


def sizes_for(nodes):
    return SIZES if nodes in THOROUGH else FEW_SIZES


def run_checked(function, nodes, **options):
    results = run_ranks(function, nodes, args=(nodes,), **options)
    reference.assert_same_bits(results)
    cost = f"{results.seconds:.1f} s, cpu {results.cpu_s:.1f} s"
    print(f"{function.__name__} on {nodes}: {reference.total_cases(results)} comparisons, {cost}")
    return results


class Batch:
    """Issues operations asynchronously in rounds of eight, and in between eight one by one."""

    def __init__(self):
        self.pending = []
        self.count = 0

    def add(self, issue, check):
        """issue(async_op) -> Work; check() once it is done."""
        asynchronous = self.count // 8 % 2 == 0
        self.count += 1
        work = issue(asynchronous)
        if asynchronous:
            self.pending.append((work, check))
            if len(self.pending) == 8:
                self.flush()
        else:
            check()

    def flush(self):
        for work, check in self.pending:
            if work is not None:
                work.wait()
            check()
        self.pending = []


FORMS = ["list", "concatenated", "single"] + ([] if lacks("stacked") else ["stacked"])


def missing(dtype, op=None):
    """Whether the stand-in lacks the type, or the operation on it."""
    real = dtype.is_floating_point or dtype.is_complex
    return (
        (dtype == torch.int16 and lacks("int16"))
        or (dtype in reference.FLOAT8 and lacks("float8"))
        or (dtype in reference.WIDE_UNSIGNED and lacks("wide_unsigned"))
        or (dtype == torch.bool and op == "SUM" and lacks("bool_sum"))
        or (op == "PREMUL_SUM" and lacks("premul"))
        or (op == "AVG" and not real and lacks("integer_avg"))
    )


def reduction_cases(nodes, largest=65537):
    for dtype in REDUCED:
        for op in reference.ops_for(dtype):
            if missing(dtype, op):
                continue
            for size in sizes_for(nodes):
                if size < 65537 or op in ("SUM", "AVG") or dtype in (torch.float32, torch.bfloat16, torch.int8):
                    yield dtype, op, min(size, largest)


# ------------------------------------------------------------------------------------------------- allreduce, reduce


def allreduce_all(rank, world, nodes):
    check, batch = Checker(rank), Batch()

    def case(dtype, op, size):
        tensor = reference.values(dtype, size, rank, reference.kind_for(dtype, op)).clone()
        want = reference.reduced_values(dtype, size, nodes, op)
        name = f"allreduce {name_of(dtype)} {op} {size}"
        batch.add(
            lambda async_op: dist.all_reduce(tensor, reference.torch_op(op, rank), async_op=async_op),
            lambda: check.reduced(name, tensor, want),
        )

    for dtype, op, size in reduction_cases(nodes):
        case(dtype, op, size)
    if nodes in THOROUGH:
        for dtype, op in [(torch.float32, "SUM"), (torch.bfloat16, "AVG"), (torch.int64, "MAX"), (torch.uint8, "SUM")]:
            case(dtype, op, BIG)
    batch.flush()
    return check.result()


@pytest.mark.parametrize("nodes", ALL_MAPS)
def test_allreduce(nodes):
    run_checked(allreduce_all, nodes)


def reduce_all(rank, world, nodes):
    check, batch = Checker(rank), Batch()
    for index, (dtype, op, size) in enumerate(reduction_cases(nodes)):
        root = index % world
        tensor = reference.values(dtype, size, rank, reference.kind_for(dtype, op)).clone()
        name = f"reduce to {root} {name_of(dtype)} {op} {size}"

        def compare(tensor=tensor, name=name, dtype=dtype, op=op, size=size, root=root):
            if rank == root:
                check.reduced(name, tensor, reference.reduced_values(dtype, size, nodes, op), same=False)

        batch.add(
            lambda async_op, tensor=tensor, op=op, root=root: dist.reduce(
                tensor, root, reference.torch_op(op, rank), async_op=async_op
            ),
            compare,
        )
    batch.flush()
    return check.result()


@pytest.mark.parametrize("nodes", ALL_MAPS)
def test_reduce(nodes):
    run_checked(reduce_all, nodes)


def specials_all(rank, world, nodes):
    """NaN, infinities, subnormals and overflow: MIN and MAX propagate NaN, sums follow IEEE."""
    check = Checker(rank)
    for dtype in reference.FLOATS:
        info = torch.finfo(dtype)
        pool = [0.0, 1.0, -1.0, info.max, info.min, info.tiny, info.tiny / 4, float("inf"), -float("inf"), float("nan")]
        count = len(pool) ** 2
        index = torch.arange(count)

        def input_of(peer, dtype=dtype, pool=pool, index=index):
            step = [1, len(pool), 1 + len(pool), 3][peer % 4]
            return torch.tensor(pool, dtype=torch.float64).to(dtype)[(index // step) % len(pool)]

        for op in ["SUM", "AVG", "MIN", "MAX"]:
            inputs = [input_of(peer) for peer in range(world)]
            want = reference.reduced(inputs, harness.parse_nodes(nodes), op)
            if op in ("MIN", "MAX") and lacks("nan_propagation"):
                continue
            if (dtype in reference.HALVES and lacks("half_overflow")) or (
                op in ("SUM", "AVG") and lacks("sum_overflow")
            ):
                continue
            got = inputs[rank].clone()
            dist.all_reduce(got, reference.OPS[op])
            check.digests[f"specials {name_of(dtype)} {op}"] = reference.digest(got)
            equal = (got == want) | (torch.isnan(got) & torch.isnan(want))
            check.that(f"specials {name_of(dtype)} {op}", bool(equal.all()), f"{got[~equal]} for {want[~equal]}")
    return check.result()


@pytest.mark.parametrize("nodes", ["4", "2+2", "1+1+1+1", "1"])
def test_special_values(nodes):
    run_checked(specials_all, nodes)


# -------------------------------------------------------------------------------------------------- reduce_scatter


def reduce_scatter_all(rank, world, nodes):
    check, batch = Checker(rank), Batch()
    for index, (dtype, op, size) in enumerate(reduction_cases(nodes, largest=20011)):
        total = size * world
        whole = reference.values(dtype, total, rank, reference.kind_for(dtype, op)).clone()
        want = reference.reduced_values(dtype, total, nodes, op)[rank * size : (rank + 1) * size]
        output = torch.empty(size, dtype=dtype)
        form = FORMS[index % len(FORMS)]
        torch_op = reference.torch_op(op, rank)
        if form == "list":
            inputs = [piece.clone() for piece in whole.reshape(world, size)]

            def issue(async_op, output=output, inputs=inputs, torch_op=torch_op):
                return dist.reduce_scatter(output, inputs, torch_op, async_op=async_op)

        else:
            source = whole.reshape(world, size) if form == "stacked" else whole
            call = dist.reduce_scatter_single if form == "single" and NEW_NAMES else dist.reduce_scatter_tensor

            def issue(async_op, output=output, source=source, torch_op=torch_op, call=call):
                return call(output, source, torch_op, async_op=async_op)

        name = f"reduce_scatter {form} {name_of(dtype)} {op} {size}"
        batch.add(issue, lambda name=name, output=output, want=want: check.reduced(name, output, want, same=False))
    batch.flush()

    if not lacks("uneven_lists"):
        sizes = [3, 0, 1001, 17][:world]
        for dtype in [torch.int32, torch.float32, torch.bfloat16]:
            starts = [sum(sizes[:peer]) for peer in range(world)]
            whole = reference.values(dtype, sum(sizes), rank)
            inputs = [whole[start : start + size].clone() for start, size in zip(starts, sizes, strict=True)]
            output = torch.empty(sizes[rank], dtype=dtype)
            dist.reduce_scatter(output, inputs)
            want = reference.reduced_values(dtype, sum(sizes), nodes, "SUM")[starts[rank] :][: sizes[rank]]
            check.reduced(f"reduce_scatter uneven {name_of(dtype)}", output, want, same=False)
    return check.result()


@pytest.mark.parametrize("nodes", ALL_MAPS)
def test_reduce_scatter(nodes):
    run_checked(reduce_scatter_all, nodes)


# --------------------------------------------------------------------------------------------- moving collectives


def move_cases(nodes):
    for dtype in MOVED:
        if missing(dtype):
            continue
        for size in sizes_for(nodes) if dtype in (torch.float32, torch.uint8) else FEW_SIZES:
            yield dtype, size
    if nodes in THOROUGH:
        yield torch.uint8, BIG
        yield torch.float32, BIG


def broadcast_all(rank, world, nodes):
    check, batch = Checker(rank), Batch()
    for index, (dtype, size) in enumerate(move_cases(nodes)):
        root = index % world
        want = reference.pattern(dtype, size, root)
        tensor = want.clone() if rank == root else reference.pattern(dtype, size, 99).clone()
        name = f"broadcast from {root} {name_of(dtype)} {size}"
        batch.add(
            lambda async_op, tensor=tensor, root=root: dist.broadcast(tensor, root, async_op=async_op),
            lambda name=name, tensor=tensor, want=want: check.equal(name, tensor, want),
        )
    batch.flush()
    return check.result()


@pytest.mark.parametrize("nodes", ALL_MAPS)
def test_broadcast(nodes):
    run_checked(broadcast_all, nodes)


def all_gather_all(rank, world, nodes):
    check, batch = Checker(rank), Batch()
    for index, (dtype, size) in enumerate(move_cases(nodes)):
        mine = reference.pattern(dtype, size, rank).clone()
        want = torch.cat([reference.bits(reference.pattern(dtype, size, peer)) for peer in range(world)])
        form = FORMS[index % len(FORMS)]
        if form == "list":
            outputs = [torch.empty(size, dtype=dtype) for _ in range(world)]

            def issue(async_op, outputs=outputs, mine=mine):
                return dist.all_gather(outputs, mine, async_op=async_op)

        else:
            shape = (world, size) if form == "stacked" else (world * size,)
            outputs = [torch.empty(shape, dtype=dtype)]
            call = dist.all_gather_single if form == "single" and NEW_NAMES else dist.all_gather_into_tensor

            def issue(async_op, outputs=outputs, mine=mine, call=call):
                return call(outputs[0], mine, async_op=async_op)

        name = f"all_gather {form} {name_of(dtype)} {size}"
        batch.add(
            issue,
            lambda name=name, outputs=outputs, want=want: check.equal(
                name, torch.cat([reference.bits(output) for output in outputs]), want
            ),
        )
    batch.flush()
    if not lacks("uneven_lists"):
        sizes = [5, 0, 1025, 2][:world]
        outputs = [torch.empty(size, dtype=torch.int8) for size in sizes]
        dist.all_gather(outputs, reference.pattern(torch.int8, sizes[rank], rank).clone())
        for peer, size in enumerate(sizes):
            check.equal(f"all_gather uneven from {peer}", outputs[peer], reference.pattern(torch.int8, size, peer))
    return check.result()


@pytest.mark.parametrize("nodes", ALL_MAPS)
def test_all_gather(nodes):
    run_checked(all_gather_all, nodes)


def gather_scatter_all(rank, world, nodes):
    check, batch = Checker(rank), Batch()
    for index, (dtype, size) in enumerate(move_cases(nodes)):
        root = index % world
        name = f"root {root} {name_of(dtype)} {size}"
        patterns = [reference.pattern(dtype, size, peer) for peer in range(world)]
        mine = patterns[rank].clone()
        outputs = [torch.empty(size, dtype=dtype) for _ in range(world)] if rank == root else None

        def compare_gather(name=name, outputs=outputs, patterns=patterns):
            for peer, output in enumerate(outputs or []):
                check.equal(f"gather of {peer} {name}", output, patterns[peer])

        if not (dtype.is_complex and lacks("gather_complex")):
            batch.add(
                lambda async_op, mine=mine, outputs=outputs, root=root: dist.gather(
                    mine, outputs, root, async_op=async_op
                ),
                compare_gather,
            )
        inputs = [pattern.clone() for pattern in patterns] if rank == root else None
        received = torch.empty(size, dtype=dtype)
        batch.add(
            lambda async_op, received=received, inputs=inputs, root=root: dist.scatter(
                received, inputs, root, async_op=async_op
            ),
            lambda name=f"scatter {name}", received=received, want=patterns[rank]: check.equal(name, received, want),
        )
        if index % 3 == 0 and NEW_NAMES and not lacks("gather_single"):
            whole = torch.empty(world * size, dtype=dtype) if rank == root else None
            call = [dist.gather_single, dist.gather_into_tensor][index // 3 % 2]

            def compare_single(name=name, whole=whole, patterns=patterns):
                if whole is not None:
                    check.equal(f"gather_single {name}", whole, torch.cat([p.clone() for p in patterns]))

            batch.add(
                lambda async_op, whole=whole, mine=mine, root=root, call=call: call(
                    mine, whole, dst=root, async_op=async_op
                ),
                compare_single,
            )
    batch.flush()
    return check.result()


@pytest.mark.parametrize("nodes", ALL_MAPS)
def test_gather_and_scatter(nodes):
    run_checked(gather_scatter_all, nodes)


def all_to_all_all(rank, world, nodes):
    check, batch = Checker(rank), Batch()

    def piece(dtype, size, source, target):
        return reference.pattern(dtype, size, source, salt=target)

    for index, (dtype, size) in enumerate(move_cases(nodes)):
        if size >= BIG and world > 2:
            size = BIG // world
        inputs = [piece(dtype, size, rank, target).clone() for target in range(world)]
        want = torch.cat([reference.bits(piece(dtype, size, source, rank)) for source in range(world)])
        if index % 2 == 0:
            outputs = [torch.empty(size, dtype=dtype) for _ in range(world)]

            def issue(async_op, outputs=outputs, inputs=inputs):
                return dist.all_to_all(outputs, inputs, async_op=async_op)

        else:
            outputs = [torch.empty(world * size, dtype=dtype)]
            source = torch.cat([reference.bits(tensor) for tensor in inputs]).view(dtype)

            def issue(async_op, outputs=outputs, source=source):
                return dist.all_to_all_single(outputs[0], source, async_op=async_op)

        name = f"all_to_all {'single' if index % 2 else 'list'} {name_of(dtype)} {size}"
        batch.add(
            issue,
            lambda name=name, outputs=outputs, want=want: check.equal(
                name, torch.cat([reference.bits(output) for output in outputs]), want
            ),
        )

    # Uneven splits, by rank and target; some are zero, and with "sparse" nearly all.
    for pattern_name, split in {
        "ragged": lambda source, target: (3 * source + 5 * target + 1) % 7,
        "large": lambda source, target: 10_007 * (source + 1) + 977 * target,
        "sparse": lambda source, target: 11 if (source, target) == (0, world - 1) else 0,
        "none": lambda source, target: 0,
        "sender_pays": lambda source, target: 0 if source == 0 else 64,
    }.items():
        for dtype in [torch.float32, torch.uint8, torch.int64, torch.complex64, torch.bool]:
            send = [split(rank, target) for target in range(world)]
            receive = [split(source, rank) for source in range(world)]
            inputs = [piece(dtype, size, rank, target).clone() for target, size in enumerate(send)]
            want = [piece(dtype, size, source, rank) for source, size in enumerate(receive)]
            output = torch.empty(sum(receive), dtype=dtype)
            dist.all_to_all_single(output, torch.cat(inputs), receive, send)
            check.equal(f"all_to_all_single {pattern_name} {name_of(dtype)}", output, torch.cat(want))
            if lacks("uneven_lists"):
                continue
            outputs = [torch.empty(size, dtype=dtype) for size in receive]
            dist.all_to_all(outputs, inputs)
            check.equal(f"all_to_all {pattern_name} {name_of(dtype)}", torch.cat(outputs), torch.cat(want))
    # Splits count rows of a matrix.
    send = [target + 1 for target in range(world)]
    receive = [rank + 1] * world
    source = torch.arange(sum(send) * 3.0).reshape(-1, 3) + 1000 * rank
    output = torch.empty(sum(receive), 3)
    dist.all_to_all_single(output, source, receive, send)
    start = sum(range(1, rank + 1))
    want = [torch.arange(sum(send) * 3.0).reshape(-1, 3)[start : start + rank + 1] + 1000 * r for r in range(world)]
    check.equal("all_to_all_single of rows", output, torch.cat(want))
    batch.flush()
    return check.result()


@pytest.mark.parametrize("nodes", ALL_MAPS)
def test_all_to_all(nodes):
    run_checked(all_to_all_all, nodes)


def barrier_all(rank, world, nodes):
    """A barrier keeps every rank until the last has come: judged by the Store's clock-free counter."""
    check = Checker(rank)
    import zygote

    for turn in range(20):
        zygote.context.store.add(f"arrived{turn}", 1)
        if turn % 3 == 0:
            dist.barrier(async_op=True).wait()
        else:
            dist.barrier()
        check.that(f"barrier {turn}", zygote.context.store.add(f"arrived{turn}", 0) == world)
    if harness.TORCH >= (2, 14):
        dist.monitored_barrier()
    return check.result()


@pytest.mark.parametrize("nodes", FEW_MAPS)
def test_barrier(nodes):
    run_checked(barrier_all, nodes)


# ---------------------------------------------------------------------------------------------- point to point


def p2p_all(rank, world, nodes):
    check = Checker(rank)
    after, before = (rank + 1) % world, (rank - 1) % world
    for index, (dtype, size) in enumerate(move_cases(nodes)):
        name = f"{name_of(dtype)} {size}"
        mine, want = reference.pattern(dtype, size, rank).clone(), reference.pattern(dtype, size, before)
        got = torch.empty(size, dtype=dtype)
        if index % 3 == 0 and rank % 2 == 0 and world % 2 == 0:
            dist.send(mine, after)
            dist.recv(got, before)
        elif index % 3 == 0 and world % 2 == 0:
            check.that(f"recv {name} tells its source", dist.recv(got, before) == before)
            dist.send(mine, after)
        elif index % 3 == 1:
            works = [dist.isend(mine, after), dist.irecv(got, before)]
            for work in works:
                work.wait()
        else:
            ops = [dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, got, before)]
            for work in dist.batch_isend_irecv(ops if rank % 2 else ops[::-1]):
                work.wait()
        check.equal(f"ring {name}", got, want)

    # Tags: matched by tag, whatever the order.
    tags = [7, 3, 0, 2**20]
    sends = [dist.isend(torch.full((5,), 10.0 * rank + i), after, tag=tag) for i, tag in enumerate(tags)]
    for i in [2, 0, 3, 1]:
        got = torch.empty(5)
        dist.recv(got, before, tag=tags[i])
        check.equal(f"tag {tags[i]}", got, torch.full((5,), 10.0 * before + i))
    for work in sends:
        work.wait()

    # The same tag: in the order of issue, sizes mixed so that a small one could overtake a large one.
    sizes = [100_000, 1, 50_000, 0, 3, 200_000, 7]
    sends = [dist.isend(torch.full((n,), float(i)), after, tag=5) for i, n in enumerate(sizes)]
    gots = [torch.empty(n) for n in sizes]
    receives = [dist.irecv(got, before, tag=5) for got in gots]
    for work in [*receives, *sends]:
        work.wait()
    for i, got in enumerate(gots):
        check.equal(f"order {i}", got, torch.full((sizes[i],), float(i)))

    # From any source: everybody sends to 0, which learns who it was; per sender and tag in order.
    turns = 5
    if rank == 0:
        seen = {peer: 0 for peer in range(1, world)}
        for _ in range(turns * (world - 1)):
            got = torch.empty(3, dtype=torch.int64)
            source = dist.recv(got, tag=9)
            check.that("any source", got.tolist() == [source, seen[source], 42], f"{got.tolist()} from {source}")
            seen[source] += 1
    else:
        for turn in range(turns):
            dist.send(torch.tensor([rank, turn, 42]), 0, tag=9)

    # Any source, asynchronously, posted before anything was sent, next to a receive from a known rank.
    dist.barrier()
    if rank == 0:
        gots = [torch.empty(1, dtype=torch.int64) for _ in range(world - 1)]
        works = [dist.irecv(got, tag=11) for got in gots]
        named = torch.empty(1, dtype=torch.int64)
        named_work = dist.irecv(named, 1, tag=12)
        dist.barrier()
        for work in works:
            work.wait()
        named_work.wait()
        check.that("irecv any", sorted(got.item() for got in gots) == list(range(1, world)))
        check.that("irecv named", named.item() == 77)
    else:
        dist.barrier()
        dist.send(torch.tensor([rank]), 0, tag=11)
        if rank == 1:
            dist.send(torch.tensor([77]), 0, tag=12)

    # Everybody with everybody, in one batch, sizes differing by pair.
    def between(source, target):
        return torch.arange(100.0 * source + target + 1) + source

    gots = [torch.empty_like(between(peer, rank)) for peer in range(world)]
    ops = []
    for peer in range(world):
        if peer != rank:
            ops.append(dist.P2POp(dist.isend, between(rank, peer), peer))
            ops.append(dist.P2POp(dist.irecv, gots[peer], peer))
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    for peer in range(world):
        if peer != rank:
            check.equal(f"batch with {peer}", gots[peer], between(peer, rank))
    return check.result()


@pytest.mark.parametrize("nodes", [nodes for nodes in ALL_MAPS if nodes != "1"])
def test_point_to_point(nodes):
    run_checked(p2p_all, nodes)


# ------------------------------------------------------------------------------- coalesced, objects, functional


def coalesced_all(rank, world, nodes):
    check = Checker(rank)
    shapes = [1, 1000, 17, 65537] if lacks("coalesced_zero") else [1, 0, 1000, 17, 65537]

    def inputs(dtype=torch.float32, salt=0):
        return [reference.values(dtype, n, rank, salt=salt).clone() for n in shapes]

    for dtype in [torch.float32, torch.bfloat16, torch.int32]:
        tensors = inputs(dtype)
        dist.all_reduce_coalesced(tensors)
        for n, tensor in zip(shapes, tensors, strict=True):
            want = reference.reduced_values(dtype, n, nodes, "SUM")
            check.reduced(f"all_reduce_coalesced {name_of(dtype)} {n}", tensor, want)

    outputs = [[torch.empty(n) for n in shapes] for _ in range(world)]
    dist.all_gather_coalesced(outputs, inputs())
    for peer in range(world):
        for n, output in zip(shapes, outputs[peer], strict=True):
            check.equal(f"all_gather_coalesced {peer} {n}", output, reference.values(torch.float32, n, peer))

    for device in [None] if lacks("coalescing_by_device") else [None, torch.device("cpu")]:
        for async_ops in [False, True]:
            name = f"manager device {device} async {async_ops}"
            tensors = inputs()
            with dist._coalescing_manager(device=device, async_ops=async_ops) as manager:
                for tensor in tensors:
                    dist.all_reduce(tensor)
            if async_ops:
                manager.wait()
            for n, tensor in zip(shapes, tensors, strict=True):
                want = reference.reduced_values(torch.float32, n, nodes, "SUM")
                check.reduced(f"{name} all_reduce {n}", tensor, want)

            outputs = [torch.empty(world * n) for n in shapes]
            with dist._coalescing_manager(device=device, async_ops=async_ops) as manager:
                for output, tensor in zip(outputs, inputs(), strict=True):
                    dist.all_gather_into_tensor(output, tensor)
            if async_ops:
                manager.wait()
            for n, output in zip(shapes, outputs, strict=True):
                want = torch.cat([reference.values(torch.float32, n, peer) for peer in range(world)])
                check.equal(f"{name} all_gather {n}", output, want)

            outputs = [torch.empty(n) for n in shapes]
            sources = [reference.values(torch.float32, world * n, rank).clone() for n in shapes]
            with dist._coalescing_manager(device=device, async_ops=async_ops) as manager:
                for output, source in zip(outputs, sources, strict=True):
                    dist.reduce_scatter_tensor(output, source)
            if async_ops:
                manager.wait()
            for n, output in zip(shapes, outputs, strict=True):
                want = reference.reduced_values(torch.float32, world * n, nodes, "SUM")[rank * n :][:n]
                check.reduced(f"{name} reduce_scatter {n}", output, want, same=False)
    return check.result()


@pytest.mark.parametrize("nodes", FEW_MAPS)
def test_coalesced(nodes):
    run_checked(coalesced_all, nodes)


def objects_all(rank, world, nodes):
    check = Checker(rank)

    def thing(peer):
        return {"rank": peer, "text": "x" * (peer * 1000), "tensor": torch.arange(peer + 1), "none": None}

    def same(name, got, peer):
        check.that(name, str(got) == str(thing(peer)), f"{str(got)[:60]}")

    everything = [None] * world
    dist.all_gather_object(everything, thing(rank))
    for peer in range(world):
        same("all_gather_object", everything[peer], peer)
    for root in range(world):
        gathered = [None] * world if rank == root else None
        dist.gather_object(thing(rank), gathered, dst=root)
        for peer in range(world if rank == root else 0):
            same("gather_object", gathered[peer], peer)
        sent = [thing(root), "second", 3] if rank == root else [None] * 3
        dist.broadcast_object_list(sent, src=root)
        same("broadcast_object_list", sent[0], root)
        check.that("broadcast_object_list rest", sent[1:] == ["second", 3])
        received = [None]
        scattered = [thing(peer) for peer in range(world)] if rank == root else None
        dist.scatter_object_list(received, scattered, src=root)
        same("scatter_object_list", received[0], rank)
    if world > 1:
        if rank == 0:
            dist.send_object_list([thing(0), "last"], dst=world - 1)
        elif rank == world - 1:
            got = [None, None]
            source = dist.recv_object_list(got, src=0)
            same("recv_object_list", got[0], 0)
            check.that("recv_object_list source", source == 0 and got[1] == "last")
    buffer = io.BytesIO()
    torch.save(everything, buffer)
    check.that("objects still pickle", buffer.tell() > 0)
    return check.result()


@pytest.mark.parametrize("nodes", FEW_MAPS)
def test_objects(nodes):
    run_checked(objects_all, nodes)


def functional_all(rank, world, nodes):
    check = Checker(rank)
    group = dist.group.WORLD
    n = 1023

    def whole(count, dtype=torch.float32):
        return reference.reduced_values(dtype, count, nodes, "SUM")

    for dtype in [torch.float32, torch.bfloat16, torch.int32]:
        mine = reference.values(dtype, n, rank).clone()
        got = funcol.wait_tensor(funcol.all_reduce(mine, "sum", group))
        check.reduced(f"funcol.all_reduce {name_of(dtype)}", got, whole(n, dtype))
        check.equal(f"funcol.all_reduce keeps its input {name_of(dtype)}", mine, reference.values(dtype, n, rank))
        if not missing(dtype, "AVG"):
            small = reference.values(dtype, n, rank, reference.kind_for(dtype, "AVG"))
            got = funcol.all_reduce(small, "avg", group)  # an AsyncCollectiveTensor waits on use
            check.reduced(
                f"funcol avg {name_of(dtype)}", got + 0, reference.reduced_values(dtype, n, nodes, "AVG"), same=True
            )
    for dim in [0, 1, 2]:
        mine = torch.arange(24.0).reshape(2, 3, 4) + 100 * rank
        got = funcol.all_gather_tensor(mine, dim, group)
        want = torch.cat([torch.arange(24.0).reshape(2, 3, 4) + 100 * peer for peer in range(world)], dim)
        check.equal(f"funcol.all_gather_tensor dim {dim}", funcol.wait_tensor(got).contiguous(), want)
        wide = torch.arange(24.0 * world).reshape([world * s if d == dim else s for d, s in enumerate([2, 3, 4])])
        got = funcol.wait_tensor(funcol.reduce_scatter_tensor(wide * (rank + 1), "sum", dim, group))
        want = wide.chunk(world, dim)[rank] * (world * (world + 1) // 2)
        check.equal(f"funcol.reduce_scatter_tensor dim {dim}", got.contiguous(), want.contiguous())
    got = funcol.wait_tensor(funcol.broadcast(torch.full((5,), float(rank)), world - 1, group))
    check.equal("funcol.broadcast", got, torch.full((5,), float(world - 1)))

    send, receive = [rank + target for target in range(world)], [source + rank for source in range(world)]
    got = funcol.wait_tensor(funcol.all_to_all_single(torch.full((sum(send),), float(rank)), receive, send, group))
    check.equal(
        "funcol.all_to_all_single",
        got,
        torch.cat([torch.full((source + rank,), float(source)) for source in range(world)]),
    )
    got = funcol.wait_tensor(funcol.all_to_all_single(torch.full((world * 2,), float(rank)), None, None, group))
    check.equal("funcol.all_to_all_single even", got, torch.arange(float(world)).repeat_interleave(2))

    tensors = [reference.values(torch.float32, count, rank).clone() for count in [7, 1000]]
    for count, got in zip([7, 1000], funcol.all_reduce_coalesced(tensors, "sum", group), strict=True):
        check.reduced(f"funcol.all_reduce_coalesced {count}", funcol.wait_tensor(got), whole(count))
    for count, got in zip([7, 1000], funcol.all_gather_into_tensor_coalesced(tensors, group), strict=True):
        want = torch.cat([reference.values(torch.float32, count, peer) for peer in range(world)])
        check.equal(f"funcol.all_gather_into_tensor_coalesced {count}", funcol.wait_tensor(got), want)
    wides = [reference.values(torch.float32, world * count, rank).clone() for count in [7, 1000]]
    results = funcol.reduce_scatter_tensor_coalesced(wides, "sum", [0, 0], group)
    for count, got in zip([7, 1000], results, strict=True):
        want = whole(world * count)[rank * count :][:count]
        check.reduced(f"funcol.reduce_scatter_tensor_coalesced {count}", funcol.wait_tensor(got), want, same=False)

    # With gradients.
    leaf = torch.full((world * 2,), float(rank + 1), requires_grad=True)
    funcol.all_to_all_single_autograd(leaf, None, None, group).mul(rank + 1.0).sum().backward()
    check.equal("all_to_all_single_autograd", leaf.grad, torch.arange(1.0, world + 1).repeat_interleave(2))
    leaf = torch.ones(3, requires_grad=True)
    (funcol.all_gather_tensor_autograd(leaf, 0, group) * (rank + 1)).sum().backward()
    check.equal("all_gather_tensor_autograd", leaf.grad, torch.full((3,), world * (world + 1) / 2))

    import torch.distributed.nn.functional as nnf

    leaf = torch.full((4,), float(rank + 1), requires_grad=True)
    (nnf.all_reduce(leaf) * (rank + 1)).sum().backward()
    check.equal("nn.functional.all_reduce", leaf.grad, torch.full((4,), world * (world + 1) / 2))
    leaf = torch.full((4,), float(rank + 1), requires_grad=True)
    sum((nnf.all_gather(leaf)[peer] * (peer + 1)).sum() for peer in range(world)).backward()
    check.that("nn.functional.all_gather", leaf.grad is not None and leaf.grad.shape == (4,))
    return check.result()


@pytest.mark.parametrize("nodes", FEW_MAPS)
def test_functional(nodes):
    run_checked(functional_all, nodes, fork_server=harness.framework_zygote)


# ------------------------------------------------------------------------------------------------ memory layouts


def layouts_all(rank, world, nodes):
    """0-dim, views at odd offsets, transposed and strided tensors, an input that is also somebody's output."""
    check = Checker(rank)
    node_of = harness.parse_nodes(nodes)

    def reduced(tensors, op="SUM"):
        return reference.reduced(tensors, node_of, op)

    # 0-dim.
    for dtype in [torch.float32, torch.int64, torch.bool, torch.bfloat16]:
        mine = [reference.values(dtype, 1, peer).reshape(()) for peer in range(world)]
        got = mine[rank].clone()
        dist.all_reduce(got)
        check.reduced(f"0-dim all_reduce {name_of(dtype)}", got, reduced([m.reshape(1) for m in mine]).reshape(()))
        got = mine[rank].clone()
        dist.broadcast(got, world - 1)
        check.equal(f"0-dim broadcast {name_of(dtype)}", got, mine[world - 1])
        outputs = [torch.empty((), dtype=dtype) for _ in range(world)]
        dist.all_gather(outputs, mine[rank].clone())
        for peer in range(world):
            check.equal(f"0-dim all_gather {name_of(dtype)}", outputs[peer], mine[peer])

    # Views that start at odd addresses; what lies around them stays as it was.
    for dtype in [torch.uint8, torch.bfloat16, torch.float32, torch.float64]:
        for offset in [1, 3, 5]:
            for n in [1, 13, 1023, 65537]:
                name = f"offset {offset} {name_of(dtype)} {n}"
                store = torch.zeros(n + offset + 9, dtype=dtype)
                view = store[offset : offset + n]
                view.copy_(reference.values(dtype, n, rank))
                dist.all_reduce(view)
                check.reduced(f"all_reduce {name}", view, reference.reduced_values(dtype, n, nodes, "SUM"))
                check.that(f"margins {name}", not store[:offset].any() and not store[offset + n :].any())
                view.copy_(reference.values(dtype, n, rank))
                dist.broadcast(view, 0)
                check.equal(f"broadcast {name}", view, reference.values(dtype, n, 0))
                big = torch.zeros(world * n + offset + 9, dtype=dtype)
                target = big[offset : offset + world * n]
                dist.all_gather_into_tensor(target, reference.values(dtype, n, rank).clone())
                want = torch.cat([reference.values(dtype, n, peer) for peer in range(world)])
                check.equal(f"all_gather {name}", target, want)
                check.that(f"gather margins {name}", not big[:offset].any() and not big[offset + world * n :].any())

    # An in-place all_gather: the input is a slice of the output.
    whole = torch.zeros(world * 50)
    mine = whole[rank * 50 : (rank + 1) * 50]
    mine.copy_(reference.values(torch.float32, 50, rank))
    dist.all_gather_into_tensor(whole, mine)
    check.equal("all_gather in place", whole, torch.cat([reference.values(torch.float32, 50, p) for p in range(world)]))
    # An in-place reduce_scatter: the output is a slice of the input.
    whole = reference.values(torch.float32, world * 50, rank).clone()
    dist.reduce_scatter_tensor(whole[rank * 50 : (rank + 1) * 50], whole)
    want = reference.reduced_values(torch.float32, world * 50, nodes, "SUM")[rank * 50 :][:50]
    check.reduced("reduce_scatter in place", whole[rank * 50 : (rank + 1) * 50], want, same=False)

    # Transposed: dense, but not contiguous.
    for dtype in [torch.float32, torch.int32]:
        values = [reference.values(dtype, 12, peer).reshape(3, 4) for peer in range(world)]
        got = values[rank].clone().t()
        dist.all_reduce(got)
        check.reduced(f"transposed all_reduce {name_of(dtype)}", got, reduced([v.t().contiguous() for v in values]))
        got = values[rank].clone().t()
        dist.broadcast(got, 0)
        check.equal(f"transposed broadcast {name_of(dtype)}", got.contiguous(), values[0].t().contiguous())
    channels = torch.full((2, 3, 4, 5), float(rank)).contiguous(memory_format=torch.channels_last)
    dist.all_reduce(channels)
    check.equal("channels_last", channels, torch.full((2, 3, 4, 5), float(sum(range(world)))))

    # Strided with gaps: the right result in the view, nothing in the gaps, or a clear refusal.
    if not lacks("strided"):

        def attempt(name, call, compare):
            try:
                call()
            except (RuntimeError, ValueError) as error:
                check.that(f"{name} refuses clearly", "contiguous" in str(error), str(error)[:200])
            else:
                compare()

        store = torch.zeros(40, dtype=torch.int32)
        view = store[1:31:3]
        view.copy_(reference.values(torch.int32, 10, rank))
        want = reference.reduced_values(torch.int32, 10, nodes, "SUM")

        def compare():
            check.equal("strided all_reduce", view.contiguous(), want)
            gaps = store.clone()
            gaps[1:31:3] = 0
            check.that("strided gaps", not gaps.any())

        attempt("strided all_reduce", lambda: dist.all_reduce(view), compare)
        view.copy_(reference.values(torch.int32, 10, rank))
        attempt(
            "strided broadcast",
            lambda: dist.broadcast(view, 0),
            lambda: check.equal("strided broadcast", view.contiguous(), reference.values(torch.int32, 10, 0)),
        )
        mixed = reference.values(torch.int32, 10, rank).clone() if rank % 2 else view
        mixed.copy_(reference.values(torch.int32, 10, rank))
        attempt(
            "strided on some ranks",
            lambda: dist.all_reduce(mixed),
            lambda: check.equal("strided on some ranks", mixed.contiguous(), want),
        )
    # Tensors that need gradients, and the same memory used again and again.
    leaf = torch.nn.Parameter(torch.full((7,), float(rank)))
    dist.all_reduce(leaf.data)
    check.equal("a parameter", leaf.data, torch.full((7,), float(sum(range(world)))))
    again = torch.ones(1000)
    for _ in range(5):
        dist.all_reduce(again)
    check.equal("again and again", again, torch.full((1000,), float(world) ** 5))
    return check.result()


@pytest.mark.parametrize("nodes", FEW_MAPS + ["3+1"])
def test_memory_layouts(nodes):
    run_checked(layouts_all, nodes)


@pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="a setting of hybridps")
@pytest.mark.parametrize("nodes", [pytest.param("1+1", marks=pytest.mark.slow), "2+1+1"])
@pytest.mark.parametrize(
    "function", [allreduce_all, reduce_scatter_all, all_gather_all, all_to_all_all, p2p_all, objects_all]
)
def test_through_data_threads(function, nodes):
    """What threads of their own carry between the nodes gives the same results."""
    run_checked(function, nodes, env={"HYBRIDPS_DATA_SOCKETS": "2", "HYBRIDPS_LIMITS": "data_threads=2"})


def float8_reduced(rank, world, nodes):
    check = Checker(rank)
    for dtype in [torch.float8_e4m3fn, torch.float8_e5m2]:
        for n in [1, 13, 1023, 4099]:
            inputs = [(reference.values(torch.float32, n, peer).clamp(-20, 20)).to(dtype) for peer in range(world)]
            got = inputs[rank].clone()
            dist.all_reduce(got)
            want = reference.reduced(inputs, harness.parse_nodes(nodes), "SUM")
            check.equal(f"float8 {name_of(dtype)} {n}", got, want)
    return check.result()


@pytest.mark.parametrize("nodes", ["2+2", "2+1+1"])
def test_float8_sums(nodes):
    if lacks("float8"):
        pytest.skip(harness.GLOO_LACKS["float8"])
    run_checked(float8_reduced, nodes)


# ------------------------------------------------------------------------------------- several tensors in one call


def strided(tensor):
    """The same values, every other place of the storage."""
    return torch.stack([tensor, tensor], 1)[:, 0] if tensor.numel() > 1 else tensor


def several_all(rank, world, nodes):
    """ProcessGroup's methods with lists of several tensors of one rank, which gloo takes, too."""
    check = Checker(rank)
    group = dist.distributed_c10d._get_default_group()
    beside = dist.new_group(backend="gloo")
    node_of = harness.parse_nodes(nodes)

    def all_reduce(group, tensors, op):
        options = dist.AllreduceOptions()
        options.reduceOp = reference.torch_op(op, rank)
        group.allreduce(tensors, options).wait()

    for dtype in REDUCED:
        for op in reference.ops_for(dtype):
            if missing(dtype, op) or (op == "AVG" and harness.IS_GLOO):  # it divides the first tensor only
                continue
            for size in [0, 1, 1023]:
                # As many as one likes, on each rank.
                kind = reference.kind_for(dtype, op)
                inputs = [
                    [reference.values(dtype, size, peer, kind, salt) for salt in range(2 + peer % 2)]
                    for peer in range(world)
                ]
                local = "SUM" if op in ("AVG", "PREMUL_SUM") else op
                want = reference.reduced([reference._fold(own, local) for own in inputs], node_of, op)
                tensors = [tensor.clone() for tensor in inputs[rank]]
                if not harness.IS_GLOO:
                    tensors[1] = strided(tensors[1])
                all_reduce(group, tensors, op)
                for place, tensor in enumerate(tensors):
                    name = f"allreduce of several {name_of(dtype)} {op} {size} {place}"
                    check.reduced(name, tensor, want, same=place < 2)  # all ranks have two
                whole = not (dtype.is_floating_point or dtype.is_complex or dtype in reference.WIDE_UNSIGNED)
                if whole and dtype != torch.int16 and op != "AVG" and not (dtype == torch.bool and op == "SUM"):
                    tensors = [tensor.clone() for tensor in inputs[rank]]
                    all_reduce(beside, tensors, op)
                    for place, tensor in enumerate(tensors):
                        check.equal(f"gloo's {name_of(dtype)} {op} {size} {place}", tensor, want)

    for dtype in [torch.uint8, torch.int64, torch.bfloat16, torch.float32]:
        for size in [0, 1, 1023]:
            for root in range(world):
                for place in range(3):
                    options = dist.BroadcastOptions()
                    options.rootRank, options.rootTensor = root, place
                    tensors = [reference.pattern(dtype, size, rank, salt).clone() for salt in range(3)]
                    if not harness.IS_GLOO:
                        tensors[0] = strided(tensors[0])
                    group.broadcast(tensors, options).wait()
                    for tensor in tensors:
                        name = f"broadcast of tensor {place} of {root} {name_of(dtype)} {size}"
                        check.equal(name, tensor, reference.pattern(dtype, size, root, place))

            inputs = [reference.pattern(dtype, size, rank, salt).clone() for salt in range(2)]
            outputs = [[torch.zeros(size, dtype=dtype) for _ in range(2 * world)] for _ in range(2)]
            if not harness.IS_GLOO:
                inputs[1], outputs[0][0], outputs[1][1] = map(strided, (inputs[1], outputs[0][0], outputs[1][1]))
            group.allgather(outputs, inputs).wait()
            for place in range(2):
                for index, output in enumerate(outputs[place]):
                    want = reference.pattern(dtype, size, index // 2, index % 2)
                    check.equal(f"allgather of several {name_of(dtype)} {size} {place} {index}", output, want)

    # In place, twice the same tensor, and the future's value.
    tensor = torch.arange(5) + rank
    group.allreduce([tensor, tensor]).wait()
    check.equal("allreduce, twice the same", tensor, 2 * (world * torch.arange(5) + sum(range(world))))
    tensors = [torch.ones(3), torch.ones(3)]
    value = group.allreduce(tensors).get_future().wait()
    check.that("the future has all", [t.data_ptr() for t in value] == [t.data_ptr() for t in tensors], value)
    outputs = [[torch.zeros(4) for _ in range(2 * world)] for _ in range(2)]
    group.allgather(outputs, [outputs[0][2 * rank], outputs[0][2 * rank + 1].fill_(7)]).wait()
    check.equal("allgather in place", torch.stack(outputs[1]), torch.tensor([0.0, 7.0] * world).repeat(4, 1).t())
    return check.result()


@pytest.mark.parametrize("nodes", ["2+1+1", "4", "1"])
def test_several_tensors_in_one_call(nodes):
    run_checked(several_all, nodes)


def several_sparse(rank, world, nodes):
    check = Checker(rank)
    group = dist.distributed_c10d._get_default_group()
    beside = dist.new_group(backend="gloo")

    def mine(count, dense):
        tensors = []
        for place in range(count):
            indices = torch.tensor([[rank, place, rank]])  # one index twice
            values = torch.tensor([1 + place, 10 * (rank + 1), 3]).reshape(3, *[1] * dense).expand(3, *[2] * dense)
            tensors.append(torch.sparse_coo_tensor(indices, values.contiguous(), (7, *[2] * dense)))
        return tensors

    for count in [1, 2, 3]:
        for dense in [0, 1]:
            tensors, like = mine(count, dense), mine(count, dense)
            options = dist.AllreduceOptions()
            group.allreduce(tensors, options).wait()
            beside.allreduce(like, options).wait()
            for tensor, want in zip(tensors, like, strict=True):
                check.equal(f"sparse {count} {dense}", tensor.to_dense(), want.to_dense())
                check.that(f"sparse {count} {dense} stays so", tensor.is_sparse and tensor.is_coalesced())
            sums = [torch.arange(7.0).to_sparse() * (rank + 1) for _ in range(count)]
            group.allreduce(sums).wait()
            check.equal("sparse floats", sums[-1].to_dense(), torch.arange(7.0) * count * sum(range(1, world + 1)))
    empty = [torch.sparse_coo_tensor(size=(4,)), torch.sparse_coo_tensor(size=(4,))]
    group.allreduce(empty).wait()
    check.equal("sparse, nothing there", empty[1].to_dense(), torch.zeros(4))
    dist.barrier()

    # What gloo refuses, in the call, in its words.
    one, other = torch.ones(2), torch.ones(2)
    broadcast = dist.BroadcastOptions()
    broadcast.rootTensor = 2
    maximum = dist.AllreduceOptions()
    maximum.reduceOp = dist.ReduceOp.MAX
    lists = [[torch.zeros(2) for _ in range(2 * world)] for _ in range(2)]
    refused = [
        ("layout", lambda g: g.allreduce([one, other.to_sparse()])),
        ("layout", lambda g: g.allreduce([other.to_sparse(), one])),
        ("type", lambda g: g.allreduce([one, other.int()])),
        ("size", lambda g: g.allreduce([one, torch.ones(3)])),
        ("size", lambda g: g.allreduce([torch.ones(2, 3), torch.ones(3, 2)])),
        ("type", lambda g: g.allreduce([one.to_sparse(), other.int().to_sparse()])),
        ("size", lambda g: g.allreduce([one.to_sparse(), torch.ones(3).to_sparse()])),
        ("only works with ReduceOp.SUM", lambda g: g.allreduce([one.to_sparse(), other.to_sparse()], maximum)),
        ("invalid root tensor: 2", lambda g: g.broadcast([one, other], broadcast)),
        ("type", lambda g: g.broadcast([one, other.int()], dist.BroadcastOptions())),
        ("size", lambda g: g.broadcast([one, torch.ones(3)], dist.BroadcastOptions())),
        ("invalid output tensor list at index 0", lambda g: g.allgather([lists[0][:world]] * 2, [one, other])),
        ("same length", lambda g: g.allgather(lists[:1], [one, other])),
        ("size", lambda g: g.allgather(lists, [one, torch.ones(3)])),
        ("type", lambda g: g.allgather(lists, [one, other.int()])),
        ("single-element tensor list", lambda g: g.reduce([one, other], dist.ReduceOptions())),
    ]
    for index, (word, call) in enumerate(refused):
        for name, which in [("ours", group), ("gloo's", beside)]:
            error = check.raises(f"refused {index} {name}", RuntimeError, lambda: call(which))
            check.that(f"refused {index} {name} says why", word in str(error), str(error))
    dist.barrier()
    return check.result()


@pytest.mark.parametrize("nodes", ["2+1+1", "1+1"])
def test_several_sparse_tensors_and_what_is_refused(nodes):
    run_ranks(several_sparse, nodes, args=(nodes,))


def premul_tensor(rank, world, nodes):
    """A tensor factor; and the caller's input stays untouched where input and output differ."""
    check = Checker(rank)
    op = dist._make_nccl_premul_sum(torch.tensor([reference.premul_factor(rank)]))
    n = 1000
    source = reference.values(torch.float32, world * n, rank).clone()
    output = torch.empty(n)
    dist.reduce_scatter_tensor(output, source, op)
    want = reference.reduced_values(torch.float32, world * n, nodes, "PREMUL_SUM")[rank * n :][:n]
    check.reduced("premul by a tensor", output, want, same=False)
    check.equal("premul keeps its input", source, reference.values(torch.float32, world * n, rank))
    return check.result()


@pytest.mark.parametrize("nodes", ["4", "2+1+1"])
def test_premul_with_a_tensor(nodes):
    if lacks("premul"):
        pytest.skip(harness.GLOO_LACKS["premul"])
    run_checked(premul_tensor, nodes)


# -------------------------------------------------------------------------------------------------- determinism


def digests_of_a_run(rank, world, nodes):
    check = Checker(rank)
    tensors = []
    for dtype in [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32]:
        for op in ["SUM", "AVG"]:
            if missing(dtype, op):
                continue
            for size in [1, 13, 4099, 65537, 300_007]:
                tensor = reference.values(dtype, size, rank, reference.kind_for(dtype, op)).clone()
                work = dist.all_reduce(tensor, reference.OPS[op], async_op=True)
                tensors.append((f"{name_of(dtype)} {op} {size}", tensor, work))
    for name, tensor, work in tensors:
        work.wait()
        check.digests[name] = reference.digest(tensor)
    return check.result()


@pytest.mark.parametrize("nodes", ["2+2", "2+1+1"])
def test_bits_do_not_depend_on_run_or_chunk_size(nodes):
    runs = [run_checked(digests_of_a_run, nodes)[0]["digests"]]
    settings = [{}, {"HYBRIDPS_LIMITS": "chunk_bytes=16384"}, {"HYBRIDPS_LIMITS": "chunk_bytes=262144"}]
    for setting in settings:
        runs.append(run_checked(digests_of_a_run, nodes, env=setting)[0]["digests"])
    for setting, digests in zip(settings, runs[1:], strict=True):
        differing = [name for name in digests if digests[name] != runs[0][name]]
        assert not differing, f"with {setting}: {differing}"


def sums_of_denormals(rank, world, nodes):
    """One rank flushes denormals in its own arithmetic; the sums that its threads do for all know nothing of that."""
    check = Checker(rank)
    group = dist.distributed_c10d._get_default_group()
    whole = partial(torch.full, dtype=torch.int32)

    def denormals(size, bits):
        return whole((size,), bits).view(torch.float32)

    if rank == 1:
        assert torch.set_flush_denormal(True)
    for size in (2, 4099, 300_007):
        for asynchronous in (False, True):
            tensor = denormals(size, 5)
            work = dist.all_reduce(tensor, async_op=asynchronous)
            if asynchronous:
                work.wait()
            check.equal(f"{size}, async {asynchronous}", tensor.view(torch.int32), whole((size,), 5 * world))
    pair = [denormals(7, 3), denormals(7, 4)]
    group.allreduce(pair).wait()
    check.equal("several of one rank", pair[0].view(torch.int32), whole((7,), 7 * world))
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), denormals(2, 6), (4,), check_invariants=True)
    dist.all_reduce(sparse)
    check.equal("sparse", sparse.coalesce().values().view(torch.int32), whole((2,), 6 * world))
    if rank == 1:
        check.that("the rank's own mode stays", float(denormals(1, 5) * 2) == 0.0, "denormals are not flushed any more")
        torch.set_flush_denormal(False)
    return check.result()


@pytest.mark.parametrize("nodes", ["2", "1+1+1"])
def test_sums_do_not_depend_on_a_threads_floating_point_mode(nodes):
    run_ranks(sums_of_denormals, nodes, args=(nodes,))
