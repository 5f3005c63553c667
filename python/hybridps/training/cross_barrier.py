"""CrossBarrier: the optimizer steps, and the next forward begins, while gradients are still on their way.

DDP waits at the end of backward for all gradients. Here each bucket of parameters is stepped alone, when its sum is
there. The next forward waits for a bucket at the first layer that needs it. This saves at most the smaller of two
times: that of forward, and that of the communication which backward does not hide.

The last layers' gradients are ready first, but the next forward needs them last. So sending in order of readiness
would save nothing. On hybridps buckets have priorities: they go out as they get ready, and the engine sends chunks of
the most urgent bucket first. Other backends send in the order of calls. For them an order is planned: a few steps
measure when buckets get ready and how long each takes to send. The ranks agree on these times, and simulate a link that
always takes the most urgent bucket of those that are ready. From then on all ranks issue in that order. Neither way
changes a sum.

Source: BytePS's schedule, Peng et al., "A Generic Communication Scheduler for Distributed DNN Training Acceleration",
SOSP 2019.
"""

import contextlib
import statistics
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from hybridps.training.agreement import broadcast_tensors, here
from hybridps.training.gradients import BUCKET_BYTES, Bucket, GradientBuckets
from hybridps.training.priority import has_priorities

MEASURED_STEPS = 4  # of which the first, with its connections and allocations, does not count


def send_order(ready: Sequence[float], cost: Sequence[float]) -> list[int]:
    """In which order to send buckets that get ready one after the other, and that forward needs from the last to the
    first.

    ready: when, in seconds from anywhere, in the order of backward; cost: seconds on the link. Whenever the link is
    free it takes the one that forward needs first, of those that are ready.
    """
    coming = sorted(range(len(ready)), key=lambda index: (ready[index], index))
    order: list[int] = []
    waiting: set[int] = set()
    now = 0.0
    while coming or waiting:
        if not waiting:
            now = max(now, ready[coming[0]])
        while coming and ready[coming[0]] <= now:
            waiting.add(coming.pop(0))
        chosen = max(waiting)
        waiting.remove(chosen)
        order.append(chosen)
        now += cost[chosen]
    return order


class _Hook:
    """On a module of the model. Copies of the model have it too, also pickled ones, and there it does nothing."""

    def __init__(self, barrier: "CrossBarrier | None" = None, action: str = ""):
        self._barrier = None if barrier is None else weakref.ref(barrier)
        self._action = action

    def __call__(self, module: nn.Module, *_: Any) -> None:
        barrier = self._barrier and self._barrier()
        if barrier is not None:
            getattr(barrier, self._action)(module)

    def __deepcopy__(self, _: Any) -> "_Hook":
        return _Hook()

    def __reduce__(self) -> Any:
        return _Hook, ()


class CrossBarrier(torch.optim.Optimizer):
    """In the place of DDP and the optimizer, for a model that each rank has whole; itself an Optimizer, for schedulers.

        optimizer = hybridps.CrossBarrier(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        for images, labels in loader:
            optimizer.zero_grad()
            criterion(model(images), labels).backward()
            optimizer.step()

    model: on this rank's device, not wrapped in DDP or FSDP, not compiled. Its parameters and buffers become rank 0's,
        as DDP has it; later buffers (BatchNorm's) are each rank's own.
    make_optimizer: called once, with the list of the model's parameters, for a stock optimizer over them or over groups
        of them. It must treat each parameter by itself, as all of torch's but LBFGS do.
    process_group: the world by default. bucket_bytes: the least size of what is sent and stepped together.

    step() returns before anything is stepped. It remembers the present settings of the parameter groups, so that a
    scheduler may go on. It takes the gradients away (.grad is None). A bucket is stepped in the forward of the first
    module that has one of its parameters, or in synchronize(). The first steps measure, and wait as DDP does.

    Shared parameters: the gradient is sent when all its uses have been differentiated, and waited for at its first use.
    Some modules are never called themselves (MultiheadAttention's out_proj). For their parameters the innermost module
    around them waits that the first forwards called.

    Code that reads parameters between step() and the forward (an average of weights, a norm) calls synchronize() first.
    state_dict() and load_state_dict() of model and optimizer do so by themselves, and so does evaluation (model.eval(),
    no_grad).

    Accumulation: all backwards but the last one before step() in `with optimizer.no_sync():`.

    Refused, with the reason:
        gradients that were changed between backward() and step() (clipping, GradScaler.unscale_)
        a GradScaler that is enabled; LBFGS; optimizers that keep state in their groups
        sparse gradients; DTensors; a second backward before step(); parameters added or unfrozen later

    Making one is a collective. If parameters differ between ranks, all raise RanksDisagree. Threads: one. Errors of
    communication come out of the call that waits: backward(), step(), forward() or synchronize().
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        *,
        process_group: dist.ProcessGroup | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        self._group = process_group
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        self._check_model(model)
        self._inner = make_optimizer(list(model.parameters()))
        self._check_optimizer(names)
        self._complete = False
        super().__init__(self._inner.param_groups, self._inner.defaults)
        self.state = self._inner.state
        self._complete = True

        stepped = {parameter for group in self.param_groups for parameter in group["params"]}
        named = [(name, parameter) for parameter, name in names.items() if parameter in stepped]
        self._gradients = GradientBuckets(
            "CrossBarrier", named, self._arrived, self._ended, process_group, bucket_bytes, keeps=True
        )
        if has_priorities(process_group):
            last = max(1, len(self._gradients.buckets) - 1)
            for index, bucket in enumerate(self._gradients.buckets):  # in the order of backward
                bucket.priority = 1 + 99 * index // last
        broadcast_tensors((*model.parameters(), *model.buffers()), 0, process_group)

        self._owed: dict[Bucket, list[dict[str, Any]]] = {}  # issued and not yet stepped, with step()'s settings
        self._sent = False  # a backward has issued its buckets, and step() has not been called
        self._accumulating = False
        self._versions: dict[torch.Tensor, tuple[torch.Tensor, int]] = {}
        self._steps = 0
        self._ready_at: dict[Bucket, float] = {}
        self._measured: list[tuple[list[float], float]] = []
        self._watch(model)

    # ------------------------------------------------------------------------------------------------ what is refused

    def _refuse(self, what: str, advice: str, kind: type[Exception] = RuntimeError) -> NoReturn:
        raise kind(f"{here(self._group)}: CrossBarrier: {what}. What to do: {advice}")

    def _check_model(self, model: nn.Module) -> None:
        from torch.nn.parallel import DistributedDataParallel

        if isinstance(model, DistributedDataParallel) or type(model).__name__ in (
            "FullyShardedDataParallel",
            "FSDPModule",
        ):
            self._refuse(
                f"the model is a {type(model).__name__}, which reduces gradients itself",
                "pass the module within",
                TypeError,
            )
        if hasattr(model, "_orig_mod"):
            self._refuse(
                "the model is compiled: its forward takes all parameters at once, and cannot wait layer by layer",
                "pass the module before torch.compile, or use DDP",
                TypeError,
            )

    def _check_optimizer(self, names: dict[torch.Tensor, str]) -> None:
        inner = self._inner
        if not isinstance(inner, torch.optim.Optimizer):
            self._refuse(
                f"make_optimizer returned a {type(inner).__name__}", "return a torch.optim.Optimizer", TypeError
            )
        if isinstance(inner, torch.optim.LBFGS):
            self._refuse(
                "LBFGS steps all parameters by one direction", "another optimizer, or DDP with LBFGS", TypeError
            )
        for parameter in (parameter for group in inner.param_groups for parameter in group["params"]):
            if parameter not in names:
                self._refuse(
                    f"the optimizer has a parameter of shape {list(parameter.shape)} that is not the model's, so no "
                    "forward would wait for it",
                    "a CrossBarrier for each model, over its own parameters",
                    ValueError,
                )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once this is made: the new parameters have no buckets."""
        if self._complete:
            self._refuse("parameter groups cannot be added", "synchronize(), close(), and make a new CrossBarrier")
        super().add_param_group(param_group)

    @property
    def _step_supports_amp_scaling(self) -> bool:  # what an enabled GradScaler asks for first in its step()
        self._refuse(
            "a GradScaler must see all gradients of all ranks before the first step",
            "bfloat16, which needs no scaling, or DistributedOptimizer or DDP",
        )

    def _check_untouched(self) -> None:
        for parameter, (gradient, version) in self._versions.items():
            if parameter.grad is not gradient or gradient._version != version:
                self._refuse(
                    f"the gradient of {self._gradients.name_of(parameter)!r} was changed between backward() and "
                    "step(), as by clip_grad_norm_ or GradScaler.unscale_. The gradient was sent before, and a norm "
                    "needs all gradients",
                    "leave gradients alone, or use DistributedOptimizer or DDP",
                )

    # --------------------------------------------------------------------------------------------- backward and step

    def _arrived(self, parameter: torch.Tensor) -> None:
        name = self._gradients.name_of(parameter)
        bucket = self._gradients.bucket_of(parameter)
        if bucket in self._owed:
            self._refuse(
                f"{name!r} was used before its last step was done: neither its module nor one around it was called",
                "call the module (not its parameters), or synchronize() before the forward",
            )
        if self._sent:
            self._refuse(
                f"a gradient of {name!r} came after those of the last backward() were sent, and before step()",
                "call each backward() but the last within no_sync(); use checkpoints with use_reentrant=False",
            )
        if not self._accumulating:
            assert parameter.grad is not None
            self._versions[parameter] = (parameter.grad, parameter.grad._version)
            self._gradients.fill(parameter)
            if bucket.missing == 0:
                self._ready_at[bucket] = time.perf_counter()

    def _ended(self) -> None:
        if not self._accumulating:
            self._send_rest()

    def _send_rest(self) -> None:
        self.synchronize()  # what this forward did not use
        now = time.perf_counter()
        for bucket in self._gradients.buckets:
            for parameter, filled in zip(bucket.parameters, bucket.filled, strict=True):
                if not filled and parameter.grad is not None:
                    self._versions[parameter] = (parameter.grad, parameter.grad._version)
            self._ready_at.setdefault(bucket, now)
        self._gradients.launch_rest()
        self._sent = True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """In it backward() adds up in .grad and sends nothing; the first one outside sends the sum."""
        before, self._accumulating = self._accumulating, True
        try:
            yield
        finally:
            self._accumulating = before

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Leaves the buckets to be stepped as they come; see the class. With a closure its result, after its
        backward."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._gradients.closed:
            self._refuse("it was closed", "make a new one")
        self._gradients.check_step(self.param_groups)
        if not self._sent:
            self._send_rest()
        self._check_untouched()
        settings = [
            {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in group.items() if k != "params"}
            for group in self.param_groups
        ]
        for index in self._gradients.order:
            self._owed[self._gradients.buckets[index]] = settings
        for bucket in self._gradients.buckets:
            for parameter in bucket.parameters:
                parameter.grad = None
        self._versions.clear()
        self._gradients.next_round()
        self._sent = False
        if self._steps < MEASURED_STEPS:
            self._measure()
        self._ready_at.clear()
        self._steps += 1
        return loss

    def _step_bucket(self, bucket: Bucket) -> None:
        settings = self._owed.pop(bucket)
        used = bucket.wait()
        members = set(bucket.parameters)
        kept = [parameter.grad for parameter in bucket.parameters]
        groups = []
        for group, values in zip(self.param_groups, settings, strict=True):
            groups.append({**values, "params": [parameter for parameter in group["params"] if parameter in members]})
        try:
            for parameter, view, is_used in zip(bucket.parameters, bucket.views, used, strict=True):
                parameter.grad = view if is_used else None
            self._inner.param_groups = groups
            self._inner.step()
        finally:
            self._inner.param_groups = self.param_groups
            for parameter, gradient in zip(bucket.parameters, kept, strict=True):
                parameter.grad = gradient
        bucket.restart()
        for group, values in zip(groups, settings, strict=True):
            changed = [key for key, value in group.items() if key != "params" and value is not values.get(key, group)]
            if changed:
                self._refuse(
                    f"{type(self._inner).__name__} keeps state in its parameter groups ({', '.join(changed)}), and "
                    "CrossBarrier steps one bucket at a time, which would mix that state up",
                    "an optimizer that treats each parameter by itself, or DDP",
                )

    def synchronize(self) -> None:
        """Waits for all that is on its way and steps it. Parameters are then as after the optimizer's step with DDP."""
        self._wait_for(list(self._owed))

    def _drop_sent(self) -> None:
        """What a backward has sent, and no step() has taken."""
        if self._sent:
            for bucket in self._gradients.buckets:
                bucket.wait()
            self._gradients.restart()
            self._sent = False
            self._ready_at.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's. Gradients that a backward has sent, and that no step() has taken, are waited for and dropped."""
        self._drop_sent()
        self._gradients.touched.clear()
        self._versions.clear()
        super().zero_grad(set_to_none)

    # ---------------------------------------------------------------------------------------------------- the order

    def _measure(self) -> None:
        begin = min(self._ready_at.values())
        self.synchronize()
        link_s = time.perf_counter() - begin
        if self._steps > 0:
            self._measured.append(([self._ready_at[bucket] - begin for bucket in self._gradients.buckets], link_s))
        if self._steps + 1 == MEASURED_STEPS:
            if self._gradients.buckets[0].priority is None:
                self._plan()
            self._attribute()

    def _plan(self) -> None:
        ready = [statistics.median(times) for times in zip(*(ready for ready, _ in self._measured), strict=True)]
        link_s = statistics.median(seconds for _, seconds in self._measured)
        everyones: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(everyones, (ready, link_s), group=self._group)
        # The same figures on all ranks, so the same order.
        ready = [statistics.fmean(times) for times in zip(*(theirs for theirs, _ in everyones), strict=True)]
        link_s = statistics.fmean(seconds for _, seconds in everyones)
        sizes = [bucket.buffer.nbytes for bucket in self._gradients.buckets]
        self._gradients.order = send_order(ready, [link_s * size / sum(sizes) for size in sizes])

    # ------------------------------------------------------------------------------------------------------- forward

    def _watch(self, model: nn.Module) -> None:
        self._called: set[nn.Module] | None = set()  # until the first steps are over
        self._around: dict[nn.Module, nn.Module] = {}
        self._waits: dict[nn.Module, list[Bucket]] = {}  # for what it has itself
        self._below: dict[nn.Module, list[Bucket]] = {}  # for all that is in it
        self._handles: list[Any] = []

        def buckets_of(parameters: Iterator[nn.Parameter]) -> list[Bucket]:
            return list(dict.fromkeys(self._gradients.bucket_of(p) for p in parameters if p in self._gradients))

        for module in model.modules():
            for child in module.children():
                self._around.setdefault(child, module)
            self._waits[module] = buckets_of(module.parameters(recurse=False))
            self._below[module] = buckets_of(module.parameters())
            self._handles += [
                module.register_forward_pre_hook(_Hook(self, "_before_forward")),
                module.register_state_dict_pre_hook(_Hook(self, "_before_state")),
                module.register_load_state_dict_pre_hook(_Hook(self, "_before_state")),
            ]

    def _attribute(self) -> None:
        """Who waits for the parameters of modules that are not called."""
        assert self._called is not None
        called, self._called = self._called, None
        for module, buckets in list(self._waits.items()):
            waiting = module
            while waiting not in called and waiting in self._around:
                waiting = self._around[waiting]
            if waiting is not module:
                self._waits[waiting] = list(dict.fromkeys(self._waits[waiting] + buckets))

    @torch.no_grad()
    def _wait_for(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            if bucket in self._owed:
                self._step_bucket(bucket)

    def _before_forward(self, module: nn.Module) -> None:
        if self._called is not None:
            self._called.add(module)
        if self._owed:
            # In evaluation torch's transformers take the parameters of modules within, and call none of them.
            layerwise = module.training and torch.is_grad_enabled()
            self._wait_for(self._waits[module] if layerwise else self._below[module])

    def _before_state(self, _: nn.Module) -> None:
        self.synchronize()

    # ------------------------------------------------------------------------------------------- state, and the end

    def state_dict(self) -> dict[str, Any]:
        """The stock optimizer's, after synchronize(): either loads the other's."""
        self.synchronize()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """A stock optimizer's or a CrossBarrier's, after synchronize()."""
        self.synchronize()
        super().load_state_dict(state_dict)
        # The inner class brings states of older versions up to date.
        self._inner.__setstate__({"state": self.state, "param_groups": self.param_groups})

    def close(self) -> None:
        """synchronize(), and takes the hooks off model and parameters; they are torch's alone again. After an error
        of communication some buckets are stepped and others are not: load a checkpoint."""
        try:
            self.synchronize()
            self._drop_sent()
        finally:
            self._owed.clear()
            self._sent = False
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            self._gradients.close()
