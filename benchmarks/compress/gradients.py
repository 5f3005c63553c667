"""What tensors of training become under the lossless codec, in bits per value.

Trains small models on the CPU, in fp32, under autocast to bf16 and in bf16, with one and with two micro-batches a step.
Then it gives to `exact_bench` (of the build) what four ranks would send: gradients, their sum, weights and Adam's
states, each laid end to end as in a bucket of DDP.

    cmake --build --preset release --target exact_bench
    benchmarks/compress/gradients.py --bench build/release/benchmarks/exact_bench --write

Writes benchmarks/results/exact.md. A minute or two on two cores.
"""

import argparse
import collections
import os
import pathlib
import subprocess
import tempfile

import torch
from torch import nn
from torch.nn import functional

RESULTS = pathlib.Path(__file__).resolve().parent.parent / "results" / "exact.md"
RANKS = 4
PRECISIONS = ("fp32", "autocast", "bf16")
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class Gpt(nn.Module):
    """Learns that a token follows from the two before it."""

    def __init__(self, vocabulary=2000, width=192, depth=3):
        super().__init__()
        self.vocabulary = vocabulary
        self.embedding = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.randn(64, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def loss(self, seed):
        random = torch.Generator().manual_seed(seed)
        tokens = torch.randint(self.vocabulary, (8, 65), generator=random)
        for i in range(2, 65):
            tokens[:, i] = (3 * tokens[:, i - 1] + tokens[:, i - 2]) % 97 + tokens[:, i] % 3
        x = self.embedding(tokens[:, :-1]) + self.places
        mask = nn.Transformer.generate_square_subsequent_mask(64, dtype=x.dtype)
        x = self.head(self.layers(x, mask=mask, is_causal=True))
        return functional.cross_entropy(x.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Cnn(nn.Module):
    """Says which of ten patterns lies behind an image's noise."""

    def __init__(self, width=32):
        super().__init__()
        layers, last = [], 3
        for i, channels in enumerate((width, 2 * width, 4 * width, 8 * width)):
            layers += [
                nn.Conv2d(last, channels, 3, padding=1, stride=1 + (i > 0), bias=False),
                nn.BatchNorm2d(channels),
            ]
            layers += [nn.ReLU(), nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)]
            layers += [nn.ReLU()]
            last = channels
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, 10))

    def loss(self, seed):
        random = torch.Generator().manual_seed(seed)
        kind = torch.randint(10, (16,), generator=random)
        patterns = torch.randn(10, 3, 32, 32, generator=torch.Generator().manual_seed(1))
        images = patterns[kind] + torch.randn(16, 3, 32, 32, generator=random)
        return functional.cross_entropy(self.layers(images.to(self.layers[0].weight.dtype)).float(), kind)


class Lstm(nn.Module):
    """Adds what it has been told to add."""

    def __init__(self, width=256):
        super().__init__()
        self.cells = nn.LSTM(16, width, 2, batch_first=True)
        self.head = nn.Linear(width, 1)

    def loss(self, seed):
        random = torch.Generator().manual_seed(seed)
        x = torch.rand(16, 32, 16, generator=random)
        goal = (x[..., 0] * (x[..., 1] > 0.8)).sum(1)
        out, _ = self.cells(x.to(self.head.weight.dtype))
        return functional.mse_loss(self.head(out[:, -1]).float().squeeze(1), goal)


class Recommender(nn.Module):
    """Embeddings of users and things, of which a batch uses few, and layers above."""

    def __init__(self, users=8000, things=4000, width=64):
        super().__init__()
        self.users, self.things = nn.Embedding(users, width), nn.Embedding(things, width)
        sizes = (2 * width, 256, 128, 1)
        layers = []
        for a, b in zip(sizes, sizes[1:], strict=False):
            layers += [nn.Linear(a, b), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def loss(self, seed):
        random = torch.Generator().manual_seed(seed)
        user = (torch.rand(1024, generator=random) ** 2 * self.users.num_embeddings).long()
        thing = (torch.rand(1024, generator=random) ** 3 * self.things.num_embeddings).long()
        likes = ((user * 7 + thing * 13) % 5 < 2).float()
        x = torch.cat([self.users(user), self.things(thing)], 1)
        return functional.binary_cross_entropy_with_logits(self.layers(x).float().squeeze(1), likes)


class Experts(nn.Module):
    """Each token goes through the best two of eight experts."""

    def __init__(self, vocabulary=1000, width=128, experts=8):
        super().__init__()
        self.vocabulary = vocabulary
        self.embedding = nn.Embedding(vocabulary, width)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(experts)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def loss(self, seed):
        random = torch.Generator().manual_seed(seed)
        tokens = torch.randint(self.vocabulary, (256,), generator=random)
        x = self.norm(self.embedding(tokens))
        weights, chosen = self.router(x).softmax(1).topk(2, 1)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            row, which = (chosen == i).nonzero(as_tuple=True)
            out = out.index_add(0, row, (expert(x[row]) * weights[row, which, None]).to(out.dtype))
        return functional.cross_entropy(self.head(x + out).float(), (tokens * 17 + 3) % self.vocabulary)


class Graph(nn.Module):
    """Two layers of mean aggregation over a random graph."""

    def __init__(self, features=300, width=256):
        super().__init__()
        self.first, self.second = nn.Linear(2 * features, width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 7)

    def loss(self, seed):
        random = torch.Generator().manual_seed(seed)
        x = (torch.rand(400, 300, generator=random) < 0.03).to(self.head.weight.dtype)
        edges = (torch.rand(400, 400, generator=random) < 0.02).to(x.dtype)
        edges = edges / edges.sum(1, keepdim=True).clamp(min=1)
        kind = x[:, :70].reshape(400, 7, 10).sum(2).argmax(1)
        for layer in (self.first, self.second):
            x = layer(torch.cat([x, edges.to(x.dtype) @ x], 1)).relu()
        return functional.cross_entropy(self.head(x).float(), kind)


MODELS = {"gpt": Gpt, "cnn": Cnn, "lstm": Lstm, "recommender": Recommender, "experts": Experts, "graph": Graph}


def gradients(model, precision, micro_batches, seed):
    """Of one step of one rank."""
    model.zero_grad()
    for i in range(micro_batches):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            loss = model.loss(seed + 1000003 * i) / micro_batches
        loss.backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def end_to_end(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def tensors_of(name, precision, micro_batches, steps):
    """What ranks send, by kind."""
    torch.manual_seed(0)
    model = MODELS[name]()
    if precision == "bf16":
        model = model.bfloat16()
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(steps):
        ranks = [
            gradients(model, precision, micro_batches, RANKS * step + rank)
            for rank in range(RANKS if step + 1 == steps else 1)
        ]
        for p, *grads in zip(model.parameters(), *ranks, strict=True):
            p.grad = sum(grad.float() for grad in grads).div(len(ranks)).to(p.dtype)
        adam.step()
    sums = [sum(grad.float() for grad in grads).to(grads[0].dtype) for grads in zip(*ranks, strict=True)]
    states = [adam.state[p] for p in model.parameters()]
    return {
        "gradients": end_to_end(ranks[0]),
        "sum of 4": end_to_end(sums),
        "weights": end_to_end(model.parameters()),
        "Adam's mean": end_to_end(state["exp_avg"] for state in states),
        "Adam's square": end_to_end(state["exp_avg_sq"] for state in states),
    }


def bits_of(bench, path, dtype):
    out = subprocess.run([bench, dtype, path], check=True, capture_output=True, text=True).stdout
    return float(out.split()[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", required=True)
    parser.add_argument("--only", default=",".join(MODELS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--keep", help="a directory for the tensors")
    parser.add_argument("--write", action="store_true", help=f"the table to {RESULTS.name} of benchmarks/results")
    options = parser.parse_args()
    directory = options.keep or tempfile.mkdtemp()
    os.makedirs(directory, exist_ok=True)
    rows = collections.defaultdict(lambda: collections.defaultdict(dict))
    for name in options.only.split(","):
        for precision in PRECISIONS:
            for micro_batches in (1, 2):
                for kind, tensor in tensors_of(name, precision, micro_batches, options.steps).items():
                    path = os.path.join(directory, f"{name}-{precision}-{micro_batches}-{kind.replace(' ', '_')}")
                    tensor.view(torch.uint8).numpy().tofile(path)
                    bits = bits_of(options.bench, path, NAMES[tensor.dtype])
                    rows[name, precision][micro_batches][kind] = bits
                    if not options.keep:
                        os.unlink(path)
                print(name, precision, micro_batches, rows[name, precision][micro_batches], flush=True)
    kinds = list(next(iter(rows.values()))[1])
    lines = [
        "Bits per value under `exact`, of 32 in fp32 and under autocast, of 16 in bf16:",
        f"benchmarks/compress/gradients.py, step {options.steps} of Adam, chunks of 256 KiB, four ranks.",
        "Two values: with one and with two micro-batches, if they differ.",
        "",
        "| model | precision | " + " | ".join(kinds) + " |",
        "|---|---|" + "---|" * len(kinds),
    ]
    for (name, precision), cases in rows.items():
        cells = [dict.fromkeys(f"{cases[micro_batches][kind]:.1f}" for micro_batches in (1, 2)) for kind in kinds]
        lines.append(f"| {name} | {precision} | " + " | ".join(map(", ".join, cells)) + " |")
    print("\n".join(lines))
    if options.write:
        RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
