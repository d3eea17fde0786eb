"""Says once when training waits for a tier that states rest on, and how much."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_WORTH_SAYING = 0.2
"""Share of a step."""

_STEPS = 3
"""The first steps make states and learn orders; these come after them."""


@dataclass
class Bottleneck:
    """Watches the first steps of a run."""

    steps: int = 0
    seconds: float = 0.0
    said: bool = False

    def look(self, step_s: float, tiers: Mapping[str, Mapping[str, float]]) -> str | None:
        """What to print after a step; None: nothing (any more).

        Args:
            step_s: seconds of the step.
            tiers: of each tier, ``wait_s``, ``read_bytes``, ``written_bytes`` and ``busy_s`` of the step.
        """
        self.steps += 1
        if self.said or self.steps < _STEPS or step_s <= 0:
            return None
        self.said = True
        name, tier = max(tiers.items(), key=lambda item: item[1]["wait_s"])
        share = tier["wait_s"] / step_s
        if share < _WORTH_SAYING:
            return None
        moved = tier["read_bytes"] + tier["written_bytes"]
        without = step_s - tier["wait_s"]
        link = {"host": "the link to host memory", "disk": "the disk"}[name]
        cure = "fewer steps (gradient_accumulation_steps), offload of a part (offload_optimizer.ratio)"
        faster = ", or cpu instead of nvme" if name == "disk" else ""
        return (
            f"offload is the bottleneck: {share:.0%} of the step waits for {link} ({tier['read_bytes'] / 1e9:.2f} GB read "
            f"and {tier['written_bytes'] / 1e9:.2f} GB written a step on rank 0, {moved / step_s / 1e9:.2f} GB/s). Without "
            f"the wait a step would take {without:.2f} s instead of {step_s:.2f} s. What helps: {cure}{faster}."
        )
