"""hybridps: a PyTorch process-group backend. Scripts need no import: `init_process_group("hybridps")` finds it.

The names below are for those who come from BytePS or Horovod (docs/from-byteps.md), and for a training loop whose next
forward does not wait for all gradients (docs/overlap.md). They are loaded when they are first used.
"""

TYPE_CHECKING = False  # as typing has it, without the import
if TYPE_CHECKING:
    from hybridps._agreement import RanksDisagree
    from hybridps.cross_barrier import CrossBarrier
    from hybridps.direct import (
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

__all__ = [
    "Compression",
    "CrossBarrier",
    "DistributedOptimizer",
    "RanksDisagree",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "declare",
    "init",
    "local_rank",
    "local_size",
    "poll",
    "push_pull",
    "push_pull_async",
    "push_pull_async_inplace",
    "push_pull_inplace",
    "rank",
    "shutdown",
    "size",
    "synchronize",
]


def __getattr__(name: str):
    from importlib import import_module

    if name in __all__:
        place = {"CrossBarrier": "cross_barrier", "RanksDisagree": "_agreement"}.get(name, "direct")
        return getattr(import_module(f"hybridps.{place}"), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("hybridps")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
