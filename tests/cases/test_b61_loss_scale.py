"""B61: fp16: the loss scale falls to its minimum without a hint where the non-finite values come from; and its neighbours."""

import itertools
import warnings

import pytest
import torch
from torch import nn

from support.ranks import run_ranks
from support.training import config, group

STAGES = (0, 1, 2, 3)


class Product(nn.Module):
    """loss = w * x: the gradient is x, and -w after a step of lr 1 is the gradient that was applied."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))

    def forward(self, x):
        return (self.w * x).sum()


class Overflows(nn.Module):
    """A Linear whose weight of 1e5 is infinite in fp16: so is every gradient, from the first layer on."""

    def __init__(self):
        super().__init__()
        self.fine = nn.Linear(4, 4)
        self.huge = nn.Linear(4, 1, bias=False)
        nn.init.constant_(self.huge.weight, 1e5)

    def forward(self, x):
        return self.huge(self.fine(x)).square().mean()


def settings(stage, fp16, **more):
    return {**config(stage, **more), "fp16": {"enabled": True, **fp16}}


def start(model, stage, fp16, **more):
    import shardledger as sl

    return sl.initialize(model=model, config=settings(stage, fp16, **more))[0]


def overflow_until_the_end():
    import shardledger as sl

    found = {}
    with group():
        for stage in STAGES:
            torch.manual_seed(0)
            engine = start(
                Overflows(),
                stage,
                {"initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1},
                optimizer="AdamW",
                scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 0.1}},
            )
            before = engine.state_dict(all_ranks=True)
            rate, scales, error = engine.get_lr(), [], ""
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                while not error and len(scales) < 30:
                    scales.append(engine.loss_scale)
                    try:
                        engine.backward(engine(torch.ones(2, 4)))
                        engine.step()
                    except sl.EngineStateError as caught:
                        error = str(caught)
            after = engine.state_dict(all_ranks=True)
            found[stage] = {
                "scales": scales,
                "error": error,
                "counters": (engine.global_steps, engine.skipped_steps),
                "rates": (rate, engine.get_lr()),
                "moved": [name for name in before if not torch.equal(before[name], after[name])],
                "states": sum(len(state) for state in engine.optimizer.state.values()),
            }
            engine.destroy()
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_the_scale_falls_step_by_step_and_at_the_minimum_the_cause_is_named(world):
    right = [65536.0, 65536.0] + [2.0**power for power in range(15, -1, -1)]
    for found in run_ranks(overflow_until_the_end, world):
        for stage, seen in found.items():
            assert seen["scales"] == right, f"stage {stage}"
            for words in ("minimum", "fine.weight", "rank 0", "bf16"):
                assert words in seen["error"], f"stage {stage}: {seen['error']}"
            assert "NaN" in seen["error"] or "inf" in seen["error"]
            assert seen["counters"] in ((0, len(right)), (0, len(right) - 1)), f"stage {stage}"
            assert seen["rates"][0] == seen["rates"][1]
            assert seen["moved"] == [], f"stage {stage}"
            assert seen["states"] == 0, f"stage {stage}: skipped steps made optimizer states"


# --- the scale that multiplied the loss divides the gradient ----------------------------------------------------------


def grow(accumulation, plain_backward):
    found = {}
    with group():
        for stage in STAGES:
            engine = start(
                Product(), stage, {"initial_scale_power": 4, "loss_scale_window": 2}, lr=1.0, accumulation=accumulation
            )
            scales, applied, norms, last = [], [], [], 0.0
            for _ in range(6):
                scales.append(engine.loss_scale)
                for _ in range(accumulation):
                    loss = engine(torch.tensor([1.0, 2.0, 2.0]))
                    if plain_backward:
                        engine.scale(loss).backward()
                    else:
                        assert engine.backward(loss) is loss
                    engine.step()
                now = float(engine.state_dict(all_ranks=True)["w"][0])
                applied.append(last - now)
                norms.append(engine.get_global_grad_norm())
                last = now
            found[stage] = (scales, applied, norms)
            engine.destroy()
    return found


@pytest.mark.parametrize("plain_backward", [False, True])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_step_on_which_the_scale_grows_is_a_whole_step(accumulation, plain_backward):
    for found in run_ranks(grow, 2, accumulation, plain_backward):
        for stage, (scales, applied, norms) in found.items():
            assert scales[0] == 16 and scales[-1] > 32, f"stage {stage}: {scales}"
            assert scales == sorted(scales)
            assert applied == pytest.approx([1.0] * 6, rel=1e-6), f"stage {stage}: 0.5 is the halved update"
            assert norms == pytest.approx([3.0] * 6, rel=1e-6), f"stage {stage}"


def overflow_once(fp16, bad, world_rank):
    """The gradient overflows in the second step, on one rank only."""
    from support.training import place

    found = {}
    rank, _ = place()
    with group():
        for stage in STAGES:
            engine = start(Product(), stage, fp16, lr=1.0)
            seen = []
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for step in range(4):
                    x = torch.ones(3)
                    if step == 1 and rank == world_rank:
                        x[1] = bad
                    engine.backward(engine(x))
                    engine.step()
                    seen.append((engine.loss_scale, engine.skipped_steps, engine.was_step_applied()))
            weights = engine.state_dict(all_ranks=True)["w"].tolist()
            found[stage] = (seen, weights, " ".join(str(w.message) for w in caught))
            engine.destroy()
    return found


@pytest.mark.parametrize(
    ("fp16", "right"),
    [
        ({"initial_scale_power": 4, "hysteresis": 1}, [16.0, 8.0, 8.0, 8.0]),
        ({"initial_scale_power": 4, "hysteresis": 2}, [16.0, 16.0, 16.0, 16.0]),
        ({"loss_scale": 128.0}, [128.0] * 4),
    ],
    ids=["dynamic", "hysteresis", "static"],
)
def test_one_overflow_skips_one_step_on_all_ranks(fp16, right):
    for bad in (float("inf"), float("nan")):
        for found in run_ranks(overflow_once, 2, fp16, bad, 1):
            for stage, (seen, weights, warned) in found.items():
                assert [scale for scale, *_ in seen] == right, f"stage {stage}"
                assert [skipped for _, skipped, _ in seen] == [0, 1, 1, 1], f"stage {stage}"
                assert [applied for *_, applied in seen] == [True, False, True, True], f"stage {stage}"
                assert weights == pytest.approx([-3.0] * 3, rel=1e-6), f"stage {stage}"
                for words in ("skipped", "'w'", "rank 1"):
                    assert words in warned, f"stage {stage}: {warned}"


def consecutive(consecutive_hysteresis):
    """Overflow, good, overflow, good, ...: hysteresis 2 is refilled by good steps only when asked to be."""
    found = {}
    fp16 = {"initial_scale_power": 8, "hysteresis": 2, "consecutive_hysteresis": consecutive_hysteresis}
    with group():
        for stage in (0, 3):
            engine = start(Product(), stage, fp16, lr=1.0)
            scales = []
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for step in range(6):
                    engine.backward(engine(torch.full((3,), 1.0 if step % 2 else float("inf"))))
                    engine.step()
                    scales.append(engine.loss_scale)
            found[stage] = scales
            engine.destroy()
    return found


@pytest.mark.parametrize(
    ("refill", "right"), [(False, [256, 256, 128, 128, 64, 64]), (True, [256, 256, 256, 256, 256, 256])]
)
def test_hysteresis_is_refilled_by_good_steps_only_on_request(refill, right):
    (found,) = run_ranks(consecutive, 1, refill)
    assert found == {0: right, 3: right}


# --- fp16 trains ----------------------------------------------------------------------------------------------------


def train_half():
    from support.models import build, data
    from support.oracle import micro_batches
    from support.training import place

    found = {}
    with group():
        for stage, clip in itertools.product(STAGES, (0.0, 0.1)):
            part = micro_batches(data("transformer", 12), *place(), 1)[0]
            fp16 = {"initial_scale_power": 10, "loss_scale_window": 2}
            made = settings(stage, fp16, gradient_clipping=clip)
            made["train_micro_batch_size_per_gpu"] = len(part[0])
            import shardledger as sl

            engine = sl.initialize(model=build("transformer"), config=made)[0]
            losses, norms = [], []
            for _ in range(5):
                loss = engine.backward(engine(*part))
                engine.step()
                losses.append(float(loss.detach()))
                norms.append(engine.get_global_grad_norm())
            found[stage, clip] = (losses, norms, engine.state_dict())
            engine.destroy()
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_fp16_follows_fp32_within_its_precision_and_stages_agree_to_the_last_bit(world):
    from support.models import build, data
    from support.oracle import largest_difference, make_optimizer, reference, same_bits

    ranks = run_ranks(train_half, world, timeout=90)
    for clip in (0.0, 0.1):
        right = reference(build("transformer"), data("transformer", 12), make_optimizer("SGD", lr=0.1), clip=clip)
        for stage in STAGES:
            _, norms, weights = ranks[0][stage, clip]
            assert largest_difference(weights, right.weights) <= 2e-3, (stage, clip)
            assert norms == pytest.approx(right.norms, rel=1e-2), (stage, clip)
            assert same_bits(weights, ranks[0][0, clip][2]) == [], (stage, clip)
