"""Groups that outlive their members: torch's reconfigure and shrink_group, names for lives of a group, ranks that come back.

Ranks exchange handles through the Store, as torch's own tests do. What is promised of the API is that of torch's Backend.hpp.
"""

import hashlib
import os
import re
import signal
import time
from datetime import timedelta

import harness
import pytest
import torch
import torch.distributed as dist
import zygote
from harness import run_ranks
from reference import Checker
from test_lifecycle import descriptor_count, settled, thread_count

pytestmark = pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="tests of hybridps' own")
needs_reconfigure = pytest.mark.skipif(harness.TORCH < (2, 15), reason="torch has reconfigure() since 2.15")


def begin(rank, size, prefix="group", timeout_s=60.0):
    """The default group, of nobody yet."""
    dist.init_process_group(
        "hybridps",
        store=dist.PrefixStore(prefix, zygote.context.store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
        enable_reconfigure=True,
    )


def tell(key, text="1"):
    zygote.context.store.set(key, text)


def told(key):
    return zygote.context.store.get(key).decode()


def exchange(name, rank, ranks):
    """The handles of `ranks`, in their order."""
    tell(f"{name}/{rank}", dist._get_reconfigure_handle())
    return [told(f"{name}/{r}") for r in ranks]


def meet(name, rank, ranks):
    tell(f"{name}/{rank}")
    for other in ranks:
        told(f"{name}/{other}")


def reconfigure(uuid, handles, seconds=30.0):
    dist._reconfigure(uuid, handles, timeout=timedelta(seconds=seconds)).wait()


def check_sum(check, name, count=1000):
    world = dist.get_world_size()
    tensor = torch.full((count,), dist.get_rank() + 1.0)
    dist.all_reduce(tensor)
    check.equal(name, tensor, torch.full((count,), world * (world + 1) / 2))


# ------------------------------------------------------------------------------------------------- what is promised


def promises(rank, world):
    check = Checker(rank)
    everyone = range(world)
    begin(rank, world)
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    check.that("it is supported", dist._supports_reconfigure() and backend.supports_reconfigure)
    error = check.raises("before the first one", RuntimeError, lambda: dist.all_reduce(torch.ones(1)))
    check.that("says what is missing", "reconfigure" in str(error), str(error))

    handles = exchange("handles", rank, everyone)
    check.that("a handle is a text, and stays", isinstance(handles[0], str) and handles == exchange("again", rank, everyone))
    reconfigure(1, handles[::-1])
    check.that("a list: by position", (dist.get_rank(), dist.get_world_size()) == (world - 1 - rank, world))
    check_sum(check, "reversed")
    reconfigure(2, set(handles))
    check.that("a set: all choose the same", (dist.get_rank(), dist.get_world_size()) == (rank, world))
    check_sum(check, "set")
    error = check.raises("a uuid again", RuntimeError, lambda: reconfigure(2, handles))
    check.that("says so", "already used" in str(error), str(error))
    check_sum(check, "and nothing has changed")

    # Messages, of a new group: numbers count from the beginning on all.
    reconfigure(3, handles)
    received = torch.zeros(4)
    sending = dist.isend(torch.full((4,), float(rank)), (rank + 1) % world)
    dist.recv(received, (rank - 1) % world)
    sending.wait()
    check.equal("a message", received, torch.full((4,), float((rank - 1) % world)))
    dist.monitored_barrier(timeout=timedelta(seconds=20))

    # Without the middle one, alone, and all together.
    middle = world // 2
    if rank != middle:
        reconfigure(4, [h for r, h in enumerate(handles) if r != middle])
        check.that("ranks close up", dist.get_rank() == rank - (rank > middle) and dist.get_world_size() == world - 1)
        check_sum(check, "without one")
    reconfigure(10 + rank, [handles[rank]])
    check.that("alone", (dist.get_rank(), dist.get_world_size()) == (0, 1))
    check_sum(check, "alone")
    meet("alone", rank, everyone)
    reconfigure(5, handles)
    check_sum(check, "all again")

    # An abort is no end. It would fail the sum of a rank that is not through with it.
    meet("through with it", rank, everyone)
    pending = dist.all_reduce(torch.ones(10), async_op=True) if rank == 0 else None
    backend.abort()
    check.that("no error", backend.get_error() == torch._C._distributed_c10d.ErrorType.SUCCESS)
    if pending is not None:
        check.raises("what was under way", RuntimeError, pending.wait)
    error = check.raises("after an abort", RuntimeError, lambda: dist.all_reduce(torch.ones(1)))
    check.that("says what to do", "reconfigure() begins" in str(error), str(error))
    reconfigure(6, handles)
    check_sum(check, "after an abort")

    # What is under way when a life ends fails, on all who wait for it, and says why.
    if rank == 0:
        works = [dist.all_reduce(torch.ones(10), async_op=True), dist.irecv(torch.ones(1), 1)]
    meet("under way", rank, everyone)
    if rank == 0:
        next_life = dist._reconfigure(7, handles)
        for work in works:
            error = check.raises("of the life before", RuntimeError, work.wait)
            # From this rank's own call, or from one whose goodbye came first.
            check.that("says why", re.search("left for the group's next life|has destroyed the group", str(error)), str(error))
        next_life.wait()
    else:
        reconfigure(7, handles)
    check_sum(check, "next life")
    return check.result()


@needs_reconfigure
@pytest.mark.parametrize("nodes", ["2+1", "1+1+1"])
def test_promises_of_reconfigure(nodes):
    run_ranks(promises, nodes, init=False)


def wrong(rank, world):
    """Bad input: an error on every rank, in time, after which the next attempt works."""
    check = Checker(rank)
    everyone = range(world)
    begin(rank, world)
    handles = exchange("handles", rank, everyone)
    fields = handles[rank].split("|")
    cases = {
        "nobody": ([], "no handle"),
        "gloo's": (["172.0.0.1:2000", *handles], "is no handle of hybridps"),
        "others only": ([h for h in handles if h != handles[rank]], "not among"),
        "twice": ([*handles, handles[0]], "there twice"),
        "another torch": (["|".join([*fields[:2], "00000000000000aa", *fields[3:5], "2.3", *fields[6:]]), *handles], "torch 2.3"),
        "another protocol": (["|".join([*fields[:2], "00000000000000aa", fields[3], "3", *fields[5:]]), *handles], "protocol 3"),
        "another group": (["|".join([*fields[:2], "00000000000000aa", *fields[3:7], "side"]), *handles], "'side'"),
    }
    for name, (given, text) in cases.items():
        error = check.raises(name, ValueError, lambda given=given: reconfigure(1, given))
        check.that(f"{name}: says so", text in str(error), str(error))
    check.raises("no time", ValueError, lambda: reconfigure(1, handles, seconds=0))

    # One never comes: all others say who, and a fresh uuid repairs it.
    if rank != world - 1:
        start = time.monotonic()
        error = check.raises("one is absent", RuntimeError, lambda: reconfigure(1, handles, seconds=1.5))
        check.that("says who", f"rank {world - 1} (" in str(error) and f"[{world - 1}]" in str(error), str(error))
        check.that("in time", time.monotonic() - start < 15 * harness.TIME_SCALE)
        error = check.raises("an operation then", RuntimeError, lambda: dist.all_reduce(torch.ones(1)))
        check.that("says the same", f"[{world - 1}]" in str(error), str(error))
    meet("absent", rank, everyone)
    reconfigure(2, handles)
    check_sum(check, "repaired")

    # The same members in another order, with one uuid.
    start = time.monotonic()
    error = check.raises("orders", RuntimeError, lambda: reconfigure(3, handles if rank == 0 else handles[::-1], seconds=20))
    check.that("orders: in time", time.monotonic() - start < 15 * harness.TIME_SCALE)
    check.that("orders: says so", re.search("uuid 3.*(order|another group|other members)", str(error)), str(error))
    meet("orders", rank, everyone)

    # Two groups with one uuid: who comes second is told.
    reconfigure(4, handles)
    half = [[0, 1], [2, 3]][rank // 2]
    ours = [handles[r] for r in half]
    if rank < 2:
        reconfigure(5, ours)
        check_sum(check, "the first of two")
    meet("first", rank, everyone)
    if rank >= 2:
        error = check.raises("the second of two", RuntimeError, lambda: reconfigure(5, ours, seconds=20))
        check.that("the second of two: says so", "uuid 5 is already used" in str(error), str(error))
        reconfigure(6, ours)
    meet("told", rank, everyone)
    if rank == 1:
        time.sleep(1)  # who waits looks in the Store meanwhile, where the error of who came second is
    check_sum(check, "both")
    meet("second", rank, everyone)
    reconfigure(7, handles)
    check_sum(check, "all")
    return check.result()


@needs_reconfigure
def test_bad_input():
    run_ranks(wrong, "2+1+1", init=False)


# ------------------------------------------------------------------------------------------------- deaths and returns


def values(name, count):
    generator = torch.Generator().manual_seed(name)
    return torch.randn(count, generator=generator) * torch.logspace(-6, 6, count)


def hash_of_sum(name, count):
    """The bits of a sum that depends on who is in the group, and where."""
    tensor = values(name, count)
    dist.all_reduce(tensor)
    return hashlib.sha256(tensor.numpy().tobytes()).hexdigest()


COUNT = 1 << 20


def fresh(rank, world, names):
    return hash_of_sum(names[rank], COUNT)


def death_and_return(rank, world, cycles):
    """Ranks 0 to 2 stay; the one behind them dies in an all_reduce, and the next process takes its place."""
    check = Checker(rank)
    stay = 3
    bits = []
    before = None
    rss = lambda: int(open("/proc/self/statm").read().split()[1]) * 4096  # noqa: E731
    for cycle in range(cycles):
        guest = stay + cycle
        members = [*range(stay), guest]
        if rank > guest:
            continue
        if rank == guest or cycle == 0:
            begin(min(rank, stay), stay + 1)
        handles = exchange(f"handles {cycle}", rank, members)
        reconfigure(2 * cycle + 1, handles)
        check.that("four", dist.get_world_size() == 4 and dist.get_rank() == members.index(rank))
        bits.append(hash_of_sum(rank if rank < stay else stay, COUNT))
        if rank == guest and rank < world - 1:
            dist.all_reduce(torch.ones(4 << 20), async_op=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if guest == world - 1:
            break
        error = check.raises("a death", RuntimeError, lambda: [dist.all_reduce(torch.ones(4 << 20)) for _ in range(3)])
        check.that("names it", "rank 3" in str(error), str(error))
        reconfigure(2 * cycle + 2, handles[:stay])
        bits.append(hash_of_sum(rank, COUNT))
        if cycle == cycles // 4:
            time.sleep(1.2)  # the first heartbeats open connections
            before = thread_count(), descriptor_count(), rss()
    if rank < stay:
        check.that("threads", settled(thread_count, before[0] + 1) <= before[0] + 1, f"{before}, {thread_count()}")
        check.that("descriptors", settled(descriptor_count, before[1] + 6) <= before[1] + 6, f"{before}, {descriptor_count()}")
        if cycles > 10:
            check.that("memory", rss() - before[2] < (4 << 20), f"{(rss() - before[2]) >> 10} KiB more")
        check.that("the same bits each time", len(set(bits[0::2])) == 1 and len(set(bits[1::2])) == 1, str(bits))
    dist.destroy_process_group()
    return {**check.result(), "bits": bits}


def check_deaths(layout_of_guests, cycles):
    """layout: of the three that stay, and the guests' node."""
    stay, node = layout_of_guests
    nodes = "".join(stay) + node * cycles
    ends = {3 + cycle: -9 for cycle in range(cycles - 1)}
    # Tensors of 16 MiB come from mmap and go back: glibc's own threshold grows with them, and a heap of holes looks like a leak.
    env = {"TORCH_FR_BUFFER_SIZE": "0", "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    results = run_ranks(
        death_and_return,
        nodes,
        args=(cycles,),
        init=False,
        destroy=False,
        expected_exits=ends,
        env=env,
        timeout=60 + 2 * cycles,
    )
    three = run_ranks(fresh, stay, args=([0, 1, 2],), env=env)
    four = run_ranks(fresh, stay + node, args=([0, 1, 2, 3],), env=env)
    for rank in range(3):
        assert results[rank]["bits"][:2] == [four[0], three[0]]


@needs_reconfigure
@pytest.mark.parametrize("layout", [("ABC", "D"), ("AAB", "B")])
def test_a_death_and_a_return(layout):
    check_deaths(layout, 3)


@needs_reconfigure
@pytest.mark.slow
@pytest.mark.timeout_s(600)
def test_a_hundred_deaths_and_returns():
    for _ in range(4):
        check_deaths(("ABC", "D"), 26)


def stopped(rank, world):
    """Rank 3 stands still for longer than dead_seconds, is left out, and wakes up: it is told, and hurts nobody."""
    check = Checker(rank)
    begin(rank, world)
    handles = exchange("handles", rank, range(world))
    reconfigure(1, handles)
    check_sum(check, "all")
    if rank == 0:
        victim = int(told("pid"))
        os.kill(victim, signal.SIGSTOP)
    if rank == world - 1:
        tell("pid", str(os.getpid()))
        error = check.raises("awake", RuntimeError, lambda: [dist.all_reduce(torch.ones(1000)) for _ in range(1000000)])
        check.that("told", re.search("stood still|next life|rank 3 .* was given up", str(error)), str(error))
    else:
        check.raises("its absence", RuntimeError, lambda: [dist.all_reduce(torch.ones(1000)) for _ in range(1000000)])
        reconfigure(2, handles[:-1])
        check_sum(check, "without it")
        if rank == 0:
            os.kill(victim, signal.SIGCONT)
        for turn in range(200):
            check_sum(check, f"beside it {turn}")
    meet("awake", rank, range(world))
    # It cannot come back as it is: connections to it are closed for good. All say so, at once.
    error = check.raises("again with it", RuntimeError, lambda: reconfigure(3, handles, seconds=20))
    check.that("refused", "given up before" in str(error), str(error))
    meet("refused", rank, range(world))
    # With a new engine it can.
    if rank == world - 1:
        dist.destroy_process_group()
        begin(rank, world)
    reconfigure(4, exchange("new handles", rank, range(world)))
    check_sum(check, "with it again")
    return check.result()


@needs_reconfigure
def test_a_rank_that_was_stopped_is_refused():
    run_ranks(stopped, "1+1+1+1", init=False, env={"HYBRIDPS_DEAD_SECONDS": "1"})


def names_of_lives(rank, world):
    """push_pull compares the names of this life: a rank that comes has none of the life before."""
    import hybridps

    check = Checker(rank)

    def push_pulls(life, *names):
        for name in names:
            mean = hybridps.push_pull(torch.full((10,), float(rank)), name=name)
            check.equal(f"{life} {name}", mean, torch.full((10,), (world - 1) / 2))

    begin(rank, world)
    reconfigure(1, exchange("handles", rank, range(world)))
    hybridps.declare("first")
    push_pulls("one life", "first", "second")
    if rank == world - 1:
        dist.destroy_process_group()
        begin(rank, world)
    reconfigure(2, exchange("new handles", rank, range(world)))
    push_pulls("the next", "second", "first")
    return check.result()


@needs_reconfigure
def test_names_of_push_pull_are_those_of_a_life():
    run_ranks(names_of_lives, "1+1+1", init=False)


def left_out(rank, world):
    """A healthy rank that the others leave out: idle, or in an operation."""
    check = Checker(rank)
    begin(rank, world)
    handles = exchange("handles", rank, range(world))
    reconfigure(1, handles)
    check_sum(check, "all")
    if rank < 2:
        reconfigure(2, handles[:2])
        check_sum(check, "without")
    else:
        error = check.raises("left out", RuntimeError, lambda: dist.all_reduce(torch.ones(10)))
        check.that("told why", re.search("has destroyed|next life", str(error)), str(error))
    meet("out", rank, range(world))
    reconfigure(3, handles)
    check_sum(check, "all again")
    return check.result()


@needs_reconfigure
def test_a_rank_that_is_left_out():
    run_ranks(left_out, "1+1+1", init=False)


# ------------------------------------------------------------------------------------------------- shrink_group


def shrunk(rank, world, kill, abort):
    check = Checker(rank)
    from hybridps import Options

    side = dist.new_group([0, 1, 3], pg_options=Options(priority=2))
    for group, members in ((None, world), (side, 3)):
        if rank == 2 and group is side:
            continue
        tensor = torch.ones(10)
        dist.all_reduce(tensor, group=group)
        check.that("before", tensor[0] == members)
    flags = dist.distributed_c10d.SHRINK_ABORT if abort else dist.distributed_c10d.SHRINK_DEFAULT
    # Another group than the default one.
    if rank in (0, 1):
        options = Options(priority=3) if kill else None
        less = dist.shrink_group([2], group=side, shrink_flags=flags, pg_options=options)
        check.that("priority", less._get_backend(torch.device("cpu")).options.priority == ("3" if kill else "2"))
        tensor = torch.full((10,), rank + 1.0)
        dist.all_reduce(tensor, group=less)
        check.that("a side group", tensor[0] == 3.0 and less.size() == 2 and less.rank() == rank)
    dist.barrier()
    if rank == 3:
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)
        told("shrunk")
        error = check.raises("left out", RuntimeError, lambda: dist.all_reduce(torch.ones(10)))
        check.that("told why", re.search("destroyed the group|has shrunk", str(error)), str(error))
        tell("over")
        return check.result()
    if kill:
        error = check.raises("a death", RuntimeError, lambda: [dist.all_reduce(torch.ones(1 << 20)) for _ in range(100)])
        check.that("names it", "rank 3" in str(error), str(error))
    start = time.monotonic()
    dist.shrink_group([3], shrink_flags=flags)
    seconds = time.monotonic() - start
    check.that("three", (dist.get_rank(), dist.get_world_size()) == (rank, 3))
    check_sum(check, "after")
    # And once more, from the shrunk one.
    if rank != 2:
        dist.shrink_group([2], shrink_flags=flags)
        check_sum(check, "after two")
    elif not kill:
        told("over")
    if rank == 0:
        tell("shrunk")
        if not kill:
            told("over")
    return {**check.result(), "seconds": seconds}


@pytest.mark.skipif(not hasattr(dist, "shrink_group"), reason="this torch has no shrink_group()")
@pytest.mark.parametrize(("kill", "abort"), [(True, False), (True, True), (False, False), (False, True)])
def test_shrink_group(kill, abort):
    exits = {3: -9} if kill else None
    results = run_ranks(shrunk, "2+1+1", args=(kill, abort), destroy=False, expected_exits=exits)
    print(f"shrink_group took {max(r['seconds'] for r in results[:3] if r):.3f} s")


# ------------------------------------------------------------------------------------------------- names of lives


def launched_apart(rank, world):
    """Two launchers: run ids and counts of groups differ."""
    check = Checker(rank)
    os.environ["TORCHELASTIC_RUN_ID"] = f"run{rank}"
    start = time.monotonic()
    error = check.raises("by default", RuntimeError, lambda: zygote.context.init(timeout_s=2, prefix="default"))
    check.that("in time", time.monotonic() - start < 20 * harness.TIME_SCALE)
    if rank == 0:
        check.that("says what differs", "run1.0" in str(error) and "run0.0" in str(error), str(error))
    for turn in range(2):
        from hybridps import Options

        zygote.context.init(prefix=f"named {turn}", pg_options=Options(incarnation=f"quorum {turn}"))
        check_sum(check, f"named {turn}")
        dist.destroy_process_group()
    # A name that one of them has used before.
    alone = dist.PrefixStore(f"alone {rank}", zygote.context.store)
    options = Options(incarnation=f"quorum {9 + rank}")
    dist.init_process_group("hybridps", store=alone, rank=0, world_size=1, pg_options=options)
    dist.destroy_process_group()
    start = time.monotonic()
    error = check.raises(
        "a name again",
        ValueError if rank == 0 else RuntimeError,
        lambda: zygote.context.init(prefix="again", pg_options=Options(incarnation="quorum 9")),
    )
    check.that("both are told", "rank 0" in str(error) and "used the incarnation quorum 9" in str(error), str(error))
    check.that("at once", time.monotonic() - start < 20 * harness.TIME_SCALE)
    if harness.TORCH >= (2, 15):
        begin(rank, world, "elastic")
        reconfigure(1, exchange("handles", rank, range(world)))
        check_sum(check, "reconfigured")
        dist.destroy_process_group()
        # A group that was made the usual way is over with its end as well.
        zygote.context.init(prefix="usual", pg_options=Options(incarnation="usual"))
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        dist.destroy_process_group()
        error = check.raises("after the end", RuntimeError, lambda: backend.get_reconfigure_handle())
        check.that("it was shut down", "shut down" in str(error), str(error))
    return check.result()


def test_ranks_of_two_launchers():
    run_ranks(launched_apart, "1+1", init=False, destroy=False)


# ------------------------------------------------------------------------------------------------- with dedicated servers


def death_beside_servers(rank, world):
    check = Checker(rank)
    begin(rank, world)
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    handles = exchange("handles", rank, range(world))
    reconfigure(1, handles)
    check.that("a server", len(backend.summary()["servers"]) == 1, str(backend.summary()["text"]))
    check_sum(check, "four", 1 << 20)
    if rank == world - 1:
        dist.all_reduce(torch.ones(4 << 20), async_op=True)
        os.kill(os.getpid(), signal.SIGKILL)
    check.raises("a death", RuntimeError, lambda: [dist.all_reduce(torch.ones(4 << 20)) for _ in range(3)])
    reconfigure(2, handles[:-1])
    check.that("it serves the next life, too", len(backend.summary()["servers"]) == 1, str(backend.summary()["text"]))
    check_sum(check, "three", 1 << 20)
    return check.result()


@needs_reconfigure
def test_a_death_beside_dedicated_servers():
    from test_dedicated import servers, settings

    with servers(1) as running:
        run_ranks(death_beside_servers, "1+1+1+1", init=False, expected_exits={3: -9}, env=settings(running))


def deaths_in_turn(rank, world, events, how, folder):
    """Of dedicated servers (a file asks for it, and says that it has happened) and of the last rank, or of both at once."""
    check = Checker(rank)
    members = list(range(world))
    if how == "reconfigure":
        begin(rank, world)
        handles = exchange("handles", rank, members)
        reconfigure(1, handles)
    for turn, event in enumerate(events):
        if "server" in event and rank == 0:
            open(os.path.join(folder, f"kill{turn}"), "w").close()
        if "rank" in event:
            victim = members.pop()
            if rank == victim:
                dist.all_reduce(torch.ones(1 << 20), async_op=True)
                os.kill(os.getpid(), signal.SIGKILL)
            check.raises(f"{turn}: a death", RuntimeError, lambda: [dist.all_reduce(torch.ones(1 << 20)) for _ in range(3)])
            if how == "reconfigure":
                reconfigure(2 + turn, handles[: len(members)])
            else:
                dist.shrink_group([victim])
        for i in range(20):
            check_sum(check, f"{turn}: {event}, {i}", 300_000)
            if i == 10 and rank == 0 and "server" in event:
                end = time.monotonic() + 30
                while not os.path.exists(os.path.join(folder, f"killed{turn}")) and time.monotonic() < end:
                    time.sleep(0.01)
    return check.result()


@pytest.mark.parametrize("how", [pytest.param("reconfigure", marks=needs_reconfigure), "shrink"])
@pytest.mark.parametrize(
    "events", [["rank", "server", "rank"], ["server", "rank", "server"], ["rank and server", "server"]], ids="; ".join
)
def test_ranks_and_dedicated_servers_are_lost_in_any_order(how, events, tmp_path):
    from test_dedicated import alongside, await_file, servers, settings

    if how == "shrink" and not hasattr(dist, "shrink_group"):
        pytest.skip("this torch has no shrink_group()")
    with servers(2) as running:

        def strike():
            victims = list(running)
            for turn, event in enumerate(events):
                if "server" in event:
                    await_file(tmp_path / f"kill{turn}")
                    victims[-1].process.kill()
                    victims.pop().process.wait()
                    (tmp_path / f"killed{turn}").touch()

        dead = {4 - i: -9 for i in range(sum("rank" in event for event in events))}
        with alongside(strike):
            run_ranks(
                deaths_in_turn,
                "1+1+1+1+1",
                args=(events, how, str(tmp_path)),
                init=how == "shrink",
                destroy=False,
                expected_exits=dead,
                env=settings(running),
            )
