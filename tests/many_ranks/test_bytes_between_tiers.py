"""What crosses each link in a step is predicted from plan and layout, to the byte."""

from typing import Any

from support.models import build, data
from support.oracle import micro_batches
from support.ranks import run_ranks
from support.training import config, group, place


def homes(stage: int, folder: str) -> dict[str, dict[str, Any]]:
    disk, cpu = {"device": "nvme", "nvme_path": folder}, {"device": "cpu"}
    found = {"cpu": {"offload_optimizer": cpu}, "disk": {"offload_optimizer": disk}}
    if stage == 3:
        found["cpu, cpu"] = {"offload_optimizer": cpu, "offload_param": cpu}
        found["disk, cpu"] = {"offload_optimizer": disk, "offload_param": cpu}
        found["disk, disk"] = {"offload_optimizer": disk, "offload_param": disk}
    return found


def cross(folder: str) -> dict[str, tuple[Any, Any]]:
    """Bytes of the third step, predicted and counted, for every stage, home, precision and kind of device."""
    import shardledger as sl
    import shardledger.api as api
    from shardledger.ledger.tier_traffic import tier_bytes

    found = {}
    rank, world = place()
    with group():
        for stage in (0, 1, 2, 3):
            for home, zero in homes(stage, folder).items():
                for precision, apart in (("fp32", True), ("bf16", True), ("bf16", False)):
                    api._is_host_memory = lambda device, apart=apart: not apart
                    settings = config(stage, accumulation=2, zero=zero, precision=precision, optimizer="AdamW")
                    engine = sl.initialize(model=build("chain", 0), config=settings)[0]
                    parts = micro_batches(data("chain", 2 * world), rank, world, 2)
                    for _ in range(3):
                        before = engine.tier_traffic()
                        for part in parts:
                            engine.backward(engine(*part))
                            engine.step()
                    now = engine.tier_traffic()
                    counted = [
                        now[t][k] - before[t][k] for t in ("host", "disk") for k in ("read_bytes", "written_bytes")
                    ]
                    told = tier_bytes(
                        engine.plan, engine.layout, engine._account.optimizer_bytes, rank, one_memory=not apart
                    )
                    predicted = [told.to_host, told.to_device, told.disk_read, told.disk_written]
                    found[f"{stage} {home} {precision} {apart}"] = (predicted, counted)
                    engine.destroy()
    api._is_host_memory = lambda device: device.type == "cpu"
    return found


def test_every_byte_between_tiers_is_predicted(tmp_path):
    for found in run_ranks(cross, 2, str(tmp_path), timeout=120):
        wrong = {key: both for key, both in found.items() if both[0] != both[1]}
        assert wrong == {}
        assert any(sum(both[1]) for both in found.values())
