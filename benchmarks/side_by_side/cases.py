"""What is measured: models, worlds, precisions and engines. Plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SEED = 0
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
"""Written out for every engine, because their defaults differ."""

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"layers": 2, "heads": 2, "width": 32, "context": 128},
    "3.4m": {"layers": 4, "heads": 4, "width": 256, "context": 512},
    "25m": {"layers": 8, "heads": 8, "width": 512, "context": 1024},
    "124m": {"layers": 17, "heads": 12, "width": 768, "context": 1024},
    "1.3b": {"layers": 26, "heads": 16, "width": 2048, "context": 2048},
}
"""Fields of ``shardledger.workload.GPTConfig``; the name is the number of parameters."""


@dataclass(frozen=True)
class Contender:
    """One engine at one stage."""

    engine: str
    stage: int | None
    """ZeRO's number for what it shards; DDP shards nothing."""
    variant: str = ""

    @property
    def label(self) -> str:
        """Its name in tables."""
        parts = [self.engine, "" if self.engine == "DDP" else f"stage {self.stage}", self.variant]
        return " ".join(part for part in parts if part)


DDP = Contender("DDP", 0)
OURS = tuple(Contender("shardledger", stage) for stage in range(4))
PEERS = (
    DDP,
    Contender("DDP+ZeRO", 1),
    Contender("FSDP2", 3, "kept"),
    Contender("FSDP2", 3, "resharded"),
    *(Contender("DeepSpeed", stage) for stage in (1, 2, 3)),
)
ALL = (*OURS, *PEERS)
"""In the order in which they take turns."""
COMPILED = "compiled"
"""Variant of DDP and of ours: torch.compile with inductor, of the whole DDP module or of every unit."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One table: all engines on one model, number of ranks and precision."""

    model: str
    world: int
    precision: str
    steps: int
    """Timed steps of one turn."""
    alive: bool = True
    """Whether all engines stay in memory and take turns, or each starts anew for its turn because they do not fit."""
    sequences: int = 2
    """Rows of one rank's micro-batch."""
    length: int = 128
    """Tokens of a row."""
    device: str = "cpu"
    """``"cpu"`` (gloo) or ``"cuda"`` (NCCL)."""

    @property
    def title(self) -> str:
        """For headings."""
        ranks = "1 rank" if self.world == 1 else f"{self.world} ranks"
        return f"{self.model} parameters, {ranks}, {self.precision}"

    @property
    def tokens(self) -> int:
        """Tokens of one step over all ranks."""
        return self.sequences * self.length * self.world


def parameters(model: str) -> int:
    """Number of parameters of a shape: the bytes of its vocabulary are 256, its head is tied."""
    shape = SHAPES[model]
    width = shape["width"]
    block = 12 * width * width + 13 * width
    return shape["layers"] * block + (256 + shape["context"] + 2) * width


def largest_unit(model: str) -> int:
    """Parameters of the largest unit: a block, or tables and norm together."""
    width = SHAPES[model]["width"]
    block = 12 * width * width + 13 * width
    return max(block, parameters(model) - SHAPES[model]["layers"] * block)


def _both(model: str, world: int, steps: int, alive: bool = True) -> list[Case]:
    return [Case(model=model, world=world, precision=p, steps=steps, alive=alive) for p in ("fp32", "bf16")]


FULL = [*_both("3.4m", 2, 8), *_both("25m", 2, 3), *_both("25m", 4, 2, alive=False), *_both("124m", 2, 2, alive=False)]
QUICK = [
    Case(model="3.4m", world=2, precision="fp32", steps=5),
    Case(model="25m", world=2, precision="fp32", steps=1),
]
SMOKE = [Case(model="tiny", world=2, precision="fp32", steps=2)]
SETS = {"full": FULL, "quick": QUICK, "smoke": SMOKE}
