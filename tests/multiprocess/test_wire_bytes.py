"""What crosses between nodes, from the backend's own counters: an allreduce of S bytes over n nodes costs each node
2(n-1)/n S each way, however many ranks the nodes have, within 2 % and the headers."""

import os
import socket
import stat
import struct

import harness
import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

pytestmark = [
    pytest.mark.skipif(not harness.IS_HYBRIDPS, reason="only hybridps counts the bytes between nodes"),
    pytest.mark.usefixtures("all_bytes_go"),
]

COUNTERS = ["net_tx_payload_bytes", "net_rx_payload_bytes", "net_tx_header_bytes", "net_rx_header_bytes"]


def counted(rank, world, sizes, operation):
    """Per size: what this rank's counters grew by. Other ranks' progress is kept out by barriers."""
    from hybridps import _C

    def snapshot():
        dist.barrier()
        stats = _C.stats()
        dist.barrier()
        return stats

    tensors = {size: torch.ones(size // 4) for size in sizes}
    dist.all_reduce(torch.ones(10))
    quiet_before = snapshot()
    quiet_after = snapshot()  # two barriers and nothing else
    growth = []
    for size in sizes:
        before = snapshot()
        if operation == "all_reduce":
            dist.all_reduce(tensors[size])
        elif operation == "broadcast":
            dist.broadcast(tensors[size], 0)
        elif operation == "reduce_scatter":
            dist.reduce_scatter_tensor(torch.empty(size // 4 // world), tensors[size])
        elif operation == "all_gather":
            dist.all_gather_into_tensor(tensors[size], torch.ones(size // 4 // world))
        after = snapshot()
        growth.append({name: after[name] - before[name] for name in COUNTERS})
    quiet = {name: quiet_after[name] - quiet_before[name] for name in COUNTERS}
    return growth, quiet


def per_node(nodes, results, index):
    node_of = harness.parse_nodes(nodes)
    sums = [dict.fromkeys(COUNTERS, 0) for _ in range(max(node_of) + 1)]
    for rank, (growth, quiet) in enumerate(results):
        for name in COUNTERS:
            sums[node_of[rank]][name] += growth[index][name] - quiet[name]
    return sums


SIZES = [64 << 10, 1 << 20, 12 << 20]


@pytest.mark.parametrize("nodes", ["1+1", "2+2", "2+1+1", "1+1+1+1", "3+1", "ABAB"])
def test_bytes_of_an_allreduce(nodes):
    results = run_ranks(counted, nodes, args=(SIZES, "all_reduce"))
    count = max(harness.parse_nodes(nodes)) + 1
    for index, size in enumerate(SIZES):
        want = 2 * (count - 1) / count * size
        for node, sums in enumerate(per_node(nodes, results, index)):
            for name in ["net_tx_payload_bytes", "net_rx_payload_bytes"]:
                got = sums[name]
                print(f"{nodes} {size} B, node {node}: {name} {got}, formula {want:.0f} ({got / want - 1:+.2%})")
                assert abs(got / want - 1) <= 0.02, f"{nodes}, {size} B, node {node}: {name} is {got}, not {want:.0f}"
            headers = sums["net_tx_header_bytes"]
            assert headers <= 0.02 * want + 16384, f"{nodes}, {size} B: {headers} bytes of headers"


@pytest.mark.parametrize("nodes", ["2+2", "2+1+1"])
def test_a_broadcast_reaches_each_node_once(nodes):
    """A broadcast reaches each other node once: what arrives at a node is at most S, however many ranks it has."""
    size = 12 << 20
    results = run_ranks(counted, nodes, args=([size], "broadcast"))
    for node, sums in enumerate(per_node(nodes, results, 0)):
        got = sums["net_rx_payload_bytes"]
        print(f"broadcast on {nodes}: node {node} received {got / size:.3f} S")
        assert got <= 1.02 * size
    assert per_node(nodes, results, 0)[-1]["net_rx_payload_bytes"] >= 0.98 * size


@pytest.mark.parametrize("operation", ["reduce_scatter", "all_gather"])
def test_bytes_of_the_halves(operation):
    """Two nodes of two ranks: reduce_scatter and all_gather each cost half of an allreduce, S / 2 each way."""
    size = 12 << 20
    results = run_ranks(counted, "2+2", args=([size], operation))
    for node, sums in enumerate(per_node("2+2", results, 0)):
        got = sums["net_tx_payload_bytes"]
        print(f"{operation}: node {node} sent {got / size:.3f} S")
        assert abs(got / (size / 2) - 1) <= 0.02


def sent_by_socket(rank, world, size):
    """Per TCP socket of this process: what an allreduce has sent through it and the other side has acknowledged."""

    def acknowledged():
        sent = {}
        for entry in os.listdir("/proc/self/fd"):
            try:
                if not stat.S_ISSOCK(os.fstat(int(entry)).st_mode):
                    continue
                with socket.socket(fileno=os.dup(int(entry))) as one:
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                sent[int(entry)] = struct.unpack_from("Q", info, 120)[0]  # tcpi_bytes_acked
            except OSError:
                pass  # closed meanwhile, or no TCP
        return sent

    tensor = torch.ones(size // 4)
    dist.all_reduce(tensor)  # opens what there is to open
    dist.barrier()
    before = acknowledged()
    dist.barrier()
    dist.all_reduce(tensor)
    dist.barrier()
    after = acknowledged()
    dist.barrier()
    return [after[fd] - before.get(fd, 0) for fd in after]


@pytest.mark.parametrize("sockets, threads", [(2, 0), (2, 2), (4, 2)])
def test_sockets_carry_equal_parts(sockets, threads):
    """Two nodes: each sends S; with k sockets S / k through each, within a chunk or two and the headers of messages."""
    size = 24 << 20
    env = {"HYBRIDPS_DATA_SOCKETS": str(sockets), "HYBRIDPS_LIMITS": f"data_threads={threads}"}
    for sent in run_ranks(sent_by_socket, "1+1", args=(size,), env=env):
        large = sorted(bytes for bytes in sent if bytes > size / 16)
        print(f"{sockets} sockets, {threads} threads: {large} of {size}")
        assert len(large) == sockets, sent
        for bytes in large:
            assert abs(bytes - size / sockets) <= 2 * (64 << 10) + 0.01 * size / sockets, large
        # All there is, with 112 bytes of header per 64 KiB and UCX's own: no message went twice or elsewhere.
        assert size <= sum(sent) <= 1.01 * size + 65536


@pytest.mark.parametrize("nodes", ["1+1", "2+1+1"])
def test_bytes_through_data_threads(nodes):
    """The backend's own count is as exact where other threads carry the messages."""
    env = {"HYBRIDPS_DATA_SOCKETS": "2", "HYBRIDPS_LIMITS": "data_threads=2"}
    results = run_ranks(counted, nodes, args=(SIZES, "all_reduce"), env=env)
    count = max(harness.parse_nodes(nodes)) + 1
    for index, size in enumerate(SIZES):
        want = 2 * (count - 1) / count * size
        for node, sums in enumerate(per_node(nodes, results, index)):
            for name in ["net_tx_payload_bytes", "net_rx_payload_bytes"]:
                assert abs(sums[name] / want - 1) <= 0.02, f"{nodes}, {size} B, node {node}: {name} is {sums[name]}"


@pytest.mark.parametrize("nodes", ["4", "1", "2"])
def test_a_single_node_uses_no_network(nodes):
    results = run_ranks(counted, nodes, args=(SIZES, "all_reduce"))
    for growth, _quiet in results:
        for step in growth:
            assert step["net_tx_payload_bytes"] == 0 and step["net_rx_payload_bytes"] == 0
