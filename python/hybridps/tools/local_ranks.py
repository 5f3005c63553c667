"""Runs one program as several ranks on this machine, which may take each other for other nodes, over loopback."""

import os
import signal
import subprocess
import sys
import tempfile
import time


def environment_of(rank: int, ranks: int, nodes: int) -> dict[str, str]:
    """What rank `rank` of `nodes` nodes with `ranks` each finds in its environment; the user's settings win."""
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("HYBRIDPS_INTERFACE", "lo")
    environment.setdefault("GLOO_SOCKET_IFNAME", environment["HYBRIDPS_INTERFACE"])
    environment |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks * nodes),
        "LOCAL_RANK": str(rank % ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    if nodes > 1:
        environment["HYBRIDPS_NODE"] = f"node{rank // ranks}"
    return environment


def run(command: list[str], ranks: int, nodes: int, name: str, limit_s: float = float("inf")) -> int:
    """Starts `command --store FILE` once for each rank (FILE: where they meet, for init_method file://) and waits for
    them; 0 when all went well. When one fails, or the limit is over, all are ended; `name` says so on stderr.
    """
    processes = []

    def stop(*_) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, stop)
    deadline = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory(prefix="hybridps-ranks-") as folder:
        try:
            for rank in range(ranks * nodes):
                store = ["--store", os.path.join(folder, "store")]
                environment = environment_of(rank, ranks, nodes)
                processes.append(subprocess.Popen([*command, *store], env=environment, stdin=subprocess.DEVNULL))
            waiting = list(processes)
            while waiting:
                for process in list(waiting):
                    status = process.poll()
                    if status is None:
                        continue
                    waiting.remove(process)
                    if status != 0:
                        time.sleep(0.5)  # the others have a word to say, too
                        print(f"{name}: rank {processes.index(process)} ended with status {status}", file=sys.stderr)
                        return 1
                if time.monotonic() > deadline:
                    print(f"{name}: not done after {limit_s:g} s", file=sys.stderr)
                    return 1
                time.sleep(0.02)
            return 0
        finally:
            signal.signal(signal.SIGTERM, previous)
            for process in processes:
                if process.poll() is None:
                    process.terminate()
            for process in processes:
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
