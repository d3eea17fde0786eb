"""Start the ranks with torch's launcher, wait, and say in one message how they ended."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from shardledger.cli.exits import DOES_NOT_FIT, FAILED, TERMINATED, USAGE, RunFailure
from shardledger.cli.ranks import LAUNCHED_BY

MONITOR_INTERVAL_S = 0.1
SHOW_CURSOR = "\x1b[?25h"


def launch(arguments: Sequence[str], nproc: int, told: Mapping[str, str] | None = None) -> None:
    """Run ``python -m shardledger ARGUMENTS`` in ``nproc`` ranks on this machine and wait for all of them.

    ``told`` are environment variables for the ranks; this process's own are the same afterwards.

    Raises:
        RunFailure: a rank failed or the run was interrupted; no rank is left running.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    with (
        _environment({**rank_environment(os.environ, nproc), **(told or {})}),
        tempfile.TemporaryDirectory(prefix="shardledger-", ignore_cleanup_errors=True) as errors_folder,
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=nproc,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            local_addr="127.0.0.1",
            max_restarts=0,
            monitor_interval=MONITOR_INTERVAL_S,
            logs_specs=DefaultLogsSpecs(log_dir=errors_folder),
            **handled_signals(LaunchConfig),
        )
        # Torch's launcher logs several warnings and a traceback of itself per failure. This process does nothing else,
        # and what they say is in the message below.
        logging.disable(logging.CRITICAL)
        try:
            with _passing_on_sigterm():
                elastic_launch(config, sys.executable)("-m", "shardledger", *arguments)
        except ChildFailedError as error:
            raise describe_failures([_ending(rank, failure) for rank, failure in error.failures.items()]) from None
        except SignalException as error:
            raise _interrupted(signal.Signals(error.sigval)) from None
        except KeyboardInterrupt:
            raise _interrupted(signal.SIGINT) from None
        finally:
            logging.disable(logging.NOTSET)
            if sys.stdout.isatty():
                print(SHOW_CURSOR, end="", flush=True)  # a rank that was killed while it drew a bar has hidden it


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """What torch's launcher hands on to the ranks. What stayed behind would pass for a launcher's word later on."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def handled_signals(config: type) -> dict[str, str]:
    """Leave SIGTERM to ``_passing_on_sigterm``: torch would kill ranks that need more than 5 s to save.

    torch versions whose launcher cannot be told so keep their way.
    """
    able = "signals_to_handle" in {field.name for field in fields(config)}
    return {"signals_to_handle": "SIGINT,SIGHUP,SIGQUIT"} if able else {}


@contextmanager
def _passing_on_sigterm() -> Iterator[None]:
    """SIGTERM goes to the ranks, which finish their step, save and end; a second one ends everything at once."""
    import psutil

    received: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        received.append(number)
        ranks = psutil.Process().children()
        if len(received) > 1 or not ranks:
            raise _interrupted(signal.SIGTERM)
        for rank in ranks:
            rank.terminate()

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def rank_environment(environment: Mapping[str, str], nproc: int) -> dict[str, str]:
    """Variables the ranks need and ``environment`` does not have yet."""
    wanted = {
        # More threads than cores make every rank slower; torch's launcher would take one thread and say so in a
        # warning.
        "OMP_NUM_THREADS": str(max(1, _cores() // nproc)),
        # All ranks are on this machine. Without a name gloo asks the resolver for the host's own, which on many
        # machines does not resolve.
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # Seconds between asking a rank to end and killing it. A running rank ends at once when asked; a stopped one, or
        # one stuck in the kernel, never does, and torch would give it 30.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5",
    }
    missing = {key: value for key, value in wanted.items() if key not in environment}
    return {**missing, LAUNCHED_BY: str(os.getpid())}


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How one rank ended. ``message`` is None when it left none; ``moment`` is 0.0 when it is not known."""

    rank: int
    pid: int
    exit_code: int  # negative: the number of the signal that ended it
    message: str | None = None
    kind: str = ""
    moment: float = 0.0


def describe_failures(endings: Sequence[Ending]) -> RunFailure:
    """One message about the rank that failed first; what the others say is mostly that they miss it."""
    saved = next((e for e in endings if e.exit_code == TERMINATED and e.message is not None), None)
    if saved is not None:
        return RunFailure(f"{saved.message}", TERMINATED)
    first = min(endings, key=_closeness_to_cause)
    who = f"rank {first.rank} (pid {first.pid})"
    if first.exit_code < 0 and first.message is None:
        name = _signal_name(-first.exit_code)
        cause = " The system does that when memory runs out." if name == "SIGKILL" else ""
        return RunFailure(f"{who} was killed by {name}; the other ranks were stopped.{cause}")
    code = first.exit_code if first.exit_code in (USAGE, DOES_NOT_FIT) else FAILED
    if first.message is None:
        what = f"ended with exit code {first.exit_code} and no message"
        return RunFailure(f"{who} {what}; the other ranks were stopped.", code)
    return RunFailure(f"{who} failed; the other ranks were stopped.\n{first.message.rstrip()}", code)


def _closeness_to_cause(ending: Ending) -> tuple[int, float]:
    """Sorts causes before consequences.

    A rank that is killed takes its peers with it within milliseconds: they raise PeerLostError, or gloo aborts them. A
    rank that raises an error of its own does the same to its peers.
    """
    if ending.exit_code < 0 and ending.message is None:
        return (2 if ending.exit_code in (-signal.SIGABRT, -signal.SIGTERM) else 0), ending.moment
    return (3 if ending.kind == "PeerLostError" else 1), ending.moment


def _ending(rank: int, failure: Any) -> Ending:
    """Torch's record of a failed rank; its message is a dict when the rank has left an error file."""
    message = failure.message
    if not isinstance(message, dict):
        return Ending(rank=rank, pid=failure.pid, exit_code=failure.exitcode)
    extra = message.get("extraInfo", {})
    return Ending(
        rank=rank,
        pid=failure.pid,
        exit_code=failure.exitcode,
        message=str(message.get("message", "")),
        kind=str(extra.get("kind", "")),
        moment=float(extra.get("moment", 0.0)),
    )


def _interrupted(received: signal.Signals) -> RunFailure:
    how = "by Ctrl-C" if received == signal.SIGINT else f"by {received.name}"
    return RunFailure(f"stopped {how}; all ranks have ended.", 128 + received)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))  # fewer than cpu_count() in a container or under taskset
    return os.cpu_count() or 1
