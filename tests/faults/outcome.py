"""Rows of the fault suite's table: what is launched, what was seen, and whether a bar was missed."""

import contextlib
import re
import statistics
import subprocess
from dataclasses import dataclass, field

import harness
import hosts as lab

# The machine that runs the tests has other work too: beyond this much over its bar a time is wrong. scripts/faults sets
# it to 0.
SLACK_S = 2.0 * harness.TIME_SCALE

# HYBRIDPS_DEAD_SECONDS: less than the usual 20 s, so that a row ends.
PATIENCE = {"HYBRIDPS_DEAD_SECONDS": "5"}


class Skip(Exception):
    pass


@dataclass
class Row:
    fault: str
    backend: str
    runs: int = 0
    detected_s: list = field(default_factory=list)  # one per rank that noticed and run
    culprit: str = "-"
    left: str = "-"
    note: str = ""
    bad: list = field(default_factory=list)  # bars that were missed, as sentences
    skipped: str = ""

    def expect(self, condition, sentence):
        if not condition:
            self.bad.append(sentence)

    @property
    def detection(self):
        if not self.detected_s:
            return "-"
        median, worst = statistics.median(self.detected_s), max(self.detected_s)
        return f"{median:.2f} s" if worst - median < 0.005 else f"{median:.2f} s, at most {worst:.2f} s"


def named(text):
    """The ranks that a message blames: the one that is gone, else those that are missing, else the first that it names
    after its own sender and operation."""
    if not text:
        return []
    # The sender: of an operation that failed, or that a failed group did not take.
    body = re.sub(r"hybridps\[rank \d+/\d+[^\]]*\]:|\(rank \d+ of \d+\)", "", text)
    body = body.split("failed after", 1)[-1]
    gone = re.search(r"\brank (\d+) [^;]* is gone", body)
    if gone:
        return [int(gone[1])]
    missing = re.search(r"missing:? (?:ranks? )?\[([\d, ]+)\]", body)
    if missing:
        return [int(rank) for rank in missing[1].split(",")]
    first = re.search(r"\branks? \[?(\d+)", body)
    return [int(first[1])] if first else []


def names_count(results, culprit):
    """How many of these messages blame `culprit`, out of how many."""
    texts = [result["text"] for result in results]
    return sum(named(text) == [culprit] for text in texts), len(texts)


def leftovers(results):
    threads = max((result.get("threads", 0) for result in results), default=0)
    descriptors = max((result.get("descriptors", 0) for result in results), default=0)
    parts = [f"{n} {what}" for n, what in [(threads, "threads"), (descriptors, "descriptors")] if n > 0]
    return ", ".join(parts) or "nothing"


def launch(function, nodes, backend, **options):
    options.setdefault("init", False)
    options.setdefault("destroy", False)
    env = dict(options.pop("env", None) or {})
    return harness.run_ranks(function, nodes, backend=backend, env=env, **options)


def gloo_timeout(backend, seconds):
    """gloo notices many faults by its timeout alone: ten seconds, so that its rows end."""
    return seconds if backend == "hybridps" else 10


# ------------------------------------------------------------------------------------------------ hosts of their own


@contextlib.contextmanager
def namespaces(count, **options):
    """Hosts of their own, h0, h1, ...; `options`: of hosts.Hosts."""
    try:
        made = lab.Hosts([f"h{index}" for index in range(count)], **options)
    except (lab.Failed, OSError, subprocess.SubprocessError) as error:
        raise Skip(f"no network namespaces here: {error}") from None
    try:
        yield made
    finally:
        made.close()


def host_map(made, per_host=1):
    """{rank: (pid that holds its host, its address)}, for `per_host` ranks on each host."""
    hosts = [name for name in made.names for _ in range(per_host)]
    return {rank: (made.holders[name].pid, made.address[name]) for rank, name in enumerate(hosts)}


def on_hosts(made, function, backend, args, hosts=None, per_host=1, **options):
    """`per_host` ranks on each of the first `hosts` hosts, or on all."""
    env = {"HYBRIDPS_INTERFACE": lab.INTERFACE, "GLOO_SOCKET_IFNAME": lab.INTERFACE, **(options.pop("env", None) or {})}
    nodes = "+".join(str(per_host) for _ in made.names[:hosts])
    # The Store is a file: what happens to the links does not happen to it.
    return launch(function, nodes, backend, args=args, env=env, store="file", **options)


def judge_strikes(row, launches, victim, limit_s, reason=None):
    hits = total = 0
    seen = []
    for results in launches:
        survivors = [result for rank, result in enumerate(results) if rank != victim and result]
        hit, count = names_count(survivors, victim)
        hits, total = hits + hit, total + count
        seen += survivors
        for result in survivors:
            row.detected_s.append(result["detected"])
            if row.backend == "hybridps" and named(result["text"]) != [victim]:
                row.bad.append(f"rank {victim} is to blame, but a rank said: {result['text']}")
    row.runs += len(launches)
    row.culprit = f"{hits} of {total}"
    row.left = leftovers(seen)
    if row.backend == "hybridps":
        row.expect(max(row.detected_s, default=99) <= limit_s + SLACK_S, f"seen within {limit_s} s: {row.detection}")
        row.expect(all(not result["destroy_error"] for result in seen), "destroy_process_group after it")
        row.expect(
            all(result["destroyed"] <= 2 + SLACK_S for result in seen),
            f"destroy_process_group within 2 s: {max(result['destroyed'] for result in seen):.1f} s",
        )
        row.expect(all(result.get("again", True) for result in seen), "the survivors work on in a group of their own")
        row.expect(row.left == "nothing", f"nothing left behind: {row.left}")
    return row


def markdown(rows):
    lines = ["| fault | backend | runs | seen after | culprit named | left behind | |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        if row.skipped:
            lines.append(f"| {row.fault} | {row.backend} | 0 | | | | skipped: {row.skipped} |")
            continue
        note = row.note + ("; " if row.note and row.bad else "") + ("**bar missed**" if row.bad else "")
        lines.append(
            f"| {row.fault} | {row.backend} | {row.runs} | {row.detection} | {row.culprit} | {row.left} | {note} |"
        )
    return "\n".join(lines) + "\n"
