"""Runs the collectives: all backends in turn, in the same processes."""

import dataclasses
import os
import socket
import statistics
import time
from datetime import timedelta

from hybridps.backend.load import load_extension
from hybridps.limits import bounds
from hybridps.tools.bench.case import REDUCING, Case
from hybridps.tools.bench.figures import SMALL_BYTES, paired_ratio, parse_size, summarise

BLOCK_MAX = 50
LEAD = 5  # operations in front of each block that are not counted: as many as nccl-tests warms up with
NO_GPU = (
    "--device cuda: torch finds no GPU here (torch.cuda.is_available() is false); leave it out, or see `nvidia-smi`"
)


class Complaint(RuntimeError):
    """What a measurement cannot be done with, for the user to read."""


def interface_bytes(name: str) -> tuple[int, int]:
    """(sent, received) of a network interface, or several with commas, since they were made."""
    counts = {"tx": 0, "rx": 0}
    for one in name.split(","):
        for direction in counts:
            with open(f"/sys/class/net/{one}/statistics/{direction}_bytes") as file:
                counts[direction] += int(file.read())
    return counts["tx"], counts["rx"]


def limit(name: str) -> int:
    """A number of bytes of HYBRIDPS_LIMITS, as this process's environment has it."""
    rows = load_extension().config_table()[2]
    return parse_size(next(row["value"] for row in rows if row["name"] == name))


def compressing(codec: str) -> str:
    """The codec as a group of its own has it here: outside of backward passes, and whether it pays or not."""
    if is_lossless(codec):
        return codec  # goes packed where it pays, as in a program
    return codec + ("," if ":" in codec else ":") + "when=always,auto=0"


def is_lossless(codec: str) -> bool:
    """Whether sums keep their bits."""
    return codec.split(":")[0] in ("exact", "off", "none")


@dataclasses.dataclass
class Taken:
    """What a rank has seen of one backend."""

    calls: int
    times: list[float] = dataclasses.field(default_factory=list)
    cpu_s: float = 0.0
    busy_s: float = 0.0
    # Bytes of its payload, then of the interface: sent, received.
    moved: list[int] = dataclasses.field(default_factory=lambda: [0] * 4)
    wrong: int | None = None
    nmse: float | None = None

    def per_call(self) -> list[float]:
        return [part / self.calls for part in self.moved]


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
        # A measurement against the limit of a network is one of all bytes. What is asked for is done.
        os.environ.setdefault("HYBRIDPS_COMPRESS", "off")
        if "gloo" in backends:  # else gloo takes the address behind the host's name, on Debian 127.0.1.1
            from hybridps.backend import load

            control = load.load_extension().check_settings(0, 1, False)["control"]
            os.environ.setdefault("GLOO_SOCKET_IFNAME", control)
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

    def _run(self, case: Case, groups: dict, block: int, blocks: int, interface: str | None) -> dict[str, Taken]:
        """The backends in turn, block by block."""
        dropped = LEAD if block > 1 else 0
        calls = blocks * (block + dropped)
        taken = {name: Taken(calls) for name in groups}
        marks = []  # (backend of the block that follows, counters, interface)
        first_of_node = self.rank == self.node_of.index(self.node_of[self.rank])

        def mark(name: str) -> None:
            counted = self._counters() if self._counters else (0, 0)
            seen = interface_bytes(interface) if interface and first_of_node else (0, 0)
            marks.append((name, *counted, *seen))

        for _ in range(blocks):
            for name, group in groups.items():
                mine = taken[name]
                case.refresh()
                self.align()
                mark(name)
                self.align()  # nobody sends before all have read their counters
                cpu = time.process_time()
                begin = start = time.perf_counter()
                for index in range(block + dropped):
                    case.call(group)
                    end = time.perf_counter()
                    if index >= dropped:
                        mine.times.append(end - start)
                    start = end
                mine.cpu_s += time.process_time() - cpu
                mine.busy_s += end - begin
        self.align()
        mark("")
        for (name, *before), (_, *after) in zip(marks, marks[1:], strict=False):
            for index in range(4):
                taken[name].moved[index] += after[index] - before[index]
        return taken

    def _figures(self, name: str, case: Case, block: int, of_ranks: list[Taken], lossy: bool, interface: bool) -> dict:
        """Of one backend, from what all ranks have taken."""
        figures = summarise([taken.times for taken in of_ranks], block)
        t = figures["seconds"]
        figures["algbw"] = case.bytes / t
        figures["busbw"] = case.bytes / t * bounds.busbw_factor(case.collective, self.world)
        checked = of_ranks[0].wrong is not None
        figures["wrong"] = sum(taken.wrong for taken in of_ranks) if checked else None
        figures["ratio_of_bytes"] = self.ratios[name] if lossy else 1.0
        if of_ranks[0].nmse is not None:
            figures["nmse"] = max(taken.nmse for taken in of_ranks)
        cpu_s = sum(taken.cpu_s for taken in of_ranks)
        figures["cpu_seconds"] = cpu_s / of_ranks[0].calls
        figures["cpu_load"] = cpu_s / max(taken.busy_s for taken in of_ranks)
        if name == "hybridps" or name in self.ratios:
            figures["payload"] = self._per_node([taken.per_call()[:2] for taken in of_ranks])
        if interface:
            figures["interface"] = self._per_node([taken.per_call()[2:] for taken in of_ranks])
        return figures

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
        taken = self._run(case, groups, block, max(1, round(iterations / block)), interface)
        # What is compressed comes out as it may.
        lossy = [
            name
            for name in groups
            if name in self.ratios and not is_lossless(name) and case.bytes >= limit("compress_min_bytes")
        ]
        for name, group in groups.items():
            taken[name].wrong = case.wrong(group) if check and name not in lossy else None
        for name in lossy if check else []:
            taken[name].nmse = case.nmse(groups[name])
        everyones = self._everyones(taken)
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
            of_ranks = [ranks[name] for ranks in everyones]
            row["backends"][name] = self._figures(name, case, block, of_ranks, name in lossy, bool(interface))
        ours, *others = groups
        for other in others:
            pair = [[ranks[name].times for ranks in everyones] for name in (ours, other)]
            row["backends"][other]["ours_is_faster_by"] = paired_ratio(*pair, block)
        if self.node_count == 1 and case.bytes >= SMALL_BYTES and case.device == "cpu":
            row["memory_rates"] = self.memory_rates(case.bytes)
        return row
