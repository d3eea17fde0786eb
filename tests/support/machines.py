"""Two "machines": namespaces with an address, a name and processes each, joined by a slow link. They share the disk."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

RATE = "200mbit"
NAMES = ("a", "b")


def why_not() -> str:
    """Why this machine cannot play two; empty when it can."""
    if not sys.platform.startswith("linux") or not all(map(shutil.which, ("ip", "tc", "unshare"))):
        return "two machines are played by Linux namespaces, with the commands ip, tc and unshare"
    try:
        with two_machines() as machines:
            code = machines.start(0, ["true"], stderr=subprocess.DEVNULL).wait(20)
            return "" if code == 0 else "process namespaces are not permitted here"
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted here: {error.stderr.strip()}"


class Machines:
    """The pair; `index` is 0 or 1."""

    def __init__(self) -> None:
        # Names of interfaces have 15 characters at most, and are the machine's as long as they have not been moved.
        self.names = [f"sl{os.getpid()}{name}" for name in NAMES]
        self.addresses = ["10.231.77.1", "10.231.77.2"]

    def start(self, index: int, command: Sequence[str], **options) -> subprocess.Popen:
        """Run a command there, under a host name that nobody resolves and where no process of the other one is seen."""
        name = self.names[index]
        own = ["unshare", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child"]
        named = ["sh", "-c", f'echo {name} > /proc/sys/kernel/hostname; exec "$@"', "sh"]
        return subprocess.Popen(["ip", "netns", "exec", name, *own, *named, *command], **options)

    def link(self, index: int, state: str) -> None:
        """Turn a machine's only link "up" or "down"."""
        _run("ip", "-n", self.names[index], "link", "set", self.names[index], state)

    def sent_bytes(self, index: int) -> int:
        """What has left over the link."""
        found = _run("ip", "-n", self.names[index], "-s", "-j", "link", "show", self.names[index])
        return int(json.loads(found)[0]["stats64"]["tx"]["bytes"])

    def kill(self, index: int) -> None:
        """Kill every process there, as a power cut does."""
        with suppress(subprocess.CalledProcessError):
            for pid in _run("ip", "netns", "pids", self.names[index]).split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


@contextmanager
def two_machines() -> Iterator[Machines]:
    """Make them, and leave nothing of them.

    Raises:
        subprocess.CalledProcessError: not permitted.
    """
    machines = Machines()
    a, b = machines.names
    try:
        for name in (a, b):
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run("ip", "link", "add", a, "netns", a, "type", "veth", "peer", "name", b, "netns", b)
        for name, address in zip((a, b), machines.addresses, strict=True):
            _run("ip", "-n", name, "address", "add", f"{address}/30", "dev", name)
            _run("ip", "-n", name, "link", "set", name, "up")
            limit = ["tbf", "rate", RATE, "burst", "256kb", "latency", "50ms"]
            _run("tc", "-n", name, "qdisc", "add", "dev", name, "root", *limit)
        yield machines
    finally:
        for index, name in enumerate((a, b)):
            machines.kill(index)
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False, timeout=20)


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, check=True, text=True, timeout=20).stdout
