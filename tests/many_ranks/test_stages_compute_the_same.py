"""Stages 0-3 equal one process, and each other bit for bit, in fp32 and bf16, whatever the buckets and the overlap."""

import functools
import itertools

import pytest

from support.models import build, data
from support.oracle import Reference, largest_difference, make_optimizer, reference, reference_bf16, same_bits
from support.ranks import run_ranks
from support.training import Job, Outcome, config, mean_losses, train_all

STAGES = (0, 1, 2, 3)
MODELS = ("regressor", "transformer", "untied", "frozen", "awkward", "chain")
OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
}


@functools.cache
def one_process(model: str, optimizer: str = "SGD", clip: float = 0.0, **options: float) -> Reference:
    """The reference run of a model by name."""
    options = options or {"lr": 0.1}
    return reference(build(model), data(model, 12), make_optimizer(optimizer, **options), clip=clip)


def run(jobs: dict[object, Job], world: int, timeout: float = 150) -> dict[object, list[Outcome]]:
    """All jobs in one go; key -> outcomes by rank."""
    by_rank = run_ranks(train_all, world, list(jobs.values()), timeout=timeout)
    return {key: [outcomes[i] for outcomes in by_rank] for i, key in enumerate(jobs)}


def differing(runs: dict[object, list[Outcome]]) -> dict[object, object]:
    """What is not bit for bit equal to the first run: key -> names of weights, or the losses."""
    first = next(iter(runs.values()))
    wrong: dict[object, object] = {}
    for key, outcomes in runs.items():
        names = same_bits(outcomes[0].weights, first[0].weights)
        losses = [outcome.losses for outcome in outcomes]
        if names or losses != [outcome.losses for outcome in first]:
            wrong[key] = names or ("losses", losses)
    return wrong


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_stage_equals_one_process_in_fp32(world):
    jobs = {(model, stage): Job(model, config(stage)) for model in MODELS for stage in STAGES}
    runs = run(jobs, world)
    for model in MODELS:
        right = one_process(model)
        for stage in STAGES:
            outcomes = runs[model, stage]
            where = f"{model}, stage {stage}, world {world}"
            assert largest_difference(outcomes[0].weights, right.weights) <= 1e-6, where
            assert mean_losses(outcomes) == pytest.approx(right.losses, rel=1e-5), where
            for outcome in outcomes:
                assert outcome.norms == pytest.approx(right.norms, rel=1e-5), where
            assert [o.weights for o in outcomes[1:]] == [{}] * (world - 1), where
        assert differing({stage: runs[model, stage] for stage in STAGES}) == {}, f"{model}, world {world}"


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_stages_buckets_and_overlap_do_not_change_a_bit(world, optimizer):
    # Every bucket is a round trip: the finest ones are for the smallest model.
    for model, buckets in (("regressor", (1, 7, int(5e8))), ("transformer", (64, int(5e8)))):
        jobs = {}
        for stage, bucket in itertools.product(STAGES, buckets):
            for overlap in (True, False) if stage in (0, 3) else (True,):
                zero = {"reduce_bucket_size": bucket, "overlap_comm": overlap}
                settings = config(stage, optimizer=optimizer, optimizer_params=OPTIMIZERS[optimizer], zero=zero)
                jobs[stage, bucket, overlap] = Job(model, settings, steps=3)
        assert differing(run(jobs, world)) == {}, model


@pytest.mark.parametrize("world", [2, 3])
def test_many_steps_of_adamw_do_not_drift_apart_by_a_bit(world):
    # A fused kernel may round the last elements of a tensor otherwise: every stage must cut parameters alike.
    options = OPTIMIZERS["AdamW"]
    jobs = {s: Job("transformer", config(s, optimizer="AdamW", optimizer_params=options), steps=20) for s in STAGES}
    assert differing(run(jobs, world)) == {}


@pytest.mark.parametrize("world", [1, 3])
def test_adamw_equals_one_process(world):
    # A larger eps: where a gradient is zero but for rounding, Adam would turn the rounding into a full step.
    options = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4}
    jobs = {
        (model, stage): Job(model, config(stage, optimizer="AdamW", optimizer_params=options))
        for model in ("transformer", "awkward", "frozen")
        for stage in STAGES
    }
    for (model, stage), outcomes in run(jobs, world).items():
        right = one_process(model, "AdamW", **options)
        assert largest_difference(outcomes[0].weights, right.weights) <= 1e-5, (model, stage)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_bf16_stages_are_bitwise_equal_and_close_to_the_naive_loop(world):
    jobs = {
        (optimizer, stage): Job(
            "transformer", config(stage, optimizer=optimizer, optimizer_params=options, precision="bf16")
        )
        for (optimizer, options), stage in itertools.product(OPTIMIZERS.items(), STAGES)
    }
    runs = run(jobs, world)
    for optimizer, options in OPTIMIZERS.items():
        assert differing({stage: runs[optimizer, stage] for stage in STAGES}) == {}, optimizer
        right = reference_bf16(build("transformer"), data("transformer", 12), make_optimizer(optimizer, **options))
        outcomes = runs[optimizer, 3]
        assert mean_losses(outcomes) == pytest.approx(right.losses, rel=2e-2)
        kinds = {str(value.dtype) for value in outcomes[0].weights.values()}
        assert kinds == {"torch.float32"}, "state_dict holds the fp32 masters"


@pytest.mark.parametrize("world", [1, 2])
def test_how_the_batch_is_split_into_micro_batches_does_not_matter(world):
    splits = [a for a in (1, 2, 3) if 12 % (world * a) == 0]
    jobs = {
        (model, stage, split): Job(model, config(stage, accumulation=split))
        for model in ("transformer", "awkward", "frozen")
        for stage in STAGES
        for split in splits
    }
    for (model, stage, split), outcomes in run(jobs, world).items():
        right = one_process(model)
        where = f"{model}, stage {stage}, accumulation {split}"
        assert largest_difference(outcomes[0].weights, right.weights) <= 1e-6, where
        assert mean_losses(outcomes) == pytest.approx(right.losses, rel=1e-5), where
        assert outcomes[0].norms == pytest.approx(right.norms, rel=1e-5), where


@pytest.mark.parametrize("world", [1, 2, 4])
def test_clipping_is_by_the_true_global_norm(world):
    jobs = {
        (clip, stage): Job("transformer", config(stage, gradient_clipping=clip))
        for clip in (0.5, 100.0)
        for stage in STAGES
    }
    runs = run(jobs, world)
    for clip in (0.5, 100.0):
        right = one_process("transformer", clip=clip)
        for stage in STAGES:
            outcomes = runs[clip, stage]
            assert largest_difference(outcomes[0].weights, right.weights) <= 1e-6, (clip, stage)
            assert outcomes[-1].norms == pytest.approx(right.norms, rel=1e-5), (clip, stage)
        assert differing({stage: runs[clip, stage] for stage in STAGES}) == {}, clip


def test_sums_of_gradients_on_request():
    jobs = {stage: Job("regressor", config(stage, lr=0.05, gradient_allreduce_op="sum")) for stage in STAGES}
    right = one_process("regressor")
    for stage, outcomes in run(jobs, 2).items():
        assert largest_difference(outcomes[0].weights, right.weights) <= 1e-6, stage


@pytest.mark.parametrize("world", [2])
def test_recomputing_activations_changes_no_bit(world):
    jobs = {
        (model, stage, recompute): Job(
            model, config(stage, accumulation=2, shardledger={"activation_checkpointing": recompute})
        )
        for model in ("transformer", "chain", "frozen")
        for stage in STAGES
        for recompute in (False, True)
    }
    runs = run(jobs, world)
    for model, stage in itertools.product(("transformer", "chain", "frozen"), STAGES):
        assert differing({on: runs[model, stage, on] for on in (False, True)}) == {}, (model, stage)


def test_prefetching_changes_no_bit():
    jobs = {on: Job("transformer", config(3, shardledger={"prefetch": on})) for on in (True, False)}
    assert differing(run(jobs, 3)) == {}


def test_the_wire_changes_no_bit():
    """A wide model, so that payloads are copied from memory to memory and not with their headers."""
    for precision, bucket in (("fp32", 5e8), ("bf16", 9000)):
        zero = {"reduce_bucket_size": int(bucket)}
        jobs = {
            (wire, stage): Job(
                "wide",
                config(stage, optimizer="AdamW", precision=precision, zero=zero, shardledger={"transport": wire}),
            )
            for stage in STAGES
            for wire in ("gloo", "shared_memory")
        }
        runs = run(jobs, 3)
        for stage in STAGES:
            assert differing({wire: runs[wire, stage] for wire in ("gloo", "shared_memory")}) == {}, (precision, stage)
