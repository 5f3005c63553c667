"""Measures the table of rows.py on hosts made of namespaces, beside gloo in the same processes.

    benchmarks/lab/run                          everything; needs root
    benchmarks/lab/run --only n4-16M,small      rows by name, tag or pattern (n8-*)
    benchmarks/lab/run --list
    benchmarks/lab/run --render                 measures nothing: table and pictures from the folder's NAME.json

Writes NAME.json for each row, table.md, table.png and table-one-host.png to the output folder. Everything that it makes
in the system belongs to its own processes and goes with them.

Beside rows that move bulk stands what plain TCP sockets take for the bytes that the limit lets each card, or each uplink,
carry (worker.plain_streams): one stream from each host, and no sums. Not where hosts have several cards or differ.

Rows tagged mpi have MPI_Allreduce as a third peer, over TCP: MPICH, from an environment of its own. --make-mpi makes it in
build/mpi, --mpi PYTHON names another one that has mpi4py and MPICH; without, these rows are left out.

Rows with regions have a trunk between bridges. Where it has a delay or loses packets, a program does that (relay.cpp, made
with g++ when it is needed), for the kernel may lack netem.

A row is marked invalid when the wire bytes contradict the plan, when the processes used more than 80 % of the cores
(then the CPU is measured, not the network), or when gloo drifted by more than 10 % between the halves.
"""

import argparse
import fnmatch
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "scripts")]

import hosts  # noqa: E402
import mpich  # noqa: E402
import rows  # noqa: E402
from hybridps.limits import bounds  # noqa: E402
from hybridps.tools.output import load_of_machine, plot_complaint  # noqa: E402

PEER = "gloo"
PORT, SERVER_PORT = 29500, 29600
CPU_LOAD_MAX, DRIFT_MAX = 0.8, 0.1
# What a frame adds to its payload at an MTU of 1500, with headers of our own and acknowledgements of the other way.
WIRE_OVERHEAD_MAX = 1.09
MARK = "RESULT "


def say(text: str = "") -> None:
    print(text, flush=True)


def chosen(asked: str) -> list[rows.Row]:
    if not asked:
        return list(rows.ROWS)
    result = []
    for pattern in filter(None, asked.split(",")):
        found = [row for row in rows.ROWS if fnmatch.fnmatch(row.name, pattern) or pattern in row.tags]
        if not found:
            raise hosts.Failed(f"no row is called {pattern!r}; --list shows them")
        result += [row for row in found if row not in result]
    return sorted(result, key=rows.ROWS.index)


def server_program() -> str | None:
    beside = Path(sys.executable).parent / "hybridps-server"
    return str(beside) if beside.is_file() else shutil.which("hybridps-server")


def relay_program() -> Path:
    """The relay, made when it is older than its source."""
    source, program = HERE / "relay.cpp", ROOT / "build" / "relay"
    if not program.is_file() or program.stat().st_mtime < source.stat().st_mtime:
        program.parent.mkdir(exist_ok=True)
        made = subprocess.run(["g++", "-std=c++20", "-O2", "-o", str(program), str(source)], capture_output=True, text=True)
        if made.returncode != 0:
            raise hosts.Failed(f"cannot make the relay between regions: {made.stderr.strip()}")
    return program


class Run:
    """One setup: hosts, servers, the worker processes of each host."""

    def __init__(self, setup: rows.Setup, options):
        self.setup, self.options = setup, options
        self.workers = [f"h{index}" for index in range(setup.hosts)]
        self.servers = [f"s{index}" for index in range(setup.servers)]
        self.mbit = {name: sum(setup.cards) or setup.mbit for name in self.workers + self.servers}
        self.mbit[self.workers[-1]] *= setup.slow
        if self.servers:
            self.mbit[self.servers[-1]] *= setup.slow_server
        self.interfaces = [f"net{card}" for card in range(len(setup.cards) or 1)]
        self.processes: list[subprocess.Popen] = []
        self.tails: dict[str, list[str]] = {}

    def measure(self, chosen_rows: list[rows.Row], on_result) -> dict:
        """Calls on_result(row, result) for each; the wire bytes and drops of the whole run."""
        rates = {name: self.setup.cards or rate for name, rate in self.mbit.items()}
        network = hosts.Hosts(
            self.workers + self.servers,
            rates,
            self.options.queue_ms,
            nics=len(self.interfaces),
            uplinks=self._uplinks(),
        )
        try:
            # First and alone: its processes are not ours, and nothing else of the row runs meanwhile.
            jobs = [{"name": row.name, **self._job(row)} for row in chosen_rows if row.job.get("mpi")]
            by_mpi = mpich.measure(network, self.workers, self.options, jobs) if jobs else {}
            before, cards_before, up_before = network.sent(), network.sent_by_card(), network.sent_up()
            self._start(network, chosen_rows)
            self._collect(chosen_rows, lambda row, result: on_result(row, result | by_mpi.get(row.name, {})))
            after = network.sent()
            result = {"sent": {n: after[n] - before[n] for n in after}, "dropped": network.dropped()}
            if up_before:
                result["sent_up"] = [b - a for a, b in zip(up_before, network.sent_up(), strict=True)]
            if relayed := network.end_relay():
                result["relayed"] = relayed
            if self.setup.cards:
                result["sent_by_card"] = {
                    name: [b - a for a, b in zip(cards_before[name], cards, strict=True)]
                    for name, cards in network.sent_by_card().items()
                }
            return result
        finally:
            for process in self.processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
            network.close()

    def _uplinks(self) -> hosts.Uplinks | None:
        setup = self.setup
        if not setup.regions:
            return None
        region_of = dict(zip(self.workers, setup.region_of, strict=True))
        relay = relay_program() if setup.delay_ms or setup.loss else None
        # A router's queue holds what is under way, or the senders cannot fill the trunk.
        queue_ms = max(self.options.queue_ms, setup.delay_ms)
        return hosts.Uplinks(region_of, setup.uplinks, setup.delay_ms / 2, setup.loss, queue_ms, relay)

    def _start(self, network: hosts.Hosts, chosen_rows: list[rows.Row]) -> None:
        unwanted = ("HYBRIDPS_", "UCX_", "GLOO_", "MASTER_", "TORCHELASTIC_")
        base = {k: v for k, v in os.environ.items() if not k.startswith(unwanted)}
        base |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        base |= dict(pair.split("=", 1) for pair in self.options.env)
        for name in self.servers:
            command = [server_program(), "--no-token", "--listen", f"{network.address[name]}:{SERVER_PORT}"]
            self._follow(name, network.popen(name, command, env=base, **self._pipes()), None)
        goodput = [bounds.goodput(self.mbit[name] / 1000) for name in self.workers]
        context = {
            "backends": [name for name in ("hybridps", PEER) if name],
            "interface": ",".join(self.interfaces),
            "timeout": 120,
            "goodput": goodput,
            "servers_goodput": [bounds.goodput(self.mbit[name] / 1000) for name in self.servers],
            "regions": self.setup.regions
            and (self.setup.region_of, [bounds.goodput(rate / 1000) for rate in self.setup.uplinks]),
            "addresses": [] if self.setup.cards else [network.address[name] for name in self.workers],
            "jobs": [{"name": row.name, **self._job(row)} for row in chosen_rows],
        }
        self.results: queue.Queue = queue.Queue()
        ranks = self.setup.ranks
        for rank in range(len(self.workers) * ranks):
            name = self.workers[rank // ranks]
            environment = base | {
                "RANK": str(rank),
                "WORLD_SIZE": str(len(self.workers) * ranks),
                "LOCAL_RANK": str(rank % ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": network.address[self.workers[0]],
                "MASTER_PORT": str(PORT),
                "HYBRIDPS_NODE": name,
                "HYBRIDPS_INTERFACE": hosts.INTERFACE,
                "GLOO_SOCKET_IFNAME": hosts.INTERFACE,
            }
            if self.setup.cards:
                environment["HYBRIDPS_DATA_INTERFACES"] = ",".join(self.interfaces)
            if self.setup.declared:
                rates = self.setup.cards or (self.mbit[name],)
                environment["HYBRIDPS_NIC_GBPS"] = ",".join(f"{rate / 1000:g}" for rate in rates)
            if self.setup.declares_regions:
                region = self.setup.region_of[rank // ranks]
                environment["HYBRIDPS_REGION"] = f"{region}@{self.setup.uplinks[region] / 1000:g}"
            if self.setup.exact:
                environment["HYBRIDPS_COMPRESS"] = "exact"
            if self.servers:
                listed = ",".join(f"{network.address[server]}:{SERVER_PORT}" for server in self.servers)
                environment["HYBRIDPS_SERVERS"] = listed
            command = [sys.executable, str(HERE / "worker.py"), json.dumps(context)]
            process = network.popen(name, command, env=environment, cwd=ROOT, **self._pipes())
            self._follow(name if ranks == 1 else f"{name}.{rank % ranks}", process, self.results if rank == 0 else None)

    def _job(self, row: rows.Row) -> dict:
        job = dict(row.job)
        if self.options.quick:
            job["iterations"] = max(2, job["iterations"] // 5)
        return job

    @staticmethod
    def _pipes() -> dict:
        return {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.STDOUT,
            "text": True,
        }

    def _follow(self, name: str, process: subprocess.Popen, results: queue.Queue | None) -> None:
        self.processes.append(process)
        tail = self.tails[name] = []

        def read() -> None:
            for line in process.stdout:
                if results is not None and line.startswith(MARK):
                    results.put(json.loads(line[len(MARK) :]))
                else:
                    tail.append(line.rstrip())
                    del tail[:-30]

        threading.Thread(target=read, daemon=True).start()

    def _collect(self, chosen_rows: list[rows.Row], on_result) -> None:
        workers = self.processes[len(self.servers) :]
        deadline = time.monotonic() + self.options.limit_s
        for row in chosen_rows:
            while True:
                try:
                    on_result(row, self.results.get(timeout=0.2))
                    break
                except queue.Empty:
                    pass
                failed = [p for p in self.processes if p.poll() not in (None, 0)]
                over = all(p.poll() is not None for p in workers)
                if (failed or over) and self.results.empty():
                    time.sleep(1)
                    raise hosts.Failed(f"{row.name}: a process ended\n{self._shown_tails()}")
                if time.monotonic() > deadline:
                    raise hosts.Failed(f"{row.name}: not done after {self.options.limit_s} s\n{self._shown_tails()}")
        for process in workers:
            process.wait(timeout=30)

    def _shown_tails(self) -> str:
        return "\n".join(f"--- {name}\n" + "\n".join(lines) for name, lines in self.tails.items() if lines)


def figures_of(result: dict) -> dict:
    """What bars and the table are about, from a worker's result."""
    ours, peer = (result["backends"].get(name) for name in ("hybridps", PEER))
    if "bulk_bytes" in result:
        alone, loaded = ours["alone"], ours["loaded"]
        figures = {"alone_ms": alone["seconds"] * 1e3}
        if loaded:
            figures |= {"ms": loaded["seconds"] * 1e3, "p99_ms": loaded["p99_seconds"] * 1e3}
            if peer and peer["loaded"]:
                figures["peer_ms"] = peer["loaded"]["seconds"] * 1e3
                figures["ratio"] = figures["peer_ms"] / figures["ms"]
        return figures
    figures = {"ms": ours["seconds"] * 1e3, "p99_ms": ours["p99_seconds"] * 1e3}
    figures["of_limit"] = ours.get("of_limit")
    figures["wrong"] = ours.get("wrong") if "wrong" in ours else result.get("wrong")
    if plain := result["backends"].get("hybridps plain"):  # without priorities
        figures["plain_ms"] = plain["seconds"] * 1e3
        figures["plain_ratio"] = ours.get("ours_is_faster_by") or plain["seconds"] / ours["seconds"]
    if alone := result["backends"].get("hybridps alone"):
        figures["alone_ms"] = alone["seconds"] * 1e3
        if "bound_seconds" in result:
            figures["of_bound"] = result["bound_seconds"] / ours["seconds"]
    if ddp := result["backends"].get("hybridps DDP"):
        figures["ddp_ms"], figures["ddp_ratio"] = ddp["seconds"] * 1e3, ddp["ours_is_faster_by"]
    if peer:
        figures["peer_ms"] = peer["seconds"] * 1e3
        figures["peer_of_limit"] = peer.get("of_limit")
        figures["ratio"] = peer["ours_is_faster_by"]
        figures["p99_to_peer"] = ours["p99_seconds"] / peer["seconds"]
        figures["peer_drift"] = peer["drift"]
    if "sockets_seconds" in result:
        figures["sockets_ms"] = result["sockets_seconds"] * 1e3
        figures["of_sockets"] = result["sockets_seconds"] / ours["seconds"]
    if mpi := result.get("mpi"):
        figures["mpi_ms"] = mpi["seconds"] * 1e3
        figures["mpi_ratio"] = mpi["seconds"] / ours["seconds"]
        figures["mpi_wrong"], figures["mpi_wire"] = mpi["wrong"], mpi["sent"] / mpi["sent_least"]
        if result.get("limit_seconds"):
            figures["mpi_of_limit"] = result["limit_seconds"] / mpi["seconds"]
    if ours.get("payload_to_plan") and result.get("bytes", 0) >= 64 * rows.KIB:
        figures["wire_error"] = abs(ours["payload_to_plan"] - 1)
        figures["wire_overhead"] = ours.get("interface_to_plan")
    if "cpu_load" in ours:
        figures["cpu_load"] = ours["cpu_load"] / os.cpu_count()
    if "cpu_seconds" in ours:
        figures["cpu_ms"] = ours["cpu_seconds"] * 1e3
    if peer:
        figures["peer_cpu_ms"] = peer["cpu_seconds"] * 1e3
    return figures


def doubts(setup: rows.Setup, result: dict, figures: dict) -> list[str]:
    """Why the figures should not be believed."""
    reasons = []
    if figures.get("wrong"):
        reasons.append(f"{figures['wrong']} wrong elements")
    if figures.get("mpi_wrong"):
        reasons.append("wrong sums of MPI")
    if figures.get("mpi_wire", 1) < 0.97:
        reasons.append(f"MPI: only {figures['mpi_wire']:.3f} of the least bytes crossed the interface")
    # On one host the cores and the memory are what is measured.
    large = result.get("bytes", 0) >= rows.MIB and setup.hosts > 1
    if large and figures.get("cpu_load", 0) > CPU_LOAD_MAX:
        reasons.append(f"CPU {figures['cpu_load']:.0%}")
    if abs(figures.get("peer_drift", 0)) > DRIFT_MAX:
        reasons.append(f"{PEER} drifted by {figures['peer_drift']:+.0%}")
    if large and (figures.get("wire_overhead") or 1) > WIRE_OVERHEAD_MAX:
        reasons.append(f"wire bytes {figures['wire_overhead']:.3f} of the plan")
    if large and not setup.exact and (figures.get("wire_overhead") or 1) < 0.97:
        reasons.append(f"only {figures['wire_overhead']:.3f} of the plan crossed the interface")
    return reasons


BAR_TEXT = {
    "ms": "{} {:g} ms",
    "ratio": "{} {:g}x " + PEER,
    "of_limit": "{} {:.1%} of the limit",
    "ddp_ratio": "{} {:g}x own DDP",
    "of_bound": "bound / time {} {:g}",
    "plain_ratio": "{} {:g}x without priorities",
    "p99_to_peer": "p99 {} {:g}x " + PEER + "'s median",
    "wire_error": "bytes {} {:.0%} off the plan",
}


def bar_text(bar: rows.Bar) -> str:
    return BAR_TEXT[bar.figure].format("≥" if bar.at_least else "≤", bar.value)


def table(done: list[tuple[rows.Row, dict]]) -> str:
    lines = [
        "|row|links, Mbit/s|hybridps ms|p99 ms|gloo ms|× gloo|% of limit (gloo)"
        "|sockets ms|CPU ms (gloo)|bars missed, remarks|",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]

    def cell(figures, name, form):
        value = figures.get(name)
        return "–" if value is None else form.format(value)

    for row, result in done:
        if "unavailable" in result:
            lines.append(f"|{row.name}||not available: {result['unavailable']}|" + "|" * 7)
            continue
        figures = result["figures"]
        verdicts = []
        for bar in row.bars:
            if not (met := bar.is_met(figures)):
                verdicts.append(f"{'?' if met is None else '**missed**'} {bar_text(bar)}")
        verdicts += [f"**invalid: {doubt}**" for doubt in result["doubts"]]
        if "alone_ms" in figures:
            verdicts.append(f"alone {figures['alone_ms']:.3f} ms")
        if "ddp_ms" in figures:
            verdicts.append(f"own DDP {figures['ddp_ms']:.4g} ms, {figures['ddp_ratio']:.2f}x")
        if "mpi_ms" in figures:
            verdicts.append(f"{result['mpi']['library']} {figures['mpi_ms']:.4g} ms, {figures['mpi_ratio']:.2f}x")
        cells = [
            row.name,
            row.setup.text.removeprefix(f"n = {row.setup.hosts}, ").replace(" Mbit/s", ""),
            cell(figures, "ms", "{:.3g}"),
            cell(figures, "p99_ms", "{:.3g}"),
            cell(figures, "peer_ms", "{:.4g}"),
            cell(figures, "ratio", "{:.2f}"),
            cell(figures, "of_limit", "{:.1%}") + f" ({cell(figures, 'peer_of_limit', '{:.1%}')})",
            cell(figures, "sockets_ms", "{:.4g}"),
            cell(figures, "cpu_ms", "{:.3g}") + f" ({cell(figures, 'peer_cpu_ms', '{:.3g}')})",
            "; ".join(verdicts),
        ]
        lines.append(f"|{'|'.join(cells)}|")
    return "\n".join(lines) + "\n"


def label_of(row: rows.Row) -> str:
    size = row.job["bytes"]
    unit, factor = ("MiB", rows.MIB) if size >= rows.MIB else ("KiB", rows.KIB) if size >= rows.KIB else ("B", 1)
    what = row.job.get("collective", row.job["do"])
    return f"{what} {size // factor} {unit}, {row.setup.text}" if size else f"{what}, {row.setup.text}"


def draw(done: list[tuple[rows.Row, dict]], path: Path, limit: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    measured = [(row, r["figures"]) for row, r in done if "figures" in r and r["figures"].get("ratio")]
    if not measured:
        return
    measured.reverse()
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(12, 1.6 + 0.34 * len(measured)), sharey=True, constrained_layout=True
    )
    places = range(len(measured))
    ratios = [figures["ratio"] for _, figures in measured]
    colours = ["C0" if ratio >= 1 else "C3" for ratio in ratios]
    bars = left.barh(places, [ratio - 1 for ratio in ratios], left=1, color=colours)
    left.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], padding=3, fontsize=8)
    left.axvline(1, color="black", linewidth=1)
    wide = max(ratios) > 4
    left.set(title=f"How many times faster than {PEER}", xscale="log" if wide else "linear", yticks=list(places))
    if wide:
        left.set_xticks([0.5, 1, 2, 5, 10, 20], ["0.5", "1", "2", "5", "10", "20"])
        left.minorticks_off()
    left.set_yticklabels([label_of(row) for row, _ in measured], fontsize=8)
    left.margins(x=0.15)
    height = 0.38
    for offset, name, label in ((height / 2, "of_limit", "hybridps"), (-height / 2, "peer_of_limit", PEER)):
        shown = [
            (p + offset, f[name] * 100)
            for p, (r, f) in enumerate(measured)
            if f.get(name) and r.job["bytes"] >= rows.MIB
        ]
        if shown:
            right.barh([p for p, _ in shown], [v for _, v in shown], height, label=label)
    right.axvline(100, color="black", linewidth=1)
    right.set(title=f"% of what {limit} (1 MiB and more)")
    if right.containers:
        figure.legend(*right.get_legend_handles_labels(), fontsize=8, ncols=2, loc="outside lower right")
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks/lab/run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="ROWS", help="names, tags or patterns, with commas")
    parser.add_argument("--list", action="store_true", help="show the rows and end")
    parser.add_argument("--render", action="store_true", help="only draw what the output folder holds")
    parser.add_argument("--quick", action="store_true", help="a fifth of the iterations: does it run at all?")
    parser.add_argument("--queue-ms", type=float, default=5, help="queue of each link, in time (default %(default)s)")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="setting for all processes")
    parser.add_argument("--mpi", type=Path, default=mpich.PYTHON, metavar="PYTHON", help="for rows tagged mpi")
    parser.add_argument("--make-mpi", action="store_true", help="make build/mpi (pip install mpich mpi4py) and end")
    parser.add_argument("--limit-s", type=float, default=600, help="for one setup (default %(default)s)")
    parser.add_argument("--output", default=str(ROOT / "benchmarks" / "results"))
    options = parser.parse_args()
    if options.list:
        for row in rows.ROWS:
            say(f"{row.name:24s} {', '.join(row.tags):12s} {row.setup.text}: {', '.join(map(bar_text, row.bars))}")
        return 0

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        if options.make_mpi:
            say(f"[lab] {mpich.make()}")
            return 0
        selected = chosen(options.only)
        if complaint := plot_complaint():
            say(f"[lab] no picture: {complaint}")
        if options.render:
            render(stored(selected, Path(options.output)), Path(options.output))
            return 0
        if os.geteuid() != 0:
            raise hosts.Failed("needs root, for network namespaces and their shapers")
        return measure(selected, options)
    except hosts.Failed as error:
        say(f"[lab] {error}")
        return 1
    except KeyboardInterrupt:
        say("[lab] interrupted")
        return 130


def measure(selected: list[rows.Row], options) -> int:
    folder = Path(options.output)
    folder.mkdir(parents=True, exist_ok=True)
    done: list[tuple[rows.Row, dict]] = []

    def keep(row: rows.Row, result: dict) -> None:
        figures = result["figures"] = figures_of(result)
        result["doubts"] = doubts(row.setup, result, figures)
        result["setup"] = vars(row.setup) | {"text": row.setup.text, "queue_ms": options.queue_ms, "env": options.env}
        done.append((row, result))
        (folder / f"{row.name}.json").write_text(json.dumps(result, indent=1) + "\n")
        shown = {k: round(v, 4) for k, v in figures.items() if v is not None}
        say(f"[lab] {row.name}: {shown} {result['doubts'] or ''}")

    failed = ""
    for setup in dict.fromkeys(row.setup for row in selected):
        together = [row for row in selected if row.setup == setup]
        if setup.servers and not server_program():
            for row in together:
                say(f"[lab] {row.name}: not available, the program hybridps-server was not found")
                done.append((row, {"unavailable": "no hybridps-server"}))
            continue
        if any(row.job.get("mpi") for row in together) and (reason := mpich.why_not(options.mpi)):
            for row in [row for row in together if row.job.get("mpi")]:
                say(f"[lab] {row.name}: not available, {reason}")
                done.append((row, {"unavailable": reason}))
                together.remove(row)
            if not together:
                continue
        say(f"[lab] {setup.text}: {', '.join(row.name for row in together)}; load {load_of_machine()}")
        try:
            totals = Run(setup, options).measure(together, keep)
            by_card = f", by card {totals['sent_by_card']}" if "sent_by_card" in totals else ""
            trunk = "".join(f", {name} {totals[name]}" for name in ("sent_up", "relayed") if name in totals)
            say(f"[lab] sent {totals['sent']}{by_card}, dropped {totals['dropped']}{trunk}")
        except hosts.Failed as error:
            failed = str(error)
            say(f"[lab] {failed}")
    done.sort(key=lambda pair: rows.ROWS.index(pair[0]))
    render(done, folder)
    return 1 if failed else 0


def stored(selected: list[rows.Row], folder: Path) -> list[tuple[rows.Row, dict]]:
    """What earlier runs wrote, of these rows as they are now."""
    done = []
    for row in selected:
        try:
            done.append((row, json.loads((folder / f"{row.name}.json").read_text())))
        except FileNotFoundError:
            say(f"[lab] {row.name}: not measured, {folder} has no {row.name}.json")
    if not done:
        raise hosts.Failed(f"{folder} has no results")
    return done


def render(done: list[tuple[rows.Row, dict]], folder: Path) -> None:
    text = table(done)
    (folder / "table.md").write_text(text)
    if not plot_complaint():
        draw([pair for pair in done if pair[0].setup.hosts > 1], folder / "table.png", "the links allow")
        draw([pair for pair in done if pair[0].setup.hosts == 1], folder / "table-one-host.png", "memory allows")
    say("\n" + text)


if __name__ == "__main__":
    sys.exit(main())
