"""Junk at open ports: strangers who connect, say something random, a part of what a member says, or nothing."""

import contextlib
import os
import socket
import tempfile
import threading
import time

import ranks
import test_dedicated
from outcome import Row, Skip, launch, leftovers
from ports import BEGINNINGS

KEPT_MAX = 600
DESCRIPTORS_MAX = 140  # that strangers may have at a rank


class Strangers:
    """Opens `rate` connections a second to `targets`. Of four one says noise, one a right beginning and then noise,
    one nothing, and one a right beginning, a byte a second. The last KEPT_MAX stay."""

    def __init__(self, rate=1000):
        self.rate, self.opened, self.refused = rate, 0, 0
        self.targets = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def start(self):
        self._thread.start()

    def _run(self):
        kept, begin, said_at = [], None, time.monotonic()  # kept: [socket, what it says, a byte a second]
        while not self._stop.is_set():
            if not self.targets:
                time.sleep(0.01)
                continue
            begin = begin or time.monotonic()
            if time.monotonic() - said_at > 1:
                said_at = time.monotonic()
                for stranger in kept:
                    with contextlib.suppress(OSError):
                        stranger[0].send(stranger[1][:1])
                        stranger[1] = stranger[1][1:]
            if self.opened + self.refused >= (time.monotonic() - begin) * self.rate:
                time.sleep(0.001)
                continue
            # Every target hears each kind.
            turn = self.opened // len(self.targets)
            kind, beginning = turn % 4, BEGINNINGS[turn // 4 % 2]
            word = [os.urandom(1 + self.opened % 80), beginning + os.urandom(200), b"", beginning[:1]][kind]
            try:
                stranger = socket.create_connection(self.targets[self.opened % len(self.targets)], timeout=0.5)
                with contextlib.suppress(OSError):
                    stranger.send(word)
                self.opened += 1
                kept.append([stranger, beginning[1:] if kind == 3 else b""])
            except OSError:
                self.refused += 1
            if len(kept) > KEPT_MAX:
                kept.pop(self.opened % KEPT_MAX)[0].close()
        for stranger, _ in kept:
            stranger.close()

    def stop(self):
        self._stop.set()
        self._thread.join()


def secured(security):
    return {"HYBRIDPS_SECURITY": "tls", "HYBRIDPS_TOKEN": test_dedicated.TOKEN} if security == "tls" else {}


def at_ranks(backend, runs, seconds, security="off", rate=1000):
    """At the ports that the ranks' own libraries have open: hybridps's, or gloo's."""
    row = Row("", backend, runs=runs, culprit="no error")
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder:
            strangers = Strangers(rate)

            def find(path=folder, who=strangers):
                end = time.monotonic() + 60
                names = [os.path.join(path, f"{rank}.ports") for rank in range(3)]
                while not all(os.path.exists(name) for name in names):
                    if time.monotonic() > end:
                        return
                    time.sleep(0.02)
                found = []
                for name in names:
                    with open(name) as file:
                        found += [(line.split()[0], int(line.split()[1])) for line in file.read().splitlines()]
                who.targets = found

            finder = threading.Thread(target=find)
            finder.start()
            strangers.start()
            try:
                results = launch(
                    ranks.under_junk,
                    "1+1+1",
                    backend,
                    args=(seconds, folder),
                    env=secured(security),
                    init=True,
                    destroy=True,
                    timeout=60 + seconds,
                    check=backend == "hybridps",
                )
            finally:
                finder.join()
                strangers.stop()
        survived = [result for result in results if result]
        if len(survived) < 3:
            row.culprit = "the job fails: " + " ".join((results.failure or "").split())[-160:]
            continue
        most = max(result["descriptors_most"] for result in survived)
        memory = max(result["memory"] for result in survived)
        row.note = (
            f"{strangers.opened} connections, {strangers.refused} refused; {survived[0]['rounds']} operations, all "
            f"right, the longest {max(result['slowest'] for result in survived) * 1e3:.0f} ms; "
            f"a rank held at most {most} descriptors and {memory / 2**20:.1f} MiB more"
        )
        row.left = leftovers(survived)
        if backend == "hybridps":
            row.expect(strangers.opened > 100 * seconds, f"strangers came: {strangers.opened}")
            row.expect(most <= DESCRIPTORS_MAX, f"at most {DESCRIPTORS_MAX} descriptors more: {most}")
            bound = {address for result in survived for address, _ in result["ports"]}
            row.expect(bound <= {"127.0.0.1"}, f"only the chosen interface is bound: {bound}")
    return row


def at_admission(backend, runs, seconds, security="off", rate=1000):
    if backend != "hybridps":
        raise Skip("gloo has no servers")
    row = Row("", backend, runs=runs, culprit="no error")
    for _ in range(runs):
        with tempfile.TemporaryDirectory() as folder, test_dedicated.servers(1, env=secured(security)) as running:
            pid = running[0].process.pid

            def usage(of=pid):
                with open(f"/proc/{of}/statm") as file:
                    return int(file.read().split()[1]) * 4096, len(os.listdir(f"/proc/{of}/fd"))

            address, port = running[0].address.split(":")
            strangers = Strangers(rate)
            seen = []
            watch = threading.Event()

            def knock(path=folder, who=strangers, at=(address, int(port)), samples=seen, until=watch, ask=usage):
                end = time.monotonic() + 60
                while not os.path.exists(os.path.join(path, "0.ports")) and time.monotonic() < end:
                    time.sleep(0.02)
                samples.append(ask())
                who.targets = [at]
                while not until.wait(0.05):
                    samples.append(ask())

            watcher = threading.Thread(target=knock)
            watcher.start()
            strangers.start()
            try:
                env = test_dedicated.settings(running) | secured(security)
                results = launch(
                    ranks.under_junk, "1+1+1", backend, args=(seconds, folder), env=env, init=True, destroy=True
                )
            finally:
                watch.set()
                watcher.join()
                strangers.stop()
            # A job of its own is admitted while strangers are still in it.
            launch(test_dedicated.plain, "1+1+1", backend, env=env, init=True, destroy=True)
            memory, descriptors = (max(sample[i] - seen[0][i] for sample in seen) for i in (0, 1))
            row.note = (
                f"{strangers.opened} connections, {strangers.refused} refused; {results[0]['rounds']} operations, all "
                f"right; the server held at most {descriptors} descriptors and {memory / 1024:.0f} KiB more"
            )
            row.expect(strangers.opened > 100 * seconds, f"strangers came: {strangers.opened}")
            row.expect(descriptors <= 64 + 8, f"at most 64 strangers at a time: {descriptors} descriptors more")
            # The job's own messages are in it too.
            row.expect(memory <= 4 << 20, f"memory of the server grew by {memory >> 10} KiB")
            row.left = "nothing"
            running[0].stop()
    return row
