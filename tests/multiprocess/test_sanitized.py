"""Under `scripts/test --sanitize` only: the ranks have loaded the extension that is compiled with sanitizers, and what
it allocates is not lost.

At the exit of a Python process nearly everything looks lost, so the leak check at exit is off in these runs. Here each
rank asks for a check by itself once its group is gone, and only what was allocated from the extension's code counts.
"""

import ctypes
import gc
import os
import re
import sys

import harness
import pytest
import torch
import torch.distributed as dist
import zygote
from harness import run_ranks

SANITIZER = os.environ.get("HYBRIDPS_TEST_SANITIZER", "")  # "asan" or "tsan", the preset of the extension

pytestmark = pytest.mark.skipif(not SANITIZER, reason="the extension of scripts/test --sanitize only")
needs_asan = pytest.mark.skipif(SANITIZER != "asan", reason="the leak check belongs to the address sanitizer")


def which_extension(rank, world):
    from hybridps import _C

    with open(_C.__file__, "rb") as file:
        content = file.read()
    return _C.__file__, b"__asan_report_load" in content, b"__tsan_read" in content


def test_the_ranks_load_the_extension_with_the_sanitizer():
    for path, asan, tsan in run_ranks(which_extension, "2+1"):
        assert path.startswith(os.path.join(sys.prefix, "")), path
        assert f"/build/{SANITIZER}/" in path
        assert (asan, tsan) == (SANITIZER == "asan", SANITIZER == "tsan")


@pytest.fixture(scope="module")
def leak_server():
    """A fork server whose ranks can look for leaks: Python's own allocator would hide what its objects point to."""
    options = os.environ.get("ASAN_OPTIONS", "") + ":detect_leaks=1:leak_check_at_exit=0:symbolize=0"
    server = harness.Zygote(["pytest", "numpy"], env={"ASAN_OPTIONS": options, "PYTHONMALLOC": "malloc"})
    yield server
    server.stop()


def lost(module, folder):
    """The blocks that nothing points to any more and that were allocated from code of `module`, a part of its path."""
    runtime = ctypes.CDLL(None)
    path = os.path.join(folder, "leaks")
    gc.collect()
    runtime.__sanitizer_set_report_path(path.encode())
    runtime.__lsan_do_recoverable_leak_check()
    runtime.__sanitizer_set_report_path(b"stderr")
    report = ""
    if os.path.exists(f"{path}.{os.getpid()}"):
        with open(f"{path}.{os.getpid()}") as file:
            report = file.read()
    blocks = re.findall(r"^(?:Direct|Indirect) leak of .*?\n\n", report + "\n\n", re.MULTILINE | re.DOTALL)
    return [block for block in blocks if module in block]


def lose(rank, world, folder):
    malloc = ctypes.CDLL(None).malloc
    malloc.restype = ctypes.c_void_p
    for _ in range(100):
        malloc(ctypes.c_size_t(1234))
    return len(lost("libffi", folder)), len(lost("/hybridps/_C", folder))


@needs_asan
def test_a_lost_block_is_found(leak_server, tmp_path):
    results = run_ranks(lose, "1", args=(str(tmp_path),), init=False, destroy=False, fork_server=leak_server)
    for found, ours in results:
        assert found > 0 and ours == 0


def use_everything(rank, world):
    pair = dist.new_group([0, 1])
    for turn in range(3):
        tensor = torch.full((50_000,), float(rank))
        works = [dist.all_reduce(tensor, async_op=True)]
        works.append(dist.broadcast(torch.ones(1000), src=turn, async_op=True))
        dropped = dist.all_reduce(torch.ones(10), async_op=True)
        dropped.get_future().then(lambda future: future.value())
        del dropped
        for work in works:
            work.wait()
        dist.all_gather_object([None] * world, {"rank": rank})
        dist.all_to_all(list(torch.empty(world, 300)), list(torch.ones(world, 300)))
        outputs = [torch.empty(70)] * world
        dist.gather(torch.ones(70), outputs if rank == 1 else None, dst=1)
        dist.reduce_scatter_tensor(torch.empty(500), torch.ones(500 * world))
        dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, torch.ones(3000), (rank + 1) % world),
                dist.P2POp(dist.irecv, torch.ones(3000), (rank - 1) % world),
            ]
        )[-1].wait()
        if rank < 2:
            dist.all_reduce(torch.ones(2000), group=pair)
    dist.barrier()
    for wrong in (lambda: dist.all_reduce(torch.ones(2), op=dist.ReduceOp.BAND), lambda: dist.broadcast(1, src=0)):
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            wrong()
    with pytest.raises(RuntimeError):  # the ranks disagree: the group fails
        dist.all_reduce(torch.ones(10 + (rank == 2)))


def lose_nothing(rank, world, folder):
    for life in range(3):
        zygote.context.init(prefix=f"life{life}")
        use_everything(rank, world)
        dist.destroy_process_group()
    return lost("/hybridps/_C", folder)


@needs_asan
def test_nothing_of_ours_is_lost(leak_server, tmp_path):
    results = run_ranks(lose_nothing, "2+1", args=(str(tmp_path),), init=False, destroy=False, fork_server=leak_server)
    for rank, blocks in enumerate(results):
        assert not blocks, f"rank {rank}: {len(blocks)} lost blocks:\n" + "".join(blocks)
