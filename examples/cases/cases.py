"""Six situations on hosts made of namespaces: a small training with gloo and hybridps, in turn, in the same network.

    examples/cases/run CASE          needs root, Linux and scripts/setup; at most ten minutes
    examples/cases/run --list        the cases
    examples/cases/run CASE --quick  does it run at all? Fewer steps of a smaller model: no figures
    examples/cases/run CASE --render measures nothing: table and picture of what the folder holds

The hosts, the networks and the steps are those of benchmarks/lab: gloo and hybridps are process groups of the same
ranks, a step of one follows a step of the other, and figures are medians. The case killed-node starts jobs of
torchrun (killed.py).

Writes result.json, which keeps the last two runs, and picture.png to a folder of the case in --output; the table
there in README.md, if there is one, becomes that of these runs. The last line says how many times as fast as gloo
hybridps was. A figure is marked invalid if the cores were busy, or if gloo drifted by more than 10 % between the halves
of a run.
"""

import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "benchmarks" / "lab"), str(ROOT / "scripts")]

import hosts  # noqa: E402
import killed  # noqa: E402
import lab  # noqa: E402
from hybridps.tools.output import load_of_machine, plot_complaint  # noqa: E402
from lab import say  # noqa: E402
from rows import MIB, Row, Setup, regions  # noqa: E402

# The first is HYBRIDPS_COMPRESS=off. By default hybridps packs where the cores have time for it; here hosts share two
# cores, which would decide it anew in each run.
OURS, PEER = "hybridps", lab.PEER
PACKED, INT8, ALONE = "hybridps, packed", "hybridps, int8", "hybridps without servers"
WAYS = {
    PACKED: {"compress": "exact:auto=0"},
    INT8: {"compress": "int8:auto=0"},
    ALONE: {"dedicated_servers": False},
}
RUNS_KEPT = 2


@dataclass(frozen=True)
class Case:
    title: str
    rows: tuple[Row, ...] = ()  # none: the killed node


def training(ways: tuple[str, ...] = (PACKED,), mib: int = 16, warmup: int = 3, iterations: int = 10) -> dict:
    """So many MiB of gradients, in layers of 4 MiB; DDP makes a bucket of the last one, and one of the others."""
    return {
        "do": "train",
        "bytes": mib * MIB,
        "layers": mib // 4,
        "width": 1024,
        "batch": 32,
        "lr": 0.1,
        "warmup": warmup,
        "warmup_of": {PEER: min(3, warmup)},
        "iterations": iterations,
        "ways": {name: WAYS[name] for name in ways},
    }


# Rates are low enough that the cores do not decide, and are the same parts of the rates that the titles name.
CASES = {
    "seven-nodes": Case(
        "Seven nodes, links of 2.5 Gbit/s of which 1.4 arrive; a 25th of it",
        (
            Row("all paths carry 1.4", Setup(hosts=7, mbit=56), training(mib=8)),
            Row("one path carries 1.4", Setup(hosts=7, mbit=100, slow=0.56), training(mib=8, warmup=12)),
        ),
    ),
    "two-sites": Case(
        "Two sites of two nodes, 1 Gbit/s and 50 ms between them; a tenth of the rates",
        (Row("", regions(2, 2, trunk=100, delay_ms=50, mbit=400), training((PACKED, INT8))),),
    ),
    "four-pis": Case("Four nodes with cards of 100 Mbit/s", (Row("", Setup(mbit=100), training((PACKED, INT8), 8)),)),
    "slow-card": Case(
        "Eight nodes of 1 Gbit/s, one card at half the rate; a tenth of it",
        (Row("", Setup(hosts=8, mbit=100, slow=0.5), training(mib=8, warmup=12)),),
    ),
    "spare-machines": Case(
        "Four nodes and two spare machines, 1 Gbit/s; a tenth of it",
        (Row("", Setup(mbit=100, servers=2), training((PACKED, ALONE))),),
    ),
    "killed-node": Case("Four nodes, one is killed in a step"),
}


def figures_of(row: Row, result: dict) -> dict:
    """What a run keeps of each way: seconds of a step, how many steps, how many times as fast as gloo it was."""
    summary = lab.figures_of(result)
    cpu_load = max(way["cpu_seconds"] / way["seconds"] for way in result["backends"].values()) / os.cpu_count()
    doubts = lab.doubts(row.setup, result, summary | {"cpu_load": cpu_load})
    ways = {
        name: {
            "seconds": way["seconds"],
            "steps": way["operations"],
            "limit_seconds": way["limit_seconds"],
            "times_gloo": way.get("faster_than_peer", 1.0),
            "loss": [way["losses"][0], way["losses"][-1]],
        }
        for name, way in result["backends"].items()
    }
    return {"what": row.name, "network": row.setup.text, "ways": ways, "cpu_load": cpu_load, "doubts": doubts}


def measure(name: str, options) -> dict:
    case, parts = CASES[name], []
    if not case.rows:
        return killed.measure(options)
    for row in case.rows:
        if row.setup.servers and not lab.server_program():
            raise hosts.Failed("the program hybridps-server was not found: run scripts/setup")
        if options.quick:
            less = {"bytes": MIB, "layers": 4, "width": 256, "warmup": 3, "iterations": 3}
            row = Row(row.name, row.setup, row.job | less)
        say(f"[case] {row.setup.text}{f' ({row.name})' if row.name else ''}; load {load_of_machine()}")
        lab.Run(row.setup, options).measure([row], lambda row, result: parts.append(figures_of(row, result)))
        say("[case] " + "; ".join(f"{way}: {one['seconds'] * 1e3:.0f} ms" for way, one in parts[-1]["ways"].items()))
    return {"parts": parts}


def kind_of(run: dict) -> list:
    """Runs of another network, or of other ways, are not kept beside this one."""
    return [(part["what"], part["network"], list(part["ways"])) for part in run.get("parts", ())]


def table(record: dict) -> str:
    """For the case's README.md. Cells have a figure of each run."""
    runs = record["runs"]
    if "parts" not in runs[0]:
        return killed.table(runs)
    lines = ["| |ms a step|links allow, ms|× gloo|", "|-|-|-|-|"]
    for index, part in enumerate(runs[0]["parts"]):
        for way in sorted(part["ways"], key=lambda way: way != PEER):
            of_runs = [run["parts"][index]["ways"][way] for run in runs]
            cells = [
                f"{part['what']}: {way}" if part["what"] else way,
                ", ".join(f"{way['seconds'] * 1e3:.0f}" for way in of_runs),
                f"{of_runs[0]['limit_seconds'] * 1e3:.0f}",
                "1" if way == PEER else ", ".join(f"{way['times_gloo']:.2f}" for way in of_runs),
            ]
            lines.append(f"|{'|'.join(cells)}|")
    return "\n".join(lines) + "\n"


def draw(name: str, record: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    run, title = record["runs"][-1], CASES[name].title
    if "parts" not in run:
        killed.draw(run, title, path)
        return
    bars = sum(len(part["ways"]) for part in run["parts"])
    figure, axes = pyplot.subplots(
        len(run["parts"]), 1, figsize=(8, 1.1 + 0.42 * bars), sharex=True, squeeze=False, constrained_layout=True
    )
    for axis, part in zip(axes[:, 0], run["parts"], strict=True):
        ways = sorted(part["ways"], key=lambda way: way != PEER)
        shown = [part["ways"][way] for way in ways]
        colours = ["0.6" if way == PEER else "C0" for way in ways]
        axis.barh(range(len(ways)), [way["seconds"] * 1e3 for way in shown], color=colours, height=0.7)
        for place, (name_of, way) in enumerate(zip(ways, shown, strict=True)):
            axis.plot([way["limit_seconds"] * 1e3] * 2, [place - 0.42, place + 0.42], color="black", linewidth=2)
            label = f"{way['seconds'] * 1e3:.0f} ms" + (name_of != PEER) * f", {way['times_gloo']:.2f} × gloo"
            axis.text(1.01, place, label, transform=axis.get_yaxis_transform(), va="center", fontsize=9)
        axis.set_yticks(range(len(ways)), ways, fontsize=9)
        axis.invert_yaxis()
        axis.set_title(part["what"], fontsize=10)
    axes[-1, 0].set_xlabel("ms a step; black: the least time that the links allow without packing")
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=100)
    pyplot.close(figure)


def last_line(name: str, run: dict) -> str:
    if "parts" not in run:
        return killed.last_line(name, run)
    told = []
    for part in run["parts"]:
        ratios = [f"{way} {figures['times_gloo']:.2f}" for way, figures in part["ways"].items() if way != PEER]
        told.append((part["what"] and f"{part['what']}: ") + ", ".join(ratios))
    return f"{name}, times gloo's speed: {'; '.join(told)}"


def show(name: str, record: dict, folder: Path) -> None:
    text, page = table(record), folder / "README.md"
    say("\n" + text)
    if page.exists():
        page.write_text(re.sub(r"(?m)(^\|.*\n)+", lambda _: text, page.read_text(), count=1))
    if complaint := plot_complaint():
        say(f"[case] no picture: {complaint}")
    else:
        draw(name, record, folder / "picture.png")
        say(f"[case] picture: {os.path.relpath(folder / 'picture.png')}")


def run(name: str, options) -> int:
    folder = Path(options.output).resolve() / name
    kept = folder / "result.json"
    record = json.loads(kept.read_text()) if kept.exists() else {"case": name, "runs": []}
    if options.render:
        if not record["runs"]:
            raise hosts.Failed(f"{folder} has no result.json: run the case without --render first")
        show(name, record, folder)
        return 0
    if os.geteuid() != 0:
        raise hosts.Failed(f"needs root, for network namespaces; on real machines: examples/cases/{name}/README.md")
    before = load_of_machine()
    try:
        measured = measure(name, options)
    except (OSError, subprocess.SubprocessError) as error:
        raise hosts.Failed(f"cannot make hosts here: {error}") from error
    for doubt in [doubt for part in measured.get("parts", ()) for doubt in part["doubts"]]:
        say(f"[case] INVALID, run it again: {doubt}")
    if options.quick:
        say(f"[case] {name}: it runs")
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    loads = {"load_before": before, "load_after": load_of_machine()}
    measured |= {"date": datetime.date.today().isoformat(), "cores": os.cpu_count(), **loads}
    alike = [run for run in record["runs"] if kind_of(run) == kind_of(measured)]
    record["runs"] = [*alike, measured][-RUNS_KEPT:]
    kept.write_text(json.dumps(record, indent=1) + "\n")
    show(name, record, folder)
    say(last_line(name, measured))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="examples/cases/run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("case", nargs="?", choices=CASES, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--list", action="store_true", help="show the cases and end")
    parser.add_argument("--quick", action="store_true", help="few steps, and nothing is written")
    parser.add_argument("--render", action="store_true", help="only show what the output folder holds")
    parser.add_argument("--output", default=str(ROOT / "build" / "cases"), help="default %(default)s")
    options = parser.parse_args()
    if options.list or not options.case:
        for name, case in CASES.items():
            say(f"{name:15s} {case.title}")
        return 0 if options.list else 2
    options.queue_ms, options.env, options.limit_s = 5.0, [], 600.0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return run(options.case, options)
    except hosts.Failed as error:
        say(f"[case] {options.case}: {error}")
        return 1
    except KeyboardInterrupt:
        say("[case] interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main())
