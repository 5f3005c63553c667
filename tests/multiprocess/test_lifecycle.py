"""Coming and going: ranks that leave early or never come, groups made and destroyed, exits of every kind, forks.

HYBRIDPS_TEST_REINITS   how often destroy and init follow each other in one process (default 20)
"""

import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import harness
import pytest
import torch
import torch.distributed as dist
import zygote
from harness import lacks, run_ranks
from reference import Checker

REINITS = int(os.environ.get("HYBRIDPS_TEST_REINITS", "20"))


def thread_count():
    return len(os.listdir("/proc/self/task"))


def descriptor_count():
    return len(os.listdir("/proc/self/fd"))


def settled(measure, most, seconds=10.0):
    """The smallest value seen until it is at most `most` or the time is up: tearing down may need a moment."""
    end = time.monotonic() + seconds
    lowest = measure()
    while lowest > most and time.monotonic() < end:
        time.sleep(0.05)
        lowest = min(lowest, measure())
    return lowest


# --------------------------------------------------------------------------------- a rank that has done its part


def leave_early(rank, world, what, destroy):
    """Rank 0 (for isend, the sender) has done its part and goes; the others come two seconds later."""
    check = Checker(rank)
    context = zygote.context
    n = 50_000
    dist.barrier()
    late = rank != 0
    if late:
        context.store.wait(["the early one is through"])
        time.sleep(2.0)
    if what == "reduce":
        tensor = torch.full((n,), rank + 1.0)
        work = dist.reduce(tensor, world - 1, async_op=True)
        if rank == 0:
            context.store.set("the early one is through", "1")
        work.wait()
        if rank == world - 1:
            check.equal("reduce", tensor, torch.full((n,), world * (world + 1) / 2))
    elif what == "broadcast":
        tensor = torch.arange(float(n)) if rank == 0 else torch.zeros(n)
        work = dist.broadcast(tensor, 0, async_op=True)
        if rank == 0:
            context.store.set("the early one is through", "1")
        work.wait()
        check.equal("broadcast", tensor, torch.arange(float(n)))
    elif what == "isend":
        if rank == 0:
            works = [dist.isend(torch.full((n,), float(peer)), peer) for peer in range(1, world)]
            context.store.set("the early one is through", "1")
            for work in works:
                work.wait()
        else:
            tensor = torch.zeros(n)
            dist.recv(tensor, 0)
            check.equal("isend", tensor, torch.full((n,), float(rank)))
    elif what == "dropped allreduce":
        # Not waited for by the one who goes: the others' results must be right all the same.
        tensor = torch.full((n,), rank + 1.0)
        work = dist.all_reduce(tensor, async_op=True)
        if rank == 0:
            context.store.set("the early one is through", "1")
            del work
            if destroy:
                dist.destroy_process_group()
            return check.result()
        work.wait()
        check.equal("allreduce", tensor, torch.full((n,), world * (world + 1) / 2))
    if destroy:
        dist.destroy_process_group()
    return check.result()


@pytest.mark.parametrize("destroy", [True, False], ids=["destroy", "exit"])
@pytest.mark.parametrize("what", ["reduce", "broadcast", "isend", "dropped allreduce"])
@pytest.mark.parametrize("nodes", ["2+2", pytest.param("1+1", marks=pytest.mark.slow)])
def test_a_rank_leaves_after_its_own_part(what, nodes, destroy):
    if what == "dropped allreduce" and lacks("leaving_early"):
        pytest.skip(harness.GLOO_LACKS["leaving_early"])
    run_ranks(leave_early, nodes, args=(what, destroy), destroy=False)


# ------------------------------------------------------------------------------------------------------- exits


def exit_somehow(rank, world, how):
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    assert tensor[0] == world
    if how == "in flight":
        dist.all_reduce(torch.ones(1000), async_op=True)  # completed by others or not, the exit is orderly
    elif how == "unmatched":
        if rank == 0:
            zygote.context.kept = dist.irecv(torch.ones(10), world - 1)  # never served
    elif how == "callback":
        dist.all_reduce(torch.ones(1000), async_op=True).get_future().then(lambda f: f.value())
    elif how == "sys.exit":
        sys.exit(0)
    elif how == "raise":
        raise SystemExit(3)
    elif how == "thread":
        threading.Thread(target=lambda: dist.all_reduce(torch.ones(10)), daemon=False).start()
    elif how == "sub-groups":
        zygote.context.kept = [dist.new_group(list(range(world))) for _ in range(3)]
        dist.all_reduce(tensor, group=zygote.context.kept[1])
    return True


EXITS = ["return", "in flight", "unmatched", "callback", "sys.exit", "raise", "thread", "sub-groups"]


@pytest.mark.parametrize("how", EXITS)
def test_exit_without_destroy(how):
    """Exit code 0 (or the program's own), soon, and nothing on stderr that frightens."""
    if how == "unmatched" and lacks("exit_with_pending"):
        pytest.skip(harness.GLOO_LACKS["exit_with_pending"])
    if how == "callback" and lacks("exit_in_callback"):
        pytest.skip(harness.GLOO_LACKS["exit_in_callback"])
    codes = dict.fromkeys(range(4), 3) if how == "raise" else {}
    results = run_ranks(exit_somehow, "2+2", args=(how,), destroy=False, full_exit=True, expected_exits=codes)
    slowest = max(report.ended_at_s - report.returned_at_s for report in results.reports)
    print(f"exit '{how}': {slowest:.2f} s after the program's end")
    assert slowest < 30 * harness.TIME_SCALE
    for report in results.reports:
        for word in ["terminate called", "Segmentation", "Fatal Python error", "core dumped"]:
            assert word not in report.output + report.stacks, report.output


EXIT_HANDLER = """
import atexit

def part():
    dist.barrier()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    if destroys:
        dist.destroy_process_group()
    print("the handler saw", tensor.sum().item())

atexit.register(part)
import sys
import torch
import torch.distributed as dist
destroys = sys.argv[2] == "destroys"
dist.init_process_group(sys.argv[1], rank=0, world_size=1, store=dist.HashStore())
dist.all_reduce(torch.ones(3))
"""


@pytest.mark.parametrize("how", ["destroys", "leaves it open"])
def test_an_exit_handler_that_was_registered_before_torch_was_imported_has_the_group(how):
    command = [sys.executable, "-c", EXIT_HANDLER, harness.BACKEND, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120 * harness.TIME_SCALE)
    assert (done.returncode, done.stdout) == (0, "the handler saw 3.0\n"), done
    assert "Traceback" not in done.stderr, done.stderr


def exit_while_others_work(rank, world):
    """A rank that leaves without a word: those that still need it get an error, nobody hangs."""
    dist.barrier()
    zygote.context.meet(world)  # what rank 0 says of it may overtake the end of the barrier on its way to the other node
    if rank == 1:
        return "left"
    try:
        for _ in range(1000):
            dist.all_reduce(torch.ones(1000))
    except Exception as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("nodes", ["2+2", "1+1+1+1"])
def test_a_rank_that_leaves_too_early(nodes):
    results = run_ranks(exit_while_others_work, nodes, destroy=False, pg_timeout=20)
    for rank in [0, 2, 3]:
        assert results[rank] not in ("no error", None), f"rank {rank}"
        if harness.IS_HYBRIDPS:
            assert "rank 1" in results[rank], results[rank]


# -------------------------------------------------------------------------------------------- init and destroy


def reinit(rank, world, times):
    check = Checker(rank)
    context = zygote.context
    counts = []
    for turn in range(times):
        context.init(prefix=f"turn{turn}")
        tensor = torch.full((1000 + turn,), rank + 1.0)
        dist.all_reduce(tensor)
        check.equal(f"turn {turn}", tensor, torch.full((1000 + turn,), world * (world + 1) / 2))
        if turn % 3 == 0:
            group = dist.new_group([0, world - 1])
            if rank in (0, world - 1):
                dist.all_reduce(tensor, group=group)
        dist.destroy_process_group()
        counts.append((thread_count(), descriptor_count()))
    early = counts[min(3, times - 1)]
    threads, descriptors = settled(thread_count, early[0]), settled(descriptor_count, early[1])
    check.that("threads do not grow", threads <= early[0] + 1, f"{counts}")
    check.that("descriptors do not grow", descriptors <= early[1] + 2, f"{counts}")
    return check.result()


@pytest.mark.parametrize("nodes", ["2+2", "1+1"])
def test_destroy_and_init_again(nodes):
    times = REINITS if nodes == "2+2" else min(REINITS, 8)
    run_ranks(reinit, nodes, args=(times,), init=False, destroy=False, timeout=60 + 3 * times)


@pytest.mark.slow
@pytest.mark.timeout_s(500)
def test_destroy_and_init_a_hundred_times():
    run_ranks(reinit, "2+2", args=(100,), init=False, destroy=False, timeout=450)


def aborted(rank, world, by):
    """torch forgets an aborted world without shutting it down: it has to go by itself, though `kept` still names it."""
    check = Checker(rank)
    before = thread_count(), descriptor_count()
    for turn in range(3):
        zygote.context.init(prefix=f"turn{turn}")
        kept = dist.group.WORLD
        groups = [dist.new_group(list(range(world))) for _ in range(2)]
        for group in [None, *groups]:
            tensor = torch.ones(1000)
            dist.all_reduce(tensor, group=group)
            check.equal(f"turn {turn}", tensor, torch.full((1000,), float(world)))
        dist.barrier()
        zygote.context.meet((turn + 1) * world)  # an abort may overtake the end of a barrier on its way to another rank
        work = dist.all_reduce(torch.ones(10), async_op=True) if by == "rank 0" and rank != 0 else None
        began = time.monotonic()
        if work is not None:
            try:
                work.wait()
                check.that("an operation that rank 0 aborts", False, "succeeded")
            except RuntimeError as error:
                check.that("says who", "aborted by the program" in str(error) and "rank 0" in str(error), str(error))
        dist.distributed_c10d._abort_process_group()
        check.that("takes bounded time", time.monotonic() - began < 15, f"{time.monotonic() - began} s")
        try:
            kept.allreduce([torch.ones(3)]).wait()
            check.that("no further operation", False, "succeeded")
        except RuntimeError as error:
            check.that("says why", "aborted by the program" in str(error), str(error))
        del kept, groups, group, work
    most = before[0] + 1, before[1] + 2
    threads, descriptors = settled(thread_count, most[0]), settled(descriptor_count, most[1])
    check.that("threads end", threads <= most[0], f"{before[0]} before, {threads} after")
    check.that("descriptors are closed", descriptors <= most[1], f"{before[1]} before, {descriptors} after")
    return check.result()


@pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="gloo's groups cannot be aborted")
@pytest.mark.parametrize("by", ["all", "rank 0"])
@pytest.mark.parametrize("nodes", ["2+2", "1+1"])
def test_an_aborted_world_leaves_nothing_behind(nodes, by):
    run_ranks(aborted, nodes, args=(by,), init=False, destroy=False)


def restarted(rank, world):
    """As torchrun restarts: same store, same prefix. Each agent counts the restarts of its own workers alone."""
    check = Checker(rank)
    context = zygote.context
    for restart in range(3):
        os.environ.update(TORCHELASTIC_RUN_ID="run", TORCHELASTIC_RESTART_COUNT=str(restart * (rank % 2)))
        pid = os.fork()
        if pid == 0:  # the worker of this incarnation; the parent plays torchrun's agent
            code = 1
            try:
                store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), None, False)
                zygote.init_group(rank, world, store, context.launch.backend, 30)
                tensor = torch.full((100,), rank + 1.0 + restart)
                dist.all_reduce(tensor)
                code = 0 if tensor[0] == sum(r + 1.0 + restart for r in range(world)) else 2
                if restart == 0:
                    os._exit(code)  # the first incarnation dies without a word
                dist.destroy_process_group()
            finally:
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        check.that(f"incarnation {restart}", os.waitstatus_to_exitcode(status) == 0, status)
        context.store.add(f"restart {restart} over", 1)
        while context.store.add(f"restart {restart} over", 0) < world:
            time.sleep(0.02)
    return check.result()


@pytest.mark.parametrize("nodes", ["2+2", "1+1"])
def test_a_restart_on_the_same_store(nodes):
    if lacks("restart"):
        pytest.skip(harness.GLOO_LACKS["restart"])
    run_ranks(restarted, nodes, init=False, destroy=False)


def absent(rank, world, missing):
    """init_process_group while a rank never comes."""
    if rank == missing:
        zygote.context.store.wait(["the others are done"])
        return "absent"
    start = time.monotonic()
    try:
        zygote.context.init(timeout_s=5)
        message = "no error"
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    if zygote.context.store.add("done", 1) == world - 1:
        zygote.context.store.set("the others are done", "1")
    return message, seconds


@pytest.mark.parametrize(("nodes", "missing"), [("2+2", 3), ("2+2", 0), ("1+1", 1)])
def test_a_rank_that_never_comes(nodes, missing):
    results = run_ranks(absent, nodes, args=(missing,), init=False, destroy=False)
    for rank, result in enumerate(results):
        if rank == missing:
            continue
        message, seconds = result
        print(f"rank {rank} after {seconds:.1f} s: {message}")
        assert message != "no error"
        assert seconds < 30 * harness.TIME_SCALE
        if harness.IS_HYBRIDPS:
            assert f"{missing}" in message and "rank" in message, message


def dies_at_start(rank, world):
    """One rank dies while the others set up: they get an error, and the process lives on."""
    if rank == 2:
        threading.Timer(0.02, lambda: os._exit(7)).start()
    try:
        zygote.context.init(timeout_s=8)
        for _ in range(200):
            dist.all_reduce(torch.ones(1000))
            time.sleep(0.01)
    except Exception as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        return str(error)
    if rank == 2:
        time.sleep(5)
    return "no error"


@pytest.mark.parametrize("nodes", ["2+2", "1+1+1+1"])
def test_a_rank_that_dies_at_start_up(nodes):
    results = run_ranks(dies_at_start, nodes, init=False, destroy=False, expected_exits={2: 7})
    for rank in [0, 1, 3]:
        print(f"rank {rank}: {results[rank]}")
        assert results[rank] not in ("no error", None)
        if harness.IS_HYBRIDPS:
            assert "2" in results[rank]


STORE = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def store_process():
    """A Store in a process of its own: port and pid."""
    process = subprocess.Popen([sys.executable, "-c", STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield int(process.stdout.readline()), process.pid
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def stoppable_store(store_process):
    yield store_process
    os.kill(store_process[1], signal.SIGCONT)


def store_stands_still(rank, world, address, when):
    """The Store's process is stopped: each call ends in an error that says so, and the process comes to its end."""
    check = Checker(rank)
    port, pid = address
    context = zygote.context
    store = dist.PrefixStore(when, dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False))

    def stop():
        if context.store.add("ready to stop", 1) == world:
            os.kill(pid, signal.SIGSTOP)
            context.store.set("stopped", "1")
        context.store.wait(["stopped"])

    def init(timeout_s):
        dist.init_process_group(
            context.launch.backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=timeout_s)
        )

    if when in ("init", "failing"):
        stop()
        if when == "failing":
            os.environ["HYBRIDPS_LIMITS"] = "chunk_bytes=nonsense"
        error = check.raises("init_process_group", Exception, lambda: init(1))
        if when == "init":
            check.that("names the Store", "Store has not answered" in str(error), str(error))
        else:
            check.that("says why", "HYBRIDPS_LIMITS='chunk_bytes=nonsense'" in str(error), str(error))
        return check.result()
    init(60)
    dist.barrier()
    if when == "exit":  # this one has connected for sub-groups already
        dist.barrier(group=dist.new_group(list(range(world))))
    stop()
    group = dist.new_group(list(range(world)), timeout=timedelta(seconds=1))
    error = check.raises("the new group", Exception, lambda: dist.all_reduce(torch.ones(3), group=group))
    check.that("says so", "timed out" in str(error), str(error))
    dist.all_reduce(torch.ones(3))  # groups that are open need no Store
    if when == "destroy":
        dist.destroy_process_group()
    return check.result()


@pytest.mark.skipif(harness.IS_GLOO, reason="gloo hangs")
@pytest.mark.parametrize("when", ["init", "failing", "destroy", "exit"])
def test_a_store_that_stands_still(stoppable_store, when):
    run_ranks(store_stands_still, "1+1", args=(stoppable_store, when), init=False, destroy=False, timeout=30)


# ------------------------------------------------------------------------------------------------------ groups


def names_other_members(rank, world):
    """torch gives both groups one name, and rank 1 is in neither."""
    check = Checker(rank)
    with_sub_group = dist.new_group([0, 1] if rank == 0 else [0, 2])
    if rank != 1:
        tensor = torch.full((4,), rank + 1.0)
        error = check.raises("the sum", Exception, lambda: dist.all_reduce(tensor, group=with_sub_group))
        check.that("names both lists", "[0, 1]" in str(error) and "[0, 2]" in str(error), str(error))
    dist.barrier()
    return check.result()


@pytest.mark.skipif(harness.IS_GLOO, reason="gloo sums over both")
def test_two_lists_of_members_under_one_name():
    run_ranks(names_other_members, "1+1+1", timeout=30)


def subsets(rank, world):
    check = Checker(rank)

    def try_group(name, members, group):
        tensor = torch.full((1000,), float(rank))
        dist.all_reduce(tensor, group=group)
        check.equal(name, tensor, torch.full((1000,), float(sum(members))))
        check.that(f"{name} rank", dist.get_rank(group) == members.index(rank))
        dist.barrier(group)

    def with_some_ranks():
        for members in [[0], [1, 2], [3, 1], [0, 1, 2, 3], [3, 2, 1, 0], [2]]:
            group = dist.new_group(members)
            if rank in members:
                try_group(f"new_group {members}", dist.get_process_group_ranks(group), group)

    # Older torch counts the groups that a rank is in, for names that are hashes: after these they would differ.
    names_stay_equal = "str(len(_world.pg_names))" not in inspect.getsource(dist.distributed_c10d._hash_ranks_to_str)
    if names_stay_equal:
        with_some_ranks()

    # Local synchronisation: only the members call. (Each rank makes as many groups, or torch's names part ways.)
    for pairs in [[[0, 2], [1, 3]], [[0, 1], [2, 3]]]:
        members = next(pair for pair in pairs if rank in pair)
        try_group(f"local sync {members}", members, dist.new_group(members, use_local_synchronization=True))

    subgroup, _ = dist.new_subgroups(2)
    try_group("new_subgroups", [rank // 2 * 2, rank // 2 * 2 + 1], subgroup)
    mine, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    try_group("by enumeration", [0, 3] if rank in (0, 3) else [1, 2], mine)

    if harness.TORCH >= (2, 15):  # older torch splits only what is bound to a GPU
        split = dist.split_group(split_ranks=[[0, 2], [1, 3]])
        try_group("split_group", [0, 2] if rank in (0, 2) else [1, 3], split)
        deeper = dist.split_group(split, split_ranks=[[0], [1]])
        try_group("split of a split", [rank], deeper)
        parts = dist.split_group(split_ranks=[[1, 2, 3]])
        if rank:
            try_group("split of a part", [1, 2, 3], parts)

    # A timeout of its own, and another backend beside ours.
    other = dist.new_group(backend="gloo")
    try_group("gloo beside", [0, 1, 2, 3], other)
    from_gloo = dist.new_group([0, 1], backend=zygote.context.launch.backend)
    if rank < 2:
        try_group("ours beside gloo", [0, 1], from_gloo)
        dist.destroy_process_group(from_gloo)
    if not names_stay_equal:
        with_some_ranks()
    dist.barrier()
    return check.result()


@pytest.mark.parametrize("nodes", ["2+2", "2+1+1", "1+1+1+1"])
def test_groups_of_every_kind(nodes):
    run_ranks(subsets, nodes)


def under_gloo(rank, world, backend):
    """The world is gloo's; a group of ours finds its own way."""
    check = Checker(rank)
    group = dist.new_group([0, 2, 3], backend=backend)
    if rank != 1:
        tensor = torch.full((70_000,), float(rank))
        dist.all_reduce(tensor, group=group)
        check.equal("under gloo", tensor, torch.full((70_000,), 5.0))
    whole = dist.new_group(backend=backend)
    got = torch.zeros(4)
    dist.all_gather_into_tensor(got, torch.tensor([float(rank)]), group=whole)
    check.equal("whole", got, torch.arange(4.0))
    return check.result()


def test_a_group_whose_parent_is_gloo():
    run_ranks(under_gloo, "2+1+1", args=(harness.BACKEND,), backend="gloo")


def meshes(rank, world, shape):
    check = Checker(rank)
    from torch.distributed.device_mesh import init_device_mesh

    names = ["a", "b", "c"][: len(shape)]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for dim, name in enumerate(names):
        group = mesh.get_group(name)
        members = dist.get_process_group_ranks(group)
        tensor = torch.full((100,), float(rank))
        dist.all_reduce(tensor, group=group)
        check.equal(f"{shape} along {name}", tensor, torch.full((100,), float(sum(members))))
        check.that(f"{shape} size along {name}", len(members) == shape[dim])
    if len(shape) > 1:
        flat = mesh[tuple(names[:2])]._flatten("ab")
        tensor = torch.full((100,), float(rank))
        dist.all_reduce(tensor, group=flat.get_group())
        want = float(sum(dist.get_process_group_ranks(flat.get_group())))
        check.equal(f"{shape} flattened", tensor, torch.full((100,), want))
    dist.barrier()
    return check.result()


@pytest.mark.parametrize(
    ("nodes", "shape"), [("2+2", (2, 2)), ("2+1+1", (4,)), ("4+4", (2, 2, 2)), ("1+1+1+1", (1, 4))]
)
def test_device_meshes(nodes, shape):
    run_ranks(meshes, nodes, args=(shape,), fork_server=harness.framework_zygote)


def many_groups(rank, world, count):
    """64 overlapping groups cost no thread, descriptor or endpoint beyond the first; but a small operation that passes
    bulk may open the second connection that two engines have at most."""
    check = Checker(rank)

    def endpoints():
        if not harness.IS_HYBRIDPS:
            return 0
        from hybridps import _C

        return _C.stats()["endpoints"]

    def use(group):
        tensor = torch.ones(5000)
        dist.all_reduce(tensor, group=group)
        got = torch.zeros(5 * dist.get_world_size(group))
        dist.all_to_all_single(got, torch.ones(5 * dist.get_world_size(group)), group=group)
        check.that("result", tensor[-1] == dist.get_world_size(group))

    for _ in range(3):
        use(dist.group.WORLD)  # every connection of the engine exists by then
    first = dist.new_group(list(range(world)))
    use(first)
    # The lane on which futures complete is made when a future first needs it.
    dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda future: future.value()).wait()
    dist.barrier()
    before = thread_count(), descriptor_count(), endpoints()
    groups = []
    for index in range(count):
        members = [list(range(world)), [0, 1], [world - 2, world - 1], [0, world - 1]][index % 4]
        groups.append((members, dist.new_group(members)))
    for members, group in groups:
        if rank in members:
            use(group)
    dist.barrier()
    after = thread_count(), descriptor_count(), endpoints()
    if not lacks("cheap_groups"):
        second = world - 1  # a descriptor each way
        for name, more, was, now in zip(
            ["threads", "descriptors", "endpoints"], [0, 2 * second, second], before, after, strict=True
        ):
            check.that(f"{name} of {count} groups", now <= was + more, f"{was} before, {now} after")
    for members, group in groups:
        if rank in members:
            dist.destroy_process_group(group)
    dist.barrier()
    return {**check.result(), "before": before, "after": after}


@pytest.mark.parametrize("nodes", ["2+2", "1+1+1+1"])
def test_many_overlapping_groups(nodes):
    count = 64 if harness.IS_HYBRIDPS else 8
    results = run_ranks(many_groups, nodes, args=(count,))
    for rank, result in enumerate(results):
        print(f"rank {rank}: threads, descriptors, endpoints {result['before']}, with {count} groups {result['after']}")


def groups_come_and_go(rank, world, count):
    check = Checker(rank)
    rss = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096  # noqa: E731
    for turn in range(count):
        if turn == count // 4:
            time.sleep(1.5)  # the first heartbeats, after 1 s, open the control connections
            before = thread_count(), descriptor_count(), rss()
        group = dist.new_group(list(range(world)))
        tensor = torch.ones(100)
        dist.all_reduce(tensor, group=group)
        check.that(f"turn {turn}", tensor[0] == world)
        dist.destroy_process_group(group)
    check.that("threads", settled(thread_count, before[0]) <= before[0], f"{before}, {thread_count()}")
    check.that("descriptors", settled(descriptor_count, before[1]) <= before[1], f"{before}, {descriptor_count()}")
    growth = rss() - before[2]
    check.that("memory", growth < (32 << 20), f"{growth >> 20} MiB more")
    dist.barrier()
    return {**check.result(), "growth": growth}


@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout_s(600)])])
def test_groups_come_and_go(count):
    if lacks("cheap_groups"):
        pytest.skip(harness.GLOO_LACKS["cheap_groups"])
    results = run_ranks(groups_come_and_go, "2+2", args=(count,), timeout=90 + count // 2)
    print(f"{count} groups made and destroyed: memory grew by {max(r['growth'] for r in results) >> 10} KiB")


# ------------------------------------------------------------------------------------------------------- forks


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((8,), float(index))


def loaders(rank, world):
    """DataLoader workers are forked after init, and again while operations are under way."""
    check = Checker(rank)
    for epoch in range(2):
        works = [dist.all_reduce(torch.ones(50_000), async_op=True) for _ in range(5)]
        loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork")
        seen = 0
        for batch in loader:
            total = batch.sum()
            dist.all_reduce(total)
            seen += len(batch)
            check.that("batch", total.item() == batch.sum().item() * world)
        for work in works:
            work.wait()
        check.that(f"epoch {epoch}", seen == 40)
    return check.result()


@pytest.mark.parametrize("nodes", ["2+2", "1+1"])
def test_data_loader_workers(nodes):
    run_ranks(loaders, nodes)


def forked_child(rank, world):
    """A collective in a forked child is an error at once; the parent goes on; the child exits in order."""
    check = Checker(rank)
    dist.all_reduce(torch.ones(10))
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            dist.all_reduce(torch.ones(10))
            os.write(writer, b"no error")
        except Exception as error:
            os.write(writer, str(error).encode()[:1000])
        os.close(writer)
        sys.exit(code) if rank % 2 else os._exit(code)
    os.close(writer)
    message = b""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        part = os.read(reader, 4096)
        if not part:
            break
        message += part
    _, status = os.waitpid(pid, 0)
    check.that("the child is refused", b"fork" in message.lower(), message)
    check.that("the child exits in order", os.waitstatus_to_exitcode(status) == 0, status)
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    check.equal("the parent goes on", tensor, torch.full((1000,), float(world)))
    return check.result()


@pytest.mark.parametrize("nodes", ["2+2", "1+1"])
def test_a_collective_in_a_forked_child(nodes):
    if lacks("forked_child"):
        pytest.skip(harness.GLOO_LACKS["forked_child"])
    run_ranks(forked_child, nodes)


def idle_cost(rank, world):
    """CPU time of a rank that does nothing for a while."""
    dist.all_reduce(torch.ones(1000))
    dist.barrier()
    cpu, start = time.process_time(), time.monotonic()
    time.sleep(4)
    share = (time.process_time() - cpu) / (time.monotonic() - start)
    dist.barrier()
    return share


def test_an_idle_rank_uses_no_cpu():
    shares = run_ranks(idle_cost, "2+2")
    print("idle ranks use " + ", ".join(f"{share:.2%}" for share in shares) + " of a core")
    assert max(shares) < 0.01
