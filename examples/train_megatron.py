"""Megatron-core: a feed-forward block cut over the ranks (tensor parallel) under a process group of hybridps.

    torchrun --nproc-per-node 2 examples/train_megatron.py
    hybridps run --as gloo --leave-side-groups -- torchrun --nproc-per-node 2 examples/train_megatron.py --backend gloo

The first names the backend; the second is for programs that cannot (its own command line knows nccl and gloo): the world
is hybridps all the same, while groups for which Megatron itself asks for gloo stay torch's. Without a GPU a few of its calls
for CUDA are turned into nothing.
"""

import argparse
import contextlib

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import random
from megatron.core.transformer.transformer_config import TransformerConfig


class NoRandomState:
    """In place of the states of CUDA's generators; there is no dropout here."""

    def fork(self, *_):
        return contextlib.nullcontext()


def without_cuda() -> None:
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self
    random._CUDA_RNG_STATE_TRACKER, random._CUDA_RNG_STATE_TRACKER_INITIALIZED = NoRandomState(), True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="hybridps")
    parser.add_argument("--steps", type=int, default=30)
    arguments = parser.parse_args()

    dist.init_process_group(arguments.backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    if not torch.cuda.is_available():
        without_cuda()
    config = TransformerConfig(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=world,
        tensor_model_parallel_size=world,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    torch.manual_seed(0)
    options = {"config": config, "init_method": torch.nn.init.xavier_normal_, "bias": True}
    up = tensor_parallel.ColumnParallelLinear(32, 64, gather_output=False, **options)
    down = tensor_parallel.RowParallelLinear(64, 32, input_is_parallel=True, skip_bias_add=False, **options)
    optimizer = torch.optim.Adam([*up.parameters(), *down.parameters()], lr=0.01)

    data = torch.Generator().manual_seed(1)  # tensor parallel ranks work on the same data
    for step in range(arguments.steps):
        x = torch.randn(64, 32, generator=data)
        y, _ = down(torch.tanh(up(x)[0]))  # an all-reduce forward, one backward
        loss = torch.nn.functional.mse_loss(y, x.flip(1) / 4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step % 10 == 0 or step == arguments.steps - 1):
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
