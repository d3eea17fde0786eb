"""What an engine's user asks of the tiers: states sent away for a while, and what moved between tiers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from shardledger.errors import EngineStateError
from shardledger.runtime.put_away import put_away

if TYPE_CHECKING:
    from shardledger.runtime.assemble import Parts


class OffloadCalls:
    """Part of ``Engine``."""

    _parts: Parts | None

    def _live(self) -> Parts:
        raise NotImplementedError

    def offload_states(
        self,
        include: Iterable[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
        nvme_path: str | None = None,
    ) -> None:
        """Free the memory of states until ``reload_states``, which the engine must not be used before; collective.

        Args:
            include: any of ``"optim_states"``, ``"hp_params"`` (masters), ``"lp_params"`` (weights) and ``"lp_grads"``;
                None: all. Masters that are the weights themselves (fp32) go with ``"lp_params"``.
            device: ``"cpu"`` (host memory), or ``"nvme"``.
            pin_memory: host copies of a GPU's states are page-locked.
            non_blocking: taken for DeepSpeed's sake; the memory is free when this returns.
            nvme_path: folder for ``"nvme"``; None: that of the configuration's offload.

        Raises:
            ConfigError: an unknown name or device, or a folder that cannot be used.
            DoesNotFitError: the disk is too small.
            EngineStateError: it is not the time between two steps.
        """
        parts = self._live()
        parts.put_away = put_away(parts, include, device, pin=pin_memory, nvme_path=nvme_path)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what ``offload_states`` has sent away; without that it does nothing.

        Raises:
            EngineStateError: the disk failed; the engine cannot be used any more.
        """
        if self._parts is None:
            raise EngineStateError("this engine was destroyed: call shardledger.initialize again.")
        if self._parts.put_away is not None:
            self._parts.put_away.bring_back()
            self._parts.put_away = None  # after it: where the disk fails, what came back is no state to go on with

    def tier_traffic(self) -> dict[str, dict[str, float]]:
        """Bytes moved between this rank's memory and each tier that states rest on, and seconds it waited for them.

        ``"host"`` and ``"disk"``: ``read_bytes`` (towards the computation), ``written_bytes``, ``wait_s`` and ``busy_s``
        (of all threads together), since initialize. Zeros without offload.
        """
        offload = self._live().offload
        if offload is None:
            none = {"read_bytes": 0.0, "written_bytes": 0.0, "wait_s": 0.0, "busy_s": 0.0}
            return {"host": none, "disk": dict(none)}
        return {"host": offload.tiers.host.to_dict(), "disk": offload.tiers.disk.to_dict()}
