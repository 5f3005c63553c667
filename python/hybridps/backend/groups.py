"""The backend of a process group of torch's, and groups beside it."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from hybridps._C import ProcessGroupHybrid

# Of messages that LocalSteps always waits for. `hybridps status` knows them by these numbers, which no program uses.
READY_TAG, ORDER_TAG = 0x68707301, 0x68707302


def backend_of(group: ProcessGroup | None) -> ProcessGroupHybrid:
    """The ProcessGroupHybrid of a group, None: of the world; ValueError if it has none for CPU tensors, or there is no
    group."""
    import torch
    import torch.distributed as dist

    from hybridps.backend.load import load_extension

    kind = load_extension().ProcessGroupHybrid
    if group is None:
        if not dist.is_initialized():
            raise ValueError("hybridps: there is no process group: call init_process_group first")
        group = dist.group.WORLD
    try:
        backend = group._get_backend(torch.device("cpu"))
    except (AttributeError, RuntimeError) as error:
        raise ValueError(f"hybridps: not a process group with a backend for CPU tensors: {group!r}") from error
    if not isinstance(backend, kind):
        backend = getattr(backend, "wrapped_pg", backend)  # under TORCH_DISTRIBUTED_DEBUG=DETAIL
    if not isinstance(backend, kind):
        raise ValueError(f"hybridps: the group's backend is {backend.name()}, not hybridps")
    return backend


def group_beside(group: ProcessGroup | None, compress: str, least: timedelta = timedelta(0)) -> ProcessGroup:
    """A new hybridps group over the ranks of `group` (None: of the world), with this codec; a collective of them.

    It has the timeout of `group` if that is of hybridps: new_group() does not take it over. But `least` is the least.
    """
    import torch.distributed as dist

    from hybridps.backend.load import load_extension

    try:
        timeout = max(backend_of(group).options.timeout, least)
    except ValueError:  # another backend
        timeout = None
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    options = load_extension().ProcessGroupHybrid.Options(compress=compress)
    # Of torch's ways to make a group over some ranks, this one does not ask those outside.
    return dist.new_group(ranks, timeout, backend="hybridps", pg_options=options, use_local_synchronization=True)
