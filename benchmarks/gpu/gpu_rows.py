"""The table: what is measured on the GPUs of one machine, in which processes, and the target of each row.

A target was set before any of this ran; it claims nothing.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab"))

from rows import KIB, MIB, Bar, at_least, at_most  # noqa: E402

CPU_BYTES_MAX, CPU_ITERATIONS_MAX, CPU_ROUNDS_MAX = 256 * KIB, 3, 100


@dataclass(frozen=True)
class Row:
    name: str
    job: dict
    bars: tuple[Bar, ...] = ()
    nodes: int = 2  # emulated over loopback
    ranks: int = 1  # on each; they have GPUs of their own, those of other nodes the same ones again
    peer: str = "gloo"
    tags: tuple[str, ...] = ()
    device: str = "cuda"

    @property
    def gpus(self) -> int:
        return self.ranks

    @property
    def place(self) -> str:
        if self.ranks * self.nodes == 1:
            return "one rank"
        if self.nodes == 1:
            return f"one node, {self.ranks} {'GPUs' if self.device == 'cuda' else 'ranks'}"
        return f"{self.nodes} nodes{' on one GPU' if self.device == 'cuda' else ''}"

    def on_cpu(self) -> "Row":
        """The same code on CPU tensors, small, beside gloo: it proves the program and measures nothing."""
        job = dict(self.job)
        for key, most in (("bytes", CPU_BYTES_MAX), ("iterations", CPU_ITERATIONS_MAX), ("rounds", CPU_ROUNDS_MAX)):
            if key in job:
                job[key] = min(job[key], most)
        if "model" in job:
            job |= {"model": "tiny", "batch": 2, "dtype": "float32"}
        return replace(self, job=job, bars=(), peer="gloo", device="cpu")


def allreduce(size: int, iterations: int) -> dict:
    return {"do": "allreduce", "bytes": size, "iterations": iterations}


ROWS = (
    # G1: by way of pinned host memory, each process a node of its own.
    *(
        Row(
            f"allreduce-p{nodes}-{name}",
            allreduce(size, iterations),
            (at_least("of_limit", 0.8), at_least("ratio", 3)) if size == 64 * MIB else (),
            nodes=nodes,
            tags=("allreduce", f"p{nodes}"),
        )
        for nodes in (2, 4)
        for name, size, iterations in (
            ("4K", 4 * KIB, 200),
            ("64K", 64 * KIB, 200),
            ("1M", MIB, 100),
            ("16M", 16 * MIB, 30),
            ("64M", 64 * MIB, 20),
        )
    ),
    # G3: what the call costs the thread that makes it.
    *(
        Row(
            f"enqueue-{name}",
            {"do": "enqueue", "bytes": size, "iterations": 200},
            (at_most("p50_us", 30), at_most("syncs", 0)),
            tags=("enqueue",),
        )
        for name, size in (("64K", 64 * KIB), ("64M", 64 * MIB))
    ),
    Row(
        "enqueue-one-rank-64K",
        {"do": "enqueue", "bytes": 64 * KIB, "iterations": 200},
        nodes=1,
        peer="nccl",
        tags=("enqueue",),
    ),
    # G4, G5: training.
    Row(
        "ddp-gpt2",
        {"do": "ddp", "model": "gpt2", "batch": 4, "dtype": "bfloat16", "iterations": 20},
        (at_least("hidden", 0.85), at_least("ratio", 1.5)),
        tags=("training",),
    ),
    *(
        Row(
            f"fsdp2-gpt2-p{nodes}",
            {"do": "fsdp2", "model": "gpt2", "batch": 4, "dtype": "float32", "iterations": 10},
            (at_least("ratio", 2), at_most("apart", 1e-5)),
            nodes=nodes,
            tags=("training",),
        )
        for nodes in (2, 4)
    ),
    # G8: one node, beside the NCCL that hybridps itself uses there.
    *(
        Row(
            f"one-node-{name}",
            allreduce(size, iterations),
            (at_most("overhead_us", 10),),
            nodes=1,
            ranks=2,
            peer="nccl",
            tags=("one-node",),
        )
        for name, size, iterations in (("64B", 64, 400), ("64K", 64 * KIB, 400), ("16M", 16 * MIB, 50))
    ),
    Row(
        "memory",
        {"do": "memory", "bytes": 25 * MIB, "rounds": 10_000},
        (at_most("pinned_to_bucket", 2), at_most("grown_mib", 16)),
        tags=("memory",),
    ),
)
