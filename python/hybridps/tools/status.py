"""`hybridps status`: what the jobs on this machine do, also when they hang.

Every process with a hybridps group listens on a socket in a folder that only its user may enter (setting
HYBRIDPS_STATUS). The command asks each process for its state. One process of each job also asks all others, dedicated
servers included. A process that does not answer within half a second is stopped or cut off. The command compares all
answers: no process decides alone which rank is to blame. The command loads neither torch nor the extension.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import stat
import struct
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path

from hybridps.backend.groups import ORDER_TAG, READY_TAG
from hybridps.tools.network import judge_network
from hybridps.tools.output import ranks_text, table

# Seconds. A process answers for itself in milliseconds, 0.3 s after which its own thread gives its engine up; with a group on
# its way it has 0.12 s more to see who is missing. For a job it waits 0.45 s for the others, 0.8 s for more than 32.
ALONE_PATIENCE = 0.7
JOB_PATIENCE = 1.9
FIRST_ANSWERS = 0.45
# What waits for less is on its way.
WAITS_SECONDS = 0.1


def folder() -> Path | None:
    """Where this user's processes listen; None: they do not."""
    chosen = os.environ.get("HYBRIDPS_STATUS", "").strip()
    if chosen in ("off", "0"):
        return None
    if chosen:
        return Path(chosen).expanduser()
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/"):
        return Path(runtime) / "hybridps"
    tmp = os.environ.get("TMPDIR", "")
    return Path(tmp if tmp.startswith("/") else "/tmp") / f"hybridps-{os.geteuid()}"


def not_ours(place: Path) -> str:
    """Why the folder is not one whose processes are to be believed; empty: it is, or there is none. Another user may have made
    one of that name first, for processes of his own. Root may name another user's folder by HYBRIDPS_STATUS."""
    try:
        found = place.lstat()
    except OSError:
        return ""
    named_by_root = os.geteuid() == 0 and os.environ.get("HYBRIDPS_STATUS", "").strip()
    if stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077 and (found.st_uid == os.geteuid() or named_by_root):
        return ""
    return f"{place} is not a folder of this user alone (mode 0700)"


def printable(value):
    """An answer without what a terminal would obey: its texts come from other processes, also of other machines."""
    if isinstance(value, str):
        if value.isprintable():
            return value
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in value)
    if isinstance(value, list):
        return [printable(one) for one in value]
    if isinstance(value, dict):
        return {printable(name): printable(one) for name, one in value.items()}
    return value


def forbidden() -> str:
    """Why no process here can ask or be asked; empty: they can."""
    try:
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM).close()
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EACCES, errno.EAFNOSUPPORT):
            return ""
        return f"Unix sockets (AF_UNIX) cannot be made here: {error.strerror}"
    return ""


def ask(path: Path, question: str, patience: float) -> dict:
    """One process: {"pid", "path", "text" or "problem"}; `gone`: nobody listens there any more."""
    found: dict = {"path": str(path), "pid": None}
    deadline = time.monotonic() + patience
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
        link.settimeout(patience)
        try:
            link.connect(str(path))
            # Of who listens there, by the kernel's word.
            found["pid"], uid, _ = struct.unpack("iII", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid != path.parent.stat().st_uid:
                raise PermissionError
            link.sendall(question.encode() + b"\n")
            parts = []
            while True:
                link.settimeout(max(0.001, deadline - time.monotonic()))
                part = link.recv(1 << 16)
                if not part:
                    break
                parts.append(part)
            text = json.loads(b"".join(parts).decode(errors="replace") or "null") or {}
            # "own" and "answers" hold JSON again: _parsed() makes their texts printable.
            found["text"] = {name: one if name in ("own", "answers") else printable(one) for name, one in text.items()}
            if not text:
                found["problem"] = "it does not let this user ask"
        except TimeoutError:
            found["problem"] = f"it does not answer within {patience:g} s"
        except PermissionError:
            found["problem"] = "it is another user's"
        except OSError as error:
            found["gone"] = True
            found["problem"] = error.strerror or str(error)
        except (ValueError, AttributeError):
            found["problem"] = "its answer cannot be read"
    return found


def process_state(pid: int | None) -> str:
    """The kernel's letter for a process of this machine: "T" stopped, "t" traced; empty: not known."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().decode(errors="replace").rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return ""


def _parsed(text: str) -> dict | None:
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return printable(found) if isinstance(found, dict) else None


def _world(snapshot: dict) -> dict | None:
    groups = snapshot.get("groups", [])
    # Of the lives of a world the newest: one that has failed, or that its members leave, may still be there for a while.
    worlds = [group for group in groups if group.get("world")]
    worlds = [group for group in worlds if not group.get("leaving") and group.get("state") != "failed"] or worlds
    return worlds[-1] if worlds else max(groups, key=lambda group: group.get("size", 0), default=None)


def _key(snapshot: dict) -> str:
    """Processes with the same key are of one job."""
    world = _world(snapshot) or {}
    return world.get("uid") or snapshot.get("job") or f"pid {snapshot.get('pid')}"


def _sockets(place: Path | None) -> list[Path]:
    try:
        return sorted(place.glob("*.sock")) if place and not not_ours(place) else []
    except OSError:
        return []


def collect(place: Path | None = None) -> tuple[list[dict], list[dict]]:
    """(jobs, processes of this machine that did not answer). A job: {"job", "engines": {engine: snapshot}, "silent": [...],
    "asked": the engine that asked the others, "seconds"}."""
    place = place or folder()
    sockets = _sockets(place)
    if not sockets:
        return [], []
    started = time.monotonic()
    with ThreadPoolExecutor(max_workers=min(64, 2 * len(sockets))) as pool:
        firsts = [pool.submit(ask, path, "alone", ALONE_PATIENCE) for path in sockets]
        wait_for(firsts, timeout=FIRST_ANSWERS)
        askers: dict[str, Future] = {}

        def begin(future: Future) -> None:
            own = _parsed((future.result().get("text") or {}).get("own", "")) if future.done() else None
            if own and _key(own) not in askers:
                askers[_key(own)] = pool.submit(ask, Path(future.result()["path"]), "job", JOB_PATIENCE)

        for future in firsts:
            begin(future)
        wait_for(firsts)
        for future in firsts:  # those that were late
            begin(future)
        wait_for(list(askers.values()))
    answers = [future.result() for future in firsts]
    jobs: dict[str, dict] = {}

    def job_of(snapshot: dict) -> dict:
        key = _key(snapshot)
        job = jobs.setdefault(key, {"key": key, "job": "", "engines": {}, "silent": [], "asked": None})
        job["job"] = job["job"] or snapshot.get("job") or ""
        return job

    unheard = []
    for answer in answers:
        text = answer.get("text") or {}
        own = _parsed(text.get("own", ""))
        if own:
            job_of(own)["engines"].setdefault(own["engine"], own)
        elif not answer.get("gone"):
            rank = Path(answer["path"]).name.split(".")[1].split("-")[0]
            unheard.append(
                {
                    "pid": answer["pid"],
                    "rank": int(rank) if rank.isdigit() else None,
                    "problem": text.get("stuck") or answer.get("problem", ""),
                    "state": process_state(answer["pid"]),
                }
            )
    for future in askers.values():
        text = future.result().get("text") or {}
        own = _parsed(text.get("own", ""))
        if not own:
            continue
        job = job_of(own)
        job["asked"] = own["engine"]
        job["engines"][own["engine"]] = own
        for answer in text.get("answers", []):
            other = _parsed(answer.get("text", ""))
            if other:
                job["engines"].setdefault(other["engine"], other)
        job["silent"] = text.get("silent", [])
    # Some ranks may have the roster, and with it the group's number, before others.
    for key in [key for key, job in jobs.items() if key == job["job"]]:
        same = [job for job in jobs.values() if job["job"] == key and job["key"] != key]
        if len(same) == 1:
            same[0]["engines"] = {**jobs.pop(key)["engines"], **same[0]["engines"]}
    pids = {process["pid"]: process for process in unheard}
    for job in jobs.values():
        job["seconds"] = time.monotonic() - started
        for silent in job["silent"]:
            pid = silent["where"].rsplit("pid ", 1)[-1]
            silent["state"] = pids.get(int(pid), {}).get("state", "") if pid.isdigit() else ""
        named = {silent["where"].rsplit("pid ", 1)[-1] for silent in job["silent"]}
        unheard = [process for process in unheard if str(process["pid"]) not in named]
    return list(jobs.values()), unheard


# --- what follows ----------------------------------------------------------------------------------------------------


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.0f} min"


def members_of(job: dict) -> list[dict]:
    """The world's members, ranks first: {"engine", "where", "node", "server"}."""
    worlds = [world for snapshot in job["engines"].values() if (world := _world(snapshot)) and world.get("members")]
    return max(worlds, key=lambda world: bool(world.get("world")), default={"members": []})["members"]


def groups_of(job: dict) -> dict[str, dict]:
    """Groups by uid (name while they have none): {"name", "world", "size", "by_rank": {rank: what it says of the group}}."""
    found: dict[str, dict] = {}
    for engine, snapshot in job["engines"].items():
        for group in snapshot.get("groups", []):
            key = group.get("uid") or f"joining {group['name']}"
            entry = found.setdefault(
                key, {"name": group["name"], "world": group.get("world"), "size": group["size"], "by_rank": {}}
            )
            entry["by_rank"][group["rank"]] = {**group, "engine": engine, "host": snapshot["host"], "pid": snapshot["pid"]}
    return found


def _judge_group(group: dict, findings: list[dict]) -> None:
    by_rank = group["by_rank"]
    name = "" if group["world"] else f' of group "{group["name"]}"'
    failures = {rank: g["failure"] for rank, g in by_rank.items() if g.get("state") == "failed" and g.get("failure")}
    if failures:
        rank, text = min(failures.items())
        findings.append({"kind": "failed", "group": group["name"], "ranks": [], "text": f"the group{name} has failed: {text}"})
    elif any(g.get("state") == "joining" for g in by_rank.values()):
        _judge_joining(group, name, findings)
    else:
        _judge_messages(group, name, findings)
        _judge_oldest(group, name, findings)


def _who(group: dict, rank: int) -> str:
    return f"rank {rank} ({group['by_rank'][rank]['host']} pid {group['by_rank'][rank]['pid']})"


def _judge_joining(group: dict, name: str, findings: list[dict]) -> None:
    joining = {rank: g for rank, g in group["by_rank"].items() if g.get("state") == "joining"}
    waited = max(g.get("since_seconds", 0) for g in joining.values())
    said = [g["waiting_for"] for _, g in sorted(joining.items()) if g.get("waiting_for")]
    # The lowest rank knows best: rank 0 has the records. Those of other machines cannot be asked yet.
    named = re.search(r"ranks \[([\d, ]+)\]", said[0]) if said else None
    missing = [int(rank) for rank in named[1].split(",")] if named else sorted(set(range(group["size"])) - set(group["by_rank"]))
    if waited >= WAITS_SECONDS:
        text = f"{ranks_text(sorted(joining))}{name}: waiting for the group to be complete since {_seconds(waited)}"
        text += f": {said[0]}" if said else ""
        findings.append({"kind": "missing", "group": group["name"], "ranks": missing, "text": text})


def _judge_messages(group: dict, name: str, findings: list[dict]) -> None:
    between_rounds: dict[int, float] = {}
    for rank, g in sorted(group["by_rank"].items()):
        waiting = [message for message in g.get("messages", []) if message["seconds"] >= WAITS_SECONDS]
        # These receives are there while the ranks compute: nobody is late for them.
        usual = [message for message in waiting if not message["sending"] and message["tag"] in (READY_TAG, ORDER_TAG)]
        between_rounds |= {rank: message["seconds"] for message in usual if message["tag"] == ORDER_TAG}
        for message in [message for message in waiting if message not in usual][:1]:
            other = "any rank" if message["peer"] < 0 else f"rank {message['peer']}"
            doing = f"waits for {other} to take" if message["sending"] else f"waits for {other} to send"
            findings.append(
                {
                    "kind": "message",
                    "group": group["name"],
                    "ranks": [message["peer"]] if message["peer"] >= 0 else [],
                    "text": f"{_who(group, rank)}{name} {doing} a message of {message['bytes']} bytes (tag {message['tag']}) "
                    f"since {_seconds(message['seconds'])}",
                }
            )
    if between_rounds:
        findings.append(
            {
                "kind": "busy",
                "group": group["name"],
                "ranks": [],
                "waiting": sorted(between_rounds),
                "seconds": max(between_rounds.values()),
                "text": f"{ranks_text(sorted(between_rounds))}{name}: no round of LocalSteps has begun for "
                f"{_seconds(max(between_rounds.values()))}",
            }
        )


def _judge_oldest(group: dict, name: str, findings: list[dict]) -> None:
    """The oldest operation that waits, and for whom."""
    by_rank = group["by_rank"]
    oldest: tuple[int, int, dict] | None = None
    for rank, g in sorted(by_rank.items()):
        for operation in g.get("pending", [])[:1]:
            if operation["seconds"] >= WAITS_SECONDS and (oldest is None or operation["sequence"] < oldest[0]):
                oldest = (operation["sequence"], rank, operation)
    if oldest is None:
        return
    sequence, _, operation = oldest
    late = sorted(rank for rank, g in by_rank.items() if g.get("submitted", 0) <= sequence)
    waiting = sorted(
        rank for rank, g in by_rank.items() if any(o["sequence"] == sequence for o in g.get("pending", []))
    )
    if late:
        described = []
        for rank in late[:3]:
            g = by_rank[rank]
            if g.get("pending"):
                described.append(f"{_who(group, rank)} is in seq {g['pending'][0]['sequence']}, {g['pending'][0]['what']}")
            elif g.get("submitted", 0) == 0:
                described.append(f"{_who(group, rank)} has not called an operation of this group")
            else:
                since = f" {_seconds(g['since_last_seconds'])} ago" if "since_last_seconds" in g else ""
                described.append(
                    f"{_who(group, rank)} finished seq {g['finished'] - 1}, {g.get('last', 'its last')},{since} and is in its own "
                    "program since"
                )
        findings.append(
            {
                "kind": "late",
                "group": group["name"],
                "ranks": late,
                "waiting": waiting,
                "sequence": sequence,
                "seconds": operation["seconds"],
                "text": f"{ranks_text(waiting)}{name} wait for {ranks_text(late)} since {_seconds(operation['seconds'])} in seq "
                f"{sequence}, {operation['what']}: {'; '.join(described)}",
            }
        )
        return
    owing = sorted({server for g in by_rank.values() for o in g.get("pending", []) for server in o["servers_owing"]})
    done = f"{operation['chunks_done']}/{operation['chunks']} chunks done"
    text = f"{ranks_text(waiting)}{name} are in seq {sequence}, {operation['what']}, since {_seconds(operation['seconds'])}; {done}"
    if owing and operation["seconds"] >= 1:
        text += f"; owed by dedicated servers {owing}"
    findings.append(
        {
            "kind": "busy",
            "group": group["name"],
            "ranks": [],
            "waiting": waiting,
            "sequence": sequence,
            "seconds": operation["seconds"],
            "text": text,
        }
    )


def judge(job: dict) -> list[dict]:
    """What is the matter, the worst first: {"kind", "ranks" (group ranks to blame), "text", ...}. Kinds: "stopped" (by SIGSTOP or
    a debugger), "silent", "failed", "missing" (has not come to a group), "late" (has not called an operation in which others
    wait), "message", "slow card", "slow path", "busy" (an operation on its way)."""
    findings: list[dict] = []
    members = members_of(job)
    rank_of = {member["engine"]: rank for rank, member in enumerate(members)}
    for silent in job["silent"]:
        rank = rank_of.get(silent["engine"])
        is_server = rank is not None and members[rank]["server"]
        name = f"the dedicated server {silent['where']}" if is_server else f"rank {rank} ({silent['where']})"
        stopped = silent.get("state") in ("T", "t")
        heard = silent["heard_seconds"]
        why = "is stopped (SIGSTOP or a debugger)" if stopped else "does not answer: stopped, or cut off from the network"
        findings.append(
            {
                "kind": "stopped" if stopped else "silent",
                "ranks": [rank] if rank is not None and not is_server else [],
                "engine": silent["engine"],
                "text": f"{name} {why}; {f'last heard {_seconds(heard)} ago' if heard >= 0 else 'never heard'}",
            }
        )
    dead = {
        peer["engine"]: peer["where"]
        for snapshot in job["engines"].values()
        for peer in snapshot.get("peers", [])
        if peer.get("dead")
    }
    for engine, where in dead.items():
        if engine in job["engines"]:
            continue
        rank = rank_of.get(engine)
        findings.append(
            {
                "kind": "dead",
                "ranks": [rank] if rank is not None and not members[rank]["server"] else [],
                "engine": engine,
                "text": f"{'a server' if rank is None or members[rank]['server'] else f'rank {rank}'} ({where}) is gone",
            }
        )
    for group in groups_of(job).values():
        _judge_group(group, findings)
    judge_network(job, members, findings)
    order = ["stopped", "silent", "dead", "failed", "missing", "slow card", "slow path", "late", "message", "busy"]
    return sorted(findings, key=lambda finding: order.index(finding["kind"]))


# --- printing --------------------------------------------------------------------------------------------------------


def _rate(value: float) -> str:
    return f"{8e-9 * value:.2f}" if value else "-"


def report(job: dict) -> str:
    members = members_of(job)
    rank_of = {member["engine"]: rank for rank, member in enumerate(members)}
    answered = len(job['engines'])
    lines = [f"job {job['job'] or job['key']}: {answered} process{'es' * (answered != 1)} answered, {len(job['silent'])} did not"]
    for snapshot in job["engines"].values():
        world = _world(snapshot)
        if world and world.get("summary"):
            lines.append(f"  {world['summary']}")
            break
    rows = [["RANK", "HOST", "PID", "OUT", "IN", "LIMIT (Gbit/s)", "PENDING", "OLDEST", "DONE", "PLAN", "MEMORY"]]

    def place(snapshot: dict) -> tuple[int, int]:
        world = _world(snapshot) or {}
        return (snapshot["role"] == "server", rank_of.get(snapshot["engine"], world.get("rank", 0)))

    for snapshot in sorted(job["engines"].values(), key=place):
        world = _world(snapshot) or {}
        pending = sum(g.get("pending_count", 0) + len(g.get("messages", [])) for g in snapshot.get("groups", []))
        ages = [o["seconds"] for g in snapshot.get("groups", []) for o in g.get("pending", []) + g.get("messages", [])]
        share = world.get("shares") or []
        net = snapshot.get("net") or {}  # a server with several jobs does not tell
        rows.append(
            [
                "server" if snapshot["role"] == "server" else str(rank_of.get(snapshot["engine"], world.get("rank", "?"))),
                snapshot["host"],
                str(snapshot["pid"]),
                _rate(net.get("tx_bytes_per_second", 0)),
                _rate(net.get("rx_bytes_per_second", 0)),
                _rate(snapshot["limit_bytes_per_second"]),
                str(pending),
                _seconds(max(ages)) if ages else "-",
                f"seq {world['finished'] - 1}" if world.get("finished") else "-",
                f"{world.get('plan_version', 0)}: {'/'.join(f'{100 * s:.0f}' for s in share[:8])} %" if share else "-",
                f"{snapshot['memory']['pool_slots_in_use']} slots" if "memory" in snapshot else "-",
            ]
        )
    lines += ["  " + line for line in table(rows).splitlines()]
    codecs = {snapshot["compress"] for snapshot in job["engines"].values() if snapshot.get("compress")}
    if codecs:
        lines.append(f"  compression: {', '.join(sorted(codecs))}")
    packing = Counter(
        peer["packing"]
        for snapshot in job["engines"].values()
        for peer in snapshot.get("peers", [])
        if not peer["local"] and "packing" in peer
    )
    if packing:
        states = (f"{state} ({count} paths)" for state, count in packing.most_common())
        lines.append(f"  packing without loss, by paths between nodes: {', '.join(states)}")
    for snapshot in job["engines"].values():
        tuner = (_world(snapshot) or {}).get("tuner")
        if tuner:
            state = "at rest" if tuner["resting"] else "under way"
            kept = [tried["what"] for tried in tuner["tried"] if tried["kept"]]
            lines.append(
                f"  tuner {state}: {tuner['trials']} changes tried, {tuner['kept']} kept" + (f" (last {kept[-1]})" if kept else "")
            )
    findings = judge(job)
    lines += [f"  {'.' if finding['kind'] == 'busy' else '!'} {finding['text']}" for finding in findings]
    if not findings:
        lines.append("  nobody waits")
    return "\n".join(lines)


def _one(process: dict) -> str:
    rank = "" if process["rank"] is None else f" (rank {process['rank']} of its first group)"
    why = "is stopped (SIGSTOP or a debugger)" if process["state"] in ("T", "t") else f"did not answer: {process['problem']}"
    return f"! process {process['pid']}{rank} {why}"


def show(as_json: bool, wanted: str | None) -> int:
    jobs, unheard = collect()
    found = [job["job"] or job["key"] for job in jobs]
    if wanted:
        jobs = [
            job
            for job in jobs
            if wanted in (job["job"], job["key"]) or wanted in {str(s["pid"]) for s in job["engines"].values()}
        ]
    for job in jobs:
        job["findings"] = judge(job)
    if as_json:
        print(json.dumps({"jobs": jobs, "unheard": unheard}, indent=1))
    else:
        for job in jobs:
            print(report(job))
        for process in unheard:
            print(_one(process))
        if not jobs and not unheard:
            place = folder()
            where = (not_ours(place) or f"none listens in {place}") if place else "HYBRIDPS_STATUS is off"
            if wanted and found:
                where = f"none is called {wanted}; there are {', '.join(found)}"
            print(f"hybridps: no job of this user on this machine: {where}", file=sys.stderr)
    return 0 if jobs or unheard else 2


def add_arguments(parser) -> None:
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--watch", action="store_true", help="repeat every second, until Ctrl-C")
    parser.add_argument("--trace", metavar="DIR", help="begin traces of this machine's processes (`hybridps trace`)")
    parser.add_argument("--trace-stop", action="store_true", help="end the traces")
    parser.add_argument("--job", metavar="NAME", help="one job: its name, or the process id of one of its ranks here")


def trace(into: str | None) -> int:
    """Begins traces of all processes of this machine's jobs, or ends them (None)."""
    place = folder()
    sockets = _sockets(place)
    failed = 0
    for path in sockets:
        answer = ask(path, f"trace start {Path(into).absolute()}" if into else "trace stop", JOB_PATIENCE + 2)
        problem = answer.get("problem") or (answer.get("text") or {}).get("error")
        if answer.get("gone"):
            continue
        failed += bool(problem)
        print(f"process {answer['pid']}: {problem or ('tracing' if into else 'stopped')}")
    if not sockets:
        why = not_ours(place) if place else ""
        print(f"hybridps: no job of this user on this machine{why and ': ' + why}", file=sys.stderr)
    return 2 if not sockets else 1 if failed else 0


def run(arguments) -> int:
    if problem := forbidden():
        print(f"hybridps: {problem}; ask from outside the sandbox", file=sys.stderr)
        return 2
    if arguments.trace or arguments.trace_stop:
        return trace(arguments.trace)
    if not arguments.watch:
        return show(arguments.json, arguments.job)
    stop = threading.Event()
    try:
        while not stop.is_set():
            if not arguments.json:
                print("\x1b[2J\x1b[H", end="")
            show(arguments.json, arguments.job)
            sys.stdout.flush()
            stop.wait(1)
    except KeyboardInterrupt:
        pass
    return 0
