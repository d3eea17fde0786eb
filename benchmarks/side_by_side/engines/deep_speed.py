"""DeepSpeed, stages 1 to 3, with the same fused optimizer as everyone."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from side_by_side.cases import ADAMW, Case, Contender


class DeepSpeedTrainer:
    """See ``Trainer``."""

    def __init__(self, model: nn.Module, contender: Contender, case: Case) -> None:
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": case.sequences,
            "gradient_clipping": 0.0,  # the default clips at 1.0
            "zero_optimization": {"stage": contender.stage},
            "zero_allow_untested_optimizer": True,
            "bf16": {"enabled": case.precision == "bf16"},
            "steps_per_print": 1_000_000,
        }
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
        self.engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.engine(tokens, targets)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def sent_bytes(self) -> int | None:
        return None

    def save(self, folder: str) -> None:
        self.engine.save_checkpoint(folder, "measured")

    def load(self, folder: str) -> None:
        path, _ = self.engine.load_checkpoint(folder, "measured")
        if path is None:
            raise RuntimeError(f"DeepSpeed found no checkpoint in {folder}")

    def close(self) -> None:
        self.engine.destroy()


TRAINER = DeepSpeedTrainer
