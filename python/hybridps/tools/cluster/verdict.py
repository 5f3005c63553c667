"""What was found, and what it means for a job."""

import statistics

SLOW = 0.7  # a card or path that carries less than this part of the others' median is said to be slow
LOST = 0.0005  # of the packets: more is said
# What may differ from machine to machine by its meaning, and is no matter for a note.
OF_ONE_MACHINE = {"NODE", "REGION", "INTERFACE", "DATA_INTERFACES", "NIC_GBPS", "TOKEN", "TOKEN_FILE", "METRICS_FILE", "LOG_LEVEL"}


def directed(result: dict) -> dict[tuple[tuple[int, str], tuple[int, str]], dict]:
    """(node, card) to (node, card): the path in that direction: rate, trip_us, or error."""
    found = {}
    for path in result["paths"]:
        here, there = (path["from"], path["card"]), (path["to"], path["to_card"])
        if path.get("error"):
            found[here, there] = {"error": path["error"]}
        elif "rate" in path:
            shared = {key: path[key] for key in ("trip_us", "path_mtu", "mtu", "sent_again")}
            found[here, there] = {
                **shared,
                "rate": path["rate"],
                "clock": path["clock"],
                "clock_error": path["clock_error"],
            }
            back = {**shared, "rate": path["rate_back"], "clock": -path["clock"], "clock_error": path["clock_error"]}
            found.setdefault((there, here), back)
    return found


def _differing(values: dict[str, list[str]]) -> str:
    """ "2.15.0 on boxa; 2.14.1 on boxb, boxc"."""
    return "; ".join(f"{value} on {', '.join(dict.fromkeys(hosts))}" for value, hosts in values.items())


def ranks_allowed(node: dict) -> int:
    """Of how many ranks a job may be with its limit of descriptors and as many ranks there as now."""
    of, here = node["descriptors"], len(node["ranks"])
    free = node["nofile"] - of["own"] - (here - 1) * of["local"]
    return here + max(0, free) // max(1, of["remote"]) if free >= 0 else 0


def clocks(result: dict) -> dict[int, tuple[float, float]]:
    """Of each node but the first, where known: (its clock minus the first's, error of that), in seconds."""
    found = {}
    for (here, there), path in directed(result).items():
        if here[0] == 0 and there[0] != 0 and "clock" in path:
            best = found.get(there[0], (0.0, float("inf")))
            if path["clock_error"] < best[1]:
                found[there[0]] = (path["clock"], path["clock_error"])
    return found


def verdict(result: dict) -> tuple[list[str], list[str]]:
    """(problems, notes): what keeps a job from starting or being right, and what makes it slow or is worth knowing."""
    problems: list[str] = []
    notes: list[str] = []
    for look in (_at_machines, _at_versions, _at_settings, _at_ways, _at_mtus, _at_regions, _at_rates, _at_clocks_and_limits):
        look(result, problems, notes)
    return problems, notes


def _name(result: dict, end: tuple[int, str]) -> str:
    node, card = end
    address = next((one["address"] for one in result["nodes"][node]["cards"] if one["name"] == card), "")
    return f"{result['nodes'][node]['host']} ({card}{' ' + address if address else ''})"


def _at_machines(result: dict, problems: list[str], _notes: list[str]) -> None:
    for rank, one in enumerate(result["ranks"]):
        for problem in one["problems"]:
            problems.append(f"rank {rank} on {one['host']}: {problem}")
    for index, node in enumerate(result["nodes"]):
        if not node["cards"] and not result["ranks"][node["ranks"][0]]["problems"]:
            problems.append(f"{node['host']}: no network card with an address was found (node {index})")


def _at_versions(result: dict, problems: list[str], notes: list[str]) -> None:
    for what in ("hybridps", "hybridps for torch", "torch", "UCX", "python"):
        values: dict[str, list[str]] = {}
        for one in result["ranks"]:
            values.setdefault(one["versions"].get(what, "none"), []).append(one["host"])
        if len(values) > 1:
            serious = what.startswith("hybridps")
            advice = (
                ": install the same version on all machines; different versions refuse each other" if serious else ""
            )
            (problems if serious else notes).append(f"{what} differs{advice}: {_differing(values)}")


def _at_settings(result: dict, problems: list[str], notes: list[str]) -> None:
    same = {setting for one in result["ranks"] for setting in one["same"]}
    for setting in sorted({key for one in result["ranks"] for key in one["settings"]} - OF_ONE_MACHINE):
        values: dict[str, list[str]] = {}
        for one in result["ranks"]:
            if one["cards"]:  # else its settings were not read
                values.setdefault(one["settings"].get(setting, "the default"), []).append(one["host"])
        if len(values) > 1:
            text = f"HYBRIDPS_{setting} differs: {_differing(values)}"
            if setting in same:
                problems.append(f"{text}; it must be the same on all ranks")
            elif setting != "SERVERS" or result["nodes"][0]["servers"]:
                notes.append(text)


def _at_ways(result: dict, problems: list[str], _notes: list[str]) -> None:
    for (here, there), path in directed(result).items():
        if path.get("error") and here[0] == there[0]:
            problems.append(f"{_name(result, here)}: {path['error']}")
        elif path.get("error"):
            problems.append(
                f"{_name(result, here)} cannot reach {_name(result, there)}: {path['error']}. A firewall or no "
                "route: let TCP through between the machines, or choose cards that reach each other with "
                "HYBRIDPS_INTERFACE and HYBRIDPS_DATA_INTERFACES"
            )


def _at_mtus(result: dict, problems: list[str], notes: list[str]) -> None:
    told = set()
    for (here, there), path in directed(result).items():
        if 0 < path.get("path_mtu", 0) < path.get("mtu", 0) and frozenset((here, there)) not in told:
            told.add(frozenset((here, there)))
            problems.append(
                f"between {_name(result, here)} and {_name(result, there)} packets of more than {path['path_mtu']} "
                f"bytes are lost, though the cards allow {path['mtu']}: connections will hang. Set the MTU of both "
                f"cards to {path['path_mtu']}, or repair the network between them"
            )
    mtus: dict[str, list[str]] = {}
    for node in result["nodes"]:
        for card in node["cards"]:
            mtus.setdefault(str(card["mtu"]), []).append(f"{node['host']} ({card['name']})")
    if len(mtus) > 1:
        notes.append(f"the cards' MTU differs: {_differing(mtus)}")


def round_trips(result: dict) -> list[list[int]]:
    """Microseconds from each machine to each, over the nearest of their cards, as a job measures them; 0: not known."""
    count = len(result["nodes"])
    trips = [[0] * count for _ in range(count)]
    for path in result["paths"]:
        if trip := path.get("handshake_us", 0):
            known = trips[path["from"]][path["to"]]
            trips[path["from"]][path["to"]] = min(known, trip) if known else trip
    return trips


def _at_regions(result: dict, _problems: list[str], notes: list[str]) -> None:
    """Machines that are far from each other, and what the way between them is like."""
    region_of, trips = result.get("region_of"), round_trips(result)
    if region_of:
        regions = [[node for node, region in enumerate(region_of) if region == r] for r in range(max(region_of) + 1)]
        hosts = "; ".join(", ".join(result["nodes"][node]["host"] for node in nodes) for nodes in regions)
        nodes = range(len(trips))
        least = min(trips[a][b] for a in nodes for b in nodes if trips[a][b] and region_of[a] != region_of[b])
        declared = any("REGION" in one["settings"] for one in result["ranks"])
        notes.append(
            f"round trips show {len(regions)} regions, {least / 1e3:.3g} ms apart: {hosts}. "
            + ("HYBRIDPS_REGION is set, and counts" if declared else "A job finds them by itself")
            + " (docs/regions.md)"
        )
    told = set()
    for (here, there), path in directed(result).items():
        again = path.get("sent_again", 0.0)
        if again >= LOST and frozenset((here, there)) not in told:
            told.add(frozenset((here, there)))
            notes.append(
                f"{_name(result, here)} to {_name(result, there)}: {again:.1%} of the packets were sent again. If the "
                "path loses packets, HYBRIDPS_TCP_CONGESTION=bbr or HYBRIDPS_DATA_SOCKETS=4 may carry more"
            )


def _at_rates(result: dict, _problems: list[str], notes: list[str]) -> None:
    """A card that sends or receives less than the others, else a path; one that carries less than it is said to."""
    rates = {ends: path["rate"] for ends, path in directed(result).items() if path.get("rate")}
    if len(rates) > 2:
        usual = statistics.median(rates.values())
        slow_cards = set()
        for end in dict.fromkeys(end for ends in rates for end in ends):
            for way, at in (("sends", 0), ("receives", 1)):
                own = [rate for ends, rate in rates.items() if ends[at] == end]
                if own and max(own) < SLOW * usual:
                    slow_cards.add(end)
                    notes.append(
                        f"{_name(result, end)} {way} {max(own) * 8e-9:.3g} Gbit/s at most; "
                        f"{usual * 8e-9:.3g} are usual here. Check its link, or give it a smaller share "
                        "(HYBRIDPS_NIC_GBPS; with 3 nodes or more, a running job finds this by itself)"
                    )
        for (here, there), rate in rates.items():
            if rate < SLOW * usual and not {here, there} & slow_cards:
                notes.append(
                    f"{_name(result, here)} to {_name(result, there)}: {rate * 8e-9:.3g} Gbit/s; "
                    f"{usual * 8e-9:.3g} are usual here"
                )
    for index, node in enumerate(result["nodes"]):
        for card in node["cards"]:
            best = max((rate for ends, rate in rates.items() if ends[0] == (index, card["name"])), default=0)
            if card["gbps"] and best and best * 8e-9 < 0.5 * card["gbps"]:
                notes.append(
                    f"{_name(result, (index, card['name']))}: one connection carries {best * 8e-9:.3g} of "
                    f"{card['gbps']:g} Gbit/s; if a job is as slow, try HYBRIDPS_DATA_SOCKETS=4"
                )


def _at_clocks_and_limits(result: dict, problems: list[str], notes: list[str]) -> None:
    nodes = result["nodes"]
    for index, (offset, error) in clocks(result).items():
        if abs(offset) > 1 + error:
            notes.append(
                f"the clock of {nodes[index]['host']} is {offset:+.1f} s off the clock of {nodes[0]['host']}: times in "
                "their logs will not match"
            )
    for node in nodes:
        for place, found in node["servers"].items():
            if found.get("error"):
                problems.append(f"{node['host']} cannot reach the dedicated server {place}: {found['error']}")
    ranks = sum(len(node["ranks"]) for node in nodes)
    for node in nodes:
        if ranks_allowed(node) < ranks:
            problems.append(
                f"{node['host']}: {node['nofile']} file descriptors (ulimit -Hn) are enough for a job of about "
                f"{ranks_allowed(node)} ranks with {len(node['ranks'])} of them here, but this job has {ranks}: raise "
                "the limit"
            )
        if node["rdma"] and 0 <= node["memlock"] < 1 << 30:
            problems.append(
                f"{node['host']}: {node['memlock'] >> 10} KiB may be locked (ulimit -l), but RDMA needs more: set the "
                "limit to unlimited"
            )
