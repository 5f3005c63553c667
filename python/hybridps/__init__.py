"""hybridps: a PyTorch process-group backend. Training needs no import: `init_process_group("hybridps")` finds it.

This module shows what hybridps does, and chooses what a single group does:

    import hybridps
    dist.init_process_group("hybridps", pg_options=hybridps.Options(dedicated_servers=False))
    print(hybridps.topology().text)     # 4 ranks on 2 nodes: boxa [0, 1], boxb [2, 3] ...
    before = hybridps.stats()["net_tx_payload_bytes"]

    with hybridps.priority(5):          # before bulk that waits (docs/overlap.md)
        dist.all_reduce(tensor)

It also has BytePS's and Horovod's calls (docs/from-byteps.md). With `CrossBarrier` the next forward does not wait for
all gradients (docs/overlap.md). `LocalSteps` exchanges every H steps only (docs/local-steps.md).

Settings of a process are environment variables: the command `hybridps env --all` prints them. Importing this module
loads neither torch nor the extension. The first use of a name below loads both, and raises ImportError if it cannot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from hybridps import compress as compress
    from hybridps._C import ProcessGroupHybrid
    from hybridps.training.agreement import RanksDisagree
    from hybridps.training.cross_barrier import CrossBarrier
    from hybridps.training.direct import (
        Compression,
        DistributedOptimizer,
        broadcast_object,
        broadcast_optimizer_state,
        broadcast_parameters,
        declare,
        init,
        local_rank,
        local_size,
        poll,
        push_pull,
        push_pull_async,
        push_pull_async_inplace,
        push_pull_inplace,
        rank,
        shutdown,
        size,
        synchronize,
    )
    from hybridps.training.local_steps import LocalSteps
    from hybridps.training.priority import priority

    Options = ProcessGroupHybrid.Options
    __version__: str

_DIRECT = [
    "Compression",
    "CrossBarrier",
    "DistributedOptimizer",
    "LocalSteps",
    "RanksDisagree",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "declare",
    "init",
    "local_rank",
    "local_size",
    "poll",
    "priority",
    "push_pull",
    "push_pull_async",
    "push_pull_async_inplace",
    "push_pull_inplace",
    "rank",
    "shutdown",
    "size",
    "synchronize",
]
__all__ = ["Node", "Options", "ProcessGroupHybrid", "Topology", "__version__", "stats", "topology", *_DIRECT]


class Node(NamedTuple):
    """Ranks that share memory, and what connects them to others."""

    host: str
    """Host name of its first rank."""
    ranks: list[int]
    """Group ranks, ascending."""
    share: float
    """The part of each tensor that they sum for the group, when the group was made: 0 to 1, with the servers' 1 in all.
    It may change while the job runs, where networks turn out to be unequal."""
    data: str
    """Network interfaces of data of its first rank, with what is known: "eth0 (10.0.0.0/24, 25 Gbit/s)"."""
    control: str
    """The same of its control messages."""


class Topology(NamedTuple):
    """Who is in a group and how they are connected."""

    text: str
    """All of it in one line, as rank 0 logs it at the level info."""
    nodes: list[Node]
    """In the order of their first ranks."""
    transport: str
    """What carries data between nodes: "TCP", "RDMA" or "TCP through UCX"."""
    servers: list[str]
    """Hosts of the dedicated servers that are used, one for each of their engines."""
    servers_share: float
    """The part of each tensor that the dedicated servers sum."""
    servers_why: str
    """Why none is used, as far as this rank knows: HYBRIDPS_SERVERS is read by rank 0. Empty where one is."""


def topology(group: ProcessGroup | None = None) -> Topology:
    """What a group looks like; None: the world. Waits until all members have come.

    Any thread; local otherwise. Raises ValueError where the group has no hybridps backend for CPU tensors, and what
    `init_process_group` raises where a member does not come.
    """
    from hybridps.backend.groups import backend_of

    backend = backend_of(group)
    backend.wait_ready()
    found = backend.summary()
    found["nodes"] = [Node(**node) for node in found["nodes"]]
    return Topology(**found)


def stats() -> dict[str, int | float | str | dict[str, int | float]]:
    """Counters and metrics of this process since its first group, over all its groups; empty without a group. The names
    are those of docs/metrics.md. A metric with a label is a dictionary. Some of them:

    net_tx_payload_bytes, net_rx_payload_bytes  between nodes, exact
    net_tx_header_bytes, net_rx_header_bytes    headers of these, and control messages
    net_tx_device_bytes                         bytes that UCX sent from a GPU's memory
    shm_tx_payload_bytes, shm_rx_payload_bytes  through shared memory
    operations, groups, endpoints               completed; open; connections and peers in shared memory
    pinned_bytes                                host memory that is pinned for CUDA tensors
    kind_bytes, kind_seconds, ...               by collective: {"allreduce": ...}
    waited_seconds                              by the rank that was waited for
    compress_*                                  what codecs did: operations, bytes before and after, nanoseconds, blocks not finite
    job                                         the world in one line (topology().text); missing while it has none

    Any thread may call it. It waits for the engine's thread, 1 s at most.
    """
    import torch.distributed as dist

    from hybridps.backend.groups import backend_of
    from hybridps.backend.load import load_extension

    counters: dict[str, Any] = dict(load_extension().stats())
    if counters and dist.is_initialized():
        try:
            counters["job"] = backend_of(None).summary()["text"]
        except ValueError:  # the world is another backend's
            pass
    return counters


def __getattr__(name: str) -> object:
    if name in _DIRECT:
        from importlib import import_module

        places = {
            "CrossBarrier": "cross_barrier",
            "LocalSteps": "local_steps",
            "RanksDisagree": "agreement",
            "priority": "priority",
        }
        return getattr(import_module(f"hybridps.training.{places.get(name, 'direct')}"), name)
    if name == "compress":  # hybridps.compress.stats() after `import hybridps`
        from importlib import import_module

        return import_module("hybridps.compress")
    if name == "__version__":
        from importlib.metadata import version

        return version("hybridps")
    if name in ("Options", "ProcessGroupHybrid"):
        from hybridps.backend.load import load_extension

        kind = load_extension().ProcessGroupHybrid
        return kind.Options if name == "Options" else kind
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
