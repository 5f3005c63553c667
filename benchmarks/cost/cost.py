"""What a byte of an allreduce costs the cores: CPU time, where it goes, system calls and switches; beside gloo and
plain TCP sockets that move the same bytes, in turn on the same hosts made of namespaces, whose links have no limit (or --mbit).

    benchmarks/cost/run                            n = 2, 4, 8 with 64 MiB; needs root
    benchmarks/cost/run --hosts 2,4 --mib 16 --rounds 5
    benchmarks/cost/run --hosts 8 --mbit 200       links of 200 Mbit/s: what is left for those who compute beside it
    benchmarks/cost/run --env HYBRIDPS_LIMITS=chunk_bytes=262144
    benchmarks/cost/run --runners hybridps,hybridps:HYBRIDPS_SPIN_MICROSECONDS=0    one setting beside another

Medians over rounds; a figure of an operation is the mean over ranks. Where the time goes is sampled with perf in
operations of their own, on rank 0, and left out where perf is not there. Writes cost.json, cost.md and cost.png.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "scripts")]

import hosts  # noqa: E402
from hybridps.tools.output import plot_complaint  # noqa: E402

MIB = 2**20
RUNNERS = ("hybridps", "gloo", "sockets")
MARK = "RESULT "

# Which part of the work a sampled function belongs to: the first that fits, by library and function.
KINDS = (
    ("sum", r"", r"hybridps::reduce|gloo::(sum|reduce)|add_kernel|vectorized_(inner_)?loop|at::native.*(add|loop)"),
    (
        "copy, kernel",
        r"kernel",
        r"copy_(to|from)_(user|iter)|copy_user|rep_mov|_copy_(to|from)|clear_page|copy_page|memcpy",
    ),
    ("copy, program", r"libc", r"mem(cpy|move|set)"),
    (
        "waking, waiting",
        r"kernel",
        r"sched|wake|futex|epoll|ep_|switch|idle|hrtimer|select|poll|rcu|eventfd|_raw_spin_unlock_irq$",
    ),
    ("network, kernel", r"kernel", r""),
    ("UCX", r"libuc[pst]", r""),
    ("hybridps", r"_C\.", r""),
    ("gloo, torch", r"libtorch|libc10", r""),
    ("the rest", r"", r""),
)


def say(text: str = "") -> None:
    print(text, flush=True)


def measure(network: hosts.Hosts, names: list[str], runner: str, options, samples: Path) -> list[dict]:
    """One launch: what each rank measured. `runner`: a backend, and maybe a setting of its own behind a colon."""
    backend, _, setting = runner.partition(":")
    unwanted = ("HYBRIDPS_", "UCX_", "GLOO_", "MASTER_", "TORCHELASTIC_")
    base = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
    base |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    base |= {
        "WORLD_SIZE": str(len(names)),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    base |= {"MASTER_ADDR": network.address[names[0]], "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": hosts.INTERFACE}
    base |= {"HYBRIDPS_INTERFACE": hosts.INTERFACE} | dict(pair.split("=", 1) for pair in (*options.env, setting) if pair)
    job = {
        "backend": backend,
        "bytes": int(options.mib * MIB),
        "iterations": options.iterations,
        "warm_up": options.warm_up,
        "addresses": [network.address[name] for name in names],
        "samples": str(samples),
    }
    ranks = []
    for rank, name in enumerate(names):
        command = [sys.executable, str(HERE / "worker.py"), json.dumps(job)]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        environment = base | {"RANK": str(rank), "HYBRIDPS_NODE": name}
        ranks.append(network.popen(name, command, env=environment, cwd=ROOT, **pipes))
    results = []
    try:
        for name, process in zip(names, ranks, strict=True):
            text, _ = process.communicate(timeout=options.limit_s)
            found = [line for line in text.splitlines() if line.startswith(MARK)]
            if not found:
                raise hosts.Failed(f"{backend} on {name} ended without a result:\n{text[-2000:]}")
            results.append(json.loads(found[0][len(MARK) :]))
    except subprocess.TimeoutExpired as error:
        raise hosts.Failed(f"{backend}: not done after {options.limit_s} s") from error
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
            process.wait()
    if wrong := [r["rank"] for r in results if not r["right"]]:
        raise hosts.Failed(f"{backend}: wrong sums on ranks {wrong}")
    return results


def where(samples: Path) -> dict[str, float]:
    """Parts of the CPU time by kind, from perf's samples."""
    if not samples.exists() or not shutil.which("perf"):
        return {}
    command = [
        "perf",
        "report",
        "-i",
        str(samples),
        "--stdio",
        "--no-children",
        "-g",
        "none",
        "-F",
        "overhead,dso,symbol",
    ]
    shown = subprocess.run(command, capture_output=True, text=True)
    parts = dict.fromkeys((kind for kind, _, _ in KINDS), 0.0)
    for line in shown.stdout.splitlines():
        found = re.match(r"\s+([\d.]+)%\s+(\S+)\s+\[.\]\s+(.*)", line)
        if not found:
            continue
        share, library, function = float(found[1]), found[2], found[3]
        kind = next(k for k, of, named in KINDS if re.search(of, library) and re.search(named, function, re.IGNORECASE))
        parts[kind] += share
    total = sum(parts.values())
    return {kind: share / total for kind, share in parts.items()} if total > 0 else {}


def summarise(rounds: list[list[dict]], size: int, parts: list[dict]) -> dict:
    def median(name):
        return statistics.median(statistics.fmean(r[name] for r in ranks) for ranks in rounds)

    row = {
        name: median(name)
        for name in ("seconds", "user_seconds", "system_seconds", "switches", "preemptions", "packets")
    }
    row["cpu_seconds"] = row["user_seconds"] + row["system_seconds"]
    calls = [ranks[0]["system_calls"] for ranks in rounds if "system_calls" in ranks[0]]
    row["calls_per_mib"] = statistics.median(calls) / (size / MIB) if calls else None
    row["sum_seconds"] = statistics.median(ranks[0]["sum_seconds"] for ranks in rounds)
    if parts and all(parts):
        row["where"] = {kind: statistics.median(p[kind] for p in parts) for kind in parts[0]}
    return row


def table(done: dict[int, dict[str, dict]], size: int, links: str) -> str:
    lines = [
        f"allreduce of {size / MIB:g} MiB, one rank on each of n hosts, {links}, {os.cpu_count()} cores "
        "for all; per operation and rank",
        "",
        "| n | | ms | CPU ms | user | system | ns of CPU per KiB | × floor | calls/MiB | packets/MiB | switches | preemptions |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for n, rows in done.items():
        floor = rows["sockets"]["cpu_seconds"] if "sockets" in rows else float("nan")
        for name, row in rows.items():
            calls = "–" if row["calls_per_mib"] is None else f"{row['calls_per_mib']:.0f}"
            lines.append(
                f"| {n} | {'sockets and sum (floor)' if name == 'sockets' else name} | {row['seconds'] * 1e3:.1f} | "
                f"{row['cpu_seconds'] * 1e3:.1f} | {row['user_seconds'] * 1e3:.1f} | "
                f"{row['system_seconds'] * 1e3:.1f} | "
                f"{row['cpu_seconds'] * 1e9 / (size / 1024):.0f} | {row['cpu_seconds'] / floor:.2f} | {calls} | "
                f"{row['packets'] / (size / MIB):.0f} | "
                f"{row['switches']:.0f} | {row['preemptions']:.0f} |"
            )
    lines += ["", "Where the CPU time goes: cost.json and [its picture](../../docs/images/cost.png)."]
    return "\n".join(lines) + "\n"


def draw(done: dict[int, dict[str, dict]], size: int, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    labels, stacks = [], []
    for n, rows in done.items():
        for name, row in rows.items():
            labels.append(f"n = {n}, {name}")
            shares = row.get("where") or {"CPU time": 1.0}
            stacks.append({kind: share * row["cpu_seconds"] * 1e3 for kind, share in shares.items()})
    labels.reverse()
    stacks.reverse()
    figure, axes = pyplot.subplots(figsize=(10, 1.4 + 0.4 * len(labels)), constrained_layout=True)
    left = [0.0] * len(labels)
    for kind in dict.fromkeys(kind for stack in stacks for kind in stack):
        values = [stack.get(kind, 0.0) for stack in stacks]
        axes.barh(labels, values, left=left, label=kind)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set(
        xlabel="ms of CPU time per operation and rank",
        title=f"allreduce of {size / MIB:g} MiB: what it costs the cores",
    )
    axes.legend(fontsize=8, ncols=2)
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks/cost/run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", default="2,4,8", help="numbers of hosts (default %(default)s)")
    parser.add_argument("--mib", type=float, default=64, help="size of the tensor (default %(default)s)")
    parser.add_argument("--mbit", type=float, help="rate of each host's link (default: no limit)")
    parser.add_argument("--rounds", type=int, default=3, help="launches of each (default %(default)s)")
    parser.add_argument("--iterations", type=int, default=8, help="operations of a launch (default %(default)s)")
    parser.add_argument("--warm-up", type=int, default=6, help="operations before those (default %(default)s)")
    parser.add_argument("--runners", default=",".join(RUNNERS), help="what is compared (default %(default)s)")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="setting for all processes")
    parser.add_argument("--limit-s", type=float, default=300, help="for one launch (default %(default)s)")
    parser.add_argument("--output", default=str(ROOT / "benchmarks" / "results"))
    options = parser.parse_args()
    if os.geteuid() != 0:
        say("[cost] needs root, for network namespaces")
        return 1
    if not shutil.which("perf"):
        say("[cost] perf was not found (Debian: linux-perf): no system calls, and not where the time goes")
    size, done = int(options.mib * MIB), {}
    runners = options.runners.split(",")
    if unknown := [name for name in runners if name.partition(":")[0] not in RUNNERS]:
        say(f"[cost] nothing is called {', '.join(unknown)}: {', '.join(RUNNERS)}")
        return 1
    try:
        for n in map(int, options.hosts.split(",")):
            names = [f"h{index}" for index in range(n)]
            rates = {name: options.mbit for name in names} if options.mbit else None
            network = hosts.Hosts(names, rates)
            rounds, parts = {name: [] for name in runners}, {name: [] for name in runners}
            try:
                with tempfile.TemporaryDirectory() as folder:
                    for index in range(options.rounds):
                        first = index % len(runners)
                        for name in runners[first:] + runners[:first]:
                            samples = Path(folder) / f"{runners.index(name)}-{index}"
                            rounds[name].append(measure(network, names, name, options, samples))
                            parts[name].append(where(samples))
            finally:
                network.close()
            done[n] = {name: summarise(rounds[name], size, parts[name]) for name in runners}
            say(
                f"[cost] n = {n}: "
                + ", ".join(f"{k} {r['cpu_seconds'] * 1e3:.1f} ms of CPU" for k, r in done[n].items())
            )
    except hosts.Failed as error:
        say(f"[cost] {error}")
        return 1
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cost.json").write_text(json.dumps({"bytes": size, "hosts": done}, indent=1) + "\n")
    links = f"links of {options.mbit:g} Mbit/s" if options.mbit else "links without a limit"
    text = table(done, size, links)
    (folder / "cost.md").write_text(text)
    if complaint := plot_complaint():
        say(f"[cost] no picture: {complaint}")
    else:
        draw(done, size, folder / "cost.png")
    say("\n" + text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
