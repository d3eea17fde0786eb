"""What offload takes off the device and puts elsewhere, from plan and layout alone."""

import pytest

from shardledger.config import load_config
from shardledger.layout.build import build_layout
from shardledger.ledger import OptimizerBytes, state_bytes
from shardledger.ledger.away import offloaded_to_disk
from shardledger.ledger.offload import OFFLOADS, OFFLOADS_OF_SHARDED_PARAMS, offloaded
from shardledger.plan.build import build_plan
from shardledger.plan.spec import ModelSpec, ModuleSpec, ParameterSpec

ADAM = OptimizerBytes(per_element=8, per_piece=0)
EACH, BLOCKS = 1024, 8
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


def moved(stage: int, choice: str, world: int = 4, precision: str = "bf16", frozen: int = 0):
    spec = model(frozen)
    config = load_config({"zero_optimization": {"stage": stage}, "bf16": {"enabled": precision == "bf16"}}, world=world)
    plan = build_plan(config, spec, world=world)
    layout = build_layout(plan, spec)
    return offloaded(plan, layout, ADAM, 0, choice), state_bytes(plan, layout, ADAM, 0)


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
            elsewhere = found.disk if "nvme" in choice else found.host
            assert elsewhere >= sum(found.device.values()), (choice, frozen)


@pytest.mark.parametrize(
    ("stage", "choice", "device", "host"),
    [
        # bf16, Adam, 4 ranks; bytes per parameter. Masters 4, moments 8, summed gradients 4.
        (0, "optimizer:cpu", 2 + 4, 4 + 8 + 4),
        (1, "optimizer:cpu", 2 + 2, (4 + 8 + 4) / 4),
        (2, "optimizer:cpu", 2, (4 + 8 + 4) / 4),
        (3, "optimizer:cpu", 2 / 4, (4 + 8 + 4) / 4),
        (3, "optimizer:cpu+param:cpu", 0, (4 + 8 + 4) / 4),
    ],
)
def test_bytes_per_parameter(stage, choice, device, host):
    found, held = moved(stage, choice)
    assert sum(held.values()) - sum(found.device.values()) == device * PSI
    assert found.host == host * PSI and found.disk == 0


def test_disk_holds_what_the_host_would_and_the_host_stages_two_flats():
    on_host, _ = moved(3, "optimizer:cpu+param:cpu")
    on_disk, _ = moved(3, "optimizer:nvme+param:nvme")
    assert on_disk.disk == on_host.host and on_disk.device == on_host.device
    assert on_disk.host == 2 * on_host.host // BLOCKS


def test_frozen_weights_leave_with_the_parameters_only():
    for choice, host in (("optimizer:cpu", 0), ("optimizer:cpu+param:cpu", 2 / 4)):
        found, held = moved(3, choice, frozen=BLOCKS)
        assert found.host == host * PSI
        assert held["params"] - found.device["params"] == (2 / 4 - host) * PSI


@pytest.mark.parametrize(
    ("stage", "choice", "leaves"), [(2, "optimizer:nvme", 12), (3, "optimizer:nvme+param:nvme", 12)]
)
def test_where_ranks_compute_in_host_memory_a_disk_takes_states_away_and_its_buffers_stay(stage, choice, leaves):
    optimizer = OptimizerBytes(per_element=8, per_piece=0, states=(4, 4))
    spec = model()
    plan = build_plan(
        load_config({"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}, world=4), spec, world=4
    )
    found = offloaded_to_disk(plan, build_layout(plan, spec), optimizer, 0, choice)
    # Masters and moments of a rank's quarter; three tiles (one per block: one whole block's quarter) wait in memory.
    quarter = PSI // 4
    assert found.device["master"] + found.device["optimizer"] == leaves * quarter
    assert found.host == 0 and found.disk >= leaves * quarter
    assert found.device["temporary"] < 0  # the buffers
    assert offloaded_to_disk(plan, build_layout(plan, spec), optimizer, 0, "none").disk == 0
