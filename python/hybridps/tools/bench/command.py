"""Measure collectives of rising sizes: times, bandwidth, errors, and the network's limit. Columns as in nccl-tests.

    hybridps bench                                        allreduce, two ranks on this machine, sharing memory
    hybridps bench --nodes 4 --against gloo               four nodes, emulated over loopback, beside another backend
    hybridps bench all_gather broadcast -b 1K -e 16M -f 4
    torchrun ... -m hybridps.bench --nic-gbps 10          real machines; with the limit and the part of it reached

size    bytes of the whole vector, as in nccl-tests; for all_to_all the bytes that one rank sends in all
time    median. If an operation starts from a barrier, the slowest rank counts. If operations run back to back, the mean
        of the ranks counts, as in nccl-tests. p99: the slowest rank; with fewer than 100 operations the worst one
algbw   size / time; busbw: algbw times what must cross a rank's card per byte of size (nccl-tests, doc/PERFORMANCE.md)
#wrong  elements that differ from the right result on any rank, in one operation beside the timed ones
limit   the least time that the cards allow, from --nic-gbps. On one host, from 64 KiB on: the least time that memory
        allows, from rates of copying and adding that are measured beside each row. %limit is limit / time
sent    bytes per operation that the busiest node sent, counted by the backend, and in % of the plan
nic     the same, counted by the interface (--interface), with headers and acknowledgements
faster  how many times faster the backend under test is than the backend of this line (--against)
nmse    with --compress: the squared error of a sum of Gaussian values, divided by the sum's square

--compress int8: all-reduces and reduce-scatters with that codec (docs/compression.md), in turn with the same operations
without the codec and with the backends of --against. Limit and plan count the bytes that the codec sends.

--in-flight 5K,20K,100K: another measurement. So many operations of the first size are issued at once, and then waited
for (-n runs, default 3). The time of one of them, "one (us)", should not rise with their number. --groups:
operations come from so many groups in turn. --late: the last rank begins so many seconds later. --callbacks: each
operation has a callback.

Backends take turns in the same processes, block by block. Large operations start from a barrier. Small operations run
back to back in blocks, and the first of a block does not count. With --device cuda the host waits for the GPU after
each operation, and the time includes this wait.
"""

import argparse
import json
import os
import platform
import sys

from hybridps.limits import bounds
from hybridps.tools import local_ranks
from hybridps.tools.bench import in_flight, show
from hybridps.tools.bench.case import DTYPES, REDUCING, REDUCTIONS
from hybridps.tools.bench.figures import add_limits, parse_size, per_node, sizes_between
from hybridps.tools.bench.session import NO_GPU, Complaint, Session, is_lossless
from hybridps.tools.output import load_of_machine, plot_complaint, print_any_text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("collective", nargs="*", help=f"any of {', '.join(bounds.COLLECTIVES)}; all: each of them (default allreduce)")
    add("-b", "--minbytes", type=parse_size, default="64", help="first size (default %(default)s)")
    add("-e", "--maxbytes", type=parse_size, default="16M", help="last size (default %(default)s)")
    add("-f", "--stepfactor", type=float, default=4, help="factor between sizes (default %(default)s)")
    add("-i", "--stepbytes", type=parse_size, default=0, help="bytes between sizes, instead of a factor")
    add("-n", "--iters", type=int, help="timed operations per size and backend (default 20; with --in-flight: runs, 3)")
    add("-w", "--warmup_iters", type=int, default=5, help="operations before the timed ones (default %(default)s)")
    add("-d", "--datatype", choices=DTYPES, default="float32", metavar="TYPE", help=", ".join(DTYPES))
    add("-o", "--op", choices=REDUCTIONS, default="sum", metavar="OP", help=", ".join(REDUCTIONS))
    add("-r", "--root", type=int, default=0, help="root rank of broadcast and reduce (default %(default)s)")
    add("-c", "--check", type=int, choices=(0, 1), default=1, help="0: do not check results")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where the tensors are (default %(default)s)")
    add("--backend", default="hybridps", help="the backend under test (default %(default)s)")
    add("--against", default="", metavar="NAMES", help="other backends to compare with, such as gloo; they take turns")
    add("--compress", metavar="CODEC", default="", help="also measure with this codec, such as int8")
    add("--nic-gbps", metavar="RATE", help="rate of the cards, or one per node with commas; gives limit and %%limit")
    add("--mtu", type=int, help="MTU, for the goodput (default: the interface's, else 1500)")
    add("--servers-gbps", metavar="RATES", default="", help="rates of dedicated servers, with commas; for the limit")
    add("--interface", metavar="NAMES", help="count the bytes of these network interfaces")
    add(
        "--ranks",
        type=int,
        default=0,
        help="ranks to start here for each node; not under torchrun (default 2 with --nodes 1)",
    )
    add("--nodes", type=int, default=1, help="nodes to emulate on this machine, over loopback (default %(default)s)")
    add("--in-flight", metavar="N", default="", help="numbers of operations in flight at once, with commas")
    add("--groups", type=int, default=1, help="with --in-flight: the number of groups, used in turn")
    add("--late", type=float, default=0, metavar="SECONDS", help="with --in-flight: the last rank begins so much later")
    add("--callbacks", action="store_true", help="with --in-flight: each operation has a callback")
    add("--json", metavar="FILE", help="write all figures to this file")
    add("--plot", metavar="FILE", help="draw a picture (PNG); needs matplotlib")
    add("--store", help=argparse.SUPPRESS)  # where the ranks that this program started meet
    add("--timeout", type=float, default=120, metavar="SECONDS", help="limit for one operation (default %(default)s)")


def _complaint_of_torch(arguments) -> str:
    """What this machine's torch lacks for it."""
    import torch
    import torch.distributed as dist

    for name in dict.fromkeys([arguments.backend, *filter(None, arguments.against.split(","))]):
        if not dist.is_backend_available(name):
            known = sorted({*dist.Backend.backend_list, "hybridps"} - {"undefined", "fake"})
            there = ", ".join(name for name in known if dist.is_backend_available(name))
            return f"torch knows no backend {name!r} here; there are {there}"
    if arguments.compress:
        import hybridps

        try:
            hybridps.compress.ratio(arguments.compress)
        except ValueError as error:
            return f"--compress: {error}"
    return NO_GPU if arguments.device == "cuda" and not torch.cuda.is_available() else ""


def _complaint(arguments) -> str:
    """What is wrong with the arguments, before anything is started."""
    unknown = [name for name in arguments.collective if name not in (*bounds.COLLECTIVES, "all")]
    if unknown:
        return f"unknown collective {unknown[0]!r}; there are {', '.join(bounds.COLLECTIVES)}"
    if (arguments.iters is not None and arguments.iters < 1) or arguments.warmup_iters < 0:
        return "-n must be at least 1, and -w at least 0"
    if arguments.ranks < 0 or arguments.nodes < 1:
        return "--ranks and --nodes count from 1"
    if not arguments.in_flight and (arguments.groups != 1 or arguments.late or arguments.callbacks):
        return "--groups, --late and --callbacks need --in-flight"
    if arguments.groups < 1 or arguments.late < 0:
        return "--groups counts from 1, and --late from 0"
    if arguments.compress and arguments.in_flight:
        return "--compress and --in-flight: one of them"
    if arguments.compress and not is_lossless(arguments.compress) and (
        not set(arguments.collective or ["allreduce"]) <= {"allreduce", "reduce_scatter"}
        or arguments.op not in ("sum", "avg")
        or arguments.datatype not in ("float32", "float16", "bfloat16")
        or arguments.backend != "hybridps"
    ):
        return (
            "--compress with a lossy codec is for hybridps' allreduce and reduce_scatter of float32, float16 and "
            "bfloat16, sums and averages"
        )
    if arguments.in_flight and arguments.device != "cpu":
        return "--in-flight is for tensors on the CPU"
    try:
        if arguments.in_flight:
            in_flight.parse_counts(arguments.in_flight)
            if unknown := [name for name in arguments.collective if name not in (*in_flight.COLLECTIVES, "all")]:
                return f"{unknown[0]} is not one of --in-flight's: {', '.join(in_flight.COLLECTIVES)}"
        sizes_between(arguments.minbytes, arguments.maxbytes, arguments.stepfactor, arguments.stepbytes)
        for text, what in ((arguments.nic_gbps, "--nic-gbps"), (arguments.servers_gbps, "--servers-gbps")):
            if text:
                per_node(text, len(text.split(",")), what)
    except ValueError as error:
        return str(error)
    if arguments.servers_gbps and not arguments.nic_gbps:
        return "--servers-gbps needs --nic-gbps"
    for name in arguments.interface.split(",") if arguments.interface else ():
        if not os.path.isdir(f"/sys/class/net/{name}"):
            return f"no network interface {name!r}; there are {', '.join(sorted(os.listdir('/sys/class/net')))}"
    return plot_complaint() if arguments.plot else ""


def launch(argv: list[str], ranks: int, nodes: int) -> int:
    """Starts local ranks of this program and waits for them; 0 when all went well."""
    return local_ranks.run([sys.executable, "-m", "hybridps.bench", *argv], ranks, nodes, "hybridps bench")


def measure_all(arguments) -> int:
    names = list(dict.fromkeys([arguments.backend, *filter(None, arguments.against.split(","))]))
    arguments.iters = arguments.iters or (3 if arguments.in_flight else 20)
    init = {}
    if arguments.store:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        init = {"init_method": f"file://{arguments.store}", "rank": rank, "world_size": world}
    session = Session(names, arguments.timeout, arguments.device, arguments.compress, **init)
    try:
        return _measure_all(session, arguments)
    finally:
        session.close()


def _rates(session: Session, arguments) -> tuple[list[float] | None, list[float]]:
    """Goodputs of the nodes' cards, None if not known, and of the servers'."""
    if not arguments.nic_gbps:
        return None, []
    mtu = arguments.mtu or 1500
    if not arguments.mtu and arguments.interface:
        with open(f"/sys/class/net/{arguments.interface.split(',')[0]}/mtu") as file:
            mtu = int(file.read())
    try:
        of_nodes = per_node(arguments.nic_gbps, session.node_count, "--nic-gbps")
    except ValueError as error:
        raise Complaint(str(error)) from None
    rates = [bounds.goodput(rate, mtu) for rate in of_nodes]
    return rates, [bounds.goodput(float(rate), mtu) for rate in filter(None, arguments.servers_gbps.split(","))]


def _described(session: Session, arguments, rates: list[float] | None, servers: list[float]) -> dict:
    """The result before there are rows."""
    title = f"{session.world} ranks on {session.node_count} nodes"
    if rates:
        title += f", {arguments.nic_gbps} Gbit/s" + (f", {len(servers)} dedicated servers" if servers else "")
    return {
        "title": title,
        "ranks": session.world,
        "node_of": session.node_of,
        "goodput": rates,
        "servers_goodput": servers,
        "command": sys.argv,
        "torch": session.torch.__version__,
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "settings": {k: v for k, v in sorted(os.environ.items()) if k.startswith(("HYBRIDPS_", "UCX_", "GLOO_"))},
        "load_before": load_of_machine(),
        "rows": [],
    }


def _measure_collective(session: Session, arguments, collective: str, result: dict) -> None:
    """Its rows go to the result and, on rank 0, to the screen."""
    rates, quiet = result["goodput"], session.rank != 0
    knows_limit = rates is not None or (session.node_count == 1 and arguments.device == "cpu")
    columns = show.columns_for(
        list(session.groups),
        check=bool(arguments.check),
        limits=collective != "barrier" and knows_limit,
        nodes=session.node_count,
        interface=bool(arguments.interface),
        compress=bool(arguments.compress),
    )
    if not quiet:
        kind = f", {arguments.datatype}" if collective != "barrier" else ""
        kind += f", {arguments.op}" if collective in REDUCING else ""
        print(f"# {collective}{kind}\n{show.heading(columns)}", flush=True)
    sizes = sizes_between(arguments.minbytes, arguments.maxbytes, arguments.stepfactor, arguments.stepbytes)
    for size in [0] if collective == "barrier" else sizes:
        row = session.measure(
            collective,
            size,
            iterations=arguments.iters,
            warmup=arguments.warmup_iters,
            dtype=arguments.datatype,
            reduction=arguments.op,
            root=arguments.root,
            check=bool(arguments.check),
            interface=arguments.interface,
        )
        add_limits(row, session.node_of, rates, result["servers_goodput"])
        result["rows"].append(row)
        if not quiet:
            print("\n".join(show.lines_of(row, columns)), flush=True)


def _measure_all(session: Session, arguments) -> int:
    quiet = session.rank != 0
    result = _described(session, arguments, *_rates(session, arguments))
    if not quiet:
        print(f"# hybridps bench: {result['title']}; load {result['load_before']}; {result['cores']} cores")
    if arguments.in_flight:
        result["rows"] = in_flight.measure_all(session, arguments)
    else:
        asked = arguments.collective or ["allreduce"]
        for collective in bounds.COLLECTIVES if "all" in asked else asked:
            _measure_collective(session, arguments, collective, result)
    wrong = sum(figures["wrong"] or 0 for row in result["rows"] for figures in row["backends"].values())
    result["load_after"] = load_of_machine()
    if not quiet:
        if not arguments.in_flight:
            print("\n".join(show.summary_of(result)))
        print(f"# wrong elements: {wrong}")
        if arguments.json:
            with open(arguments.json, "w") as file:
                json.dump(result, file, indent=1)
        if arguments.plot:
            show.plot(result, arguments.plot)
    return 1 if wrong else 0


def run(arguments, argv: list[str]) -> int:
    of_job = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    nodes = 0 if of_job else arguments.nodes
    complaint = _complaint(arguments)
    if not complaint and nodes and arguments.nic_gbps:
        try:
            per_node(arguments.nic_gbps, nodes, "--nic-gbps")
        except ValueError as error:
            complaint = str(error)
    if complaint := complaint or _complaint_of_torch(arguments):
        if os.environ.get("RANK", "0") == "0":  # the same on all
            print(f"hybridps bench: {complaint}", file=sys.stderr)
        return 2
    if of_job:
        try:
            return measure_all(arguments)
        except Complaint as error:
            if os.environ["RANK"] == "0":
                print(f"hybridps bench: {error}", file=sys.stderr)
            return 2
    try:
        return launch(argv, arguments.ranks or (2 if arguments.nodes == 1 else 1), arguments.nodes)
    except KeyboardInterrupt:
        return 130


def main(argv: list[str] | None = None) -> int:
    print_any_text()
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m hybridps.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    return run(parser.parse_args(argv), argv)
