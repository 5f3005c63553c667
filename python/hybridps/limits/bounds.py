"""What a network allows: the least time of a collective, and the bytes that the plan puts through each network card.

A node has one full-duplex card; a rate is goodput in bytes/s per direction, the same each way. Sums cost nothing, and
push and pull overlap. The allreduce with equal rates is Theorem 1 of BytePS (Jiang et al., "A Unified Architecture for
Accelerating Distributed DNN Training in Heterogeneous GPU/CPU Clusters", OSDI 2020); the rest is counting, below.

Allreduce of S bytes, n worker nodes. A worker that owns the share y sends and receives (1 - y) S as a client and
(n - 1) y S as an owner: (1 + (n - 2) y) S. A dedicated server that owns x sends and receives n x S. Within the time t a
worker with the rate B can therefore own (t B / S - 1) / (n - 2), a server t B / (n S); the least t where these reach 1
is the bound, and no worker can be done before S / B.

Regions of nodes (docs/regions.md) have an uplink each, which is to a region what a card is to a node: with levels a region
sends one sum, as if it were one node. Two regions put S on an uplink each way, R equal ones 2 (R - 1)/R S. Without levels each
node sends for itself: m nodes of each of two regions put m S there. A ring goes through each uplink once each way.

Inside one host the limit is that of memory, `memory_seconds()`.

The other collectives move what they must: nobody can receive less than the bytes that it lacks, nor send less than
those that only it has. busbw is nccl-tests' (its doc/PERFORMANCE.md): algbw times the bytes that must cross one rank's
card, in units of the size.
"""

from collections.abc import Sequence

COLLECTIVES = (
    "allreduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "sendrecv",
    "barrier",
)

ETHERNET_HEADER_BYTES = 14  # what Linux counts of a frame; preamble, gap and checksum are 24 more on a real wire
IP_TCP_HEADER_BYTES = 52  # IPv4, TCP, timestamps
# Of csrc/hybridps/schedule/plan.cpp: an allreduce of so many bytes for each other region is made in each region, and what
# is larger than this goes through gateways.
EXCHANGE_BYTES_MAX, EXCHANGE_BYTES_LEAST = 64 * 1024, 8 * 1024
LEVELS_ABOVE_BYTES = 32 * 1024


def goodput(gbps: float, mtu: int = 1500, framing_bytes: int = ETHERNET_HEADER_BYTES) -> float:
    """Bytes/s that TCP delivers through a card of `gbps` Gbit/s."""
    return gbps * 1e9 / 8 * (mtu - IP_TCP_HEADER_BYTES) / (mtu + framing_bytes)


def _capacity(seconds: float, size: float, workers: Sequence[float], servers: Sequence[float]) -> list[float]:
    """The largest share of the tensor that each card can serve in the time; workers first."""
    n = len(workers)
    shares = []
    for rate in workers:
        spare = seconds * rate / size - 1
        shares.append(1.0 if n <= 2 else min(1.0, max(0.0, spare / (n - 2))))
    return shares + [min(1.0, seconds * rate / (n * size)) for rate in servers]


def allreduce_shares(size: float, workers: Sequence[float], servers: Sequence[float] = ()) -> tuple[float, list[float]]:
    """(least seconds, shares that reach it; they sum to 1)."""
    n = len(workers)
    if n < 2 or size <= 0:
        return 0.0, [1.0 / max(1, n)] * n + [0.0] * len(servers)
    floor = size / min(workers)
    low, high = floor, floor * max(1, n - 1)  # at the latter the slowest worker could own everything
    if sum(_capacity(low, size, workers, servers)) >= 1:
        high = low
    for _ in range(200):
        if high - low <= 1e-13 * high:
            break
        middle = (low + high) / 2
        if sum(_capacity(middle, size, workers, servers)) >= 1:
            high = middle
        else:
            low = middle
    capacity = _capacity(high, size, workers, servers)
    total = sum(capacity)
    return high, [share / total for share in capacity]


def allreduce_loads(size: float, shares: Sequence[float], workers: int) -> list[float]:
    """Bytes through each card, each way, for given shares: workers first, then dedicated servers."""
    clients = [(1 + (workers - 2) * share) * size for share in shares[:workers]]
    return clients + [workers * share * size for share in shares[workers:]]


def _gateway(region: int, owner: int, index: int, nodes_in: Sequence[Sequence[int]], region_of, excluded: int) -> int:
    """`Topology::gateway_node()` of csrc/hybridps/schedule; `index`: of the owner among the ranks of its node."""
    if region_of[owner] == region:
        return owner
    place = nodes_in[region_of[owner]].index(owner) + index
    there = nodes_in[region]
    place += there[place % len(there)] == excluded
    return there[place % len(there)]


def span_loads(
    spans: Sequence[tuple[int, int, int, float]], region_of: Sequence[int], sums: bool, results: bool
) -> list[tuple[float, float]]:
    """Per node (sent, received) bytes of spans, each (source's node or -1, owner's node, owner's local index, bytes).

    `sums`: all nodes contribute. `results`: all nodes get them. What goes between regions passes their gateways
    (docs/regions.md). A source that is not the owner serves its own node.
    """
    nodes_in = [[node for node, region in enumerate(region_of) if region == r] for r in range(max(region_of) + 1)]
    sent, received = [0.0] * len(region_of), [0.0] * len(region_of)

    def move(here: int, there: int, size: float) -> None:
        sent[here] += size
        received[there] += size

    for source, owner, index, size in spans:
        excluded = source if source != owner else -1
        if excluded >= 0:
            move(source, owner, size)
        for node, region in enumerate(region_of):
            if node in (owner, excluded):
                continue
            gateway = _gateway(region, owner, index, nodes_in, region_of, excluded)
            parent = owner if gateway == node else gateway
            if sums:
                move(node, parent, size)
            if results:
                move(parent, node, size)
    return list(zip(sent, received, strict=True))


def shares_by_regions(
    size: float, rates: Sequence[float], region_of: Sequence[int], uplinks: Sequence[float]
) -> list[float]:
    """What each node owns where sums have levels. Of three regions or more those with a slow uplink own less; between two
    that changes nothing."""
    shares = allreduce_shares(size, rates)[1]
    if len(uplinks) < 3:
        return shares
    owned = [sum(s for s, r in zip(shares, region_of, strict=True) if r == region) for region in range(len(uplinks))]
    of_regions = allreduce_shares(size, uplinks)[1]
    return [
        of_regions[r] * (s / owned[r] if owned[r] > 1e-9 else 1 / list(region_of).count(r))
        for s, r in zip(shares, region_of, strict=True)
    ]


def uplink_loads(size: float, shares: Sequence[float], region_of: Sequence[int], levels: bool) -> list[float]:
    """Bytes through each region's uplink, each way, of an allreduce with these shares of the nodes."""
    owned, nodes = [0.0] * (max(region_of) + 1), [0] * (max(region_of) + 1)
    for share, region in zip(shares, region_of, strict=True):
        owned[region] += share
        nodes[region] += 1
    if levels:
        return allreduce_loads(size, owned, len(owned))
    # Each node pushes what others own; owners send results to each node elsewhere.
    return [(m * (1 - y) + (len(shares) - m) * y) * size for m, y in zip(nodes, owned, strict=True)]


def exchange_seconds(
    size: float,
    region_of: Sequence[int],
    rates: Sequence[float],
    uplinks: Sequence[float],
    round_trip_s: float,
    levels: bool,
    declared: bool = True,
) -> dict[str, float]:
    """What an allreduce of more than EXCHANGE_BYTES_MAX waits for if the plan is followed: its "card" and its "trunk", which
    work at the same time, and one "round trip", since results come back after contributions have gone. `declared`: whether
    the job knows the uplinks' rates; else it takes them for equal."""
    if levels:
        shares = shares_by_regions(size, rates, region_of, uplinks if declared else [1.0] * len(uplinks))
        spans = [(-1, node, 0, share * size) for node, share in enumerate(shares)]
        cards = [sent for sent, _ in span_loads(spans, region_of, sums=True, results=True)]
    else:
        shares = allreduce_shares(size, rates)[1]
        cards = allreduce_loads(size, shares, len(rates))
    trunk = uplink_loads(size, shares, region_of, levels)
    return {
        "card": max(load / rate for load, rate in zip(cards, rates, strict=True)),
        "trunk": max(load / rate for load, rate in zip(trunk, uplinks, strict=True)),
        "round trip": round_trip_s,
    }


def ring_time(
    size: float, workers: Sequence[float], uplinks: Sequence[float] = (), round_trip_s: float = 0.0
) -> float:
    """A ring over nodes that reduce inside first, in the order of regions; the slowest card or uplink paces every step, or
    the round trip where it takes longer than a piece: gloo's 64 B over 50 ms take 6 of them on 4 nodes."""
    n = len(workers)
    return 0.0 if n < 2 else 2 * (n - 1) * max(size / n / min([*workers, *uplinks]), round_trip_s)


def busbw_factor(collective: str, ranks: int) -> float:
    if ranks < 2 or collective == "barrier":
        return 0.0
    if collective == "allreduce":
        return 2 * (ranks - 1) / ranks
    if collective in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 1.0


def node_bytes(collective: str, size: float, node_of: Sequence[int], root: int = 0) -> list[tuple[float, float]] | None:
    """Per node (bytes that it must send, bytes that it must receive); None for an allreduce, where shares decide.

    `size` as in nccl-tests: the whole vector, of which a rank has or gets 1/ranks in reduce_scatter, all_gather; what
    one rank sends in all in all_to_all. sendrecv: each rank to the next one, in a circle.
    """
    ranks = len(node_of)
    nodes = max(node_of) + 1
    if collective == "allreduce":
        return None
    if nodes == 1 or collective == "barrier":
        return [(0.0, 0.0)] * nodes
    local = [list(node_of).count(node) for node in range(nodes)]
    result = []
    for node in range(nodes):
        mine = size * local[node] / ranks
        if collective == "all_gather":
            result.append((mine, size - mine))
        elif collective == "reduce_scatter":
            result.append((size - mine, mine))
        elif collective == "all_to_all":
            moved = local[node] * size * (ranks - local[node]) / ranks
            result.append((moved, moved))
        elif collective == "broadcast":
            result.append((size, 0.0) if node == node_of[root] else (0.0, size))
        elif collective == "reduce":
            result.append((0.0, size) if node == node_of[root] else (size, 0.0))
        elif collective == "sendrecv":
            out = sum(node_of[r] == node != node_of[(r + 1) % ranks] for r in range(ranks))
            come = sum(node_of[(r + 1) % ranks] == node != node_of[r] for r in range(ranks))
            result.append((out * size, come * size))
        else:
            raise ValueError(f"unknown collective {collective!r}")
    return result


def limit_seconds(
    collective: str,
    size: float,
    node_of: Sequence[int],
    rates: Sequence[float],
    servers: Sequence[float] = (),
    root: int = 0,
    regions: tuple[Sequence[int], Sequence[float]] | None = None,
) -> float:
    """The least time of a collective on nodes with these goodputs; 0 where no byte has to cross.

    `regions`: the region of each node, and the goodput of each region's uplink. An uplink is to a region what a card is to
    a node, so the bound for nodes is also one for regions.
    """
    if regions:
        region_of = [regions[0][node] for node in node_of]
        of_uplinks = limit_seconds(collective, size, region_of, regions[1], (), root)
        return max(of_uplinks, limit_seconds(collective, size, node_of, rates, servers, root))
    if collective == "allreduce":
        return allreduce_shares(size, rates, servers)[0]
    moved = node_bytes(collective, size, node_of, root)
    return max(max(out, come) / rate for (out, come), rate in zip(moved, rates, strict=True))


def memory_seconds(collective: str, size: float, ranks: int, copy_rate: float, add_rate: float) -> float:
    """The least time of a collective on one host by way of shared memory: what a rank has for others is copied in, each
    rank sums its part, what others have for it is copied out. Memory that several ranks can use to begin with, as
    tensors of one process, would need less.

    Rates in bytes/s of one rank while all of them work: copied, and written by a sum of two tensors, which reads twice
    what it writes; a sum of n moves n + 1 tensors.
    """
    if ranks < 2 or collective == "barrier":
        return 0.0
    part = size / ranks
    others = size - part
    add = part * (ranks + 1) / 3 / add_rate
    if collective in ("allreduce", "reduce"):  # the root of a reduce has all three to do
        return 2 * others / copy_rate + add
    if collective == "reduce_scatter":
        return others / copy_rate + add
    copied = {
        "broadcast": size,  # in and out go on at the same time, on different ranks
        "all_gather": part + size,
        "all_to_all": others + size,
        "sendrecv": 2 * size,
    }[collective]
    return copied / copy_rate


def planned_bytes(
    collective: str,
    size: float,
    node_of: Sequence[int],
    rates: Sequence[float] = (),
    servers: Sequence[float] = (),
    root: int = 0,
    regions: tuple[Sequence[int], Sequence[float]] | None = None,
) -> list[tuple[float, float]] | None:
    """Per worker node (sent, received) payload if hybridps's plan is followed (csrc/hybridps/schedule/plan.cpp); None for a
    reduce, for an allreduce that regions exchange, and for one with regions and dedicated servers: these have no such
    closed form worth keeping.

    `regions`: the region of each node, and the rate of each region's uplink. Regions are taken to be of one size: nodes of
    others own parts that csrc/hybridps/schedule/level_shares.h finds.

    A broadcast goes by way of owners: the root's node sends each byte once, the others own parts and pass on. It is taken
    to be larger than a chunk; smaller ones go from the root to each node.
    """
    nodes = max(node_of) + 1
    if nodes == 1:
        return [(0.0, 0.0)] * nodes
    if collective == "reduce":
        return None
    if collective not in ("allreduce", "broadcast", "all_gather", "reduce_scatter"):
        return node_bytes(collective, size, node_of, root)
    shares = allreduce_shares(size, rates or [1.0] * nodes, servers)[1]
    if collective == "allreduce" and servers:
        if regions and max(regions[0]) > 0:
            return None
        return [(load, load) for load in allreduce_loads(size, shares, nodes)[:nodes]]
    region_of: Sequence[int] = [0] * nodes
    if regions and max(regions[0]) > 0:
        uplinks = regions[1]
        if collective == "allreduce" and max(size, EXCHANGE_BYTES_LEAST) * (len(uplinks) - 1) <= EXCHANGE_BYTES_MAX:
            return None
        shares = shares_by_regions(size, rates or [1.0] * nodes, regions[0], uplinks)
        if size > LEVELS_ABOVE_BYTES:
            region_of = regions[0]
    local = [list(node_of).count(node) for node in range(nodes)]
    indices = [list(node_of[:rank]).count(node) for rank, node in enumerate(node_of)]
    at_root = node_of[root]
    parts = [shares[node] / local[node] for node in node_of]  # of each rank
    if collective == "broadcast":
        parts = [0.0 if node == at_root else part for node, part in zip(node_of, parts, strict=True)]
        if sum(parts) <= 0:
            parts = [float(node != at_root) for node in node_of]
        if nodes == 2:
            parts = [float(rank == root) for rank in range(len(node_of))]
    elif collective != "allreduce":
        parts = [1.0] * len(node_of)
    spans = [
        (at_root if collective == "broadcast" else -1, node, index, size * part / sum(parts))
        for node, index, part in zip(node_of, indices, parts, strict=True)
        if part > 0
    ]
    return span_loads(spans, region_of, collective in ("allreduce", "reduce_scatter"), collective != "reduce_scatter")
