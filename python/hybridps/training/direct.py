"""push_pull and its relatives: the names that BytePS's and Horovod's PyTorch front ends have, on torch's process group.

Nothing here is needed with DistributedDataParallel. All of it goes through torch.distributed's world group, whatever
its backend is; docs/from-byteps.md says what replaces which call and setting, and what has gone.

Order: operations are matched by the order of calls, not by their names, so all ranks make the same calls in the same
order. Names let that be checked: they are compared when a new one is used or declared, and every 64 calls.

Threads: calls from one thread at a time. Errors: those of torch.distributed for what fails on the way; RanksDisagree (a
RuntimeError) on all ranks where they name different things.
"""

import collections
import contextlib
import enum
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from hybridps.backend.groups import backend_of
from hybridps.training.agreement import agree, broadcast_tensors, here
from hybridps.training.gradients import BUCKET_BYTES, GradientBuckets
from hybridps.training.priority import prioritized

COMPARE_EVERY = 64  # calls


class Compression(enum.Enum):
    """In which type floats of 32 and 64 bits cross the network: a cast. The engine's codecs (HYBRIDPS_COMPRESS,
    docs/compression.md) are a setting of the group, and apply besides.

    fp16 overflows above 65504: a sum of gradients that a GradScaler has scaled can. bf16 has the range of fp32.
    """

    none = None
    fp16 = torch.float16
    bf16 = torch.bfloat16

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.value if self.value is not None and dtype in (torch.float32, torch.float64) else dtype

    @classmethod
    def check(cls, given: "Compression") -> "Compression":
        if not isinstance(given, cls):
            raise TypeError(
                f"compression must be one of hybridps.Compression.{', '.join(cls.__members__)}, not {given!r}. "
                "For a compressor of your own, use DDP with register_comm_hook()"
            )
        return given


# -------------------------------------------------------------------------------------------------------- process group

_made_by_init: "weakref.ref[Any] | None" = None


def init(backend: str = "hybridps", **options: Any) -> None:
    """Joins the world, as torchrun's environment describes it; nothing is done where a process group is there already.

    options: those of torch.distributed.init_process_group, such as timeout=datetime.timedelta(seconds=60). Blocks until
    all ranks have called. With init_process_group in the program neither init() nor shutdown() is needed.
    """
    global _made_by_init
    if dist.is_initialized():
        return
    if not {"init_method", "store", "rank"} & options.keys() and "RANK" not in os.environ:
        raise RuntimeError(
            "hybridps.init(): RANK is not set, so this program does not know its rank. What to do: start it with "
            "torchrun --nproc-per-node N program.py (in the place of bpslaunch or horovodrun), or pass rank=, "
            "world_size= and init_method="
        )
    dist.init_process_group(backend, **options)
    _made_by_init = weakref.ref(dist.group.WORLD)


def shutdown() -> None:
    """Leaves the world that init() has joined; a process group that the program made itself stays."""
    global _made_by_init
    made, _made_by_init = _made_by_init, None
    if made is not None and dist.is_initialized() and made() is dist.group.WORLD:
        dist.destroy_process_group()


def rank() -> int:
    """This process's number in the world, from 0."""
    return dist.get_rank()


def size() -> int:
    """How many processes the world has."""
    return dist.get_world_size()


def _from_launcher(function: str, variable: str) -> int:
    try:
        return int(os.environ[variable])
    except (KeyError, ValueError):
        raise RuntimeError(
            f"hybridps.{function}(): {variable} is {os.environ.get(variable, 'not set')}; torchrun sets it. What to "
            f"do: start the program with torchrun, or set {variable}: hybridps cannot know which GPU is for which rank"
        ) from None


def local_rank() -> int:
    """This process's number on its machine, as its launcher counts: LOCAL_RANK."""
    return _from_launcher("local_rank", "LOCAL_RANK")


def local_size() -> int:
    """How many processes its launcher started on this machine: LOCAL_WORLD_SIZE."""
    return _from_launcher("local_size", "LOCAL_WORLD_SIZE")


# ------------------------------------------------------------------------------------------------------------ push_pull


class _Names:
    """What this rank has declared and called since the ranks last compared it, in order."""

    def __init__(self, life: str) -> None:
        self.life = life
        self.known: set[str] = set()
        self.declared = 0  # since the last comparison
        self.calls = 0  # ever
        self.entries: list[str] = []

    def declare(self, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"{here()}: the name of a tensor must be a string that is not empty, not {name!r}")
        if name not in self.known:
            self.known.add(name)
            self.declared += 1
            self.entries.append(f"declare {name!r}")

    def call(self, name: str | None, version: int) -> None:
        """Before an operation is issued; at times a collective."""
        if name is not None:
            self.declare(name)
        self.calls += 1
        self.entries.append("push_pull without a name" if name is None else f"push_pull {name!r} (version {version})")
        if self.declared or self.calls % COMPARE_EVERY == 0:
            try:
                agree(
                    f"the names of call {self.calls} and those before it differ",
                    self.entries,
                    "declare and push_pull the same names in one order on all ranks; tensors are matched by that order",
                )
            except RuntimeError as error:
                _note(error, f"This rank was comparing names before its {self.described(name)}")
                raise
            self.declared = 0
            self.entries.clear()

    def described(self, name: str | None) -> str:
        return f"call {self.calls}, push_pull {'without a name' if name is None else repr(name)}"


_names: "weakref.WeakKeyDictionary[dist.ProcessGroup, _Names]" = weakref.WeakKeyDictionary()


def _names_of_world() -> _Names:
    """Of this life of the world group: a new one starts with no names, as those who come by reconfigure() have none."""
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("hybridps: there is no process group. What to do: call hybridps.init() first")
    try:
        life = backend_of(world).incarnation()
    except ValueError:  # another backend
        life = ""
    names = _names.get(world)
    if names is None or names.life != life:
        names = _names[world] = _Names(life)
    return names


def _note(error: BaseException, text: str) -> None:
    if hasattr(error, "add_note"):  # Python 3.11
        error.add_note(text)


class Handle:
    """A push_pull under way, for poll() and synchronize(). Keeps its tensors until it is dropped."""

    __slots__ = ("_described", "_output", "_work", "_wire")

    def __init__(self, work: dist.Work, wire: torch.Tensor, output: torch.Tensor, described: str):
        self._work, self._wire, self._output, self._described = work, wire, output, described


def declare(name: str) -> None:
    """Reserves a place in the order of names, without communication: the next push_pull compares it.

    All ranks declare the same names in the same order. What is not declared is so by its first push_pull.
    """
    _names_of_world().declare(name)


@torch.no_grad()
def _start(
    tensor: torch.Tensor,
    output: torch.Tensor | None,
    average: bool,
    name: str | None,
    version: int,
    compression: Compression,
    priority: int = 0,
) -> Handle:
    if tensor.layout != torch.strided:
        raise TypeError(
            f"{here()}: push_pull takes dense tensors. What to do: torch.distributed.all_reduce sums sparse ones"
        )
    names = _names_of_world()
    wire_dtype = compression.wire_dtype(tensor.dtype)
    names.call(name, version)
    source = tensor.detach()
    if output is not None and wire_dtype == tensor.dtype and source.is_contiguous():
        wire = source
    else:
        wire = source.to(wire_dtype, memory_format=torch.contiguous_format, copy=True)
        output = wire if output is None and wire_dtype == tensor.dtype else output
    with prioritized(None, priority or None):
        work = dist.all_reduce(wire, dist.ReduceOp.AVG if average else dist.ReduceOp.SUM, async_op=True)
    return Handle(work, wire, torch.empty_like(source) if output is None else output.detach(), names.described(name))


def poll(handle: Handle) -> bool:
    """Whether synchronize() would return at once; also true when the operation has failed. Does not block."""
    return handle._work.is_completed()


@torch.no_grad()
def synchronize(handle: Handle) -> torch.Tensor:
    """Waits, and returns the result: the caller's tensor where the call was in place, a new one else.

    Raises what torch.distributed raises where the operation failed. May be called again, and gives the same tensor. For
    CUDA tensors it makes the current stream wait, not the host.
    """
    try:
        handle._work.wait()
    except RuntimeError as error:
        _note(error, f"hybridps.synchronize: this was the rank's {handle._described}")
        raise
    if handle._wire is not handle._output:
        if handle._wire.data_ptr() != handle._output.data_ptr():
            handle._output.copy_(handle._wire)
        handle._wire = handle._output
    return handle._output


def push_pull_async(
    tensor: torch.Tensor, average: bool = True, name: str | None = None, version: int = 0, priority: int = 0
) -> Handle:
    """Begins to sum `tensor` over all ranks, divided by their number if `average`; the result is a new tensor.

    tensor: dense, of any type that the backend reduces, the same shape and type on all ranks. hybridps truncates
        averages of integers, gloo refuses them. It may be changed as soon as this returns.
    name: compared with the other ranks' names (see the module's text). Errors name it.
    version: a number that is compared with the name, as in BytePS.
    priority: on hybridps, chunks of the higher priority go first (hybridps.priority); cut to -128 to 127. 0: as the
        group says. The order of calls must still be the same on all ranks.
    """
    return _start(tensor, None, average, name, version, Compression.none, priority)


def push_pull_async_inplace(
    tensor: torch.Tensor, average: bool = True, name: str | None = None, version: int = 0, priority: int = 0
) -> Handle:
    """push_pull_async, but the result replaces what `tensor` held; it must be left alone until synchronize()."""
    return _start(tensor, tensor, average, name, version, Compression.none, priority)


def push_pull_inplace(
    tensor: torch.Tensor, average: bool = True, name: str | None = None, version: int = 0, priority: int = 0
) -> torch.Tensor:
    """As push_pull, but the result replaces what `tensor` held. Returns `tensor`, without autograd."""
    synchronize(push_pull_async_inplace(tensor, average, name, version, priority))
    return tensor


class _PushPull(torch.autograd.Function):
    """Each rank's input reaches every rank's output alike, so the gradient of the sum is the sum of the gradients."""

    @staticmethod
    def forward(context: Any, tensor, average, name, version, priority, compression):  # type: ignore[override]
        context.average, context.version, context.compression = average, version, compression
        context.name, context.priority = None if name is None else f"{name}.gradient", priority
        return synchronize(_start(tensor, None, average, name, version, compression, priority))

    @staticmethod
    def backward(context: Any, gradient):  # type: ignore[override]
        result = push_pull(
            gradient, context.average, context.name, context.version, context.priority, context.compression
        )
        return result, None, None, None, None, None


def push_pull(
    tensor: torch.Tensor,
    average: bool = True,
    name: str | None = None,
    version: int = 0,
    priority: int = 0,
    compression: Compression = Compression.none,
) -> torch.Tensor:
    """The sum of `tensor` over all ranks, divided by their number if `average`: a new tensor, on every rank the same.

    Blocks. Autograd goes through it: the gradient of the result is push_pulled as well, under `name` + ".gradient".
    Arguments as for push_pull_async; `compression` is a cast for the way.
    """
    return _PushPull.apply(tensor, average, name, version, priority, Compression.check(compression))


# ------------------------------------------------------------------------------------------------------------ broadcast


def broadcast_parameters(
    params: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | Iterable[torch.Tensor], root_rank: int = 0
) -> None:
    """Gives all ranks the root's values, in place.

    params: a model's state_dict(), its named_parameters() or parameters(); the same on all ranks, which is compared
    (RanksDisagree). Blocks until this rank has them all.
    """
    listed = list(params.items() if isinstance(params, Mapping) else params)
    named = [entry if isinstance(entry, tuple) else (f"{index}", entry) for index, entry in enumerate(listed)]
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{here()}: broadcast_parameters: {name!r} is a {type(tensor).__name__}, not a tensor. "
                "What to do: leave it out, and give it to broadcast_object"
            )
    agree(
        "broadcast_parameters: the parameters differ",
        [f"{name!r} ({tensor.dtype}, shape {list(tensor.shape)})" for name, tensor in named],
        "call it with the same model on all ranks",
    )
    broadcast_tensors((tensor for _, tensor in named), root_rank)


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None) -> Any:
    """The root's object, on every rank: what pickle can carry, from ranks that you trust. `obj` counts on the root
    only.

    name: as Horovod has it; only said where the ranks' differ.
    """
    if name is not None:
        agree(
            "broadcast_object: the names differ",
            [repr(name)],
            "broadcast the same objects in the same order on all ranks",
        )
    carried = [obj]
    dist.broadcast_object_list(carried, src=root_rank)
    return obj if dist.get_rank() == root_rank else carried[0]


class _Placeholder:
    """Of a tensor in a state that travels without its tensors."""

    def __init__(self, tensor: torch.Tensor):
        self.shape, self.dtype, self.device_type = tensor.shape, tensor.dtype, tensor.device.type


def _mapped(value: Any, kind: type, change: Any) -> Any:
    """A copy of nested dicts, lists and tuples with everything of that type changed."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {key: _mapped(part, kind, change) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_mapped(part, kind, change) for part in value)
    return value


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """Gives all ranks the root's optimizer state: momenta and the like, and the settings of the parameter groups.

    The others' optimizers need no state yet, as after a restart where only the root has read a checkpoint. Groups of
    the same sizes on all ranks, which is compared (RanksDisagree).
    """
    agree(
        "broadcast_optimizer_state: the parameter groups differ",
        [f"{type(optimizer).__name__}", *(f"a group of {len(group['params'])}" for group in optimizer.param_groups)],
        "make the same optimizer on all ranks",
    )
    is_root = dist.get_rank() == root_rank
    tensors: list[torch.Tensor] = []

    def out(tensor: torch.Tensor) -> "_Placeholder | torch.Tensor":
        # Adam's step lies on the CPU, also beside CUDA parameters, where the backend may take no CPU tensors.
        if tensor.device.type == "cpu" and tensor.dim() == 0:
            return tensor
        tensors.append(tensor)
        return _Placeholder(tensor)

    def back(place: _Placeholder) -> torch.Tensor:
        # The root's kind of device, of which this rank uses the current one.
        tensors.append(torch.empty(place.shape, dtype=place.dtype, device=place.device_type))
        return tensors[-1]

    state = _mapped(optimizer.state_dict(), torch.Tensor, out) if is_root else None
    state = broadcast_object(state, root_rank)
    if not is_root:
        tensors.clear()
        state = _mapped(state, _Placeholder, back)
    broadcast_tensors(tensors, root_rank)
    if not is_root:
        optimizer.load_state_dict(state)


# ------------------------------------------------------------------------------------------------- DistributedOptimizer


class _Averager:
    """Makes the gradients of an optimizer's parameters the mean over the ranks when a backward ends."""

    def __init__(self, named, compression: Compression, passes: int, group, bucket_bytes: int):
        self.passes_done = 0  # since the last averaging
        self.set_passes(passes)
        self.gradients = GradientBuckets(
            "DistributedOptimizer", named, self.arrived, self.ended, group, bucket_bytes, compression.value
        )
        self.average = True  # at the next step(), unless a backward has done it
        self.skipping = False
        self.hooks: list[Any] = []

    def follow(self, before: "_Averager") -> None:
        """Averages for the optimizer of `before` from now on."""
        for hook in before.hooks:
            hook.remove()
        before.gradients.close()
        self.gradients.touched |= {parameter for parameter in before.gradients.touched if parameter in self.gradients}

    def set_passes(self, passes: int) -> None:
        if passes < 1:
            raise ValueError(f"backward_passes_per_step is {passes}; it must be 1 or more")
        if self.passes_done:
            raise RuntimeError(
                f"{here()}: DistributedOptimizer: backward_passes_per_step cannot change while {self.passes_done} "
                "passes are waiting for their step. What to do: change it right after step()"
            )
        self.passes = passes

    def arrived(self, parameter: torch.Tensor) -> None:
        if self.passes_done + 1 >= self.passes:
            self.gradients.fill(parameter)

    def ended(self) -> None:
        self.passes_done += 1
        if self.passes_done >= self.passes:
            self.reduce()

    @torch.no_grad()
    def reduce(self) -> None:
        self.gradients.launch_rest()
        for index in self.gradients.order:
            bucket = self.gradients.buckets[index]
            for parameter, view, used in zip(bucket.parameters, bucket.views, bucket.wait(), strict=True):
                if used and parameter.grad is not None:
                    parameter.grad.copy_(view)
                elif used:
                    parameter.grad = view.to(parameter.dtype, copy=True)
        self.gradients.restart()
        self.passes_done, self.average = 0, False

    def dropped(self) -> bool:
        """Whether the gradients of the last averaging are gone: zero_grad() after a step that was skipped. Another rank
        may have had a backward since."""
        return all(parameter.grad is None for bucket in self.gradients.buckets for parameter in bucket.parameters)

    def synchronize(self) -> None:
        if self.passes_done or self.average or self.dropped():
            self.reduce()

    def before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if self.gradients.closed:
            raise RuntimeError(
                f"{here(self.gradients.group)}: another DistributedOptimizer was made over the same parameters, so "
                "this one no longer averages anything. What to do: step only the last one, or give each its own "
                "parameters"
            )
        self.gradients.check_step(optimizer.param_groups)
        closure = kwargs.get("closure") or (args[1] if len(args) > 1 else None)
        if closure is None:
            self.average_for_step()
        if not callable(closure) or isinstance(closure, _Averaged):  # ours: step() of a subclass calls its base's
            return None
        averaged = _Averaged(self, optimizer, closure)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": averaged}
        return (args[0], averaged, *args[2:]), kwargs

    def average_for_step(self) -> None:
        if not self.skipping:
            self.synchronize()

    def after_step(self, *_: Any) -> None:  # and not before it: a step() may call that of a base class, hooks and all
        self.average = True

    @contextlib.contextmanager
    def skip(self) -> Iterator[None]:
        self.skipping = True
        try:
            yield
        finally:
            self.skipping = False


class _Averaged:
    """A closure for step(), after which gradients are the mean, if its backward has not made them so."""

    def __init__(self, averager: _Averager, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]):
        self.averager, self.optimizer, self.closure = averager, optimizer, closure

    def __call__(self) -> Any:
        loss = self.closure()
        self.averager.gradients.check_step(self.optimizer.param_groups)
        self.averager.average_for_step()
        return loss


def DistributedOptimizer(  # noqa: N802, as those who come from BytePS and Horovod know it
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: Compression = Compression.none,
    backward_passes_per_step: int = 1,
    *,
    process_group: dist.ProcessGroup | None = None,
    bucket_bytes: int = BUCKET_BYTES,
) -> torch.optim.Optimizer:
    """Makes `optimizer` step with the mean of all ranks' gradients, and returns it: the same object.

    Gradients go out in buckets while backward() computes. When backward() returns, they are the mean over the ranks,
    with DDP's arithmetic. So clipping, GradScaler, schedulers, closures, state_dict and parameter groups are torch's
    own and work as ever. It does not broadcast: see broadcast_parameters and broadcast_optimizer_state.

    named_parameters: the model's, for errors and the ranks' comparison of them; all of the optimizer's must be there.
    compression: in which type gradients travel.
    backward_passes_per_step: so many backwards add up in .grad, not divided by their number. The last one averages. An
        earlier step() averages what is there. With GradScaler or clipping call optimizer.synchronize() before it.
    process_group: the ranks to average over; the world by default. bucket_bytes: the least size of a bucket.

    The optimizer gets three methods: synchronize() averages what is not yet averaged. In the context skip_synchronize()
    step() does not average. set_backward_passes_per_step(n) changes the number.

    A parameter without a gradient counts as zeros if another rank has a gradient. If no rank has one, it keeps None.
    Two backwards before one step() are averaged twice, with the sum of both, as with DDP. Buffers (of BatchNorm, say)
    are each rank's own. Refused: sparse gradients, DTensors, LBFGS, parameters that were added or unfrozen later.

    Making one is a collective. If parameters differ between ranks, all raise RanksDisagree. Making another
    DistributedOptimizer over the same parameters takes them from this one. Making it again of the same optimizer begins
    anew, with what is trainable then.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"DistributedOptimizer takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TypeError(
            "DistributedOptimizer: LBFGS evaluates the closure as often as the loss asks for. Each rank has its own "
            "loss, so the ranks would not stay together. What to do: use another optimizer, or the stock LBFGS with a "
            "closure that averages the loss and the gradients (hybridps.push_pull)"
        )
    before = getattr(optimizer, "_averager", None)
    if hasattr(optimizer, "skip_synchronize") and not isinstance(before, _Averager):
        raise ValueError(
            "DistributedOptimizer: this optimizer is the DistributedOptimizer of another library. What to do: give "
            "this one an optimizer that no other library has wrapped"
        )
    compression = Compression.check(compression)
    # torch allows a parameter twice, with a warning.
    members = list(dict.fromkeys(parameter for group in optimizer.param_groups for parameter in group["params"]))
    if named_parameters is None:
        named = [(f"parameter {index}", parameter) for index, parameter in enumerate(members)]
    else:
        given = list(named_parameters)
        if any(not isinstance(entry, tuple) or len(entry) != 2 for entry in given):
            raise ValueError(
                "DistributedOptimizer: named_parameters are pairs (name, parameter): model.named_parameters()"
            )
        counts = collections.Counter(name for name, _ in given)
        if repeated := sorted(name for name, count in counts.items() if count > 1):
            raise ValueError(f"DistributedOptimizer: named_parameters has these names twice: {', '.join(repeated)}")
        wanted, named = set(members), []
        for name, parameter in given:
            if parameter in wanted:
                wanted.remove(parameter)
                named.append((name, parameter))
        if wanted:
            shapes = ", ".join(str(list(parameter.shape)) for parameter in members if parameter in wanted)
            raise ValueError(
                f"DistributedOptimizer: named_parameters lacks {len(wanted)} of the optimizer's parameters, of shape "
                f"{shapes}. What to do: pass the parameters of every model that the optimizer steps, or pass none"
            )
    averager = _Averager(named, compression, backward_passes_per_step, process_group, bucket_bytes)
    if before is not None:
        averager.follow(before)
    averager.hooks = [
        optimizer.register_step_pre_hook(averager.before_step),
        optimizer.register_step_post_hook(averager.after_step),
    ]
    # Attributes of the object, so that its class stays torch's, and with it pickle, schedulers and whoever asks for the
    # type.
    optimizer._averager = averager  # type: ignore[attr-defined]
    optimizer.synchronize = averager.synchronize  # type: ignore[attr-defined]
    optimizer.skip_synchronize = averager.skip  # type: ignore[attr-defined]
    optimizer.set_backward_passes_per_step = averager.set_passes  # type: ignore[attr-defined]
    return optimizer
