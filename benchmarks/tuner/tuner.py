"""What the tuner (HYBRIDPS_TUNE=1) makes of bad settings: all-reduces between hosts made of namespaces whose links have a rate.

    benchmarks/tuner/run                              n = 4 at 500 Mbit/s, 4 MiB; needs root; ten minutes
    benchmarks/tuner/run --starts chunk-4K,default --search chunk_bytes=32K

First fixed settings are searched, one job after the other. Then for each start: a job that begins there with the tuner,
a job that stays there without it, and one with the best fixed settings. The first has --operations operations, twenty at a time in turn with the second; then all
three are timed in turn, some operations each, on the same machine at the same time. Written: the median time of each, by the best
fixed one's, and the sum of all operations while it tuned by the sum of those of the start, in turn with it. Every sum is compared with what it must be.
Writes tuner.json and tuner.md.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import hosts  # noqa: E402

STARTS = {
    "chunk-4K": {"chunk_bytes": "4K"},
    "chunk-4M": {"chunk_bytes": "4M"},
    "window-8K": {"window_bytes": "8K"},
    "window-64M": {"window_bytes": "64M", "eager_bytes": "4M"},
    "default": {},
}
BLOCK = 20  # operations at a time while it tunes
SEARCH = "chunk_bytes=8K,16K,64K window_bytes=32K,128K,512K"


def say(text: str) -> None:
    print(text, flush=True)


def number(kind: type, least: float, most: float = math.inf):
    """The type of an argument that has to be in these bounds."""

    def parse(text: str):
        value = kind(text)
        if not (least <= value <= most and math.isfinite(value)):
            bounds = f"at least {least:g}" if most == math.inf else f"{least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"must be {bounds}, not {text}")
        return value

    parse.__name__ = kind.__name__  # argparse names it where `text` is no number
    return parse


class Job:
    """Ranks that wait for something to do."""

    def __init__(self, network: hosts.Hosts, names: list[str], options, limits: dict[str, str], port: int, tunes=False):
        unwanted = ("HYBRIDPS_", "UCX_", "GLOO_", "MASTER_", "TORCHELASTIC_")
        base = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
        base |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        base |= {"WORLD_SIZE": str(len(names)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "HYBRIDPS_STATUS": "off"}
        base |= {"MASTER_ADDR": network.address[names[0]], "MASTER_PORT": str(port), "HYBRIDPS_INTERFACE": hosts.INTERFACE}
        base |= {"HYBRIDPS_LIMITS": ",".join(map("=".join, limits.items())), "HYBRIDPS_TUNE": str(int(tunes))}
        command = [sys.executable, str(HERE / "worker.py"), str(int(options.mib * 2**20))]
        self.ranks = []
        for rank, name in enumerate(names):
            environment = base | {"RANK": str(rank), "HYBRIDPS_NODE": name}
            if rank == 0 and options.log:
                environment["HYBRIDPS_LOG_LEVEL"] = "debug"
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
            self.ranks.append(network.popen(name, command, env=environment, cwd=ROOT, **pipes))
        self._read("READY")

    def _read(self, mark: str) -> str:
        texts = []
        for rank in self.ranks:
            for line in rank.stdout:
                if line.startswith(mark):
                    texts.append(line[len(mark) :])
                    break
            else:
                raise hosts.Failed("a rank ended early: see above")
        return texts[0]

    def run(self, count: int) -> dict:
        for rank in self.ranks:
            rank.stdin.write(f"{count}\n")
        return json.loads(self._read("RESULT "))

    def close(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()


def search(network, names, options) -> tuple[dict[str, str], dict[str, float]]:
    ladders = [
        [(pair.split("=")[0], value) for value in pair.split("=")[1].split(",")] for pair in options.search.split()
    ]
    found, times = None, {}
    for settings in map(dict, itertools.product(*ladders)):
        job = Job(network, names, options, settings, options.port)
        options.port += 1
        try:
            job.run(4)
            took = statistics.median(job.run(options.rounds)["seconds"])
        finally:
            job.close()
        times[" ".join(f"{name}={value}" for name, value in settings.items())] = took
        say(f"[tuner] fixed {settings}: {1e3 * took:.1f} ms")
        if found is None or took < found[1]:
            found = settings, took
    return found[0], times


def compare(network, names, options, start: dict[str, str], best: dict[str, str]) -> dict:
    jobs = {}
    try:
        for kind, settings in {"tuned": start, "start": start, "best": best}.items():
            jobs[kind] = Job(network, names, options, settings, options.port, kind == "tuned")
            options.port += 1
        # The start in turn with it, by what all operations take: rare long ones count.
        while_tuning = {"tuned": 0.0, "start": 0.0}
        for begun in range(0, options.operations, BLOCK):
            count = min(BLOCK, options.operations - begun)
            for kind in ("tuned", "start") if begun // BLOCK % 2 == 0 else ("start", "tuned"):
                tuning = jobs[kind].run(count)
                while_tuning[kind] += sum(tuning["seconds"])
                if kind == "tuned":
                    counts = {"trials": tuning["tuner_trials"], "kept": tuning["tuner_kept"]}
        seconds = {kind: [] for kind in jobs}
        for turn in range(options.turns):
            for kind in sorted(jobs, key=lambda kind: (turn * 7 + len(kind)) % 3):
                seconds[kind] += jobs[kind].run(6)["seconds"][1:]
        result = {kind: statistics.median(times) for kind, times in seconds.items()}
        result["while_tuning"] = while_tuning["tuned"] / while_tuning["start"]
        return result | counts
    finally:
        for job in jobs.values():
            job.close()


def table(results: dict[str, dict], best: dict[str, str], options) -> str:
    lines = [
        f"all-reduce of {options.mib:g} MiB, {options.hosts} hosts at {options.mbit:g} Mbit/s; best fixed of the search: {best}",
        "",
        f"| begins at | after {options.operations} operations, ms | start, ms | best fixed, ms | by the best | by the start | "
        "while tuning, by the start | trials | kept |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in results.items():
        lines.append(
            f"| {name} | {1e3 * row['tuned']:.1f} | {1e3 * row['start']:.1f} | {1e3 * row['best']:.1f} | "
            f"{row['tuned'] / row['best']:.3f} | {row['tuned'] / row['start']:.3f} | {row['while_tuning']:.3f} | "
            f"{row['trials']} | {row['kept']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks/tuner/run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=number(int, 2, 250), default=4, help="(default %(default)s)")
    parser.add_argument(
        "--mbit", type=number(float, 0), default=500, help="rate of each link; 0: no limit (default %(default)s)"
    )
    # From one element on.
    parser.add_argument("--mib", type=number(float, 2**-18), default=4, help="size (default %(default)s)")
    parser.add_argument("--starts", default=",".join(STARTS), help="of %(default)s")
    parser.add_argument("--search", default=SEARCH, metavar="NAME=VALUE,...", help="fixed settings (default %(default)s)")
    parser.add_argument("--operations", type=number(int, 1), default=200, help="for the tuner (default %(default)s)")
    parser.add_argument(
        "--rounds", type=number(int, 1), default=15, help="operations of each fixed setting (default %(default)s)"
    )
    parser.add_argument("--turns", type=number(int, 1), default=8, help="(default %(default)s)")
    parser.add_argument("--log", action="store_true", help="what the tuner tries, on stderr")
    parser.add_argument("--output", default=str(ROOT / "benchmarks" / "results"))
    options = parser.parse_args()
    options.port = 29500
    if os.geteuid() != 0:
        say("[tuner] needs root, for network namespaces")
        return 1
    names = [f"h{index}" for index in range(options.hosts)]
    network = hosts.Hosts(names, dict.fromkeys(names, options.mbit) if options.mbit else None)
    results = {}
    try:
        best, times = search(network, names, options)
        for name in options.starts.split(","):
            results[name] = compare(network, names, options, STARTS[name], best)
            say(f"[tuner] {name}: {results[name]}")
    except hosts.Failed as error:
        say(f"[tuner] {error}")
        return 1
    finally:
        network.close()
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tuner.json").write_text(json.dumps({"fixed": times, "results": results}, indent=1) + "\n")
    text = table(results, best, options)
    (folder / "tuner.md").write_text(text)
    say(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
