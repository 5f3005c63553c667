"""The backend of a process group of torch's."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import ProcessGroup

    from hybridps._C import ProcessGroupHybrid


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


def timeout_of(group: ProcessGroup | None) -> timedelta | None:
    """Of the operations of a hybridps group, for groups that are made beside it: new_group() does not take it over.
    None: of another backend."""
    try:
        return backend_of(group).options.timeout
    except ValueError:
        return None
