"""Runs examples/train_digits.py on two emulated nodes of two ranks, with hybridps and with gloo, and compares them.

Where this machine allows it, a node is a set of namespaces of its own (network, IPC, UTS, mount, with a private
/dev/shm), and a veth pair is the network between the two, so that what crosses can be counted. Otherwise the nodes
share the loopback interface and are told apart by HYBRIDPS_NODE.

The namespaces have no names: they belong to two sleeping processes, and are gone when those are, however this ends.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import hosts

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "train_digits.py"
NODES = ("a", "b")
RANKS_PER_NODE = 2

LOSS_TOLERANCE = 1e-5  # relative
ACCURACY_MIN = 0.97
PAYLOAD_TOLERANCE = 0.02  # of the backend's own count
WIRE_TOLERANCE = 0.10  # of the interface's count, which holds packet headers and acknowledgements too
RUN_LIMIT_S = 600


def say(text: str = "") -> None:
    print(text, flush=True)


class Namespaces(hosts.Hosts):
    """Two nodes with namespaces of their own and a veth pair between them."""

    kind = "two network namespaces, joined by a veth pair"

    def __init__(self):
        super().__init__(NODES, prefix="node-")

    def environment(self, node: str) -> dict[str, str]:
        return {"GLOO_SOCKET_IFNAME": hosts.INTERFACE, "HYBRIDPS_INTERFACE": hosts.INTERFACE}

    def master(self) -> tuple[str, int]:
        return self.address[NODES[0]], 29500


class Loopback:
    """Two nodes by name only, on the loopback interface."""

    kind = "the loopback interface; nodes told apart by HYBRIDPS_NODE"

    def command(self, node: str, command: list[str]) -> list[str]:
        return command

    def environment(self, node: str) -> dict[str, str]:
        return {"GLOO_SOCKET_IFNAME": "lo", "HYBRIDPS_INTERFACE": "lo", "HYBRIDPS_NODE": node}

    def master(self) -> tuple[str, int]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return "127.0.0.1", probe.getsockname()[1]

    def sent(self) -> dict[str, int] | None:
        return None

    def close(self) -> None:
        pass


def may_use_user_namespace() -> bool:
    try:
        command = ["unshare", "--user", "--map-root-user", "--net", "--mount", "true"]
        return subprocess.run(command, capture_output=True, timeout=10).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def make_network(arguments):
    if arguments.loopback:
        return Loopback()
    try:
        return Namespaces()
    except (hosts.Failed, OSError, subprocess.TimeoutExpired) as error:
        say(f"[demo] no network namespaces here ({error}): using loopback, where bytes are the backend's own count")
    return Loopback()


class Training:
    """One run of the script on both nodes."""

    def __init__(self, backend: str, network, epochs: int, folder: Path):
        self.backend, self.network, self.epochs = backend, network, epochs
        self.folder = folder / backend
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.processes = {}

    def run(self) -> dict:
        before = self.network.sent()
        started = time.perf_counter()
        try:
            self._start()
            self._wait()
        finally:
            self._end()
        seconds = time.perf_counter() - started
        result = json.loads((self.folder / "result.json").read_text())
        result["job_seconds"] = seconds
        after = self.network.sent()
        result["wire_bytes"] = {n: after[n] - before[n] for n in NODES} if after else None
        result["payload_bytes"] = self._payload_bytes()
        return result

    def _start(self) -> None:
        address, port = self.network.master()
        for index, node in enumerate(NODES):
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(NODES))]
            command += ["--node-rank", str(index), "--nproc-per-node", str(RANKS_PER_NODE)]
            command += ["--master-addr", address, "--master-port", str(port), str(SCRIPT)]
            command += ["--backend", self.backend, "--epochs", str(self.epochs)]
            command += ["--json", str(self.folder / "result.json")]
            unwanted = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
            environment = {k: v for k, v in os.environ.items() if k not in unwanted}
            environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
            environment |= {"HYBRIDPS_COMPRESS": "off"}  # bytes are compared with the formula
            environment |= {"HYBRIDPS_METRICS_FILE": str(self.folder / f"metrics-{node}-%p.prom")}
            environment |= self.network.environment(node)
            if index == 0:
                say("[demo] $ " + " ".join(["torchrun", *command[3:]]).replace(f"{ROOT}/", ""))
            log = open(self.folder / f"node-{node}.log", "w")  # noqa: SIM115 (closed with the process)
            self.processes[node] = subprocess.Popen(
                self.network.command(node, command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if index == 0 else log,
                stderr=log,
                text=True,
                env=environment,
                cwd=ROOT,
                start_new_session=True,
                preexec_fn=hosts.die_with_parent,
            )
        self.reader = threading.Thread(target=self._read_progress, args=(self.processes["a"].stdout,), daemon=True)
        self.reader.start()

    def _read_progress(self, stream) -> None:
        for line in stream:
            say(f"  {self.backend:9s} {line.rstrip()}")

    def _wait(self) -> None:
        deadline = time.monotonic() + RUN_LIMIT_S
        open_nodes = set(NODES)
        while open_nodes:
            for node in sorted(open_nodes):
                status = self.processes[node].poll()
                if status is None:
                    continue
                open_nodes.discard(node)
                if status != 0:
                    raise hosts.Failed(f"{self.backend}: node {node} ended with status {status}\n{self._tails()}")
            if time.monotonic() > deadline:
                raise hosts.Failed(f"{self.backend}: not finished after {RUN_LIMIT_S} s\n{self._tails()}")
            time.sleep(0.05)
        self.reader.join(timeout=5)

    def _tails(self) -> str:
        time.sleep(0.5)
        text = []
        for node in NODES:
            path = self.folder / f"node-{node}.log"
            text += [f"--- {path}", *path.read_text(errors="replace").splitlines()[-25:]]
        return "\n".join(text)

    def _end(self) -> None:
        """End what is left of this run: torchrun first, which ends its ranks; then, unasked, the whole group."""
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + 15
        for process in self.processes.values():
            try:
                process.wait(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _payload_bytes(self) -> dict[str, int] | None:
        """Sum of what the ranks of each node sent to other nodes, by the backend's own counters."""
        sums = {}
        for node in NODES:
            files = list(self.folder.glob(f"metrics-{node}-*.prom"))
            if not files:
                return None
            lines = [line for file in files for line in file.read_text().splitlines()]
            wanted = [line for line in lines if line.startswith("hybridps_net_tx_payload_bytes_total")]
            sums[node] = sum(int(line.rsplit(" ", 1)[1]) for line in wanted)
        return sums


def mib(count: float) -> str:
    return f"{count / 2**20:.2f} MiB"


def check_bytes(result: dict, check) -> float:
    """Compare the bytes between the nodes with the formula, for the backend under test; returns the formula's."""
    n = len(NODES)
    reduced = result["gradient_bytes"] * result["steps"]
    formula = 2 * (n - 1) / n * reduced
    say(
        f"[demo] formula, per node and direction: 2(n-1)/n*S = {mib(formula)} with n = {n} nodes and "
        f"S = {result['steps']} steps x {result['gradient_bytes']} bytes of gradients"
    )
    # Beside the gradients: DDP sends the parameters once, from node a to node b.
    allowed = {"a": formula + result["gradient_bytes"], "b": formula}
    for node in NODES:
        for what, tolerance in (("payload", PAYLOAD_TOLERANCE), ("wire", WIRE_TOLERANCE)):
            sent = result[f"{what}_bytes"]
            if sent:
                ratio = sent[node] / formula
                good = formula * (1 - PAYLOAD_TOLERANCE) <= sent[node] <= allowed[node] * (1 + tolerance)
                check(good, f"node {node} sent {mib(sent[node])} of {what}: {ratio:.3f} of the formula")
    return formula


def draw(results: dict[str, dict], formula: float, folder: Path) -> list[Path]:
    os.environ.setdefault("MPLCONFIGDIR", str(folder / ".matplotlib"))
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plot

    figure, (left, right) = plot.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    styles = [{"linewidth": 4, "alpha": 0.45}, {"linewidth": 1.5, "linestyle": "--", "color": "black"}]
    for (backend, result), style in zip(results.items(), styles, strict=False):
        epochs = range(1, len(result["losses"]) + 1)
        left.plot(epochs, result["losses"], label=f"{backend}, {result['train_seconds']:.1f} s", **style)
    left.set(title="Training loss, 2 nodes x 2 ranks", xlabel="epoch", ylabel="cross entropy", yscale="log")
    left.grid(alpha=0.3)
    left.legend()

    width = 0.8 / len(results)
    drawn = False
    for index, (backend, result) in enumerate(results.items()):
        sent = result["wire_bytes"] or result["payload_bytes"]
        if sent:
            places = [i + (index - (len(results) - 1) / 2) * width for i in range(len(NODES))]
            bars = right.bar(places, [sent[n] / 2**20 for n in NODES], width * 0.95, label=backend)
            right.bar_label(bars, fmt="%.0f")
            drawn = True
    right.axhline(formula / 2**20, color="black", linestyle=":", label="2(n-1)/n S")
    right.set_xticks(range(len(NODES)), [f"node {n}" for n in NODES])
    right.set(title="Sent to the other node", ylabel="MiB")
    right.legend(loc="lower center", framealpha=0.9)
    if not drawn:
        right.text(0.5, 0.5, "not counted on loopback", transform=right.transAxes, ha="center")
    path = folder / "demo.png"
    figure.savefig(path, dpi=110)
    return [path]


def demo(arguments) -> int:
    folder = Path(arguments.output).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    passed = True

    def check(good: bool, text: str) -> None:
        nonlocal passed
        passed = passed and good
        say(f"[demo] {'ok  ' if good else 'FAIL'} {text}")

    network = make_network(arguments)
    say(f"[demo] 2 nodes x {RANKS_PER_NODE} ranks over {network.kind}")
    results = {}
    try:
        for backend in dict.fromkeys((arguments.backend, "gloo")):
            say(f"[demo] training with {backend}")
            results[backend] = Training(backend, network, arguments.epochs, folder).run()
    finally:
        network.close()

    ours, peer = results[arguments.backend], results["gloo"]
    say()
    say("  epoch " + "".join(f"{backend + ' loss':>18s}" for backend in results) + "   held-out accuracy")
    for epoch in range(arguments.epochs):
        losses = "".join(f"{result['losses'][epoch]:18.8f}" for result in results.values())
        say(f"  {epoch + 1:5d} {losses}   {ours['accuracies'][epoch]:.2%}")
    say()
    formula = check_bytes(
        ours, check if arguments.backend == "hybridps" else lambda good, text: say(f"[demo]      {text}")
    )
    if arguments.backend == "hybridps" and not (ours["payload_bytes"] or ours["wire_bytes"]):
        check(False, "nothing counted the bytes between the nodes")
    if peer is not ours and peer["wire_bytes"]:
        sent = ", ".join(f"{mib(peer['wire_bytes'][n])} ({n})" for n in NODES)
        say(f"[demo]      gloo sent {sent}: a flat ring does not know about nodes")
    for backend, result in results.items():
        say(
            f"[demo]      {backend}: {result['train_seconds']:.2f} s of training, "
            f"{result['job_seconds']:.2f} s with the start of torchrun"
        )
    gap = max(abs(x - y) / abs(y) for x, y in zip(ours["losses"], peer["losses"], strict=True))
    check(gap <= LOSS_TOLERANCE, f"losses agree with gloo's to {gap:.1e} relative (limit {LOSS_TOLERANCE:.0e})")
    accuracy = ours["accuracies"][-1]
    check(accuracy >= ACCURACY_MIN, f"held-out accuracy {accuracy:.2%} (limit {ACCURACY_MIN:.0%})")

    (folder / "results.json").write_text(json.dumps(results, indent=1))
    for path in draw(results, formula, folder):
        say(f"[demo] picture: {os.path.relpath(path)}")
    say(f"[demo] {'PASS' if passed else 'FAIL'}")
    return 0 if passed else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default=os.environ.get("DEMO_BACKEND", "hybridps"))
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--loopback", action="store_true", help="do not try network namespaces")
    parser.add_argument("--output", default=str(ROOT / "demo_output"))
    arguments = parser.parse_args()

    if os.geteuid() != 0 and not arguments.loopback and "DEMO_IN_USER_NAMESPACE" not in os.environ:
        if may_use_user_namespace():  # root inside it, which is enough to make network namespaces
            os.environ["DEMO_IN_USER_NAMESPACE"] = "1"
            os.execvp("unshare", ["unshare", "--user", "--map-root-user", sys.executable, *sys.argv])

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return demo(arguments)
    except hosts.Failed as error:
        say(f"[demo] {error}")
        say("[demo] FAIL")
        return 1
    except KeyboardInterrupt:
        say("[demo] interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main())
