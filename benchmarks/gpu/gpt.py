"""A language model of GPT-2's shape for the rows that train: random weights, random tokens."""

from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import nn


@dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int  # tokens


SHAPES = {
    "gpt2": Shape(12, 768, 12, 50257, 1024),  # 124 million parameters
    "small": Shape(6, 384, 6, 50257, 512),
    "tiny": Shape(2, 32, 2, 97, 16),
}


class Block(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.heads = shape.heads
        self.before_attention, self.before_mlp = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.qkv, self.out = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * shape.width, shape.width),
        )

    def forward(self, x):
        batch, tokens, width = x.shape
        parts = self.qkv(self.before_attention(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp(self.before_mlp(x))


class Gpt(nn.Module):
    """Called with tokens [batch, context + 1]; gives the loss of predicting each from those before it."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.last = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.tokens.weight  # tied, as GPT-2's
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens):
        given, wanted = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(given) + self.places(torch.arange(given.shape[1], device=given.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.last(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())


def make(name: str) -> Gpt:
    """The same weights on every rank and in every call."""
    torch.manual_seed(0)
    return Gpt(SHAPES[name])


def batch_of(name: str, count: int, rank: int, step: int):
    shape = SHAPES[name]
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(shape.vocabulary, (count, shape.context + 1), generator=generator)
