"""Bytes of text files as training data, cut and drawn the same way whatever the number of ranks.

Words: the *corpus* is one long row of bytes; a *window* is seq_len + 1 of them in a row, seq_len inputs and the same
shifted by one as targets; a *start* is where a window begins; the *global batch* is all windows of one optimizer step.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shardledger.errors import DataError

HELD_OUT_SHARE = 20  # one byte in twenty is held out for validation
PERIOD_BYTES = 256 * 1024  # training text and held-out text alternate with this period
DIRECTORY_LIMIT_BYTES = 256 * 1024 * 1024  # a directory is read into memory; a single file is mapped and has no limit
LIBRARY_LIMIT_BYTES = 8 * 1024 * 1024
_SNIFF_BYTES = 8192


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """All text in one row."""

    tokens: Tensor  # uint8 [size]
    source: str  # for people: where the bytes came from
    files: int

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.tokens.numel()


def read_corpus(source: str | os.PathLike[str] | None = None) -> Corpus:
    """Read a file, all text files below a directory, or (None) the sources of the running Python's standard library.

    Files of a directory are joined in the order of their relative paths; hidden entries, ``__pycache__`` and files
    with a zero byte near their start are left out.

    Raises:
        DataError: nothing is there, or nothing in it is text.
    """
    if source is None:
        return _read_library()
    path = Path(source)
    if path.is_file():
        size = path.stat().st_size
        if size == 0:
            raise DataError(f"{path} is empty (0 bytes); give a text file with at least some thousand bytes.")
        mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
        return Corpus(tokens=mapped, source=str(path), files=1)
    if path.is_dir():
        return _join(_text_files(path), DIRECTORY_LIMIT_BYTES, str(path))
    raise DataError(f"{path} does not exist (seen from {os.getcwd()}); give a text file or a directory of text files.")


def _read_library() -> Corpus:
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    if not files:
        raise DataError(
            f"this Python keeps no library sources in {folder}; pass text of your own with --data FILE or --data DIR."
        )
    return _join(iter(files), LIBRARY_LIMIT_BYTES, f"the standard library's sources in {folder}")


def _text_files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        for name in sorted(names):
            if not name.startswith("."):
                yield Path(parent) / name


def _join(files: Iterator[Path], limit_bytes: int, source: str) -> Corpus:
    parts: list[bytes] = []
    total = 0
    for path in files:
        if total >= limit_bytes:
            source += f" (the first {limit_bytes >> 20} MiB)"
            break
        try:
            content = path.read_bytes()[: limit_bytes - total]
        except OSError:  # a socket, a broken link, a file of someone else: not text of ours
            continue
        if content and b"\0" not in content[:_SNIFF_BYTES]:
            parts.append(content)
            total += len(content)
    if not parts:
        raise DataError(f"{source} holds no text files; hidden, empty and binary files do not count.")
    # A bytearray because frombuffer shares the memory and a tensor over immutable bytes would be writable all the same.
    return Corpus(
        tokens=torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8), source=source, files=len(parts)
    )


class TextData:
    """A corpus split into training and held-out text, addressed by window number.

    The corpus is cut into equal periods, the last twentieth of each is held out. No training window touches a held-out
    byte, and the held-out text comes from all over the corpus rather than from its last files.
    """

    def __init__(self, corpus: Corpus, seq_len: int) -> None:
        """Raises DataError when the corpus is too short for one window on each side of the split."""
        window = seq_len + 1
        if seq_len < 1:
            raise DataError(f"sequence length {seq_len} is not positive.")
        if corpus.size < 2 * window:
            raise DataError(
                f"{corpus.source} is too short: {corpus.size} bytes, but sequences of {seq_len} bytes need at least "
                f"{2 * window} (one for training, one held out). Give more text or a smaller --seq-len."
            )
        self.corpus = corpus
        self.seq_len = seq_len
        self.periods = max(1, corpus.size // max(PERIOD_BYTES, HELD_OUT_SHARE * window))
        self.period = corpus.size // self.periods
        self.held_out = max(self.period // HELD_OUT_SHARE, window)
        self.training_windows = self.periods * (self.period - self.held_out - window + 1)
        self.validation_windows = self.periods * (self.held_out - window + 1)

    def training(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [R, T] each, of the training windows with these numbers (int64 [R])."""
        per_period = self.training_windows // self.periods
        return self._cut(numbers // per_period * self.period + numbers % per_period)

    def validation(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 [R, T] each, of the held-out windows with these numbers (int64 [R])."""
        per_period = self.validation_windows // self.periods
        within = self.period - self.held_out + numbers % per_period
        return self._cut(numbers // per_period * self.period + within)

    def validation_batches(self, rows: int, batch: int, rank: int, world: int) -> list[tuple[Tensor, Tensor]]:
        """This rank's held-out batches of ``batch`` rows each: about ``rows`` windows in all, evenly spread.

        They are always the same, and every rank gets as many, so that ranks stay in step where the forward pass
        communicates.
        """
        count = max(1, -(-rows // (batch * world)))
        total = count * batch * world
        numbers = torch.arange(total) * self.validation_windows // total
        mine = numbers.view(count, world, batch)[:, rank]
        return [self.validation(row) for row in mine]

    def _cut(self, starts: Tensor) -> tuple[Tensor, Tensor]:
        windows = self.corpus.tokens[starts[:, None] + torch.arange(self.seq_len + 1)].long()  # [R, T + 1]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """How a global batch is spread: ``micro`` rows a rank and micro-step, ``accumulation`` steps, ``world`` ranks."""

    micro: int
    accumulation: int = 1
    world: int = 1

    @property
    def rows(self) -> int:
        """Rows of the global batch."""
        return self.micro * self.accumulation * self.world


class BatchSampler:
    """Draws the global batch of step s from (seed, s) alone.

    World 1 with micro-batch 8 and world 2 with micro-batch 4 see the same rows. Row numbers run over micro-steps, then
    ranks, then the rows of one micro-batch. Windows are drawn with replacement.
    """

    def __init__(self, data: TextData, shape: BatchShape, *, rank: int = 0, seed: int = 0) -> None:
        self.data = data
        self.shape = shape
        self.rank = rank
        self.seed = seed
        self.step = 0

    def next_batch(self) -> list[tuple[Tensor, Tensor]]:
        """This rank's micro-batches of the next step, (inputs, targets) int64 [micro, T] each."""
        batches = self.batch_of(self.step)
        self.step += 1
        return batches

    def batch_of(self, step: int) -> list[tuple[Tensor, Tensor]]:
        """This rank's micro-batches of any step; does not move the position."""
        shape = self.shape
        numbers = self.global_numbers(step).view(shape.accumulation, shape.world, shape.micro)[:, self.rank]
        return [self.data.training(row) for row in numbers]

    def global_numbers(self, step: int) -> Tensor:
        """Window numbers of the whole global batch, int64 [rows]: the same on every rank."""
        digest = hashlib.blake2b(f"{self.seed} {step}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        return torch.randint(self.data.training_windows, (self.shape.rows,), generator=generator)

    def state_dict(self) -> dict[str, int]:
        """The position: what a resumed run needs in order to draw the same batches."""
        return {"seed": self.seed, "step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue where ``state_dict()`` was taken, on any number of ranks."""
        self.seed = state["seed"]
        self.step = state["step"]
