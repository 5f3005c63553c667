"""LocalSteps: ranks train on their own and exchange what they have learnt every H steps (local SGD, DiLoCo).

Each rank's contribution is its pseudo-gradient: the weights of the last exchange less its own. Each part of it has an
owner: a rank, or a dedicated server. The owner averages the contributions and steps with the momentum of its part,
which nobody else has (csrc/hybridps/outer). Each rank subtracts the result from the weights of the last exchange. So
every rank keeps these weights, and nothing else.

Sources: local SGD, Stich 2019 (arXiv 1805.09767); DiLoCo, Douillard et al. 2023 (arXiv 2311.08105); its fragments, the delayed
merge and the mixing in it: Streaming DiLoCo, Douillard et al. 2025 (arXiv 2501.18512); asynchronous: _rounds.py.

Threads: the caller's; with `staleness` also those of _rounds.py.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from hybridps.backend.groups import backend_of, group_beside
from hybridps.training.agreement import agree, broadcast_tensors, here
from hybridps.training.rounds import Rounds

_VERSION = 1
# (name of the step in the engine, rate, momentum)
_OUTER = {"nesterov": ("nesterov", 0.7, 0.9), "sgd": ("momentum", 1.0, 0.0)}


def cut(sizes: Sequence[int], parts: int) -> list[range]:
    """Indices of `sizes` in `parts` ranges that follow each other, none empty, as equal in size as whole entries allow."""
    total, ranges, first, done = sum(sizes), [], 0, 0
    for part in range(parts):
        end = first + 1
        done += sizes[first]
        last = len(sizes) - (parts - part - 1)  # one for each part behind
        while end < last and (part == parts - 1 or done + sizes[end] / 2 <= total * (part + 1) / parts):
            done += sizes[end]
            end += 1
        ranges.append(range(first, end))
        first = end
    return ranges


class _Fragment:
    """Some parameters, flat: `base`, their weights at the last exchange, and `wire`, what goes out and comes back."""

    def __init__(self, slot: int, parameters: list[nn.Parameter], due: int):
        self.slot, self.parameters, self.due = slot, parameters, due
        self.sizes = [p.numel() for p in parameters]
        self.base = torch.empty(sum(self.sizes), dtype=torch.float32)
        self.wire = torch.empty_like(self.base)
        self.work: Any = None
        self.sent_at = 0
        for parameter, view in zip(parameters, self.views(self.base), strict=True):
            view.copy_(parameter.detach())

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return [part.view(p.shape) for part, p in zip(flat.split(self.sizes), self.parameters, strict=True)]

    @torch.no_grad()
    def subtract_weights(self, out: torch.Tensor) -> None:
        """out = base - parameters."""
        for parameter, base, view in zip(self.parameters, self.views(self.base), self.views(out), strict=True):
            torch.sub(base, parameter.detach().to("cpu", torch.float32), out=view)

    @torch.no_grad()
    def give_weights(self, keep: float = 0.0) -> None:
        """parameters = base, or that and a part of themselves."""
        for parameter, base in zip(self.parameters, self.views(self.base), strict=True):
            if keep == 0.0:
                parameter.copy_(base)
            else:
                mixed = parameter.detach().to("cpu", torch.float32).mul_(keep).add_(base, alpha=1.0 - keep)
                parameter.copy_(mixed)


class LocalSteps:
    """In the place of DDP, for a model that each rank has whole, and around a stock optimizer:

        local = hybridps.LocalSteps(model, optimizer, every=16)
        for images, labels in loader:
            optimizer.zero_grad()
            criterion(model(images), labels).backward()
            local.step()                    # the optimizer's, and every 16th time an exchange
        local.synchronize()

    model: on this rank's device, not wrapped in DDP or FSDP. Its parameters and buffers become rank 0's; later buffers
        (BatchNorm's) are each rank's own, and so is the state of the inner optimizer. Parameters of fp32, bf16 and fp16.
    every: H, steps between two exchanges.
    outer: "nesterov" (outer_lr 0.7, outer_momentum 0.9, as DiLoCo) or "sgd" (1.0 and 0.0: averages the weights, local
        SGD). outer_lr may be assigned between steps, on all ranks alike. Not with staleness: ranks are at different
        steps.
    compress: a codec for what is exchanged, as in HYBRIDPS_COMPRESS: "int8", "int4:ef=1", ... (docs/compression.md).
    fragments: the parameters are cut into so many parts. The parts are exchanged at different steps, evenly over the H.
    delay: an exchange is merged so many steps after it began (below `every`). Training goes on meanwhile. keep: the
        part of its own weights that a rank keeps in the merge, 0 to 1. Streaming DiLoCo has 0.5.
    staleness: asynchronous. A round begins when `quorum` ranks (default: more than half) have done their H steps. The
        age of a contribution is the number of rounds that its rank has missed: at most `staleness`, else the others
        wait. It counts (1 + age) ** -age_power. patience: how long a round waits for ranks that are nearly ready, as a
        part of a round's time. schedule(round) -> ranks that take part, instead of quorum: then all bits are
        determined. Without fragments and delay. The next round must come within 30 minutes, or within the timeout of
        init_process_group if that is longer.
    process_group: the ranks that train together, of any backend; the world by default. Exchanges have their own group.

    A learning-rate scheduler belongs to the inner optimizer. With a GradScaler: scaler.step(optimizer),
    scaler.update(), then advance() in the place of step(), also if the scaler has skipped a step.

    Making one is a collective. If parameters or settings differ between ranks, all raise RanksDisagree. Exchanges are
    collectives: without staleness all ranks make the same number of steps. Errors of communication come out of step(),
    advance() or synchronize(). After an error, or if a rank's weights were not finite, it does not go on: make a new
    one and load a state.
    """

    def __init__(
        self,
        model: nn.Module,
        inner_optimizer: torch.optim.Optimizer,
        every: int,
        *,
        outer: str = "nesterov",
        outer_lr: float | None = None,
        outer_momentum: float | None = None,
        compress: str = "none",
        fragments: int = 1,
        delay: int = 0,
        keep: float = 0.0,
        staleness: int | None = None,
        quorum: int | None = None,
        age_power: float = 0.5,
        patience: float = 0.03,
        schedule: Callable[[int], Iterable[int]] | None = None,
        process_group: dist.ProcessGroup | None = None,
    ):
        self._parent, self._broken, self._rounds = process_group, "", None
        self._model, self.inner_optimizer = model, inner_optimizer
        if outer not in _OUTER:
            self._refuse(f"outer={outer!r}", f"one of {', '.join(map(repr, _OUTER))}", ValueError)
        self._step_name, default_lr, default_momentum = _OUTER[outer]
        self.every, self.outer, self.delay, self.keep = every, outer, delay, keep
        self.outer_lr = default_lr if outer_lr is None else outer_lr
        self.outer_momentum = default_momentum if outer_momentum is None else outer_momentum
        size = dist.get_world_size(process_group)
        quorum = size // 2 + 1 if quorum is None else quorum
        named = self._named(model)
        self._check_settings(len(named), fragments, staleness, quorum, schedule, size)
        agree(
            "LocalSteps: the parameters or settings differ",
            [f"{name!r} ({p.dtype}, shape {list(p.shape)})" for name, p in named]
            + [
                f"every={every}",
                f"outer={outer!r}, outer_lr={self.outer_lr}, outer_momentum={self.outer_momentum}",
                f"compress={compress!r}, fragments={fragments}, delay={delay}, keep={keep}",
                f"staleness={staleness}, quorum={quorum}, age_power={age_power}, scheduled: {schedule is not None}",
            ],
            "make it alike on all ranks",
            process_group,
        )
        broadcast_tensors((*model.parameters(), *model.buffers()), 0, process_group)
        self._group = group_beside(process_group, compress)
        self._backend = backend_of(self._group)
        self.compression: str = self._backend.compression()
        parameters = [parameter for _, parameter in named]
        self._fragments = [
            _Fragment(index + 1, [parameters[i] for i in chosen], (index + 1) * every // fragments % every)
            for index, chosen in enumerate(cut([p.numel() for p in parameters], fragments))
        ]
        self._known = set(parameters)
        self._steps = 0  # since the beginning, or the state that was loaded
        self._rounds_done = 0
        if staleness is not None:
            self._newest = self._fragments[0].base.clone()
            # A receive there waits for the next round.
            self._control = group_beside(process_group, "none", timedelta(minutes=30))
            self._rounds = Rounds(
                self._control, self._contribute, self._merge_round, staleness, quorum, age_power, patience, schedule
            )

    # ------------------------------------------------------------------------------------------------- what is refused

    def _refuse(self, what: str, advice: str, kind: type[Exception] = RuntimeError) -> NoReturn:
        raise kind(f"{here(self._parent)}: LocalSteps: {what}. What to do: {advice}")

    def _named(self, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        from torch.nn.parallel import DistributedDataParallel

        kind = type(model).__name__
        if isinstance(model, DistributedDataParallel) or kind in ("FullyShardedDataParallel", "FSDPModule"):
            self._refuse(f"the model is a {kind}, which reduces gradients at every step", "pass the module within", TypeError)
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        if not named:
            self._refuse("no parameter requires a gradient", "a model to be trained", ValueError)
        for name, parameter in named:
            if hasattr(parameter, "full_tensor"):
                self._refuse(f"parameter {name!r} is a DTensor", "a model that each rank has whole", TypeError)
            if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                self._refuse(
                    f"parameter {name!r} is of {parameter.dtype}, and exchanges are of float32",
                    "parameters of float32, bfloat16 or float16",
                    TypeError,
                )
        return named

    def _check_settings(self, count, fragments, staleness, quorum, schedule, size) -> None:
        def check(fine: bool, what: str, advice: str) -> None:
            if not fine:
                self._refuse(what, advice, ValueError)

        check(self.every >= 1, f"every={self.every}", "at least 1 step between exchanges")
        check(0.0 <= self.outer_momentum < 1.0, f"outer_momentum={self.outer_momentum}", "at least 0 and below 1")
        check(0 <= self.delay < self.every, f"delay={self.delay}", f"0 to {self.every - 1}: before the next exchange")
        check(0.0 <= self.keep < 1.0, f"keep={self.keep}", "at least 0 and below 1")
        most = min(self.every, count)
        check(1 <= fragments <= most, f"fragments={fragments}", f"1 to {most}: every={self.every}, {count} parameters")
        if staleness is None:
            check(schedule is None, "a schedule without staleness", "give staleness=, or no schedule")
            return
        check(staleness >= 0, f"staleness={staleness}", "at least 0")
        check(1 <= quorum <= size, f"quorum={quorum}", f"1 to {size}")
        check(fragments == 1 and self.delay == 0, "staleness with fragments or delay", "one of both ways to overlap")

    def _check(self) -> None:
        if self._broken:
            self._refuse(self._broken, "make a new LocalSteps, and load_state_dict() of the last state that was saved")

    # -------------------------------------------------------------------------------------------------------- training

    @property
    def rounds(self) -> int:
        """Exchanges that are over: of fragments, each counts."""
        return self._rounds_done if self._rounds is None else self._rounds.rounds

    @property
    def ages(self) -> list[list[int]]:
        """With staleness: of the last rounds, for each rank how many rounds older its weights were, -1 where it was absent."""
        return [] if self._rounds is None else list(self._rounds.ages)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of the inner optimizer, then advance()."""
        self._check()
        loss = self.inner_optimizer.step() if closure is None else self.inner_optimizer.step(closure)
        self.advance()
        return loss

    def advance(self) -> None:
        """Counts a step that the inner optimizer has made, and exchanges what is due."""
        self._check()
        self._steps += 1
        for fragment in self._fragments:
            if fragment.work is not None and self._steps - fragment.sent_at >= self.delay:
                self._merge(fragment)
        for fragment in self._fragments:
            if self._steps % self.every != fragment.due:
                continue
            if self._rounds is not None:
                self._take_part(fragment)
                continue
            self._send(fragment)
            if self.delay == 0:
                self._merge(fragment)

    def synchronize(self) -> None:
        """Merges what is under way, whatever `delay` says; on all ranks after the same step. Not with staleness."""
        self._check()
        for fragment in self._fragments:
            if fragment.work is not None:
                self._merge(fragment)

    def _send(self, fragment: _Fragment) -> None:
        for parameter in self._model.parameters():
            if parameter.requires_grad and parameter not in self._known:
                self._refuse(
                    f"a parameter of shape {list(parameter.shape)} requires a gradient now, but did not when this "
                    "LocalSteps was made: the ranks would train it separately",
                    "make a new LocalSteps after unfreezing parameters",
                )
        fragment.subtract_weights(fragment.wire)
        fragment.work = self._outer(fragment, self._step_name)
        fragment.sent_at = self._steps

    def _outer(self, fragment: _Fragment, what: str) -> Any:
        return self._backend.outer_step(fragment.wire, what, fragment.slot, self.outer_lr, self.outer_momentum)

    def _merge(self, fragment: _Fragment) -> None:
        work, fragment.work = fragment.work, None
        self._wait(work, fragment.wire)
        fragment.base.sub_(fragment.wire)
        fragment.give_weights(self.keep)
        self._rounds_done += 1

    def _wait(self, work: Any, wire: torch.Tensor) -> None:
        try:
            work.wait()
        except BaseException as error:
            self._broken = f"an exchange has failed ({error}), and some owners may have made their step"
            raise
        if not torch.isfinite(wire).all():
            self._broken = "an exchange had values that are not finite, in a rank's weights or in their compressed form"
            self._check()

    # ---------------------------------------------------------------------------------------------------- asynchronous

    def _take_part(self, fragment: _Fragment) -> None:
        # Its place is free: a round that takes it in gives new weights.
        fragment.subtract_weights(fragment.base)
        try:
            assert self._rounds is not None
            self._rounds.take_part()
        except BaseException as error:
            self._broken = self._broken or str(error)
            raise
        fragment.give_weights()

    def _contribute(self, scale: float | None) -> None:
        fragment = self._fragments[0]
        if scale is None:
            fragment.wire.zero_()
        else:
            torch.mul(fragment.base, scale, out=fragment.wire)
        self._wait(self._outer(fragment, self._step_name), fragment.wire)

    def _merge_round(self, took_part: bool) -> None:
        fragment = self._fragments[0]
        self._newest.sub_(fragment.wire)
        if took_part:
            fragment.base.copy_(self._newest)

    # --------------------------------------------------------------------------------------------- state, and the end

    def state_dict(self) -> dict[str, Any]:
        """The weights of the last exchange and the owners' momentum, whole, the same on every rank; a collective.

        "weights" and "momentum" are fp32, flat, in the order of the model's parameters that require gradients; they fit any number
        of ranks, owners, servers and fragments. What is under way is merged first. Of the ranks' own (their weights between
        two exchanges, the inner optimizer) it has nothing: save model and inner optimizer per rank, or at an exchange.
        With staleness all ranks have to come, each after any number of steps.
        """
        self._check()
        if self._rounds is not None:
            with self._rounds.meet():
                return self._state(self._newest)
        self.synchronize()
        return self._state(torch.cat([f.base for f in self._fragments]))

    def _state(self, weights: torch.Tensor) -> dict[str, Any]:
        momenta = []
        for fragment in self._fragments:
            fragment.wire.zero_()
            self._wait(self._outer(fragment, "read"), fragment.wire)
            momenta.append(fragment.wire.clone())
        return {
            "version": _VERSION,
            "outer": self.outer,
            "every": self.every,
            "steps": self._steps,
            "rounds": self.rounds,
            "weights": weights.clone(),
            "momentum": torch.cat(momenta),
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Goes on from rank 0's state_dict(); other ranks may give None. A collective.

        Every rank's weights become those of the last exchange. If you saved the ranks' own weights, load them into the
        model after this. ValueError, on all ranks: the state does not fit this model, or is no such state.
        """
        self._check()
        if self._rounds is not None:
            with self._rounds.meet():
                self._load(state)
        else:
            self.synchronize()
            self._load(state)

    def _load(self, state: dict[str, Any] | None) -> None:
        elements = sum(f.base.numel() for f in self._fragments)
        told: list[Any] = [None]
        if dist.get_rank(self._group) == 0:
            told = [self._unfit(state, elements) or [state["steps"], state["rounds"]]]  # type: ignore[index]
        dist.broadcast_object_list(told, group=self._group, group_src=0)
        if isinstance(told[0], str):
            self._refuse(told[0], "a state of state_dict() of the same model", ValueError)
        steps, rounds = told[0]
        first = 0
        for fragment in self._fragments:
            part = slice(first, first + fragment.base.numel())
            fragment.wire.zero_()
            if dist.get_rank(self._group) == 0:
                assert state is not None
                fragment.base.copy_(state["weights"][part])
                fragment.wire.copy_(state["momentum"][part])
            broadcast_tensors([fragment.base], 0, self._group)
            self._wait(self._outer(fragment, "load"), fragment.wire)
            fragment.give_weights()
            first = part.stop
        if self._rounds is not None:
            self._newest.copy_(self._fragments[0].base)
            # Each begins anew: what it did before is gone.
            self._steps = 0
            self._rounds.go_on_from(rounds)
        else:
            self._steps, self._rounds_done = steps, rounds

    def _unfit(self, state: Any, elements: int) -> str:
        if not isinstance(state, dict) or state.get("version") != _VERSION:
            return "load_state_dict: this is not a state of LocalSteps.state_dict()"
        if missing := sorted({"outer", "steps", "rounds", "weights", "momentum"} - state.keys()):
            return f"load_state_dict: the state lacks {', '.join(missing)}"
        if state["outer"] != self.outer:
            return f"load_state_dict: the state is of outer={state['outer']!r}, this is outer={self.outer!r}"
        for name in ("weights", "momentum"):
            if state[name].numel() != elements:
                return f"load_state_dict: {name} of {state[name].numel()} elements for parameters of {elements}"
        return ""

    def close(self) -> None:
        """Merges what is under way, and leaves the group; on all ranks. The owners' momentum is gone then.

        With staleness it returns when all ranks have called it, and all have the weights of the last round.
        """
        if self._group is None:
            return
        try:
            if not self._broken:
                self.synchronize()
            if self._rounds is not None and not self._broken:
                self._rounds.end()
                self._fragments[0].base.copy_(self._newest)
                self._fragments[0].give_weights()
        finally:
            group, self._group = self._group, None
            self._broken = self._broken or "it was closed"
            if self._rounds is not None:
                dist.destroy_process_group(self._control)
            dist.destroy_process_group(group)
