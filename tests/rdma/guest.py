"""Inside the emulated machine: two hosts (network namespaces) with a Soft-RoCE device each, and the checks.

Each check is a function that raises Wrong; the last line is "N passed, N failed". The same ranks run over TCP
first, and their results are what those over RDMA must equal bit for bit. Times here say nothing about a real network.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, "/src/scripts")
import hosts  # noqa: E402

BUILD = Path("/share/build")
EXTENSION = Path("/share/build-py/python")  # there with --torch
RANKS, SERVER = BUILD / "tests/rdma/rdma_ranks", BUILD / "bin/hybridps-server"
LIMIT_S = 400
KILL_SEEN_S = 1.0
INTERFACE, MTU = hosts.INTERFACE, 4500
LANE = re.compile(r"inter-node cfg#\d+ .*?am\((\w+)/(\w+)")


class Wrong(Exception):
    pass


def check(condition: bool, what: str) -> None:
    if not condition:
        raise Wrong(what)


class Lab:
    def __init__(self):
        self.hosts = hosts.Hosts(["h0", "h1"], mtu=MTU)
        self.device = {}
        for index, host in enumerate(self.hosts.names):
            self.device[host] = f"rxe{index}"
            self.hosts.enter(host, *f"rdma link add rxe{index} type rxe netdev {INTERFACE}".split())
        for path in Path("/dev/infiniband").glob("*"):
            path.chmod(0o666)  # as rdma-core's udev rules do

    def bytes_sent(self, host: str) -> int:
        shown = json.loads(self.hosts.enter(host, "ip", "-s", "-j", "link", "show", INTERFACE))
        return shown[0]["stats64"]["tx"]["bytes"]

    def start(self, host, command, environment, wrap=()) -> "Process":
        return Process(self, host, [*wrap, *map(str, command)], environment)


class Process:
    def __init__(self, lab: Lab, host: str, command: list, environment: dict):
        self.host = host
        self.out = tempfile.TemporaryFile("w+")
        variables = {
            "PATH": os.environ["PATH"],
            "HYBRIDPS_INTERFACE": INTERFACE,
            "HYBRIDPS_POOL_BYTES": "16M",
            "HYBRIDPS_DEAD_SECONDS": "60",  # several ranks share two emulated cores
            "HYBRIDPS_LOG_LEVEL": "info",
            "UCX_LOG_LEVEL": "info",
            "UCX_HANDLE_ERRORS": "none",
            "UCX_ERROR_SIGNALS": "",
            **environment,
        }
        self.process = lab.hosts.popen(
            host, command, env=variables, stdin=subprocess.DEVNULL, stdout=self.out, stderr=subprocess.STDOUT
        )

    def text(self) -> str:
        self.out.seek(0)
        return self.out.read()

    def wait_for(self, pattern: str, limit_s: float = LIMIT_S) -> None:
        until = time.monotonic() + limit_s
        while not re.search(pattern, self.text(), re.M):
            check(self.process.poll() is None, f"ended before {pattern!r}:\n{self.tail()}")
            check(time.monotonic() < until, f"no {pattern!r} within {limit_s:.0f} s:\n{self.tail()}")
            time.sleep(0.2)

    def end(self, limit_s: float = LIMIT_S) -> int:
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise Wrong(f"did not end within {limit_s:.0f} s:\n{self.tail()}") from None

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)  # nsenter made itself the program
            self.process.wait()

    def tail(self, lines: int = 12) -> str:
        return "\n".join("    " + line[:300] for line in self.text().splitlines()[-lines:])

    def lines(self, word: str) -> list[list[str]]:
        return [line.split(maxsplit=4) for line in self.text().splitlines() if line.startswith(word + " ")]

    def lanes(self) -> set[str]:
        return {f"{transport}/{device}" for transport, device in LANE.findall(self.text())}


class Job:
    """Ranks of rdma_ranks, or of another program that takes the same arguments; `nodes` has a host for each."""

    def __init__(self, lab: Lab, what: str, nodes: list[str], environment=None, wrap=(), each=None, program=(RANKS,)):
        self.folder = tempfile.mkdtemp(prefix="store-", dir="/tmp")
        os.chmod(self.folder, 0o777)
        self.sent_before = {host: lab.bytes_sent(host) for host in lab.hosts.names}
        self.lab = lab
        self.ranks = []
        for rank, host in enumerate(nodes):
            variables = {"HYBRIDPS_NODE": f"{host}-{nodes[:rank].count(host)}" if each else host, **(environment or {})}
            command = [*program, what, rank, len(nodes), self.folder]
            self.ranks.append(lab.start(host, command, variables, wrap))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for rank in self.ranks:
            rank.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def wire_bytes(self) -> dict[str, int]:
        return {host: self.lab.bytes_sent(host) - before for host, before in self.sent_before.items()}

    def finish(self) -> list[list[str]]:
        """Waits for all; the lines with results, rank by rank."""
        results = []
        for number, rank in enumerate(self.ranks):
            code = rank.end()
            if code != 0:
                others = "".join(f"\n  rank {n}:\n{other.tail(6)}" for n, other in enumerate(self.ranks) if n != number)
                raise Wrong(f"rank {number} ended with {code}:\n{rank.tail()}{others}")
            check("DONE" in rank.text(), f"rank {number} did not finish:\n{rank.tail()}")
            results.append([" ".join(words) for words in rank.lines("OP")])
            check(len(results[-1]) > 0, f"rank {number} has no results")
        return results

    def payload_bytes(self) -> dict[str, int]:
        """What the engines of each host sent to other nodes, headers excluded."""
        sent: dict[str, int] = {}
        for rank in self.ranks:
            (words,) = rank.lines("SENT")
            sent[rank.host] = sent.get(rank.host, 0) + int(words[1])
        return sent

    def check_lanes(self) -> None:
        for number, rank in enumerate(self.ranks):
            device = self.lab.device[rank.host]
            check(f"rc_verbs/{device}" in rank.lanes(), f"rank {number} has the lanes {sorted(rank.lanes())}")


TCP = {"HYBRIDPS_DATA_TRANSPORT": "tcp"}
RDMA = {"HYBRIDPS_DATA_TRANSPORT": "rdma"}
results: dict[str, list] = {}


def same(expected, found) -> None:
    for rank, (a, b) in enumerate(zip(expected, found, strict=True)):
        check(len(a) == len(b), f"rank {rank}: {len(a)} results over TCP, {len(b)} over RDMA")
        for x, y in zip(a, b, strict=True):
            check(x == y, f"rank {rank}: over TCP {x}, over RDMA {y}")


def note(text: str) -> None:
    print(f"       {text}", flush=True)


def tcp_runs(lab: Lab) -> None:
    """two hosts over TCP: the results that RDMA has to give"""
    with Job(lab, "collectives", ["h0", "h1"], TCP) as job:
        results["collectives"] = job.finish()
        for rank in job.ranks:
            check(not any("verbs" in lane for lane in rank.lanes()), f"lanes {rank.lanes()}")
    note(f"{len(results['collectives'][0])} operations, {job.payload_bytes()} payload bytes")


def bit_equal(lab: Lab) -> None:
    """two hosts over RDMA, found by itself: every operation bit-equal to TCP; lane rc_verbs; the bytes on the link"""
    with Job(lab, "collectives", ["h0", "h1"]) as job:
        same(results["collectives"], job.finish())
        job.check_lanes()
        wire, payload = job.wire_bytes(), job.payload_bytes()
        lanes = sorted(set().union(*(rank.lanes() for rank in job.ranks)))
    for host in wire:
        check(payload[host] > 0, f"host {host} counts no payload")
        share = wire[host] / payload[host]
        check(1.0 <= share < 1.5, f"host {host}: {wire[host]} bytes on the link for {payload[host]} of payload")
    note(f"lanes {' '.join(lanes)}; payload {payload}, on the link {wire}")


def four_ranks(lab: Lab) -> None:
    """two ranks on each host: shared memory inside, RDMA between, bit-equal to TCP"""
    nodes = ["h0", "h0", "h1", "h1"]
    with Job(lab, "sums", nodes, TCP) as job:
        expected = job.finish()
    with Job(lab, "sums", nodes, RDMA) as job:
        same(expected, job.finish())
        lanes = sorted(set().union(*(rank.lanes() for rank in job.ranks)))
        check(any(lane.startswith("rc_verbs/") for lane in lanes), f"lanes {lanes}")
    note(f"lanes {' '.join(lanes)}")


def dedicated_server(lab: Lab) -> None:
    """three nodes and a dedicated server, over RDMA, bit-equal to TCP"""
    found = {}
    for name, settings in (("tcp", TCP), ("rdma", RDMA)):
        address = lab.hosts.address["h1"]
        server = lab.start("h1", [SERVER, "--no-token", "--listen", f"{address}:0", "--memory", "64M"], settings)
        try:
            server.wait_for(r"listening on")
            port = re.search(r"listening on \S+:(\d+)", server.text())[1]
            used = {"HYBRIDPS_SERVERS": f"{address}:{port}", "HYBRIDPS_SERVERS_REQUIRED": "1", **settings}
            with Job(lab, "sums", ["h0", "h1", "h0"], used, each=True) as job:
                found[name] = job.finish()
            server.process.send_signal(signal.SIGTERM)
            check(server.end() == 0, f"the server ended with {server.process.returncode}:\n{server.tail()}")
            if name == "rdma":
                check(f"rc_verbs/{lab.device['h1']}" in server.lanes(), f"the server's lanes: {server.lanes()}")
                note(f"lanes of the server {' '.join(sorted(server.lanes()))}")
        finally:
            server.kill()
    same(found["tcp"], found["rdma"])


def killed_peer(lab: Lab) -> None:
    """kill -9 of a rank: the control channel tells the other within a second, with the right culprit"""
    with Job(lab, "until-failure", ["h0", "h1"], RDMA) as job:
        survivor, victim = job.ranks
        survivor.wait_for(r"^ROUND 2 ")
        at = time.time()
        victim.kill()
        code = survivor.end(120)
        took = time.time() - at
        check(code == 0, f"the survivor ended with {code}:\n{survivor.tail()}")
        (failed,) = [line.split(maxsplit=2) for line in survivor.text().splitlines() if line.startswith("FAILED ")]
        seen = float(failed[1]) - at
        check(re.search(r"rank 1 \(.*pid \d+\) is gone", failed[2]) is not None, f"culprit: {failed[2]}")
        check(seen < KILL_SEEN_S, f"seen after {seen:.2f} s")
        job.check_lanes()
    note(f"seen after {seen:.3f} s, ended after {took:.1f} s: {failed[2][:150]}")


def lossy_link(lab: Lab) -> None:
    """1 % of the packets lost: the same bits all the same"""
    lab.hosts.enter("h1", *f"tc qdisc add dev {INTERFACE} root netem loss 1% seed 7".split())
    try:
        with Job(lab, "sums", ["h0", "h1"], RDMA) as job:
            lossy = job.finish()
            job.check_lanes()
        shown = lab.hosts.enter("h1", *f"tc -s qdisc show dev {INTERFACE}".split())
    finally:
        lab.hosts.enter("h1", *f"tc qdisc del dev {INTERFACE} root".split())
    dropped = int(re.search(r"dropped (\d+)", shown)[1])
    check(dropped > 0, f"nothing was lost: {shown}")
    with Job(lab, "sums", ["h0", "h1"], TCP) as job:
        same(job.finish(), lossy)
    note(f"{dropped} packets lost")


def cut_link(lab: Lab) -> None:
    """all packets lost: heartbeats name the other rank, and nothing hangs"""
    # Who is first says so in the Store, which both still reach: the other may read there that it is the one that was cut off.
    named = []
    dead_s = 3.0
    with Job(lab, "until-failure", ["h0", "h1"], {**RDMA, "HYBRIDPS_DEAD_SECONDS": str(dead_s)}) as job:
        for rank in job.ranks:
            rank.wait_for(r"^ROUND 2 ")
        at = time.time()
        lab.hosts.enter("h1", *f"tc qdisc add dev {INTERFACE} root netem loss 100%".split())
        try:
            for number, rank in enumerate(job.ranks):
                code = rank.end(180)
                took = time.time() - at
                check(code == 0, f"rank {number} ended with {code}:\n{rank.tail()}")
                (failed,) = [line.split(maxsplit=2) for line in rank.text().splitlines() if line.startswith("FAILED ")]
                seen = float(failed[1]) - at
                gone = re.search(r"rank (\d) \([^)]*\) is gone: it sent no heartbeat", failed[2])
                check(gone is not None, f"rank {number} blames something else: {failed[2]}")
                named.append(int(gone[1]))
                check(seen < dead_s + 10, f"rank {number} saw it after {seen:.1f} s")
                note(f"rank {number}: seen after {seen:.1f} s, ended after {took:.1f} s")
            check(named[0] == 1 or named[1] == 0, f"each rank names itself: {named}")
        finally:
            lab.hosts.enter("h1", *f"tc qdisc del dev {INTERFACE} root".split())


def as_user(locked_kib: int) -> list[str]:
    """A command line's front: another user than root, who may lock this much."""
    user = "setpriv --reuid=1234 --regid=1234 --clear-groups --inh-caps=-all --bounding-set=-all"
    return ["prlimit", f"--memlock={locked_kib * 1024}", *user.split()]


def locked_memory(lab: Lab) -> None:
    """too little locked memory: an error that names both sizes, at once; what it asks for is enough"""
    for limit_kib in (32, 8192):
        begin = time.monotonic()
        with Job(lab, "sums", ["h0"], RDMA, as_user(limit_kib)) as job:
            code = job.ranks[0].end(60)
            text = job.ranks[0].text()
        took = time.monotonic() - begin
        check(code == 1, f"ended with {code}:\n{job.ranks[0].tail()}")
        found = re.search(
            r"ERROR \S+ (.*RDMA needs (\d+) MiB of locked memory .*`ulimit -l` allows (\d+ [KM]iB).*)", text
        )
        check(found is not None, f"the error is: {job.ranks[0].tail()}")
        expected = f"{limit_kib} KiB" if limit_kib < 1024 else f"{limit_kib // 1024} MiB"
        check(found[3] == expected, f"available: {found[3]}, not {expected}")
        note(f"limit {expected}, {took:.1f} s: {found[1][:110]}")
    pinned_kib = 0
    with Job(lab, "sums", ["h0", "h1"], RDMA, as_user(int(found[2]) * 1024)) as job:
        while job.ranks[0].process.poll() is None:
            status = Path(f"/proc/{job.ranks[0].process.pid}/status").read_text()
            pinned = re.search(r"VmPin:\s*(\d+) kB", status)
            pinned_kib = max(pinned_kib, int(pinned[1]) if pinned else 0)
            time.sleep(0.1)
        enough = job.finish()
        job.check_lanes()
    with Job(lab, "sums", ["h0", "h1"], TCP) as job:
        same(job.finish(), enough)
    note(f"asked for {found[2]} MiB, pinned {pinned_kib / 1024:.1f} MiB")
    check(pinned_kib <= int(found[2]) * 1024, "more is pinned than was asked for")


def ddp(lab: Lab) -> None:
    """DistributedDataParallel through torch, two hosts: losses and parameters bit-equal to TCP; lane rc_verbs"""
    program = ("python3", "-u", "/src/tests/rdma/ddp.py")
    python = {"PYTHONPATH": str(EXTENSION), "OMP_NUM_THREADS": "1"}
    with Job(lab, "ddp", ["h0", "h1"], TCP | python, program=program) as job:
        expected = job.finish()
    with Job(lab, "ddp", ["h0", "h1"], RDMA | python, program=program) as job:
        same(expected, job.finish())
        job.check_lanes()
    check(expected[0] == expected[1], f"the ranks differ: {expected}")
    note(f"{len(expected[0]) - 1} steps, torch {(EXTENSION / 'torch').read_text().strip()}")


CHECKS = [tcp_runs, bit_equal, four_ranks, dedicated_server, killed_peer, lossy_link, cut_link, locked_memory]
if EXTENSION.exists():
    CHECKS.append(ddp)


def main() -> int:
    wanted = sys.argv[1:] or ["all"]
    chosen = [function for function in CHECKS if function.__name__ in wanted or "all" in wanted]
    if bit_equal in chosen and tcp_runs not in chosen:
        chosen.insert(0, tcp_runs)
    unknown = set(wanted) - {"all"} - {function.__name__ for function in CHECKS}
    if unknown:
        print(f"0 passed, 1 failed: no check is called {', '.join(sorted(unknown))}")
        return 1
    lab = Lab()
    ucx = subprocess.run(["ucx_info", "-v"], capture_output=True, text=True).stdout.splitlines()[:1]
    print(f"kernel {os.uname().release}, {ucx}")
    passed = failed = 0
    try:
        for function in chosen:
            begin = time.monotonic()
            try:
                function(lab)
            except Exception as error:
                failed += 1
                word = "FAILED"
                if not isinstance(error, Wrong):
                    traceback.print_exc()
                print(f"       {error}")
            else:
                passed += 1
                word = "passed"
            print(f"{word} {function.__name__}: {function.__doc__} ({time.monotonic() - begin:.0f} s)", flush=True)
    finally:
        lab.hosts.close()
    print(f"{passed} passed, {failed} failed", flush=True)
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
