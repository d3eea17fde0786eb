"""B29: edits of gathered weights are lost: they are kept when a rank is named for them, and refused otherwise."""

import pytest
import torch
from torch import nn

from support.models import build, data
from support.oracle import micro_batches, same_bits
from support.ranks import run_ranks
from support.training import config, group, place

STAGES = (0, 1, 2, 3)


def start(stage, precision="fp32", optimizer="SGD"):
    import shardledger as sl

    part = micro_batches(data("transformer", 12), *place(), 1)[0]
    settings = {
        **config(stage, optimizer=optimizer, precision=precision),
        "train_micro_batch_size_per_gpu": len(part[0]),
    }
    return sl.initialize(model=build("transformer"), config=settings)[0], part


def edit(precision):
    """Rank 1 initialises one weight and zeroes a row of another; every rank tries to write; a step follows."""
    import shardledger as sl

    found = {}
    with group(30):
        for stage in STAGES:
            engine, part = start(stage, precision)
            module = engine.module
            wide, table = module.blocks[1].mlp[1].weight, module.embedding.weight
            torch.manual_seed(100 + engine.rank)
            with sl.GatheredParameters([wide, table], modifier_rank=1), torch.no_grad():
                nn.init.normal_(wide, std=0.02)
                table[3].zero_()
            kept = engine.state_dict(all_ranks=True)
            with sl.GatheredParameters(wide):
                again = wide.detach().float().clone()
            engine.backward(engine(*part))
            engine.step()
            found[stage] = (kept, again, engine.state_dict(all_ranks=True))
            engine.destroy()
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_edits_of_the_named_rank_are_kept_everywhere(precision):
    ranks = run_ranks(edit, 2, precision)
    name = "blocks.1.mlp.1.weight"
    before = build("transformer").state_dict()
    for found in ranks:
        for stage, (kept, again, after) in found.items():
            where = f"stage {stage}"
            assert float(kept[name].std()) == pytest.approx(0.02, rel=0.15), where
            assert torch.equal(kept[name], ranks[0][0][0][name]), f"{where}: not what rank 1 wrote"
            assert torch.allclose(again, kept[name], rtol=2**-8), f"{where}: lost when gathered again"
            assert kept["embedding.weight"][3].abs().max() == 0 and kept["head.weight"][3].abs().max() == 0, where
            untouched = [key for key in kept if key not in (name, "embedding.weight", "head.weight")]
            assert same_bits({k: kept[k] for k in untouched}, {k: before[k] for k in untouched}) == [], where
            assert same_bits(after, ranks[0][0][2]) == [], f"{where}: trained on from something else"
            assert float((after[name] - kept[name]).abs().max()) < 0.5, f"{where}: the master was not edited"


def edit_without_a_name():
    import shardledger as sl
    from shardledger.errors import ShardledgerError

    found = {}
    with group(30):
        for stage in STAGES:
            engine, part = start(stage)
            before = engine.state_dict(all_ranks=True)
            weight = engine.module.blocks[0].out.weight
            text = "no error"
            try:
                with sl.GatheredParameters(weight), torch.no_grad():
                    if engine.rank == 1:
                        weight.mul_(0.9).add_(0.1)  # the moving average of somebody who forgot to say who writes
            except ShardledgerError as error:
                text = str(error)
            after = engine.state_dict(all_ranks=True)
            engine.backward(engine(*part))
            engine.step()
            found[stage] = (text, before, after, engine.global_steps)
            engine.destroy()
    return found


def test_an_edit_without_a_named_rank_is_an_error_on_every_rank():
    for rank, found in enumerate(run_ranks(edit_without_a_name, 2)):
        for stage, (text, before, after, steps) in found.items():
            where = f"stage {stage}, rank {rank}: {text}"
            assert "modifier_rank" in text and "blocks.0.out.weight" in text, where
            assert same_bits(after, before) == [], f"{where}: the refused edit stayed"
            assert steps == 1, where


def read_everything():
    import shardledger as sl

    found = {}
    with group(30):
        for stage in STAGES:
            engine, _ = start(stage)
            with sl.GatheredParameters(engine.module):
                inside = {k: v.detach().clone() for k, v in engine.module.state_dict().items()}
            found[stage] = inside
            engine.destroy()
    return found


def test_a_whole_module_can_be_read():
    right = build("transformer").state_dict()
    for found in run_ranks(read_everything, 2):
        for stage, inside in found.items():
            assert same_bits(inside, right) == [], f"stage {stage}"


def freed_again():
    import shardledger as sl
    from shardledger.errors import ReleasedParameterError
    from support.memory import live_bytes

    with group(30):
        engine, _ = start(3)
        before = live_bytes()
        weight = engine.module.blocks[0].out.weight
        for _ in range(3):
            with sl.GatheredParameters(weight):
                float(weight.sum())
        try:
            with sl.GatheredParameters(weight):
                raise KeyError("needle")
        except KeyError:
            pass
        after = live_bytes()
        try:
            weight.sum()
            text = "no error"
        except ReleasedParameterError as error:
            text = str(error)
        engine.destroy()
    return before, after, text


def test_a_parameter_is_released_when_the_block_ends():
    for before, after, text in run_ranks(freed_again, 2):
        assert after <= before
        assert "blocks.0.out.weight" in text
