"""Works, futures and order: everything that may be in flight at once, in whatever order a legal program issues it.

HYBRIDPS_TEST_RANDOM_OPS         operations per seed of the random test (default 400)
HYBRIDPS_TEST_RANDOM_SEEDS       number of seeds (default 2)
HYBRIDPS_TEST_RANDOM_LONG_OPS    the same for the long one, which is marked slow (default 5000)
HYBRIDPS_TEST_RANDOM_LONG_SEEDS  (default 10)
"""

import contextlib
import functools
import gc
import os
import random
import signal
import sys
import threading
import time
import weakref
from datetime import timedelta

import harness
import numpy
import pytest
import reference
import torch
import torch.distributed as dist
import zygote
from harness import lacks, run_ranks
from reference import Checker

RANDOM_OPS = int(os.environ.get("HYBRIDPS_TEST_RANDOM_OPS", "400"))
RANDOM_SEEDS = int(os.environ.get("HYBRIDPS_TEST_RANDOM_SEEDS", "2"))
LONG_OPS = int(os.environ.get("HYBRIDPS_TEST_RANDOM_LONG_OPS", "5000"))
LONG_SEEDS = int(os.environ.get("HYBRIDPS_TEST_RANDOM_LONG_SEEDS", "10"))

# Every pool at the minimum that core/config allows.
SMALLEST_POOLS = {
    "HYBRIDPS_POOL_BYTES": "1M",
    "HYBRIDPS_LIMITS": "eager_bytes=0,grant_chunks=1",
}


def total(world):
    return float(world * (world + 1) // 2)


# ------------------------------------------------------------------------------------------------------ Works


def works_all(rank, world):
    check = Checker(rank)

    # Waited on twice, and asked all it can be asked.
    tensor = torch.full((1000,), rank + 1.0)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    work.wait()
    check.that("completed after wait", work.is_completed())
    check.equal("waited twice", tensor, torch.full((1000,), total(world)))
    future = work.get_future()
    future.wait()
    value = future.value()
    value = value[0] if isinstance(value, list) else value
    check.equal("the future holds the tensor", value, tensor)
    check.that("the future is done", future.done())

    # Polled until done.
    work = dist.all_reduce(torch.ones(100_000), async_op=True)
    end = time.monotonic() + 30
    while not work.is_completed() and time.monotonic() < end:
        time.sleep(0.001)
    check.that("polled", work.is_completed())
    work.wait()

    # Waited on from another thread, and from several at once.
    tensor = torch.full((100_000,), rank + 1.0)
    work = dist.all_reduce(tensor, async_op=True)
    seen = []
    threads = [threading.Thread(target=lambda: (work.wait(), seen.append(tensor[0].item()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check.that("waited from other threads", seen == [total(world)] * 4, seen)

    # Never waited on, the Work dropped at once: later operations still work, and the barrier comes after them.
    tensors = [torch.full((1 + 1000 * i,), rank + 1.0) for i in range(20)]
    for dropped in tensors:
        dist.all_reduce(dropped, async_op=True)
    dist.barrier()
    for i, dropped in enumerate(tensors):
        check.equal(f"dropped {i}", dropped, torch.full_like(dropped, total(world)))

    # The Work dropped, its future kept: as DDP does it.
    tensors = [torch.full((1 + 1000 * i,), rank + 1.0) for i in range(20)]
    futures = [dist.all_reduce(kept, async_op=True).get_future() for kept in tensors]
    for future, kept in zip(futures, tensors, strict=True):
        future.wait()
        check.equal("future of a dropped Work", kept, torch.full_like(kept, total(world)))
    torch.futures.wait_all([dist.all_reduce(torch.ones(5), async_op=True).get_future() for _ in range(10)])

    # Thousands outstanding, waited on in the opposite order.
    count = 3000
    tensors = [torch.full((1 + i % 7,), float(rank + i)) for i in range(count)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    wrong = [i for i, t in enumerate(tensors) if t[0].item() != sum(peer + i for peer in range(world))]
    check.that("thousands outstanding", not wrong, wrong[:5])

    # All kinds in flight at once; then waited on in another order on each rank.
    for turn in range(5):
        n = 777
        summed = torch.full((n,), rank + 1.0)
        sent = torch.arange(float(n)) if rank == turn % world else torch.zeros(n)
        gathered = [torch.zeros(n) for _ in range(world)]
        exchanged = torch.zeros(world * 3)
        scattered = torch.zeros(5)
        lists = [torch.full((5,), float(peer)) for peer in range(world)] if rank == 0 else None
        works = [
            dist.all_reduce(summed, async_op=True),
            dist.broadcast(sent, turn % world, async_op=True),
            dist.all_gather(gathered, torch.full((n,), float(rank)), async_op=True),
            dist.all_to_all_single(exchanged, torch.full((world * 3,), float(rank)), async_op=True),
            dist.scatter(scattered, lists, 0, async_op=True),
            dist.barrier(async_op=True),
        ]
        random.Random(rank * 100 + turn).shuffle(works)
        for work in works:
            work.wait()
        check.equal("mixed all_reduce", summed, torch.full((n,), total(world)))
        check.equal("mixed broadcast", sent, torch.arange(float(n)))
        for peer in range(world):
            check.equal("mixed all_gather", gathered[peer], torch.full((n,), float(peer)))
        check.equal("mixed all_to_all", exchanged, torch.arange(float(world)).repeat_interleave(3))
        check.equal("mixed scatter", scattered, torch.full((5,), float(rank)))
    return check.result()


@pytest.mark.parametrize("nodes", ["2+2", "1+1", "4", "1"])
def test_works(nodes):
    run_ranks(works_all, nodes)


def inputs_may_die(rank, world):
    """The backend owns what it needs: tensors the caller forgets at once stay valid until the operation is done."""
    check = Checker(rank)
    outputs = []
    for i in range(200):
        output = torch.empty(world * 5000)
        work = dist.all_gather_into_tensor(output, torch.full((5000,), float(rank * 1000 + i)), async_op=True)
        outputs.append((output, work))
        torch.full((5000,), -1.0)  # likely to get the memory that a forgotten input had
    for i, (output, work) in enumerate(outputs):
        work.wait()
        want = torch.tensor([float(peer * 1000 + i) for peer in range(world)]).repeat_interleave(5000)
        check.equal(f"forgotten input {i}", output, want)
    return check.result()


@pytest.mark.parametrize("nodes", ["2+2", "1+1"])
def test_inputs_the_caller_forgets(nodes):
    run_ranks(inputs_may_die, nodes)


def timeouts_all(rank, world):
    check = Checker(rank)
    store = dist.distributed_c10d._get_default_store()
    tensor = torch.ones(10)
    if rank == 0:
        work = dist.all_reduce(tensor, async_op=True)
        start = time.monotonic()
        error = check.raises("wait(timeout) expires", RuntimeError, lambda: work.wait(timedelta(milliseconds=300)))
        waited = time.monotonic() - start
        check.that("after its time", 0.25 < waited < 5, f"{waited:.2f} s")
        check.that("and says so", error is not None and "timed out" in str(error).lower(), str(error))
        check.that("the operation goes on", not work.is_completed())
        store.set("late ranks may come", "1")
        work.wait()
    else:
        store.wait(["late ranks may come"], timedelta(seconds=60))
        work = dist.all_reduce(tensor, async_op=True)
        work.wait(timedelta(seconds=60))
    check.equal("and ends well", tensor, torch.full((10,), float(world)))
    dist.barrier()

    # A receive that nobody serves for a while.
    if rank == 0:
        got = torch.zeros(3)
        work = dist.irecv(got, 1)
        check.raises("irecv wait(timeout)", RuntimeError, lambda: work.wait(timedelta(milliseconds=200)))
        store.set("the sender may come", "1")
        work.wait()
        check.equal("irecv ends well", got, torch.full((3,), 5.0))
    elif rank == 1:
        store.wait(["the sender may come"], timedelta(seconds=60))
        dist.send(torch.full((3,), 5.0), 0)
    dist.barrier()
    return check.result()


@pytest.mark.parametrize("nodes", ["1+1", "2+2"])
def test_wait_with_a_timeout(nodes):
    if lacks("wait_timeout"):
        pytest.skip(harness.GLOO_LACKS["wait_timeout"])
    run_ranks(timeouts_all, nodes)


# ---------------------------------------------------------------------------------------------------- futures


def futures_all(rank, world):
    check = Checker(rank)

    # A chain on one operation.
    tensor = torch.full((100,), rank + 1.0)
    future = dist.all_reduce(tensor, async_op=True).get_future()
    chained = future.then(lambda f: f.value()[0] / world).then(lambda f: f.value() + 1)
    check.equal("then", chained.wait(), torch.full((100,), total(world) / world + 1))

    # Callbacks of many operations.
    results = []
    futures = []
    for i in range(50):
        future = dist.all_reduce(torch.full((10,), float(i)), async_op=True).get_future()
        futures.append(future.then(lambda f, i=i: results.append((i, f.value()[0][0].item()))))
    torch.futures.wait_all(futures)
    check.that("callbacks", sorted(results) == [(i, float(i * world)) for i in range(50)], results[:5])

    # add_done_callback, and a callback that raises.
    done = threading.Event()
    dist.all_reduce(torch.ones(5), async_op=True).get_future().add_done_callback(lambda f: done.set())
    check.that("add_done_callback", done.wait(30))

    def fail(future):
        raise ValueError("in the callback")

    broken = dist.all_reduce(torch.ones(5), async_op=True).get_future().then(fail)
    check.raises("a callback raises", (RuntimeError, ValueError), broken.wait)
    dist.barrier()
    return check.result()


@pytest.mark.parametrize("nodes", ["2+2", "1+1", "1"])
def test_futures(nodes):
    run_ranks(futures_all, nodes)


def futures_asked_for_before(rank, world):
    """Whoever has waited for a Work finds its future done and the callbacks over, if he asked for the future earlier."""
    check = Checker(rank)

    def prove(name, work, tensors, poll):
        future = work.get_future()
        over = []
        future.then(lambda done: (time.sleep(0.05), over.append([t[0].item() for t in tensors])))
        if poll:
            while not work.is_completed():
                time.sleep(0.001)
        else:
            work.wait()
        check.that(f"{name}: the callback is over", len(over) == 1, over)
        check.that(f"{name}: the future is done", future.done())

    for poll in (False, True):
        for number in range(5):
            tensor = torch.full((1 + 10_000 * number,), rank + 1.0)
            prove("all_reduce", dist.all_reduce(tensor, async_op=True), [tensor], poll)
        to, source = (rank + 1) % world, (rank - 1) % world
        sent, received = torch.full((100,), float(rank)), torch.empty(100)
        sending = dist.isend(sent, to)
        prove("irecv", dist.irecv(received, source), [received], poll)
        sending.wait()
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, received, source)])
        prove("batch", works[0], [received], poll)
        for work in works:
            work.wait()
    # In a callback, on the thread that would complete it, nobody waits for the future of another Work.
    inner = dist.all_reduce(torch.ones(3), async_op=True)
    inner_future = inner.get_future()
    begin = time.monotonic()
    dist.all_reduce(torch.ones(3), async_op=True).get_future().then(lambda _: inner.wait()).wait()
    inner_future.wait()
    check.that("nobody waits for itself", time.monotonic() - begin < 4)
    return check.result()


@pytest.mark.parametrize("nodes", ["1+1", "2"])
def test_futures_are_done_when_their_works_are(nodes):
    run_ranks(futures_asked_for_before, nodes)


def error_in_a_batch(rank, world):
    check = Checker(rank)
    if rank == 0:
        tensors = torch.empty(8), torch.empty(8)
        before = [tensor._use_count() for tensor in tensors]
        works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, tensors[peer - 1], peer) for peer in (1, 2)])
        error = None
        try:
            works[0].wait()
        except RuntimeError as raised:
            error = str(raised)
        check.that("the error of one part ends the batch", error is not None and "rank 1" in error, error)
        del works  # the rest goes on, and its end drops what the batch holds
        dist.send(torch.ones(1), 2)
    elif rank == 1:
        with contextlib.suppress(RuntimeError):
            dist.send(torch.ones(4), 0)
    else:
        dist.recv(torch.empty(1), 0)  # rank 0 has the error while this rank has sent nothing
        dist.send(torch.ones(8), 0)
    dist.barrier()
    if rank == 0:
        end = time.monotonic() + 20
        while [tensor._use_count() for tensor in tensors] != before and time.monotonic() < end:
            time.sleep(0.01)
        check.that("the batch keeps nothing", [tensor._use_count() for tensor in tensors] == before)
        check.equal("the other part", tensors[1], torch.ones(8))
    return check.result()


def test_an_error_in_a_batch_waits_for_nothing_else():
    run_ranks(error_in_a_batch, "1+1+1")


def callbacks_communicate(rank, world):
    """Callbacks that issue collectives, wait on them, and nest: PowerSGD and ZeRO's overlap do this."""
    check = Checker(rank)

    def second(future):
        tensor = future.value()[0] * 2
        dist.all_reduce(tensor)  # waits inside the callback
        return tensor

    def third(future):
        tensor = future.value() + 1
        return dist.all_reduce(tensor, async_op=True).get_future().wait()[0]

    for turn in range(10):
        first = dist.all_reduce(torch.full((100,), rank + 1.0), async_op=True).get_future()
        got = first.then(second).then(third).wait()
        want = (total(world) * 2 * world + 1) * world
        check.equal(f"nested {turn}", got, torch.full((100,), want))

    # One callback at a time, but the main thread goes on issuing on another group meanwhile.
    other = dist.new_group(list(range(world)))
    for turn in range(10):
        first = dist.all_reduce(torch.full((100,), 1.0), async_op=True).get_future()
        chained = first.then(second)
        beside = torch.full((50,), float(turn))
        dist.all_reduce(beside, group=other)
        check.equal("beside", beside, torch.full((50,), float(turn * world)))
        check.equal("callback", chained.wait(), torch.full((100,), 2.0 * world * world))
    return check.result()


@pytest.mark.parametrize("nodes", ["2+2", "1+1"])
def test_callbacks_that_communicate(nodes):
    run_ranks(callbacks_communicate, nodes)


def callbacks_without_order(rank, world):
    """The program goes on issuing while a callback is about to: nothing says which comes first, on which rank."""
    check = Checker(rank)
    store = dist.distributed_c10d._get_default_store()
    went_on = threading.Event()

    def late(future):
        if threading.current_thread() is not threading.main_thread():
            went_on.wait(30)
        tensor = future.value()[0] * 2
        dist.all_reduce(tensor)
        return tensor

    if rank == world - 1:
        store.wait(["the others have their callbacks"], timedelta(seconds=30))
    # Large, so that it is not over before the last rank has its callback, which would then run here, in a certain order.
    future = dist.all_reduce(torch.ones(10_000_000), async_op=True).get_future().then(late)
    if store.add("callbacks", 1) == world - 1:
        store.set("the others have their callbacks", "1")
    dist.all_reduce(torch.full((10_000_000,), 5.0), async_op=True)  # looks like the callback's
    went_on.set()
    error = check.raises("refused", RuntimeError, future.wait)
    check.that("and says why", "The order would differ between ranks" in str(error), str(error))
    return check.result()


@pytest.mark.parametrize("nodes", ["2+2", "1+1"])
def test_callbacks_without_an_order_are_refused(nodes):
    if harness.IS_GLOO:
        pytest.skip("gloo sums what comes first")
    run_ranks(callbacks_without_order, nodes, destroy=False)


def callbacks_behind_callbacks(rank, world):
    """Futures asked for when their operation is long complete: callbacks still come after those of earlier ones."""
    check = Checker(rank)
    other = dist.new_group(list(range(world)))
    for turn in range(20):
        works = [dist.all_reduce(torch.full((10,), float(i)), async_op=True) for i in range(4)]
        if turn % 2:
            works[-1].wait()
            if rank % 2:
                time.sleep(0.002)

        def communicate(future, i, turn=turn):
            tensor = future.value()[0] + turn
            dist.all_reduce(tensor, group=other)  # each looks like the others
            return tensor

        futures = [work.get_future().then(lambda f, i=i: communicate(f, i)) for i, work in enumerate(works)]
        for i, future in enumerate(futures):
            check.equal(f"{turn} {i}", future.wait(), torch.full((10,), (i * float(world) + turn) * world))
    return check.result()


@pytest.mark.parametrize("nodes", ["2+2", "1+1"])
def test_callbacks_keep_the_order_of_their_operations(nodes):
    if harness.IS_GLOO:
        pytest.skip("gloo runs callbacks on several threads")
    run_ranks(callbacks_behind_callbacks, nodes)


def futures_behind_a_callback(rank, world):
    """get_future() of a finished work, while the callback of an earlier one runs."""
    check = Checker(rank)
    store = dist.distributed_c10d._get_default_store()

    def first_and_second(turn, callback):
        """Two works, both complete; the first one's callback runs on a lane."""
        if rank == 0:
            first = dist.all_reduce(torch.ones(10), async_op=True)
            future = first.get_future().then(callback)
            store.set(f"rank 0 is there {turn}", "1")
        else:
            store.wait([f"rank 0 is there {turn}"])
            future = dist.all_reduce(torch.ones(10), async_op=True).get_future()
        second = dist.all_reduce(torch.full((10,), 5.0), async_op=True)
        second.wait()
        return future, second

    # A short one needs the interpreter's lock to end, which nobody gives up by chance: get_future() has to.
    turns, in_time, switch_interval = 20, 0, sys.getswitchinterval()
    kept = []  # to drop one may give up the lock, too
    for turn in range(turns):
        started, go_on, ended = threading.Event(), threading.Event(), []

        def short(future, started=started, go_on=go_on, ended=ended):
            started.set()
            go_on.wait(30)
            ended.append(True)

        future, second = first_and_second(turn, short)
        if rank == 0:
            check.that("the callback runs", started.wait(30))
            sys.setswitchinterval(1000)
            try:
                go_on.set()
                kept.append(second.get_future())
                in_time += len(ended)
            finally:
                sys.setswitchinterval(switch_interval)
            check.equal("its value", kept[-1].wait()[0], torch.full((10,), 5.0 * world))
            future.wait()
    if rank == 0:
        check.that("short callbacks could end", in_time > 0, f"{in_time} of {turns}")

    # What the program has not seen complete is not waited for: the callback gives up after hundreds of futures are there.
    go_on, order = threading.Event(), []
    future, _ = first_and_second("hundreds", lambda f: order.append(go_on.wait(6 * harness.TIME_SCALE)))
    if rank != 0:  # so that none is complete when rank 0 issues it: the program would count as knowing that
        store.wait(["hundreds are issued"])
    works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(600)]
    if rank == 0:
        store.set("hundreds are issued", "1")
    dist.barrier()
    if rank == 0:
        last = [work.get_future().then(lambda f, i=i: order.append(i)) for i, work in enumerate(works)][-1]
        go_on.set()
        last.wait()
        check.that("hundreds, in order", order == [True, *range(600)], order[:3])

    # A callback of another group is in nobody's way.
    other = dist.new_group(list(range(world)))
    go_on = threading.Event()
    future, _ = first_and_second("another group", lambda f: go_on.wait(30))
    work = dist.all_reduce(torch.ones(3), group=other, async_op=True)
    work.wait()
    if rank == 0:
        check.that("complete at once", work.get_future().done())
        go_on.set()
        check.that("let go", future.wait())

    # One that ends only after get_future() has come back, with a work that is known to be complete or not.
    for known in [True, False]:
        order, started, go_on = [], threading.Event(), threading.Event()

        def long(future, order=order, started=started, go_on=go_on):
            started.set()
            order.append(("first", go_on.wait(30)))

        future, second = first_and_second(f"10{int(known)}", long)
        if not known:
            second = dist.all_reduce(torch.ones(3), async_op=True)
            dist.barrier()  # complete, and the program has not asked
        if rank == 0:
            check.that("the callback runs", started.wait(30))
            of_second = second.get_future()
            check.that("kept in order", not of_second.done())
            last = of_second.then(lambda f, order=order: order.append(("second", True)))
            go_on.set()
            last.wait()
            check.that("in order", order == [("first", True), ("second", True)], order)
    dist.barrier()
    return check.result()


@pytest.mark.parametrize("nodes", ["1+1", "2"])
def test_a_future_behind_a_callback(nodes):
    if harness.IS_GLOO:
        pytest.skip("gloo runs callbacks on several threads")
    run_ranks(futures_behind_a_callback, nodes)


def exit_in_a_callback(rank, world):
    """The program ends while callbacks run that do not end in time, or end while the interpreter does."""
    store = dist.distributed_c10d._get_default_store()
    never, started = threading.Event(), threading.Event()

    def loops(future):
        started.set()
        while not never.is_set():
            time.sleep(0.001)

    def spins(future):
        started.set()
        while not never.is_set():
            pass

    def sleeps(future):
        started.set()
        time.sleep(2.1)

    def blocks(future):
        started.set()
        never.wait()

    # Each rank's first operation waits for the next rank, so that the callback runs on a lane.
    futures = []
    for turn, callback in enumerate([loops, spins, sleeps, blocks]):
        if rank == turn:
            futures.append(dist.all_reduce(torch.ones(10), async_op=True).get_future().then(callback))
            store.set(f"its callback is there {turn}", "1")
        else:
            store.wait([f"its callback is there {turn}"])
            dist.all_reduce(torch.ones(10))
    futures += [dist.all_reduce(torch.ones(10), async_op=True).get_future().then(lambda f: None) for _ in range(10)]
    assert started.wait(30)
    zygote.context.kept = futures
    raise SystemExit(40 + rank)


def test_exit_in_a_callback():
    """The status is the program's own, and nothing aborts."""
    if lacks("exit_in_callback"):
        pytest.skip(harness.GLOO_LACKS["exit_in_callback"])
    codes = {rank: 40 + rank for rank in range(4)}
    results = run_ranks(exit_in_a_callback, "2+2", destroy=False, full_exit=True, expected_exits=codes)
    for report in results.reports:
        for word in ["terminate called", "exception not rethrown", "Segmentation", "Fatal Python error"]:
            assert word not in report.output + report.stacks, report.output


# ------------------------------------------------------------------------------------------------------- Ctrl-C


def interrupt_waits(rank, world):
    """Ctrl-C ends whatever the main thread waits in, and the group goes on."""
    check = Checker(rank)
    store = dist.distributed_c10d._get_default_store()
    group = dist.distributed_c10d._get_default_group()
    long = timedelta(seconds=50)
    got = torch.zeros(3)
    sparse = torch.eye(3).to_sparse()
    one, two = torch.ones(3), torch.ones(3)
    waits = {
        "work.wait(timeout)": (lambda: dist.all_reduce(one, async_op=True).wait(long), lambda: dist.all_reduce(one)),
        "work.wait()": (lambda: dist.all_reduce(two, async_op=True).wait(), lambda: dist.all_reduce(two)),
        "recv from anyone": (lambda: dist.recv(got), lambda: dist.send(torch.full((3,), 7.0), 0)),
        "recv": (lambda: dist.recv(got, 1), lambda: dist.send(torch.full((3,), 7.0), 0)),
        "barrier": (dist.barrier, dist.barrier),
        "barrier with options": (lambda: group.barrier(dist.BarrierOptions()).wait(), dist.barrier),
        "sizes of a sparse sum": (
            lambda: dist.all_reduce(sparse),
            lambda: dist.all_gather_into_tensor(torch.zeros(world * 32).long(), torch.zeros(32).long()),
        ),
    }
    for name, (wait, answer) in waits.items():
        if rank == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # the fork server ignores it
            timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            check.raises(name, KeyboardInterrupt, wait)
            timer.join()
            store.set(f"interrupted: {name}", "1")
        else:
            store.wait([f"interrupted: {name}"], long)
            answer()
    dist.barrier()
    return check.result()


def test_waits_can_be_interrupted():
    if harness.IS_GLOO:
        pytest.skip("gloo's waits cannot be interrupted")
    run_ranks(interrupt_waits, "1+1")


def interrupt_init(rank, world):
    """Ctrl-C while the other ranks have not come."""
    check = Checker(rank)
    if rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        store = zygote.context.store
        timer = threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        check.raises(
            "init_process_group",
            KeyboardInterrupt,
            lambda: dist.init_process_group("hybridps", store=store, rank=0, world_size=world),
        )
        timer.join()
    return check.result()


def test_waiting_for_other_ranks_can_be_interrupted():
    if harness.IS_GLOO:
        pytest.skip("gloo's waits cannot be interrupted")
    run_ranks(interrupt_init, "1+1", init=False, destroy=False)


# ------------------------------------------------------------------------------------------- groups and threads


def groups_interleaved(rank, world):
    check = Checker(rank)
    subsets = [list(range(world)), [0, 1], [world - 2, world - 1], list(range(0, world, 2)), [0, world - 1]]
    groups = [(members, dist.new_group(members)) for members in subsets]
    mine = [(members, group) for members, group in groups if rank in members]
    for turn in range(20):
        pending = []
        for members, group in mine:
            tensor = torch.full((100 * (turn + 1),), rank + 1.0)
            pending.append((members, tensor, dist.all_reduce(tensor, group=group, async_op=True)))
        for members, tensor, work in pending if turn % 2 else reversed(pending):
            work.wait()
            check.equal(f"group {members}", tensor, torch.full_like(tensor, float(sum(r + 1 for r in members))))
    for members, group in mine:
        gathered = [None] * len(members)
        dist.all_gather_object(gathered, rank, group=group)
        check.that(f"objects of {members}", gathered == members, gathered)
        root = members[-1]
        tensor = torch.full((3,), float(rank))
        dist.broadcast(tensor, root, group=group)
        check.equal(f"root is a global rank {members}", tensor, torch.full((3,), float(root)))
    return check.result()


@pytest.mark.parametrize("nodes", ["2+2", "2+1+1", "ABAB"])
def test_interleaved_groups(nodes):
    run_ranks(groups_interleaved, nodes)


def threads_all(rank, world):
    """Several Python threads, each with a group of its own, besides the main thread and p2p in both directions."""
    check = Checker(rank)
    count = 6
    groups = [dist.new_group(list(range(world))) for _ in range(count)]
    errors = []

    def work(index):
        try:
            generator = random.Random(rank * 31 + index)
            for turn in range(60):
                tensor = torch.full((1 + (turn * 37) % 3000,), float(rank + index + turn))
                dist.all_reduce(tensor, group=groups[index])
                want = float(sum(peer + index + turn for peer in range(world)))
                if tensor[0] != want or tensor[-1] != want:
                    errors.append(f"thread {index} turn {turn}: {tensor[0]}, expected {want}")
                if generator.random() < 0.2:
                    time.sleep(0.001)
        except Exception as error:
            errors.append(f"thread {index}: {error}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    after, before = (rank + 1) % world, (rank - 1) % world
    for turn in range(60):
        got = torch.zeros(500)
        works = [dist.isend(torch.full((500,), float(rank + turn)), after), dist.irecv(got, before)]
        for item in works:
            item.wait()
        check.equal("p2p besides threads", got, torch.full((500,), float(before + turn)))
    for thread in threads:
        thread.join()
    check.that("threads", not errors, errors[:3])
    return check.result()


@pytest.mark.parametrize("nodes", ["2+2", "1+1"])
def test_several_python_threads(nodes):
    run_ranks(threads_all, nodes)


def p2p_both_ways(rank, world):
    """Large messages in both directions between all pairs at once, receives posted late on purpose."""
    check = Checker(rank)
    n = 400_000
    sends, receives = [], []
    for turn in range(3):
        for peer in range(world):
            if peer != rank:
                sends.append(dist.isend(torch.full((n,), float(rank * 10 + turn)), peer, tag=turn))
    for turn in range(3):
        for peer in range(world):
            if peer != rank:
                got = torch.zeros(n)
                receives.append((got, peer * 10 + turn, dist.irecv(got, peer, tag=turn)))
    for got, want, work in receives:
        work.wait()
        check.equal("both ways", got, torch.full((n,), float(want)))
    for work in sends:
        work.wait()
    # Small messages by the thousand, one way only.
    count = 2000
    if rank == 0:
        works = [dist.isend(torch.tensor([float(i)]), 1) for i in range(count)]
        for work in works:
            work.wait()
    elif rank == 1:
        gots = [torch.zeros(1) for _ in range(count)]
        works = [dist.irecv(got, 0) for got in gots]
        for work in works:
            work.wait()
        check.that("a flood of small ones", [got.item() for got in gots] == [float(i) for i in range(count)])
    dist.barrier()
    return check.result()


@pytest.mark.parametrize("nodes", ["2+2", "1+1", "2"])
def test_point_to_point_both_ways(nodes):
    run_ranks(p2p_both_ways, nodes)


def references_of_a_batch(rank, world):
    mine, got = torch.full((1000,), float(rank)), torch.zeros(1000)
    before = mine._use_count(), got._use_count()
    works = dist.batch_isend_irecv([dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)])
    for work in works:
        work.wait()
    del work, works
    deadline = time.monotonic() + 20  # a lane drops them, a moment later
    while (mine._use_count(), got._use_count()) != before and time.monotonic() < deadline:
        time.sleep(0.01)
    return before, (mine._use_count(), got._use_count())


def test_a_batch_keeps_no_tensor():
    """Its works were never freed, and what they had received neither."""
    for before, after in run_ranks(references_of_a_batch, "1+1"):
        assert after == before


def messages_to_oneself(rank, world):
    check = Checker(rank)

    def mine(value, n=1000):
        return torch.full((n,), float(value))

    def fails(name, errors, call, *words):
        error = str(check.raises(name, errors, call))
        check.that(f"{name}: says why", all(word in error for word in words), error)

    # Either may be first; of one tag they come in order, tags pass each other.
    sends = [dist.isend(mine(turn), rank, tag=turn % 2) for turn in range(4)]
    gots = [mine(-1) for _ in range(6)]
    order = [1, 3, 0, 2]
    receives = [dist.irecv(got, rank, tag=turn % 2) for turn, got in zip(order, gots)]
    receives += [dist.irecv(gots[4], rank, tag=7), dist.irecv(gots[5], tag=8)]
    check.that("not before it was sent", not receives[4].is_completed() and not receives[5].is_completed())
    sends += [dist.isend(mine(7), rank, tag=7), dist.isend(mine(8), rank, tag=8)]
    for work in sends + receives:
        work.wait()
    for want, got in zip([*order, 7, 8], gots):
        check.equal(f"message {want}", got, mine(want))
    check.that("whose it is", receives[5]._source_rank() == rank, receives[5]._source_rank())
    for what, sent, got in [
        ("empty", torch.ones(0), torch.ones(0)),
        ("large", torch.arange(3_000_000), torch.zeros(3_000_000, dtype=torch.int64)),
        ("strided", torch.arange(12.0).view(3, 4).t(), torch.zeros(3, 4).t()),
    ]:
        ring = [dist.P2POp(dist.isend, sent, rank), dist.P2POp(dist.irecv, got, rank)]
        for work in dist.batch_isend_irecv(ring):
            work.wait()
        check.equal(what, got, sent)
    same = mine(5)
    for work in [dist.isend(same, rank), dist.irecv(same, rank)]:
        work.wait()
    check.equal("to where it is", same, mine(5))
    receive, send = dist.irecv(mine(0, 10), rank), dist.isend(mine(0, 11), rank)
    for work in (receive, send):
        fails("another size", RuntimeError, work.wait, "sent 44 bytes", "expects 40; both sides")
    fails("send() waits at once", ValueError, lambda: dist.send(mine(0), rank), "should not be the same as the rank")
    dist.barrier()
    group = dist.new_group(list(range(world)), timeout=timedelta(seconds=1))
    for name, work in [("send", group.send([mine(0)], rank, 0)), ("recv", group.recv([mine(0)], rank, 1))]:
        fails(f"a {name} alone", RuntimeError, work.wait, f"{name} of 4000 bytes", f"rank {rank} (itself)", "timed out")
    got = mine(0)
    late = [group.send([mine(3)], rank, 0), group.recv([got], rank, 0)]
    for work in late:
        work.wait()
    check.equal("after one that timed out", got, mine(3))
    dist.barrier()
    alone = dist.isend(mine(0), rank)  # nobody receives it: leaving does not wait for that
    check.that("is pending", not alone.is_completed())
    return check.result()


@pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="gloo has no messages to oneself")
@pytest.mark.parametrize("nodes", ["1", "1+1"])
def test_messages_to_oneself(nodes):
    run_ranks(messages_to_oneself, nodes)


# ------------------------------------------------------------- tensors that get other memory while they are under way


def operations_on(made, rank, world):
    """By name: a call that returns a Work, and the tensors that it was given. Rank 0 cannot be done without rank 1."""
    group = dist.distributed_c10d._get_default_group()
    n = 6
    some = functools.partial(made, n)
    across = functools.partial(made, 2, 3, across=True)  # travels through a temporary
    every = lambda one: [one() for _ in range(world)]  # noqa: E731

    def coalesced(a, b):
        with dist._coalescing_manager(async_ops=True) as manager:
            dist.all_reduce(a)
            dist.all_reduce(b)
        return manager.works[0] if len(manager.works) == 1 else manager

    def gathered(outs, one):
        return dist.gather(one, outs if rank == 0 else None, dst=0, async_op=True)

    def scattered(one, ins):
        return dist.scatter(one, ins if rank == 1 else None, src=1, async_op=True)

    whole = functools.partial(made, n * world)
    yield "all_reduce", lambda a: dist.all_reduce(a, async_op=True), [some()]
    yield "all_reduce, strided", lambda a: dist.all_reduce(a, async_op=True), [across()]
    yield "all_reduce of two", lambda a, b: group.allreduce([a, b]), [some(), some()]
    yield "all_reduce_coalesced", lambda a, b: group.allreduce_coalesced([a, b]), [some(), some()]
    yield "coalescing manager", coalesced, [some(), some()]
    yield "broadcast", lambda a: dist.broadcast(a, 1, async_op=True), [some()]
    yield "broadcast, strided", lambda a: dist.broadcast(a, 1, async_op=True), [across()]
    yield "broadcast of two", lambda a, b: group.broadcast([a, b], broadcast_from(1)), [some(), some()]
    yield "reduce", lambda a: dist.reduce(a, 0, async_op=True), [some()]
    for name, one in [("all_gather", some), ("all_gather, strided", across)]:
        yield name, lambda *a: dist.all_gather(list(a[1:]), a[0], async_op=True), [one(), *every(one)]
    yield "all_gather_into_tensor", lambda a, b: dist.all_gather_into_tensor(a, b, async_op=True), [whole(), some()]
    yield "gather", lambda *a: gathered(list(a[1:]), a[0]), [some(), *every(some)]
    yield "scatter", lambda *a: scattered(a[0], list(a[1:])), [some(), *every(some)]
    yield "reduce_scatter", lambda *a: dist.reduce_scatter(a[0], list(a[1:]), async_op=True), [some(), *every(some)]
    yield "reduce_scatter_tensor", lambda a, b: dist.reduce_scatter_tensor(a, b, async_op=True), [some(), whole()]
    yield "all_to_all_single", lambda a, b: dist.all_to_all_single(a, b, async_op=True), [some(), some()]
    both = lambda *a: dist.all_to_all(list(a[:world]), list(a[world:]), async_op=True)  # noqa: E731
    yield "all_to_all", both, [*every(some), *every(some)]
    yield "send", lambda a: dist.irecv(a, 0) if rank == 1 else dist.isend(a, 1), [some()]
    yield "receive", lambda a: dist.isend(a, 0) if rank == 1 else dist.irecv(a, 1), [some()]
    yield "receive, strided", lambda a: dist.isend(a, 0) if rank == 1 else dist.irecv(a, 1), [across()]


def broadcast_from(root):
    options = dist.BroadcastOptions()
    options.rootRank = root
    return options


def other_memory(rank, world):
    check = Checker(rank)
    kept = []

    def made(*sizes, across=False):
        array = numpy.ones(sizes, dtype=numpy.float32)
        if not across:
            kept.append(weakref.ref(array))  # alive as long as the tensor's memory is
        tensor = torch.from_numpy(array)
        return tensor.t() if across else tensor

    for turn, (name, call, tensors) in enumerate(operations_on(made, rank, world)):
        if rank == 1:
            zygote.context.meet((turn + 1) * world)
            call(*tensors).wait()
        else:
            work = call(*tensors)
            others = [torch.full_like(tensor, 77.0) for tensor in tensors]
            for tensor, other in zip(tensors, others):
                tensor.data = other
            gc.collect()
            alive = [ref() is not None for ref in kept]
            if not hasattr(work, "is_completed") or not work.is_completed():  # a send may be
                # Those that gather() and scatter() did not take on this rank are free, as they should be.
                taken = alive[:1] if name == "scatter" else alive
                check.that(f"{name}: its memory stays", all(taken), alive)
            zygote.context.meet((turn + 1) * world)
            work.wait()
            for other in others:
                check.that(f"{name}: other memory is left alone", bool((other == 77.0).all()), other)
            del work
            ends = time.monotonic() + 20 * harness.TIME_SCALE  # a lane drops them, a moment later
            while any(ref() is not None for ref in kept) and time.monotonic() < ends:
                time.sleep(0.001)
            check.that(f"{name}: its memory is let go of", all(ref() is None for ref in kept), kept)
        kept.clear()
        dist.barrier()
    return check.result()


@pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="gloo writes to memory that is somebody else's")
@pytest.mark.parametrize("nodes", ["1+1", "2"])
def test_a_tensor_gets_other_memory_while_its_operation_is_under_way(nodes):
    run_ranks(other_memory, nodes)


# ------------------------------------------------------------------------------------------------ the deadlock test


def different_orders(rank, world, group_count, operations, seed):
    """Groups issued in a different order on each rank cannot deadlock on each other's memory.

    Operations of one group come in the same order everywhere; how groups interleave is each rank's own choice.
    """
    check = Checker(rank)
    plan_random = random.Random(seed)
    groups = []
    for index in range(group_count):
        size = world if index % 3 == 0 else plan_random.randint(2, world)
        members = sorted(plan_random.sample(range(world), size))
        groups.append((members, dist.new_group(members)))
    plans = [[] for _ in groups]
    for number in range(operations):
        index = plan_random.randrange(group_count)
        kind = plan_random.choice(["all_reduce", "all_reduce", "broadcast", "all_gather", "all_to_all", "barrier"])
        size = plan_random.choice([1, 17, 300, 4096, 20_000])
        plans[index].append((number, kind, size))

    own = random.Random(seed * 1000 + rank)
    queues = [(groups[i], list(reversed(plans[i]))) for i in range(group_count) if rank in groups[i][0] and plans[i]]
    pending = []
    while queues:
        position = own.randrange(len(queues))
        (members, group), queue = queues[position]
        for _ in range(own.randint(1, 6)):  # runs of one group as well as single steps
            if queue:
                pending.append(_issue(rank, members, group, *queue.pop()))
        if not queue:
            queues.pop(position)
    own.shuffle(pending)
    for number, work, verify in pending:
        work.wait()
        problem = verify()
        check.that(f"operation {number}", not problem, problem)
    return check.result()


def _issue(rank, members, group, number, kind, size):
    value = float(rank + number % 100)
    world = len(members)
    values = [float(member + number % 100) for member in members]
    if kind == "all_reduce":
        tensor = torch.full((size,), value)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        want = torch.full((size,), sum(values))
        outputs, wants = [tensor], [want]
    elif kind == "broadcast":
        root = number % world
        tensor = torch.full((size,), value)
        work = dist.broadcast(tensor, members[root], group=group, async_op=True)
        outputs, wants = [tensor], [torch.full((size,), values[root])]
    elif kind == "all_gather":
        outputs = [torch.zeros(size) for _ in members]
        work = dist.all_gather(outputs, torch.full((size,), value), group=group, async_op=True)
        wants = [torch.full((size,), v) for v in values]
    elif kind == "all_to_all":
        output = torch.zeros(world * size)
        work = dist.all_to_all_single(output, torch.full((world * size,), value), group=group, async_op=True)
        outputs, wants = [output], [torch.tensor(values).repeat_interleave(size)]
    else:
        work = dist.barrier(group=group, async_op=True)
        outputs, wants = [], []

    def verify():
        for output, want in zip(outputs, wants, strict=True):
            if not torch.equal(output, want):
                return f"{kind} of {size} on {members}: {output[:3]}, expected {want[:3]}"
        return ""

    return number, work, verify


@pytest.mark.parametrize("nodes", ["1+1", "2+2", "2+1+1"])
@pytest.mark.timeout_s(300)
def test_groups_in_different_orders_do_not_deadlock(nodes):
    results = run_ranks(different_orders, nodes, args=(64, 2000, 7), env=SMALLEST_POOLS, timeout=240)
    print(f"{sum(result['cases'] for result in results)} comparisons in {results.seconds:.1f} s")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.timeout_s(400)
def test_groups_in_different_orders_do_not_deadlock_thoroughly(seed):
    env = SMALLEST_POOLS if seed % 2 else {}
    run_ranks(
        different_orders, ["2+2", "1+1+1+1", "3+1", "4", "ABAB"][seed], args=(64, 4000, seed), env=env, timeout=360
    )


# --------------------------------------------------------------------------------------------- random sequences

KINDS = [
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
    "p2p",
    "barrier",
    "all_reduce_coalesced",
    "exchange",
    "objects",
]
REGROUP_EVERY = 100  # operations after which one group goes and another comes


def random_sequence(rank, world, nodes, seed, count):
    """All ranks draw the same sequence over random groups, dtypes, sizes, operations and async flags; each checks
    every result. Asynchronous operations stay open for a random while."""
    check = Checker(rank)
    draw = random.Random(seed)
    node_of = harness.parse_nodes(nodes)
    groups = [(list(range(world)), dist.group.WORLD)]

    def another_group():
        members = sorted(draw.sample(range(world), draw.randint(1 if harness.IS_HYBRIDPS else 2, world)))
        return members, dist.new_group(members)

    for _ in range(5):
        groups.append(another_group())
    dtypes = [d for d in reference.REDUCED if not (d in (torch.bool, torch.int16) and harness.IS_GLOO)]
    pending = []

    def finish(most):
        while len(pending) > most:
            work, verify = pending.pop(draw_own.randrange(len(pending)))
            work.wait()
            verify()

    draw_own = random.Random(seed * 7 + rank)
    for number in range(count):
        if harness.IS_HYBRIDPS and number % REGROUP_EVERY == REGROUP_EVERY - 1:
            index = draw.randrange(1, len(groups))
            members, group = groups[index]
            if rank in members:
                finish(0)
                dist.destroy_process_group(group)
            groups[index] = another_group()
        members, group = draw.choice(groups)
        kind, dtype = draw.choice(KINDS), draw.choice(dtypes)
        op = draw.choice(reference.ops_for(dtype))
        size = draw.choice([0, 1, 3, 64, 999, draw.randrange(5000), draw.randrange(70_000)])
        root, asynchronous = draw.randrange(len(members)), draw.random() < 0.6
        peer = draw.randrange(len(members))
        if harness.IS_GLOO and (op == "PREMUL_SUM" or (op == "AVG" and not dtype.is_floating_point)):
            op = "SUM"
        if harness.IS_GLOO and (
            (kind == "all_reduce_coalesced" and size == 0) or (kind == "gather" and dtype.is_complex)
        ):
            size, dtype, op = 1, torch.float32, "SUM"
        if rank not in members:
            continue
        name = f"seed {seed} operation {number}: {kind} {reference.name_of(dtype)} {op} {size} on {members}"
        ours = [node_of[member] for member in members]
        ours = [sorted(set(ours), key=ours.index).index(node) for node in ours]
        operation = _Random(check, rank, members, group, ours, kind, dtype, op, size, root, peer, number, name)
        work = operation.issue(asynchronous)
        if asynchronous and work is not None:
            pending.append((work, operation.verify))
            if draw_own.random() < 0.3:
                finish(draw_own.randrange(20))
        else:
            operation.verify()
    finish(0)
    return check.result()


class _Random:
    def __init__(self, check, rank, members, group, node_of, kind, dtype, op, size, root, peer, number, name):
        self.__dict__.update(locals())
        self.me = members.index(rank)
        self.world = len(members)
        self.verify = lambda: None

    def inputs(self, count):
        kind = reference.kind_for(self.dtype, self.op)
        return [reference.values(self.dtype, count, member, kind, self.number % 5) for member in self.members]

    def want(self, inputs):
        return reference.reduced(inputs, self.node_of, self.op)

    def issue(self, a):
        return getattr(self, self.kind)(a)

    def all_reduce(self, a):
        inputs = self.inputs(self.size)
        got = inputs[self.me].clone()
        self.verify = lambda: self.check.reduced(self.name, got, self.want(inputs), same=False)
        return dist.all_reduce(got, reference.torch_op(self.op, self.me), self.group, async_op=a)

    def all_reduce_coalesced(self, a):
        inputs = [self.inputs(self.size), self.inputs(5)]
        gots = [many[self.me].clone() for many in inputs]

        def verify():
            for got, many in zip(gots, inputs, strict=True):
                self.check.reduced(self.name, got, self.want(many), same=False)

        self.verify = verify
        return dist.all_reduce_coalesced(gots, reference.torch_op(self.op, self.me), self.group, async_op=a)

    def reduce(self, a):
        inputs = self.inputs(self.size)
        got = inputs[self.me].clone()
        if self.me == self.root:
            self.verify = lambda: self.check.reduced(self.name, got, self.want(inputs), same=False)
        op = reference.torch_op(self.op, self.me)
        return dist.reduce(got, self.members[self.root], op, self.group, async_op=a)

    def reduce_scatter(self, a):
        inputs = self.inputs(self.size * self.world)
        got = torch.empty(self.size, dtype=self.dtype)
        mine = slice(self.me * self.size, (self.me + 1) * self.size)
        self.verify = lambda: self.check.reduced(self.name, got, self.want(inputs)[mine], same=False)
        op = reference.torch_op(self.op, self.me)
        return dist.reduce_scatter_tensor(got, inputs[self.me].clone(), op, self.group, async_op=a)

    def _equal(self, gots, wants):
        def verify():
            for got, want in zip(gots, wants, strict=True):
                self.check.equal(self.name, got, want)

        self.verify = verify

    def broadcast(self, a):
        inputs = self.inputs(self.size)
        got = inputs[self.me].clone()
        self._equal([got], [inputs[self.root]])
        return dist.broadcast(got, self.members[self.root], self.group, async_op=a)

    def all_gather(self, a):
        inputs = self.inputs(self.size)
        gots = [torch.empty(self.size, dtype=self.dtype) for _ in inputs]
        self._equal(gots, inputs)
        return dist.all_gather(gots, inputs[self.me].clone(), self.group, async_op=a)

    def gather(self, a):
        inputs = self.inputs(self.size)
        gots = [torch.empty(self.size, dtype=self.dtype) for _ in inputs] if self.me == self.root else None
        self._equal(gots or [], inputs if gots else [])
        return dist.gather(inputs[self.me].clone(), gots, self.members[self.root], self.group, async_op=a)

    def scatter(self, a):
        inputs = self.inputs(self.size)
        got = torch.empty(self.size, dtype=self.dtype)
        self._equal([got], [inputs[self.me]])
        source = [tensor.clone() for tensor in inputs] if self.me == self.root else None
        return dist.scatter(got, source, self.members[self.root], self.group, async_op=a)

    def all_to_all(self, a):
        """Uneven: rank i sends (size + i * j) % 4096 elements to rank j."""

        def split(i, j):
            return (self.size + i * j) % 4096

        send = [split(self.me, j) for j in range(self.world)]
        receive = [split(i, self.me) for i in range(self.world)]
        source = reference.values(self.dtype, sum(send), self.rank, salt=self.number % 5)
        got = torch.empty(sum(receive), dtype=self.dtype)
        wants = []
        for i, member in enumerate(self.members):
            splits = [split(i, j) for j in range(self.world)]
            theirs = reference.values(self.dtype, sum(splits), member, salt=self.number % 5)
            wants.append(theirs[sum(splits[: self.me]) :][: splits[self.me]])
        self._equal([got], [torch.cat(wants)])
        return dist.all_to_all_single(got, source.clone(), receive, send, self.group, async_op=a)

    def p2p(self, a):
        """root sends to peer; the others look on."""
        if self.root == self.peer or self.me not in (self.root, self.peer):
            return None
        inputs = self.inputs(self.size)
        if self.me == self.root:
            work = dist.isend(inputs[self.me].clone(), self.members[self.peer], self.group, tag=self.number % 3)
        else:
            got = torch.empty(self.size, dtype=self.dtype)
            self._equal([got], [inputs[self.root]])
            work = dist.irecv(got, self.members[self.root], self.group, tag=self.number % 3)
        if not a:
            work.wait()
        return work

    def exchange(self, a):
        """Both neighbours at once, in one batch, each message with the length that its sender's place gives it."""
        if self.world == 1:
            return None
        before, after = (self.me - 1) % self.world, (self.me + 1) % self.world
        inputs = self.inputs(self.size + self.world)
        mine = inputs[self.me][: self.size + self.me].clone()
        gots = [torch.empty(self.size + peer, dtype=self.dtype) for peer in (before, after)]
        self._equal(gots, [inputs[peer][: self.size + peer] for peer in (before, after)])

        # With two ranks both neighbours are the same one: tags keep what goes forward apart from what goes back.
        batch = [
            dist.P2POp(dist.irecv, gots[0], self.members[before], self.group, 1),
            dist.P2POp(dist.isend, mine, self.members[after], self.group, 1),
            dist.P2POp(dist.isend, mine, self.members[before], self.group, 2),
            dist.P2POp(dist.irecv, gots[1], self.members[after], self.group, 2),
        ]
        works = dist.batch_isend_irecv(batch)
        for work in works[1:] if a else works:
            work.wait()
        return works[0]

    def objects(self, a):
        gots = [None] * self.world
        dist.all_gather_object(gots, (self.number, self.rank, "x" * (self.size % 3000)), self.group)
        wants = [(self.number, member, "x" * (self.size % 3000)) for member in self.members]
        self.verify = lambda: self.check.that(self.name, gots == wants, [got[:2] for got in gots])

    def barrier(self, a):
        return dist.barrier(self.group, async_op=a)


@pytest.mark.parametrize("seed", range(RANDOM_SEEDS))
@pytest.mark.parametrize("nodes", ["2+2", "2+1+1"])
@pytest.mark.timeout_s(120 + RANDOM_OPS)
def test_random_sequences(nodes, seed):
    results = run_ranks(random_sequence, nodes, args=(nodes, seed, RANDOM_OPS), timeout=90 + RANDOM_OPS)
    print(f"seed {seed} on {nodes}: {RANDOM_OPS} operations, {reference.total_cases(results)} comparisons")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 100 + LONG_SEEDS))
@pytest.mark.timeout_s(200 + LONG_OPS // 4)
def test_random_sequences_at_length(seed):
    nodes = harness.LAYOUTS[seed % len(harness.LAYOUTS)]
    if nodes == "1":
        nodes = "1+1+1"
    env = SMALLEST_POOLS if seed % 2 else {}
    results = run_ranks(random_sequence, nodes, args=(nodes, seed, LONG_OPS), env=env, timeout=100 + LONG_OPS // 4)
    print(f"seed {seed} on {nodes}: {LONG_OPS} operations, {reference.total_cases(results)} comparisons")
