"""Tools for hybridps. `env` prints the settings. `doctor` checks this machine. `bench` measures collectives. `status`
shows what running jobs do. `trace` shows where their time went. `run` starts a program that asks for another backend.
`advise` says what would make a DDP run faster."""

import argparse
import json
import os
import sys

from hybridps.backend.load import load_extension
from hybridps.backend.stand_in import LEAVE_SIDE_GROUPS
from hybridps.limits import regions
from hybridps.limits.advice import Run, text_of
from hybridps.tools import doctor as machine
from hybridps.tools import status, trace
from hybridps.tools.bench import command as bench
from hybridps.tools.bench.figures import parse_size
from hybridps.tools.output import print_any_text, table

# The settings that people need, in the order of docs/settings.md.
MAIN_SETTINGS = tuple(
    f"HYBRIDPS_{name}"
    for name in (
        "INTERFACE",
        "PORTS",
        "SERVERS",
        "TOKEN_FILE",
        "SECURITY",
        "REGION",
        "NIC_GBPS",
        "COMPRESS",
        "DEAD_SECONDS",
        "LOG_LEVEL",
    )
)


def in_order(entries: list[dict]) -> list[dict]:
    """The rows of config_table(), MAIN_SETTINGS first."""
    first = {name: place for place, name in enumerate(MAIN_SETTINGS)}
    return sorted(entries, key=lambda entry: first.get(entry["name"], len(first)))


def env(arguments) -> int:
    """Print the main settings and those that are set, each with value, default and origin. --all: every setting. A row
    with a wrong value is marked (exit status 1)."""
    rows = [["", "NAME", "VALUE", "DEFAULT", "FROM", "MEANING"]]
    entries, warnings, limits = load_extension().config_table()
    shown = [
        entry
        for entry in in_order(entries)
        if arguments.all or entry["name"] in MAIN_SETTINGS or entry["source"] != "default" or entry["problem"]
    ]
    problems = []
    for entry in shown:
        mark = ">>" if entry["problem"] else ""
        meaning = f"NOT VALID, see below. {entry['doc']}" if mark else entry["doc"]
        rows.append([mark, *(str(entry[key]) for key in ("name", "value", "default", "source")), meaning])
        problems += [entry["problem"]] if mark else []
    if not problems:
        rows = [row[1:] for row in rows]
    print(table(rows))
    if arguments.all:
        parts = [[row[key] for key in ("name", "value", "default", "source", "doc")] for row in limits]
        is_refused = any(entry["name"] == "HYBRIDPS_LIMITS" and entry["problem"] for entry in entries)
        left_out = "; not all of it was read, see below" if is_refused else ""
        print(f"\nHYBRIDPS_LIMITS=name=value,name=value{left_out}:")
        print(table([["NAME", "VALUE", "DEFAULT", "FROM", "MEANING"], *parts]))
    if left := len(entries) - len(shown):
        print(f"{left} more settings: hybridps env --all")
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    return 1 if problems else 0


def doctor(arguments) -> int:
    """Check this machine and its settings as a job does; print what a bug report needs. Status 1: a job cannot work."""
    return machine.run(arguments)


# Names that torch knows, so that only for others seconds are spent on asking it.
_USUAL = ("gloo",)


def _unknown_backend(names: list[str]) -> str:
    """What is wrong with names of backends to stand in for; empty: nothing."""
    unusual = [name for name in names if name not in (*_USUAL, "hybridps")]
    if not unusual:
        return ""
    from torch.distributed import Backend

    for name in unusual:
        try:
            Backend._ensure_backend_registered(name)
        except Exception:  # it is not there: what follows says so
            pass
        if name.upper() not in Backend._plugins:
            known = sorted(
                {*Backend.backend_list, *(key.lower() for key in Backend._plugins)} - {"fake", "hybridps", "undefined"}
            )
            return f"--as {name}: torch knows no backend of that name; there are {', '.join(known)}"
    return ""


def run(arguments) -> int:
    """Run a program in which hybridps takes the place of another backend."""
    from importlib.metadata import PackageNotFoundError, version

    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    names = [name.strip().lower() for name in (arguments.names or "").split(",") if name.strip()]
    leaves_side_groups = arguments.leave_side_groups or LEAVE_SIDE_GROUPS in names
    names = [name for name in names if name != LEAVE_SIDE_GROUPS]
    problem = ""
    if not command:
        problem = "no program given: hybridps run --as gloo -- torchrun train.py"
    elif not names and arguments.names is None and arguments.advise and not leaves_side_groups:
        pass  # the program asks for hybridps
    elif not names:
        problem = "--as needs the name that the program asks for, such as gloo"
    elif os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        problem = "TORCH_DEVICE_BACKEND_AUTOLOAD=0 stops torch from loading hybridps; unset it"
    else:
        try:
            torch_version = version("torch")
        except PackageNotFoundError:
            problem = "torch is not installed in this environment"
        else:
            if tuple(int(part) for part in torch_version.split(".")[:2]) < (2, 14):
                problem = f"--as needs torch 2.14 or newer, and this environment has torch {torch_version}"
            else:
                problem = _unknown_backend(names)
    if problem:
        print(f"hybridps: {problem}", file=sys.stderr)
        return 2
    if names:
        os.environ["HYBRIDPS_AS"] = ",".join(names + [LEAVE_SIDE_GROUPS] * leaves_side_groups)
    if arguments.advise:
        os.environ["HYBRIDPS_ADVISE"] = os.path.abspath(arguments.advise)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"hybridps: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126


def advise(arguments) -> int:
    """Print what would make a DDP run faster, from figures of `hybridps run --advise`. With --regions: estimate a
    step's exchange between sites."""
    runs, cluster = [], None
    try:
        if arguments.file:
            with open(arguments.file) as file:
                runs = [Run(**entry) for entry in json.load(file)]
    except (OSError, ValueError, TypeError) as error:
        print(f"hybridps: {arguments.file}: {error}: not a file of `hybridps run --advise`", file=sys.stderr)
        return 1
    try:
        if arguments.regions:
            cluster = regions.cluster_of(
                arguments.regions, arguments.nic_gbps, arguments.round_trip_ms, arguments.loss
            )
            if wrong := [run.nodes for run in runs if run.nodes != sum(cluster.nodes)]:
                nodes = sum(cluster.nodes)
                raise ValueError(f"--regions {arguments.regions} has {nodes} nodes, but the run had {wrong[0]}")
            if any(run.servers for run in runs):
                raise ValueError("the run had dedicated servers; --regions cannot estimate runs with dedicated servers")
        if not runs and not (cluster and arguments.bytes):
            raise ValueError("give a FILE of a run, or --regions and --bytes")
    except ValueError as error:
        print(f"hybridps advise: {error}", file=sys.stderr)
        return 2
    if runs:
        print(text_of(runs))
    if cluster:
        given = [(run.bytes, run.forward_s + run.backward_s, run.compress) for run in runs if run.bytes]
        for size, compute_s, compress in given or [(arguments.bytes, arguments.compute_ms / 1e3, "")]:
            text = regions.report(cluster, size, compute_s, compress)
            print("\n  ".join(["hybridps advise, between regions:", *text.splitlines()]))
    return 0


def _version() -> str:
    import hybridps

    try:
        return f"hybridps {hybridps.__version__}"
    except ImportError:  # PackageNotFoundError
        return "hybridps, not installed in this environment"


def _parser(argv: list[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hybridps", description=__doc__)
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    def add(function) -> argparse.ArgumentParser:
        command = commands.add_parser(function.__name__, help=function.__doc__, description=function.__doc__)
        command.set_defaults(function=function)
        return command

    def add_module(name: str, module, function, help: str) -> None:
        command = commands.add_parser(
            name, help=help, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(command)
        command.set_defaults(function=function)

    add(env).add_argument("--all", action="store_true", help="every setting")
    machine.add_arguments(add(doctor))
    command = add(run)
    command.usage = "hybridps run [--as NAME[,NAME]] [--advise FILE] [--leave-side-groups] [--] PROGRAM [ARGUMENTS]"
    command.add_argument("--as", dest="names", metavar="NAME", help="the backend that the program asks for: gloo")
    command.add_argument(
        "--advise",
        metavar="FILE",
        help="at the end, print what would make DDP faster, and write the figures to FILE (for hybridps advise)",
    )
    command.add_argument(
        "--leave-side-groups",
        action="store_true",
        help="a group of new_group(backend=NAME) uses torch's own backend",
    )
    command.add_argument("command", nargs=argparse.REMAINDER, metavar="PROGRAM", help="such as torchrun or python")
    command = add(advise)
    command.add_argument("file", nargs="?", metavar="FILE", help="the file that `hybridps run --advise FILE` wrote")
    command.add_argument(
        "--regions",
        metavar="NODES@GBPS,...",
        help="each region (rack, site): its nodes and its uplink in Gbit/s; example: 2@0.2,2@0.2",
    )
    command.add_argument("--round-trip-ms", type=float, default=0, metavar="MS", help="between regions (default 0)")
    command.add_argument("--nic-gbps", type=float, default=10, help="rate of each node's card (default %(default)s)")
    command.add_argument("--loss", type=float, default=0, help="part of the packets lost between regions (0.001)")
    command.add_argument("--bytes", type=parse_size, metavar="SIZE", help="of all gradients, without a FILE (100M)")
    command.add_argument(
        "--compute-ms", type=float, default=0, metavar="MS", help="forward and backward of a step, without a FILE"
    )
    add_module(
        "bench",
        bench,
        lambda arguments: bench.run(arguments, argv[argv.index("bench") + 1 :]),
        "Measure collectives: times, bandwidth, errors, the network's limit.",
    )
    add_module("status", status, status.run, "Show what the jobs on this machine do: which ranks wait for which ranks.")
    add_module("trace", trace, trace.run, "Merge traces of a job for Perfetto, or show where the time of a step went.")
    return parser


def main(argv: list[str] | None = None) -> int:
    print_any_text()
    parser = _parser(sys.argv[1:] if argv is None else argv)
    arguments = parser.parse_args(argv)
    if "function" not in arguments:
        parser.print_help()
        return 0
    try:
        return arguments.function(arguments)
    except ImportError as error:
        print(f"hybridps: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return 0
