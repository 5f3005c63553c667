"""Deadlines of work that is over: they pass, and nothing happens. What gave up leaves its group, peer and tag usable."""

import time
from datetime import timedelta

import harness
import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from reference import Checker

needs_hybridps = pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="gloo's pairs are unusable after a timeout")
TIMEOUT_S = 1.5
LATER = harness.TORCH >= (2, 15)  # an older torch sets the timeout of its own backends only
TIMEOUT_OF_START = harness.DEFAULT_PG_TIMEOUT_S if LATER else TIMEOUT_S


def _with_short_timeout():
    """Not from the start on: init_process_group() has its own pace, and ranks come to it one after the other."""
    dist.barrier()
    if LATER:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S))
    dist.barrier()


def _go_on(check, rank, world, label):
    tensor = torch.full((1000,), float(rank + 1))
    dist.all_reduce(tensor)
    check.equal(f"{label}: all_reduce", tensor, torch.full((1000,), world * (world + 1) / 2))
    if rank < 2:
        got = torch.empty(3)
        dist.send(torch.full((3,), 7.0), 1) if rank == 0 else dist.recv(got, 0)
        if rank == 1:
            check.equal(f"{label}: recv", got, torch.full((3,), 7.0))


def finished_work(rank, world):
    _with_short_timeout()
    check = Checker(rank)
    for i in range(50):
        if rank == 0:
            dist.send(torch.full((10,), float(i)), 1, tag=i % 3)
        elif rank == 1:
            got = torch.empty(10)
            dist.recv(got, None if i % 2 else 0, tag=i % 3)
            check.equal(f"message {i}", got, torch.full((10,), float(i)))
        if rank < 2:
            works = [dist.isend(torch.ones(100_000), 1 - rank), dist.irecv(torch.empty(100_000), 1 - rank)]
            for work in works[: i % 3]:  # some are waited for, some dropped
                work.wait()
        dist.all_reduce(torch.ones(5), async_op=True)
    dist.barrier()
    time.sleep(2 * TIMEOUT_S)
    _go_on(check, rank, world, "after the deadlines")
    return check.result()


@pytest.mark.parametrize("nodes", ["1+1", "2", "2+1"])
def test_deadlines_of_finished_work_pass(nodes):
    run_ranks(finished_work, nodes, pg_timeout=TIMEOUT_OF_START)


def messages_given_up(rank, world):
    _with_short_timeout()
    check = Checker(rank)
    large = 5_000_000
    if rank == 0:  # nobody receives it in time
        check.raises("the send", RuntimeError, lambda: dist.send(torch.zeros(large), 1))
    else:
        time.sleep(TIMEOUT_S + 0.7)
    for i in range(3):
        if rank == 0:
            dist.send(torch.full((large,), float(i)), 1)
        else:
            got = torch.empty(large)
            dist.recv(got, 0)
            check.equal(f"message {i}", got, torch.full((large,), float(i)))
    if rank == 1:  # nobody sends it in time
        check.raises("the receive", RuntimeError, lambda: dist.recv(torch.empty(5), 0))
    else:
        time.sleep(TIMEOUT_S + 0.7)
    _go_on(check, rank, world, "after what was given up")
    time.sleep(TIMEOUT_S + 0.7)
    _go_on(check, rank, world, "after all deadlines")
    return check.result()


@needs_hybridps
@pytest.mark.parametrize("nodes", ["1+1", "2"])
def test_a_message_that_timed_out_leaves_its_tag_usable(nodes):
    run_ranks(messages_given_up, nodes, pg_timeout=TIMEOUT_OF_START)


def per_work_timeouts(rank, world):
    """A wait that gives up leaves its work alone."""
    check = Checker(rank)
    if rank == 0:
        work = dist.irecv(torch.empty(100), 1)
        check.raises("the wait", RuntimeError, lambda: work.wait(timedelta(seconds=0.2)))
        dist.barrier()
        work.wait()
    else:
        time.sleep(0.5)
        dist.barrier()
        dist.send(torch.ones(100), 0)
    _go_on(check, rank, world, "after the wait")
    return check.result()


@needs_hybridps
def test_a_wait_that_times_out_leaves_its_work_alone():
    run_ranks(per_work_timeouts, "1+1")
