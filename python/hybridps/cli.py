"""The command `hybridps`: `env` prints the settings, `doctor` checks this machine, `bench` measures collectives, `status`
shows how jobs stand, `trace` where their time went, `run` gives hybridps to a program that asks for another backend, `advise`
says what would make one faster."""

import argparse
import os
import platform
import socket
import struct
import sys


def _table(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row[:-1], widths[:-1], strict=True)]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return "\n".join(lines)


def env(_arguments) -> int:
    """Print every setting with its value, default and origin; 1 when a value cannot be used, whose row is marked."""
    from hybridps.backend.load import load_extension

    rows = [["", "NAME", "VALUE", "DEFAULT", "FROM", "MEANING"]]
    table, warnings = load_extension().config_table()
    problems = []
    for entry in table:
        mark = ">>" if entry["problem"] else ""
        meaning = f"NOT VALID, see below. {entry['doc']}" if mark else entry["doc"]
        rows.append([mark, *(str(entry[key]) for key in ("name", "value", "default", "source")), meaning])
        problems += [entry["problem"]] if mark else []
    if not problems:
        rows = [row[1:] for row in rows]
    print(_table(rows))
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    for problem in problems:
        print(f"problem: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _interfaces() -> list[tuple[str, str, str, str]]:
    """Name, state, IPv4 address and MTU of each network interface."""
    import fcntl

    found = []
    try:
        names = [name for _, name in socket.if_nameindex()]
    except OSError:  # a sandbox without netlink sockets
        names = sorted(name for name in os.listdir("/sys/class/net") if os.path.isdir(f"/sys/class/net/{name}"))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in names:
            try:
                request = struct.pack("256s", os.fsencode(name)[:15])
                address = socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24])  # SIOCGIFADDR
            except OSError:
                address = "-"
            values = []
            for item in ("operstate", "mtu"):
                try:
                    with open(f"/sys/class/net/{name}/{item}") as file:
                        values.append(file.read().strip())
                except OSError:
                    values.append("?")
            found.append((name, values[0], address, values[1]))
    return found


def _data_cards(of_ranks: list[dict]) -> list[list[str]]:
    """A line for each local rank: its network cards, their rates, why those."""
    rows = [["LOCAL RANK", "DATA THROUGH", "GBIT/S", "WHY"]]
    for rank, found in enumerate(of_ranks):
        cards = [f"{nic['name']} ({nic['address']})" if nic["address"] else nic["name"] for nic in found["nics"]]
        rates = [f"{nic['gbps']:g}" if nic["gbps"] else "?" for nic in found["nics"]]
        machine = f"{found['node_gbps']:g} in all" if found["node_gbps"] else ", ".join(rates)
        rows.append([str(rank), ", ".join(cards), machine, found["why"]])
    return rows


def doctor(arguments) -> int:
    """Check this machine and its settings as a job does, and print what a bug report needs; 1 when it cannot work."""
    if arguments.cluster:
        from hybridps import cluster

        return cluster.run(arguments, _interfaces())
    problems = []
    notes = []
    rows = []
    cards = []

    def show(what: str, value: object) -> None:
        rows.append([what, str(value)])

    show("python", f"{platform.python_version()} ({sys.executable})")
    show("kernel", platform.release())
    show("cores", len(os.sched_getaffinity(0)))
    shm = os.statvfs("/dev/shm")
    show("/dev/shm free", f"{shm.f_bavail * shm.f_frsize / 2**20:.0f} MiB")
    try:
        import torch

        show("torch", torch.__version__)
    except ImportError as error:
        problems.append(f"torch: {error}")
    else:
        from importlib.metadata import PackageNotFoundError, version

        from hybridps.backend import load

        try:
            show("hybridps", f"{version('hybridps')} ({load.installed_from()})")
        except PackageNotFoundError:
            problems.append("hybridps is not installed in this environment: torch cannot find it by name")
        try:
            info = load.build_info()
            show("built for torch", info.TORCH_VERSION)
            show("built with UCX", f"{info.UCX_VERSION} from {info.UCX_ORIGIN}")
            show("built with CUDA", "yes" if info.CUDA else "no")
            show("built by", f"{info.COMPILER}, {info.BUILD_TYPE}")
            extension = load.load_extension()
            try:
                path = load.load_ucx(info)
                show("UCX at hand", f"{'.'.join(map(str, load.ucx_version(path)))} ({path})")
                show("UCX has verbs", "yes" if load.has_verbs(path) else "no")
            except ImportError as error:  # where it is needed, check_settings() finds that it is a problem
                notes.append(f"{error} (needed for RDMA; over TCP it is not)")
            show("CUDA path", extension.cuda())
            show("extension", extension.__file__)
            notes += extension.config_table()[1]
            ranks = arguments.ranks or int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
            checked = [extension.check_settings(rank, ranks, rank == 0) for rank in range(ranks)]
            problems += dict.fromkeys(problem for one in checked for problem in one["problems"])
            first = checked[0]
            if first["control"]:
                cards = _data_cards(checked)
                show("control through", f"{first['control']}: {first['control_why']}")
            for text in filter(None, [first["loopback"]]):
                # A name that stands for this machine alone is a mistake of its /etc/hosts; the others mean what they
                # say.
                mistake = "resolves to" in text and not any(problem for problem in problems)
                advice = (
                    "ranks of other machines cannot reach this one: "
                    f"{text}; set HYBRIDPS_INTERFACE, or give the name its network address in /etc/hosts"
                )
                (problems if mistake else notes).append(advice)
        except ImportError as error:
            problems.append(str(error))
        else:
            import torch.distributed

            if not torch.distributed.is_backend_available("hybridps"):
                problems.append('torch.distributed.is_backend_available("hybridps") is false')
    from hybridps import status

    if problem := status.forbidden():
        notes.append(f"{problem}: ranks of this machine cannot share memory, and `hybridps status` cannot ask them")
    print(_table(rows))
    print()
    print(_table([["INTERFACE", "STATE", "IPV4", "MTU"], *(list(item) for item in _interfaces())]))
    print()
    if cards:
        print(_table(cards))
        print()
    for note in notes:
        print(f"note: {note}")
    for problem in problems:
        print(f"problem: {problem}")
    print("not usable here" if problems else "ok")
    return 1 if problems else 0


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
    problem = ""
    if not command:
        problem = "no program given: hybridps run --as gloo -- torchrun train.py"
    elif not names and arguments.names is None and arguments.advise:
        pass  # the program asks for hybridps
    elif not names:
        problem = "--as needs the name that the program asks for, such as gloo"
    elif os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        problem = "TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps torch from loading what hybridps needs for this; unset it"
    else:
        try:
            torch_version = version("torch")
        except PackageNotFoundError:
            problem = "torch is not installed in this environment"
        else:
            if tuple(int(part) for part in torch_version.split(".")[:2]) < (2, 14):
                problem = f"standing in for a backend needs torch 2.14 or newer, and this is {torch_version}"
            else:
                problem = _unknown_backend(names)
    if problem:
        print(f"hybridps: {problem}", file=sys.stderr)
        return 2
    if names:
        os.environ["HYBRIDPS_AS"] = ",".join(names)
    if arguments.advise:
        os.environ["HYBRIDPS_ADVISE"] = os.path.abspath(arguments.advise)
    if arguments.leave_side_groups:
        os.environ["HYBRIDPS_LEAVE_SIDE_GROUPS"] = "1"
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"hybridps: cannot run {command[0]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126


def advise(arguments) -> int:
    """Print what would make a DDP run faster, from its figures."""
    from hybridps.advise import main

    return main(arguments.file)


def _version() -> str:
    import hybridps

    try:
        return f"hybridps {hybridps.__version__}"
    except ImportError:  # PackageNotFoundError
        return "hybridps, not installed in this environment"


def main(argv: list[str] | None = None) -> int:
    from hybridps import bench
    from hybridps._text import print_any_text

    print_any_text()
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="hybridps", description=__doc__)
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for function in (env, doctor, run):
        command = commands.add_parser(function.__name__, help=function.__doc__, description=function.__doc__)
        command.set_defaults(function=function)
        if function is doctor:
            command.add_argument(
                "--ranks", type=int, default=0, help="ranks on this machine, for the table of network cards (default 1)"
            )
            command.add_argument(
                "--cluster",
                action="store_true",
                help="all machines of a job and what is between them: torchrun ... -m hybridps doctor --cluster",
            )
            command.add_argument("--json", metavar="FILE", help="with --cluster: all that was found, written by rank 0")
            command.add_argument("--picture", metavar="FILE", help="with --cluster: rates and round trips as an image")
            command.add_argument(
                "--seconds", type=float, default=0.3, help="with --cluster: how long each rate is measured (default 0.3)"
            )
            command.add_argument(
                "--timeout", type=float, default=60, help="with --cluster: how many seconds a rank is waited for (default 60)"
            )
    command.usage = "hybridps run [--as NAME[,NAME]] [--advise FILE] [--leave-side-groups] [--] PROGRAM [ARGUMENTS]"
    command.add_argument("--as", dest="names", metavar="NAME", help="what the program asks for: gloo")
    command.add_argument(
        "--advise", metavar="FILE", help="at the end say what would make DDP faster, and keep the figures (hybridps advise)"
    )
    command.add_argument(
        "--leave-side-groups",
        action="store_true",
        help="groups that the program makes with new_group(backend=NAME) stay with torch's own",
    )
    command.add_argument("command", nargs=argparse.REMAINDER, metavar="PROGRAM", help="torchrun, python, ...")
    command = commands.add_parser("advise", help=advise.__doc__, description=advise.__doc__)
    command.set_defaults(function=advise)
    command.add_argument("file", metavar="FILE", help="of `hybridps run --advise FILE`")
    command = commands.add_parser(
        "bench",
        help="Measure collectives: times, bandwidth, errors, the network's limit.",
        description=bench.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.add_arguments(command)
    command.set_defaults(function=lambda arguments: bench.run(arguments, argv[argv.index("bench") + 1 :]))
    from hybridps import status, trace

    command = commands.add_parser(
        "status",
        help="How the jobs on this machine stand: who waits for whom, since when.",
        description=status.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    status.add_arguments(command)
    command.set_defaults(function=status.run)
    command = commands.add_parser(
        "trace",
        help="Traces of a job on one clock: for Perfetto, or where a step's time went.",
        description=trace.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    trace.add_arguments(command)
    command.set_defaults(function=trace.run)
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


if __name__ == "__main__":
    sys.exit(main())
