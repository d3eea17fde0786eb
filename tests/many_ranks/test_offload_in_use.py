"""Offloaded states can be read, edited, saved and resumed like others, and states can be sent away and brought back."""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from support.models import build, data
from support.oracle import micro_batches, same_bits
from support.ranks import run_ranks
from support.training import config, group, place

ADAMW = {"optimizer": "AdamW", "lr": 0.01, "gradient_clipping": 0.1}


def zero_of(home: str, stage: int, folder: str) -> dict[str, Any]:
    """zero_optimization keys that put everything a stage can move on one home."""
    if home == "device":
        return {}
    section = {"device": home, **({"nvme_path": folder} if home == "nvme" else {})}
    zero: dict[str, Any] = {"offload_optimizer": section, "sub_group_size": 1024}
    return {**zero, "offload_param": section} if stage == 3 else zero


def start(stage: int, home: str, folder: str, precision: str = "fp32") -> Any:
    import shardledger as sl

    settings = config(stage, zero=zero_of(home, stage, folder), precision=precision, **ADAMW)
    engine = sl.initialize(model=build("transformer", 0), config={**settings, "train_micro_batch_size_per_gpu": 6})[0]
    rank, world = place()
    low = precision == "bf16"
    batch = [p.to(torch.bfloat16) if low and p.is_floating_point() else p for p in data("transformer", 12)]
    (part,) = micro_batches(batch, rank, world, 1)
    return engine, part


def steps(engine: Any, part: Any, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        loss = engine(*part)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def resume_across_homes(folder: str) -> dict[str, Any]:
    """Saved with one home, continued with another: losses and weights of the last two of four steps."""
    found = {}
    with group():
        for saved, loaded in (("device", "device"), ("nvme", "device"), ("device", "nvme"), ("cpu", "nvme")):
            engine, part = start(3, saved, folder, "bf16")
            steps(engine, part, 2)
            where = f"{folder}/saved-{saved}-{loaded}"
            engine.save_checkpoint(where)
            engine.destroy()
            engine, part = start(2 if loaded == "device" else 3, loaded, folder, "bf16")
            engine.load_checkpoint(where)
            found[f"{saved}, {loaded}"] = (steps(engine, part, 2), engine.state_dict())
            engine.destroy()
    return found


def test_a_run_resumes_on_another_home_bit_for_bit(tmp_path):
    ranks = run_ranks(resume_across_homes, 2, str(tmp_path), timeout=120)
    for found in ranks:
        losses, weights = found["device, device"]
        for key, (other_losses, other_weights) in found.items():
            assert other_losses == losses, key
            assert same_bits(other_weights, weights) == [], key


def read_and_edit(folder: str) -> dict[str, Any]:
    """What the access functions give and keep at every home."""
    import shardledger as sl
    from shardledger import utils

    found = {}
    with group():
        for stage, home in itertools.product((1, 3), ("device", "nvme")):
            engine, part = start(stage, home, folder, "bf16")
            steps(engine, part, 2)
            weight = next(p for p in engine.module.parameters() if p.numel() > 20)
            seen = [utils.safe_get_full_fp32_param(weight), utils.safe_get_full_optimizer_state(weight, "exp_avg")]
            utils.safe_set_full_fp32_param(weight, seen[0] + 1)
            utils.safe_set_full_optimizer_state(weight, seen[1] * 2, "exp_avg")
            seen += [utils.safe_get_full_fp32_param(weight), utils.safe_get_full_optimizer_state(weight, "exp_avg")]
            with sl.GatheredParameters([weight], modifier_rank=1), torch.no_grad():
                if engine.rank == 1:
                    weight.mul_(0.5)
            engine.load_state_dict({k: v * 1.5 for k, v in engine.state_dict().items()})
            losses = steps(engine, part, 2)
            found[f"{stage} {home}"] = (seen, losses, engine.state_dict())
            engine.destroy()
    return found


def test_weights_and_states_can_be_read_and_edited_wherever_they_rest(tmp_path):
    for found in run_ranks(read_and_edit, 2, str(tmp_path), timeout=120):
        for stage in (1, 3):
            seen, losses, weights = found[f"{stage} device"]
            other_seen, other_losses, other_weights = found[f"{stage} nvme"]
            assert all(torch.equal(a, b) for a, b in zip(seen, other_seen, strict=True))
            assert torch.equal(other_seen[2], seen[0] + 1) and torch.equal(other_seen[3], seen[1] * 2)
            assert other_losses == losses and same_bits(other_weights, weights) == []


def worked(engine: Any, part: Any) -> list[str]:
    """What could be done although states are away."""
    from shardledger.errors import ShardledgerError

    uses = {
        "forward": lambda: engine(*part),
        "step": engine.step,
        "reading a weight": lambda: next(p for p in engine.module.parameters() if p.numel()) + 1,
        "save": lambda: engine.save_checkpoint("nowhere"),
    }
    found = []
    for name, use in uses.items():
        try:
            use()
            found.append(name)
        except ShardledgerError:
            continue
    return found


def send_away(folder: str) -> list[str]:
    """Problems found when states are sent away between steps and brought back."""
    from shardledger.errors import EngineStateError
    from shardledger.runtime.census import state_census

    problems = []
    names = ("optim_states", "hp_params", "lp_params", "lp_grads")
    with group():
        for stage, precision in itertools.product((0, 2, 3), ("fp32", "bf16")):
            engine, part = start(stage, "device", folder, precision)
            plain = steps(engine, part, 4)
            engine.destroy()
            engine, part = start(stage, "device", folder, precision)
            losses = steps(engine, part, 2)
            parts = engine._live()
            before = state_census(parts.units, engine.optimizer)
            for include, device in ((None, "cpu"), (names[:2], "nvme"), (names[2:3], "cpu"), ((), "cpu")):
                engine.offload_states(include, device=device, nvme_path=folder)
                during = state_census(parts.units, engine.optimizer)
                for name, category in (("optim_states", "optimizer"), ("lp_params", "params"), ("lp_grads", "grads")):
                    if (include is None or name in include) and during[category] and (category, stage) != ("params", 3):
                        problems.append(f"{stage} {precision}: {during[category]} bytes of {category} stayed")
                if include is None and sum(during.values()):
                    problems.append(f"{stage} {precision}: {during} stayed")
                if include is None:
                    problems += [f"{use} worked on states that were away" for use in worked(engine, part)]
                engine.reload_states()
                if state_census(parts.units, engine.optimizer) != before:
                    problems.append(f"{stage} {precision}: other bytes came back")
            try:
                engine.offload_states(["moments"])
                problems.append("an unknown name was taken")
            except ValueError as error:
                if "optim_states" not in str(error):
                    problems.append(str(error))
            losses += steps(engine, part, 2)
            if losses != plain:
                problems.append(f"{stage} {precision}: {losses} instead of {plain}")
            engine.offload_states()
            try:
                engine.step()
                problems.append("a step was taken without states")
            except EngineStateError as error:
                if "reload_states" not in str(error):
                    problems.append(str(error))
            engine.destroy()
    return problems


def test_states_sent_away_free_their_memory_and_come_back_as_they_were(tmp_path):
    assert run_ranks(send_away, 2, str(tmp_path), timeout=120) == [[], []]
    assert os.listdir(tmp_path) == []


def refuse_paths(folder: str) -> list[str]:
    """What initialize says of folders that cannot be used; only rank 1's is wrong in the second case."""
    import shardledger.transport.disk_folder as disk_folder
    from shardledger.errors import ShardledgerError

    said = []
    rank, _ = place()
    with group():
        for path in (f"{folder}/missing", f"{folder}/missing" if rank else folder, f"{folder}/file"):
            try:
                start(1, "nvme", path)
                said.append("accepted")
            except ShardledgerError as error:
                said.append(f"{type(error).__name__}: {error}")
        free = disk_folder.free_bytes
        disk_folder.free_bytes = lambda path: 10_000
        try:
            start(1, "nvme", folder)
        except ShardledgerError as error:
            said.append(f"{type(error).__name__}: {error}")
        disk_folder.free_bytes = free
    return said


def test_a_folder_that_cannot_be_used_is_an_error_on_all_ranks_before_training(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    first, second = run_ranks(refuse_paths, 2, str(tmp_path), timeout=60)
    for said in (first, second):
        assert "there is no such folder" in said[0] and "zero_optimization.offload_optimizer.nvme_path" in said[0]
        assert "that is no folder" in said[2]
        assert said[3].startswith("DoesNotFitError") and "10,000 are free" in said[3]
    assert "ranks [1] cannot use" in first[1] and "there is no such folder" in second[1]
    assert [p.name for p in Path(tmp_path).iterdir()] == ["file"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_named(tmp_path):
    tmp_path.chmod(0o500)
    (said,) = run_ranks(refuse_paths, 1, str(tmp_path), timeout=60)
    tmp_path.chmod(0o700)
    assert "may not write there" in said[3]
