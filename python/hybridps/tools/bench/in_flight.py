"""`hybridps bench --in-flight N`: many operations issued at once, then waited for: what one of them costs.

All ranks issue N asynchronous operations, each on a tensor of its own, then wait for all. The time of a run is that of the
slowest rank, from the moment at which the last rank begins to issue. The backends take turns, run by run; with several runs
the median counts, and of the ratio the median over the pairs.
"""

import gc
import statistics
import sys
import time

COLLECTIVES = ("allreduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "sendrecv", "barrier")


def parse_counts(text: str) -> list[int]:
    """ "5K,20000" -> [5000, 20000]; K is a thousand here."""
    counts = []
    for part in text.upper().split(","):
        number, factor = (part[:-1], 1000) if part.endswith("K") else (part, 1)
        if not number.isdigit() or not 0 < int(number) * factor <= 10**7:
            raise ValueError(f"--in-flight {text}: give numbers of operations, e.g. 5000 or 5K,20K,100K")
        counts.append(int(number) * factor)
    return counts


class Flight:
    """N operations of one collective on this rank: their tensors, how they are issued, what has to come out."""

    def __init__(self, session, collective: str, size: int, count: int, callbacks: bool):
        import torch
        import torch.distributed as dist

        self.dist, self.collective = dist, collective
        self.rank, self.world, self.callbacks = session.rank, session.world, callbacks
        self.elements = max(self.world, size // 4 // self.world * self.world)
        part = self.elements // self.world
        sent = part if collective == "all_gather" else self.elements
        received = {"all_gather": self.elements, "reduce_scatter": part, "sendrecv": self.elements}.get(collective, 0)
        self.all_inputs = torch.zeros(count, sent)
        self.all_outputs = torch.zeros(count, received)
        self.inputs, self.outputs = list(self.all_inputs), list(self.all_outputs)
        self.called = 0

    def fill(self) -> None:
        self.all_inputs.fill_(self.rank + 1)
        self.all_outputs.fill_(-1)
        self.called = 0

    def issue(self, index: int, group) -> list:
        dist, tensor, output = self.dist, self.inputs[index], self.outputs[index]
        if self.collective == "allreduce":
            return [dist.all_reduce(tensor, group=group, async_op=True)]
        if self.collective == "reduce":
            return [dist.reduce(tensor, 0, group=group, async_op=True)]
        if self.collective == "broadcast":
            return [dist.broadcast(tensor, 0, group=group, async_op=True)]
        if self.collective == "all_gather":
            return [dist.all_gather_into_tensor(output, tensor, group=group, async_op=True)]
        if self.collective == "reduce_scatter":
            return [dist.reduce_scatter_tensor(output, tensor, group=group, async_op=True)]
        if self.collective == "sendrecv":
            following, previous = (self.rank + 1) % self.world, (self.rank - 1) % self.world
            return [dist.irecv(output, previous, group=group), dist.isend(tensor, following, group=group)]
        return [dist.barrier(group=group, async_op=True)]

    def run(self, groups: list) -> tuple[float, float]:
        """(seconds, of which this process computed for so many)."""

        def count(_):
            self.called += 1

        begin, cpu = time.monotonic(), time.process_time()
        works = []
        for index in range(len(self.inputs)):
            issued = self.issue(index, groups[index % len(groups)])
            if self.callbacks:
                works += [work.get_future().then(count) for work in issued]
            else:
                works += issued
        for work in works:
            work.wait()
        return time.monotonic() - begin, time.process_time() - cpu

    def wrong(self) -> int:
        total = self.world * (self.world + 1) // 2
        if self.collective == "barrier":
            return 0
        if self.collective == "all_gather":
            want = self.all_inputs.new_tensor(range(1, self.world + 1)).repeat_interleave(self.elements // self.world)
            return int((self.all_outputs != want).sum())
        if self.collective == "reduce_scatter":
            return int((self.all_outputs != total).sum())
        if self.collective == "sendrecv":
            return int((self.all_outputs != (self.rank - 1) % self.world + 1).sum())
        if self.collective == "reduce" and self.rank != 0:
            return 0
        return int((self.all_inputs != (1 if self.collective == "broadcast" else total)).sum())


def measure(session, backends: dict, collective: str, size: int, count: int, runs: int, late: float, callbacks: bool):
    """One row; the same on every rank. `backends`: name -> its groups, used in turn."""
    flight = Flight(session, collective, size, count, callbacks)
    times = {name: [] for name in backends}
    cpu = {name: [] for name in backends}
    wrong = dict.fromkeys(backends, 0)
    for name, groups in backends.items():  # connections
        for group in groups:
            for work in flight.issue(0, group):
                work.wait()
    for _ in range(runs):
        for name, groups in backends.items():
            flight.fill()
            gc.collect()
            session.align()
            if late and session.rank == session.world - 1:
                time.sleep(late)
            seconds, cpu_s = flight.run(groups)
            session.align()
            if callbacks and flight.called != count * (2 if collective == "sendrecv" else 1):
                wrong[name] += 1
            everyones = session._everyones((seconds, cpu_s, flight.wrong()))
            times[name].append(everyones[-1][0] if late else max(of_rank[0] for of_rank in everyones))
            cpu[name].append(sum(of_rank[1] for of_rank in everyones) / session.world)
            wrong[name] += sum(of_rank[2] for of_rank in everyones)
    row = {"collective": collective, "bytes": flight.elements * 4, "in_flight": count, "backends": {}}
    ours = next(iter(backends))
    for name in backends:
        pairs = [peer / mine for mine, peer in zip(times[ours], times[name], strict=True)]
        row["backends"][name] = {
            "seconds": statistics.median(times[name]),
            "cpu_seconds": statistics.median(cpu[name]),
            "runs": times[name],
            "wrong": wrong[name],
            "ours_is_faster_by": statistics.median(pairs),
        }
    return row


HEADING = "#{:>14} {:>8} {:>10} {:>9} {:>10} {:>10} {:>9} {:>7} {:>7}".format(
    "collective", "size (B)", "in flight", "backend", "all (s)", "one (us)", "cpu (us)", "#wrong", "ratio"
)


def lines_of(row: dict) -> list[str]:
    return [
        f"{row['collective']:>15} {row['bytes']:>8} {row['in_flight']:>10} {name:>9} {figures['seconds']:>10.3f} "
        f"{figures['seconds'] / row['in_flight'] * 1e6:>10.1f} {figures['cpu_seconds'] / row['in_flight'] * 1e6:>9.1f} "
        f"{figures['wrong']:>7} {figures['ours_is_faster_by']:>7.2f}"
        for name, figures in row["backends"].items()
    ]


def measure_all(session, arguments) -> list[dict]:
    backends = {}
    for name in session.groups:
        backends[name] = [session.groups[name]]
        for _ in range(arguments.groups - 1):
            backends[name].append(session.dist.new_group(backend=name))
    rows = []
    if session.rank == 0:
        print(HEADING, flush=True)
    asked = arguments.collective or ["allreduce"]
    for collective in COLLECTIVES if "all" in asked else asked:
        for count in parse_counts(arguments.in_flight):
            row = measure(
                session,
                backends,
                collective,
                arguments.minbytes,
                count,
                arguments.iters,
                arguments.late,
                arguments.callbacks,
            )
            rows.append(row)
            if session.rank == 0:
                print("\n".join(lines_of(row)), flush=True)
                sys.stdout.flush()
    return rows
