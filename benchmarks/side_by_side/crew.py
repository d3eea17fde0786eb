"""The processes of one engine, seen from the conductor. Imports no torch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from side_by_side.cases import Case, Contender

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 300.0
END_S = 15.0


class CrewError(RuntimeError):
    """A rank failed or does not answer; the text holds what it said."""


class Crew:
    """All ranks of one engine, one process each, alive until ``end``."""

    def __init__(self, case: Case, contender: Contender) -> None:
        self.contender = contender
        self.began = time.time()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the processes
        self._pipes, self._processes = [], []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(case.world):
            mine, theirs = Pipe()
            command = [sys.executable, "-m", "side_by_side.worker", str(theirs.fileno())]
            environment = _environment(rank, case.world, port)
            streams = {"stdin": subprocess.DEVNULL, "stdout": self._log, "stderr": subprocess.STDOUT}
            self._processes.append(
                subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, **streams)  # type: ignore[call-overload]
            )
            theirs.close()
            mine.send((case, contender))
            self._pipes.append(mine)

    def ask(self, name: str, *arguments: Any) -> list[dict[str, Any]]:
        """Let every rank do one thing (``Rank.do_NAME``) at the same time; their answers by rank.

        Raises:
            CrewError: a rank failed, or did not answer in five minutes.
        """
        answers: dict[int, dict[str, Any]] = {}
        deadline = time.monotonic() + PATIENCE_S
        try:
            for pipe in self._pipes:
                pipe.send((name, *arguments))
            while len(answers) < len(self._pipes):
                waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
                ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
                if not ready:
                    raise CrewError(f"{self.contender.label}: no answer to {name!r}; {self._said()}")
                for pipe in ready:
                    kind, answer = pipe.recv()  # type: ignore[union-attr]
                    if kind == "error":
                        raise CrewError(f"{self.contender.label}: a rank failed at {name!r}:\n{answer}")
                    answers[waiting[pipe]] = answer  # type: ignore[index]
        except (EOFError, OSError):
            raise CrewError(f"{self.contender.label}: a rank ended at {name!r}; {self._said()}") from None
        return [answers[rank] for rank in range(len(self._pipes))]

    def end(self) -> None:
        """Close the pipes, which ends the ranks; kill what does not end."""
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + END_S
        for process in self._processes:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._log.close()

    def _said(self) -> str:
        ended = [(rank, code) for rank, process in enumerate(self._processes) if (code := _code(process)) is not None]
        self._log.seek(0)
        output = self._log.read().decode(errors="replace")[-3000:]
        codes = ", ".join(f"rank {rank} with exit code {code}" for rank, code in ended) or "none"
        return f"ended: {codes}; the output ends:\n{output or '(nothing)'}"


def _code(process: subprocess.Popen[bytes]) -> int | None:
    """Exit code; None if it has not ended in a second."""
    try:
        return process.wait(1.0)
    except subprocess.TimeoutExpired:
        return None


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    paths = [str(ROOT / "benchmarks"), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    environment = {**os.environ, **{key: str(value) for key, value in places.items()}, "MASTER_ADDR": "127.0.0.1"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // world))
    if sys.platform.startswith("linux"):
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return environment
