"""Errors to exit codes, for the command itself and for a rank of a larger run."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from shardledger.cli.ranks import LAUNCHED_BY, rank_of
from shardledger.errors import ConfigError, DoesNotFitError, ShardledgerError

OK = 0
FAILED = 1
USAGE = 2
DOES_NOT_FIT = 3
INTERRUPTED = 130
TERMINATED = 143


class UsageFailure(ShardledgerError):
    """Wraps an error found while arguments are checked, before any rank exists: exit code 2 whatever its kind."""


class RunFailure(ShardledgerError):
    """A run that ended badly and has said so in ``args[0]``; carries its exit code."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        self.code = code
        super().__init__(message)


def exit_code(error: BaseException) -> int:
    """The exit code an error stands for."""
    if isinstance(error, RunFailure):
        return error.code
    if isinstance(error, (ConfigError, UsageFailure)):
        return USAGE
    if isinstance(error, DoesNotFitError):
        return DOES_NOT_FIT
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED


def report_and_exit(error: BaseException) -> NoReturn:
    """Say what happened, once, and end the process."""
    rank = rank_of(os.environ)
    if rank is not None:
        _end_rank(error, rank)
    if isinstance(error, ShardledgerError):
        print(f"error: {error}", file=sys.stderr, flush=True)
    elif isinstance(error, KeyboardInterrupt):
        print("stopped by Ctrl-C", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)
    sys.exit(exit_code(error))


def guarded(body: Callable[[], None]) -> None:
    """Run a command's body; an error ends the process as ``report_and_exit`` does."""
    try:
        body()
    except (Exception, KeyboardInterrupt) as error:
        report_and_exit(error)


def _end_rank(error: BaseException, rank: int) -> NoReturn:
    """Leave the error where the launcher finds it and end without the interpreter's clean-up.

    The clean-up would destroy a process group whose other ranks may be waiting in a collective, and wait with them.
    """
    _record(error)
    if LAUNCHED_BY not in os.environ:  # our own launcher shows the recorded error; another one may not
        if isinstance(error, ShardledgerError):
            print(f"error: rank {rank}: {error}", file=sys.stderr)
        else:
            traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code(error))


def _record(error: BaseException) -> None:
    """Write the error file that torch's launcher asks for, in torch's format with two fields of our own."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    trace = "".join(traceback.format_exception(error))
    kind = type(error).__name__
    expected = isinstance(error, ShardledgerError)
    extra = {"py_callstack": trace, "timestamp": str(int(time.time())), "moment": time.time(), "kind": kind}
    message = str(error) if expected else trace
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": message, "extraInfo": extra}}, file)
    except OSError as problem:
        print(f"rank's error file {path} cannot be written: {problem}", file=sys.stderr)
