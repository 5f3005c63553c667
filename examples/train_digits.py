"""Trains a small convolutional network on scikit-learn's handwritten digits with DistributedDataParallel.

    torchrun --nproc-per-node 2 examples/train_digits.py --backend hybridps

An ordinary script: the backend is only a name, and nothing of hybridps is imported. With --checkpoint it goes on where
it was when a rank dies and torchrun starts all of them again:

    torchrun --nproc-per-node 2 --max-restarts 3 examples/train_digits.py --checkpoint digits.pt
"""

import argparse
import json
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def digits() -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    """The 1797 images of 8x8 pixels, every fifth of them held out."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16.0
    labels = torch.tensor(data.target)
    held_out = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~held_out], labels[~held_out]), images[held_out], labels[held_out]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.Tanh(),
        nn.Linear(128, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="hybridps")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32, help="per rank")
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--checkpoint", metavar="FILE", help="written after each epoch, and read at the start if it is there"
    )
    parser.add_argument("--json", metavar="FILE", help="rank 0 writes its results here")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    started = time.perf_counter()
    dist.init_process_group(backend=args.backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    init_seconds = time.perf_counter() - started

    train_set, test_images, test_labels = digits()
    sampler = DistributedSampler(train_set, seed=args.seed)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=sampler)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)
    criterion = nn.CrossEntropyLoss()

    losses, accuracies, steps = [], [], 0
    if args.checkpoint and os.path.exists(args.checkpoint):
        saved = torch.load(args.checkpoint)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        losses, accuracies, steps = saved["losses"], saved["accuracies"], saved["steps"]
        if rank == 0:
            print(f"goes on after epoch {len(losses)} of {args.checkpoint}", flush=True)
    dist.barrier()  # all have read it before anyone writes
    started = time.perf_counter()
    for epoch in range(len(losses), args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        totals = torch.zeros(2)  # sum of losses, number of images
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()
            totals += torch.tensor([loss.item() * len(labels), len(labels)])
            steps += 1
        scheduler.step()
        dist.all_reduce(totals)

        model.eval()
        with torch.no_grad():
            accuracy = (model.module(test_images).argmax(1) == test_labels).float().mean().item()
        losses.append((totals[0] / totals[1]).item())
        accuracies.append(accuracy)
        if rank == 0:
            if args.checkpoint:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                state |= {"scheduler": scheduler.state_dict(), "steps": steps}
                state |= {"losses": losses, "accuracies": accuracies}
                torch.save(state, args.checkpoint + ".part")
                os.replace(args.checkpoint + ".part", args.checkpoint)  # never half a file
            print(f"epoch {epoch + 1:2d}  loss {losses[-1]:.6f}  held-out accuracy {accuracy:.2%}", flush=True)
    seconds = time.perf_counter() - started

    if rank == 0:
        print(f"{args.backend}: {world} ranks, {steps} steps in {seconds:.2f} s", flush=True)
        if args.json:
            results = {
                "backend": args.backend,
                "world_size": world,
                "node_size": int(os.environ.get("LOCAL_WORLD_SIZE", world)),
                "losses": losses,
                "accuracies": accuracies,
                "steps": steps,
                "gradient_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
                "init_seconds": init_seconds,
                "train_seconds": seconds,
            }
            with open(args.json, "w") as file:
                json.dump(results, file, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
