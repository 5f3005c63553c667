"""HYBRIDPS_CHECKSUM=1: everything works, all ranks have it or none, and a bit that flips on the way ends the group by name."""

import os
import subprocess
import sys

import harness
import pytest
from harness import free_port, run_ranks
from test_dedicated import reductions, servers, settings
from test_first_hour import lines_of
from test_regions import collectives
from test_security import is_refused

pytestmark = pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="hybridps's own setting")

ON = {"HYBRIDPS_CHECKSUM": "1"}


@pytest.mark.parametrize(
    ("nodes", "more"),
    [
        ("1+1+1+1", {}),
        ("2+2+1", {"HYBRIDPS_DATA_SOCKETS": "3", "HYBRIDPS_LIMITS": "data_threads=2"}),
    ],
)
def test_collectives(nodes, more):
    results = run_ranks(collectives, nodes, env=ON | {"HYBRIDPS_LOG_LEVEL": "info"} | more)
    said = [text for rank, text in lines_of(results.reports, "info") if text.startswith("hybridps ")]
    assert len(said) == 1 and "data by TCP with checksums through lo" in said[0], said
    assert not lines_of(results.reports, "warn")


def test_dedicated_servers():
    with servers(2, env=ON) as running:
        run_ranks(reductions, "1+1+1", env=settings(running) | ON)


@pytest.mark.parametrize("odd", [0, 2])
@pytest.mark.parametrize(
    ("its", "told"),
    [
        ({"HYBRIDPS_CHECKSUM": "0"}, "HYBRIDPS_CHECKSUM=1"),
        ({"HYBRIDPS_DATA_TRANSPORT": "ucx"}, "HYBRIDPS_CHECKSUM=1 checks hybridps's own TCP only"),
    ],
    ids=["off", "ucx"],
)
def test_all_or_none(its, told, odd):
    run_ranks(is_refused, "1+1+1", args=(told,), env=ON, rank_env={odd: its}, init=False, destroy=False)


def test_a_server_without_is_refused():
    with servers(1) as running:
        run_ranks(
            is_refused,
            "1+1+1",
            args=("HYBRIDPS_CHECKSUM=1",),
            env=settings(running, HYBRIDPS_SERVERS_REQUIRED="1") | ON,
            init=False,
            destroy=False,
        )


# One bit of one large read flips, as in a bad card.
FLIP = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/uio.h>
ssize_t readv(int fd, const struct iovec* parts, int count) {
  static ssize_t (*real)(int, const struct iovec*, int);
  static __thread int large;
  if (!real) real = (ssize_t(*)(int, const struct iovec*, int))dlsym(RTLD_NEXT, "readv");
  ssize_t got = real(fd, parts, count);
  if (got > 20000 && ++large == 3) {
    ssize_t at = 10000;
    for (int i = 0; i < count; at -= (ssize_t)parts[i].iov_len, ++i)
      if (at < (ssize_t)parts[i].iov_len) { ((char*)parts[i].iov_base)[at] ^= 4; break; }
  }
  return got;
}
"""
RANK = """
import torch, torch.distributed as dist
dist.init_process_group("hybridps")
value = torch.arange(2_000_000, dtype=torch.float32)
try:
    wrong = 0
    for _ in range(10):
        tensor = value.clone()
        dist.all_reduce(tensor)
        wrong += int((tensor != 2 * value).sum())
    print("wrong", wrong, flush=True)
    dist.destroy_process_group()
except Exception as error:
    print("error", error, flush=True)
"""


@pytest.mark.parametrize("on", ["1", "0"])
def test_a_flipped_bit(tmp_path, on):
    (tmp_path / "flip.c").write_text(FLIP)
    library = tmp_path / "flip.so"
    made = subprocess.run(
        ["cc", "-shared", "-fPIC", "-o", library, tmp_path / "flip.c", "-ldl"], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    ranks, port = [], str(free_port())
    for rank in range(2):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HYBRIDPS_")} | {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "HYBRIDPS_NODE": f"node{rank}",
            "HYBRIDPS_INTERFACE": "lo",
            "HYBRIDPS_COMPRESS": "off",
            "HYBRIDPS_CHECKSUM": on,
            "OMP_NUM_THREADS": "1",
        }
        if rank == 1:
            environment["LD_PRELOAD"] = f"{os.environ.get('LD_PRELOAD', '')} {library}".strip()
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", RANK],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        told = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    outs = [out for out, _ in told]
    if on == "0":
        assert any(out.startswith("wrong") and out != "wrong 0\n" for out in outs), told
        return
    assert all(out.startswith("error") for out in outs), told
    assert "CRC32C" in outs[1] and "127.0.0.1 here" in outs[1], told
    assert "CRC32C" in told[1][1], told  # in its log, too
    assert "rank 0" in outs[1] and "rank 1" in outs[0], told
    assert "CRC32C" in outs[0], told  # the sender is told, too
