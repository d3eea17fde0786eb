"""An optimizer that holds some of its tensors for a while, so that a step updates those alone.

Every optimizer of ``torch.optim`` that is taken on parts (``optimizer.needs_whole_parameters``) updates a tensor from that
tensor's gradient and states, so the bits are those of one call for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from shardledger.runtime.optimizer import Piece

Held = list[list[torch.Tensor]]
"""Tensors of each param group, in the order of the groups."""


class Narrowing:
    """Narrows one optimizer. Which tensor is of which group does not change while an engine lives."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._group_of = {id(p): number for number, g in enumerate(optimizer.param_groups) for p in g["params"]}

    def held(self, pieces: Sequence[Piece]) -> Held:
        """What the optimizer is to hold for ``pieces``, of which some may be in no group."""
        held: Held = [[] for _ in self._optimizer.param_groups]
        for piece in pieces:
            number = self._group_of.get(id(piece.values))
            if number is not None:
                held[number].append(piece.values)
        return held

    @contextmanager
    def to(self, held: Held) -> Iterator[None]:
        """Inside, the optimizer holds ``held`` alone, and no group that is empty."""
        groups = self._optimizer.param_groups
        whole = [group["params"] for group in groups]
        try:
            for group, params in zip(groups, held, strict=True):
                group["params"] = params
            self._optimizer.param_groups = [group for group in groups if group["params"]]
            yield
        finally:
            self._optimizer.param_groups = groups
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params
