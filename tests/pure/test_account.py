"""The account of states alone: the papers' numbers to the last printed digit, and the engine's own exact bytes."""

import pytest

from shardledger.config import load_config
from shardledger.layout.build import build_layout
from shardledger.ledger import OptimizerBytes, state_bytes
from shardledger.ledger.account import OPTIMIZER_BYTES, States, gathered_bytes, state_account, state_accounts
from shardledger.ledger.traffic import Speed, Wire, sent_bytes, step_time
from shardledger.plan.build import build_plan
from shardledger.plan.spec import ModelSpec, ModuleSpec, ParameterSpec

#: ZeRO, arXiv 1910.02054, table 1: ranks -> (model -> GB at stages 1, 2, 3), as printed.
TABLE_1 = {
    1: (("7.5e9", "120 120 120"), ("128e9", "2048 2048 2048"), ("1e12", "16000 16000 16000")),
    4: (("7.5e9", "52.5 41.3 30"), ("128e9", "896 704 512"), ("1e12", "7000 5500 4000")),
    16: (("7.5e9", "35.6 21.6 7.5"), ("128e9", "608 368 128"), ("1e12", "4750 2875 1000")),
    64: (("7.5e9", "31.4 16.6 1.88"), ("128e9", "536 284 32"), ("1e12", "4187 2218 250")),
    256: (("7.5e9", "30.4 15.4 0.47"), ("128e9", "518 263 8"), ("1e12", "4046 2054 62.5")),
    1024: (("7.5e9", "30.1 15.1 0.12"), ("128e9", "513 257 2"), ("1e12", "4011 2013 15.6")),
}
CELLS = [
    (world, parameters, stage, cell)
    for world, models in TABLE_1.items()
    for parameters, cells in models
    for stage, cell in enumerate(cells.split(), 1)
]


def test_the_table_has_54_cells():
    assert len(CELLS) == 54


@pytest.mark.parametrize(("world", "parameters", "stage", "cell"), CELLS)
def test_every_cell_of_zeros_table_1_is_reproduced(world, parameters, stage, cell):
    account = state_account(States(parameters=int(float(parameters)), world=world), stage)
    digit = 10.0 ** -len(cell.partition(".")[2])  # one unit of the last printed digit: the table cuts and rounds
    assert abs(account.total / 1e9 - float(cell)) < digit


@pytest.mark.parametrize(
    ("billions", "world", "gib"),
    [
        (13, 8, (193.7, 66.6, 45.4, 24.2)),
        (1, 1, (14.9,) * 4),
        (7, 1, (104.3,) * 4),
        (13, 1, (193.7,) * 4),
        (70, 1, (1043.1,) * 4),
    ],
)
def test_sixteen_bytes_a_parameter_in_gibibytes(billions, world, gib):
    states = States(parameters=billions * 10**9, world=world)
    assert [round(state_account(states, stage).total / 2**30, 1) for stage in range(4)] == list(gib)


def test_without_masters_twelve_bytes_a_parameter():
    assert state_account(States(parameters=10**9, world=1, master=False), 0).total == 12 * 10**9


def test_fp32_needs_no_masters_and_costs_sixteen_bytes():
    account = state_account(States(parameters=1000, world=1, precision="fp32"), 0)
    assert (account.params, account.grads, account.master, account.optimizer) == (4000, 4000, 0, 8000)


def test_frozen_parameters_cost_their_weights_alone():
    account = state_account(States(parameters=1000, world=4, frozen=0.9), 1)
    assert (account.params, account.grads, account.master, account.optimizer) == (2000, 200, 100, 200)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZER_BYTES))
def test_offload_moves_bytes_and_loses_none(stage, optimizer):
    states = States(parameters=64_000, world=8, optimizer=optimizer)
    rows = [account for account in state_accounts(states) if account.stage == stage]
    bare = rows[0]
    assert bare.offload == "none"
    for row in rows[1:]:
        away = row.host_bytes + row.disk_bytes
        assert row.total < bare.total
        assert row.total + away >= bare.total
        assert (row.disk_bytes == 0) == ("nvme" not in row.offload)
    if stage == 3:  # everything is sharded, so nothing is kept twice
        assert all(row.total + row.host_bytes + row.disk_bytes == bare.total for row in rows)


def model(blocks: int, frozen: int) -> ModelSpec:
    """Blocks of 64 × 100 elements, the first ones frozen."""
    names = [f"blocks.{i}" for i in range(blocks)]
    parameters = tuple(
        ParameterSpec(name=f"{name}.weight", shape=(64, 100), dtype="float32", trainable=i >= frozen)
        for i, name in enumerate(names)
    )
    modules = tuple(
        ModuleSpec(path=name, class_name="Block", container="list", composite=True, parameters=(f"{name}.weight",))
        for name in names
    )
    return ModelSpec(class_name="Model", parameters=parameters, modules=modules)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("stage", range(4))
def test_engine_total_is_what_the_ledger_predicts_for_a_plan(stage, precision, accumulation):
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {}},
        **({precision: {"enabled": True}} if precision != "fp32" else {}),
    }
    spec = model(blocks=10, frozen=3)
    plan = build_plan(load_config(settings, world=4), spec, world=4)
    bytes_kept = state_bytes(plan, build_layout(plan, spec), OptimizerBytes(8, 0), 0)
    states = States(parameters=spec.numel, world=4, precision=precision, frozen=0.3, accumulation=accumulation)
    # 6,400 elements are a multiple of 4 ranks x 8 elements: there is no padding, so the formula is exact.
    assert dict(state_account(states, stage).engine) == bytes_kept


def test_bytes_sent_follow_the_formulas():
    wire = Wire(trained=1000, frozen=0, weight_bytes=2, gradient_bytes=2, accumulation=3)
    assert [sent_bytes(stage, 4, wire) for stage in range(4)] == [4500, 3000, 6000, 13500]  # stage 0 gathers fp32 sums
    assert sent_bytes(3, 1, wire) == 0
    frozen = Wire(trained=0, frozen=1000, weight_bytes=2, gradient_bytes=2)
    assert [sent_bytes(stage, 4, frozen) for stage in range(4)] == [0, 0, 0, 3000]


@pytest.mark.parametrize("parameters", [10**8, 7 * 10**9])
def test_stage_3_hides_its_traffic_above_so_many_tokens_whatever_the_model(parameters):
    # 445 TFLOP/s against 50 GB/s and 400 GB/s: 8,900 and 1,112 tokens per rank, for large worlds.
    sent = sent_bytes(3, 10**6, Wire(trained=parameters, frozen=0, weight_bytes=2, gradient_bytes=2))
    slow = step_time(sent, parameters, 8000, Speed(bandwidth=50e9, flops=445e12))
    fast = step_time(sent, parameters, 8000, Speed(bandwidth=400e9, flops=445e12))
    assert slow.tokens_to_hide == pytest.approx(8900, abs=2) and not slow.hidden
    assert fast.tokens_to_hide == pytest.approx(1112, abs=2) and fast.hidden
    assert slow.bound_s == pytest.approx(sent / 50e9)
    assert fast.bound_s == pytest.approx(6 * parameters * 8000 / 445e12)


def test_a_gathered_layer_is_about_that_of_a_llama():
    states = States(parameters=6_738_000_000, world=8)
    assert gathered_bytes(states) == pytest.approx(2 * 2 * 202_000_000, rel=0.1)
    assert gathered_bytes(States(parameters=10, world=8)) <= 40
