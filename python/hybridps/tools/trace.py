"""`hybridps trace`: the traces of a job's ranks and servers (setting HYBRIDPS_TRACE) on one clock.

    hybridps trace merge DIR [-o FILE] [--torch FILE ...]
        writes one JSON file for Perfetto (ui.perfetto.dev) or chrome://tracing; --torch adds traces of torch's profiler
    hybridps trace report DIR [--operations N] [--picture FILE] [--json]
        shows where the time of a step went on each rank, as text and as a picture

All times are on the clock of the lowest rank. The quickest round trip between two engines relates their clocks. The
error is at most half of that round trip; both commands print it. csrc/hybridps/observe/trace.h has the format.
"""

from __future__ import annotations

import json
import struct
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

from hybridps.tools.output import table

MAGIC = b"HPSTRC01"
RECORD = struct.Struct("<QQQQIIIHBB")  # observe::Event
OPERATION, SENT, RECEIVED, SUM, COPY, WORK, WINDOW, CLOCK, CALLED, TEXT = (*range(9), 255)
KINDS = [  # schedule::Kind
    "allreduce", "reduce", "reduce_scatter", "barrier", "broadcast", "all_gather", "gather", "scatter", "all_to_all",
    "point_to_point", "goodbye",
]  # fmt: skip
STAGES = ["to its node", "push", "result", "to its node"]
NO_PEER = 0xFFFF


class Event(NamedTuple):
    start_ns: int
    end_ns: int
    bytes: int
    sequence: int
    span: int
    chunk: int
    group: int
    peer: int
    type: int
    detail: int


class Trace:
    """One file: `about` (engine, role, rank, host, pid, clock_ns, unix_ns), `events`, `groups` and `peers` by number."""

    def __init__(self, path: Path):
        self.path = path
        data = path.read_bytes()
        if data[:8] != MAGIC:
            raise ValueError(f"{path} is not a trace of this version of hybridps")
        self.about: dict = {}
        self.events: list[Event] = []
        self.peers: dict[int, str] = {}
        self.dropped = 0
        uids: dict[int, str] = {}
        of_uid: dict[str, dict] = {}
        at = 8
        while at + RECORD.size <= len(data):
            event = Event._make(RECORD.unpack_from(data, at))
            at += RECORD.size
            if event.type != TEXT:
                self.events.append(event)
                continue
            text = data[at : at + event.bytes]
            at += -(-event.bytes // RECORD.size) * RECORD.size
            if len(text) < event.bytes:
                break  # its process was killed while it wrote
            said = json.loads(text)
            if "clock_ns" in said:
                self.about = said
            elif "peer" in said:
                self.peers[said["peer"]] = said["engine"]
            elif "dropped" in said:
                self.dropped = said["dropped"]
            elif "members" in said:
                of_uid[said["uid"]] = said
            elif "group" in said:
                uids[said["group"]] = said["uid"]
        if not self.about:
            raise ValueError(f"{path} is cut short: it does not name its process")
        self.groups = {number: of_uid.get(uid, {"uid": uid, "name": uid[:8]}) for number, uid in uids.items()}
        self.engine = self.about["engine"]
        self.name = f"{self.about['role']} {self.about['rank']}"
        self.offset_ns = 0.0  # to be added to its clock
        self.error_ns: float | None = 0.0  # how far off that may be; None: not known

    def operations(self) -> list[Event]:
        """Those that have ended."""
        return [event for event in self.events if event.type == OPERATION]

    def under_way(self) -> list[Event]:
        """The calls that had not ended when the trace did, which is taken for their end."""
        over = Counter(_call(event) for event in self.operations())
        end = max((event.end_ns for event in self.events), default=0)
        left = []
        for event in self.events:
            if event.type == CALLED:
                over[_call(event)] -= 1
                if over[_call(event)] < 0:
                    left.append(event._replace(end_ns=max(end, event.start_ns)))
        return left

    def calls(self) -> list[Event]:
        return sorted([*self.operations(), *self.under_way()], key=lambda event: event.start_ns)

    def describe(self, event: Event) -> str:
        if event.detail == KINDS.index("point_to_point"):
            return "send" if event.span else "recv"
        kind = KINDS[event.detail] if event.detail < len(KINDS) else "operation"
        return f"{kind} {event.sequence}"


def _call(event: Event) -> tuple:
    """The same for a call and for its end. A message gets its number, and perhaps its peer, in between."""
    to_one = event.detail == KINDS.index("point_to_point")
    return (event.group, 0 if to_one else event.sequence, event.detail, event.span, event.start_ns)


def _failed(event: Event) -> bool:
    return event.type == CALLED or event.chunk == 1  # or never ended


def load(folder: Path) -> list[Trace]:
    """All traces of a folder, ranks first; ValueError: there is none, or one cannot be read."""
    paths = sorted(folder.glob("*.hpstrace"))
    if not paths:
        raise ValueError(f"{folder} has no *.hpstrace: run the job with HYBRIDPS_TRACE={folder}")
    traces = [Trace(path) for path in paths]
    jobs = {trace.about.get("job") for trace in traces if trace.about.get("job")}
    if len(jobs) > 1:
        raise ValueError(f"{folder} has the traces of several jobs: {', '.join(sorted(jobs))}")
    return sorted(traces, key=lambda trace: (trace.about["role"] != "rank", trace.about["rank"]))


def align(traces: list[Trace]) -> None:
    """Fills in offset_ns and error_ns: all on the clock of the first."""
    by_engine = {trace.engine: trace for trace in traces}
    # The quickest round trip between two: (seconds, how far the other's clock is ahead).
    best: dict[tuple[str, str], tuple[float, float]] = {}
    for trace in traces:
        for event in trace.events:
            if event.type != CLOCK:
                continue
            other = trace.peers.get(event.peer)
            if other not in by_engine:
                continue
            trip = event.end_ns - event.start_ns
            ahead = event.bytes - (event.start_ns + trip / 2)
            if (trace.engine, other) not in best or trip < best[(trace.engine, other)][0]:
                best[(trace.engine, other)] = (trip, ahead)
    edges: dict[str, list[tuple[str, float, float]]] = defaultdict(list)
    for (one, other), (trip, ahead) in best.items():
        edges[one].append((other, trip / 2, ahead))
        edges[other].append((one, trip / 2, -ahead))
    for trace in traces:
        trace.error_ns = None
    first = traces[0]
    first.offset_ns, first.error_ns = 0.0, 0.0
    waiting = {first.engine}
    done = set()
    while waiting:  # by the least error
        here = min(waiting, key=lambda engine: by_engine[engine].error_ns)
        waiting.discard(here)
        done.add(here)
        for other, error, ahead in edges[here]:
            trace = by_engine[other]
            total = by_engine[here].error_ns + error
            if other in done or (trace.error_ns is not None and trace.error_ns <= total):
                continue
            trace.error_ns = total
            trace.offset_ns = by_engine[here].offset_ns - ahead
            waiting.add(other)
    # On one machine there is one clock; nobody need have asked for the time.
    for trace in traces:
        if trace.error_ns is None and trace.about["host"] == first.about["host"]:
            trace.offset_ns, trace.error_ns = 0.0, 0.0


def clocks_text(traces: list[Trace]) -> str:
    lines = []
    for trace in traces:
        error = "not known: it asked nobody for the time" if trace.error_ns is None else f"at most {trace.error_ns / 1e3:.0f} us"
        lines.append(f"{trace.name} ({trace.about['host']}): clock {trace.offset_ns / 1e3:+.0f} us, error {error}")
        if trace.dropped:
            lines.append(f"  {trace.dropped} events were dropped: its disk was too slow")
    return "\n".join(lines)


# --- merge -----------------------------------------------------------------------------------------------------------


def merge(traces: list[Trace], torch_files: list[Path] = ()) -> dict:
    """Chrome's trace format. Each engine is a process: its calls, what it sends to and receives from each peer, its CPU time,
    waits and windows. `torch_files`: traces of torch's profiler, of which each gets a process of its own beside them."""
    names = {trace.engine: trace.name for trace in traces}
    base = min((event.start_ns + trace.offset_ns for trace in traces for event in trace.events), default=0.0)
    out: list[dict] = []

    def us(trace: Trace, ns: float) -> float:
        return (ns + trace.offset_ns - base) / 1e3

    waits = waits_of(traces)
    for pid, trace in enumerate(traces):
        about = trace.about
        out.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"{trace.name}, {about['host']}"}})
        out.append({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})
        threads: dict[str, int] = {}

        def thread(name: str, pid: int = pid, threads: dict[str, int] = threads) -> int:
            if name not in threads:
                threads[name] = len(threads)
                out.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": threads[name], "args": {"name": name}})
            return threads[name]

        ends: list[float] = []  # of calls, by the row that they are in: those that overlap need several
        for event in sorted([*(one for one in trace.events if one.type != CALLED), *trace.under_way()]):
            peer = names.get(trace.peers.get(event.peer, ""), trace.peers.get(event.peer, "")[:8])
            group = trace.groups.get(event.group, {}).get("name", "")
            at, duration = us(trace, event.start_ns), max(0.0, (event.end_ns - event.start_ns) / 1e3)
            common = {"ph": "X", "pid": pid, "ts": at, "dur": duration}
            chunk = {"seq": event.sequence, "span": event.span, "chunk": event.chunk, "bytes": event.bytes}
            if event.type in (OPERATION, CALLED):
                row = next((i for i, end in enumerate(ends) if end <= event.start_ns), len(ends))
                ends[row : row + 1] = [event.end_ns]
                name = trace.describe(event)
                if _failed(event):
                    name += " failed" if event.type == OPERATION else " (under way at the end)"
                args = {"bytes": event.bytes, "group": group, "seq": event.sequence} | ({"peer": peer} if peer else {})
                out.append({**common, "tid": thread(f"calls {row}" if row else "calls"), "name": name, "args": args})
            elif event.type in (SENT, RECEIVED):
                sent = event.type == SENT
                stage = STAGES[event.detail % len(STAGES)]
                name = f"{stage} {event.sequence}" if sent else f"{stage} {event.sequence} came"
                tid = thread(f"{'to' if sent else 'from'} {peer}")
                out.append({**common, "tid": tid, "name": name, "args": {**chunk, "group": group}})
            elif event.type == SUM:
                out.append({**common, "tid": thread("cpu: sums"), "name": f"sum {event.sequence}", "args": chunk})
            elif event.type == COPY:
                out.append({**common, "tid": thread("cpu: copies"), "name": f"copy {event.sequence}", "args": chunk})
            elif event.type == WORK:
                out.append({**common, "tid": thread("cpu: loop"), "name": "work"})
            elif event.type == WINDOW:
                args = {"KiB": event.bytes / 1024}
                out.append({"ph": "C", "pid": pid, "ts": at, "name": f"window to {peer}", "args": args})
        for start, end, culprit, sequence in waits.get(trace.engine, []):
            out.append(
                {
                    "ph": "X",
                    "pid": pid,
                    "tid": thread("waits"),
                    "ts": (start - base) / 1e3,
                    "dur": (end - start) / 1e3,
                    "name": f"waits for {culprit}",
                    "args": {"seq": sequence},
                }
            )
    for index, path in enumerate(torch_files):
        out += _of_torch(path, len(traces) + index, traces, base)
    return {"traceEvents": out, "displayTimeUnit": "ms"}


def _of_torch(path: Path, pid: int, traces: list[Trace], base: float) -> list[dict]:
    """A trace of torch's profiler on our clock, by the time of day of the rank that it is of (distributedInfo), else the first."""
    found = json.loads(path.read_text())
    rank = found.get("distributedInfo", {}).get("rank")
    trace = next((t for t in traces if t.about["role"] == "rank" and t.about["rank"] == rank), traces[0])
    # Its microseconds are since baseTimeNanoseconds, which is a time of day.
    to_clock = found.get("baseTimeNanoseconds", 0) - trace.about["unix_ns"] + trace.about["clock_ns"] + trace.offset_ns
    threads: dict[tuple, int] = {}
    out = [{"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"torch's profiler, {trace.name}"}}]
    for event in found["traceEvents"]:
        if event.get("ph") != "X" or "ts" not in event:
            continue
        tid = threads.setdefault((event.get("pid"), event.get("tid")), len(threads))
        out.append({**event, "pid": pid, "tid": tid, "ts": float(event["ts"]) + (to_clock - base) / 1e3})
    return out


# --- report ----------------------------------------------------------------------------------------------------------


def _not_called(trace: Trace, event: Event, callers: set[str], by_engine: dict[str, Trace]) -> str:
    """The ranks that a failed or unfinished collective was never called by, as far as the traces tell; empty: nobody."""
    members = trace.groups.get(event.group, {}).get("members", [])
    missing = [
        by_engine[one].name
        for one in members
        if one in by_engine and one not in callers and by_engine[one].about["role"] == "rank" and not by_engine[one].dropped
    ]
    return ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")


def _by_operation(traces: list[Trace]) -> dict[tuple[str, int], list[tuple[float, Trace, Event]]]:
    """The calls of each collective: when on the common clock, whose."""
    calls: dict[tuple[str, int], list[tuple[float, Trace, Event]]] = defaultdict(list)
    for trace in traces:
        for event in trace.calls():
            if event.detail == KINDS.index("point_to_point"):
                continue
            uid = trace.groups.get(event.group, {}).get("uid", "")
            calls[(uid, event.sequence)].append((event.start_ns + trace.offset_ns, trace, event))
    return calls


def waits_of(traces: list[Trace]) -> dict[str, list[tuple[float, float, str, int]]]:
    """By engine, on the common clock: from when until when an operation of it waited for the last rank to call, for whom."""
    by_engine = {trace.engine: trace for trace in traces}
    found: dict[str, list[tuple[float, float, str, int]]] = defaultdict(list)
    for (_, sequence), of_all in _by_operation(traces).items():
        last, latest, event = max(of_all, key=lambda call: call[0])
        missing = ""
        if any(_failed(one) for _, _, one in of_all):
            missing = _not_called(latest, event, {trace.engine for _, trace, _ in of_all}, by_engine)
        for start, trace, event in of_all:
            end = event.end_ns + trace.offset_ns
            if not missing:
                end = min(last, end)
            if end > start and (missing or trace is not latest):
                found[trace.engine].append((start, end, missing or latest.name, sequence))
    return found


def unfinished(traces: list[Trace]) -> list[str]:
    """A line for each operation that failed or was under way when its trace ended, the first of each rank."""
    by_engine = {trace.engine: trace for trace in traces}
    callers = {key: {trace.engine for _, trace, _ in calls} for key, calls in _by_operation(traces).items()}
    lines = []
    for trace in traces:
        left = [event for event in trace.calls() if _failed(event) and event.detail != KINDS.index("goodbye")]
        for event in left[:UNFINISHED_TOLD]:
            group = trace.groups.get(event.group, {})
            how = "was under way at the end, for" if event.type == CALLED else "failed after"
            line = f"{trace.name}: {trace.describe(event)} of {group.get('name') or 'a group'} {how} "
            line += f"{(event.end_ns - event.start_ns) * 1e-9:.2f} s"
            if event.detail == KINDS.index("point_to_point"):
                other = by_engine.get(trace.peers.get(event.peer, ""))
                missing = f"; the other side is {other.name}" if other else ""
            else:
                missing = _not_called(trace, event, callers[(group.get("uid", ""), event.sequence)], by_engine)
                missing = missing and f"; not called by {missing}"
            lines.append(line + missing)
        if len(left) > UNFINISHED_TOLD:
            lines.append(f"{trace.name}: and {len(left) - UNFINISHED_TOLD} more")
    return lines


def period_of(signatures: list[tuple]) -> int:
    """How many operations a step has: the shortest period of the rows of calls, after what comes once at the beginning; the whole
    where there is none."""
    count = len(signatures)
    for period in range(1, count // 2 + 1):
        tail = signatures[count - max(2 * period, 3 * count // 4) :]
        if all(one == other for one, other in zip(tail, tail[period:], strict=False)):
            return period
    return count


def steps_of(signatures: list[tuple]) -> tuple[int, int]:
    """(operations of a step, how many operations come once after the last step): where a job ends in something else, or in the
    middle of a step, the steps before it are found all the same."""
    count = len(signatures)
    for after in range(min(AFTER_MAX, count // 4) + 1):
        rest = signatures[: count - after]
        period = period_of(rest)
        if period < len(rest):
            return period, after
    return count, 0


PARTS = ["waiting for a rank", "summing", "copying", "our CPU", "network", "no communication"]
UNFINISHED_TOLD = 3
AFTER_MAX = 8


class Stretch(NamedTuple):
    what: str
    seconds: float
    parts: dict[str, float]  # seconds: PARTS
    culprits: dict[str, float]  # of "waiting for a rank"


class Report(NamedTuple):
    name: str
    steps: int
    step_seconds: float  # of one, on average
    parts: dict[str, float]  # seconds of a step: PARTS
    culprits: dict[str, float]  # of "waiting for a rank"
    net_bytes: float  # sent to other nodes or received, whichever is more, a step
    limit_seconds: float  # what that takes at the card's rate; 0: that is not known
    apart: list[Stretch]  # a step that took far longer than the others; what comes after the steps


def report(traces: list[Trace], operations_per_step: int | None = None) -> list[Report]:
    """Of each rank, over its steps. Every moment of a step is one of PARTS: while an operation is under way, the first that holds
    of waiting for a rank that has not called it, summing, copying, other work of the engine, and nothing of these: the network
    has it, or a peer. So the parts add up to the step. A step is from its first call to the next one's, the last one to its end
    or, where it has none, to that of the trace."""
    waits = waits_of(traces)
    reports = []
    for trace in traces:
        calls = [event for event in trace.calls() if event.detail != KINDS.index("goodbye")]
        if trace.about["role"] != "rank" or not calls:
            continue
        signatures = [(trace.groups.get(e.group, {}).get("uid"), e.detail, e.bytes) for e in calls]
        period, after = (max(1, operations_per_step), 0) if operations_per_step else steps_of(signatures)
        count = len(calls) - after
        steps = max(1, count // period)
        first = max(0, count - steps * period)
        bounds = [event.start_ns for event in calls[first:count:period]]
        bounds.append(calls[count].start_ns if after else max(event.end_ns for event in calls))
        stretches = _split(trace, calls, waits.get(trace.engine, []), [*bounds, max(event.end_ns for event in calls)])
        each, tail = stretches[:steps], stretches[steps]
        begin, end = bounds[0], bounds[-1]
        apart = []
        longest = max(range(steps), key=lambda i: each[i].seconds)
        others = (sum(one.seconds for one in each) - each[longest].seconds) / max(1, steps - 1)
        if steps > 1 and each[longest].seconds > APART * others:
            apart.append(each[longest]._replace(what=f"step {longest + 1} of {steps}"))
        if after:
            apart.append(tail._replace(what=f"what came after the last step ({after} call{'s' * (after > 1)})"))
        sent = received = 0
        local = {e.peer for e in trace.events if e.type in (SENT, RECEIVED) and e.detail in (0, 3)}
        for event in trace.events:
            if event.peer in local or not begin <= event.start_ns < end:
                continue
            sent += event.bytes if event.type == SENT else 0
            received += event.bytes if event.type == RECEIVED else 0
        net = max(sent, received) / steps
        limit = trace.about.get("limit_bytes_per_second", 0)
        culprits = {name: 0.0 for one in each for name in one.culprits}
        reports.append(
            Report(
                trace.name,
                steps,
                (end - begin) * 1e-9 / steps,
                {part: sum(one.parts[part] for one in each) / steps for part in PARTS},
                {name: sum(one.culprits.get(name, 0.0) for one in each) / steps for name in culprits},
                net,
                net / limit if limit else 0.0,
                apart,
            )
        )
    return reports


APART = 3  # times as long as the others


def _split(trace: Trace, calls: list[Event], waits: list[tuple], bounds: list[int]) -> list[Stretch]:
    """Where the time between each two of `bounds` went."""
    begin, end = bounds[0], bounds[-1]
    # Changes of what is going on, in order.
    edges: list[tuple[float, int, int, str]] = []

    def add(start: float, stop: float, part: int, who: str = "") -> None:
        start, stop = max(start, begin), min(stop, end)
        if stop > start:
            edges.append((start, 1, part, who))
            edges.append((stop, -1, part, who))

    for event in calls:
        add(event.start_ns, event.end_ns, 4)
    for event in trace.events:
        if event.type in (SUM, COPY, WORK):
            add(event.start_ns, event.end_ns, {SUM: 1, COPY: 2, WORK: 3}[event.type])
    for start, stop, culprit, _ in waits:
        add(start - trace.offset_ns, stop - trace.offset_ns, 0, culprit)
    edges += [(bound, 0, 4, "") for bound in bounds[1:]]
    edges.sort(key=lambda edge: (edge[0], edge[1]))
    stretches = []
    parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    culprits: dict[str, float] = defaultdict(float)
    active = [0] * 5
    waited: dict[str, int] = defaultdict(int)
    at = began = begin
    for moment, change, part, who in edges:
        seconds = (moment - at) * 1e-9
        at = moment
        if seconds > 0:
            if not active[4]:
                parts["no communication"] += seconds
            else:
                now = next(i for i in range(5) if active[i])
                parts[PARTS[now]] += seconds
                if now == 0:
                    culprits[next(name for name, count in waited.items() if count)] += seconds
        active[part] += change
        if part == 0:
            waited[who] += change
        if change == 0:
            stretches.append(Stretch("", (moment - began) * 1e-9, parts, dict(culprits)))
            parts, culprits, began = dict.fromkeys(PARTS, 0.0), defaultdict(float), moment
    return stretches


def report_text(reports: list[Report]) -> str:
    rows = [["RANK", "STEPS", "STEP", *(part.upper() for part in PARTS), "NETWORK'S LIMIT"]]
    for one in reports:
        whole = one.step_seconds or 1.0
        cells = [f"{1e3 * one.parts[part]:.2f} ms {100 * one.parts[part] / whole:.0f}%" for part in PARTS]
        limit = f"{1e3 * one.limit_seconds:.2f} ms" if one.limit_seconds else "?"
        rows.append(
            [one.name, str(one.steps), f"{1e3 * one.step_seconds:.2f} ms", *cells, f"{limit} ({one.net_bytes / 1e6:.2f} MB)"]
        )
    lines = [table(rows)]
    for one in reports:
        if one.culprits:
            lines.append(f"{one.name} waits for {_most(one.culprits)} a step")
    for one in reports:
        for stretch in one.apart:
            took = f"{one.name}: {stretch.what} took {1e3 * stretch.seconds:.2f} ms"
            part = max(PARTS, key=lambda name: stretch.parts[name])
            if part == PARTS[0]:
                took += f", waiting for {_most(stretch.culprits)}"
            elif stretch.seconds > 0:
                took += f", {part} {1e3 * stretch.parts[part]:.2f} ms"
            lines.append(took)
    return "\n".join(lines)


def _most(culprits: dict[str, float]) -> str:
    most = sorted(culprits.items(), key=lambda item: -item[1])[:4]
    return ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in most)


def report_picture(reports: list[Report], path: Path) -> None:
    """An SVG: a bar for each rank."""
    colours = ["#d62728", "#1f77b4", "#9467bd", "#8c564b", "#2ca02c", "#dddddd"]
    widest = max((one.step_seconds for one in reports), default=1.0) or 1.0
    width, left, bar, gap = 900, 110, 22, 8
    height = 70 + len(reports) * (bar + gap)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="10" y="18">A step, by rank: {1e3 * widest:.2f} ms are the whole width</text>',
    ]
    x = 10
    for part, colour in zip(PARTS, colours, strict=True):
        out.append(f'<rect x="{x}" y="28" width="12" height="12" fill="{colour}"/><text x="{x + 16}" y="39">{part}</text>')
        x += 30 + 7 * len(part)
    scale = (width - left - 20) / widest
    for row, one in enumerate(reports):
        y = 52 + row * (bar + gap)
        out.append(f'<text x="10" y="{y + 15}">{one.name}</text>')
        at = float(left)
        for part, colour in zip(PARTS, colours, strict=True):
            wide = one.parts[part] * scale
            title = f"{part}: {1e3 * one.parts[part]:.2f} ms"
            out.append(
                f'<rect x="{at:.2f}" y="{y}" width="{wide:.2f}" height="{bar}" fill="{colour}"><title>{title}</title></rect>'
            )
            at += wide
        if one.limit_seconds:
            limit = left + one.limit_seconds * scale
            out.append(f'<line x1="{limit:.2f}" x2="{limit:.2f}" y1="{y - 3}" y2="{y + bar + 3}" stroke="black"/>')
    path.write_text("\n".join([*out, "</svg>", ""]))


def add_arguments(parser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    action = actions.add_parser("merge", help="write one JSON file for Perfetto or chrome://tracing")
    action.add_argument("folder", type=Path)
    action.add_argument("-o", "--output", type=Path, help="the file to write (default FOLDER/trace.json)")
    action.add_argument(
        "--torch", type=Path, action="append", default=[], metavar="FILE", help="a trace of torch's profiler to add"
    )
    action.set_defaults(action=_merge)
    action = actions.add_parser("report", help="show where the time of a step went")
    action.add_argument("folder", type=Path)
    action.add_argument("--operations", type=int, metavar="N", help="collectives of a step (default: by their sizes)")
    action.add_argument("--picture", type=Path, help="the SVG to write (default FOLDER/report.svg)")
    action.add_argument("--json", action="store_true", help="print the report as JSON")
    action.set_defaults(action=_report)


def _merge(arguments) -> int:
    traces = load(arguments.folder)
    align(traces)
    print(clocks_text(traces))
    output = arguments.output or arguments.folder / "trace.json"
    merged = merge(traces, arguments.torch)
    output.write_text(json.dumps(merged))
    print(f"{len(merged['traceEvents'])} events in {output}")
    return 0


def _report(arguments) -> int:
    traces = load(arguments.folder)
    align(traces)
    reports = report(traces, arguments.operations)
    if arguments.json:
        print(json.dumps([one._asdict() | {"apart": [part._asdict() for part in one.apart]} for one in reports], indent=1))
        return 0
    print(clocks_text(traces))
    print(report_text(reports))
    for line in unfinished(traces):
        print(line)
    picture = arguments.picture or arguments.folder / "report.svg"
    report_picture(reports, picture)
    print(f"picture: {picture}")
    return 0


def run(arguments) -> int:
    try:
        return arguments.action(arguments)
    except (OSError, ValueError) as error:
        print(f"hybridps: {error}", file=sys.stderr)
        return 1
