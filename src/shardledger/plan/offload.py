"""Where roles rest, from what the user asked and what the model has."""

from __future__ import annotations

from shardledger.config import Config
from shardledger.errors import PlanError
from shardledger.plan.plan import Offload
from shardledger.plan.roles import Home
from shardledger.plan.spec import ModelSpec

TILE_NUMEL = 4 << 20
"""Most elements of a tile: 32 MiB of moments are enough for a disk's full speed."""

_HOMES = {"none": Home.DEVICE, "cpu": Home.HOST, "nvme": Home.DISK}


def build_offload(config: Config, model: ModelSpec) -> Offload:
    """Read the two sections. The configuration has been checked for contradictions.

    Raises:
        PlanError: parameters alone are to leave the device, and the model has none that could.
    """
    zero = config.zero_optimization
    of_optimizer, of_params = zero.offload_optimizer, zero.offload_param
    optimizer = Home.DEVICE if of_optimizer is None else _HOMES[of_optimizer.device]
    params = Home.DEVICE if of_params is None else _HOMES[of_params.device]
    if params is not Home.DEVICE and optimizer is Home.DEVICE and all(p.trainable for p in model.parameters):
        raise PlanError(
            "zero_optimization.offload_param without offload_optimizer moves frozen parameters alone (those of trained ones "
            "are cast from the masters, which stay where the optimizer is), and this model has none. Add "
            '"offload_optimizer": {"device": "cpu"}, or remove offload_param.'
        )
    limits = [TILE_NUMEL, zero.sub_group_size, of_params.buffer_size if of_params is not None else None]
    return Offload(
        optimizer=optimizer,
        params=params,
        ratio=1.0 if of_optimizer is None else of_optimizer.ratio,
        tile_numel=max(1, min(limit for limit in limits if limit is not None)),
        optimizer_path=of_optimizer.nvme_path if of_optimizer is not None and optimizer is Home.DISK else None,
        params_path=of_params.nvme_path if of_params is not None and params is Home.DISK else None,
        buffers=1 if of_optimizer is None else of_optimizer.buffer_count,
        param_buffers=1 if of_params is None else of_params.buffer_count,
        pinned=bool(of_optimizer and of_optimizer.pin_memory) or bool(of_params and of_params.pin_memory),
        read_ahead=of_optimizer is None or of_optimizer.pipeline_read,
        write_behind=of_optimizer is None or of_optimizer.pipeline_write,
    )
