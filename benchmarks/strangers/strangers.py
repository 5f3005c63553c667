"""How much slower a job is while strangers knock at its ports: three ranks on this host, each a node of its own.

    benchmarks/strangers/run [--rate 10000] [--kind all] [--security tls] [--rounds 5] [--seconds 2] [--output FILE]

Every round has three phases, and the next round begins with another one of them:

quiet      no stranger
elsewhere  strangers at a port of another process of this host, which accepts, reads once and closes
ranks      the same strangers at all ports that the ranks listen on

A phase times all_reduce of 64 B, and of 16 MiB with random mantissas. What is printed is the speed of one phase beside
another of the same round, 1.00 where strangers cost nothing; medians over rounds. elsewhere / quiet is what strangers
and a process that answers them take from this machine, so ranks / elsewhere is the job's own part. Look at the rates
that were reached: on few cores they are less than was asked for, and not the same. Needs no root.

Kinds of strangers, in turn (all), or one of them:

noise      random bytes, half of them behind a right beginning
silent     says nothing
half       a whole ClientHello of TLS 1.3, and then nothing
slow       a right beginning, a byte a second

The last 600 stay open; what is closed is reset, so that no port waits.
"""

import argparse
import collections
import ctypes
import json
import math
import multiprocessing
import os
import secrets
import signal
import socket
import ssl
import statistics
import struct
import sys
import time
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from ports import BEGINNINGS, listening_ports  # noqa: E402

WORLD = 3
SIZES = {"64 B": 64, "16 MiB": 16 << 20}
PHASES = ("quiet", "elsewhere", "ranks")
# Of a speed: what is timed, and beside what.
SPEEDS = (("elsewhere", "quiet"), ("ranks", "quiet"), ("ranks", "elsewhere"))
KINDS = ("noise", "silent", "half", "slow")
KEPT_MAX = 600
SETTLE_S = 0.2  # from the beginning or end of strangers to the first operation
LIMIT_S = 60  # for whatever should take a moment

PR_SET_PDEATHSIG = 1
processes = multiprocessing.get_context("fork")


class Failed(Exception):
    pass


def say(text=""):
    print(text, flush=True)


# ------------------------------------------------------------------------------------------------ processes


class Child:
    """A forked process that runs function(pipe, ...). It dies with this one."""

    def __init__(self, name, function, *arguments):
        self.name = name
        self.pipe, theirs = processes.Pipe()
        self._process = processes.Process(target=self._main, args=(theirs, function, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def _main(self, pipe, function, *arguments):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
        try:
            function(pipe, *arguments)
        except Exception as error:
            pipe.send(Failed(f"{self.name}: {type(error).__name__}: {error}"))
            sys.exit(1)

    def tell(self, what):
        try:
            self.pipe.send(what)
        except OSError:
            pass  # it has ended, and hear() says why

    def hear(self, limit_s=LIMIT_S):
        return hear_all([self], limit_s)[0]

    def take(self):
        try:
            told = self.pipe.recv()
        except (EOFError, OSError):
            self._process.join(5)
            raise Failed(f"{self.name} ended with exit code {self._process.exitcode}") from None
        if isinstance(told, Failed):
            raise told
        return told

    def kill(self):
        self._process.kill()
        self._process.join()
        self.pipe.close()


def hear_all(children, limit_s=LIMIT_S):
    """What each says. The first that fails is the one to name: the others fail behind it."""
    told, end = {}, time.monotonic() + limit_s
    while waiting := [child for child in children if child not in told]:
        ready = connection.wait([child.pipe for child in waiting], max(0.0, end - time.monotonic()))
        if not ready:
            raise Failed(f"{waiting[0].name} has not answered for {limit_s:g} s")
        told |= {child: child.take() for child in waiting if child.pipe in ready}
    return [told[child] for child in children]


# ------------------------------------------------------------------------------------------------ strangers


def client_hello():
    hello = ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.wrap_bio(ssl.MemoryBIO(), hello).do_handshake()
    except ssl.SSLWantReadError:
        pass
    return hello.read()


def words(kind):
    """[(what a stranger says at once, what it says a byte a second)]: enough that they differ."""
    if kind == "noise":
        texts = [(os.urandom(1 + index % 80), BEGINNINGS[index % 2] + os.urandom(200)) for index in range(128)]
        return [(text, b"") for pair in texts for text in pair]
    if kind == "half":
        return [(client_hello(), b"")]
    if kind == "slow":
        return [(beginning[:1], beginning[1:]) for beginning in BEGINNINGS]
    return [(b"", b"")]


def strangers(pipe, rate, kinds):
    """Told where to go: opens `rate` connections a second there. Told None: says how many it has opened, how many did
    not come in, and the rate."""
    vocabulary = [words(kind) for kind in kinds]
    reset = struct.pack("ii", 1, 0)  # SO_LINGER
    making = socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK
    while True:
        targets = pipe.recv()
        kept, slow = collections.deque(), collections.deque()
        tries = missed = 0
        begin = slow_said = time.monotonic()
        while True:
            now = time.monotonic()
            is_ahead = tries >= (now - begin) * rate
            if (is_ahead or tries % 64 == 0) and pipe.poll():
                break
            if now - slow_said > 1:
                slow_said = now
                for _ in range(len(slow)):
                    stranger, rest = slow.popleft()
                    try:
                        stranger.send(rest[:1])
                        if len(rest) > 1:
                            slow.append((stranger, rest[1:]))
                    except OSError:
                        pass  # it was cut, or has gone
            if is_ahead:
                time.sleep(0.001)
                continue
            # Every port hears each kind, and all that it may say.
            turn, where = divmod(tries, len(targets))
            said, kind = divmod(turn, len(vocabulary))
            word, rest = vocabulary[kind][said % len(vocabulary[kind])]
            tries += 1
            stranger = socket.socket(*making)
            try:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                stranger.connect_ex(targets[where])  # on loopback the other side has taken it when this returns
                stranger.send(word)
            except BlockingIOError:
                missed += 1  # too many wait there to be accepted
            except ConnectionResetError:
                pass  # it came in, and was cut before it said anything
            except OSError:
                missed += 1
            kept.append(stranger)
            if rest:
                slow.append((stranger, rest))
                if len(slow) > KEPT_MAX:
                    slow.popleft()
            if len(kept) > KEPT_MAX:
                kept.popleft().close()
        took = time.monotonic() - begin
        for stranger in kept:
            stranger.close()
        pipe.recv()
        pipe.send({"opened": tries - missed, "missed": missed, "rate": (tries - missed) / took})


def elsewhere(pipe):
    """The other process: says its port, then accepts, reads once and closes."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    pipe.send(listener.getsockname())
    while True:
        stranger, _ = listener.accept()
        try:
            stranger.recv(4096, socket.MSG_DONTWAIT)
        except OSError:
            pass  # it says nothing, or has gone
        stranger.close()


# ------------------------------------------------------------------------------------------------ ranks


def store(pipe):
    """The c10d Store in a process of its own, as under torchrun: its port is none of the ranks'."""
    import torch.distributed as dist

    hosted = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=LIMIT_S), wait_for_workers=False)
    pipe.send(hosted.port)
    pipe.recv()


def rank(pipe, number, backend, port):
    os.environ |= {"RANK": str(number), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "HYBRIDPS_NODE": f"node{number}"}
    import torch
    import torch.distributed as dist

    # What a rank writes to the Store before another one's process is there counts as left from an earlier life.
    pipe.recv()
    torch.set_num_threads(1)
    limit = timedelta(seconds=LIMIT_S)
    shared = dist.TCPStore("127.0.0.1", port, None, False, limit)
    dist.init_process_group(backend, store=shared, rank=number, world_size=WORLD, timeout=limit)
    same = torch.Generator().manual_seed(1)  # on all ranks
    fresh = {size: torch.randn(size // 4, generator=same) for size in SIZES.values()}
    # In any order: 2 x is exact, and x + 2 x rounds once, as 3 x does.
    wanted = {size: WORLD * values for size, values in fresh.items()}
    work = {size: values.clone() for size, values in fresh.items()}
    go_on = torch.ones(1)

    def measure(size, seconds):
        """The median time of an operation, and how many there were, all right."""
        tensor, times = work[size], []
        end = time.monotonic() + seconds
        go_on.fill_(1)
        while go_on.item() > 0:
            for _ in range(20 if size <= 65536 else 1):
                tensor.copy_(fresh[size])  # sums of sums grow
                start = time.perf_counter()
                dist.all_reduce(tensor)
                times.append(time.perf_counter() - start)
                if not torch.equal(tensor, wanted[size]):
                    raise Failed(f"rank {number}: a wrong sum")
            # All start the next one together.
            go_on.fill_(float(number == 0 and time.monotonic() < end))
            dist.all_reduce(go_on, dist.ReduceOp.MAX)
        return statistics.median(times), len(times)

    for size in SIZES.values():
        measure(size, 0.5)
    pipe.send(listening_ports())
    while order := pipe.recv():
        pipe.send(measure(*order))
    dist.destroy_process_group()
    pipe.send("done")


# ------------------------------------------------------------------------------------------------ the whole


def time_all(ranks, size, seconds):
    for one in ranks:
        one.tell((size, seconds))
    told = hear_all(ranks, seconds + LIMIT_S)
    return statistics.fmean(median for median, _ in told), told[0][1]


def measure(options):
    """The ports, and the rounds: {phase: {"times": {size: seconds}, "strangers": what they say}}."""
    children = []

    def begin(*what):
        children.append(Child(*what))
        return children[-1]

    try:
        port = begin("the Store", store).hear()
        other = begin("the process elsewhere", elsewhere).hear()
        crowd = begin("the strangers' process", strangers, options.rate, options.kinds)
        ranks = [begin(f"rank {number}", rank, number, options.backend, port) for number in range(WORLD)]
        for one in ranks:
            one.tell("all are there")
        ports = sorted({at for one in hear_all(ranks, 2 * LIMIT_S) for at in one})
        targets = {"elsewhere": [other], "ranks": ports}
        if not ports:
            raise Failed(f"the ranks of {options.backend} listen on no TCP port")
        rounds = []
        for index in range(options.rounds):
            first = index % len(PHASES)
            rounds.append({})
            for phase in PHASES[first:] + PHASES[:first]:
                if phase in targets:
                    crowd.tell(targets[phase])
                time.sleep(SETTLE_S)
                found = {name: time_all(ranks, size, options.seconds) for name, size in SIZES.items()}
                rounds[-1][phase] = {
                    "times": {name: took for name, (took, _) in found.items()},
                    "operations": {name: count for name, (_, count) in found.items()},
                }
                if phase in targets:
                    crowd.tell(None)
                    rounds[-1][phase]["strangers"] = crowd.hear()
            times = {name: [1e3 * rounds[-1][phase]["times"][name] for phase in PHASES] for name in SIZES}
            texts = [f"{name} " + " / ".join(f"{ms:.3g}" for ms in row) for name, row in times.items()]
            say(f"[strangers] round {index + 1} of {options.rounds}, ms {' / '.join(PHASES)}: {', '.join(texts)}")
        for one in ranks:
            one.tell(None)
        hear_all(ranks)
        return ports, rounds
    finally:
        for child in children:
            child.kill()


def summarise(rounds):
    speeds = {}
    for name in SIZES:
        for what, beside in SPEEDS:
            ratios = [one[beside]["times"][name] / one[what]["times"][name] for one in rounds]
            speeds.setdefault(name, {})[f"{what}/{beside}"] = {
                "median": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
            }
    return {
        "times": {n: {p: statistics.median(one[p]["times"][n] for one in rounds) for p in PHASES} for n in SIZES},
        "speeds": speeds,
        "rates": {p: statistics.median(one[p]["strangers"]["rate"] for one in rounds) for p in PHASES[1:]},
    }


def table(found):
    def shown(speed):
        return f"{speed['median']:.2f} ({speed['least']:.2f} to {speed['most']:.2f})"

    names = [f"{what} / {beside}" for what, beside in SPEEDS]
    lines = [f"| | {' | '.join(f'{phase}, ms' for phase in PHASES)} | {' | '.join(names)} |"]
    lines.append("|---" * (1 + len(PHASES) + len(SPEEDS)) + "|")
    for name in SIZES:
        times = " | ".join(f"{1e3 * found['times'][name][phase]:.3g}" for phase in PHASES)
        lines.append(f"| {name} | {times} | {' | '.join(map(shown, found['speeds'][name].values()))} |")
    return "\n".join(lines)


def main():
    def positive(text, kind=float):
        value = kind(text)
        if not (value > 0 and math.isfinite(value)):
            raise ValueError
        return value

    def count(text):
        return positive(text, int)

    parser = argparse.ArgumentParser(
        prog="benchmarks/strangers/run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", type=positive, default=10_000, help="connections a second (default %(default)s)")
    parser.add_argument("--kind", choices=("all", *KINDS), default="all", help="of strangers (default %(default)s)")
    parser.add_argument("--security", choices=("tls", "off"), default="tls", help="(default %(default)s)")
    parser.add_argument("--rounds", type=count, default=5, help="of three phases (default %(default)s)")
    parser.add_argument("--seconds", type=positive, default=2, help="for a size in a phase (default %(default)s)")
    parser.add_argument("--backend", choices=("hybridps", "gloo"), default="hybridps", help="(default %(default)s)")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="setting for the ranks")
    parser.add_argument("--output", type=Path, metavar="FILE", help="all figures as JSON")
    options = parser.parse_args()
    if wrong := [pair for pair in options.env if "=" not in pair]:
        parser.error(f"--env {wrong[0]}: NAME=VALUE")
    if options.backend != "hybridps" and options.security == "tls":
        parser.error(f"{options.backend} has no TLS here: --security off")
    if options.output and not options.output.parent.is_dir():
        parser.error(f"--output: there is no folder {options.output.parent}")
    options.kinds = KINDS if options.kind == "all" else (options.kind,)

    for name in list(os.environ):
        if name.startswith(("HYBRIDPS_", "UCX_", "GLOO_", "MASTER_", "TORCHELASTIC_")):
            del os.environ[name]
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "WORLD_SIZE": str(WORLD)}
    os.environ |= {"HYBRIDPS_INTERFACE": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    if options.security == "tls":
        os.environ |= {"HYBRIDPS_SECURITY": "tls", "HYBRIDPS_TOKEN": secrets.token_hex(32)}
    os.environ |= dict(pair.split("=", 1) for pair in options.env)
    # Once for all: the processes are forked. It starts no thread, and does not load hybridps' extension.
    import torch.distributed  # noqa: F401

    try:
        ports, rounds = measure(options)
    except Failed as error:
        say(f"[strangers] {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    found = summarise(rounds)
    cores = len(os.sched_getaffinity(0))
    say(
        f"\n{WORLD} ranks of {options.backend}, security {options.security}, {len(ports)} ports, {cores} cores; "
        f"rounds: {options.rounds}, {options.seconds:g} s for a size; median times, and speeds (least to most)"
    )
    say("\n" + table(found) + "\n")
    missed = sum(one["ranks"]["strangers"]["missed"] for one in rounds)
    say(
        f"strangers ({', '.join(options.kinds)}): {options.rate:,.0f} a second asked for, reached "
        f"{found['rates']['ranks']:,.0f} at the ranks ({missed:,} more were not let in), "
        f"{found['rates']['elsewhere']:,.0f} elsewhere"
    )
    if min(found["rates"].values()) < 0.9 * options.rate:
        say("Fewer than asked for: no core is left for them. A lower --rate makes the phases alike.")
    if options.output:
        asked = {name: getattr(options, name) for name in ("backend", "security", "rate", "kinds", "seconds", "env")}
        text = json.dumps({"asked": asked, "cores": cores, "ports": ports, **found, "rounds": rounds}, indent=1)
        options.output.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
