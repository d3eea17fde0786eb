"""Real ranks for tests.

    run_ranks(function, world, *args)   a function of the test module, on ranks 0..world-1 of a pool of processes
    run_ranks_raw(script, world)        a script in fresh processes, for tests in which a process must die

Starting torch costs seconds, so the processes of `run_ranks` stay up and are used again; after a crash or a timeout
they are killed and the next call starts new ones. Every call has its own port and its own outer timeout.
"""

from __future__ import annotations

import atexit
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
START_SECONDS = 60.0
#: How long the other ranks may go on after one has failed: their own message helps, their silence does not.
GRACE_SECONDS = 3.0


class RankError(AssertionError):
    """A rank raised, died or did not finish; the text holds each failed rank's traceback, the first failure first."""


@dataclass(frozen=True)
class RawRank:
    """How one process of `run_ranks_raw` ended; `code` is None when it had to be killed at the timeout."""

    code: int | None
    output: str
    ended_s: float  # after the start of the whole run


class _Worker:
    def __init__(self) -> None:
        self.pipe, child = Pipe()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the worker
        self.process = subprocess.Popen(
            [sys.executable, str(TESTS / "support" / "worker.py"), str(child.fileno())],
            pass_fds=[child.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=subprocess.STDOUT,
            env=_environment(),
        )
        child.close()

    def wrote(self, characters: int = 3000) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")[-characters:]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.pipe.close()
        self.log.close()


_pool: list[_Worker] = []


def _environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(part for part in (str(TESTS), os.environ.get("PYTHONPATH")) if part)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": path, **more}
    if sys.platform.startswith("linux"):
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return environment


def _rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def close_pool() -> None:
    """Kill every waiting rank. The next `run_ranks` starts new ones."""
    while _pool:
        _pool.pop().kill()


atexit.register(close_pool)


def _grow_pool(world: int) -> list[_Worker]:
    if any(worker.process.poll() is not None for worker in _pool):
        close_pool()
    fresh = [_Worker() for _ in range(world - len(_pool))]
    _pool.extend(fresh)
    for worker in fresh:
        if not worker.pipe.poll(START_SECONDS):
            text = worker.wrote()
            close_pool()
            raise RankError(f"a rank did not start within {START_SECONDS:.0f} s; it wrote:\n{text}")
        worker.pipe.recv()
    return _pool[:world]


def run_ranks(function: Callable[..., Any], world: int, *args: Any, timeout: float = 60.0) -> list[Any]:
    """Run a module-level function as `function(*args)` on `world` ranks and return their results in rank order.

    The ranks find RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in their environment, as under torchrun.
    Raises RankError with the tracebacks of the ranks that failed.
    """
    module = sys.modules[function.__module__]
    workers = _grow_pool(world)
    port = free_port()
    for rank, worker in enumerate(workers):
        task = {
            "environment": _rank_environment(rank, world, port),
            "module": function.__module__,
            "file": os.path.abspath(str(module.__file__)),
            "function": function.__qualname__,
            "arguments": pickle.dumps(args),
        }
        worker.pipe.send(task)
    answers, failures = _collect(workers, timeout)
    if failures:
        close_pool()
        raise RankError(f"{function.__name__} at world {world}:\n" + "\n".join(text for _, text in sorted(failures)))
    return [answers[rank] for rank in range(world)]


def _collect(workers: list[_Worker], timeout: float) -> tuple[dict[int, Any], list[tuple[float, str]]]:
    """Results by rank, and failures as (time, text). A rank is done when it has answered and left its process group."""
    answers: dict[int, Any] = {}
    failures: list[tuple[float, str]] = []
    waiting: dict[Connection, int] = {worker.pipe: rank for rank, worker in enumerate(workers)}
    deadline = time.monotonic() + timeout
    while waiting:
        ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        for pipe in ready:
            rank = waiting[pipe]  # type: ignore[index]
            try:
                message = pipe.recv()  # type: ignore[union-attr]
            except (EOFError, OSError):
                code = workers[rank].process.wait()
                text = f"the process ended with code {code}; it wrote:\n{workers[rank].wrote()}"
                message = ("error", text, time.time())
            if message[0] == "ok":
                answers[rank] = pickle.loads(message[1])
                continue
            if message[0] == "error":
                failures.append((message[2], f"--- rank {rank} ---\n{message[1]}"))
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            del waiting[pipe]  # type: ignore[arg-type]
        if not ready:
            late = sorted(waiting.values())
            cause = "after another rank had failed" if failures else f"within {timeout:.0f} s"
            lines = [f"--- rank {rank} did not finish {cause}; it wrote:\n{workers[rank].wrote(800)}" for rank in late]
            text = "\n".join(lines)
            failures.append((time.time(), text))
            break
    return answers, failures


def run_ranks_raw(script: str, world: int, timeout: float = 60.0) -> list[RawRank]:
    """Run python source as `world` fresh processes in a torchrun-like environment; never raises for how they end."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rank.py"
        file.write_text(script)
        start = time.monotonic()
        logs = [open(Path(folder) / f"{rank}.log", "w+b") for rank in range(world)]  # noqa: SIM115 - closed below
        processes = [
            subprocess.Popen(
                [sys.executable, str(file)],
                stdin=subprocess.DEVNULL,
                stdout=logs[rank],
                stderr=subprocess.STDOUT,
                env=_environment(**_rank_environment(rank, world, port)),
            )
            for rank in range(world)
        ]
        ended: dict[int, float] = {}
        while len(ended) < world and time.monotonic() - start < timeout:
            for rank, process in enumerate(processes):
                if rank not in ended and process.poll() is not None:
                    ended[rank] = time.monotonic() - start
            time.sleep(0.02)
        results = []
        for rank, process in enumerate(processes):
            process.kill()
            process.wait()
            logs[rank].seek(0)
            output = logs[rank].read().decode(errors="replace")
            logs[rank].close()
            code = process.returncode if rank in ended else None
            results.append(RawRank(code, output, ended.get(rank, timeout)))
        return results
