"""The case killed-node: jobs of torchrun on four hosts, the last of which is killed; hybridps and gloo in turn."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import hosts
from lab import say

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "examples" / "cases" / "killed-node" / "train.py"
NODES, RANKS, MBIT = 4, 1, 200
# A dead torchrun is one that said nothing for 3 s (its default: 15); the fourth node is waited for 5 s (30).
RENDEZVOUS = "last_call_timeout=5,keep_alive_interval=1,keep_alive_max_attempt=3"
ROUNDS = 3
STEPS_BEFORE, STEPS_AFTER = 45, 40
LIMIT_S = 300


def tree_of(pid: int) -> list[int]:
    """The process and all that descend from it."""
    found = [pid]
    for one in found:
        for children in Path(f"/proc/{one}/task").glob("*/children"):
            found += map(int, children.read_text().split())
    return found


def kill(processes: list[subprocess.Popen]) -> None:
    for pid in [pid for process in processes if process.poll() is None for pid in tree_of(process.pid)]:
        os.kill(pid, 9)
    for process in processes:
        process.wait()


def lines_of(file: Path) -> list[list[float]]:
    """(step, ranks, loss, time) of each step so far."""
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [[float(part) for part in line.split()] for line in lines if line.endswith("\n")]


def job(backend: str, folder: Path) -> dict:
    """One job, from its start to some steps after the kill."""
    names = [f"h{index}" for index in range(NODES)]
    network = hosts.Hosts(names, dict.fromkeys(names, MBIT))
    log, output = folder / "steps", folder / "output"
    unwanted = ("HYBRIDPS_", "UCX_", "GLOO_", "MASTER_", "TORCHELASTIC_")
    base = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    base |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "TORCH_INCLUDE_STACK_TRACE": "0"}
    base |= {"GLOO_SOCKET_IFNAME": hosts.INTERFACE, "HYBRIDPS_INTERFACE": hosts.INTERFACE}
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", f"{NODES - 1}:{NODES}"]
    command += ["--nproc-per-node", str(RANKS), "--max-restarts", "3", "--rdzv-id", "job1", "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", f"{network.address['h0']}:29500", "--rdzv-conf", RENDEZVOUS]
    command += [str(TRAIN), "--backend", backend, "--steps", "100000", "--write", str(log)]
    if backend != "hybridps":
        command += ["--checkpoint", str(folder / "checkpoint")]
        # A Store for each start: in the one that torchrun shares, gloo finds addresses of the ranks before the restart.
        base["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    agents: list[subprocess.Popen] = []
    deadline = time.monotonic() + LIMIT_S

    def wait_for(enough) -> list[list[float]]:
        while not enough(lines := lines_of(log)):
            if time.monotonic() > deadline or any(agent.poll() is not None for agent in agents[: NODES - 1]):
                told = output.read_text(errors="replace").splitlines()
                errors = [line[:300] for line in told if "Error" in line]
                raise hosts.Failed("\n".join([f"{backend}: the job does not go on", *errors[:10], "...", *told[-20:]]))
            time.sleep(0.02)
        return lines

    try:
        with open(output, "w") as told:
            for name in names:
                local = {"--local-addr": network.address[name]}
                words = command[:3] + [part for pair in local.items() for part in pair] + command[3:]
                pipes = {"stdin": subprocess.DEVNULL, "stdout": told, "stderr": told}
                environment = base | {"HYBRIDPS_NODE": name}
                agents.append(network.popen(name, words, env=environment, cwd=ROOT, **pipes))
        wait_for(lambda lines: len(lines) >= STEPS_BEFORE)
        kill(agents[NODES - 1 :])
        killed = time.time()
        ranks = RANKS * (NODES - 1)
        lines = wait_for(lambda lines: sum(line[1] == ranks for line in lines) >= STEPS_AFTER)
    finally:
        kill(agents)
        network.close()
    if lines[0][1] != RANKS * NODES:
        raise hosts.Failed(f"{backend}: the job began with {lines[0][1]:g} ranks")
    before = [line for line in lines if line[1] == RANKS * NODES]
    after = next(line for line in lines if line[1] == ranks)
    pace = [later[3] - earlier[3] for earlier, later in zip(before[5:], before[6:], strict=False)]
    return {
        "seconds": after[3] - killed,
        "step_seconds": statistics.median(pace),
        "steps_lost": int(before[-1][0] + 1 - after[0]),
        # Since the kill.
        "losses": [[round(line[3] - killed, 3), line[2]] for line in lines],
    }


def measure(options) -> dict:
    jobs: dict[str, list[dict]] = {"gloo": [], "hybridps": []}
    for index in range(1 if options.quick else ROUNDS):
        for backend, done in jobs.items():
            with tempfile.TemporaryDirectory(prefix="case-") as folder:
                done.append(job(backend, Path(folder)))
            say(f"[case] {backend}: kill {index + 1}, next step after {done[-1]['seconds']:.2f} s")
    medians = {backend: statistics.median(one["seconds"] for one in done) for backend, done in jobs.items()}
    for done in jobs.values():  # one curve of each is drawn, and kept
        for one in done[:-1]:
            del one["losses"]
    return {"seconds": medians, "times_gloo": medians["gloo"] / medians["hybridps"], "jobs": jobs}


def table(runs: list[dict]) -> str:
    lines = ["| |s from kill to next step|slowest|× gloo|steps done again|", "|-|-|-|-|-|"]
    for backend, label in (("gloo", "gloo, torchrun's restart"), ("hybridps", "hybridps, same processes")):
        cells = [
            label,
            ", ".join(f"{run['seconds'][backend]:.2f}" for run in runs),
            f"{max(one['seconds'] for run in runs for one in run['jobs'][backend]):.2f}",
            "1" if backend == "gloo" else ", ".join(f"{run['times_gloo']:.0f}" for run in runs),
            f"{max(one['steps_lost'] for run in runs for one in run['jobs'][backend])} at most",
        ]
        lines.append(f"|{'|'.join(cells)}|")
    return "\n".join(lines) + "\n"


def draw(run: dict, title: str, path: Path) -> None:
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 3.6), constrained_layout=True)
    for backend, colour in (("gloo", "0.5"), ("hybridps", "C0")):
        shown = run["jobs"][backend][-1]
        seconds, losses = zip(*shown["losses"], strict=True)
        # No line over the time without steps.
        paused = next(index for index, second in enumerate(seconds) if second > shown["seconds"] - 0.01)
        label = f"{backend}: next step after {shown['seconds']:.2f} s"
        axis.plot(seconds[:paused], losses[:paused], color=colour, marker=".", label=label)
        axis.plot(seconds[paused:], losses[paused:], color=colour, marker=".")
    axis.axvline(0, color="C3", linewidth=1.5)
    axis.set(title=title, xlabel="seconds since the kill (red)", ylabel="loss of rank 0", xlim=(-3, None))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=9)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def last_line(name: str, run: dict) -> str:
    ours, peer = run["seconds"]["hybridps"], run["seconds"]["gloo"]
    told = f"{name}: next step {ours:.2f} s after the kill, with gloo {peer:.2f} s"
    return f"{told}: {run['times_gloo']:.0f} times as fast"
