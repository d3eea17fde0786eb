"""Lets engines take turns, A B C A B C ..., and collects what they measured."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from side_by_side.cases import Case, Contender
from side_by_side.crew import Crew, CrewError

Say = Callable[[str], None]


@dataclass
class Measured:
    """Everything about one engine in one case; lists have one entry per round unless they say otherwise."""

    contender: Contender
    seconds: list[float] = field(default_factory=list)
    """Of one step, of the slowest rank."""
    thread_cpu_s: list[float] = field(default_factory=list)
    """CPU seconds of one step in the thread that trains, of the busiest rank; other programs do not count."""
    process_cpu_s: list[float] = field(default_factory=list)
    """The same of all threads of a rank: communication too."""
    wire_bytes: list[float] = field(default_factory=list)
    """Sent over loopback per step and rank, headers and all."""
    counted_bytes: list[float] = field(default_factory=list)
    """Sent per step and rank by the engine's own count; empty when it does not count."""
    starts: list[float] = field(default_factory=list)
    """Seconds from the start of the processes to the end of the first step; one per start."""
    saves: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    """Of the largest rank, above its resident set after the imports."""
    transient_bytes: int = 0
    losses: list[float] = field(default_factory=list)
    """Mean over ranks of each step, from the first on."""
    failed: str = ""
    """Why there are no numbers."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How often things are done."""

    rounds: int
    warm_steps: int = 3
    starts: int = 3
    """Starts per engine that are timed; the last one stays."""
    saves: int = 3
    memory: bool = True
    """Whether a step of a few tokens is measured: another shape, which a compiled model compiles anew."""


def conduct(case: Case, contenders: Sequence[Contender], protocol: Protocol, say: Say) -> list[Measured]:
    """Measure every contender on ``case``; one that fails is left out of later rounds and says why."""
    found = [Measured(contender) for contender in contenders]
    with tempfile.TemporaryDirectory(prefix="shardledger-bench-") as folder:
        if case.alive:
            _all_alive(case, found, protocol, Path(folder), say)
        else:
            _one_at_a_time(case, found, protocol, Path(folder), say)
    return found


def _all_alive(case: Case, found: list[Measured], protocol: Protocol, folder: Path, say: Say) -> None:
    crews: dict[Contender, Crew] = {}

    def start(one: Measured) -> None:
        crews[one.contender] = _start(case, one)

    def turn(one: Measured, untimed: int) -> None:
        _turn(crews[one.contender], case, one, untimed)

    try:
        for number in range(protocol.starts):
            say(f"start {number + 1} of {protocol.starts}")
            for one in _running(found):
                if one.contender in crews:
                    crews.pop(one.contender).end()
                _guarded(one, lambda: start(one))  # noqa: B023
        for number in range(protocol.rounds):
            say(f"round {number + 1} of {protocol.rounds}")
            for one in _running(found):
                _guarded(one, lambda: turn(one, 1 if number else protocol.warm_steps))  # noqa: B023
        say("memory, saves and loads")
        for one in _running(found) if protocol.memory else ():
            _guarded(one, lambda: _memory(crews[one.contender], one))  # noqa: B023
        for _ in range(protocol.saves):
            for one in _running(found):
                _guarded(one, lambda: _files(crews[one.contender], one, folder))  # noqa: B023
    finally:
        for crew in crews.values():
            crew.end()


def _one_at_a_time(case: Case, found: list[Measured], protocol: Protocol, folder: Path, say: Say) -> None:
    def whole(one: Measured, last: bool) -> None:
        crew = _start(case, one)
        try:
            _turn(crew, case, one, protocol.warm_steps)
            if last:
                _memory(crew, one)
            if len(one.saves) < protocol.saves:
                _files(crew, one, folder)
        finally:
            crew.end()

    for number in range(protocol.rounds):
        say(f"round {number + 1} of {protocol.rounds}, each engine anew")
        for one in _running(found):
            _guarded(one, lambda: whole(one, number == protocol.rounds - 1))  # noqa: B023


def _running(found: list[Measured]) -> list[Measured]:
    return [one for one in found if not one.failed]


def _guarded(one: Measured, action: Callable[[], None]) -> None:
    try:
        action()
    except CrewError as error:
        one.failed = str(error)


def _start(case: Case, one: Measured) -> Crew:
    crew = Crew(case, one.contender)
    try:
        one.starts.append(max(answer["at"] for answer in crew.ask("first")) - crew.began)
    except BaseException:
        crew.end()
        raise
    return crew


def _turn(crew: Crew, case: Case, one: Measured, untimed: int) -> None:
    answers = crew.ask("turn", untimed, case.steps)
    one.seconds.append(max(a["seconds"] for a in answers))
    one.thread_cpu_s.append(max(a["thread_cpu_s"] for a in answers))
    one.process_cpu_s.append(max(a["process_cpu_s"] for a in answers))
    one.wire_bytes.append(max(a["wire_bytes"] for a in answers) / case.world)  # the interface counts for all ranks
    counts = [a["counted_bytes"] for a in answers if a["counted_bytes"] is not None]
    if counts:
        one.counted_bytes.append(max(counts))
    ranks: list[list[float]] = [a["losses"] for a in crew.ask("losses")]
    one.losses = [sum(step) / len(step) for step in zip(*ranks, strict=True)]


def _memory(crew: Crew, one: Measured) -> None:
    answers: list[dict[str, Any]] = crew.ask("memory")
    one.peak_bytes = max(a["peak_bytes"] for a in answers)
    one.transient_bytes = max(a["transient_bytes"] for a in answers)


def _files(crew: Crew, one: Measured, folder: Path) -> None:
    place = folder / "state"
    one.saves.append(max(a["seconds"] for a in crew.ask("save", str(place))))
    one.loads.append(max(a["seconds"] for a in crew.ask("load", str(place))))
    shutil.rmtree(place, ignore_errors=True)
