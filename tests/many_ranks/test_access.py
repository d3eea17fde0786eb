"""Weights, gradients and optimizer states by parameter: what one plain process has, at every stage and world size."""

import pytest
import torch

from support.models import build, data
from support.oracle import micro_batches, same_bits
from support.ranks import run_ranks
from support.training import config, group, place

STAGES = (0, 1, 2, 3)
ACCUMULATION = 3
ADAMW = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-4}
#: Relative to the largest element of the parameter; bf16 rounds every gradient to 8 bits.
TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2}


def lowered(batch, precision):
    low = precision == "bf16"
    return [part.to(torch.bfloat16) if low and part.is_floating_point() else part for part in batch]


def start(name, stage, precision="fp32", accumulation=1, optimizer="AdamW", zero=None, **more):
    import shardledger as sl

    options = dict(ADAMW) if optimizer == "AdamW" else {"lr": 0.1}
    micro = micro_batches(lowered(data(name, 12), precision), *place(), accumulation)
    settings = config(
        stage, optimizer=optimizer, optimizer_params=options, accumulation=accumulation, precision=precision, zero=zero
    )
    settings = {**settings, "train_micro_batch_size_per_gpu": len(micro[0][0]), **more}
    return sl.initialize(model=build(name), config=settings)[0], micro


def named(engine):
    """Name and parameter, without the first and last of the equal blocks, which would only take time."""
    skipped = ("blocks.0.", "blocks.2.")
    return [(key, p) for key, p in engine.module.named_parameters() if not key.startswith(skipped)]


def gap(ours, theirs):
    """Largest difference relative to the largest element."""
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    if not theirs.numel():
        return 0.0
    return float((ours.double() - theirs.double()).abs().max() / theirs.double().abs().max().clamp(min=1e-3))


# --- reading through a window ------------------------------------------------------------------------------------


def read_through_two_steps(name, precision, zero=None):
    """Per stage: gradients in the second window, weights and states after it; and the same training without reading."""
    from shardledger import utils as u

    found = {}
    with group(60):
        for stage in STAGES:
            engine, micro = start(name, stage, precision, ACCUMULATION, zero=zero)
            seen = []
            for number, part in enumerate(micro * 2):
                engine.backward(engine(*part))
                if number >= ACCUMULATION:
                    seen.append({key: u.safe_get_full_grad(p) for key, p in named(engine)})
                engine.step()
            states = {
                key: {what: u.safe_get_full_optimizer_state(p, what) for what in ("exp_avg", "exp_avg_sq", "step")}
                for key, p in named(engine)
            }
            weights = {key: u.safe_get_full_fp32_param(p) for key, p in named(engine)}
            after = engine.state_dict(all_ranks=True)
            engine.destroy()
            engine, micro = start(name, stage, precision, ACCUMULATION, zero=zero)
            for part in micro * 2:
                engine.backward(engine(*part))
                engine.step()
            untouched = engine.state_dict(all_ranks=True)
            engine.destroy()
            found[stage] = (seen, states, weights, after, untouched)
    return found


def plain(name, precision, world):
    """One process: averaged gradients after each micro-batch of the second window, then weights and AdamW's states."""
    model = build(name)
    masters = {key: p.detach().clone().requires_grad_() for key, p in model.named_parameters()}
    if precision == "bf16":
        model.to(torch.bfloat16)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(masters.values(), **ADAMW)
    parts = [micro_batches(lowered(data(name, 12), precision), r, world, ACCUMULATION) for r in range(world)]
    for _ in range(2):
        seen, sums = [], {}
        for m in range(ACCUMULATION):
            for rank in range(world):
                model.zero_grad(set_to_none=True)
                model(*parts[rank][m]).backward()
                for key, p in parameters.items():
                    if p.grad is not None:
                        sums[key] = sums.get(key, 0) + p.grad.float()
            seen.append({key: sums[key] / (world * (m + 1)) if key in sums else None for key in parameters})
        for key, master in masters.items():
            master.grad = seen[-1][key]
        optimizer.step()
        for key, p in parameters.items():
            p.data.copy_(masters[key].detach())
    states = {key: optimizer.state.get(master, {}) for key, master in masters.items()}
    return seen, states, {key: master.detach() for key, master in masters.items()}


def check_against_plain(ranks, name, precision, world):
    right_grads, right_states, right_weights = plain(name, precision, world)
    within = TOLERANCE[precision]
    for rank, found in enumerate(ranks):
        for stage, (seen, states, weights, after, untouched) in found.items():
            where = f"{name}, {precision}, world {world}, stage {stage}, rank {rank}"
            for number, (ours, theirs) in enumerate(zip(seen, right_grads, strict=True)):
                for key in ours:
                    right = theirs[key]
                    here = f"{where}, micro-batch {number}, {key}"
                    assert (ours[key] is None) == (right is None), here
                    if right is not None:
                        assert ours[key].dtype == torch.float32, here
                        assert gap(ours[key], right) <= within, f"{here}: {gap(ours[key], right)}"
            for key in weights:
                right = right_weights[key]
                assert gap(weights[key], right) <= (within if precision == "fp32" else 0.15), f"{where}, {key}"
                assert torch.equal(weights[key], after[key]), f"{where}, {key}"
                for what, state in right_states[key].items():
                    ours = states[key][what]
                    if not right.numel() and what == "step":
                        continue  # a parameter without elements has no state that could be counted
                    assert gap(ours, state) <= 4 * within, f"{where}, {key}, {what}"
                if not right_states[key] and right.numel():
                    assert set(states[key].values()) == {None}, f"{where}, {key}"
            assert same_bits(after, untouched) == [], f"{where}: reading changed the training"


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_reading_by_parameter_gives_what_one_process_has(precision, world):
    ranks = run_ranks(read_through_two_steps, world, "transformer", precision, timeout=120)
    check_against_plain(ranks, "transformer", precision, world)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_parameters_without_elements_or_gradient_keep_their_shape_or_are_none(world):
    ranks = run_ranks(read_through_two_steps, world, "awkward", "fp32", timeout=120)
    check_against_plain(ranks, "awkward", "fp32", world)


def test_parameters_that_stay_gathered_at_stage_3_are_read_like_the_others():
    zero = {"stage3_param_persistence_threshold": 20}
    for precision in ("fp32", "bf16"):
        ranks = run_ranks(read_through_two_steps, 2, "transformer", precision, zero, timeout=120)
        check_against_plain(ranks, "transformer", precision, 2)


def read_in_other_modes(mode):
    """Gradients before the step, and the norm that the step then reports."""
    from shardledger import utils as u

    found = {}
    with group(60):
        for stage in STAGES:
            more = {
                "reproducible": {"shardledger": {"reproducible": True}},
                "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}},
            }.get(mode, {})
            engine, micro = start("transformer", stage, accumulation=ACCUMULATION, **more)
            for number, part in enumerate(micro):
                loss = engine(*part)
                if mode == "no_sync" and number < 2:
                    with engine.no_sync():
                        engine.backward(loss)
                elif mode == "denominator":
                    engine.backward(loss, denominator=1 + number + 10 * engine.rank)
                else:
                    engine.backward(loss)
                seen = {key: u.safe_get_full_grad(p) for key, p in engine.module.named_parameters()}
                if number < 2:
                    engine.step()
            again = {key: u.safe_get_full_grad(p) for key, p in engine.module.named_parameters()}
            engine.step()
            found[stage] = (seen, again, engine.get_global_grad_norm())
            engine.destroy()
    return found


@pytest.mark.parametrize("mode", ["plain", "no_sync", "denominator", "reproducible", "fp16"])
def test_the_gradient_is_the_one_that_the_step_uses(mode):
    for found in run_ranks(read_in_other_modes, 2, mode):
        for stage, (seen, again, norm) in found.items():
            assert same_bits(seen, again) == [], (mode, stage)
            ours = torch.stack([g.double().norm() for g in seen.values()]).norm()
            assert float(ours) == pytest.approx(norm, rel=1e-6), (mode, stage)


# --- this rank's part --------------------------------------------------------------------------------------------


def read_parts(name, precision):
    """Full and local values of everything after a step and the next backward pass."""
    from shardledger import utils as u

    found = {}
    with group(60):
        for stage in STAGES:
            engine, micro = start(name, stage, precision)
            for _ in range(2):
                engine.backward(engine(*micro[0]))
                full = {key: (u.safe_get_full_fp32_param(p), u.safe_get_full_grad(p)) for key, p in named(engine)}
                local = {key: (u.safe_get_local_fp32_param(p), u.safe_get_local_grad(p)) for key, p in named(engine)}
                engine.step()
            full = {k: (*v, u.safe_get_full_optimizer_state(p, "exp_avg")) for (k, p), v in both(engine, full)}
            local = {k: (*v, u.safe_get_local_optimizer_state(p, "exp_avg")) for (k, p), v in both(engine, local)}
            found[stage] = (full, local)
            engine.destroy()
    return found


def both(engine, values):
    return zip(named(engine), values.values(), strict=True)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", ["transformer", "awkward"])
def test_the_parts_of_all_ranks_make_the_whole(name, world):
    ranks = run_ranks(read_parts, world, name, "bf16")
    for stage in STAGES:
        for key, full in ranks[0][stage][0].items():
            for which, whole in enumerate(full):
                parts = [found[stage][1][key][which] for found in ranks]
                where = f"stage {stage}, {key}, {('value', 'gradient', 'state')[which]}"
                if whole is None:
                    continue
                assert all(part.dim() == 1 for part in parts if part is not None), where
                joined = parts[:1] if stage == 0 else [part for part in parts if part is not None]
                assert torch.equal(torch.cat(joined), whole.flatten()), where


# --- setting -----------------------------------------------------------------------------------------------------


def fresh_values(name, seed):
    torch.manual_seed(seed)
    return {key: torch.randn_like(p) * 0.3 for key, p in build(name).named_parameters() if p.requires_grad}


def set_weights(name, precision, way, zero=None):
    """New weights for everything; what the ranks then hold, compute with, and train on from."""
    import shardledger as sl
    from shardledger import utils as u

    found = {}
    with group(60):
        for stage in STAGES:
            engine, micro = start(name, stage, precision, zero=zero)
            values = fresh_values(name, 5)
            for key, p in named(engine):
                if way == "full":
                    u.safe_set_full_fp32_param(p, values[key])
                    continue
                whole = values[key].flatten()
                n = u.safe_get_local_fp32_param(p).numel()
                before = sum(int(row[0]) for row in engine.gather_scalars([float(n)])[: engine.rank])
                u.safe_set_local_fp32_param(p, whole[before : before + n] if stage else whole)
            kept = engine.state_dict(all_ranks=True)
            with sl.GatheredParameters(engine.module):
                computed = {key: p.detach().clone() for key, p in named(engine)}
            loss = float(engine(*micro[0]).detach())
            engine.destroy()
            found[stage] = (kept, computed, loss)
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("way", ["full", "local"])
def test_set_weights_are_the_masters_and_what_every_rank_computes_with(way, precision, world):
    check_set_weights(run_ranks(set_weights, world, "transformer", precision, way), "transformer", precision)


@pytest.mark.parametrize("way", ["full", "local"])
def test_weights_without_elements_and_weights_that_stay_gathered_can_be_set(way):
    check_set_weights(run_ranks(set_weights, 2, "awkward", "bf16", way), "awkward", "bf16")
    zero = {"stage3_param_persistence_threshold": 20}
    check_set_weights(run_ranks(set_weights, 2, "transformer", "bf16", way, zero), "transformer", "bf16")


def check_set_weights(ranks, name, precision):
    values = fresh_values(name, 5)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = build(name).to(dtype)
    for key, p in model.named_parameters():
        p.data.copy_(values[key] if key in next(iter(ranks[0].values()))[1] else p)
    for rank, found in enumerate(ranks):
        part = micro_batches(lowered(data(name, 12), precision), rank, len(ranks), 1)[0]
        right = float(model(*part).detach())
        for stage, (kept, computed, loss) in found.items():
            where = f"stage {stage}, rank {rank}"
            assert same_bits({key: kept[key] for key in computed}, {key: values[key] for key in computed}) == [], where
            assert same_bits(computed, {key: values[key].to(dtype) for key in computed}) == [], where
            assert loss == pytest.approx(right, rel=1e-6), where


def set_gradients(accumulation, precision, way, at, more=None):
    """Replace gradients after micro-batch `at` by known ones, go on to the step (plain SGD)."""
    from shardledger import utils as u

    found = {}
    with group(60):
        for stage in STAGES:
            engine, micro = start("transformer", stage, precision, accumulation, "SGD", **(more or {}))
            values = fresh_values("transformer", 7)
            before = engine.state_dict(all_ranks=True)
            for number, part in enumerate(micro):
                engine.backward(engine(*part))
                if number == at:
                    for key, p in named(engine):
                        if way == "full":
                            u.safe_set_full_grad(p, values[key])
                            continue
                        n = u.safe_get_local_grad(p).numel()
                        skip = sum(int(row[0]) for row in engine.gather_scalars([float(n)])[: engine.rank])
                        whole = values[key].flatten()
                        u.safe_set_local_grad(p, whole[skip : skip + n] if stage else whole)
                    read = {key: u.safe_get_full_grad(p) for key, p in named(engine)}
                last = {key: u.safe_get_full_grad(p) for key, p in named(engine)}
                engine.step()
            after = engine.state_dict(all_ranks=True)
            found[stage] = (before, read, last, after)
            engine.destroy()
    return found


def check_set_gradients(ranks, accumulation, at, within):
    values = fresh_values("transformer", 7)
    model = build("transformer")
    for rank in range(len(ranks)):
        for part in micro_batches(data("transformer", 12), rank, len(ranks), accumulation)[at + 1 :]:
            (model(*part) / len(ranks) / max(1, accumulation - at - 1)).backward()
    later = {key: p.grad for key, p in model.named_parameters()}
    for rank, found in enumerate(ranks):
        for stage, (before, read, last, after) in found.items():
            for key in read:
                value = values[key]
                where = f"stage {stage}, rank {rank}, {key}"
                assert gap(read[key], value) <= 1e-6, where
                assert gap(before[key] - 0.1 * last[key], after[key]) <= 1e-6, where
                if at == accumulation - 1:
                    assert gap(last[key], value) <= 1e-6, where
                else:
                    rest = (accumulation * last[key] - (at + 1) * value) / (accumulation - at - 1)
                    assert gap(rest, later[key]) <= within, where


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("way", ["full", "local"])
def test_set_gradients_are_what_the_step_uses(way, precision, world):
    ranks = run_ranks(set_gradients, world, 1, precision, way, 0)
    check_set_gradients(ranks, 1, 0, 1e-5)


@pytest.mark.parametrize("mode", ["fp32", "bf16", "reproducible"])
def test_a_gradient_set_inside_a_window_counts_for_the_micro_batches_so_far(mode):
    more = {"shardledger": {"reproducible": True}} if mode == "reproducible" else {}
    precision = "bf16" if mode == "bf16" else "fp32"
    ranks = run_ranks(set_gradients, 2, 3, precision, "full", 0, more)
    check_set_gradients(ranks, 3, 0, 1e-4 if precision == "fp32" else 0.1)


def set_states(way):
    from shardledger import utils as u

    found = {}
    with group(60):
        for stage in STAGES:
            engine, micro = start("transformer", stage)
            engine.backward(engine(*micro[0]))
            engine.step()
            values = fresh_values("transformer", 9)
            for key, p in named(engine):
                if way == "full":
                    u.safe_set_full_optimizer_state(p, values[key], "exp_avg")
                else:
                    n = u.safe_get_local_optimizer_state(p, "exp_avg").numel()
                    skip = sum(int(row[0]) for row in engine.gather_scalars([float(n)])[: engine.rank])
                    part = values[key].flatten()[skip : skip + n] if stage else values[key].flatten()
                    u.safe_set_local_optimizer_state(p, part, "exp_avg")
                u.safe_set_full_optimizer_state(p, torch.tensor(41.0), "step")
            read = {key: u.safe_get_full_optimizer_state(p, "exp_avg") for key, p in named(engine)}
            engine.backward(engine(*micro[0]))
            engine.step()
            steps = {float(u.safe_get_full_optimizer_state(p, "step")) for _, p in named(engine)}
            found[stage] = (read, steps, engine.state_dict(all_ranks=True))
            engine.destroy()
    return found


@pytest.mark.parametrize("way", ["full", "local"])
def test_set_states_are_what_the_optimizer_goes_on_with(way):
    values = fresh_values("transformer", 9)
    ranks = run_ranks(set_states, 2, way)
    for found in ranks:
        for stage, (read, steps, after) in found.items():
            assert same_bits(read, {key: values[key] for key in read}) == [], stage
            assert steps == {42.0}, stage
            assert same_bits(after, ranks[0][0][2]) == [], stage


def whole_parameter_optimizer():
    import shardledger as sl
    from shardledger import utils as u

    with group(60):
        micro = micro_batches(data("transformer", 12), *place(), 1)
        settings = {**config(0), "train_micro_batch_size_per_gpu": len(micro[0][0])}
        engine = sl.initialize(model=build("transformer"), config=settings, optimizer=torch.optim.Adafactor)[0]
        engine.backward(engine(*micro[0]))
        engine.step()
        weight = engine.module.blocks[0].out.weight
        rows = u.safe_get_full_optimizer_state(weight, "row_var")
        bias = u.safe_get_full_optimizer_state(engine.module.blocks[0].out.bias, "variance")
        return rows.shape, bias.shape


def test_states_of_whole_parameters_come_in_their_own_shape():
    for rows, bias in run_ranks(whole_parameter_optimizer, 2):
        assert rows == (10, 1)
        assert bias == (10,)


# --- what is refused ---------------------------------------------------------------------------------------------


def tell(call):
    from shardledger.errors import ShardledgerError

    try:
        return f"no error but {call()}"
    except ShardledgerError as error:
        return f"{type(error).__name__}: {error}"


def refusals_of_states(u, down, base):
    wrong = torch.ones(2, 2)
    return {
        "grad before": tell(lambda: u.safe_get_full_grad(down)),
        "set grad before": tell(lambda: u.safe_set_full_grad(down, torch.ones(2, 9))),
        "local grad before": tell(lambda: u.safe_get_local_grad(down)),
        "state before": u.safe_get_full_optimizer_state(down, "exp_avg"),
        "local state before": u.safe_get_local_optimizer_state(down, "exp_avg"),
        "unknown before": tell(lambda: u.safe_get_full_optimizer_state(down, "exp_avgg")),
        "set state before": tell(lambda: u.safe_set_full_optimizer_state(down, wrong, "exp_avg")),
        "frozen get": tell(lambda: u.safe_get_full_fp32_param(base)),
        "frozen grad": tell(lambda: u.safe_get_full_grad(base)),
        "foreign": tell(lambda: u.safe_get_full_fp32_param(torch.nn.Parameter(torch.ones(3)))),
        "no parameter": tell(lambda: u.safe_get_full_fp32_param(torch.ones(3))),
    }


def refusals_of_values(u, engine, down):
    wrong, rank = torch.ones(2, 2), float(engine.rank)
    return {
        "grad after": tell(lambda: u.safe_get_full_grad(down)),
        "shape value": tell(lambda: u.safe_set_full_fp32_param(down, wrong)),
        "number": tell(lambda: u.safe_set_full_fp32_param(down, 3.0)),
        "shape state": tell(lambda: u.safe_set_full_optimizer_state(down, wrong, "exp_avg")),
        "unknown": tell(lambda: u.safe_get_full_optimizer_state(down, "momentum_buffer")),
        "values": tell(lambda: u.safe_set_full_fp32_param(down, torch.full((2, 9), rank))),
        "parameters": tell(lambda: u.safe_set_full_fp32_param(named(engine)[4 * engine.rank][1], wrong)),
    }


def refusals(stage):
    import shardledger as sl
    from shardledger import utils as u

    engine, micro = start("frozen", stage, accumulation=2)
    down, base = engine.module.layers[0].down, engine.module.layers[0].base.weight
    said = refusals_of_states(u, down, base)
    engine.backward(engine(*micro[0]))
    said["local grad inside"] = tell(lambda: u.safe_get_local_grad(down))
    engine.step()
    handle = engine.module.head.weight.register_hook(
        lambda _: said.update({"in backward": tell(lambda: u.safe_get_full_grad(down))})
    )
    engine.backward(engine(*micro[1]))
    handle.remove()
    said["shape grad"] = tell(lambda: u.safe_set_full_grad(down, torch.ones(2, 2)))
    engine.step()
    said.update(refusals_of_values(u, engine, down))
    with sl.GatheredParameters(down, modifier_rank=0):
        said["gathered"] = tell(lambda: u.safe_set_full_fp32_param(down, torch.ones(2, 9)))
    engine.destroy()
    said["destroyed"] = tell(lambda: u.safe_get_full_fp32_param(down))
    return said


def ask_for_what_is_not_there():
    with group(60):
        return {stage: refusals(stage) for stage in STAGES}


NAMED = {
    "grad before": "after engine.backward",
    "set grad before": "after engine.backward",
    "local grad before": "after engine.backward",
    "grad after": "after engine.backward",
    "unknown before": "'exp_avg', 'exp_avg_sq', 'step'",
    "unknown": "'exp_avg', 'exp_avg_sq', 'step'",
    "set state before": "Take a step first",
    "in backward": "backward pass is running",
    "shape grad": r"(2, 9) is needed, got (2, 2)",
    "shape value": r"(2, 9) is needed, got (2, 2)",
    "shape state": r"(2, 9) is needed, got (2, 2)",
    "number": "got a float",
    "values": "do not pass the same value",
}


def test_what_is_not_there_is_an_error_that_names_the_parameter_and_the_cure():
    for rank, found in enumerate(run_ranks(ask_for_what_is_not_there, 2, timeout=120)):
        for stage, said in found.items():
            for key, cure in NAMED.items():
                where = f"stage {stage}, rank {rank}, {key}: {said[key]}"
                assert "'layers.0.down'" in said[key] and cure in said[key], where
            assert said["state before"] is None
            local = said["local state before"]
            assert local is None or not local.numel(), stage
            for key in ("frozen get", "frozen grad"):
                assert "'layers.0.base.weight'" in said[key] and "GatheredParameters" in said[key], (stage, said[key])
            assert "no live engine has" in said["foreign"] and "no live engine has" in said["destroyed"]
            assert "got a Tensor" in said["no parameter"]
            assert "RanksDisagreeError" in said["parameters"], said["parameters"]
            assert ("no error" in said["local grad inside"]) == (stage >= 2), (stage, said["local grad inside"])
            if stage < 2:
                assert "full gradient" in said["local grad inside"]
            assert ("no error" in said["gathered"]) == (stage < 3), (stage, said["gathered"])
