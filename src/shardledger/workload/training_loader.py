"""The loader that ``initialize(training_data=...)`` returns: a DataLoader that knows, and can take, its position.

Step s of an epoch sees samples s * B to (s + 1) * B of that epoch's permutation, B being the global batch: the same ones
on any number of ranks, as long as the ranks share B.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class PositionedSampler(DistributedSampler[Any]):
    """A DistributedSampler whose next pass may begin inside the epoch."""

    def __init__(self, dataset: Dataset[Any], *, rank: int, world: int) -> None:
        super().__init__(dataset, num_replicas=world, rank=rank)
        self.start = 0
        """Samples, over all ranks, that the next pass leaves out at its beginning."""

    def __iter__(self) -> Iterator[Any]:
        own = list(super().__iter__())
        start, self.start = self.start, 0
        return iter(own[start // self.num_replicas :])

    def set_epoch(self, epoch: int) -> None:
        """Draw another permutation; the position is lost when the epoch is another one."""
        if epoch != self.epoch:
            self.start = 0
        super().set_epoch(epoch)


class TrainingLoader(DataLoader[Any]):
    """Batches of one rank. ``state_dict`` is the same on all ranks and fits any number of them."""

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        sampler: PositionedSampler,
        collate_fn: Callable[..., Any] | None,
        drop_last: bool,
    ) -> None:
        super().__init__(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            collate_fn=collate_fn,
            drop_last=drop_last,
            # Without one, every pass draws a seed from the global generator, and a run that resumes inside a pass
            # would have drawn once more than the run that went on.
            generator=torch.Generator(),
        )
        self._positioned = sampler
        self._taken = 0

    def __iter__(self) -> Any:
        self._taken = self._positioned.start
        return self._counted(super().__iter__())

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        assert self.batch_size is not None
        for batch in batches:
            self._taken += self.batch_size * self._positioned.num_replicas
            yield batch
        self._taken = 0

    def state_dict(self) -> dict[str, int]:
        """The position: epoch (as ``sampler.set_epoch`` said) and samples taken from it over all ranks."""
        return {"epoch": self._positioned.epoch, "samples": self._taken, "seed": self._positioned.seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let the next pass continue where ``state_dict()`` was taken."""
        self._positioned.seed = state["seed"]
        self._positioned.set_epoch(state["epoch"])
        self._positioned.start = self._taken = state["samples"]
