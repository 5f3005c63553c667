"""accelerate: on the CPU it knows gloo and mpi alone, and takes the process group that is there.

    torchrun --nproc-per-node 2 examples/train_accelerate.py

With CUDA the name can be given instead: Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="hybridps")]).
"""

import argparse

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="hybridps")
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()

    dist.init_process_group(arguments.backend)  # before Accelerator
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(1024, 32, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True) / 8), batch_size=32)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(arguments.epochs):
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        mean = accelerator.gather(loss.detach().reshape(1)).mean().item()
        if accelerator.is_main_process:
            print(f"epoch {epoch}: loss {mean:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
