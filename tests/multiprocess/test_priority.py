"""Priorities: of a group, of a thread's calls, of push_pull; nothing but the order of chunks depends on them."""

import threading
import time
from datetime import timedelta

import harness
import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from test_dedicated import servers, settings
from torch.distributed.device_mesh import init_device_mesh

pytestmark = pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="only hybridps has priorities")


def options(**more):
    from hybridps import _C

    return _C.ProcessGroupHybrid.Options(**more)


def classes(rank, world):
    import hybridps

    mesh = init_device_mesh(
        "cpu",
        (2, 2),
        mesh_dim_names=("data", "tensor"),
        backend_override={"data": ("hybridps", options(priority="data")), "tensor": ("hybridps", options(priority="tensor"))},
    )
    sharded = dist.new_group(pg_options=options(priority="sharded"))
    groups = {"data": mesh.get_group("data"), "tensor": mesh.get_group("tensor"), "sharded": sharded}
    values = {}
    for name, group in groups.items():
        values[name] = torch.ones(5)
        dist.all_reduce(values[name], group=group)
        values[name] = values[name].tolist()
    of = {
        name: group._get_backend(torch.device("cpu")).options.priority for name, group in [*groups.items(), ("world", None)]
        if group is not None
    }
    return of, values, hybridps.topology(sharded).text, hybridps.topology().text


def test_groups_of_a_mesh_have_the_classes_that_they_were_given():
    for of, values, text, plain in run_ranks(classes, "2+2"):
        assert of == {"data": "0", "tensor": "3", "sharded": "1,all_gather=2"}
        assert values == {"data": [2.0] * 5, "tensor": [2.0] * 5, "sharded": [4.0] * 5}
        assert "priority 1,all_gather=2" in text and "priority" not in plain


def what_options_take(rank, world):
    import copy
    import pickle

    said = []
    for wrong in (128, "high", 1.5, None, True):
        try:
            options(priority=wrong)
        except (ValueError, TypeError) as error:
            said.append(f"{type(error).__name__}: {error}")
    kept = options(priority=-4)
    kept.priority = 9
    return said, [o.priority for o in (kept, copy.deepcopy(kept), pickle.loads(pickle.dumps(kept)))], repr(kept)


def test_a_wrong_priority_is_refused_where_it_is_written():
    ((said, kept, text),) = run_ranks(what_options_take, "1")
    assert [line.split(":")[0] for line in said] == ["ValueError", "ValueError", "TypeError", "TypeError", "ValueError"]
    assert "'high'" in said[1] and "tensor, pipeline, sharded, data" in said[1]
    assert kept == ["9"] * 3 and "priority='9'" in text


def split_off(rank, world):
    parent = dist.new_group(pg_options=options(priority=4))
    of_torch = torch._C._distributed_c10d.Backend.Options("hybridps", timedelta(seconds=60))
    found = []
    for given in (None, of_torch, options(priority=2), options()):
        group = dist.split_group(parent, split_ranks=[list(range(world))], pg_options=given)
        found.append(group._get_backend(torch.device("cpu")).options.priority)
    return found


@pytest.mark.skipif(harness.TORCH < (2, 15), reason="torch splits groups of CPU tensors since 2.15")
def test_a_group_that_is_split_off_has_its_own_priority_or_that_of_its_parent():
    for found in run_ranks(split_off, "1+1"):
        assert found == ["4", "4", "2", "0"]


def group_that_differs(rank, world):
    group = dist.new_group(pg_options=options(priority=rank))
    dist.all_reduce(torch.ones(1), group=group)


def test_ranks_that_give_a_group_different_priorities_are_named():
    reports = run_ranks(group_that_differs, "1+1", check=False)
    for report in reports.reports:
        assert "give the group different priorities" in report.error
        assert "rank 0" in report.error and "'1'" in report.error and "Options(priority" in report.error


def beside_bulk(rank, world, differs):
    """Sums of an urgent operation beside bulk, by all ways to say so; how much of the bulk was still to come then."""
    import hybridps

    bulk_group = dist.new_group()
    urgent_group = dist.new_group(pg_options=options(priority=5))
    wrong, over = 0, []
    for turn in range(4):
        bulk = torch.full((4 << 20,), float(rank + 1))
        mine = torch.arange(200_000, dtype=torch.float32) * (rank + 1)
        dist.barrier()
        work = dist.all_reduce(bulk, group=bulk_group, async_op=True)
        if turn == 0:
            dist.all_reduce(mine, group=urgent_group)
        elif turn == 1:
            with hybridps.priority(7 - rank if differs else 7):
                dist.all_reduce(mine)
        elif turn == 2:
            hybridps.push_pull_inplace(mine, average=False, priority=1000)
        else:
            with hybridps.priority(100):
                gathered = [torch.empty_like(mine) for _ in range(world)]
                dist.all_gather(gathered, mine)
                mine = sum(gathered)
        over.append(work.is_completed())
        work.wait()
        total = world * (world + 1) // 2
        wrong += int((bulk != total).sum()) + int((mine != torch.arange(200_000, dtype=torch.float32) * total).sum())
    return wrong, over


@pytest.mark.parametrize("nodes", ["1+1", "2+1+1"])
def test_sums_are_right_and_the_urgent_one_is_there_before_the_bulk(nodes):
    results = run_ranks(beside_bulk, nodes, args=(nodes == "2+1+1",))
    assert [wrong for wrong, _ in results] == [0] * len(results)
    # A rank may sleep until both are done, but not all do, each time.
    assert any(not done for _, over in results for done in over)


def test_dedicated_servers_send_by_priority_too():
    with servers(1) as running:
        for wrong, _ in run_ranks(beside_bulk, "1+1+1", args=(True,), env=settings(running)):
            assert wrong == 0


def of_threads(rank, world):
    import hybridps
    from hybridps import _C

    def now():
        value = _C.exchange_thread_priority(None)
        _C.exchange_thread_priority(value)
        return value

    seen = {}
    with hybridps.priority(3):
        with hybridps.priority(-2):
            seen["inner"] = now()
        with hybridps.priority(None):
            seen["none"] = now()
        thread = threading.Thread(target=lambda: seen.update(thread=now()))
        thread.start()
        thread.join()
        seen["outer"] = now()
        try:
            with hybridps.priority(-129):
                pass
        except ValueError as error:
            seen["error"] = str(error)
        try:
            with hybridps.priority(1):
                raise KeyError
        except KeyError:
            seen["after"] = now()
    seen["end"] = now()
    return seen


def test_a_priority_is_of_the_thread_and_ends_with_its_block():
    (seen,) = run_ranks(of_threads, "1")
    error = seen.pop("error")
    assert seen == {"inner": -2, "none": None, "thread": None, "outer": 3, "after": 3, "end": None}
    assert "-129" in error


def point_to_point(rank, world):
    """A receive that is urgent, beside bulk to the same rank."""
    import hybridps

    bulk, small = torch.full((4 << 20,), 3.0), torch.full((100_000,), 4.0)
    if rank == 0:
        work = dist.isend(bulk, 1, tag=1)
        time.sleep(0.01)
        with hybridps.priority(9):
            dist.send(small, 1, tag=2)
        work.wait()
        return 0
    bulk.zero_()
    small.zero_()
    work = dist.irecv(bulk, 0, tag=1)
    dist.recv(small, 0, tag=2)
    work.wait()
    return int((bulk != 3).sum() + (small != 4).sum())


def test_messages_between_two_ranks_have_priorities_too():
    assert list(run_ranks(point_to_point, "1+1")) == [0, 0]
