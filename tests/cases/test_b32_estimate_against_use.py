"""B32: an estimate is split into what a run really holds, and each part is what the run uses, at any number of ranks."""

from shardledger.ledger import CATEGORIES
from support.ranks import run_ranks
from support.training import group

LAYERS, WIDTH, CONTEXT, MICRO = 3, 64, 32, 2


def make_model():
    from shardledger.workload import GPT, GPTConfig

    return GPT(GPTConfig(layers=LAYERS, heads=2, width=WIDTH, context=CONTEXT))


def estimated_and_used(world, stages):
    """Bytes by category at the highest moment, by a dry run and by a count of every live byte."""
    from shardledger.cli.verify import measure, predict
    from shardledger.forecast import Question, base_config, variant
    from shardledger.transport import find_place

    found = []
    with group():
        for stage in stages:
            question = Question(
                model=make_model,
                world=world,
                seq_len=CONTEXT,
                device="cpu",
                rank=find_place().rank,
                micro_batches=(MICRO,),
            )
            config = variant(base_config(question), world, stage, False, MICRO)
            used, engine = measure(question, config, 2)
            engine.destroy()
            found.append((predict(question, config).by_category, used.by_category))
    return found


def test_every_part_of_the_estimate_is_what_the_run_uses():
    states = {}
    for world, stages in ((2, (2, 3)), (4, (3,))):
        for found in run_ranks(estimated_and_used, world, world, stages, timeout=120):
            for stage, (estimate, used) in zip(stages, found, strict=True):
                for category in CATEGORIES:
                    assert used[category] <= estimate[category] <= 1.1 * used[category], (world, stage, category)
                states[world, stage] = sum(estimate[c] for c in ("params", "grads", "master", "optimizer"))
                # What estimators of states leave out: activations, and at stage 3 gathered units and buffers.
                assert estimate["activations"] > 0 and (stage < 3 or estimate["communication"] > 0)
    # Users saw the same use on 2 and on 4 devices: here what is sharded halves.
    assert 0.5 <= states[4, 3] / states[2, 3] < 0.51
