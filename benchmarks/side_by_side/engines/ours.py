"""shardledger, stages 0 to 3."""

from __future__ import annotations

from torch import Tensor, nn

import shardledger as sl
from side_by_side.cases import ADAMW, COMPILED, Case, Contender

initialize = sl.initialize  # the package's names are lazy, and imports belong to the base line


class ShardledgerTrainer:
    """See ``Trainer``."""

    def __init__(self, model: nn.Module, contender: Contender, case: Case) -> None:
        config = {
            "train_micro_batch_size_per_gpu": case.sequences,
            "zero_optimization": {"stage": contender.stage},
            "optimizer": {"type": "AdamW", "params": {**ADAMW, "betas": list(ADAMW["betas"])}},
            "bf16": {"enabled": case.precision == "bf16"},
            "shardledger": {"compile": {}} if contender.variant == COMPILED else {},
        }
        self.engine = initialize(model=model, config=config, device=case.device)[0]

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.engine(tokens, targets)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def sent_bytes(self) -> int | None:
        return sum(kind["bytes"] for kind in self.engine.communication()["training"].values())

    def save(self, folder: str) -> None:
        self.engine.save_checkpoint(folder, "measured")

    def load(self, folder: str) -> None:
        self.engine.load_checkpoint(folder, "measured")

    def close(self) -> None:
        self.engine.destroy()


TRAINER = ShardledgerTrainer
