"""What torch's own tools see of hybridps: the profiler, the flight recorder and its analyser, the DETAIL level."""

import glob
import io
import json
import logging
import os
import pickle
import tempfile
import threading
import time

import harness
import pytest
import torch
import torch.distributed as dist
import zygote
from harness import run_ranks
from reference import Checker

pytestmark = pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="about what hybridps hands to torch's tools")


# ----------------------------------------------------------------------------------------------------- profiler


def profiled(rank, world, folder):
    check = Checker(rank)
    group = dist.new_group(list(range(world)), group_desc="side")
    path = os.path.join(folder, f"trace{rank}.json")
    with torch.profiler.profile(record_shapes=True) as profile:
        dist.all_reduce(torch.ones(1000, dtype=torch.float64))
        work = dist.broadcast(torch.ones(30), 0, group=group, async_op=True)
        work.wait()
        output = torch.empty(world * 4)
        dist.all_to_all_single(output, torch.ones(world * 4), [4] * world, [4] * world)
        if rank < 2:
            dist.send(torch.ones(5), 1) if rank == 0 else dist.recv(torch.ones(5), 0)
        dist.barrier()
    profile.export_chrome_trace(path)
    with open(path) as file:
        events = json.load(file)["traceEvents"]
    records = [event["args"] for event in events if event.get("name") == "record_param_comms"]
    by_name = {record.get("Collective name"): record for record in records}
    wanted = {"all_reduce", "broadcast", "all_to_all_single", "barrier", *["send", "recv"][rank : rank + 1]}
    check.that("names", wanted <= set(by_name), sorted(map(str, by_name)))
    if wanted <= set(by_name):
        all_reduce, broadcast = by_name["all_reduce"], by_name["broadcast"]
        check.that("sizes", all_reduce.get("In msg nelems") == 1000, all_reduce)
        check.that("type", all_reduce.get("dtype") in ("Double", "double"), all_reduce)
        check.that("size of the group", all_reduce.get("Group size") == world, all_reduce)
        check.that("the group", broadcast.get("Process Group Description") == "side", broadcast)
        check.that("name of the group", broadcast.get("Process Group Name") == group.group_name, broadcast)
    spans = {event["name"] for event in events if str(event.get("name", "")).startswith("hybridps:")}
    check.that("spans", {"hybridps:all_reduce", "hybridps:broadcast"} <= spans, sorted(spans))
    return check.result()


def test_the_profiler_shows_collectives_with_sizes_and_groups():
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(profiled, "2+1", args=(folder,))


# ---------------------------------------------------------------------------------------------- flight recorder


def recorded(rank, world, folder, wrong):
    """Some operations on two groups, one of them left open by rank 1 if `wrong`; then each rank's dump."""
    check = Checker(rank)
    side = dist.new_group([0, world - 1], group_desc="side")
    for size in [10, 20, 30]:
        dist.all_reduce(torch.ones(size))
    if rank in (0, world - 1):
        dist.broadcast(torch.ones(7), 0, group=side)
    dist.all_gather_into_tensor(torch.empty(3 * world), torch.ones(3))
    store = dist.distributed_c10d._get_default_store()
    work = None
    if wrong and rank != 1:
        work = dist.all_reduce(torch.ones(40), async_op=True)
        time.sleep(0.2)
    deadline = time.monotonic() + 20
    while True:
        dump = torch._C._distributed_c10d._dump_fr_trace(backend="hybridps")
        entries = pickle.loads(dump)["entries"]
        still_open = sum(entry["state"] != "completed" for entry in entries)
        if still_open <= (work is not None) or time.monotonic() > deadline:
            break
        time.sleep(0.05)  # another thread tells the completion
    with open(os.path.join(folder, f"rank_{rank}"), "wb") as file:
        file.write(dump)
    names = [entry["profiling_name"] for entry in entries]
    check.that("names", names[:3] == ["hybridps:all_reduce"] * 3, names)
    check.that("sizes", [list(entry["input_sizes"][0]) for entry in entries[:3]] == [[10], [20], [30]], entries[:1])
    states = [entry["state"] for entry in entries]
    done = states if work is None else states[:-1]
    check.that("completed", set(done) == {"completed"}, states)
    if work is not None:
        check.that("the open one", states[-1] != "completed", states)
    check.that("groups", {entry["process_group"][1] for entry in entries} >= {"default_pg"}, entries[0])
    store.add("dumped", 1)
    while store.add("dumped", 0) < world:
        time.sleep(0.02)
    if wrong and rank == 1:
        dist.all_reduce(torch.ones(40))
    if work is not None:
        work.wait()
    return check.result()


def analysed(folder):
    """What torch's analyser says of the dumps."""
    from torch.distributed.flight_recorder import fr_trace

    text = io.StringIO()
    handler = logging.StreamHandler(text)
    logger = logging.getLogger("Flight Recorder")
    found = [logger, *(logging.getLogger(name) for name in logging.root.manager.loggerDict if "light" in name)]
    for each in found:
        each.addHandler(handler)
    try:
        output = os.path.join(folder, "analysis")
        fr_trace.main([folder, "--prefix", "rank_", "-o", output])
    finally:
        for each in found:
            each.removeHandler(handler)
    with open(output, "rb") as file:
        _, database = pickle.load(file)
    return database, text.getvalue()


needs_completion_hooks = pytest.mark.skipif(
    harness.TORCH < (2, 15), reason="the flight recorder hears of the completions of other backends from torch 2.15 on"
)


@needs_completion_hooks
@pytest.mark.parametrize("wrong", [False, True], ids=["healthy", "one-rank-missing"])
def test_the_flight_recorder_and_its_analyser(wrong):
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(recorded, "2+1", args=(folder, wrong))
        database, text = analysed(folder)
    names = [collective.collective_name for collective in database.collectives]
    assert names.count("hybridps:all_reduce") >= 3, names
    assert "hybridps:broadcast" in names, names
    assert ("missing ranks" in text) == wrong, text


def dump_of_a_failure(rank, world):
    dist.all_reduce(torch.ones(10))
    if rank == 1:
        os._exit(7)
    try:
        for _ in range(1000):
            dist.all_reduce(torch.ones(10))
    except Exception as error:
        return str(error)
    return "no error"


@needs_completion_hooks
def test_a_failure_writes_the_flight_recorders_dump():
    with tempfile.TemporaryDirectory() as folder:
        env = {"TORCH_FR_DUMP_TEMP_FILE": os.path.join(folder, "dump_"), "TORCH_FR_DUMP_ON_TIMEOUT": "1"}
        env["TORCH_INCLUDE_STACK_TRACE"] = "1"  # as users have it
        results = run_ranks(dump_of_a_failure, "2+1", env=env, destroy=False, expected_exits={1: 7})
        assert "rank 1" in results[0] and "rank 1" in results[2], list(results)
        written = sorted(os.path.basename(path) for path in glob.glob(os.path.join(folder, "dump_*")))
        assert written == ["dump_0", "dump_2"], written
        with open(os.path.join(folder, "dump_0"), "rb") as file:
            entries = pickle.load(file)["entries"]
    assert entries[0]["profiling_name"] == "hybridps:all_reduce"
    assert entries[0]["state"] == "completed" and entries[-1]["state"] != "completed", entries[-1]


# -------------------------------------------------------------------------------------------------------- hooks


def hooked(rank, world, folder):
    """Pre and post hooks around each call, durations, and an abort hook when a peer dies."""
    group = dist.distributed_c10d._get_default_group()
    before, after, aborted = [], [], os.path.join(folder, f"aborted{rank}")
    group.register_pre_hook(101, lambda args: before.append((args.op_id, str(args.name), args.root, args.async_op)))
    group.register_post_hook(102, lambda args: after.append((args.op_id, str(args.name), args.work)))
    assert group.supports_abort_hooks
    group.register_abort_hook(103, lambda: open(aborted, "w").close())
    check = Checker(rank)
    dist.all_reduce(torch.ones(10))
    work = dist.broadcast(torch.ones(10), 1, async_op=True)
    work.wait()
    check.that("duration", 0 < work._get_duration() < 60_000, work._get_duration())
    dist.barrier()
    check.that("one before and one after each", [b[:2] for b in before] == [a[:2] for a in after], (before, after))
    check.that("calls", len({b[0] for b in before}) == 3, before)
    check.that("root", before[1][2:] == (1, True), before)
    check.that("the work", after[1][2] is not None and after[1][2].is_completed(), after[1])
    check.that("no abort", not os.path.exists(aborted), aborted)
    group.unregister_pre_hook(101)
    group.unregister_post_hook(102)
    dist.all_reduce(torch.ones(10))
    check.that("unregistered", len(before) == len(after) == 3, before)
    if rank == 1:
        os._exit(7)
    check.raises("peer", RuntimeError, lambda: [dist.all_reduce(torch.ones(10)) for _ in range(1000)])
    end = time.monotonic() + 30 * harness.TIME_SCALE  # it runs on a thread of its own
    while not os.path.exists(aborted) and time.monotonic() < end:
        time.sleep(0.01)
    check.that("abort hook", os.path.exists(aborted), aborted)
    return check.result()


@pytest.mark.skipif(harness.TORCH < (2, 15), reason="hooks as torch 2.15 has them")
def test_pre_post_and_abort_hooks_and_durations():
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(hooked, "2+1", args=(folder,), destroy=False, expected_exits={1: 7})


def aborted_with_a_slow_hook(rank, world):
    """Rank 0's hook ends once the others have been told: torch's own takes seconds."""
    check = Checker(rank)
    group = dist.distributed_c10d._get_default_group()
    told, ran, in_time = threading.Event(), threading.Event(), []

    def slow():
        in_time.append(told.wait(10 * harness.TIME_SCALE))
        ran.set()

    dist.barrier()
    zygote.context.meet(world)  # an abort may overtake the end of a barrier
    if rank == 0:

        def fails():
            raise ValueError("of the program")

        group.register_abort_hook(1, fails)
        group.register_abort_hook(2, slow)
        group.abort()
    else:
        check.raises("aborted", RuntimeError, lambda: [dist.all_reduce(torch.ones(10)) for _ in range(1000)])
    zygote.context.meet(2 * world)
    if rank == 0:
        told.set()
        check.that("the hook runs", ran.wait(30 * harness.TIME_SCALE))
        check.that("the others were told before it ended", in_time == [True], in_time)
    return check.result()


@pytest.mark.skipif(harness.TORCH < (2, 15), reason="hooks as torch 2.15 has them")
def test_abort_tells_the_other_ranks_before_hooks_end():
    run_ranks(aborted_with_a_slow_hook, "2+1", destroy=False)


# ------------------------------------------------------------------------------------------------------- DETAIL


def under_detail(rank, world, wrong):
    check = Checker(rank)
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    tensor = torch.full((10,), rank + 1.0)
    dist.all_reduce(tensor)
    check.equal("all_reduce", tensor, torch.full((10,), world * (world + 1) / 2))
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    gathered = [torch.zeros(2) for _ in range(world)]
    dist.all_gather(gathered, torch.full((2,), float(rank)))
    check.equal("all_gather", torch.cat(gathered), torch.arange(float(world)).repeat_interleave(2))
    scattered = torch.zeros(3)
    dist.reduce_scatter_tensor(scattered, torch.ones(3 * world))
    check.equal("reduce_scatter", scattered, torch.full((3,), float(world)))
    if rank < 2:
        got = torch.zeros(4)
        work = dist.isend(torch.full((4,), float(rank)), 1 - rank)
        dist.recv(got, 1 - rank)
        work.wait()
        check.equal("p2p", got, torch.full((4,), 1.0 - rank))
    side = dist.new_group([0, world - 1])
    if rank in (0, world - 1):
        dist.all_reduce(tensor, group=side)
    if harness.TORCH >= (2, 14):
        dist.monitored_barrier()
    if wrong:
        call = dist.all_reduce if rank else lambda tensor: dist.broadcast(tensor, 0)
        error = check.raises("mismatch", RuntimeError, lambda: call(torch.ones(10 + rank)))
        check.that("names both", "ALLREDUCE" in str(error) and "BROADCAST" in str(error), str(error))
    return check.result()


@pytest.mark.parametrize("wrong", [False, True], ids=["healthy", "mismatch"])
def test_detail(wrong):
    env = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    run_ranks(under_detail, "2+1", args=(wrong,), env=env, destroy=not wrong)
