"""Slots for ranks of the same node are filled in one of two ways (csrc/hybridps/core/copy.h): operations of several MiB, and many of one
size, of which some are trials of either way (csrc/hybridps/schedule/stores.h)."""

import os
import pathlib
import re
import time

import harness
import pytest
import reference
import torch
import torch.distributed as dist
from harness import run_ranks
from reference import Checker


def large(rank, world, nodes):
    """From 8 MiB on, an odd number of elements, at an aligned and an unaligned address."""
    check = Checker(rank)
    count = 4_200_011
    for shift in [0, 1]:
        part = count // world
        mine = [reference.values(torch.float32, count + 1, peer)[shift : shift + count] for peer in range(world)]
        total = reference.reduced([m.clone() for m in mine], harness.parse_nodes(nodes), "SUM")
        got = torch.cat([torch.zeros(shift), mine[rank]])[shift:]
        dist.all_reduce(got)
        check.equal(f"all_reduce {count}+{shift}", got, total)
        moved = [reference.pattern(torch.int32, count + shift, peer)[shift:] for peer in range(world)]
        gathered = [torch.empty(count, dtype=torch.int32) for _ in range(world)]
        dist.all_gather(gathered, moved[rank])
        for peer in range(world):
            check.equal(f"all_gather {count}+{shift} of {peer}", gathered[peer], moved[peer])
        told = moved[1].clone() if rank == 1 else torch.empty(count, dtype=torch.int32)
        dist.broadcast(told, 1)
        check.equal(f"broadcast {count}+{shift}", told, moved[1])
        scattered = torch.empty(part)
        dist.reduce_scatter(scattered, [mine[rank][peer * part :][:part].clone() for peer in range(world)])
        check.equal(f"reduce_scatter {count}+{shift}", scattered, total[rank * part :][:part])
        out = torch.empty(part * world, dtype=torch.int32)
        dist.all_to_all_single(out, moved[rank][: part * world].clone())
        want = torch.cat([moved[peer][rank * part :][:part] for peer in range(world)])
        check.equal(f"all_to_all {count}+{shift}", out, want)
        after, before = (rank + 1) % world, (rank - 1) % world
        came = torch.empty(count, dtype=torch.int32)
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, moved[rank], after), dist.P2POp(dist.irecv, came, before)])
        for work in works:
            work.wait()
        check.equal(f"sendrecv {count}+{shift}", came, moved[before])
    return check.result()


@pytest.mark.parametrize("nodes", ["2", "2+1"])
def test_large(nodes):
    run_ranks(large, nodes, args=(nodes,))


def handed_over(rank, world, nodes, seconds):
    """Sums until every rank has a thread that moves its data, for so long at most; whether it came to that. Then all of large()."""
    check = Checker(rank)
    count = 4_200_011
    mine = [reference.values(torch.float32, count, peer) for peer in range(world)]
    total = reference.reduced([m.clone() for m in mine], harness.parse_nodes(nodes), "SUM")
    until = time.monotonic() + seconds
    over = torch.zeros(2)
    while over.sum() == 0:
        sums = [mine[rank].clone() for _ in range(5)]
        for work in [dist.all_reduce(got, async_op=True) for got in sums]:
            work.wait()
        for got in sums:
            check.equal(f"all_reduce {count}", got, total)
        names = {(task / "comm").read_text().strip() for task in pathlib.Path("/proc/self/task").iterdir()}
        over = torch.tensor([float("hybridps-data0" in names), float(time.monotonic() > until)])
        dist.all_reduce(over, op=dist.ReduceOp.MIN)
    check.result()
    large(rank, world, nodes)
    return over[0].item() == 1


@pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="a setting of hybridps")
@pytest.mark.timeout_s(400)
@pytest.mark.parametrize("nodes, cores", [("1+1", 6), ("1+1", 2)])
def test_handed_over(nodes, cores):
    """Where cores are free, data gets a thread of its own as soon as moving it keeps the one that sums busy; else never."""
    env = {"HYBRIDPS_CORES": str(cores)}
    if os.environ.get("HYBRIDPS_TEST_SANITIZER") and cores > 2:
        pytest.skip("sanitizers make sums so slow that moving bytes is little beside them")
    for came_to_it in run_ranks(handed_over, nodes, args=(nodes, 180 if cores > 2 else 0.5), env=env, timeout=300):
        assert came_to_it == (cores > 2)


def tried(rank, world, nodes):
    """The first trial is over after 32 operations of a class; the values of each differ."""
    check = Checker(rank)
    count = 25_013
    part = count // world
    at = harness.parse_nodes(nodes)
    for number in range(40):
        shift = number % 2
        mine = [reference.values(torch.float32, count + 1, peer + 7 * number)[shift : shift + count] for peer in range(world)]
        total = reference.reduced([m.clone() for m in mine], at, "SUM")
        got = torch.cat([torch.zeros(shift), mine[rank]])[shift:]
        dist.all_reduce(got)
        check.equal(f"all_reduce {number}", got, total)
        gathered = torch.empty(world * count)
        dist.all_gather_into_tensor(gathered, mine[rank])
        check.equal(f"all_gather {number}", gathered, torch.cat(mine))
        told = mine[1].clone() if rank == 1 else torch.empty(count)
        dist.broadcast(told, 1)
        check.equal(f"broadcast {number}", told, mine[1])
        scattered = torch.empty(part)
        dist.reduce_scatter_tensor(scattered, mine[rank][: part * world].clone())
        check.equal(f"reduce_scatter {number}", scattered, total[rank * part :][:part])
        out = torch.empty(part * world)
        dist.all_to_all_single(out, mine[rank][: part * world].clone())
        check.equal(f"all_to_all {number}", out, torch.cat([m[rank * part :][:part] for m in mine]))
    return check.result()


@pytest.mark.parametrize("nodes", ["2", "3", "2+1"])
def test_tried(nodes):
    results = run_ranks(tried, nodes, args=(nodes,), env={"HYBRIDPS_LOG_LEVEL": "debug"})
    said = r"slots of (allreduce|all_gather|broadcast|reduce_scatter), \d+ KiB and more: .* GB/s with non-temporal stores, .* GB/s through the cache: from now on"
    assert any(re.search(said, report.output) for report in results.reports)  # a rank that waits for others learns nothing
