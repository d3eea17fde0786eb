"""The optimizer step where ranks hold parts of the masters and all of the weights: bucket after bucket of units.

The new weights of a bucket are on their way to the other ranks while the next one is updated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch.optim import optimizer as torch_optimizer

from shardledger.runtime.executor import Executor
from shardledger.runtime.narrowed import Narrowing
from shardledger.runtime.optimizer import Piece, point
from shardledger.runtime.parameters import FlatParameters
from shardledger.runtime.unit import Unit
from shardledger.transport import Work

BUCKET_NUMEL = 3 << 20
"""Elements of masters in a bucket, at least: a call of an optimizer costs 0.2 ms, an element of AdamW about 2 ns."""

MOST_BUCKETS = 8
"""More hide hardly more: what cannot overlap is one bucket's gather, an eighth of all."""

BY_ELEMENT = frozenset(
    {
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
"""Classes, themselves and no subclass, whose step over all tensors is the same as one step over each."""

SumOf = Callable[[FlatParameters], "torch.Tensor | None"]
"""Gives the scaled gradient of a flat."""


class BucketStep:
    """One optimizer step in several calls."""

    def __init__(self, units: Sequence[Unit], pieces: Sequence[Piece], optimizer: torch.optim.Optimizer) -> None:
        """``pieces``: everything that ``optimizer`` holds."""
        of: dict[int, list[Piece]] = {}
        for piece in pieces:
            of.setdefault(id(piece.flat), []).append(piece)
        self._optimizer = optimizer
        self._narrowing = Narrowing(optimizer)
        buckets: list[list[tuple[FlatParameters, str, list[Piece]]]] = [[]]
        trained = [flat.layout.shard_numel for unit in units for flat in unit.flats if flat.layout.trainable]
        least = max(BUCKET_NUMEL, -(-sum(trained) // MOST_BUCKETS))
        filled = 0
        for unit in units:
            for flat in unit.flats:
                if not flat.layout.trainable:
                    continue
                if filled >= least:
                    buckets.append([])
                    filled = 0
                buckets[-1].append((flat, unit.label, of.get(id(flat), [])))
                filled += flat.layout.shard_numel
        held = [self._narrowing.held([piece for _, _, own in bucket for piece in own]) for bucket in buckets]
        self._buckets = list(zip(buckets, held, strict=True))
        self._replicates = any(
            flat.layout.optim_sharded and not flat.layout.param_sharded for bucket in buckets for flat, _, _ in bucket
        )

    def pays(self, own_hooks: Collection[int]) -> bool:
        """Whether something can overlap, and nobody can tell that the optimizer is called several times.

        A hook on its steps fires once a step, so with hooks that are not the engine's (``own_hooks``: ids) it is called
        once; so is a class that may look at several tensors together. Collectives are the same either way, so ranks need
        not agree.
        """
        optimizer = self._optimizer
        hooks = {*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks}
        return (
            self._replicates
            and len(self._buckets) > 1
            and type(optimizer) in BY_ELEMENT
            and hooks.issubset(own_hooks)
            and not torch_optimizer._global_optimizer_pre_hooks
            and not torch_optimizer._global_optimizer_post_hooks
            and ("step" not in vars(optimizer) or getattr(optimizer.step, "_wrapped_by_lr_sched", False))
        )

    def run(self, executor: Executor, step: Callable[[], None], present: Mapping[str, bool], sum_of: SumOf) -> None:
        """Update everything that has a gradient on any rank, and bring the new weights to all ranks."""
        works: list[Work] = []
        for bucket, held in self._buckets:
            found = False
            for flat, _, pieces in bucket:
                gradient = sum_of(flat) if pieces else None
                for piece in pieces:
                    point(piece, gradient, present)
                    found = found or piece.values.grad is not None
            if found:
                with self._narrowing.to(held):
                    step()
            for flat, label, _ in bucket:
                flat.publish()
                works += executor.replicate(flat, label)
        for work in works:
            work.wait()
