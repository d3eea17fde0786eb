"""PyTorch's DistributedDataParallel, alone or with ZeroRedundancyOptimizer. bf16 is autocast over fp32 weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from side_by_side.cases import ADAMW, COMPILED, Case, Contender


class DDPTrainer:
    """See ``Trainer``. Rank 0 writes one file; with sharded states it collects them first."""

    def __init__(self, model: nn.Module, contender: Contender, case: Case) -> None:
        self.model = DistributedDataParallel(model.to(case.device), gradient_as_bucket_view=True)
        if contender.variant == COMPILED:
            self.model.compile()
        self.device = case.device
        self.autocast = case.precision == "bf16"
        self.optimizer: Any
        if contender.engine == "DDP":
            self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, **ADAMW)
        else:
            self.optimizer = ZeroRedundancyOptimizer(
                self.model.parameters(), optimizer_class=torch.optim.AdamW, fused=True, **ADAMW
            )

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.autocast):
            loss: Tensor = self.model(tokens, targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def sent_bytes(self) -> int | None:
        return None

    def save(self, folder: str) -> None:
        if isinstance(self.optimizer, ZeroRedundancyOptimizer):
            self.optimizer.consolidate_state_dict(to=0)
        if dist.get_rank() == 0:
            Path(folder).mkdir(parents=True, exist_ok=True)
            state = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}
            torch.save(state, Path(folder) / "state.pt")
        dist.barrier()

    def load(self, folder: str) -> None:
        state = torch.load(Path(folder) / "state.pt", weights_only=True)
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        dist.barrier()

    def close(self) -> None:
        return


TRAINER = DDPTrainer
