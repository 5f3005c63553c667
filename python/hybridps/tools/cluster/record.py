"""What a rank says of itself and of its machine."""

import contextlib
import os
import platform
import resource
import socket

from hybridps.backend import load


def _read(path: str, default: str = "?") -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return default


def machine_identity() -> str:
    """Ranks with the same one are of one machine: HYBRIDPS_NODE, else the boot and the network namespace."""
    given = os.environ.get("HYBRIDPS_NODE", "").strip()
    if given:
        return f"node {given}"
    namespace = "?"
    with contextlib.suppress(OSError):
        namespace = os.readlink("/proc/self/ns/net")
    return f"{_read('/proc/sys/kernel/random/boot_id', socket.gethostname())} {namespace}"


def _mtu(card: str) -> int:
    text = _read(f"/sys/class/net/{card}/mtu", "0")
    return int(text) if text.isdigit() else 0


def record(interfaces: list[tuple[str, str, str, str]]) -> dict:
    """What this rank is, and what its settings come to. `interfaces`: name, state, address, MTU of each."""
    nofile = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # a job raises the soft limit
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    found: dict = {
        "host": socket.gethostname(),
        "machine": machine_identity(),
        "pid": os.getpid(),
        "versions": {"python": platform.python_version(), "kernel": platform.release()},
        "cores": len(os.sched_getaffinity(0)),
        "nofile": nofile if nofile != resource.RLIM_INFINITY else 1 << 30,
        "memlock": memlock if memlock != resource.RLIM_INFINITY else -1,
        "settings": {},
        "same": [],
        "problems": [],
        "cards": [],
        "rdma": False,
        "descriptors": {
            "own": 0,
            "remote": 0,
            "local": 0,
        },  # of a rank: without others; for each on another machine, and on its own
    }
    try:
        import torch

        info = load.build_info()
        found["versions"] |= {
            "torch": torch.__version__,
            "hybridps": info.VERSION,
            "hybridps for torch": info.TORCH_MINOR,
        }
        extension = load.load_extension()
        try:
            found["versions"]["UCX"] = ".".join(map(str, load.ucx_version(load.load_ucx(info))))
        except ImportError:
            found["versions"]["UCX"] = "none"  # check_settings() says where that is a problem
        settings, _warnings, limits = extension.config_table()
        for row in settings + [row | {"name": f"LIMITS={row['name']}"} for row in limits]:
            name = row["name"].removeprefix("HYBRIDPS_")
            if row["source"] != "default" and row["value"] and name != "LIMITS":
                found["settings"][name] = "(secret)" if name == "TOKEN" else row["value"]
            if "same on all ranks" in row["doc"]:
                found["same"].append(name)
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
        first = int(os.environ.get("RANK", "0")) == 0
        checked = [extension.check_settings(rank, ranks, first and rank == 0) for rank in range(ranks)]
        found["problems"] += dict.fromkeys(problem for one in checked for problem in one["problems"])
        found["rdma"] = any(one["rdma"] for one in checked)
        ways = max(one["data_ways"] for one in checked)
        own = extension.descriptors_needed(0, 0, ways)
        found["descriptors"] = {
            "own": own,
            "remote": extension.descriptors_needed(1, 0, ways) - own,
            "local": extension.descriptors_needed(0, 1, ways) - own,
        }
        cards = {nic["name"]: nic for one in checked for nic in one["nics"] if nic["address"]}
        if not cards and checked[0]["control"]:  # RDMA ports have no address of their own
            name = checked[0]["control"]
            address = next((row[2] for row in interfaces if row[0] == name), "-")
            if address != "-":
                cards = {name: {"name": name, "address": address, "network": "", "gbps": 0.0}}
        found["cards"] = [{**nic, "mtu": _mtu(name)} for name, nic in cards.items()]
    except ImportError as error:
        found["problems"].append(str(error))
    return found
