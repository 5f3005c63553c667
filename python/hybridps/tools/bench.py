"""Collectives of rising sizes: times, bandwidth, errors, and what the network would allow. Habits of nccl-tests.

    hybridps bench                                        allreduce, two ranks on this machine, sharing memory
    hybridps bench --nodes 4 --against gloo               four nodes, emulated over loopback, beside another backend
    hybridps bench all_gather broadcast -b 1K -e 16M -f 4
    torchrun ... -m hybridps.bench --nic-gbps 10          real machines; with the limit and the part of it reached

size    bytes as nccl-tests counts them: the whole vector; for all_to_all what one rank sends in all
time    median; of an operation that starts from a barrier the slowest rank counts, of those that run back to back the
        average rank (as nccl-tests does). p99 is of the slowest rank; with fewer than 100 operations it is the worst
algbw   size / time; busbw: algbw times what must cross a rank's card per byte of size (nccl-tests, doc/PERFORMANCE.md)
#wrong  elements that differ from the right result, over all ranks, in one more operation than the timed ones
limit   the least time that the cards allow (hybridps.limits.bounds), from --nic-gbps; on one host, from 64 KiB on, what memory
        allows, from rates of copying and adding measured beside each row (in --json); %limit is limit / time
sent    bytes that the busiest node sent to others per operation, by the backend's own count, and in % of the plan
nic     the same by the interface's count (--interface), which holds headers and acknowledgements
faster  how many times faster the backend under test is than that of the line (--against)
nmse    of --compress: the squared error of a sum of Gaussian values, as a part of the sum's square

--compress int8: all-reduces and reduce-scatters between nodes by that codec (docs/compression.md), beside the same without it and what
--against names, in turn; its limit and its plan are of the bytes that it sends.

--in-flight 5K,20K,100K: instead, so many operations of the first size are issued at once, then waited for (-n runs, 3 unless
given); what one of them takes, "one (us)", should not rise with their number. --groups: taken in turn from so many groups;
--late: the last rank begins so many seconds after the others; --callbacks: each has a callback.

Backends take turns, block by block, in the same processes. Large operations start from a barrier; small ones run in
blocks back to back, and the first of a block does not count. With --device cuda the host waits for the GPU after each
operation, and that wait is part of the time.
"""

import argparse
import json
import math
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from datetime import timedelta

from hybridps.limits import bounds
from hybridps.tools import in_flight, local_ranks
from hybridps.tools.output import load_of_machine, plot_complaint, print_any_text

DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
REDUCTIONS = ("sum", "avg", "min", "max")
REDUCING = ("allreduce", "reduce", "reduce_scatter")
SMALL_BYTES = 64 * 2**10  # operations up to this size run in blocks, back to back
BLOCK_MAX = 50
LEAD = 5  # operations in front of each block that are not counted: as many as nccl-tests warms up with
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


def interface_bytes(name: str) -> tuple[int, int]:
    """(sent, received) of a network interface, or several with commas, since they were made."""
    counts = {"tx": 0, "rx": 0}
    for one in name.split(","):
        for direction in counts:
            with open(f"/sys/class/net/{one}/statistics/{direction}_bytes") as file:
                counts[direction] += int(file.read())
    return counts["tx"], counts["rx"]


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


class Complaint(RuntimeError):
    """What a measurement cannot be done with, for the user to read."""


def compressed_from() -> int:
    """Bytes from which on sums are compressed, if their group asks for it."""
    return parse_size(os.environ.get("HYBRIDPS_COMPRESS_MIN_BYTES", "64K"))


def compressing(codec: str) -> str:
    """The codec as a group of its own has it here: outside of backward passes, and whether it pays or not."""
    return codec + ("," if ":" in codec else ":") + "when=always,auto=0"


class Case:
    """One collective of one size on this rank: its tensors, how to call it, what has to come out."""

    def __init__(
        self,
        session: "Session",
        collective: str,
        size: int,
        dtype: str,
        reduction: str,
        root: int,
        device: str | None = None,
    ):
        import torch
        import torch.distributed as dist

        self.dist, self.torch = dist, torch
        self.collective, self.root = collective, root
        self.rank, self.world = session.rank, session.world
        self.dtype = getattr(torch, dtype)
        self.device = device or session.device
        self.reduction = reduction
        self.op = getattr(dist.ReduceOp, reduction.upper())
        element = torch.empty(0, dtype=self.dtype).element_size()
        count = max(1, size // element) if size else 0
        if collective in ("all_gather", "reduce_scatter", "all_to_all"):
            count = max(1, count // self.world) * self.world
        self.count = 0 if collective == "barrier" else count
        self.bytes = self.count * element
        part = self.count // self.world
        sent = part if collective == "all_gather" else self.count
        received = {"all_gather": self.count, "reduce_scatter": part, "all_to_all": self.count}
        received["sendrecv"] = self.count
        # Written once, so that the pages are there and not all the same one.
        self.input = torch.zeros(sent, dtype=self.dtype, device=self.device).fill_(0)
        self.output = torch.zeros(received.get(collective, 0), dtype=self.dtype, device=self.device).fill_(0)
        self.synchronize = torch.cuda.synchronize if torch.device(self.device).type == "cuda" else lambda: None

    def call(self, group) -> None:
        """The operation is over when this returns, on a GPU too."""
        self._issue(group)
        self.synchronize()

    def _issue(self, group) -> None:
        dist = self.dist
        if self.collective == "allreduce":
            dist.all_reduce(self.input, self.op, group=group)
        elif self.collective == "reduce":
            dist.reduce(self.input, self.root, self.op, group=group)
        elif self.collective == "broadcast":
            dist.broadcast(self.input, self.root, group=group)
        elif self.collective == "all_gather":
            dist.all_gather_into_tensor(self.output, self.input, group=group)
        elif self.collective == "reduce_scatter":
            dist.reduce_scatter_tensor(self.output, self.input, self.op, group=group)
        elif self.collective == "all_to_all":
            dist.all_to_all_single(self.output, self.input, group=group)
        elif self.collective == "sendrecv":
            following, previous = (self.rank + 1) % self.world, (self.rank - 1) % self.world
            works = [dist.isend(self.input, following, group=group), dist.irecv(self.output, previous, group=group)]
            for work in works:
                work.wait()
        else:
            dist.barrier(group=group)

    def _pattern(self, rank: int, count: int, begin: int = 0):
        """Small whole numbers: their sums are exact in every type, up to 60 ranks in bfloat16."""
        cycle = (self.torch.arange(5) + begin) % 5 + rank % 3
        return cycle.to(self.dtype).repeat(count // 5 + 1)[:count]

    def _reduced(self, count: int, begin: int = 0):
        adds = [rank % 3 for rank in range(self.world)]
        base = self._pattern(0, count, begin)
        if self.reduction == "sum":
            return base * self.world + sum(adds)
        if self.reduction == "avg":
            exact = base.to(self.torch.float64) + sum(adds) / self.world
            return exact if self.dtype.is_floating_point else exact.to(self.dtype)
        return base + (min(adds) if self.reduction == "min" else max(adds))

    def wrong(self, group) -> int:
        """Runs the operation once on known values; the number of elements on this rank that came out wrong."""
        if self.count == 0:
            self.call(group)
            return 0
        torch, part = self.torch, self.count // self.world
        self.input.copy_(self._pattern(self.rank, self.input.numel(), 0))
        if self.collective == "all_gather":
            self.input.copy_(self._pattern(self.rank, part))
        self.output.fill_(77)
        self.call(group)
        if self.collective == "allreduce" or (self.collective == "reduce" and self.rank == self.root):
            got, want = self.input, self._reduced(self.count)
        elif self.collective == "reduce":
            got = want = self.input.cpu()  # undefined elsewhere
        elif self.collective == "broadcast":
            got, want = self.input, self._pattern(self.root, self.count)
        elif self.collective == "all_gather":
            got, want = self.output, torch.cat([self._pattern(rank, part) for rank in range(self.world)])
        elif self.collective == "reduce_scatter":
            got, want = self.output, self._reduced(part, self.rank * part)
        elif self.collective == "all_to_all":
            parts = [self._pattern(rank, part, self.rank * part) for rank in range(self.world)]
            got, want = self.output, torch.cat(parts)
        else:
            got, want = self.output, self._pattern((self.rank - 1) % self.world, self.count)
        got = got.cpu()
        if self.dtype.is_floating_point and (self.reduction == "avg" or want.abs().max() > 256):
            tolerance = 2 * torch.finfo(self.dtype).eps
            wrong = ~torch.isclose(got.to(torch.float64), want.to(torch.float64), rtol=tolerance, atol=0)
        else:
            wrong = got != want.to(got.dtype)
        self.input.fill_(0)
        return int(wrong.sum())


    def nmse(self, group) -> float:
        """Of one operation on Gaussian values: squared error over the square of the right result, on this rank."""
        torch = self.torch

        def values(rank: int):
            generator = torch.Generator().manual_seed(rank)
            return torch.randn(self.input.numel(), generator=generator).to(self.dtype)

        want = sum(values(rank).double() for rank in range(self.world))
        if self.reduction == "avg":
            want /= self.world
        self.input.copy_(values(self.rank))
        self.call(group)
        got = self.input if self.collective == "allreduce" else self.output
        if self.collective == "reduce_scatter":
            want = want[self.rank * got.numel() :][: got.numel()]
        error = float((got.cpu().double() - want).square().sum() / want.square().sum())
        self.input.fill_(0)
        return error


class Session:
    """The process groups of a measurement, one per backend over the same ranks. The first is the one under test.

    `device` holds the tensors; "cuda" is the GPU with the rank's local number, or the last one that there is.
    """

    def __init__(self, backends: list[str], timeout_s: float = 120, device: str = "cpu", compress: str = "", **init):
        import torch
        import torch.distributed as dist

        self.dist, self.torch = dist, torch
        torch.set_num_threads(1)
        self.device = device
        if device == "cuda":
            if not torch.cuda.is_available():
                raise Complaint(NO_GPU)
            index = min(int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count() - 1)
            torch.cuda.set_device(index)
            self.device = f"cuda:{index}"
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group(backends[0], timeout=timeout, **init)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.groups = {backends[0]: dist.group.WORLD}
        for backend in backends[1:]:
            self.groups[backend] = dist.new_group(backend=backend, timeout=timeout)
        # By name of the group: what part of its bytes it sends. It comes first, as what is under test.
        self.ratios = {}
        if compress:
            import hybridps

            options = hybridps.Options(compress=compressing(compress))
            group = dist.new_group(backend="hybridps", pg_options=options, timeout=timeout)
            self.groups = {compress: group} | self.groups
            self.ratios = {compress: hybridps.compress.ratio(compress)}
        self.main = dist.group.WORLD
        self.nodes = self._everyones(self._node_name())
        names = list(dict.fromkeys(self.nodes))
        self.node_of = [names.index(node) for node in self.nodes]
        self.node_count = len(names)
        self._counters = self._find_counters() if "hybridps" in backends else None

    def close(self) -> None:
        self.dist.destroy_process_group()

    @staticmethod
    def _node_name() -> str:
        if name := os.environ.get("HYBRIDPS_NODE"):
            return name
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/ipc')} {socket.gethostname()}"

    @staticmethod
    def _find_counters():
        from hybridps import _C

        return lambda: (_C.stats()["net_tx_payload_bytes"], _C.stats()["net_rx_payload_bytes"])

    def _everyones(self, value) -> list:
        values = [None] * self.world
        self.dist.all_gather_object(values, value, group=self.main)
        return values

    def align(self) -> None:
        self.dist.barrier(group=self.main)

    def memory_rates(self, size: int, seconds: float = 0.1) -> tuple[float, float]:
        """(copied, summed from two tensors) bytes/s of one rank while all of them do the same, in tensors of `size`."""
        torch = self.torch
        a, b, c = (torch.ones(max(1, size // 4)) for _ in range(3))
        rates = []
        for work in (lambda: b.copy_(a), lambda: torch.add(a, b, out=c)):
            work()
            self.align()
            times, end = [], time.perf_counter() + seconds
            while not times or time.perf_counter() < end:
                begin = time.perf_counter()
                work()
                times.append(time.perf_counter() - begin)
            rates.append(a.numel() * 4 / statistics.median(times))
        return tuple(statistics.fmean(of_all) for of_all in zip(*self._everyones(rates), strict=True))

    def _per_node(self, per_rank: list[tuple[float, float]]) -> list[tuple[float, float]]:
        sums = [[0.0, 0.0] for _ in range(self.node_count)]
        for node, (sent, received) in zip(self.node_of, per_rank, strict=True):
            sums[node][0] += sent
            sums[node][1] += received
        return [(sent, received) for sent, received in sums]

    def measure(
        self,
        collective: str,
        size: int,
        *,
        iterations: int = 20,
        warmup: int = 5,
        warmup_of: dict[str, int] | None = None,
        dtype: str = "float32",
        reduction: str = "sum",
        root: int = 0,
        check: bool = True,
        interface: str | None = None,
        backends: list[str] | None = None,
        device: str | None = None,
    ) -> dict:
        """One row; the same on every rank. Seconds and bytes. `device`: other than the session's."""
        case = Case(self, collective, size, dtype, reduction, root, device)
        groups = {name: self.groups[name] for name in backends or self.groups}
        for name, group in groups.items():
            for _ in range((warmup_of or {}).get(name, warmup)):
                case.call(group)
        block = 1 if case.bytes > SMALL_BYTES else max(1, min(BLOCK_MAX, iterations))
        blocks = max(1, round(iterations / block))

        times = {name: [] for name in groups}
        cpu_s = dict.fromkeys(groups, 0.0)
        busy_s = dict.fromkeys(groups, 0.0)
        marks = []  # (backend of the block that follows, counters, interface)
        first_of_node = self.rank == self.node_of.index(self.node_of[self.rank])

        def mark(name: str) -> None:
            counted = self._counters() if self._counters else (0, 0)
            seen = interface_bytes(interface) if interface and first_of_node else (0, 0)
            marks.append((name, *counted, *seen))

        order = list(groups.items())
        dropped = LEAD if block > 1 else 0
        for _ in range(blocks):
            for name, group in order:
                self.align()
                mark(name)
                self.align()  # nobody sends before all have read their counters
                cpu = time.process_time()
                begin = start = time.perf_counter()
                for index in range(block + dropped):
                    case.call(group)
                    end = time.perf_counter()
                    if index >= dropped:
                        times[name].append(end - start)
                    start = end
                cpu_s[name] += time.process_time() - cpu
                busy_s[name] += end - begin
        self.align()
        mark("")
        calls = blocks * (block + dropped)
        moved = {name: [0] * 4 for name in groups}
        for (name, *before), (_, *after) in zip(marks, marks[1:], strict=False):
            for index in range(4):
                moved[name][index] += after[index] - before[index]

        # What is compressed comes out as it may.
        lossy = {name for name in groups if name in self.ratios and case.bytes >= compressed_from()}
        wrong = {name: case.wrong(group) if check and name not in lossy else None for name, group in groups.items()}
        errors = {name: case.nmse(groups[name]) for name in lossy if check}
        mine = {
            name: (
                times[name],
                [part / calls for part in moved[name]],
                wrong[name],
                cpu_s[name],
                busy_s[name],
                errors.get(name),
            )
            for name in groups
        }
        everyones = self._everyones(mine)
        row = {
            "collective": collective,
            "bytes": case.bytes,
            "count": case.count,
            "dtype": dtype,
            "device": case.device,
            "reduction": reduction if collective in REDUCING else None,
            "root": root if collective in ("reduce", "broadcast") else None,
            "block": block,
            "backends": {},
        }
        for name in groups:
            figures = summarise([ranks[name][0] for ranks in everyones], block)
            t = figures["seconds"]
            figures["algbw"] = case.bytes / t
            figures["busbw"] = case.bytes / t * bounds.busbw_factor(collective, self.world)
            figures["wrong"] = sum(ranks[name][2] for ranks in everyones) if check and name not in lossy else None
            figures["ratio_of_bytes"] = self.ratios[name] if name in lossy else 1.0
            if name in errors:
                figures["nmse"] = max(ranks[name][5] for ranks in everyones)
            figures["cpu_seconds"] = sum(ranks[name][3] for ranks in everyones) / calls
            wall = max(ranks[name][4] for ranks in everyones)
            figures["cpu_load"] = sum(ranks[name][3] for ranks in everyones) / wall
            if name == "hybridps" or name in self.ratios:
                figures["payload"] = self._per_node([ranks[name][1][:2] for ranks in everyones])
            if interface:
                figures["interface"] = self._per_node([ranks[name][1][2:] for ranks in everyones])
            row["backends"][name] = figures
        ours, *others = groups
        for other in others:
            pair = [[ranks[name][0] for ranks in everyones] for name in (ours, other)]
            row["backends"][other]["ours_is_faster_by"] = paired_ratio(*pair, block)
        if self.node_count == 1 and case.bytes >= SMALL_BYTES and case.device == "cpu":
            row["memory_rates"] = self.memory_rates(case.bytes)
        return row


def add_limits(row: dict, node_of: list[int], rates: list[float] | None, servers: list[float]) -> None:
    """Puts the bound and the plan beside what was measured; `rates` are goodputs in bytes/s, None if not known."""
    size, collective, root = row["bytes"], row["collective"], row["root"] or 0
    if "memory_rates" in row:
        row["limit_seconds"] = bounds.memory_seconds(collective, size, len(node_of), *row["memory_rates"])
    elif rates:
        row["limit_seconds"] = bounds.limit_seconds(collective, size, node_of, rates, servers, root)
    plan = bounds.planned_bytes(collective, size, node_of, rates or (), servers, root)
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


# What a table can show: key, two lines of heading, width.
COLUMNS = (
    ("size", "size", "(B)", 11),
    ("backend", "backend", "", 9),
    ("time", "time", "(us)", 10),
    ("p99", "p99", "(us)", 10),
    ("algbw", "algbw", "(GB/s)", 8),
    ("busbw", "busbw", "(GB/s)", 8),
    ("wrong", "#wrong", "", 7),
    ("limit", "limit", "(us)", 10),
    ("of_limit", "%limit", "", 7),
    ("sent", "sent", "(B)", 11),
    ("sent_plan", "%plan", "", 7),
    ("nic", "nic", "(B)", 11),
    ("nic_plan", "%plan", "", 7),
    ("ratio", "faster", "(x)", 7),
    ("nmse", "nmse", "", 9),
)
ALWAYS = ("size", "time", "p99", "algbw", "busbw")


def columns_for(
    backends: list[str],
    *,
    check: bool = True,
    limits: bool = False,
    nodes: int = 1,
    interface: bool = False,
    compress: bool = False,
) -> list[str]:
    """The columns that can have something in them."""
    shown = {*ALWAYS}
    shown |= {"backend", "ratio"} if len(backends) > 1 else set()
    shown |= {"wrong"} if check else set()
    shown |= {"nmse"} if check and compress else set()
    shown |= {"limit", "of_limit"} if limits else set()
    shown |= {"sent", "sent_plan"} if nodes > 1 and "hybridps" in backends else set()
    shown |= {"nic", "nic_plan"} if interface else set()
    return [key for key, *_ in COLUMNS if key in shown]


def _line(columns: list[str], cells: dict[str, str]) -> str:
    return " ".join(f"{cells[key]:>{width}}" for key, _, _, width in COLUMNS if key in columns)


def heading(columns: list[str]) -> str:
    lines = [_line(columns, {key: texts[line] for key, *texts, _ in COLUMNS}) for line in (0, 1)]
    return "\n".join("#" + line[1:] for line in lines)


def lines_of(row: dict, columns: list[str]) -> list[str]:
    lines = []
    ours = next(iter(row["backends"]))
    for name, figures in row["backends"].items():
        cells = {
            "size": str(row["bytes"]),
            "backend": name,
            "time": f"{figures['seconds'] * 1e6:.1f}",
            "p99": f"{figures['p99_seconds'] * 1e6:.1f}",
            "algbw": f"{figures['algbw'] / 1e9:.3f}",
            "busbw": f"{figures['busbw'] / 1e9:.3f}",
            "wrong": "-" if figures["wrong"] is None else str(figures["wrong"]),
            "limit": "-",
            "of_limit": "-",
            "nmse": f"{figures['nmse']:.1e}" if "nmse" in figures else "-",
            # How many times faster the backend under test is than this one.
            "ratio": "" if name == ours else f"{figures['ours_is_faster_by']:.2f}",
        }
        if row.get("limit_seconds"):
            above = "!" if figures["of_limit"] > ABOVE_LIMIT else ""
            cells["limit"] = f"{figures.get('limit_seconds', row['limit_seconds']) * 1e6:.0f}"
            cells["of_limit"] = f"{figures['of_limit']:.0%}{above}"
        for what, key in (("payload", "sent"), ("interface", "nic")):
            factor = figures.get(what + "_to_plan")
            cells[key] = f"{max(sent for sent, _ in figures[what]):.0f}" if what in figures else "-"
            cells[key + "_plan"] = f"{factor:.1%}" if factor else "-"
        lines.append(_line(columns, cells))
    return lines


ABOVE_LIMIT = 1.05  # what is measured and the limit's rates are some percent off, each


def summary_of(result: dict) -> list[str]:
    """What a reader wants to know of the tables above: for each collective the smallest and the largest size."""
    lines = []
    above = False
    for collective in dict.fromkeys(row["collective"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["collective"] == collective]
        for row in [rows[0]] if len(rows) == 1 else [rows[0], rows[-1]]:
            ours, *others = row["backends"]
            figures = row["backends"][ours]
            text = f"# {collective}" + (f" of {size_text(row['bytes'])}" if row["bytes"] else "")
            text += f": {ours} {figures['seconds'] * 1e6:.0f} us"
            if row["bytes"] > SMALL_BYTES:
                text += f", {figures['busbw'] / 1e9:.2f} GB/s"
            if row.get("limit_seconds"):
                text += f", {figures['of_limit']:.0%} of the limit"
            for other in others:
                faster = row["backends"][other]["ours_is_faster_by"]
                text += f", {faster:.2f} times {other}'s speed"
            lines.append(text)
        above = above or any(
            figures.get("of_limit", 0) > ABOVE_LIMIT for row in rows for figures in row["backends"].values()
        )
    if above:
        cause = (
            "the network carries more than --nic-gbps says, or data did not go through it (nodes over loopback)"
            if result["goodput"]
            else "memory was faster in the operation than in the copies that were measured (caches)"
        )
        lines.append(f"# !: faster than the limit, which is then none: {cause}")
    return lines


def plot(result: dict, path: str) -> None:
    """Two panels: times with the limit, and bus bandwidth; one line per collective and backend."""
    os.environ.setdefault("MPLCONFIGDIR", os.path.join(tempfile.gettempdir(), f"matplotlib-{os.getuid()}"))
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.6), constrained_layout=True)
    collectives = list(dict.fromkeys(row["collective"] for row in result["rows"]))
    for index, collective in enumerate(collectives):
        rows = [row for row in result["rows"] if row["collective"] == collective and row["bytes"] > 0]
        if not rows:
            continue
        sizes = [row["bytes"] for row in rows]
        colour = f"C{index % 10}"
        for name, style in zip(rows[0]["backends"], ("-o", "--s", ":^"), strict=False):
            label = f"{collective}, {name}"
            figures = [row["backends"][name] for row in rows]
            left.plot(sizes, [f["seconds"] * 1e3 for f in figures], style, color=colour, label=label, markersize=4)
            right.plot(sizes, [f["busbw"] / 1e9 for f in figures], style, color=colour, label=label, markersize=4)
        if rows[0].get("limit_seconds"):
            limits = [row["limit_seconds"] * 1e3 for row in rows]
            left.plot(sizes, limits, color=colour, alpha=0.3, linewidth=5, label=f"{collective}, limit")
    left.set(title="Time, median", ylabel="ms", yscale="log")
    right.set(title="Bus bandwidth", ylabel="GB/s")
    for axes in (left, right):
        axes.set(xlabel="bytes", xscale="log")
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(result["title"])
    figure.savefig(path, dpi=110)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("collective", nargs="*", help=f"any of {', '.join(bounds.COLLECTIVES)}; all: each of them (default allreduce)")
    add("-b", "--minbytes", type=parse_size, default="64", help="first size (default %(default)s)")
    add("-e", "--maxbytes", type=parse_size, default="16M", help="last size (default %(default)s)")
    add("-f", "--stepfactor", type=float, default=4, help="factor between sizes (default %(default)s)")
    add("-i", "--stepbytes", type=parse_size, default=0, help="bytes between sizes, instead of a factor")
    add("-n", "--iters", type=int, help="timed operations per size and backend (default 20; with --in-flight: runs, 3)")
    add("-w", "--warmup_iters", type=int, default=5, help="operations before them (default %(default)s)")
    add("-d", "--datatype", choices=DTYPES, default="float32", metavar="TYPE", help=", ".join(DTYPES))
    add("-o", "--op", choices=REDUCTIONS, default="sum", metavar="OP", help=", ".join(REDUCTIONS))
    add("-r", "--root", type=int, default=0, help="of broadcast and reduce (default %(default)s)")
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="0: do not check results")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="of the tensors (default %(default)s)")
    add("--backend", default="hybridps", help="under test (default %(default)s)")
    add("--against", default="", metavar="NAMES", help="other backends, e.g. gloo; they take turns with the first")
    add("--compress", metavar="CODEC", default="", help="measure this codec too, as what is under test; e.g. int8")
    add("--nic-gbps", metavar="RATE", help="of the cards, or one for each node with commas: gives limit and %%limit")
    add("--mtu", type=int, help="for the goodput (default: the interface's, else 1500)")
    add("--servers-gbps", metavar="RATES", default="", help="of dedicated servers, with commas: they lower the limit")
    add("--interface", metavar="NAMES", help="count the bytes of this network interface, or these")
    add(
        "--ranks",
        type=int,
        default=0,
        help="local ranks to start, per node; not under torchrun (default 2, with --nodes 1)",
    )
    add("--nodes", type=int, default=1, help="nodes to emulate with local ranks, over loopback (default %(default)s)")
    add("--in-flight", metavar="N", default="", help="numbers of operations in flight at once, with commas")
    add("--groups", type=int, default=1, help="with --in-flight: take the operations from so many groups in turn")
    add("--late", type=float, default=0, metavar="SECONDS", help="with --in-flight: the last rank begins so much later")
    add("--callbacks", action="store_true", help="with --in-flight: each operation has a callback")
    add("--json", metavar="FILE", help="write everything measured")
    add("--plot", metavar="FILE", help="draw a picture (PNG); needs matplotlib")
    add("--store", help=argparse.SUPPRESS)  # where the ranks that this program started meet
    add("--timeout", type=float, default=120, metavar="SECONDS", help="of one operation (default %(default)s)")


NO_GPU = (
    "--device cuda: torch finds no GPU here (torch.cuda.is_available() is false); leave it out, or see `nvidia-smi`"
)


def _complaint_of_torch(arguments) -> str:
    """What this machine's torch lacks for it."""
    import torch
    import torch.distributed as dist

    for name in dict.fromkeys([arguments.backend, *filter(None, arguments.against.split(","))]):
        if not dist.is_backend_available(name):
            known = sorted({*dist.Backend.backend_list, "hybridps"} - {"undefined", "fake"})
            there = ", ".join(name for name in known if dist.is_backend_available(name))
            return f"torch knows no backend {name!r} here; there are {there}"
    if arguments.compress:
        import hybridps

        try:
            hybridps.compress.ratio(arguments.compress)
        except ValueError as error:
            return f"--compress: {error}"
    return NO_GPU if arguments.device == "cuda" and not torch.cuda.is_available() else ""


def _complaint(arguments) -> str:
    """What is wrong with the arguments, before anything is started."""
    unknown = [name for name in arguments.collective if name not in (*bounds.COLLECTIVES, "all")]
    if unknown:
        return f"unknown collective {unknown[0]!r}; there are {', '.join(bounds.COLLECTIVES)}"
    if (arguments.iters is not None and arguments.iters < 1) or arguments.warmup_iters < 0:
        return "-n must be at least 1, and -w at least 0"
    if arguments.ranks < 0 or arguments.nodes < 1:
        return "--ranks and --nodes count from 1"
    if not arguments.in_flight and (arguments.groups != 1 or arguments.late or arguments.callbacks):
        return "--groups, --late and --callbacks need --in-flight"
    if arguments.groups < 1 or arguments.late < 0:
        return "--groups counts from 1, and --late from 0"
    if arguments.compress and arguments.in_flight:
        return "--compress and --in-flight: one of them"
    if arguments.compress and (
        not set(arguments.collective or ["allreduce"]) <= {"allreduce", "reduce_scatter"}
        or arguments.op not in ("sum", "avg")
        or arguments.datatype not in ("float32", "float16", "bfloat16")
        or arguments.backend != "hybridps"
    ):
        return "--compress is for hybridps' allreduce and reduce_scatter of float32, float16 and bfloat16, sums and averages"
    if arguments.in_flight and arguments.device != "cpu":
        return "--in-flight is for tensors on the CPU"
    try:
        if arguments.in_flight:
            in_flight.parse_counts(arguments.in_flight)
            if unknown := [name for name in arguments.collective if name not in (*in_flight.COLLECTIVES, "all")]:
                return f"{unknown[0]} is not one of --in-flight's: {', '.join(in_flight.COLLECTIVES)}"
        sizes_between(arguments.minbytes, arguments.maxbytes, arguments.stepfactor, arguments.stepbytes)
        for text, what in ((arguments.nic_gbps, "--nic-gbps"), (arguments.servers_gbps, "--servers-gbps")):
            if text:
                per_node(text, len(text.split(",")), what)
    except ValueError as error:
        return str(error)
    if arguments.servers_gbps and not arguments.nic_gbps:
        return "--servers-gbps needs --nic-gbps"
    for name in arguments.interface.split(",") if arguments.interface else ():
        if not os.path.isdir(f"/sys/class/net/{name}"):
            return f"no network interface {name!r}; there are {', '.join(sorted(os.listdir('/sys/class/net')))}"
    return plot_complaint() if arguments.plot else ""


def launch(argv: list[str], ranks: int, nodes: int) -> int:
    """Starts local ranks of this program and waits for them; 0 when all went well."""
    return local_ranks.run([sys.executable, "-m", "hybridps.bench", *argv], ranks, nodes, "hybridps bench")


def measure_all(arguments) -> int:
    names = list(dict.fromkeys([arguments.backend, *filter(None, arguments.against.split(","))]))
    arguments.iters = arguments.iters or (3 if arguments.in_flight else 20)
    init = {}
    if arguments.store:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        init = {"init_method": f"file://{arguments.store}", "rank": rank, "world_size": world}
    session = Session(names, arguments.timeout, arguments.device, arguments.compress, **init)
    try:
        return _measure_all(session, arguments, names)
    finally:
        session.close()


def _measure_all(session, arguments, names: list[str]) -> int:
    quiet = session.rank != 0
    rates, servers = None, []
    if arguments.nic_gbps:
        mtu = arguments.mtu or 1500
        if not arguments.mtu and arguments.interface:
            with open(f"/sys/class/net/{arguments.interface.split(',')[0]}/mtu") as file:
                mtu = int(file.read())
        try:
            of_nodes = per_node(arguments.nic_gbps, session.node_count, "--nic-gbps")
        except ValueError as error:
            raise Complaint(str(error)) from None
        rates = [bounds.goodput(rate, mtu) for rate in of_nodes]
        servers = [bounds.goodput(float(rate), mtu) for rate in filter(None, arguments.servers_gbps.split(","))]
    title = f"{session.world} ranks on {session.node_count} nodes"
    if rates:
        title += f", {arguments.nic_gbps} Gbit/s" + (f", {len(servers)} dedicated servers" if servers else "")
    result = {
        "title": title,
        "ranks": session.world,
        "node_of": session.node_of,
        "goodput": rates,
        "servers_goodput": servers,
        "command": sys.argv,
        "torch": session.torch.__version__,
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith(("HYBRIDPS_", "UCX_", "GLOO_"))},
        "load_before": load_of_machine(),
        "rows": [],
    }
    if not quiet:
        print(f"# hybridps bench: {title}; load {result['load_before']}; {result['cores']} cores")
    asked = arguments.collective or ["allreduce"]
    wrong = 0
    if arguments.in_flight:
        result["rows"] = in_flight.measure_all(session, arguments)
        wrong = sum(figures["wrong"] for row in result["rows"] for figures in row["backends"].values())
        asked = []
    for collective in bounds.COLLECTIVES if "all" in asked else asked:
        sizes = sizes_between(arguments.minbytes, arguments.maxbytes, arguments.stepfactor, arguments.stepbytes)
        columns = columns_for(
            list(session.groups),
            check=bool(arguments.check),
            limits=collective != "barrier"
            and (rates is not None or (session.node_count == 1 and arguments.device == "cpu")),
            nodes=session.node_count,
            interface=bool(arguments.interface),
            compress=bool(arguments.compress),
        )
        if not quiet:
            kind = f", {arguments.datatype}" if collective != "barrier" else ""
            kind += f", {arguments.op}" if collective in REDUCING else ""
            print(f"# {collective}{kind}\n{heading(columns)}", flush=True)
        for size in [0] if collective == "barrier" else sizes:
            row = session.measure(
                collective,
                size,
                iterations=arguments.iters,
                warmup=arguments.warmup_iters,
                dtype=arguments.datatype,
                reduction=arguments.op,
                root=arguments.root,
                check=bool(arguments.check),
                interface=arguments.interface,
            )
            add_limits(row, session.node_of, rates, servers)
            result["rows"].append(row)
            wrong += sum(figures["wrong"] or 0 for figures in row["backends"].values())
            if not quiet:
                print("\n".join(lines_of(row, columns)), flush=True)
    result["load_after"] = load_of_machine()
    if not quiet:
        if not arguments.in_flight:
            print("\n".join(summary_of(result)))
        print(f"# wrong elements: {wrong}")
        if arguments.json:
            with open(arguments.json, "w") as file:
                json.dump(result, file, indent=1)
        if arguments.plot:
            plot(result, arguments.plot)
    return 1 if wrong else 0


def run(arguments, argv: list[str]) -> int:
    of_job = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    nodes = 0 if of_job else arguments.nodes
    complaint = _complaint(arguments)
    if not complaint and nodes and arguments.nic_gbps:
        try:
            per_node(arguments.nic_gbps, nodes, "--nic-gbps")
        except ValueError as error:
            complaint = str(error)
    if complaint := complaint or _complaint_of_torch(arguments):
        if os.environ.get("RANK", "0") == "0":  # the same on all
            print(f"hybridps bench: {complaint}", file=sys.stderr)
        return 2
    if of_job:
        try:
            return measure_all(arguments)
        except Complaint as error:
            if os.environ["RANK"] == "0":
                print(f"hybridps bench: {error}", file=sys.stderr)
            return 2
    try:
        return launch(argv, arguments.ranks or (2 if arguments.nodes == 1 else 1), arguments.nodes)
    except KeyboardInterrupt:
        return 130


def main(argv: list[str] | None = None) -> int:
    print_any_text()
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m hybridps.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    return run(parser.parse_args(argv), argv)

