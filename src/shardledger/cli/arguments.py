"""The command line before it is read."""

from __future__ import annotations

from collections.abc import Sequence

RESUME = "--resume"
LATEST, AUTO = "latest", "auto"


def with_resume_value(arguments: Sequence[str]) -> list[str]:
    """The command line with ``--resume`` alone spelled out as ``--resume latest``."""
    spelled = []
    for index, argument in enumerate(arguments):
        spelled.append(argument)
        following = arguments[index + 1 : index + 2]
        if argument == RESUME and (not following or following[0].startswith("-")):
            spelled.append(LATEST)
    return spelled
