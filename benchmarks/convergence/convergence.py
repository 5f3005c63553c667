"""Whether training survives compression: stock DDP on two nodes (of one rank, over loopback), the same script, seeds and data;
only the codec of the group differs.

    benchmarks/convergence/run                           digits, a small GPT and a ResNet-18, 3 seeds
    benchmarks/convergence/run --codec none --codec topk:k=0.05 --seeds 5 --tasks digits

Tasks: scikit-learn's digits; characters of modules that Python ships; a ResNet-18 on made pictures whose best loss is known. Writes convergence.json, convergence.md and convergence.png.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MARK = "RESULT "
NODES = 2


def say(text: str) -> None:
    print(text, flush=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def measure(options) -> list[dict]:
    base = {k: v for k, v in os.environ.items() if not k.startswith(("HYBRIDPS_", "UCX_", "MASTER_", "TORCHELASTIC_"))}
    base |= {"WORLD_SIZE": str(NODES), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "OMP_NUM_THREADS": "1"}
    base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "HYBRIDPS_INTERFACE": "lo"}
    base |= {"HYBRIDPS_LIMITS": "compress_min_bytes=1K"}  # the models are small
    job = json.dumps({"codecs": options.codecs, "seeds": options.seeds, "tasks": options.tasks.split(",")})
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / "worker.py"), job],
            env=base | {"RANK": str(rank), "HYBRIDPS_NODE": f"node{rank}"},
            cwd=ROOT,
            **pipes,
        )
        for rank in range(NODES)
    ]
    try:
        texts = [rank.communicate(timeout=options.limit_s)[0] for rank in ranks]
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()
    found = [line for line in texts[0].splitlines() if line.startswith(MARK)]
    if not found:
        raise RuntimeError("the ranks ended without a result:\n" + "\n".join(text[-1500:] for text in texts))
    return json.loads(found[0][len(MARK) :])


def table(results: list[dict], codecs: list[str]) -> str:
    lines = ["| task | codec | loss, mean and range over seeds | against none, % | right, % | bytes, part |", "|---|---|---|---|---|---|"]
    for task in dict.fromkeys(r["task"] for r in results):
        plain = None
        for codec in codecs:
            rows = [r for r in results if r["task"] == task and r["codec"] == codec]
            losses = [r["loss"] if r["loss"] is not None else float("nan") for r in rows]
            mean = statistics.fmean(losses)
            plain = mean if plain is None else plain
            score = statistics.fmean(r["score"] for r in rows)
            sent = sum(r["compress_bytes"] for r in rows)
            part = f"{sum(r['compress_wire_bytes'] for r in rows) / sent:.3f}" if sent else "1"
            lines.append(
                f"| {task} | {codec} | {mean:.4f} ({min(losses):.4f}–{max(losses):.4f}) | {100 * (mean / plain - 1):+.2f} | "
                f"{score:.2f} | {part} |"
            )
    return "\n".join(lines) + "\n"


def draw(results: list[dict], codecs: list[str], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    tasks = list(dict.fromkeys(r["task"] for r in results))
    figure, axes = pyplot.subplots(1, len(tasks), figsize=(3.6 * len(tasks), 4.4), constrained_layout=True, squeeze=False)
    for axis, task in zip(axes[0], tasks, strict=True):
        for codec in codecs:
            curves = [r["curve"] for r in results if r["task"] == task and r["codec"] == codec]
            mean = [statistics.fmean(values) for values in zip(*curves, strict=True)]
            axis.plot([10 * (i + 1) for i in range(len(mean))], mean, label=codec, linewidth=1.2)
        axis.set(title=f"{task}, mean of {len(curves)} seeds", xlabel="step", yscale="log")
    axes[0][0].set(ylabel="training loss")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks/convergence/run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = ["none", "bf16", "int8", "int4", "onebit", "topk:k=0.05", "randomk:k=0.1", "dithering"]
    parser.add_argument(
        "--codec", action="append", dest="codecs", help=f"one after the other; the first is compared with ({default})"
    )
    parser.add_argument("--seeds", type=int, default=3, help="(default %(default)s)")
    parser.add_argument("--tasks", default="digits,text,images", help="(default %(default)s)")
    parser.add_argument("--limit-s", type=float, default=7200, help="for all (default %(default)s)")
    parser.add_argument("--output", default=str(ROOT / "benchmarks" / "results"))
    options = parser.parse_args()
    options.codecs = options.codecs or default
    results = measure(options)
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "convergence.json").write_text(json.dumps(results) + "\n")
    text = table(results, options.codecs)
    (folder / "convergence.md").write_text(text)
    try:
        draw(results, options.codecs, folder / "convergence.png")
    except ImportError as error:
        say(f"[convergence] no picture: {error}")
    say(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
