"""Elements sent per rank and step: 2P in stages 0-2, 3P in stage 3, times (N-1)/N; by the engine's count and ours."""

import pytest
import torch

from support.models import Stack, Transformer, numbers, tokens
from support.ranks import run_ranks
from support.training import config, group

STAGES = (0, 1, 2, 3)
WIDTH, LAYERS = 128, 6


class CountedSends:
    """Counts what leaves through torch.distributed's send, or is offered in this rank's memory: an account that the
    engine does not keep itself."""

    def __init__(self):
        import torch.distributed as dist

        from shardledger.transport.neighbours import NeighboursMailbox

        self.elements = self.bytes = 0
        self._real = {(dist, "isend"): dist.isend, (NeighboursMailbox, "send"): NeighboursMailbox.send}

    def __enter__(self):
        for (owner, name), real in self._real.items():
            setattr(owner, name, self._counting(real))
        return self

    def _counting(self, real):
        def send(*arguments, **options):
            tensor = next(value for value in arguments if isinstance(value, torch.Tensor))
            self.elements += tensor.numel()
            self.bytes += tensor.numel() * tensor.element_size()
            return real(*arguments, **options)

        return send

    def __exit__(self, *problem):
        for (owner, name), real in self._real.items():
            setattr(owner, name, real)


def measure(precision, accumulation, wire="auto"):
    import shardledger as sl

    found = {}
    with group():
        for stage in STAGES:
            torch.manual_seed(0)
            settings = config(stage, optimizer="AdamW", lr=1e-3, precision=precision, accumulation=accumulation)
            settings["shardledger"] = {"transport": wire}
            engine = sl.initialize(model=Stack(WIDTH, LAYERS), config=settings)[0]
            x, y = (part.to(torch.bfloat16) if precision == "bf16" else part for part in numbers(1, WIDTH, WIDTH))
            for _ in range(2):
                with CountedSends() as sends:
                    for _ in range(accumulation):
                        engine.backward(engine(x, y))
                        engine.step()
            found[stage] = (engine.communication()["step"], sends.elements, sends.bytes)
            engine.destroy()
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(("precision", "wire"), [("fp32", "auto"), ("bf16", "gloo")])
def test_elements_per_step_follow_the_formula(world, precision, wire):
    parameters = LAYERS * WIDTH * (WIDTH + 1)
    for found in run_ranks(measure, world, precision, 1, wire):
        for stage, (step, sent, sent_bytes) in found.items():
            share = parameters * (world - 1) / world
            passes = 3 if stage == 3 else 2
            elements = step["reduce_scatter"]["elements"] + step["all_gather"]["elements"]
            assert step["reduce_scatter"]["elements"] == pytest.approx(share, rel=0.01), stage
            assert elements == pytest.approx(passes * share, rel=0.01), stage
            assert sent == pytest.approx(passes * share, rel=0.01), "what left is not what was counted"
            # What stage 0 gathers are sums of gradients, in fp32 so that it computes what the other stages do.
            item = 2 if precision == "bf16" else 4
            gathered = 4 if stage == 0 else item
            right = share * (item + (passes - 1) * gathered)
            assert step["reduce_scatter"]["bytes"] + step["all_gather"]["bytes"] == pytest.approx(right, rel=0.01)
            assert sent_bytes == pytest.approx(right, rel=0.01), stage


def test_stages_0_and_1_reduce_once_a_step_whatever_the_accumulation():
    parameters = LAYERS * WIDTH * (WIDTH + 1)
    for found in run_ranks(measure, 2, "fp32", 4):
        for stage, (step, _, _) in found.items():
            reductions = 1 if stage < 2 else 4
            gathers = 8 if stage == 3 else 1
            assert step["reduce_scatter"]["elements"] == pytest.approx(reductions * parameters / 2, rel=0.01), stage
            assert step["all_gather"]["elements"] == pytest.approx(gathers * parameters / 2, rel=0.01), stage


def count_calls():
    import shardledger as sl

    found = {}
    with group():
        for stage in STAGES:
            torch.manual_seed(0)
            settings = config(stage, optimizer="AdamW", lr=1e-3, shardledger={"activation_checkpointing": stage == 3})
            engine = sl.initialize(model=Transformer(16, 64, 6), config=settings)[0]
            for _ in range(2):
                engine.backward(engine(*tokens(1, vocabulary=16)))
                engine.step()
            found[stage] = engine.communication()["step"]
            engine.destroy()
    return found


def test_recomputation_gathers_no_unit_a_third_time():
    for found in run_ranks(count_calls, 2):
        assert found[3]["all_gather"]["calls"] <= 2 * 7
        assert found[3]["reduce_scatter"]["calls"] <= 7
