"""The harness itself: a test tool that hides a hang or a crash is worse than none."""

import os
import subprocess
import sys
import time

import harness
import pytest
import torch
import torch.distributed as dist
import zygote
from harness import RanksFailed, run_ranks


def report_env(rank, world):
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor)
    return os.environ["HYBRIDPS_NODE"], os.environ["LOCAL_RANK"], os.environ.get("EXTRA"), tensor.tolist()


def test_ranks_get_their_node_and_their_environment():
    results = run_ranks(report_env, "2+1+1", env={"EXTRA": "all"}, rank_env={3: {"EXTRA": "three"}})
    assert [row[0] for row in results] == ["node0", "node0", "node1", "node2"]
    assert [row[1] for row in results] == ["0", "1", "0", "0"]
    assert [row[2] for row in results] == ["all", "all", "all", "three"]
    assert all(row[3] == [6.0] * 3 for row in results)


@pytest.mark.parametrize("store", ["rank0", "file"])
def test_the_store_may_live_elsewhere(store):
    assert run_ranks(report_env, "ABAB", store=store)[1][0] == "node1"


def raise_on_one(rank, world):
    if rank == 2:
        raise ValueError("only here")
    dist.barrier()


def test_an_exception_is_shown_first_and_the_others_are_not_waited_for():
    start = time.monotonic()
    with pytest.raises(RanksFailed, match="only here") as caught:
        run_ranks(raise_on_one, grace=2)
    assert time.monotonic() - start < 30
    assert "---- rank 2" in str(caught.value).split("---- rank")[1].join(["---- rank", ""])


def hang_on_one(rank, world):
    if rank == 1:
        time.sleep(1000)


def test_a_hang_is_a_failure_with_the_stack():
    with pytest.raises(RanksFailed, match="hang_on_one") as caught:
        run_ranks(hang_on_one, "1+1", timeout=15, init=False)
    assert caught.value.reports[1].hung and not caught.value.reports[0].hung


def die(rank, world):
    if rank == 1:
        os.kill(os.getpid(), 9)


def test_a_death_is_a_failure_unless_expected():
    with pytest.raises(RanksFailed):
        run_ranks(die, "1+1", init=False)
    assert run_ranks(die, "1+1", init=False, expected_exits={1: -9}).reports[1].exit_code == -9


def leave_a_child(rank, world):
    if rank == 0:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)


def test_a_process_left_behind_is_a_failure():
    with pytest.raises(RanksFailed, match="outlived"):
        run_ranks(leave_a_child, "1+1", init=False)


def count_threads(rank, world):
    return len(os.listdir("/proc/self/task")), "hybridps._C" in sys.modules, zygote.context.launch.world


def test_ranks_start_with_one_thread_and_without_the_plugin():
    # The TCPStore client may have a thread of its own in a later torch: not with file.
    assert run_ranks(count_threads, "1+1", init=False, store="file") == [(1, False, 2)] * 2


def test_node_maps():
    assert harness.parse_nodes("3+1") == [0, 0, 0, 1]
    assert harness.parse_nodes("ABAB") == [0, 1, 0, 1]
