"""Which operations go first, by the call: what `hybridps.priority` is, and what push_pull and CrossBarrier use."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist

from hybridps.backend.groups import backend_of
from hybridps.backend.load import load_extension

LOWEST, HIGHEST = -128, 127


@contextlib.contextmanager
def priority(value: int | None) -> Iterator[None]:
    """Operations that this thread issues inside have this priority, in every group, instead of their group's.

    value: -128 to 127, higher goes first; None: as the groups say. May be nested. It only orders chunks that wait to be
        sent. It changes neither how operations are matched nor a result. Ranks may differ: each orders what it sends. A
        dedicated server goes by the contribution that came first.

    Raises ValueError outside that range, ImportError without the extension. Groups of other backends ignore it.
    """
    exchange = load_extension().exchange_thread_priority
    before = exchange(value)
    try:
        yield
    finally:
        exchange(before)


def has_priorities(group: dist.ProcessGroup | None) -> bool:
    """Whether the group's backend is hybridps."""
    try:
        backend_of(group)
    except ValueError:
        return False
    return True


def prioritized(group: dist.ProcessGroup | None, value: int | None) -> contextlib.AbstractContextManager[None]:
    """`priority`, cut to its range; nothing for None, or where the group has none."""
    if value is None or not has_priorities(group):
        return contextlib.nullcontext()
    return priority(max(LOWEST, min(HIGHEST, value)))
