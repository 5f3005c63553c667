"""Measures the table of gpu_rows.py: CUDA tensors on this machine, beside gloo or NCCL in the same processes.

    benchmarks/gpu/run                              everything that the GPUs here allow
    benchmarks/gpu/run --only allreduce,ddp-gpt2    rows by name, tag or pattern (fsdp2-*)
    benchmarks/gpu/run --list
    benchmarks/gpu/run --device cpu                 the same code on CPU tensors, small: does the program run?

Writes NAME.json for each row, as soon as it is measured, and table.md to the output folder. Exit status: 0 all rows
were measured or skipped with a reason, 1 some failed, 2 wrong arguments, 77 nothing could be measured here.
"""

import argparse
import fnmatch
import json
import sys
import tempfile
import threading
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE))

import gpu_rows  # noqa: E402
from hybridps.tools import local_ranks  # noqa: E402
from hybridps.tools.output import load_of_machine  # noqa: E402

SKIPPED = 77
DRIFT_MAX, OF_LIMIT_MAX = 0.1, 1.05


def say(text: str = "") -> None:
    print(text, flush=True)


def chosen(asked: str) -> list[gpu_rows.Row]:
    rows = []
    for pattern in filter(None, asked.split(",")):
        found = [row for row in gpu_rows.ROWS if fnmatch.fnmatch(row.name, pattern) or pattern in row.tags]
        if not found:
            raise ValueError(f"no row is called {pattern!r}; --list shows them")
        rows += found
    return [row for row in gpu_rows.ROWS if row in rows or not asked]


def gpus() -> tuple[int, str]:
    """How many there are, and their name or why there is none."""
    try:
        import torch
        from hybridps.backend import load

        if not load.build_info().CUDA:
            return 0, "this build of hybridps carries CPU tensors only"
        found = load.load_extension().cuda().split(";")[0]
        if found.startswith("no device") or not torch.cuda.is_available():
            return 0, found if found.startswith("no device") else "torch.cuda.is_available() is false"
        return torch.cuda.device_count(), found
    except ImportError as error:
        return 0, str(error)


def figures_of(result: dict) -> dict:
    """What targets and the table are about; None or left out: not measured."""
    (_, ours), *others = result["backends"].items()
    figures = {"ms": ours["seconds"] * 1e3}
    figures |= {name: ours.get(name) for name in ("of_limit", "hidden", "tokens_per_second")}
    figures["apart"] = result.get("apart")
    figures["wrong"] = ours.get("wrong") if "wrong" in ours else result.get("wrong")
    if "p99_seconds" in ours:
        figures["p99_ms"] = ours["p99_seconds"] * 1e3
    if "synchronisations" in ours:
        figures["p50_us"] = ours["seconds"] * 1e6
        seen = ours["synchronisations"]
        figures["syncs"] = max(len(rank["found"]) for rank in seen) if all("found" in rank for rank in seen) else None
    for name, peer in others:
        figures |= {"peer": name, "peer_ms": peer["seconds"] * 1e3, "ratio": peer["ours_is_faster_by"]}
        figures |= {"peer_of_limit": peer.get("of_limit"), "peer_hidden": peer.get("hidden")}
        figures |= {"overhead_us": (ours["seconds"] - peer["seconds"]) * 1e6, "peer_drift": peer["drift"]}
    if "held" in result:
        ranks = result["held"]

        def grown(what):
            return max(rank["at_the_end"][what] - rank["after_a_fifth"][what] for rank in ranks) / 2**20

        figures["grown_mib"] = max(grown(what) for what in ranks[0]["at_the_end"])
        pinned = max(rank["at_the_end"]["pinned"] for rank in ranks)
        figures["pinned_to_bucket"] = pinned / result["bytes"] if pinned else None
    return figures


def doubts(result: dict, figures: dict) -> list[str]:
    """Why the figures should not be believed."""
    reasons = []
    if figures.get("wrong"):
        reasons.append(f"{figures['wrong']} wrong elements")
    if abs(figures.get("peer_drift", 0)) > DRIFT_MAX:
        reasons.append(f"{figures['peer']} drifted by {figures['peer_drift']:+.0%}")
    if (figures.get("of_limit") or 0) > OF_LIMIT_MAX:
        reasons.append("faster than the limit, which was measured too low")
    if any(result["backends"]["hybridps"].get("waits_for_stream") or ()):
        reasons.append("the call waits for the stream")
    return reasons


def remarks(result: dict, figures: dict) -> list[str]:
    said = [f"{name} cannot: {why}" for name, why in result.get("refused", {}).items()]
    if limits := result.get("limits"):
        said.append(", ".join(f"{what} {seconds * 1e3:.3g} ms" for what, seconds in limits.items()))
    if rates := result.get("staging_rates"):
        said.append("GB/s of a rank " + ", ".join(f"{what} {rate / 1e9:.3g}" for what, rate in rates.items()))
    if "p50_us" in figures:
        first = result["backends"]["hybridps"]["synchronisations"][0]
        if figures["syncs"] is None:
            said.append(f"synchronisations not known: {first.get('unknown', 'not on every rank')}")
        else:
            driver = "" if first["sees_driver"] else ", those of the driver are not seen"
            said.append(f"{figures['syncs']} synchronisations in {first['operations']} calls{driver}")
    if "alone_seconds" in result:
        said.append(f"{result['parameters'] / 1e6:.3g} M parameters, {len(result['buckets'])} buckets")
        said.append(f"without communication {result['alone_seconds'] * 1e3:.3g} ms")
    if figures.get("hidden") is not None:
        peer = f", {figures['peer']}'s {figures['peer_hidden']:.0%}" if figures.get("peer_hidden") is not None else ""
        said.append(f"{figures['hidden']:.0%} hidden{peer}")
    if figures.get("tokens_per_second"):
        said.append(f"{figures['tokens_per_second']:.0f} tokens/s")
    if figures.get("apart") is not None:
        said.append(f"gradients {figures['apart']:.1e} apart")
    if "held" in result:
        said.append(f"{figures['grown_mib']:.2f} MiB more in the last 4/5 of {result['rounds']} rounds")
    return said


BAR_TEXT = {
    "ratio": "{} {:g}x the peer",
    "of_limit": "{} {:.0%} of the limit",
    "p50_us": "call {} {:g} us",
    "syncs": "{} {:g} synchronisations",
    "hidden": "{} {:.0%} hidden",
    "apart": "gradients {} {:g} apart",
    "overhead_us": "{} {:g} us over the peer",
    "pinned_to_bucket": "pinned {} {:g} x the largest tensor",
    "grown_mib": "growth {} {:g} MiB",
}


def bar_text(bar) -> str:
    return BAR_TEXT[bar.figure].format("≥" if bar.at_least else "≤", bar.value)


def table(done: list[tuple[gpu_rows.Row, dict]], device: str) -> str:
    lines = [] if device == "cuda" else ["On CPU tensors, small: it proves the program, and says nothing of GPUs.", ""]
    lines += [
        "| row | where | hybridps ms | p99 ms | peer | peer's ms | × peer | % of limit | peer's % | remarks"
        " | targets |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]

    def cell(figures, name, form):
        value = figures.get(name)
        return "–" if value is None else form.format(value)

    for row, result in done:
        if "skipped" in result or "failed" in result:
            why = f"skipped: {result['skipped']}" if "skipped" in result else f"**failed**: {result['failed']}"
            lines.append(f"| {row.name} | {row.place} |" + " – |" * 7 + f" {why} | |")
            continue
        figures = result["figures"]
        verdicts = []
        for bar in row.bars:
            met = bar.is_met(figures)
            verdicts.append(f"{'?' if met is None else 'ok' if met else '**missed**'} {bar_text(bar)}")
        verdicts += [f"**invalid: {doubt}**" for doubt in result["doubts"]]
        forms = {"ms": "{:.3g}", "p99_ms": "{:.3g}", "peer": "{}", "peer_ms": "{:.3g}", "ratio": "{:.2f}"}
        forms |= {"of_limit": "{:.0%}", "peer_of_limit": "{:.0%}"}
        cells = [row.name, row.place, *(cell(figures, name, form) for name, form in forms.items())]
        lines.append("| " + " | ".join([*cells, "; ".join(remarks(result, figures)), "; ".join(verdicts)]) + " |")
    return "\n".join(lines) + "\n"


class Lines(threading.Thread):
    """Gives each line that others add to a file to `take`, while it lives: what comes after may fail or be ended."""

    def __init__(self, path: Path, take) -> None:
        super().__init__(daemon=True)
        self._path, self._take, self._ended, self._at = path, take, threading.Event(), 0

    def run(self) -> None:
        while not self._ended.wait(0.2):
            self._look()
        self._look()

    def _look(self) -> None:
        if not self._path.exists():
            return
        with self._path.open() as file:
            file.seek(self._at)
            while (line := file.readline()).endswith("\n"):
                self._at += len(line.encode())
                self._take(json.loads(line))

    def finish(self) -> None:
        self._ended.set()
        self.join()


def measure(rows: list[gpu_rows.Row], options, count: int, keep) -> list[tuple[gpu_rows.Row, dict]]:
    """`keep` gets each row's result as soon as it is there, as does the list at the end."""
    done = []

    def add(row: gpu_rows.Row, result: dict) -> None:
        done.append((row, result))
        keep(row, result)

    together: dict[tuple, list[gpu_rows.Row]] = {}
    for row in rows:
        if options.device == "cuda" and row.gpus > count:
            add(row, {"skipped": f"needs {row.gpus} GPUs, there {'is' if count == 1 else 'are'} {count}"})
        else:
            row = row if options.device == "cuda" else row.on_cpu()
            together.setdefault((row.nodes, row.ranks, row.peer), []).append(row)
    for (nodes, ranks, peer), group in together.items():
        say(f"[gpu] {group[0].place}, beside {peer}: {', '.join(row.name for row in group)}")
        with tempfile.TemporaryDirectory(prefix="hybridps-gpu-") as folder:
            path = Path(folder) / "results"
            context = {"backends": ["hybridps", peer], "device": options.device, "timeout": options.timeout}
            context |= {"results": str(path), "jobs": [{"name": row.name, **job_of(row, options)} for row in group]}
            command = [sys.executable, str(HERE / "gpu_worker.py"), json.dumps(context)]
            missing = {row.name: row for row in group}

            def take(result: dict, missing=missing) -> None:
                result["figures"] = figures_of(result)
                result["doubts"] = doubts(result, result["figures"]) if options.device == "cuda" else []
                add(missing.pop(result["name"]), result)

            lines = Lines(path, take)
            lines.start()
            try:
                status = local_ranks.run(command, ranks, nodes, "benchmarks/gpu", options.limit_s)
            finally:
                lines.finish()
        for row in missing.values():
            add(row, {"failed": f"the processes ended with status {status} before its end"})
    order = [row.name for row in rows]
    return sorted(done, key=lambda pair: order.index(pair[0].name))


def job_of(row: gpu_rows.Row, options) -> dict:
    job = dict(row.job)
    if options.quick:
        job |= {key: max(2, job[key] // 10) for key in ("iterations", "rounds") if key in job}
    if options.model and "model" in job:
        job["model"] = options.model
    return job


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu/run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="ROWS", help="names, tags or patterns, with commas")
    parser.add_argument("--list", action="store_true", help="show the rows and end")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a tenth of the iterations")
    parser.add_argument("--model", choices=("gpt2", "small", "tiny"), help="for the rows that train (default gpt2)")
    parser.add_argument("--timeout", type=float, default=120, help="of one operation, in seconds")
    parser.add_argument("--limit-s", type=float, default=900, help="for rows in the same processes")
    parser.add_argument("--output", default=str(ROOT / "build" / "benchmarks-gpu"), help="folder (default %(default)s)")
    options = parser.parse_args()
    try:
        rows = chosen(options.only)
    except ValueError as error:
        say(f"[gpu] {error}")
        return 2
    if options.list:
        for row in rows:
            say(
                f"{row.name:22s} {row.place:22s} beside {row.peer}: {', '.join(map(bar_text, row.bars)) or 'no target'}"
            )
        return 0
    count, found = gpus() if options.device == "cuda" else (0, "")
    if options.device == "cuda" and count == 0:
        say(f"[gpu] skipped, nothing was measured: {found}. --device cpu runs the same code on CPU tensors")
        return SKIPPED
    if found:
        say(f"[gpu] {found}; load {load_of_machine()}")
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)

    def keep(row: gpu_rows.Row, result: dict) -> None:
        (folder / f"{row.name}.json").write_text(json.dumps(result | {"device": options.device}, indent=1) + "\n")

    try:
        done = measure(rows, options, count, keep)
    except KeyboardInterrupt:
        say("[gpu] interrupted")
        return 130
    text = table(done, options.device)
    (folder / "table.md").write_text(text)
    say("\n" + text)
    if any("failed" in result for _, result in done):
        return 1
    return SKIPPED if all("skipped" in result for _, result in done) else 0


if __name__ == "__main__":
    sys.exit(main())
