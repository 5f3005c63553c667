"""File descriptors that run out: nobody is dead for that, and who may never have enough is told so at the start."""

import os
import re
import resource
import threading
import time

import harness
import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

pytestmark = pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="what hybridps does without descriptors")


def limit_to(count):
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))


def all_reduce(world, count):
    tensor = torch.ones(count)
    dist.all_reduce(tensor)
    assert bool((tensor == world).all())


def program_takes_all(rank, world, hungry, late):
    """The program of one rank has all descriptors for two seconds, in which nobody has connected to it yet, and another is late."""
    held = []

    def let_go():
        time.sleep(2)
        while held:
            os.close(held.pop())

    if rank == hungry:
        soft = max(map(int, os.listdir("/proc/self/fd"))) + 50
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        try:
            while True:
                held.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        assert len(held) > 40
        threading.Thread(target=let_go).start()
    if rank == late:
        time.sleep(1.2)
    all_reduce(world, 1 << 20)  # chunks for each rank's server: all connect
    all_reduce(world, 10)


def test_a_program_that_takes_all_descriptors_for_a_while_kills_nobody():
    run_ranks(program_takes_all, "1+1+1+1", args=(1, 3), timeout=60)


def late_among_few_descriptors(rank, world, spare):
    from hybridps import _C

    if rank > 0:
        limit_to(len(os.listdir("/proc/self/fd")) + _C.descriptors_needed(world - 1, 0, 1) - _C.descriptors_needed(0, 0, 1) + spare)
    harness.zygote.context.init(timeout_s=30)
    if rank == world - 1:
        time.sleep(1)
    for count in (10, 1 << 18, 10):
        all_reduce(world, count)
    dist.destroy_process_group()


def test_a_late_rank_is_asked_about_with_no_more_descriptors_than_init_reckons_with():
    run_ranks(late_among_few_descriptors, "1+1+1+1+1+1", args=(50,), init=False, destroy=False, timeout=90)


def has_too_few(rank, world):
    if rank == 1:
        limit_to(len(os.listdir("/proc/self/fd")) + 40)
    with pytest.raises(RuntimeError) as caught:
        harness.zygote.context.init(timeout_s=30)
        all_reduce(world, 10)
    text = str(caught.value)
    assert "rank 1 " in text and re.search(r"too few file descriptors: \d+ are needed .* may have \d+; raise the hard limit", text), text


def test_too_few_are_an_error_at_init_on_all_ranks():
    run_ranks(has_too_few, "1+1+1+1+1+1", init=False, destroy=False, timeout=60)
