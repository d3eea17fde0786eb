"""PyTorch's fully_shard, one group per block and one for the rest."""

from __future__ import annotations

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from side_by_side.cases import ADAMW, Case, Contender


class FSDP2Trainer:
    """See ``Trainer``. Variant ``kept`` leaves blocks gathered between forward and backward."""

    def __init__(self, model: nn.Module, contender: Contender, case: Case) -> None:
        mesh = init_device_mesh(case.device, (torch.distributed.get_world_size(),))
        # bf16 reduces in bf16, FSDP2's default and fastest; masters and moments are fp32.
        policy = (
            MixedPrecisionPolicy(param_dtype=torch.bfloat16) if case.precision == "bf16" else MixedPrecisionPolicy()
        )
        again = contender.variant == "resharded"
        model = model.to(case.device)
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=again)
        self.model = fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=again)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, **ADAMW)

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss: Tensor = self.model(tokens, targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def sent_bytes(self) -> int | None:
        return None

    def save(self, folder: str) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)

    def load(self, folder: str) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)

    def close(self) -> None:
        return


TRAINER = FSDP2Trainer
