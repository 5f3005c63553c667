"""Which ranks share memory: many on one host, and hosts that wrongly claim to be one."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import harness
import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from reference import Checker

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import hosts  # noqa: E402

needs_hybridps = pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="nodes are hybridps's own idea")


def many_ranks(rank, world):
    check = Checker(rank)
    for count in (0, 1, 1000, 100_003):
        tensor = torch.full((count,), rank + 1.0)
        dist.all_reduce(tensor)
        check.equal(f"all_reduce of {count}", tensor, torch.full((count,), world * (world + 1) / 2))
        gathered = torch.empty(count * world)
        dist.all_gather_into_tensor(gathered, torch.full((count,), float(rank)))
        check.equal(f"all_gather of {count}", gathered, torch.arange(float(world)).repeat_interleave(count))
    dist.barrier()
    return check.result()


def test_32_ranks_on_one_host():
    run_ranks(many_ranks, "32", timeout=120)


# A rank of its own interpreter, since it lives in other namespaces than the test.
CLAIMANT = """
import json
import torch, torch.distributed as dist
dist.init_process_group("hybridps")
from hybridps import _C
rank, world = dist.get_rank(), dist.get_world_size()
tensor = torch.full((100_000,), rank + 1.0)
dist.all_reduce(tensor)
right = bool((tensor == world * (world + 1) / 2).all())
print(json.dumps({"right": right, "sent": _C.stats()["net_tx_payload_bytes"]}), flush=True)
dist.destroy_process_group()
"""


@needs_hybridps
def test_hosts_that_claim_to_be_one_node_are_told_apart():
    """Shared memory is proven before it is used: a name that two hosts share, as after a copied configuration, costs
    nothing but that the network carries the data."""
    try:
        network = hosts.Hosts(["a", "b"])
    except hosts.Failed as error:
        pytest.skip(f"no namespaces here: {error}")
    try:
        ranks = []
        for rank, name in enumerate(["a", "a", "b"]):
            environment = dict(os.environ) | {
                "RANK": str(rank),
                "WORLD_SIZE": "3",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": network.address["a"],
                "MASTER_PORT": "29500",
                "HYBRIDPS_NODE": "the same",
                "HYBRIDPS_INTERFACE": hosts.INTERFACE,
                "OMP_NUM_THREADS": "1",
            }
            ranks.append(
                network.popen(
                    name, [sys.executable, "-c", CLAIMANT], env=environment, stdout=subprocess.PIPE, text=True
                )
            )
        deadline = time.monotonic() + 60 * harness.TIME_SCALE
        results = [json.loads(rank.communicate(timeout=deadline - time.monotonic())[0]) for rank in ranks]
        assert all(rank.returncode == 0 for rank in ranks)
    finally:
        network.close()
    assert all(result["right"] for result in results)
    # Two nodes, whatever they call themselves: each sends its sum once, divided among the ranks of a.
    assert results[0]["sent"] + results[1]["sent"] == 400_000
    assert results[2]["sent"] == 400_000


def sockets_of_peers(rank, world):
    """What the sockets to the other rank were told: {(congestion control, bytes a second, class of the packets)}."""
    tensor = torch.ones(100_000)
    dist.all_reduce(tensor)
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        try:
            made = socket.socket(fileno=os.dup(int(entry)))
        except OSError:  # no socket
            continue
        with made:
            is_tcp = made.family == socket.AF_INET and made.type == socket.SOCK_STREAM
            if is_tcp and made.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 0:
                name = made.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).split(b"\0")[0].decode()
                rate = int.from_bytes(made.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 8), "little")
                found.add((name, rate, made.getsockopt(socket.IPPROTO_IP, socket.IP_TOS)))
    return found


SO_MAX_PACING_RATE = 47


@needs_hybridps
def test_connections_go_as_the_settings_say():
    env = {"HYBRIDPS_TCP_CONGESTION": "reno", "HYBRIDPS_LIMITS": "tcp_gbps=1", "HYBRIDPS_DSCP": "10"}
    for found in run_ranks(sockets_of_peers, "1+1", env=env, store="file"):
        assert found == {("reno", 125_000_000, 40)}


@needs_hybridps
def test_a_congestion_control_that_the_kernel_lacks_is_told():
    launch = run_ranks(sockets_of_peers, "1+1", env={"HYBRIDPS_TCP_CONGESTION": "none-such"}, check=False)
    for report in launch.reports:
        assert "HYBRIDPS_TCP_CONGESTION=none-such: this kernel has:" in report.error and "reno" in report.error
