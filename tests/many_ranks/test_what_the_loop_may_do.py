"""The ways in which a training loop may use the engine, each against the plain way."""

import copy

import pytest
import torch

from support.models import build, data
from support.oracle import largest_difference, make_optimizer, micro_batches, reference, same_bits
from support.ranks import run_ranks
from support.training import config, group, place, train

STAGES = (0, 1, 2, 3)


def start(model, settings, micro=1, **arguments):
    import shardledger as sl

    return sl.initialize(model=model, config={**settings, "train_micro_batch_size_per_gpu": micro}, **arguments)


def my_part(name, accumulation=1):
    rank, world = place()
    return micro_batches(data(name, 12), rank, world, accumulation)


# --- ranks that are configured differently -----------------------------------------------------------------------


def by_rank(choices, key):
    from shardledger.errors import RanksDisagreeError

    (part,) = my_part("transformer")
    mine = {"transport": choices[place()[0]]} if key == "transport" else {}
    more = {} if key == "transport" else {key: choices[place()[0]]}
    try:
        engine = start(build("transformer"), {**config(2), **more, "shardledger": mine}, len(part[0]))[0]
    except RanksDisagreeError as error:
        return str(error)
    engine.backward(engine(*part))
    engine.step()
    wire = engine.plan.communication.wire
    engine.destroy()
    return wire


@pytest.mark.parametrize("choices", [("gloo", "shared_memory"), ("shared_memory", "gloo"), ("auto", "gloo")])
def test_ranks_told_to_use_different_transports_all_use_gloo(choices):
    assert run_ranks(by_rank, 2, choices, "transport") == ["gloo", "gloo"]


def test_ranks_with_different_plans_are_told_in_which_part():
    for said in run_ranks(by_rank, 2, (0.5, 1.0), "gradient_clipping"):
        assert "ranks [1] have another plan than rank 0; they differ in: step." in said


# --- loss.backward() ---------------------------------------------------------------------------------------------


def two_ways_backward():
    found = {}
    with group():
        for stage in STAGES:
            for way in ("engine", "loss"):
                micro = my_part("transformer", 2)
                engine = start(build("transformer"), config(stage, accumulation=2), len(micro[0][0]))[0]
                for _ in range(3):
                    for part in micro:
                        loss = engine(*part)
                        if way == "engine":
                            handed_back = engine.backward(loss)
                            assert float(handed_back) == float(loss)
                        else:
                            loss.backward()
                        engine.step()
                assert engine.global_steps == 3
                assert engine.micro_steps == 6
                found[stage, way] = engine.state_dict()
                engine.destroy()
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_backward_of_the_loss_equals_backward_of_the_engine(world):
    found = run_ranks(two_ways_backward, world)[0]
    right = reference(build("transformer"), data("transformer", 12), make_optimizer("SGD", lr=0.1), steps=3)
    for stage in STAGES:
        assert same_bits(found[stage, "engine"], found[stage, "loss"]) == []
        assert largest_difference(found[stage, "loss"], right.weights) <= 1e-6


# --- no_sync -----------------------------------------------------------------------------------------------------


def accumulate_without_sync():
    found = {}
    with group():
        for stage in STAGES:
            micro = my_part("transformer", 2)
            engine = start(build("transformer"), config(stage, accumulation=2), len(micro[0][0]))[0]
            sent = []
            for _ in range(3):
                with engine.no_sync():
                    engine.backward(engine(*micro[0]))
                    engine.step()
                engine.backward(engine(*micro[1]))
                engine.step()
                sent.append(engine.communication()["step"]["reduce_scatter"]["elements"])
            found[stage] = (engine.state_dict(), sent)
            engine.destroy()
    return found


def test_no_sync_reduces_once_and_changes_no_result():
    found = run_ranks(accumulate_without_sync, 2)[0]
    right = reference(build("transformer"), data("transformer", 12), make_optimizer("SGD", lr=0.1), steps=3)
    numel = sum(p.numel() for p in build("transformer").parameters())
    for stage, (weights, sent) in found.items():
        assert largest_difference(weights, right.weights) <= 1e-6, stage
        assert max(sent) <= numel / 2 * 1.2, f"stage {stage} reduced more than once a step: {sent} of {numel / 2}"


# --- where weights come from -------------------------------------------------------------------------------------


def train_with_seed_per_rank(name):
    with group():
        ours = [train(build(name, seed=place()[0]), config(stage), data(name, 12), steps=2) for stage in STAGES]
        same = [train(build(name, seed=0), config(stage), data(name, 12), steps=2) for stage in STAGES]
    return [o.weights for o in ours], [s.weights for s in same], [o.losses for o in ours], [s.losses for s in same]


@pytest.mark.parametrize("name", ["transformer", "buffered", "frozen"])
def test_modules_with_other_seeds_end_up_with_the_weights_and_buffers_of_rank_0(name):
    for ours, same, losses, right_losses in run_ranks(train_with_seed_per_rank, 3, name):
        assert losses == right_losses
        for stage in STAGES:
            assert same_bits(ours[stage], same[stage]) == []


def train_from_meta():
    from support.models import Transformer

    found = {}
    with group():
        for stage in STAGES:
            with torch.device("meta"):
                model = Transformer()
            torch.manual_seed(place()[0])  # rank 0's numbers count
            part = my_part("transformer")[0]
            engine = start(model, config(stage), len(part[0]))[0]
            born = engine.state_dict()
            losses = []
            for _ in range(5):
                loss = engine(*part)
                engine.backward(loss)
                engine.step()
                losses.append(float(loss.detach()))
            assert engine.module.head.weight is engine.module.embedding.weight
            found[stage] = (born, losses, engine.state_dict())
            engine.destroy()
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_a_model_on_the_meta_device_trains_and_is_the_same_in_every_stage(world):
    for found in run_ranks(train_from_meta, world):
        for stage in STAGES:
            assert found[stage][1] == found[0][1]
            assert found[stage][1][-1] < found[stage][1][0]
            assert same_bits(found[stage][0], found[0][0]) == []
            assert same_bits(found[stage][2], found[0][2]) == []
    born = run_ranks(train_from_meta, 1)[0][3][0]
    assert set(born) == set(build("transformer").state_dict())
    assert float(born["position"].std()) == pytest.approx(0.02, rel=0.3)
    # Tied: either module may have the last word on the shared weight, but somebody must.
    assert 0.1 < float(born["embedding.weight"].std()) < 1.5
    assert float(born["norm.weight"].min()) == 1.0


# --- state_dict --------------------------------------------------------------------------------------------------


def states(precision):
    from support.models import Buffered, Transformer

    found = {}
    with group():
        for stage in STAGES:
            for make in (Transformer, Buffered):
                torch.manual_seed(0)
                name = make.__name__.lower()
                part = my_part(name)[0]
                part = [p.to(torch.bfloat16) if precision == "bf16" and p.is_floating_point() else p for p in part]
                engine = start(make(), config(stage, precision=precision), len(part[0]))[0]
                engine.backward(engine(*part))
                engine.step()
                everywhere = engine.state_dict(all_ranks=True)
                found[stage, name] = (engine.state_dict(), everywhere)
                engine.destroy()
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_dict_is_the_modules_own_with_trained_fp32_weights(precision):
    ranks = run_ranks(states, 2, precision)
    for (stage, name), (weights, everywhere) in ranks[0].items():
        plain = build(name)
        before = copy.deepcopy(plain.state_dict())
        assert list(weights) == list(before), (stage, name)
        assert {k: (v.shape, v.dtype, v.device.type) for k, v in weights.items()} == {
            k: (v.shape, v.dtype, "cpu") for k, v in before.items()
        }
        plain.load_state_dict(weights, strict=True)
        moved = [k for k in before if not torch.equal(before[k], weights[k])]
        assert moved, "nothing was trained"
        assert ranks[1][stage, name][0] == {}
        assert same_bits(everywhere, weights) == []
        others = ranks[1][stage, name][1]
        trained = [k for k, _ in plain.named_parameters()]
        assert same_bits({k: others[k] for k in trained}, {k: weights[k] for k in trained}) == []
        if name == "transformer":
            assert torch.equal(weights["head.weight"], weights["embedding.weight"])


def evaluate():
    found = {}
    with group():
        for stage in STAGES:
            part = data("transformer", 12)
            engine = start(build("transformer"), config(stage), 12)[0]
            engine.eval()
            with torch.no_grad():
                before = float(engine(*part))
            engine.train()
            engine.backward(engine(*part))
            engine.step()
            engine.eval()
            with torch.no_grad():
                after = [float(engine(*part)), float(engine(*part))]
            weights = engine.state_dict(all_ranks=True)
            plain = build("transformer")
            right = [float(plain(*part))]
            plain.load_state_dict(weights)
            found[stage] = (before, after, [*right, float(plain(*part))])
            engine.destroy()
    return found


def test_evaluation_sees_the_trained_weights_in_every_stage():
    for found in run_ranks(evaluate, 2):
        for stage, (before, after, right) in found.items():
            assert before == right[0], stage
            assert after == [right[1]] * 2, stage


# --- optimizers, schedulers, the data loader -----------------------------------------------------------------------


def use_own_optimizer():
    found = {}
    with group():
        for stage in STAGES:
            model = build("transformer")
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
            settings = config(stage)
            del settings["optimizer"]
            part = my_part("transformer")[0]
            engine, ours, _, schedule = start(
                model, settings, len(part[0]), optimizer=optimizer, lr_scheduler=scheduler
            )
            assert ours is not None and schedule is not None
            rates = []
            for _ in range(4):
                engine.backward(engine(*part))
                engine.step()
                rates.append(engine.get_lr()[0])
            found[stage] = (engine.state_dict(), rates)
            engine.destroy()
    return found


def test_the_users_optimizer_and_scheduler_are_used():
    found = run_ranks(use_own_optimizer, 2)[0]
    model = build("transformer")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for _ in range(4):
        optimizer.zero_grad()
        model(*data("transformer", 12)).backward()
        optimizer.step()
        scheduler.step()
    for stage, (weights, rates) in found.items():
        assert rates == pytest.approx([0.05, 0.025, 0.0125, 0.00625]), stage
        assert largest_difference(weights, model.state_dict()) <= 1e-6, stage


def use_loader():
    with group():
        samples = list(zip(*data("regressor", 12), strict=True))
        engine, _, loader, _ = start(build("regressor"), config(2), 3, training_data=samples)
        seen = [x for x, _ in loader]
        losses = []
        for x, y in loader:
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        engine.destroy()
    return torch.cat(seen), losses


def test_the_loader_deals_the_samples_out_once():
    ranks = run_ranks(use_loader, 2)
    dealt = torch.cat([seen for seen, _ in ranks])
    everything = data("regressor", 12)[0]
    assert dealt.shape == everything.shape
    assert sorted(map(tuple, dealt.tolist())) == sorted(map(tuple, everything.tolist()))
    assert [len(losses) for _, losses in ranks] == [2, 2]


def make_own_group():
    """The engine makes a process group when there is none, and ends the one it made."""
    import torch.distributed as dist

    engine = start(build("regressor"), config(1), 6)[0]
    assert (engine.rank, engine.world) == place()
    there = dist.is_initialized()
    engine.destroy()
    return there, dist.is_initialized()


@pytest.mark.parametrize("world", [1, 2])
def test_the_engine_ends_the_process_group_that_it_made(world):
    for there, after in run_ranks(make_own_group, world):
        assert there or world == 1
        assert not after
