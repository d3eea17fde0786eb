"""A rank must not outlive the launcher that started it."""

from __future__ import annotations

import os
import signal
import threading
import time

from shardledger.cli.ranks import LAUNCHED_BY

POLL_S = 0.5


def guard_rank() -> None:
    """Make this rank end with our launcher: at once on a signal, within a second when the launcher was killed.

    Does nothing in a rank that another launcher started. The launcher passes Ctrl-C on as SIGINT, which Python would
    turn into an exception only after the collective at hand has returned; the system's own handling does not wait.
    """
    launcher = os.environ.get(LAUNCHED_BY)
    if launcher is None:
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_follow, args=(int(launcher),), name="shardledger-guard", daemon=True).start()


def _follow(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(POLL_S)
    os._exit(1)
