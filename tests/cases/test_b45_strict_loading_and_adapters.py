"""B45, B53, B54: loading into another stage, with names missing, with ties, with adapters alone."""

from __future__ import annotations

import torch
from torch import nn

from support.models import FrozenRegressor, build, data
from support.ranks import run_ranks
from support.training import config, group, place


def start(model, stage):
    import shardledger as sl

    settings = {**config(stage, optimizer="AdamW", lr=0.05), "train_micro_batch_size_per_gpu": 6}
    return sl.initialize(model=model, config=settings)[0]


def refused(engine, *arguments, **options):
    try:
        engine.load_checkpoint(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "was not refused"


def adapters(folder):
    """Save a model of frozen layers and adapters without the frozen ones; load it strictly and not."""
    rank, _ = place()
    with group():
        engine = start(build("frozen"), 3)
        engine.backward(engine(*data("frozen", 12)))
        engine.step()
        engine.save_checkpoint(folder, "adapters", exclude_frozen_parameters=True)
        engine.save_checkpoint(folder, "all")
        saved = engine.state_dict(all_ranks=True)
        engine.destroy()
        told, kept = [], []
        for stage in (3, 0):
            fresh = start(build("frozen", seed=3), stage)
            before = fresh.state_dict(all_ranks=True)
            told.append(refused(fresh, folder, "adapters"))
            told.append(refused(fresh, folder, "adapters", load_module_strict=True, load_module_only=True))
            unchanged = fresh.state_dict(all_ranks=True)
            assert all(torch.equal(before[name], unchanged[name]) for name in before), "a refused load changed weights"
            fresh.load_checkpoint(folder, "adapters", load_module_strict=False)
            now = fresh.state_dict(all_ranks=True)
            frozen = [name for name in now if ".base." in name]
            assert frozen and all(torch.equal(now[name], before[name]) for name in frozen)
            kept.append(all(torch.equal(now[name], saved[name]) for name in now if name not in frozen))
            fresh.destroy()
        wide = start(FrozenRegressor(width=9, layers=4, rank=3), 1)
        told.append(refused(wide, folder, "all"))
        told.append(refused(wide, folder, "all", load_module_strict=False))
        wide.destroy()
        return told, kept


def test_missing_unexpected_and_misshapen_names_are_listed_with_shapes(tmp_path):
    first, second = run_ranks(adapters, 2, str(tmp_path))
    assert first == second
    told, kept = first
    assert kept == [True, True]
    for text in told[:4]:
        assert "'layers.0.base.weight' (9, 9) is missing in the checkpoint" in text
        assert "load_module_strict=False" in text and "size [0]" not in text and "CheckpointError" in text
    for text in told[4:]:
        assert "'layers.0.down' has shape (2, 9) in the checkpoint and (3, 9) in the model" in text
    assert "'layers.3.base.weight' (9, 9) is missing" in told[4] and "missing" not in told[5]


def test_a_file_of_adapters_holds_them_whole_and_nothing_else(tmp_path):
    from shardledger.checkpoint.folder import read_manifest
    from shardledger.checkpoint.reader import CheckpointReader
    from shardledger.layout.flat import Interval

    run_ranks(adapters, 2, str(tmp_path))
    manifest = read_manifest(tmp_path / "adapters")
    shapes = {record.name: record.shape for record in manifest.parameters}
    wanted = {name: tuple(p.shape) for name, p in build("frozen").named_parameters() if p.requires_grad}
    assert shapes == wanted
    with CheckpointReader(tmp_path / "adapters", manifest) as reader:
        for record in manifest.parameters:
            values = torch.full((record.numel,), float("nan"))
            reader.read(record.name, Interval(0, record.numel), values)
            assert bool(values.isfinite().all()) and record.numel > 0


class Wrapped(nn.Module):
    """The same model one level deeper, as an adapter library leaves it."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *batch):
        return self.inner(*batch)


def ties(folder):
    with group():
        engine = start(Wrapped(build("transformer")), 3)
        engine.backward(engine(*data("transformer", 12)))
        engine.step()
        engine.save_checkpoint(folder)
        saved = engine.state_dict(all_ranks=True)
        engine.destroy()
        loaded = {}
        for name, stage in (("transformer", 0), ("transformer", 2), ("untied", 3)):
            engine = start(Wrapped(build(name, seed=4)), stage)
            engine.load_checkpoint(folder)
            values = engine.state_dict(all_ranks=True)
            same = all(torch.equal(values[key], saved[key]) for key in saved)
            head, table = engine.module.inner.head.weight, engine.module.inner.embedding.weight
            engine.backward(engine(*data("transformer", 12)))
            engine.step()
            loaded[name, stage] = same, head is table
            engine.destroy()
        return loaded


def test_a_tied_weight_is_stored_once_and_the_tie_is_the_models_own(tmp_path):
    from shardledger.checkpoint.folder import read_manifest

    for loaded in run_ranks(ties, 2, str(tmp_path)):
        assert loaded == {
            ("transformer", 0): (True, True),
            ("transformer", 2): (True, True),
            ("untied", 3): (True, False),
        }
    manifest = read_manifest(tmp_path / "global_step1")
    assert manifest.tied == {"inner.head.weight": "inner.embedding.weight"}
    assert "inner.head.weight" not in {entry.of for _, entry in manifest.entries()}
