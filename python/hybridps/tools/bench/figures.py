"""What measured times come to: sizes, medians, ratios, and how near to the limit and to the plan."""

import argparse
import math
import statistics

from hybridps.limits import bounds

SMALL_BYTES = 64 * 2**10  # operations up to this size run in blocks, back to back
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


def parse_size(text: str) -> int:
    number, unit = text.strip().upper(), ""
    for ending in ("IB", "B"):
        number = number.removesuffix(ending)
    if number[-1:] in ("K", "M", "G"):
        number, unit = number[:-1], number[-1]
    try:
        value = float(number) * UNITS[unit]
    except ValueError:
        value = -1
    if not 0 <= value < 2**60:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; examples: 64, 64K, 1.5M, 1G")
    return int(value)


def size_text(size: int) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit and size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def sizes_between(begin: int, end: int, factor: float, step: int = 0) -> list[int]:
    """nccl-tests' -b -e -f -i: times `factor`, or plus `step` where that is given."""
    if end < begin:
        raise ValueError(f"the last size, {end}, is less than the first, {begin}")
    if not step and factor <= 1:
        raise ValueError(f"the factor between sizes must be more than 1, not {factor:g}")
    sizes, size = [], begin
    while size <= end:
        sizes.append(size)
        following = size + step if step else int(size * factor)
        if following <= size:  # from 0, or a factor so small that it is lost
            following = size + 1
        size = following
    return sizes


def percentile(values: list[float], percent: float) -> float:
    """The nearest rank: the least value that `percent` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def per_node(text: str, nodes: int, what: str) -> list[float]:
    """ "10" or "10,10,5": one number for each node."""
    values = [float(part) for part in text.split(",")]
    if len(values) == 1:
        values *= nodes
    if len(values) != nodes or min(values) <= 0:
        raise ValueError(f"{what} {text}: give one positive number, or one for each of the {nodes} nodes")
    return values


def of_operations(per_rank: list[list[float]], block: int) -> list[float]:
    """Times of the same operations on every rank -> one time for each operation."""
    # Back to back, a rank's time for one operation begins where it finished the last: who was early waits for others in
    # the next, and the slowest rank of each would count that twice.
    of_one = max if block == 1 else statistics.fmean
    return [of_one(times) for times in zip(*per_rank, strict=True)]


def summarise(per_rank: list[list[float]], block: int = 1) -> dict:
    """Times of the same operations on every rank -> the figures of a row, in seconds."""
    times = of_operations(per_rank, block)
    half = len(times) // 2
    first, second = times[:half] or times, times[half:]
    return {
        "seconds": statistics.median(times),
        "mean_seconds": statistics.fmean(times),
        "min_seconds": min(times),
        "p99_seconds": percentile(of_operations(per_rank, 1), 99),
        "operations": len(times),
        "drift": statistics.median(second) / statistics.median(first) - 1,
    }


def paired_ratio(ours: list[list[float]], peers: list[list[float]], block: int) -> float:
    """How many times faster we are: median over the pairs of blocks that followed each other."""
    mine, theirs = (of_operations(per_rank, block) for per_rank in (ours, peers))
    ratios = []
    for begin in range(0, len(mine), block):
        ratios.append(statistics.median(theirs[begin : begin + block]) / statistics.median(mine[begin : begin + block]))
    return statistics.median(ratios)


def add_limits(
    row: dict,
    node_of: list[int],
    rates: list[float] | None,
    servers: list[float],
    regions: tuple[list[int], list[float]] | None = None,
) -> None:
    """Puts the bound and the plan beside what was measured; `rates` are goodputs in bytes/s, None if not known.

    `regions`: the region of each node, and the goodput of each region's uplink.
    """
    size, collective, root = row["bytes"], row["collective"], row["root"] or 0
    if "memory_rates" in row:
        row["limit_seconds"] = bounds.memory_seconds(collective, size, len(node_of), *row["memory_rates"])
    elif rates:
        row["limit_seconds"] = bounds.limit_seconds(collective, size, node_of, rates, servers, root, regions)
    plan = bounds.planned_bytes(collective, size, node_of, rates or (), servers, root, regions)
    row["planned"] = plan
    for figures in row["backends"].values():
        ratio = figures.get("ratio_of_bytes", 1.0)
        if row.get("limit_seconds", 0) > 0:
            # Memory's limit is not one of bytes on the wire.
            figures["limit_seconds"] = row["limit_seconds"] * (1.0 if "memory_rates" in row else ratio)
            figures["of_limit"] = figures["limit_seconds"] / figures["seconds"]
        for what in ("payload", "interface"):
            if plan and what in figures and max(map(max, plan)) > 0:
                # The largest deviation of any node and direction, as a factor.
                factors = [
                    got / (want * (ratio if what == "payload" else 1.0))
                    for node, wanted in zip(figures[what], plan, strict=True)
                    for got, want in zip(node, wanted, strict=True)
                    if want > 0
                ]
                figures[what + "_to_plan"] = max(factors, key=lambda factor: abs(math.log(max(factor, 1e-9))))
