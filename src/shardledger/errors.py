"""The exception family.

    ShardledgerError
    ├── ConfigError               what the user asked for is wrong or contradicts itself (exit code 2)
    ├── PlanError                 the plan cannot be built for this model
    │   └── DoesNotFitError       no plan fits the memory at hand (exit code 3)
    ├── LayoutError               integers that do not describe a layout
    ├── TransportError            a collective failed
    │   ├── PeerLostError         another rank died or went silent
    │   └── RanksDisagreeError    ranks hold different plans, or issue different collectives
    ├── EngineStateError          a call that is illegal at this point of the training step
    │   └── ReleasedParameterError  a parameter was read while its values live on other ranks
    ├── CheckpointError           a checkpoint cannot be written or read
    ├── DataError                 the training data cannot be read or is too short
    └── OutputError               a file of a run (metrics, ledger, trained weights) cannot be written

Every message says what happened, where (key path, parameter, unit, rank, step) and how to cure it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike


class ShardledgerError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(ShardledgerError, ValueError):
    """A wrong configuration; ``problems`` holds every problem found, one sentence each."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        count = len(problems)
        head = "" if count == 1 else f"{count} problems in the configuration:\n"
        super().__init__(head + "\n".join(p if count == 1 else f"  - {p}" for p in problems))


class PlanError(ShardledgerError):
    """The plan cannot be built for this model."""


class DoesNotFitError(PlanError):
    """No plan fits the memory at hand."""


class LayoutError(ShardledgerError, ValueError):
    """Integers that do not describe a layout."""


class TransportError(ShardledgerError, RuntimeError):
    """A collective failed."""


class PeerLostError(TransportError):
    """Another rank died or went silent; ``peer`` is its rank (None when it is not known)."""

    def __init__(self, message: str, peer: int | None = None) -> None:
        self.peer = peer
        super().__init__(message)


class RanksDisagreeError(TransportError):
    """Ranks hold different plans, or would issue different collectives."""


class EngineStateError(ShardledgerError, RuntimeError):
    """A call that is illegal at this point of the training step."""


class ReleasedParameterError(EngineStateError):
    """A parameter was read while its values live on other ranks."""


class CheckpointError(ShardledgerError):
    """A checkpoint cannot be written or read."""


class DataError(ShardledgerError):
    """The training data cannot be read or is too short."""


class OutputError(ShardledgerError):
    """A file of a run cannot be written."""


@contextmanager
def writing(path: str | PathLike[str], *more: type[Exception]) -> Iterator[None]:
    """Tell which file it was when its writing fails, by OSError or one of ``more``.

    Raises:
        OutputError: names ``path`` and the cure.
    """
    failures: tuple[type[Exception], ...] = (OSError, *more)
    try:
        yield
    except failures as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise OutputError(
            f"{path} cannot be written: {why}. Make room there, or name another place; a run that has saved a checkpoint "
            f"goes on from it with --resume."
        ) from error
