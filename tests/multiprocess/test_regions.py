"""Nodes in regions (HYBRIDPS_REGION, or found by round trips): every collective is right, all ranks get the same bits, and a
wrong declaration is told."""

import json
import os
import subprocess
import sys
from pathlib import Path

import harness
import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from reference import Checker

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "benchmarks" / "lab")]
import hosts  # noqa: E402
import lab  # noqa: E402

pytestmark = pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="regions are hybridps's own idea")

# The region of each rank. The regions have 2 + 2 nodes, and 2 + 1.
LAYOUTS = {"1+1+1+1": "aabb", "2+2+1": "aabba"}


def regions(nodes):
    return {rank: {"HYBRIDPS_REGION": name} for rank, name in enumerate(LAYOUTS[nodes])}


def collectives(rank, world):
    check = Checker(rank)
    total = world * (world + 1) // 2
    for count in (0, 1, 4097, 300_007):
        base = torch.arange(count) % 1000
        tensor = base * (rank + 1)
        dist.all_reduce(tensor)
        check.equal(f"all_reduce of {count}", tensor, base * total)
        tensor = base * (rank + 1)
        dist.reduce(tensor, 1)
        if rank == 1:
            check.equal(f"reduce of {count}", tensor, base * total)
        for root in range(world):
            tensor = base * (rank + 1)
            dist.broadcast(tensor, root)
            check.equal(f"broadcast of {count} from {root}", tensor, base * (root + 1))
        gathered = torch.empty(count * world, dtype=torch.int64)
        dist.all_gather_into_tensor(gathered, base + rank)
        check.equal(f"all_gather of {count}", gathered, torch.cat([base + r for r in range(world)]))
        scattered = torch.empty(count, dtype=torch.int64)
        dist.reduce_scatter_tensor(scattered, torch.cat([base * r + rank for r in range(world)]))
        check.equal(f"reduce_scatter of {count}", scattered, base * rank * world + total - world)
    # Several at once, in a group of some of the ranks too.
    some = dist.new_group([0, 2, 3])
    works, tensors = [], []
    for i in range(12):
        for group, size in ((None, world), (some, 3)):
            if group is some and rank not in (0, 2, 3):
                continue
            tensors.append((torch.full((20_000 + i,), i + 1.0), (i + 1.0) * size))
            works.append(dist.all_reduce(tensors[-1][0], group=group, async_op=True))
    for work in works:
        work.wait()
    for tensor, wanted in tensors:
        check.equal("all_reduce at once", tensor, torch.full_like(tensor, wanted))
    torch.manual_seed(rank)
    noise = torch.randn(100_003)
    dist.all_reduce(noise)
    return check.result(), noise


@pytest.mark.parametrize("nodes", LAYOUTS)
def test_all_collectives(nodes):
    results = run_ranks(collectives, nodes, rank_env=regions(nodes))
    for _, noise in results:
        assert torch.equal(noise, results[0][1])


def nothing(rank, world):
    return rank


def test_a_region_that_only_some_ranks_have_is_told():
    for report in run_ranks(nothing, "1+1", rank_env={1: {"HYBRIDPS_REGION": "east"}}, check=False).reports:
        assert "HYBRIDPS_REGION is not set on all ranks" in report.error and "'east'" in report.error


def test_ranks_of_one_node_in_two_regions_are_told():
    apart = {0: {"HYBRIDPS_REGION": "east"}, 1: {"HYBRIDPS_REGION": "west"}}
    for report in run_ranks(nothing, "2", rank_env=apart, check=False).reports:
        assert "ranks of one node have different HYBRIDPS_REGION" in report.error


# A rank of its own interpreter, since it lives in other namespaces than the test. Sums of fp32 show the order in which the
# ranks were added.
FAR = """
import json
import torch, torch.distributed as dist
dist.init_process_group("hybridps")
rank, world = dist.get_rank(), dist.get_world_size()
some = dist.new_group([0, 2, 3])
values = [torch.randn(100_003, generator=torch.Generator().manual_seed(r)) for r in range(world)]
whole, part = values[rank].clone(), values[rank].clone()
dist.all_reduce(whole)
if rank != 1:
    dist.all_reduce(part, group=some)
a, b, c, d = values
by_region = [torch.equal(whole, (a + b) + (c + d)), rank == 1 or torch.equal(part, a + (c + d))]
print(json.dumps({"by_region": by_region, "flat": torch.equal(whole, ((a + b) + c) + d)}), flush=True)
dist.destroy_process_group()
"""


SERVER = "from hybridps.backend.server import main; raise SystemExit(main())"


@pytest.mark.parametrize(("delay_ms", "servers"), [(2, 0), (2, 1), (0, 0)])
def test_found_by_round_trips(delay_ms, servers):
    """Two sites that are 4 ms apart are regions, without a setting. Hosts without a delay between them are none. A dedicated
    server of the group knows what was found."""
    region_of = {"a": 0, "b": 0, "c": 1, "d": 1} | ({"spare": 0} if servers else {})
    try:
        far = hosts.Uplinks(region_of, [1000, 1000], delay_ms=delay_ms, relay=lab.relay_program() if delay_ms else None)
        network = hosts.Hosts(list(region_of), uplinks=far)
    except (hosts.Failed, OSError) as error:
        pytest.skip(f"no namespaces here: {error}")
    ranks, more = [], {}
    server = None
    try:
        if servers:
            token = {"HYBRIDPS_TOKEN": "the token of this test", "HYBRIDPS_INTERFACE": hosts.INTERFACE}
            place = network.address["spare"] + ":7000"
            server = network.popen(
                "spare",
                [sys.executable, "-c", SERVER, "--listen", place],
                env={k: v for k, v in os.environ.items() if k != "HYBRIDPS_REGION"} | token,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert "listening" in server.stdout.readline()
            more = token | {"HYBRIDPS_SERVERS": place, "HYBRIDPS_SERVERS_REQUIRED": "1"}
        for rank, name in enumerate("abcd"):
            environment = {k: v for k, v in os.environ.items() if k != "HYBRIDPS_REGION"} | {
                "RANK": str(rank),
                "WORLD_SIZE": "4",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": network.address["a"],
                "MASTER_PORT": "29500",
                "HYBRIDPS_NODE": name,
                "HYBRIDPS_INTERFACE": hosts.INTERFACE,
                "OMP_NUM_THREADS": "1",
                **more,
            }
            pipe = {"stdout": subprocess.PIPE, "text": True}
            ranks.append(network.popen(name, [sys.executable, "-c", FAR], env=environment, **pipe))
        for rank in ranks:
            found = json.loads(rank.communicate(timeout=120)[0])
            assert found == {"by_region": [True, True], "flat": False} if delay_ms else found["flat"]
    finally:
        for process in [*ranks, *([server] if server else [])]:
            process.kill()
            process.wait()
        network.close()
