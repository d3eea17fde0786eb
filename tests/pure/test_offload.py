"""What offload takes off the device and puts elsewhere, from plan and layout alone."""

import pytest

from shardledger.config import load_config
from shardledger.layout.build import build_layout
from shardledger.ledger import OptimizerBytes, state_bytes
from shardledger.ledger.offload import OFFLOADS, OFFLOADS_OF_SHARDED_PARAMS, offloaded, with_offload
from shardledger.plan.build import build_plan
from shardledger.plan.spec import ModelSpec, ModuleSpec, ParameterSpec

ADAM = OptimizerBytes(per_element=8, per_piece=0, states=(4, 4))
EACH, BLOCKS = 1024, 8
LINK = 4 * 4096
"""Bytes that pass between host and device at once, of a model this small."""
PSI = EACH * BLOCKS


def model(frozen: int = 0) -> ModelSpec:
    parameters = tuple(
        ParameterSpec(name=f"blocks.{i}.w", shape=(EACH,), dtype="float32", trainable=i >= frozen)
        for i in range(BLOCKS)
    )
    modules = tuple(
        ModuleSpec(path=f"blocks.{i}", class_name="B", container="list", composite=True, parameters=(f"blocks.{i}.w",))
        for i in range(BLOCKS)
    )
    return ModelSpec(class_name="Net", parameters=parameters, modules=modules)


def moved(stage: int, choice: str, world: int = 4, precision: str = "bf16", frozen: int = 0, one_memory: bool = False):
    spec = model(frozen)
    config = load_config({"zero_optimization": {"stage": stage}, "bf16": {"enabled": precision == "bf16"}}, world=world)
    plan = build_plan(config, spec, world=world)
    layout = build_layout(plan, spec)
    found = offloaded(with_offload(plan, choice), layout, ADAM, 0, one_memory=one_memory)
    return found, state_bytes(plan, layout, ADAM, 0)


@pytest.mark.parametrize("stage", range(4))
def test_without_offload_nothing_moves(stage):
    found, _ = moved(stage, "none")
    assert set(found.device.values()) == {0} and (found.host, found.disk) == (0, 0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", range(4))
def test_what_stays_on_the_device_is_never_negative_and_what_left_is_elsewhere(stage, precision):
    for choice in OFFLOADS_OF_SHARDED_PARAMS if stage == 3 else OFFLOADS:
        for frozen in (0, 3, BLOCKS):
            found, held = moved(stage, choice, precision=precision, frozen=frozen)
            assert all(held[category] - found.device[category] >= 0 for category in held), (choice, frozen)
            assert found.host + found.disk >= sum(found.device.values()), (choice, frozen)


@pytest.mark.parametrize(
    ("stage", "choice", "device", "host"),
    [
        # bf16, Adam, 4 ranks; bytes per parameter. Masters 4, moments 8, summed gradients 4.
        (0, "optimizer:cpu", 2 + 4, 4 + 8),
        (1, "optimizer:cpu", 2 + 2, (4 + 8 + 4) / 4),
        (2, "optimizer:cpu", 2, (4 + 8 + 4) / 4),
        (3, "optimizer:cpu", 2 / 4, (4 + 8 + 4) / 4),
        (3, "optimizer:cpu+param:cpu", 0, (4 + 8 + 4) / 4),
    ],
)
def test_bytes_per_parameter(stage, choice, device, host):
    found, held = moved(stage, choice)
    assert sum(held.values()) - sum(found.device.values()) == device * PSI
    assert found.host == host * PSI + LINK and found.disk == 0


def test_the_disk_holds_masters_moments_and_narrow_shards_and_the_host_sums_and_buffers():
    shard = PSI // 4
    found, held = moved(3, "optimizer:nvme+param:nvme")
    tiles = BLOCKS * 4  # of a block each: master, two moments, a shard of bf16
    assert found.disk == 4096 * tiles
    assert found.host == 4 * shard + 3 * (4096 * 4) + 2 * 4096 + LINK
    assert sum(held.values()) - sum(found.device.values()) == 0


def test_on_a_cpu_host_memory_saves_nothing_and_the_disk_does():
    for stage in range(4):
        on_host, _ = moved(stage, "optimizer:cpu", one_memory=True)
        assert set(on_host.device.values()) <= {0} if stage < 3 else sum(on_host.device.values()) == -2 * PSI // 4
        on_disk, held = moved(stage, "optimizer:nvme", one_memory=True)
        share = PSI if stage == 0 else PSI // 4
        assert on_disk.device["optimizer"] == held["optimizer"] == 8 * share
        assert on_disk.device["communication"] == -3 * max(4096 * 3, 12 * share // BLOCKS) and on_disk.host == 0


def test_frozen_weights_leave_with_the_parameters_only():
    for choice, host in (("optimizer:cpu", 0), ("optimizer:cpu+param:cpu", 2 / 4)):
        found, held = moved(3, choice, frozen=BLOCKS)
        assert found.host == host * PSI + (LINK if host else 0)
        assert held["params"] - found.device["params"] == (2 / 4 - host) * PSI
