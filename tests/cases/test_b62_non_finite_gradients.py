"""B62: a non-finite gradient on one rank poisons masters and moments, or every step is skipped without a word."""

import itertools
import warnings

import pytest
import torch
from torch import nn

from support.oracle import largest_difference
from support.ranks import run_ranks
from support.training import config, group, place

STAGES = (0, 1, 2, 3)
BAD_STEP = 3
STEPS = 6
ADAMW = {"lr": 0.1, "weight_decay": 0.1, "eps": 1e-4}


class Blocks(nn.Module):
    """x[n, 4] -> loss; `poison` times one element of one weight is added, so that its gradient gets `poison` more."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(4, 6)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
        self.spot = nn.Parameter(torch.tensor([0.5, 0.25, 0.125]))

    def forward(self, x, poison=0.0):
        return self.blocks(self.enter(x)).square().mean() + self.spot[1] * poison


def make():
    torch.manual_seed(0)
    return Blocks()


def batch(rank, step):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * rank + step))


def poison_of(kind, rank, step, bad_steps):
    return kind if rank == 1 and step in bad_steps else 0.0


def train(kind, bad_steps, precision, accumulation=1, **ours):
    """By stage: counters after each step, rates, warnings, error, weights and whether the moments are finite."""
    import shardledger as sl

    found = {}
    rank, _ = place()
    with group():
        for stage in STAGES:
            engine = sl.initialize(
                model=make(),
                config=config(
                    stage,
                    optimizer="AdamW",
                    optimizer_params=ADAMW,
                    precision=precision,
                    accumulation=accumulation,
                    scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.1}},
                    shardledger=ours,
                ),
            )[0]
            counters, rates, during, error = [], [], [], ""
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                try:
                    for step in range(1, STEPS + 1):
                        during.append(engine.get_lr()[0])
                        for micro in range(accumulation):
                            poison = poison_of(kind, rank, step, bad_steps) if micro == 0 else 0.0
                            engine.backward(engine(batch(rank, 10 * micro + step), poison))
                            engine.step()
                        counters.append((engine.global_steps, engine.skipped_steps))
                        rates.append(engine.get_lr()[0])
                except sl.EngineStateError as stopped:
                    error = str(stopped)
            found[stage] = {
                "counters": counters,
                "rates": rates,
                "rates during": during,
                "error": error,
                "warned": [str(w.message) for w in caught if "finite" in str(w.message)],
                "weights": engine.state_dict(all_ranks=True),
                "moments finite": all(
                    bool(value.isfinite().all())
                    for state in engine.optimizer.state.values()
                    for value in state.values()
                    if isinstance(value, torch.Tensor)
                ),
            }
            engine.destroy()
    return found


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("kind", [float("inf"), float("nan")])
def test_all_ranks_skip_the_step_and_say_why(kind, precision, accumulation):
    ranks = run_ranks(train, 2, kind, (BAD_STEP,), precision, accumulation)
    # The step that was skipped leaves no trace: as a run that had no batch there.
    for found in ranks:
        for stage, seen in found.items():
            assert seen["counters"] == [(1, 0), (2, 0), (2, 1), (3, 1), (4, 1), (5, 1)], f"stage {stage}"
            assert seen["rates"][BAD_STEP - 1] == seen["rates"][BAD_STEP - 2], "the schedule did not advance"
            assert seen["rates"][BAD_STEP] != seen["rates"][BAD_STEP - 1]
            assert all(bool(value.isfinite().all()) for value in seen["weights"].values()), f"stage {stage}"
            assert seen["moments finite"], f"stage {stage}"
            assert len(seen["warned"]) == 1, f"stage {stage}: {seen['warned']}"
            for words in ("spot", "rank 1", "inf" if kind == float("inf") else "NaN"):
                assert words in seen["warned"][0], f"stage {stage}: {seen['warned'][0]}"
            assert seen["error"] == ""


def test_a_skipped_step_leaves_no_trace():
    """As a run that never saw the batch: rates, moments and weights."""
    found = run_ranks(train, 2, float("inf"), (BAD_STEP,), "fp32")[0]
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for step in range(1, STEPS + 1):
        if step == BAD_STEP:
            continue
        optimizer.zero_grad()
        for rank in range(2):
            (model(batch(rank, step)) / 2).backward()
        optimizer.param_groups[0]["lr"] = found[0]["rates during"][step - 1]
        optimizer.step()
    for stage, seen in found.items():
        assert largest_difference(seen["weights"], model.state_dict()) <= 1e-5, f"stage {stage}"


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_run_may_be_told_to_raise(precision):
    ranks = run_ranks(raise_at_once, 2, precision)
    for found in ranks:
        for stage, seen in found.items():
            assert len(seen["counters"]) == BAD_STEP - 1, f"stage {stage}"
            for words in (f"step {BAD_STEP}", "spot", "inf", "rank 1"):
                assert words in seen["error"], f"stage {stage}: {seen['error']}"
            assert all(bool(value.isfinite().all()) for value in seen["weights"].values())


def raise_at_once(precision):
    return train(float("inf"), (BAD_STEP,), precision, nonfinite="raise")


def skip_for_ever(limit):
    return train(float("nan"), tuple(range(BAD_STEP, STEPS + 1)), "bf16", max_consecutive_skips=limit)


def test_many_skips_in_a_row_end_the_run():
    for found in run_ranks(skip_for_ever, 2, 3):
        for stage, seen in found.items():
            assert seen["counters"] == [(1, 0), (2, 0), (2, 1), (2, 2)], f"stage {stage}"
            for words in ("3 steps in a row", "spot", "NaN", "rank 1"):
                assert words in seen["error"], f"stage {stage}: {seen['error']}"


def inject_everywhere():
    """Every element of every parameter in turn, on either rank, at a block's and the root's weights."""
    import shardledger as sl

    found = {}
    rank, _ = place()
    with group():
        for stage, (name, culprit) in itertools.product(
            STAGES, itertools.product(("enter.weight", "blocks.0.0.bias", "blocks.2.0.weight"), (0, 1))
        ):
            engine = sl.initialize(model=make(), config=config(stage))[0]
            parameter = dict(engine.module.named_parameters())[name]

            def spoil(gradient, culprit=culprit):
                gradient = gradient.clone()
                gradient.view(-1)[-1] = float("nan") if rank == culprit else 1.0
                return gradient

            handle = parameter.register_hook(spoil)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                engine.backward(engine(batch(rank, 0)))
                engine.step()
            handle.remove()
            found[stage, name, culprit] = (engine.skipped_steps, " ".join(str(w.message) for w in caught))
            engine.destroy()
    return found


def test_the_parameter_and_the_rank_are_named_wherever_they_are():
    for found in run_ranks(inject_everywhere, 2, timeout=90):
        for (stage, name, culprit), (skipped, warned) in found.items():
            assert skipped == 1, (stage, name)
            assert name in warned, f"stage {stage}: {warned}"
            assert f"rank {culprit}" in warned and f"rank {1 - culprit}" not in warned, f"stage {stage}: {warned}"
