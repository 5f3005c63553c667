"""Compression of gradients between nodes: a DDP hook for groups of its own, and what to save in a checkpoint.

Most programs need nothing of this: `HYBRIDPS_COMPRESS=int8`, or `pg_options` of a group, compresses what stock DDP and
FSDP reduce in their backward passes (docs/compression.md).
"""

from typing import Any

import torch
import torch.distributed as dist

from hybridps.backend.groups import backend_of, group_beside
from hybridps.backend.load import load_extension

__all__ = ["HookState", "backend_of", "ddp_hook", "load_state_dict", "ratio", "state_dict", "stats"]

_VERSION = 1
# core::DType on the wire, of what can be compressed.
_DTYPES = {5: torch.float16, 6: torch.bfloat16, 7: torch.float32}


def ratio(codec: str, dtype: torch.dtype = torch.float32) -> float:
    """What part of their bytes sums of `dtype` are between nodes, of large ones: 34 / 128 for "int8" and float32. One bit's may be
    up to 66 / 34 of it in sums with zeros. 1.0: not compressed. ValueError: there is no such codec, or parameter."""
    return load_extension().compression_ratio(codec, str(dtype).removeprefix("torch."))


class HookState:
    """State of `ddp_hook`: a group of its own over the ranks of `process_group`, which compresses with `codec`.

    Collective: all ranks of `process_group` make it in the same order. `codec` as in HYBRIDPS_COMPRESS, e.g. "int8" or
    "int4:ef=1"; ValueError says what there is.
    """

    def __init__(self, codec: str = "int8", process_group: dist.ProcessGroup | None = None) -> None:
        self.group = group_beside(process_group, codec)
        self.codec: str = backend_of(self.group).compression()

    def __repr__(self) -> str:
        return f"HookState({self.codec!r})"


def ddp_hook(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """`ddp.register_comm_hook(hybridps.compress.HookState("int8"), hybridps.compress.ddp_hook)`: the mean of the bucket's
    gradients, by the codec of the state's group, whatever HYBRIDPS_COMPRESS says."""
    work = dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, group=state.group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def state_dict(group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """What error feedback and momentum remember on this rank, for a checkpoint: each rank saves its own.

    Call it between two steps, when no operation of the group is under way. Tensors of the result are copies, one float32
    per element of what was reduced: "residual" of this node's contributions, "owed" of the sums that this rank owns.
    """
    backend = backend_of(group)

    def tensor(data: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.float32) if data else torch.empty(0)

    tensors = [
        {
            "ordinal": ordinal,
            "numel": nbytes // _DTYPES[dtype].itemsize,
            "dtype": _DTYPES[dtype],
            "residual": tensor(residual),
            "owed": tensor(owed),
            "momentum": tensor(momentum),
        }
        for ordinal, nbytes, dtype, residual, owed, momentum in backend.compression_state()
    ]
    return {
        "version": _VERSION,
        "codec": backend.compression(),
        "rank": dist.get_rank(group),
        "world_size": dist.get_world_size(group),
        "steps": backend.compression_steps(),
        "tensors": tensors,
    }


def load_state_dict(state: dict[str, Any], group: dist.ProcessGroup | None = None) -> None:
    """The reverse of `state_dict()`, before the first backward pass: each tensor has what was saved for the one at its place in
    the step, of its size and type, once it is first reduced. What is of another model is never asked for (`stats()`).

    ValueError: it is of another codec, rank or world size, or not such a state.
    """
    backend = backend_of(group)
    if not isinstance(state, dict) or state.get("version") != _VERSION:
        raise ValueError("hybridps.compress.load_state_dict: this is not a state of hybridps.compress.state_dict()")
    here = {
        "codec": backend.compression(),
        "rank": dist.get_rank(group),
        "world_size": dist.get_world_size(group),
    }
    for name, value in here.items():
        if state[name] != value:
            raise ValueError(
                f"hybridps.compress.load_state_dict: the state is of {name} {state[name]!r}, this group has {value!r}: "
                "a state is of one rank and one codec. What to do: go on without it, or with the earlier settings"
            )
    numbers = {dtype: number for number, dtype in _DTYPES.items()}

    def check(entry: dict[str, Any]) -> None:
        # All of them are of the same elements: the tensor's, or of a CUDA tensor this rank's part.
        counts = {entry[name].numel() for name in ("residual", "owed", "momentum")} - {0}
        if len(counts) > 1 or max(counts, default=0) > entry["numel"]:
            raise ValueError(
                f"hybridps.compress.load_state_dict: {' and '.join(map(str, sorted(counts)))} values for a tensor of "
                f"{entry['numel']} elements, number {entry['ordinal']} of a step: the state is damaged"
            )

    def data(tensor: torch.Tensor) -> bytes:
        return tensor.detach().to("cpu", torch.float32).contiguous().numpy().tobytes()

    for entry in state["tensors"]:
        check(entry)
    backend.load_compression_state(
        [
            (
                entry["ordinal"],
                entry["numel"] * entry["dtype"].itemsize,
                numbers[entry["dtype"]],
                data(entry["residual"]),
                data(entry["owed"]),
                data(entry["momentum"]),
            )
            for entry in state["tensors"]
        ],
        state["steps"],
    )


def stats(group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """What compression has done.

    Of the process: operations, bytes before and after, blocks that were not finite, seconds in codecs.

    Of the group: its codec, its steps, and the error feedback that this rank keeps. That is the norm (computing it
    reads all of the memory), the number of tensors and their bytes. A contribution, a sum and a momentum count as one
    tensor each. Also: how many tensors were dropped, and how many had no memory and go without feedback.
    "refused_by_servers": sums for which dedicated servers have no memory; the same on all ranks. "unclaimed": tensors
    of a loaded state that no operation has asked for yet; they belong to another model.

    "packed": what the process sent between nodes in fewer bytes without loss (`exact`): bytes before and after, chunks
    that would not have shrunk, and seconds. "unpack_seconds" includes the sums that are made in the same pass.

    "classes": for each size of sums, whether they are compressed, and how that was decided.
        "forced": auto=0, or nothing is compressed
        "undecided": too few steps yet, or no such sums
        "codec_share": the codec takes so little of a sum's time that the network is the limit
        "trial": both ways were measured
    Also the seconds of a step's sums of that size: the least of all ranks, because a slower rank only waited."""
    backend = backend_of(group)
    now = load_extension().stats()
    return {
        "codec": backend.compression(),
        "steps": backend.compression_steps(),
        "operations": now.get("compress_operations", 0),
        "bytes": now.get("compress_bytes", 0),
        "wire_bytes": now.get("compress_wire_bytes", 0),
        "blocks_not_finite": now.get("compress_not_finite", 0),
        "encode_seconds": now.get("compress_encode_ns", 0) * 1e-9,
        "decode_seconds": now.get("compress_decode_ns", 0) * 1e-9,
        "packed": {
            "bytes": now.get("packed_bytes", 0),
            "wire_bytes": now.get("packed_wire_bytes", 0),
            "chunks_refused": now.get("pack_refused", 0),
            "pack_seconds": now.get("pack_ns", 0) * 1e-9,
            "unpack_seconds": now.get("unpack_ns", 0) * 1e-9,
        },
    } | backend.compression_summary()
