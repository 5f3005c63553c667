"""Gradients in buckets, all-reduced while autograd still computes: what DistributedOptimizer and CrossBarrier share.

A bucket is a flat tensor of its parameters' gradients, each divided by the number of ranks as torch's DDP does it, and
behind them one flag for each parameter: whether this rank has a gradient for it. So one sum tells the mean, and which
parameters nobody used, without a second operation. Where the group compresses sums the flags are a tensor of integers, and
an operation, of their own: a codec would take them for gradients, and lose them or what stands beside them.

Operations are matched by their order, so every rank issues its buckets in the same one: a bucket that is full early
waits for its predecessors. That order is the reverse of the order in which the parameters were given, unless it is set.

Threads: hooks run in the thread that autograd runs them in, which for CPU tensors is the caller's; all else in the
caller's. Nothing here is locked: one backward at a time.
"""

import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from hybridps.backend.groups import backend_of
from hybridps.training.agreement import agree, here
from hybridps.training.priority import prioritized

BUCKET_BYTES = 1 << 20

# Which buckets a parameter belongs to. By weak references: the hooks of the parameters keep their buckets alive.
_owners = WeakTensorKeyDictionary()


def grouped(items: Sequence[tuple[object, int]], least_bytes: int) -> list[list[int]]:
    """Indices of items (kind, bytes) in groups of one kind each, in order, closed as soon as they have `least_bytes`.

    What is left of a kind at the end is a smaller group. Groups are in the order of their last items: that is the
    order in which they fill up.
    """
    open_groups: dict[object, tuple[list[int], int]] = {}
    groups = []
    for index, (kind, size) in enumerate(items):
        indices, total = open_groups.pop(kind, ([], 0))
        indices.append(index)
        if total + size >= least_bytes:
            groups.append(indices)
        else:
            open_groups[kind] = (indices, total + size)
    groups += [indices for indices, _ in open_groups.values()]
    return sorted(groups, key=lambda indices: indices[-1])


class Bucket:
    """Some parameters' gradients in one tensor; see the module's text."""

    def __init__(self, named: list[tuple[str, torch.Tensor]], dtype: torch.dtype, flags_apart: bool = False):
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        sizes = [parameter.numel() for parameter in self.parameters]
        elements = sum(sizes)
        device = self.parameters[0].device
        self.buffer = torch.zeros(elements + (0 if flags_apart else len(named)), dtype=dtype, device=device)
        parts = self.buffer[:elements].split(sizes)
        self.views = [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]
        self.flags_apart = flags_apart
        self.priority: int | None = None  # hybridps.priority; None: as the group says
        self.flags = (
            torch.zeros(len(named), dtype=torch.int32, device=device) if flags_apart else self.buffer[elements:]
        )
        self.restart()

    def restart(self) -> None:
        self.filled = [False] * len(self.parameters)
        self.used = [False] * len(self.parameters)  # by this rank
        self.missing = len(self.parameters)
        self.work: dist.Work | None = None
        self.flags_work: dist.Work | None = None

    def launch(self, group: dist.ProcessGroup | None) -> None:
        self.flags.copy_(torch.tensor(self.used, dtype=self.flags.dtype))
        with prioritized(group, self.priority):
            self.work = dist.all_reduce(self.buffer, group=group, async_op=True)
            if self.flags_apart:
                self.flags_work = dist.all_reduce(self.flags, group=group, async_op=True)

    def wait(self) -> list[bool]:
        """Until the sum is there; for each parameter whether any rank had a gradient for it."""
        assert self.work is not None
        self.work.wait()
        if self.flags_work is not None:
            self.flags_work.wait()
        if all(self.used):
            return self.used
        return [flag.real > 0 for flag in self.flags.tolist()]


def _compresses(group: dist.ProcessGroup | None) -> bool:
    """Whether a codec may change sums of this group; the same on all of its ranks."""
    try:
        return backend_of(group).compression() != "none"
    except ValueError:  # another backend
        return False


class GradientBuckets:
    """The gradients of `named` parameters, in buckets of at least `bucket_bytes`, over one process group.

    A round: `fill()` for each parameter whose gradient is there, `launch_rest()` when no more will come, then
    `Bucket.wait()` for each, in any order, and `restart()`. Two callbacks say when: `arrived(parameter)` when a
    backward has accumulated its gradient, `ended()` at the end of each backward in which one arrived.

    Making one is a collective: names, shapes and types are compared (RanksDisagree). A parameter belongs to one object
    at a time; the one made last takes it from a predecessor, which is closed, unless that one must not be left
    (`keeps`).
    """

    def __init__(
        self,
        owner: str,
        named: Sequence[tuple[str, torch.Tensor]],
        arrived: Callable[[torch.Tensor], None],
        ended: Callable[[], None],
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        wire_dtype: torch.dtype | None = None,
        keeps: bool = False,
    ):
        if bucket_bytes < 1:
            raise ValueError(f"{owner}: buckets of {bucket_bytes} bytes")
        self.owner, self.group, self.keeps, self.closed = owner, group, keeps, False
        self._arrived, self._ended = arrived, ended
        named = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        if not named:
            raise ValueError(f"{here(group)}: {owner}: no parameter requires a gradient")
        for name, parameter in named:
            if hasattr(parameter, "full_tensor"):
                raise TypeError(
                    f"{here(group)}: {owner}: parameter {name!r} is a DTensor: its gradients are reduced by what "
                    "sharded it. What to do: use the stock optimizer with FSDP or tensor parallelism"
                )
            predecessor = _owners[parameter]() if parameter in _owners else None
            if predecessor is not None and predecessor.keeps and not predecessor.closed:
                raise ValueError(
                    f"{here(group)}: {owner}: parameter {name!r} belongs to a {predecessor.owner}. "
                    "What to do: call that one's close() first"
                )
        agree(
            f"{owner}: the parameters differ",
            [f"{name!r} ({parameter.dtype}, shape {list(parameter.shape)})" for name, parameter in named],
            "build the same model, and freeze the same parameters, on all ranks",
            group,
        )
        backward = list(reversed(named))
        flags_apart = _compresses(group)
        self.buckets: list[Bucket] = []
        for indices in grouped(
            [((p.dtype, p.device), p.numel() * p.element_size()) for _, p in backward], bucket_bytes
        ):
            members = [backward[index] for index in indices]
            dtype = members[0][1].dtype
            if wire_dtype is not None and dtype in (torch.float32, torch.float64):
                dtype = wire_dtype
            self.buckets.append(Bucket(members, dtype, flags_apart))
        self.order = list(range(len(self.buckets)))  # in which they are issued; may be set between rounds
        self.touched: set[torch.Tensor] = set()  # had a gradient in any backward since restart()
        self._next = 0
        self._in_backward = False
        self._factor = 1.0
        self._place = {p: (bucket, i) for bucket in self.buckets for i, p in enumerate(bucket.parameters)}
        self._hooks = []
        for parameter in self._place:
            if parameter in _owners and (predecessor := _owners[parameter]()) is not None:
                predecessor.close()
            _owners[parameter] = weakref.ref(self)
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._on_gradient))

    def close(self) -> None:
        """Takes the hooks off; the parameters are torch's alone again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.closed = True

    def __contains__(self, parameter: torch.Tensor) -> bool:
        return parameter in self._place

    def name_of(self, parameter: torch.Tensor) -> str:
        bucket, index = self._place[parameter]
        return bucket.names[index]

    def bucket_of(self, parameter: torch.Tensor) -> Bucket:
        return self._place[parameter][0]

    def check_step(self, param_groups: list[dict]) -> None:
        """Raises where an optimizer has parameters that nothing here reduces, which would drift apart, and where the
        last backward has no end: the other ranks have its gradients, and this one does not know which."""
        if self._in_backward:
            raise RuntimeError(
                f"{here(self.group)}: {self.owner}: step() was called inside a backward(), or an earlier backward() "
                "ended in an exception. What to do: step after backward(); after an exception start again on all "
                "ranks, from a checkpoint"
            )
        for parameter in (parameter for group in param_groups for parameter in group["params"]):
            if parameter.requires_grad and parameter not in self._place:
                raise RuntimeError(
                    f"{here(self.group)}: {self.owner}: a parameter of shape {list(parameter.shape)} requires a "
                    f"gradient, but did not when the {self.owner} was made, or was added later: each rank would step "
                    "it alone. What to do: make it again after you unfreeze parameters or add groups"
                )

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        if gradient.layout != torch.strided:
            raise TypeError(
                f"{here(self.group)}: {self.owner}: the gradient of {self.name_of(parameter)!r} is sparse, and buckets "
                "are dense. What to do: make the embedding with sparse=False, or reduce it by "
                "torch.distributed.all_reduce"
            )
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._on_end)
        self.touched.add(parameter)
        self._arrived(parameter)

    def _on_end(self) -> None:
        self._in_backward = False
        self._ended()

    @torch.no_grad()
    def fill(self, parameter: torch.Tensor) -> None:
        """Its gradient as it now is goes out with its bucket."""
        bucket, index = self._place[parameter]
        if bucket.filled[index]:
            raise RuntimeError(
                f"{here(self.group)}: {self.owner}: the gradient of {bucket.names[index]!r} came twice. Either an "
                "earlier backward() ended in an exception: then start again on all ranks. Or one backward() runs "
                "inside another, as with torch.utils.checkpoint(use_reentrant=True): use use_reentrant=False"
            )
        if bucket.missing == len(bucket.parameters):
            self._factor = 1.0 / dist.get_world_size(self.group)  # reconfigure() may have changed it
        if parameter.grad is None:
            bucket.views[index].zero_()
        else:
            torch.mul(parameter.grad, self._factor, out=bucket.views[index])
            bucket.used[index] = parameter in self.touched
        bucket.filled[index] = True
        bucket.missing -= 1
        if bucket.missing == 0:
            self._launch()

    def launch_rest(self) -> None:
        """Issues what is left. Parameters without a gradient count as zeros."""
        for bucket in self.buckets:
            for parameter, filled in zip(bucket.parameters, list(bucket.filled), strict=True):
                if not filled:
                    self.fill(parameter)

    @torch.no_grad()
    def _launch(self) -> None:
        while self._next < len(self.order):
            bucket = self.buckets[self.order[self._next]]
            if bucket.missing > 0 or bucket.work is not None:  # it is not full, or still has the last round's sums
                return
            bucket.launch(self.group)
            self._next += 1

    def next_round(self) -> None:
        """The first bucket may be issued again; each needs its restart() before it is filled."""
        self.touched.clear()
        self._next = 0

    def restart(self) -> None:
        for bucket in self.buckets:
            bucket.restart()
        self.next_round()
