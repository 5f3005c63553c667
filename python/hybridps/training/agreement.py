"""What must be the same on all ranks: it is compared, and every rank hears which ranks differ; or rank 0's is sent."""

import hashlib
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist


class RanksDisagree(RuntimeError):
    """The ranks of a group have different lists where they need the same. Raised on all of them, with one text but for
    the rank in front."""


def here(group: dist.ProcessGroup | None = None) -> str:
    """How this rank's messages begin, in the form that the engine's have."""
    return f"hybridps[rank {dist.get_rank(group)}/{dist.get_world_size(group)}]"


def agree(what: str, entries: Sequence[str], advice: str, group: dist.ProcessGroup | None = None) -> None:
    """Returns when all ranks of the group have given the same entries in the same order; a collective.

    Digests go first: a model has thousands of names. Raises RanksDisagree, which names the first entry that differs,
    and which ranks (of the world) have what there.
    """
    size = dist.get_world_size(group)
    digest = hashlib.blake2b("\0".join(entries).encode(), digest_size=16).digest()
    digests: list = [None] * size
    dist.all_gather_object(digests, digest, group=group)
    if len(set(digests)) == 1:
        return
    everyones: list = [None] * size
    dist.all_gather_object(everyones, list(entries), group=group)
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    for index in range(max(map(len, everyones))):
        had: dict[str, list[int]] = {}
        for rank, theirs in zip(ranks, everyones, strict=True):
            had.setdefault(theirs[index] if index < len(theirs) else "nothing", []).append(rank)
        if len(had) > 1:
            shown = "; ".join(
                f"{text} on rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))}" for text, who in had.items()
            )
            raise RanksDisagree(f"{here(group)}: {what}: number {index + 1} is {shown}. What to do: {advice}")
    raise AssertionError("digests differ where entries do not")


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[torch.Tensor], root: int, group: dist.ProcessGroup | None = None) -> None:
    """Gives all ranks of the group the values that its rank `root` has, in place; blocks until this rank has them."""
    started = []
    for tensor in tensors:
        wire = tensor.detach().contiguous()
        started.append((dist.broadcast(wire, group=group, group_src=root, async_op=True), wire, tensor))
    for work, wire, tensor in started:
        work.wait()
        if wire.data_ptr() != tensor.data_ptr():
            tensor.copy_(wire)
