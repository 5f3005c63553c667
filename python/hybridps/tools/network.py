"""Which card of a job, or which way between its regions, sets the pace: from what the job has found, and from queues."""

from __future__ import annotations

from statistics import mean, median

from hybridps.tools.output import ranks_text

SLOW_CARD = 0.67  # of what the others carry
MOVES = 1e5  # bytes/s, over the last second
SLOW_DELAY = 1e-3  # a shorter queue sets no pace


def judge_network(job: dict, members: list[dict], findings: list[dict]) -> None:
    """Adds at most one kind of finding: "slow card" or "slow path" (between two regions)."""
    nodes: dict[int, list[int]] = {}
    for rank, member in enumerate(members):
        if not member["server"]:
            nodes.setdefault(member["node"], []).append(rank)
    names = {}
    for node, ranks in nodes.items():
        snapshot = job["engines"].get(members[ranks[0]]["engine"])
        host = snapshot["host"] if snapshot else members[ranks[0]]["where"].split(" pid ")[0]
        names[node] = f"{host} ({ranks_text(ranks)})"
    if len(nodes) >= 3 and _found_by_job(job, members, nodes, names, findings):
        return
    # Figures of now: an operation is on its way, or was a moment ago.
    nets = [snapshot["net"] for snapshot in job["engines"].values() if "net" in snapshot]
    moves = any(max(net["tx_bytes_per_second"], net["rx_bytes_per_second"]) > MOVES for net in nets)
    if not (moves or any(finding["kind"] == "busy" for finding in findings)):
        return
    node_of = {member["engine"]: member["node"] for member in members if not member["server"]}
    region_of = {member["node"]: member.get("region", 0) for member in members if not member["server"]}
    paths = _paths(job, node_of)
    if len(set(region_of.values())) > 1:
        _slow_path({pair: _queue(ends) for pair, ends in paths.items()}, region_of, names, findings)
    elif len(nodes) >= 3:  # of two either may be the one
        _slow_card({pair: _wait(ends) for pair, ends in paths.items()}, nodes, names, findings)


def _found_by_job(job: dict, members: list[dict], nodes: dict, names: dict, findings: list[dict]) -> bool:
    """What the job has found itself, by measuring (rank 0 knows)."""
    servers = [member for member in members if member["server"]]
    for snapshot in job["engines"].values():
        for group in snapshot.get("groups", []):
            rates = group.get("rates_found") or []
            if not group.get("world") or len(rates) != len(nodes) + len(servers):
                continue
            for index, rate in enumerate(rates):
                others = median([other for i, other in enumerate(rates) if i != index])
                if not 0 < rate < SLOW_CARD * others:
                    continue
                is_node = index < len(nodes)
                name = names[index] if is_node else f"the dedicated server {servers[index - len(nodes)]['where']}"
                text = (
                    f"the network of {name} is slow: it was found to carry {8e-9 * rate:.3g} Gbit/s, the others "
                    f"{8e-9 * others:.3g} or more; shares {[round(share, 3) for share in group.get('shares', [])]}"
                )
                ranks = nodes[index] if is_node else []
                findings.append({"kind": "slow card", "group": group["name"], "ranks": ranks, "text": text})
            if any(finding["kind"] == "slow card" for finding in findings):
                return True
    return False


def _paths(job: dict, node_of: dict[str, int]) -> dict[tuple[int, int], list[dict]]:
    """Between two nodes: what each end says of the other."""
    found: dict[tuple[int, int], list[dict]] = {}
    for engine, snapshot in job["engines"].items():
        for peer in snapshot.get("peers", []) if engine in node_of else []:
            here, there = node_of[engine], node_of.get(peer["engine"])
            if there is not None and there != here and peer.get("tcp_rtt_us"):
                found.setdefault((min(here, there), max(here, there)), []).append(peer)
    return found


def _queue(ends: list[dict]) -> float:
    """Seconds of the round trip beyond its shortest, the less of what both ends see."""
    return min(1e-6 * max(0.0, peer["tcp_rtt_us"] - peer.get("tcp_min_rtt_us", 0.0)) for peer in ends)


def _wait(ends: list[dict]) -> tuple[float, float, float]:
    """(how much this way holds up, seconds of its round trip, part of the last second in which bytes were under way).

    The kernel's round trip is that of the last bytes. Between two quick cards these are a burst whose queue has long gone,
    and for a slow one bytes wait nearly all the time. So the part of the time counts, and squared, for it is the surer sign.
    A card that was full from the start on has a long shortest round trip, so that says nothing of cards."""
    delay = 1e-6 * mean(peer["tcp_rtt_us"] for peer in ends)
    busy = max(peer.get("tcp_busy", 1.0) for peer in ends)
    return delay * busy**2, delay, busy


def _slow_card(waits: dict, nodes: dict, names: dict, findings: list[dict]) -> None:
    """The card that has a queue in front of it, whoever the other side is."""
    least: dict[int, tuple[float, float, float]] = {}
    for pair, wait in waits.items():
        for node in pair:
            least[node] = min(least.get(node, wait), wait)
    if len(least) < 3:
        return
    node, (wait, delay, busy) = max(least.items(), key=lambda item: item[1])
    others, their_delay, their_busy = max(value for key, value in least.items() if key != node)
    if wait >= SLOW_DELAY and wait >= 2 * others:
        text = (
            f"the network of {names[node]} sets the pace: messages to and from it take {1e3 * delay:.1f} ms and were under "
            f"way for {busy:.0%} of the last second, between others {1e3 * their_delay:.1f} ms and {their_busy:.0%}"
        )
        findings.append({"kind": "slow card", "group": "", "ranks": nodes[node], "text": text})


def _slow_path(queues: dict, region_of: dict[int, int], names: dict, findings: list[dict]) -> None:
    """The uplinks that have a queue in front of them: all pairs of nodes over them wait, and those within do not."""
    least: dict[tuple[int, int], float] = {}
    for (here, there), queue in queues.items():
        regions = (region_of[here], region_of[there])
        pair = (min(regions), max(regions))
        least[pair] = min(least.get(pair, queue), queue)
    within = [queue for (here, there), queue in least.items() if here == there]
    between = [(queue, pair) for pair, queue in least.items() if pair[0] != pair[1]]
    delay, pair = max(between, default=(0.0, None))
    inside = max(within, default=0.0)
    if pair is None or delay < SLOW_DELAY or delay < 2 * inside:
        return
    ends = [", ".join(name for node, name in sorted(names.items()) if region_of[node] == region) for region in pair]
    text = (
        f"the way between two regions sets the pace: messages between {ends[0]} and {ends[1]} wait for {1e3 * delay:.1f} ms, "
        f"within a region {1e3 * inside:.1f} ms"
    )
    findings.append({"kind": "slow path", "group": "", "ranks": [], "text": text})
