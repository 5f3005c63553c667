"""`hybridps doctor`: what a job finds on this machine, and what a bug report needs."""

import dataclasses
import os
import platform
import socket
import struct
import sys

from hybridps.tools import status
from hybridps.tools.cluster import command as cluster
from hybridps.tools.output import table


@dataclasses.dataclass
class Found:
    rows: list[list[str]] = dataclasses.field(default_factory=list)
    cards: list[list[str]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    leaves_at_once: bool = False  # a call of CUDA's may not have returned, and an orderly exit would wait for it

    def show(self, what: str, value: object) -> None:
        self.rows.append([what, str(value)])


def interfaces() -> list[tuple[str, str, str, str]]:
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


def _look_at_settings(found: Found, extension, ranks: int) -> None:
    """As each of `ranks` local ranks has them."""
    checked = [extension.check_settings(rank, ranks, rank == 0) for rank in range(ranks)]
    found.problems += dict.fromkeys(problem for one in checked for problem in one["problems"])
    if (servers := os.environ.get("HYBRIDPS_SERVERS", "").strip()) and not found.problems:
        found.show("dedicated servers", f"{servers}: all answer, and have this token")
    found.notes += dict.fromkeys(warning for one in checked for warning in one["warnings"])
    first = checked[0]
    if first["encryption"]:
        found.show("encrypted by", first["encryption"])
    if first["control"]:
        found.cards = _data_cards(checked)
        found.show("control through", f"{first['control']}: {first['control_why']}")
    if text := first["loopback"]:
        # A name that stands for this machine alone is a mistake of its /etc/hosts; the others mean what they say.
        mistake = "resolves to" in text and not any(found.problems)
        (found.problems if mistake else found.notes).append(
            f"ranks of other machines cannot reach this one: {text}; set HYBRIDPS_INTERFACE, or give the name its "
            "network address in /etc/hosts"
        )


def _look_at_build(found: Found, ranks: int) -> None:
    """Raises ImportError where the extension cannot be loaded."""
    from hybridps.backend import load

    info = load.build_info()
    found.show("built for torch", info.TORCH_VERSION)
    found.show("built with UCX", f"{info.UCX_VERSION} from {info.UCX_ORIGIN}")
    found.show("built with CUDA", "yes" if info.CUDA else "no")
    found.show("built by", f"{info.COMPILER}, {info.BUILD_TYPE}")
    extension = load.load_extension()
    try:
        path = load.load_ucx(info)
        found.show("UCX at hand", f"{'.'.join(map(str, load.ucx_version(path)))} ({path})")
        found.show("UCX has verbs", "yes" if load.has_verbs(path) else "no")
    except ImportError as error:  # where it is needed, check_settings() finds that it is a problem
        found.notes.append(f"{error} (needed for RDMA; over TCP it is not)")
    cuda = extension.cuda()
    found.show("CUDA path", "none: for CPU tensors only" if "no NVIDIA driver is installed" in cuda else cuda)
    if trouble := extension.cuda_trouble():
        found.leaves_at_once = True
        found.problems.append(f'CUDA tensors cannot be carried here: {trouble}; use backend "cpu:hybridps,cuda:nccl"')
    found.show("extension", extension.__file__)
    found.notes += extension.config_table()[1]
    _look_at_settings(found, extension, ranks)


def _look_at_torch(found: Found, ranks: int) -> None:
    try:
        import torch

        found.show("torch", torch.__version__)
    except ImportError as error:
        found.problems.append(f"torch: {error}")
        return
    from importlib.metadata import PackageNotFoundError, version

    from hybridps.backend import load

    try:
        found.show("hybridps", f"{version('hybridps')} ({load.installed_from()})")
    except PackageNotFoundError:
        found.problems.append("hybridps is not installed in this environment: torch cannot find it by name")
    try:
        _look_at_build(found, ranks)
    except ImportError as error:
        found.problems.append(str(error))
        return
    import torch.distributed

    if not torch.distributed.is_backend_available("hybridps"):
        found.problems.append('torch.distributed.is_backend_available("hybridps") is false')


def _local_ranks(found: Found, asked: int) -> int:
    text = os.environ.get("LOCAL_WORLD_SIZE") or "1"
    if not asked and not text.isdecimal():
        found.problems.append(f"LOCAL_WORLD_SIZE={text} is no number of ranks: unset it, or give --ranks")
        return 1
    return max(1, asked or int(text))


def run(arguments) -> int:
    if arguments.cluster:
        return cluster.run(arguments, interfaces())
    found = Found()
    found.show("python", f"{platform.python_version()} ({sys.executable})")
    found.show("kernel", platform.release())
    found.show("cores", len(os.sched_getaffinity(0)))
    try:
        shm = os.statvfs("/dev/shm")
        found.show("/dev/shm free", f"{shm.f_bavail * shm.f_frsize / 2**20:.0f} MiB")
    except OSError as error:
        found.show("/dev/shm free", f"none: {error.strerror}")
    _look_at_torch(found, _local_ranks(found, arguments.ranks))
    if problem := status.forbidden():
        found.notes.append(
            f"{problem}: ranks of this machine cannot share memory, and `hybridps status` cannot ask them"
        )
    print(table(found.rows))
    print()
    print(table([["INTERFACE", "STATE", "IPV4", "MTU"], *(list(item) for item in interfaces())]))
    print()
    if found.cards:
        print(table(found.cards))
        print()
    for note in found.notes:
        print(f"note: {note}")
    for problem in found.problems:
        print(f"problem: {problem}")
    print("not usable here" if found.problems else "ok", flush=True)
    if found.leaves_at_once:
        os._exit(1)
    return 1 if found.problems else 0


def add_arguments(parser) -> None:
    add = parser.add_argument
    add("--ranks", type=int, default=0, help="ranks on this machine, for the table of network cards (default 1)")
    add(
        "--cluster",
        action="store_true",
        help="check all machines of a job and the network between them: torchrun ... -m hybridps doctor --cluster",
    )
    add("--json", metavar="FILE", help="with --cluster: rank 0 writes all results to this file")
    add("--picture", metavar="FILE", help="with --cluster: draw rates and round trips into this file")
    add("--seconds", type=float, default=0.3, help="with --cluster: seconds that each rate is measured (default 0.3)")
    add(
        "--timeout",
        type=float,
        default=60,
        help="with --cluster: seconds to wait for a rank (default 60)",
    )
