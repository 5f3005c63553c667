"""LocalSteps beside DDP, on four hosts (namespaces) with links of 100 Mbit/s; needs root.

    benchmarks/local/run                      all three parts
    benchmarks/local/run --parts throughput --seeds 1

loss        the same tokens: DDP at every step, and LocalSteps with H = 16 in all its ways; one host at half speed
throughput  a wider model with a small batch: DDP of gloo and of hybridps, and LocalSteps with H = 16
slow        steps of a fixed time, as on a device: how fast the other ranks are where one needs twice the time

Writes local.json and local.md to --output.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import hosts  # noqa: E402

MARK = "RESULT "
WORLD = 4


def ddp(backend: str, **more) -> dict:
    return {"name": f"DDP, {backend}", "kind": "ddp", "backend": backend, **more}


def local(name: str, **options) -> dict:
    more = {key: options.pop(key) for key in ("slow", "step_s", "steps") if key in options}
    return {"name": name, "kind": "local", "options": options, **more}


def jobs(options) -> dict[str, dict]:
    late = {"fragments": 4, "delay": 4, "keep": 0.5}
    small = {"every": 16, "width": 64, "batch": 12, "lr": 3e-3, "steps": options.steps, "seeds": options.seeds}
    wide = {"every": 16, "width": 256, "batch": 2, "lr": 1e-3, "steps": 64, "seeds": options.seeds}
    fixed = {"step_s": options.step_s, "steps": 160}
    return {
        "loss": small
        | {
            "ways": [
                ddp("hybridps"),
                local("nesterov"),
                local("sgd (averages weights)", outer="sgd"),
                local("nesterov, int8", compress="int8"),
                local("nesterov, int4:ef=1", compress="int4:ef=1"),
                local("nesterov, 4 fragments, delay 4, keep 0.5", **late),
                local("asynchronous", staleness=4),
                local("asynchronous, one at half speed", staleness=4, slow=2, step_s=options.step_s),
            ]
        },
        "throughput": wide
        | {
            "ways": [
                ddp("gloo", steps=16),
                ddp("hybridps", steps=16),
                local("nesterov"),
                local("nesterov, int8", compress="int8"),
                local("nesterov, 4 fragments, delay 4", fragments=4, delay=4),
            ]
        },
        "slow": small
        | {
            "ways": [
                local("asynchronous, undisturbed", staleness=4, **fixed),
                local("asynchronous, one at half speed", staleness=4, slow=2, **fixed),
            ]
        },
    }


def measure(job: dict, options) -> list[dict]:
    names = [f"h{rank}" for rank in range(WORLD)]
    network = hosts.Hosts(names, {name: options.mbit for name in names}, 5)
    unwanted = ("HYBRIDPS_", "UCX_", "GLOO_", "MASTER_", "TORCHELASTIC_")
    base = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
    base |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    base |= {"WORLD_SIZE": str(WORLD), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    base |= {"MASTER_ADDR": network.address[names[0]], "MASTER_PORT": "29500"}
    base |= {"HYBRIDPS_INTERFACE": hosts.INTERFACE, "GLOO_SOCKET_IFNAME": hosts.INTERFACE}
    ranks: list[subprocess.Popen] = []
    lines: list[str] = []

    def follow(process: subprocess.Popen) -> None:
        for line in process.stdout:
            lines.append(line)
            if line.startswith(MARK) and json.loads(line[len(MARK) :])["rank"] == 0:
                print(line, end="", flush=True)

    try:
        for rank, name in enumerate(names):
            command = [sys.executable, str(HERE / "worker.py"), json.dumps(job)]
            pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            ranks.append(network.popen(name, command, env=base | {"RANK": str(rank), "HYBRIDPS_NODE": name}, cwd=ROOT, **pipes))
        threads = [threading.Thread(target=follow, args=(process,)) for process in ranks]
        for thread in threads:
            thread.start()
        for process in ranks:
            process.wait(timeout=options.limit_s)
        for thread in threads:
            thread.join()
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
            process.wait()
        network.close()
    found = [json.loads(line[len(MARK) :]) for line in lines if line.startswith(MARK)]
    if len(found) < WORLD * job["seeds"] * len(job["ways"]):
        print("ended early:\n" + "".join(lines[-40:]), flush=True)
    return found


def table(results: dict[str, list[dict]]) -> str:
    text = []
    for part, found in results.items():
        ways = list(dict.fromkeys(r["way"] for r in found))
        rows = {way: [r for r in found if r["way"] == way] for way in ways}

        text += [f"{part} ({found[0]['parameters']} parameters)", ""]
        first = ways[0]
        if part == "loss":
            text += ["| way | test loss, mean over seeds and range | against DDP | bytes between nodes per step, part of DDP's |", "|---|---|---|---|"]
            plain = statistics.fmean(r["loss"] for r in rows[first] if r["rank"] == 0)
            for way in ways:
                losses = [r["loss"] for r in rows[way] if r["rank"] == 0]
                part_of = [sum(r["sent"] for r in rows[w]) / max(r["steps"] for r in rows[w]) for w in (way, first)]
                text.append(
                    f"| {way} | {statistics.fmean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f}) | "
                    f"{100 * (statistics.fmean(losses) / plain - 1):+.2f} % | {part_of[0] / part_of[1]:.4f} |"
                )
        else:
            text += ["| way | steps per second, median of ranks | against the first |", "|---|---|---|"]
            rate = {w: statistics.median(r["steps"] / r["seconds"] for r in rows[w] if part != "slow" or r["rank"] < WORLD - 1) for w in ways}
            for way in ways:
                text.append(f"| {way} | {rate[way]:.2f} | {rate[way] / rate[first]:.3f} |")
        text.append("")
    return "\n".join(text)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks/local/run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default="loss,throughput,slow", help="(default %(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="(default %(default)s)")
    parser.add_argument("--steps", type=int, default=256, help="of the small model (default %(default)s)")
    parser.add_argument("--step-s", type=float, default=0.1, help="a step where it has a fixed time (default %(default)s)")
    parser.add_argument("--mbit", type=float, default=100, help="of each link (default %(default)s)")
    parser.add_argument("--limit-s", type=float, default=3600, help="per part (default %(default)s)")
    parser.add_argument("--output", default=str(ROOT / "benchmarks" / "results"))
    options = parser.parse_args()
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    stored = folder / "local.json"
    results = json.loads(stored.read_text()) if stored.exists() else {}
    for part in options.parts.split(","):
        results[part] = measure(jobs(options)[part], options)
        stored.write_text(json.dumps(results) + "\n")
    (folder / "local.md").write_text(table(results))
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
