"""One rank of benchmarks/convergence: worker.py '{"codecs": [...], "seeds": 3, ...}'. Stock DDP, one group per codec; all else is
the same. Rank 0 prints a line with the curves."""

import contextlib
import json
import math
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

MARK = "RESULT "


class Digits:
    """scikit-learn's handwritten digits, 1797 of 8 x 8, and two layers of 128."""

    score = "accuracy, %"

    def __init__(self):
        from sklearn.datasets import load_digits

        data = load_digits()
        x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(7))
        x, y = x[order], y[order]
        self.train, self.test = (x[:1400], y[:1400]), (x[1400:], y[1400:])
        self.steps, self.batch = 300, 64

    def model(self):
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.3)

    def loss(self, model, generator):
        chosen = torch.randint(len(self.train[0]), (self.batch,), generator=generator)
        return nn.functional.cross_entropy(model(self.train[0][chosen]), self.train[1][chosen])

    def judge(self, model):
        with torch.no_grad():
            out = model(self.test[0])
        right = (out.argmax(1) == self.test[1]).float().mean().item() * 100
        return right, nn.functional.cross_entropy(out, self.test[1]).item()


class Text:
    """Characters of modules that Python ships, and a GPT of two layers of 64 with 4 heads and a window of 64."""

    score = "characters right, %"
    window, width = 64, 64

    def __init__(self):
        import argparse
        import inspect
        import statistics
        import textwrap
        import typing

        text = "".join(inspect.getsource(module) for module in (argparse, textwrap, statistics, typing))
        letters = sorted(set(text))
        index = {letter: i for i, letter in enumerate(letters)}
        data = torch.tensor([index[letter] for letter in text])
        cut = int(len(data) * 0.9)
        self.letters, self.train, self.test = len(letters), data[:cut], data[cut:]
        self.steps, self.batch = 250, 12

    def model(self):
        return GPT(self.letters, self.width, self.window)

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=3e-3)

    def rows(self, data, starts):
        return torch.stack([data[s : s + self.window + 1] for s in starts.tolist()])

    def loss(self, model, generator):
        starts = torch.randint(len(self.train) - self.window - 1, (self.batch,), generator=generator)
        rows = self.rows(self.train, starts)
        return nn.functional.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    def judge(self, model):
        rows = self.rows(self.test, torch.arange(0, len(self.test) - self.window - 1, self.window)[:128])
        with torch.no_grad():
            out = model(rows[:, :-1])
        right = (out.argmax(-1) == rows[:, 1:]).float().mean().item() * 100
        return right, nn.functional.cross_entropy(out.flatten(0, 1), rows[:, 1:].flatten()).item()


class Images:
    """Made pictures of 3 x 32 x 32 in 10 classes, and a ResNet-18 in the form for such (He et al., 2016), a quarter as wide.

    A picture is its class's smooth pattern in noise; one label in ten is another class's. Who sees the class through the noise has a
    cross entropy of -0.9 ln 0.9 - 0.1 ln(0.1 / 9) = 0.545, and nobody has less.
    """

    score = "accuracy, %"
    wrong_labels = 0.1
    width = 16

    def __init__(self):
        generator = torch.Generator().manual_seed(11)
        coarse = torch.randn(10, 3, 8, 8, generator=generator)
        self.patterns = nn.functional.interpolate(coarse, size=(32, 32), mode="bilinear")
        self.steps, self.batch = 120, 16
        self.test = self.draw(1000, generator)

    def draw(self, count, generator):
        of = torch.randint(10, (count,), generator=generator)
        pictures = self.patterns[of] + 1.5 * torch.randn(count, 3, 32, 32, generator=generator)
        wrong = torch.rand(count, generator=generator) < self.wrong_labels
        other = (of + torch.randint(1, 10, (count,), generator=generator)) % 10
        return pictures, torch.where(wrong, other, of)

    def model(self):
        return ResNet18(self.width)

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)

    def loss(self, model, generator):
        pictures, labels = self.draw(self.batch, generator)
        return nn.functional.cross_entropy(model(pictures), labels)

    def judge(self, model):
        model.eval()
        with torch.no_grad():
            out = model(self.test[0])
        right = (out.argmax(1) == self.test[1]).float().mean().item() * 100
        return right, nn.functional.cross_entropy(out, self.test[1]).item()


class Block(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)])
        self.around = nn.Sequential()
        if stride != 1 or inside != outside:
            self.around = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x):
        inner = self.norms[0](self.first(x)).relu()
        return (self.norms[1](self.second(inner)) + self.around(x)).relu()


class ResNet18(nn.Module):
    def __init__(self, width, classes=10):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        blocks, inside = [], width
        for stage in range(4):
            for index in range(2):
                outside = width << stage
                blocks.append(Block(inside, outside, 2 if stage > 0 and index == 0 else 1))
                inside = outside
        self.blocks = nn.Sequential(*blocks)
        self.out = nn.Linear(inside, classes)

    def forward(self, x):
        return self.out(self.blocks(self.stem(x)).mean((2, 3)))


class GPT(nn.Module):
    def __init__(self, letters, width, window):
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, width), nn.Embedding(window, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(width, letters)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        hidden = self.letter(x) + self.place(torch.arange(x.shape[1]))
        return self.out(self.layers(hidden, mask=mask, is_causal=True))


def always(codec):
    """Whether it pays in time is not asked here."""
    return codec if codec == "none" else codec + ("," if ":" in codec else ":") + "auto=0"


def train(task, group, seed, rank):
    torch.manual_seed(seed)
    bare = task.model()
    model = nn.parallel.DistributedDataParallel(bare, process_group=group)
    optimizer = task.optimizer(model)
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    curve = []
    for step in range(task.steps):
        optimizer.zero_grad()
        loss = task.loss(model, generator)
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            curve.append(float(mean) / dist.get_world_size())
    score, final = task.judge(bare)
    return {"curve": curve, "score": score, "loss": final if math.isfinite(final) else None}


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("hybridps")
    import hybridps
    from hybridps import _C

    rank = dist.get_rank()
    results = []
    for name, make in (("digits", Digits), ("text", Text), ("images", Images)):
        if name not in job["tasks"]:
            continue
        task = make()
        for codec in job["codecs"]:
            for seed in range(job["seeds"]):
                group = dist.new_group(pg_options=hybridps.Options(compress=always(codec)))
                before = _C.stats()
                found = train(task, group, seed, rank)
                grown = {key: _C.stats()[key] - before[key] for key in ("compress_bytes", "compress_wire_bytes")}
                results.append({"task": name, "codec": codec, "seed": seed, "score_is": task.score} | found | grown)
                dist.destroy_process_group(group)
    if rank == 0:
        print(MARK + json.dumps(results), flush=True)
    with contextlib.suppress(Exception):
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
