"""The batch triple: train_batch_size = micro batch x accumulation x world, with whatever is missing derived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import TypeAdapter, ValidationError

from shardledger.config.findings import Findings
from shardledger.config.model import BATCH_KEYS, BatchSizes
from shardledger.config.values import Positive

_POSITIVE = TypeAdapter(Positive)
_TRAIN, _MICRO, _ACCUMULATION = BATCH_KEYS


@dataclass(frozen=True)
class _Given:
    """The sizes as the user gave them (None: not given) and the number of ranks with the place it comes from."""

    train: int | None
    micro: int | None
    accumulation: int | None
    world: int
    world_source: str

    def facts(self) -> str:
        """Return all four numbers and their origin, the head of every error."""
        pairs = zip(BATCH_KEYS, (self.train, self.micro, self.accumulation), strict=True)
        told = (f"{key} {'not given' if size is None else f'= {size}'}" for key, size in pairs)
        return f"{', '.join(told)}, world size {self.world} (from {self.world_source})"


def resolve_batch(known: Mapping[str, Any], world: int, world_source: str, findings: Findings) -> dict[str, int]:
    """Return all three sizes for ``world`` ranks.

    Only the micro batch given, or only the train batch: accumulation is 1. No micro batch and nothing to derive it
    from: 1, which suits a program that makes its own batches. Sizes that contradict each other are reported to
    ``findings``, and ones are returned in their place.
    """
    sizes: dict[str, int | None] = {}
    before = len(findings.problems)
    for key in BATCH_KEYS:
        try:
            sizes[key] = _POSITIVE.validate_python(known[key]) if key in known else None
        except ValidationError as error:
            findings.invalid(key, error, partial(_help, key))
    if world < 1:
        findings.problem(f"the world size is {world} (from {world_source}); at least one rank is needed")
    if len(findings.problems) > before:
        return dict.fromkeys(BATCH_KEYS, 1)
    given = _Given(sizes[_TRAIN], sizes[_MICRO], sizes[_ACCUMULATION], world, world_source)
    problem, lines, resolved = _solve(given)
    if problem:
        findings.problem(f"{given.facts()}: {problem}")
    findings.resolutions += lines
    return dict(zip(BATCH_KEYS, resolved, strict=True))


def _help(key: str, _location: tuple[int | str, ...]) -> str:
    return BatchSizes.model_fields[key].description or ""


_Solution = tuple[str, list[str], tuple[int, int, int]]
"""What is wrong ("" for nothing), the lines to print, and (train, micro, accumulation)."""
_NOTHING = (1, 1, 1)


def _solve(given: _Given) -> _Solution:
    train, micro, accumulation, world = given.train, given.micro, given.accumulation, given.world
    if train is None:
        return _from_parts(given)
    if micro is not None and accumulation is not None:
        product = micro * accumulation * world
        if product == train:
            return "", [], (train, micro, accumulation)
        return _mismatch(given, micro, accumulation), [], _NOTHING
    if micro is not None:
        if train % (micro * world):
            return _not_a_multiple(train, micro, world, "accumulation"), [], _NOTHING
        accumulation = train // (micro * world)
        line = f"{_ACCUMULATION} = {accumulation} ({_TRAIN} {train} / (micro {micro} x world {world}))"
        return "", [line], (train, micro, accumulation)
    steps = accumulation or 1
    if train % (steps * world):
        return _not_a_multiple(train, steps, world, "micro batch"), [], _NOTHING
    micro = train // (steps * world)
    lines = [] if accumulation else [f"{_ACCUMULATION} = 1 (not given, nor a micro batch to derive it from)"]
    lines.append(f"{_MICRO} = {micro} ({_TRAIN} {train} / (accumulation {steps} x world {world}))")
    return "", lines, (train, micro, steps)


def _from_parts(given: _Given) -> _Solution:
    micro, accumulation = given.micro or 1, given.accumulation or 1
    train = micro * accumulation * given.world
    lines = []
    if given.micro is None:
        lines.append(f"{_MICRO} = 1 (not given, nor a {_TRAIN} to derive it from; set it to your loader's batch)")
    if given.accumulation is None:
        lines.append(f"{_ACCUMULATION} = 1 (not given)")
    lines.append(f"{_TRAIN} = {train} (micro {micro} x accumulation {accumulation} x world {given.world})")
    return "", lines, (train, micro, accumulation)


def _not_a_multiple(train: int, factor: int, world: int, derived: str) -> str:
    step = factor * world
    near = _neighbours(train, step, derived)
    return f"{train} is not a multiple of {factor} x {world} = {step}; nearest valid {_TRAIN}: {near}"


def _neighbours(train: int, step: int, derived: str) -> str:
    below = train // step
    quotients = [below, below + 1] if below else [1]
    return " or ".join(f"{quotient * step} ({derived} {quotient})" for quotient in quotients)


def _mismatch(given: _Given, micro: int, accumulation: int) -> str:
    train, world = given.train or 0, given.world
    product = micro * accumulation * world
    text = f"{micro} x {accumulation} x {world} = {product}, not {train}; leave one out, or set {_TRAIN} to {product}"
    if train % (micro * world) == 0:
        cure = f", or {_ACCUMULATION} to {train // (micro * world)}"
    else:
        cure = f"; valid near {train}: {_neighbours(train, micro * world, 'accumulation')}"
    return text + cure + _other_world(train, micro * accumulation)


def _other_world(train: int, per_rank: int) -> str:
    """Point to the number of ranks for which the sizes agree, if there is one: often the launcher was forgotten."""
    if train % per_rank:
        return ""
    ranks = train // per_rank
    return f". The three agree for {ranks} ranks; if so many were meant, start with torchrun --nproc-per-node {ranks}"
