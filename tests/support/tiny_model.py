"""The text of a module with a small model, for runs of the command line: they import what they train."""

_TEXT = """
import os, time
import torch.nn.functional as F
from torch import nn


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens, targets):
        if self.training:
            time.sleep(float(os.environ.get("NAP", "0")))
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
"""


def source(width: int) -> str:
    """``Tiny``: two layers of ``width`` units over bytes; NAP in the environment: seconds that a training step sleeps."""
    return _TEXT.replace("WIDTH", str(width))
