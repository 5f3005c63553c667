"""What a step must do: the inputs of each member, the results, and who fails.

Pure functions of a step and of the group's members (world ranks) and nodes; nothing here communicates.
"""

import enum

import reference
import torch


class Fate(enum.Enum):
    SUCCEED = 1
    FAIL = 2  # with an error that says why
    EITHER = 3  # a right result, or that error


class Group:
    """A group as the model sees it."""

    def __init__(self, number, members, program):
        self.number = number
        self.members = list(members)
        self.size = len(self.members)
        node_of = [program.node_of[member] for member in self.members]
        order = sorted(set(node_of), key=node_of.index)
        self.node_of = [order.index(node) for node in node_of]


def dtype_of(step):
    return getattr(torch, step.dtype)


# ------------------------------------------------------------------------------------------------- who fails


def needs(step, group, me):
    """The members without whose part `me` cannot be done. What it merely sends may be on its way without anybody."""
    everyone = set(range(group.size)) - {me}
    kind, sizes = step.kind, step.sizes
    if kind == "barrier":
        return everyone
    if kind == "all_reduce":
        return everyone if sizes[0] else set()
    if kind == "reduce":
        return everyone if sizes[0] and me == step.root else set()
    if kind in ("broadcast", "scatter"):
        return {step.root} - {me} if sizes[0] else set()
    if kind == "gather":
        return everyone if sizes[0] and me == step.root else set()
    if kind == "all_gather":
        return {member for member in everyone if sizes[member]}
    if kind == "reduce_scatter":
        return everyone if sizes[me] else set()
    if kind == "all_to_all":
        return {member for member in everyone if sizes[member][me]}
    if kind == "coalesced":
        return everyone if any(sizes) else set()
    raise AssertionError(kind)


def witnesses(step, group):
    """Members that come in time and surely see the timeout, so that those in `late` may wait for their word."""
    if not step.late or step.race:
        return set()
    late = set(step.late)
    return {member for member in range(group.size) if member not in late and needs(step, group, member) & late}


def fate(step, group, me):
    """Of a collective. A verdict reaches all: who comes after it fails too, who needs nobody may be done before."""
    if not step.late:
        return Fate.SUCCEED
    seen_by = witnesses(step, group)
    if me in seen_by or (me in step.late and seen_by):
        return Fate.FAIL
    return Fate.EITHER


# ------------------------------------------------------------------------------------------------ inputs, results


def _salt(step):
    return step.number % 7


def inputs(step, group, me):
    """What member `me` hands in, one tensor after the other."""
    dtype, rank, salt, sizes = dtype_of(step), group.members[me], _salt(step), step.sizes
    if step.kind in ("all_reduce", "reduce", "coalesced"):
        if step.kind == "coalesced" and step.form == "all_gather":
            return [reference.pattern(dtype, size, rank, salt) for size in sizes]
        factor = group.size if step.kind == "coalesced" and step.form == "reduce_scatter" else 1
        kind = reference.kind_for(dtype, step.op)
        return [reference.values(dtype, size * factor, rank, kind, salt) for size in sizes]
    if step.kind == "reduce_scatter":
        whole = reference.values(dtype, sum(sizes), rank, reference.kind_for(dtype, step.op), salt)
        return list(torch.split(whole, list(sizes)))
    if step.kind in ("broadcast", "gather"):
        return [reference.pattern(dtype, sizes[0], rank, salt)]
    if step.kind == "all_gather":
        return [reference.pattern(dtype, sizes[me], rank, salt)]
    if step.kind == "scatter":
        if me != step.root:
            return []
        return [reference.pattern(dtype, sizes[0], rank, salt + 10 * peer) for peer in range(group.size)]
    if step.kind == "all_to_all":
        return [reference.pattern(dtype, sizes[me][peer], rank, salt + 10 * peer) for peer in range(group.size)]
    if step.kind == "barrier":
        return []
    raise AssertionError(step.kind)


def _reduced(step, group, position):
    return reference.reduced(
        [inputs(step, group, member)[position] for member in range(group.size)], group.node_of, step.op
    )


def results(step, group, me):
    """What member `me` must hold afterwards; empty where the call promises nothing."""
    everyone = range(group.size)
    if step.kind == "all_reduce":
        return [_reduced(step, group, 0)]
    if step.kind == "reduce":
        return [_reduced(step, group, 0)] if me == step.root else []
    if step.kind == "coalesced":
        if step.form == "all_gather":
            every = [inputs(step, group, member) for member in everyone]
            return [torch.cat([mine[i] for mine in every]) for i in range(len(step.sizes))]
        whole = [_reduced(step, group, position) for position in range(len(step.sizes))]
        if step.form == "reduce_scatter":
            return [tensor[me * size :][:size] for tensor, size in zip(whole, step.sizes, strict=True)]
        return whole
    if step.kind == "reduce_scatter":
        return [_reduced(step, group, me)]
    if step.kind == "broadcast":
        return inputs(step, group, step.root)
    if step.kind == "all_gather":
        return [inputs(step, group, member)[0] for member in everyone]
    if step.kind == "gather":
        return [inputs(step, group, member)[0] for member in everyone] if me == step.root else []
    if step.kind == "scatter":
        return [inputs(step, group, step.root)[me]]
    if step.kind == "all_to_all":
        return [inputs(step, group, member)[me] for member in everyone]
    return []


def is_sum(step):
    """Compared as sums: bit for bit, but for NaN payloads, and with a tolerance on gloo."""
    return step.kind in ("all_reduce", "reduce", "reduce_scatter") or (
        step.kind == "coalesced" and step.form != "all_gather"
    )


def message(step, group, size, turn=0):
    """What a step's sender, or whoever `turn` says, sends."""
    return reference.pattern(dtype_of(step), size, group.members[step.root], _salt(step) + 10 * turn)


def numbers(step, group, member, position=0):
    """Small whole floats, whose sums are exact: for steps that are about something else than arithmetic."""
    return float(group.members[member] + step.number % 50 + position % 50)
