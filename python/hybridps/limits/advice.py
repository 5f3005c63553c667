"""What would make a DDP run faster: bucket sizes, dedicated servers, compression, from figures of the run itself.

`hybridps run --advise -- PROGRAM` has group rank 0 of each DistributedDataParallel on hybridps write the figures to a file and
print the advice when the program ends; `hybridps advise FILE` prints it again. Nothing is measured besides: torch's DDP
takes the times (of the first 10 steps and every 100th; the last of them counts).

The model is one of a link that carries one bucket after the other:

    ready(i) = (bytes of buckets 1..i) / S * backward       gradients come at an even pace
    done(i)  = max(done(i - 1), ready(i)) + bytes(i) / R + c

S: bytes of all gradients; R: bytes/s of an all-reduce; c: what an operation costs besides its bytes (`PER_BUCKET_S`). R is the
one for which done(last) - ready(first) is the communication time that DDP has measured with the run's buckets. A step takes
forward + max(backward, done(last)).
    buckets       the cap with the least predicted step, allowing for errors of 5 %; the smallest of those within 1 %
    servers       R grows as the limit does (bounds.py, Theorem 1 of BytePS), with equal cards
    compression   R grows by the bytes that are saved; what encoding costs is left out, so this is the most it can be
Regions of nodes: regions.py. Not looked at here: sockets, data threads, memory, several DDP models that share a link.
"""

import dataclasses
from collections.abc import Sequence

from hybridps.limits import bounds

MIB = 2**20
PER_BUCKET_S = 3e-4
CAPS_MIB = (1, 2, 4, 8, 16, 25, 50, 100)
FIRST_BYTES = MIB  # torch.distributed._DEFAULT_FIRST_BUCKET_BYTES
CODECS = {"bf16": 2.0, "int8": 128 / 34}  # 1 / hybridps.compress.ratio(), without the extension
STEPS_MIN = 5
LEAST_GAIN = 1.03


@dataclasses.dataclass(frozen=True)
class Run:
    """Figures of one rank's DDP. Seconds of one step, bytes of all gradients."""

    buckets: list[int]  # bytes, in the order in which they are sent
    forward_s: float
    backward_s: float  # computing alone
    communication_s: float  # from the first bucket's begin to the last one's end
    nodes: int
    servers: int
    compress: str
    steps: int

    @property
    def bytes(self) -> int:
        return sum(self.buckets)


def done_at(buckets: Sequence[float], backward_s: float, rate: float) -> tuple[float, float]:
    """(when the first bucket is ready, when the last has arrived), in seconds from the begin of backward."""
    total, before, done = sum(buckets), 0.0, 0.0
    for size in buckets:
        before += size
        done = max(done, before / total * backward_s) + size / rate + PER_BUCKET_S
    return buckets[0] / total * backward_s, done


def rate_of(run: Run) -> float:
    """R, by bisection: the time falls as it grows. ValueError: no rate explains the figures."""

    def takes(rate: float) -> float:
        first, last = done_at(run.buckets, run.backward_s, rate)
        return last - first

    low, high = run.bytes / max(run.communication_s, 1e-9) / 16, 1e13
    if takes(high) >= run.communication_s:
        raise ValueError(
            "communication ended with backward: it is hidden, and faster than these figures can tell. There is nothing to gain"
        )
    for _ in range(200):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if takes(middle) < run.communication_s else (middle, high)
    return low


def split(total: int, cap: float, first: float = FIRST_BYTES) -> list[float]:
    """Buckets of evenly small parameters: the first is smaller, as DDP has it."""
    first = min(first, cap, total)
    rest = total - first
    count = max(0, round(rest / cap + 0.4999)) if rest > 0 else 0
    return [float(first), *([rest / count] * count if count else [])]


def step_s(run: Run, buckets: Sequence[float], rate: float) -> float:
    return run.forward_s + max(run.backward_s, done_at(buckets, run.backward_s, rate)[1])


def best_cap_mib(run: Run, rate: float) -> tuple[int, float]:
    """(MiB, predicted seconds of a step). Where communication is nearly hidden, small errors of its time are large ones of
    R: the cap is the one that loses least at the worst of the rates that a time 5 % off would give."""
    rates = [rate]
    for factor in (0.95, 1.05):
        try:
            rates.append(rate_of(dataclasses.replace(run, communication_s=factor * run.communication_s)))
        except ValueError:
            rates.append(1e12)
    steps = {cap: [step_s(run, split(run.bytes, cap * MIB), r) for r in rates] for cap in CAPS_MIB}
    least = [min(column) for column in zip(*steps.values(), strict=True)]
    loss = {cap: max(s / m for s, m in zip(row, least, strict=True)) for cap, row in steps.items()}
    cap = next(cap for cap in CAPS_MIB if loss[cap] <= min(loss.values()) + 0.01)
    return cap, steps[cap][0]


def compared(what: str, now: float, seconds: float, of: str = "a step") -> str:
    """A line of advice: what it gains over what there is now."""
    verdict = f"{now / seconds:.2f} times as fast" if now / seconds >= LEAST_GAIN else "no gain worth it"
    return f"{what}: {of} of {seconds * 1e3:.1f} ms, {verdict}"


def report(run: Run) -> str:
    """The advice, with the formulas' figures. ValueError: there are too few figures, or they make no sense."""
    if run.steps < STEPS_MIN:
        raise ValueError(f"{run.steps} steps were seen, and {STEPS_MIN} are needed")
    if run.bytes <= 0 or run.communication_s <= 0 or run.backward_s <= 0:
        raise ValueError("torch's DDP has no times of this run")
    lines = [
        f"seen: {len(run.buckets)} buckets, {run.bytes / MIB:.1f} MiB of gradients; forward {run.forward_s * 1e3:.1f} ms, backward "
        f"{run.backward_s * 1e3:.1f} ms, communication {run.communication_s * 1e3:.1f} ms; {run.nodes} nodes, {run.servers} servers"
    ]
    try:
        rate = rate_of(run)
    except ValueError as error:
        return "\n".join([*lines, f"R: {error}"])
    now = step_s(run, run.buckets, rate)
    exposed = now - run.forward_s - run.backward_s
    lines.append(
        f"R = {rate / 1e6:.1f} MB/s of gradients explains the communication time; a step then takes forward + max(backward, "
        f"last bucket) = {now * 1e3:.1f} ms, {exposed * 1e3:.1f} ms of it waiting"
    )

    cap, seconds = best_cap_mib(run, rate)
    lines.append(compared(f"bucket_cap_mb={cap} (first bucket {FIRST_BYTES // MIB} MiB)", now, seconds))
    buckets = split(run.bytes, cap * MIB)
    if run.nodes < 3:
        lines.append("dedicated servers: help from 3 nodes on")
    else:
        plain, *more = (
            bounds.allreduce_shares(run.bytes, [1.0] * run.nodes, [1.0] * count)[0]
            for count in (run.servers, run.servers + 1, run.servers + run.nodes // 2, run.servers + run.nodes)
        )
        for count, limit in zip((1, run.nodes // 2, run.nodes), more, strict=True):
            what = (
                f"{count} more dedicated server{'s' if count > 1 else ''} (R x {plain / limit:.2f}, the limit's growth)"
            )
            lines.append(compared(what, now, step_s(run, buckets, rate * plain / limit)))
    if run.compress in ("", "none"):
        for codec, factor in CODECS.items():
            what = f"HYBRIDPS_COMPRESS={codec} (R x {factor:g} at most; changes results)"
            lines.append(compared(what, now, step_s(run, buckets, rate * factor)))
    hidden = min(run.forward_s, max(0.0, exposed))
    what = "CrossBarrier (hides up to min(forward, waiting))"
    lines.append(compared(what, now, now - hidden) if hidden > 0 else f"{what}: nothing is left to hide")
    return "\n".join(lines)


def text_of(runs: Sequence[Run]) -> str:
    parts = []
    for index, run in enumerate(runs):
        try:
            text = report(run)
        except ValueError as error:
            text = f"no advice: {error}"
        title = f"hybridps advise, DDP model {index + 1} of {len(runs)}:"
        parts.append("\n  ".join([title, *text.splitlines()]))
    return "\n".join(parts)
