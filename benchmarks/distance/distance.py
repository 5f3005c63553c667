"""examples/train_over_distance.py between two sites made of namespaces (benchmarks/lab), way by way: gloo's DDP, hybridps's, with
int8, and LocalSteps. What a step takes, what crosses the trunk, and the loss that is reached.

    benchmarks/distance/run                                     2 + 2 hosts, 200 Mbit/s and 50 ms between them; needs root
    benchmarks/distance/run --ways hybridps,local --rounds 1
    benchmarks/distance/run --mbit 100 --round-trip-ms 150 --loss 0.001
    benchmarks/distance/run -- --steps 192 --every 32           what follows is the example's

Each way has hosts of its own, so that the bytes of the trunk are its own: of the whole run, start included, by its steps, in the
direction that carried more. Medians over rounds. Writes distance.json and distance.md. Two cores carry some 200 Mbit/s
through the relay beside four ranks that compute: with more the cores are measured.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "benchmarks" / "lab"), str(ROOT / "scripts")]

import hosts  # noqa: E402
from hybridps.tools.output import load_of_machine  # noqa: E402
from lab import relay_program, say  # noqa: E402

EXAMPLE = ROOT / "examples" / "train_over_distance.py"
WAYS = {
    "gloo": "DDP, gloo",
    "hybridps": "DDP, hybridps",
    "int8": "DDP, hybridps, `HYBRIDPS_COMPRESS=int8`",
    "local": "hybridps.LocalSteps",
}
TOLD = re.compile(r": ([\d.]+) ms a step; .*; loss on points not seen ([\d.]+)")


def train(way: str, options) -> dict:
    """One run of the example: seconds of a step, bytes of the trunk in a step, loss."""
    names = [f"h{index}" for index in range(2 * options.hosts)]
    uplinks = hosts.Uplinks(
        {name: index // options.hosts for index, name in enumerate(names)},
        [options.mbit] * 2,
        options.round_trip_ms / 2,
        options.loss,
        max(5.0, options.round_trip_ms),  # a router's queue holds what is under way
        relay_program(),
    )
    network = hosts.Hosts(names, dict.fromkeys(names, options.card_mbit), uplinks=uplinks)
    unwanted = ("HYBRIDPS_", "UCX_", "GLOO_", "MASTER_", "TORCHELASTIC_")
    base = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
    base |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    base |= {"WORLD_SIZE": str(len(names)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    base |= {"MASTER_ADDR": network.address[names[0]], "MASTER_PORT": "29500"}
    base |= {"GLOO_SOCKET_IFNAME": hosts.INTERFACE, "HYBRIDPS_INTERFACE": hosts.INTERFACE}
    base |= dict(pair.split("=", 1) for pair in options.env)
    command = [sys.executable, str(EXAMPLE), "--way", way, "--steps", str(options.steps), *options.more]
    ranks: list[subprocess.Popen] = []
    try:
        for rank, name in enumerate(names):
            pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            environment = base | {"RANK": str(rank), "HYBRIDPS_NODE": name}
            ranks.append(network.popen(name, command, env=environment, cwd=ROOT, **pipes))
        told = [process.communicate(timeout=options.limit_s)[0] for process in ranks]
        crossed = network.end_relay()
    except subprocess.TimeoutExpired as error:
        raise hosts.Failed(f"{way}: not done after {options.limit_s} s") from error
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
            process.wait()
        network.close()
    found = TOLD.search(told[0])
    if not found or any(process.returncode for process in ranks):
        raise hosts.Failed(f"{way} ended without a result:\n" + "\n".join(text[-1000:] for text in told))
    trunk = max(region["bytes"] for region in crossed) / options.steps
    return {"seconds": float(found[1]) / 1e3, "trunk_bytes": trunk, "loss": float(found[2])}


def table(done: dict[str, list[dict]], title: str) -> str:
    lines = [title, "", "| | ms a step | × gloo | MB over the trunk a step | loss |", "|---|---|---|---|---|"]
    figures = ("seconds", "trunk_bytes", "loss")
    medians = {way: {k: statistics.median(r[k] for r in rounds) for k in figures} for way, rounds in done.items()}
    for way, row in medians.items():
        faster = f"{medians['gloo']['seconds'] / row['seconds']:.2f}" if "gloo" in medians else "–"
        lines.append(
            f"| {WAYS[way]} | {row['seconds'] * 1e3:.1f} | {faster} | {row['trunk_bytes'] / 1e6:.2f} | {row['loss']:.4f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks/distance/run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", default=",".join(WAYS), help="what is compared (default %(default)s)")
    parser.add_argument("--hosts", type=int, default=2, help="of each site (default %(default)s)")
    parser.add_argument("--mbit", type=float, default=200, help="between the sites (default %(default)s)")
    parser.add_argument("--card-mbit", type=float, default=500, help="of each host (default %(default)s)")
    parser.add_argument("--round-trip-ms", type=float, default=50, help="between the sites (default %(default)s)")
    parser.add_argument("--loss", type=float, default=0, help="part of the packets that is lost on the way")
    parser.add_argument("--steps", type=int, default=96, help="of each run (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (default %(default)s)")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="setting for all processes")
    parser.add_argument("--limit-s", type=float, default=600, help="for one run (default %(default)s)")
    parser.add_argument("--output", default=str(ROOT / "benchmarks" / "results"))
    parser.add_argument("more", nargs="*", help="for the example")
    options = parser.parse_args()
    ways = options.ways.split(",")
    if os.geteuid() != 0:
        say("[distance] needs root, for network namespaces")
        return 1
    if unknown := [way for way in ways if way not in WAYS]:
        say(f"[distance] nothing is called {', '.join(unknown)}: {', '.join(WAYS)}")
        return 1
    done: dict[str, list[dict]] = {way: [] for way in ways}
    try:
        for index in range(options.rounds):
            for way in ways[index % len(ways) :] + ways[: index % len(ways)]:
                before = load_of_machine()
                done[way].append(train(way, options) | {"load_before": before, "load_after": load_of_machine()})
                say(f"[distance] {way}: {done[way][-1]}")
    except hosts.Failed as error:
        say(f"[distance] {error}")
        return 1
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    setup = {name: value for name, value in vars(options).items() if name != "output"}
    (folder / "distance.json").write_text(json.dumps({"setup": setup, "ways": done}, indent=1) + "\n")
    title = (
        f"{options.hosts} + {options.hosts} hosts of {options.card_mbit:g} Mbit/s, {options.mbit:g} Mbit/s and "
        f"{options.round_trip_ms:g} ms between the sites{f', {options.loss:.2%} lost' if options.loss else ''}; "
        f"{options.steps} steps, {options.rounds} runs each"
    )
    text = table(done, title)
    (folder / "distance.md").write_text(text)
    say("\n" + text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
