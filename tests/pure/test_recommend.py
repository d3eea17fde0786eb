"""Which stage a good engineer would choose: every scenario and every pitfall of the article, by name.

Model sizes are chosen so that exactly one thing is too large. States of this engine in bf16 with Adam, P parameters on N
ranks: 18P, 4P + 16P/N, 2P + 16P/N, 16P/N at stages 0 to 3.
"""

import pytest

from shardledger.ledger.fit import LITTLE_DATA, Situation, fits, halvings, with_micro_batch
from shardledger.ledger.recommend import Recommendation, recommend
from support.rows import GIB, rows_of


def advise(parameters, world, memory_gib, activations=1.0, **more) -> Recommendation:
    rows_options = {name: more.pop(name) for name in ("micro_batches", "framework") if name in more}
    rows = rows_of(parameters, world, activations=activations, **rows_options)
    adapter_rows = rows_of(parameters, world, activations=activations, frozen=0.995) if more.pop("adapters", 0) else ()
    situation = Situation(device_memory=int(memory_gib * GIB), world=world, parameters=int(parameters), **more)
    return recommend(rows, situation, adapter_rows=adapter_rows)


def choice(answer: Recommendation):
    assert answer.row is not None, answer.reason
    return answer.row.stage, answer.row.offload, answer.row.checkpointing, answer.row.micro_batch


# --- the scenarios -------------------------------------------------------------------------------------------------


def test_everything_fits_so_plain_data_parallelism():
    answer = advise(1e9, 8, 80)  # 16.8 GiB of states
    assert choice(answer) == (0, "none", False, 8)
    assert "Plain data parallelism fits" in answer.reason
    assert "18.3 GiB in backward of 80.0 GiB, 61.7 GiB free" in answer.reason


def test_optimizer_states_too_large_so_stage_1():
    answer = advise(7e9, 8, 80)  # 117 GiB; sharded optimizer: 39
    assert choice(answer) == (1, "none", False, 8)
    assert "masters and optimizer states are 78.2 GiB" in answer.reason
    assert "no byte more on the wire" in answer.reason


def test_gradients_too_large_as_well_so_stage_2():
    answer = advise(7e9, 8, 35)  # stage 1: 39 GiB; stage 2: 26
    assert choice(answer) == (2, "none", False, 8)
    assert "gradients are" in answer.reason


def test_parameters_do_not_fit_so_stage_3():
    answer = advise(13e9, 16, 24)  # stage 2: 36 GiB; stage 3: 12
    assert choice(answer) == (3, "none", False, 8)
    assert "parameters are 24.2 GiB" in answer.reason
    assert [answer.reason.count(f"Stage {stage} needs") for stage in (1, 2)] == [1, 1]


def test_stage_3_is_not_enough_so_the_optimizer_goes_to_the_host():
    answer = advise(13e9, 8, 24, host_memory=512 * GIB)
    assert choice(answer) == (3, "optimizer:cpu", False, 8)


def test_then_parameters_go_to_the_host():
    answer = advise(13e9, 2, 10, host_memory=1024 * GIB)  # 2 bytes / 2 ranks: 12.1 GiB of parameters
    assert choice(answer) == (3, "optimizer:cpu+param:cpu", False, 8)


def test_disk_only_where_the_host_is_too_small():
    answer = advise(13e9, 8, 24, host_memory=64 * GIB)
    assert choice(answer) == (3, "optimizer:nvme", False, 8)
    assert "more than its host memory" in answer.reason


def test_parameters_on_disk_come_last():
    answer = advise(13e9, 2, 10, host_memory=64 * GIB)
    assert choice(answer) == (3, "optimizer:nvme+param:nvme", False, 8)


def test_activations_are_the_problem_so_a_smaller_micro_batch_and_never_a_higher_stage():
    answer = advise(1e9, 8, 40, activations=80)
    assert choice(answer) == (0, "none", False, 2)
    assert "a higher stage is no cure" in answer.reason
    assert "micro-batch 2 instead of 8 (with 4 times the accumulation steps the global batch stays)" in answer.reason


def test_where_one_sample_is_too_much_activations_are_recomputed():
    answer = advise(1e9, 8, 40, activations=60, micro_batches=(1,))
    assert choice(answer) == (0, "none", True, 1)
    assert "recomputing activations in backward (about a third more computing)" in answer.reason


def test_little_task_data_so_adapters_first():
    answer = advise(7e9, 8, 24, task_samples=500, adapters=True)
    assert answer.adapters
    assert answer.reason.startswith("500 samples are little")
    assert choice(answer)[:2] == (0, "none")  # 13 GiB of frozen weights and next to nothing beside


def test_little_data_without_adapter_rows_is_at_least_said():
    assert "--trainable lora:r=16" in advise(7e9, 8, 80, task_samples=500).reason


@pytest.mark.parametrize(("samples", "parameters"), [(LITTLE_DATA, 7e9), (500, 5e7), (None, 7e9)])
def test_enough_data_or_a_small_model_needs_no_adapters(samples, parameters):
    answer = advise(parameters, 8, 80, task_samples=samples, adapters=True)
    assert not answer.adapters
    assert "LoRA" not in answer.reason


def test_one_machine_with_a_slow_link_avoids_stage_3():
    fast = advise(13e9, 4, 58, bandwidth=400e9)  # stage 2: 72.6 GiB, stage 3: 48.4
    slow = advise(13e9, 4, 58, bandwidth=16e9, host_memory=1024 * GIB)
    assert choice(fast)[:2] == (3, "none")
    assert choice(slow)[:2] == (2, "optimizer:cpu")
    assert "On one machine with 16 GB/s between ranks, stage 3 is avoided" in slow.reason


def test_with_a_slow_link_stage_3_is_still_better_than_nothing():
    answer = advise(70e9, 32, 60, bandwidth=16e9)
    assert choice(answer)[:2] == (3, "none")
    assert "Only stage 3 fits" in answer.reason


@pytest.mark.parametrize(("tokens", "stage"), [(2_000, 2), (200_000, 3)])
def test_whether_a_link_is_slow_is_a_matter_of_tokens_where_the_speed_is_known(tokens, stage):
    answer = advise(13e9, 4, 58, bandwidth=50e9, flops=445e12, tokens=tokens, host_memory=1024 * GIB)
    assert choice(answer)[0] == stage


# --- the pitfalls --------------------------------------------------------------------------------------------------


def test_pitfall_counting_states_only():
    # States of stage 0 alone (16.8 GiB) fit 20 GiB; with activations and framework they do not.
    answer = advise(1e9, 8, 20, activations=6)
    assert choice(answer)[0] == 1


def test_pitfall_the_highest_stage_by_default():
    assert choice(advise(1e8, 64, 80))[0] == 0


def test_pitfall_offload_before_sharding():
    rows = rows_of(7e9, 8, activations=1)
    situation = Situation(device_memory=80 * GIB, world=8, parameters=7 * 10**9)
    assert any(fits(row, situation) for row in rows if row.stage == 0 and row.offload == "optimizer:cpu")
    assert choice(recommend(rows, situation))[:2] == (1, "none")


def test_pitfall_sharding_over_one_rank():
    answer = advise(7e9, 1, 60)
    assert choice(answer)[:2] == (0, "optimizer:cpu")
    assert "With one rank there is nobody to shard with" in answer.reason


def test_pitfall_stage_3_although_parameters_fit():
    # Stage 2: 26 GiB of states and 14 of activations on 36 GiB. Stage 3 would fit, at half as much traffic again.
    answer = advise(7e9, 8, 36, activations=14)
    assert choice(answer) == (2, "none", False, 4)
    assert "they need no stage 3" in answer.reason


def test_pitfall_host_memory_counted_per_rank():
    # 12.2 GiB a rank fit 64 GiB, but eight ranks share the machine.
    assert choice(advise(7e9, 8, 12, host_memory=64 * GIB))[1] == "optimizer:nvme"
    assert choice(advise(7e9, 8, 12, host_memory=64 * GIB, ranks_per_machine=4))[1] == "optimizer:cpu"


def test_pitfall_gigabytes_are_not_gibibytes():
    # 30.3 GiB are 32.5 GB: they fit a device of 32 GiB and not one of 32 GB.
    rows = rows_of(7e9, 64, activations=1, framework=1.6)
    row = next(r for r in rows if r.stage == 1 and not r.checkpointing and r.offload == "none")
    assert 32e9 < row.total < 32 * GIB
    for memory, fit in ((32 * GIB, True), (32 * 10**9, False)):
        assert fits(row, Situation(device_memory=memory, world=64, parameters=7 * 10**9)) is fit


def test_pitfall_a_plan_that_just_fits_is_called_tight():
    assert "headroom is tight" in advise(1e9, 8, 18.5).reason
    assert "headroom is tight" not in advise(1e9, 8, 40).reason


def test_pitfall_raising_the_stage_for_frozen_models():
    # Frozen weights are in no optimizer: stages 1 and 2 save next to nothing, only stage 3 shards them.
    rows = rows_of(13e9, 8, activations=1, frozen=0.999)
    answer = recommend(rows, Situation(device_memory=16 * GIB, world=8, parameters=13 * 10**9))
    assert choice(answer)[:2] == (3, "none")


# --- when nothing fits ---------------------------------------------------------------------------------------------


def test_when_nothing_fits_it_says_what_is_missing():
    answer = advise(700e9, 2, 8, activations=200, micro_batches=(1,), host_memory=64 * GIB)
    assert answer.row is None
    assert answer.missing_bytes == int(20.5 * GIB) - 8 * GIB  # recomputed activations and the framework remain
    assert "Nothing fits" in answer.reason and "12.5 GiB of device memory" in answer.reason


def test_a_choice_between_planned_micro_batches_is_exact_and_between_others_an_estimate():
    planned = advise(1e9, 8, 40, activations=80, micro_batches=(8, 4, 2, 1))
    scaled = advise(1e9, 8, 40, activations=80)
    assert choice(planned) == choice(scaled)
    assert (planned.estimated, scaled.estimated) == (False, True)
    assert "plan with micro-batch 2" in scaled.reason


def test_scaling_keeps_the_sum():
    for row in rows_of(1e9, 8, activations=3.3):
        for size in halvings(8):
            scaled = with_micro_batch(row, size)
            parts = ("params", "grads", "master", "optimizer", "activations", "communication", "temporary", "framework")
            assert scaled.total == sum(getattr(scaled, part) for part in parts)
    assert halvings(13) == [13, 6, 3, 1]


@pytest.mark.parametrize("memory", [4, 8, 16, 24, 40, 80, 160])
@pytest.mark.parametrize("world", [1, 2, 8, 64])
@pytest.mark.parametrize("activations", [0.5, 10, 100])
def test_whatever_is_recommended_fits_and_nothing_is_only_said_when_nothing_does(memory, world, activations):
    for parameters in (1e8, 1e9, 7e9, 70e9):
        answer = advise(parameters, world, memory, activations=activations, host_memory=512 * GIB)
        situation = Situation(
            device_memory=memory * GIB, world=world, parameters=int(parameters), host_memory=512 * GIB
        )
        if answer.row is not None:
            assert fits(answer.row, situation)
            assert answer.reasons
        else:
            rows = rows_of(parameters, world, activations=activations)
            assert not any(fits(with_micro_batch(row, 1), situation) for row in rows)
            assert answer.missing_bytes > 0 or answer.missing_host_bytes > 0
