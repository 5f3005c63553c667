"""What compression gains: all-reduces between hosts made of namespaces, whose links have a rate; without, compressed, and
gloo's in turn in the same processes.

    benchmarks/compress/run                                  n = 4 at 500 Mbit/s, 16 and 64 MiB; needs root
    benchmarks/compress/run --mbit 1000 --codecs int8,onebit --rounds 9
    benchmarks/compress/run --servers 2                      with dedicated servers beside the hosts
    benchmarks/compress/run --codecs default --data autocast --ddp autocast,bf16,fsdp      lossless, no setting changed

`--data`: fp32 is Gaussian; autocast is the same rounded to bf16 and widened again, as gradients under torch.autocast are; bf16 is the type; bits
are random bits of int32. A DDP step trains a GPT of 13 million parameters. Medians over rounds of the slowest rank. "limit":
hybridps.limits.bounds' for what the cards deliver, with the dedicated servers', times what the codec makes of bytes; bytes: a rank's, beside what
the plan and the codec's block say. NMSE: squared error of the sum, by the sum's square. Writes compress.json and compress.md.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "scripts"))
import hosts  # noqa: E402

from hybridps.limits import bounds  # noqa: E402

MARK = "RESULT "
MIB = 1 << 20
# Bytes on the wire per byte of fp32, of full blocks: docs/compression.md.
RATIOS = {"bf16": 0.5, "fp16": 0.5, "int8": 34 / 128, "int4": 18 / 128, "onebit": 34 / 1024}


def say(text: str) -> None:
    print(text, flush=True)


def environment(options, network: hosts.Hosts, names: list[str]) -> dict[str, str]:
    unwanted = ("HYBRIDPS_", "UCX_", "GLOO_", "MASTER_", "TORCHELASTIC_")
    base = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
    base |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    base |= {"WORLD_SIZE": str(options.hosts), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    base |= {"MASTER_ADDR": network.address[names[0]], "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": hosts.INTERFACE}
    return base | {"HYBRIDPS_INTERFACE": hosts.INTERFACE} | dict(pair.split("=", 1) for pair in options.env)


def measure(options) -> list[dict]:
    names = [f"h{index}" for index in range(options.hosts)]
    spare = [f"s{index}" for index in range(options.servers)]
    network = hosts.Hosts(names + spare, dict.fromkeys(names + spare, options.mbit))
    job = {
        "codecs": options.codecs.split(","),
        "mib": [float(mib) for mib in options.mib.split(",")],
        "rounds": options.rounds,
        "warm_up": options.warm_up,
        "gloo": not options.no_gloo,
        "ddp": options.ddp.split(",") if options.ddp else [],
        "data": options.data,
    }
    processes = []
    try:
        base = environment(options, network, names)
        if spare:
            base |= {"HYBRIDPS_SERVERS": ",".join(f"{network.address[name]}:29600" for name in spare)}
            base |= {"HYBRIDPS_TOKEN": "of this benchmark", "HYBRIDPS_SERVERS_REQUIRED": "1"}
        for name in spare:
            command = [
                str(Path(sys.executable).parent / "hybridps-server"),
                "--listen",
                f"{network.address[name]}:29600",
            ]
            quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
            processes.append(network.popen(name, command, env=base | {"HYBRIDPS_NODE": name}, cwd=ROOT, **quiet))
        ranks = []
        for rank, name in enumerate(names):
            command = [sys.executable, str(HERE / "worker.py"), json.dumps(job)]
            pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            ranks.append(
                network.popen(name, command, env=base | {"RANK": str(rank), "HYBRIDPS_NODE": name}, cwd=ROOT, **pipes)
            )
        processes += ranks
        texts = [rank.communicate(timeout=options.limit_s)[0] for rank in ranks]
        found = [line for line in texts[0].splitlines() if line.startswith(MARK)]
        if not found:
            raise hosts.Failed("the ranks ended without a result:\n" + "\n".join(text[-1500:] for text in texts))
        return json.loads(found[0][len(MARK) :])
    except subprocess.TimeoutExpired as error:
        raise hosts.Failed(f"not done after {options.limit_s} s") from error
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        network.close()


def planned(options, mib: float, ratio: float) -> float | None:
    """Bytes that a rank's card sends, and receives as many: 2 (n-1)/n of the tensor; None with servers."""
    n = options.hosts
    return None if options.servers else 2 * (n - 1) / n * mib * MIB * ratio


def limit(options, mib: float) -> float:
    """Seconds of the tensor as it is (hybridps.limits.bounds): what TCP delivers through the cards, servers' too."""
    rate = bounds.goodput(options.mbit / 1e3)
    nodes = list(range(options.hosts))
    return bounds.limit_seconds("allreduce", mib * MIB, nodes, [rate] * options.hosts, [rate] * options.servers)


def table(rows: list[dict], options) -> str:
    servers = f", {options.servers} dedicated servers" if options.servers else ""
    lines = [
        f"all-reduce of {options.data}, {options.hosts} hosts at {options.mbit:g} Mbit/s{servers}",
        "",
        "| MiB | | ms | × off | × gloo | % of the limit | CPU ms | sent, MB | planned, MB | NMSE |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        of = {other["name"]: other for other in rows if other["mib"] == row["mib"]}
        gloo = f"{of['gloo']['seconds'] / row['seconds']:.2f}" if "gloo" in of else "–"
        if isinstance(row["mib"], str):
            lines.append(
                f"| {row['mib']} | {row['name']} | {row['seconds'] * 1e3:.1f} | "
                f"{of['off']['seconds'] / row['seconds']:.2f} | {gloo} | – | – | – | – | "
                f"{'losses equal' if row['same'] else 'losses differ'} |"
            )
            continue
        ratio = 1.0 if row["name"] in ("off", "gloo") else RATIOS.get(row["name"].split(":")[0])
        plan = planned(options, row["mib"], ratio) if ratio else None
        of_limit = "–" if not ratio else f"{100 * limit(options, row['mib']) * ratio / row['seconds']:.0f}"
        lines.append(
            f"| {row['mib']:g} | {row['name']} | {row['seconds'] * 1e3:.1f} | "
            f"{of['off']['seconds'] / row['seconds']:.2f} | {gloo} | "
            f"{of_limit} | {row['cpu_seconds'] * 1e3:.1f} | {row['sent'] / 1e6:.3f} | "
            + ("–" if plan is None or row["name"] == "gloo" else f"{plan / 1e6:.3f}")
            + f" | {row['nmse']:.1e} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks/compress/run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=4, help="(default %(default)s)")
    parser.add_argument("--servers", type=int, default=0, help="dedicated servers (default %(default)s)")
    parser.add_argument("--mbit", type=float, default=500, help="rate of each link (default %(default)s)")
    parser.add_argument("--mib", default="16,64", help="sizes (default %(default)s)")
    parser.add_argument(
        "--codecs", default="exact,bf16,int8,int4,onebit", help="as in HYBRIDPS_COMPRESS; with commas between"
    )
    parser.add_argument(
        "--data",
        choices=["fp32", "autocast", "bf16", "bits"],
        default="fp32",
        help="what is summed (default %(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=5, help="(default %(default)s)")
    parser.add_argument("--warm-up", type=int, default=2, help="(default %(default)s)")
    parser.add_argument(
        "--ddp", default="", help="also steps of stock DDP: fp32, autocast, bf16; fsdp: of FSDP2 in bf16"
    )
    parser.add_argument("--no-gloo", action="store_true")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="setting for all processes")
    parser.add_argument("--limit-s", type=float, default=600, help="for all (default %(default)s)")
    parser.add_argument("--output", default=str(ROOT / "benchmarks" / "results"))
    options = parser.parse_args()
    if os.geteuid() != 0:
        say("[compress] needs root, for network namespaces")
        return 1
    try:
        rows = measure(options)
    except hosts.Failed as error:
        say(f"[compress] {error}")
        return 1
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compress.json").write_text(json.dumps(rows, indent=1) + "\n")
    text = table(rows, options)
    (folder / "compress.md").write_text(text)
    say(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
