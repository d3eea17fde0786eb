"""``"stage": "auto"`` of ``train`` and ``check``: decided before initialize, where the batch is known."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from shardledger.cli.ranks import rank_of
from shardledger.cli.settings import RunSettings


def decided_config(settings: RunSettings, device: str) -> Any:
    """What initialize is given: the config as it is, or with the stage that the memory budget chooses; rank 0 says why.

    Raises:
        DoesNotFitError: no stage keeps the predicted peak under the budget.
    """
    from shardledger.config import load_config

    config = load_config(settings.config, world=settings.world)
    if not config.stage_is_open:
        return dict(settings.config)
    import torch

    from shardledger.budget import decide
    from shardledger.workload import load_model

    tokens = torch.zeros(config.train_micro_batch_size_per_gpu, settings.seq_len, dtype=torch.int64)
    make_model = partial(load_model, settings.model, settings.seq_len)
    config = decide(config, make_model, (tokens, tokens), world=settings.world, device=device)
    if rank_of(os.environ) in (None, 0):
        print(config.resolutions[-1], flush=True)
    return config
