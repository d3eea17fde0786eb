"""What save_checkpoint and load_checkpoint accept, return and refuse, on one rank."""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import shardledger as sl
from shardledger.checkpoint.files import Files
from shardledger.checkpoint.folder import read_manifest
from shardledger.errors import CheckpointError, EngineStateError
from support.models import TwoHeads, build, data, numbers
from support.training import config


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(0)


EXTRA = "_extra_state"


def start(model=None, stage=2, optimizer="AdamW", seed=0, **more):
    arguments = {key: more.pop(key) for key in ("lr_scheduler", "optimizer_object") if key in more}
    if "optimizer_object" in arguments:
        arguments["optimizer"] = arguments.pop("optimizer_object")
    params = {"optimizer_params": more.pop("optimizer_params", {})}
    settings = {**config(stage, optimizer=optimizer, lr=0.05, **params), "train_micro_batch_size_per_gpu": 12, **more}
    model = build("regressor", seed) if model is None else model
    return sl.initialize(model=model, config=settings, device="cpu", **arguments)[0]


def step(engine, name="regressor"):
    engine.backward(engine(*data(name, 12)))
    engine.step()


def weights(engine):
    return {name: value.clone() for name, value in engine.state_dict().items() if name != EXTRA}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- calls and their results ---------------------------------------------------------------------------------------


def test_tags_paths_and_client_state_are_deepspeeds(tmp_path):
    engine = start()
    step(engine)
    assert engine.save_checkpoint(tmp_path, client_state={"epoch": 3, "table": torch.arange(3)}) is True
    assert (tmp_path / "latest").read_text() == "global_step1"
    assert engine.save_checkpoint(str(tmp_path), tag=17, save_latest=False) is True
    assert (tmp_path / "latest").read_text() == "global_step1"
    path, client = engine.load_checkpoint(tmp_path)
    assert path == str(tmp_path / "global_step1")
    assert client["epoch"] == 3 and torch.equal(client["table"], torch.arange(3))
    assert engine.load_checkpoint(tmp_path, tag="17") == (str(tmp_path / "17"), {})


def test_nothing_to_load_is_none_and_a_warning_and_changes_nothing(tmp_path):
    engine = start()
    before = weights(engine)
    with pytest.warns(UserWarning, match="no file 'latest'"):
        assert engine.load_checkpoint(tmp_path / "never") == (None, {})
    engine.save_checkpoint(tmp_path, "kept", save_latest=False)
    with pytest.warns(UserWarning, match="It holds kept: pass one as tag="):
        assert engine.load_checkpoint(tmp_path) == (None, {})
    assert same(before, weights(engine))


def test_an_empty_pointer_is_said_to_be_empty(tmp_path):
    engine = start()
    engine.save_checkpoint(tmp_path, "good")
    (tmp_path / "latest").write_text("")
    with pytest.raises(CheckpointError, match=r"latest is empty.*good"):
        engine.load_checkpoint(tmp_path)


def test_a_tag_that_is_not_there_names_those_that_are(tmp_path):
    engine = start()
    engine.save_checkpoint(tmp_path, "good")
    with pytest.raises(CheckpointError, match=r"does not exist.*good"):
        engine.load_checkpoint(tmp_path, "bad")
    (tmp_path / "half").mkdir()
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        engine.load_checkpoint(tmp_path, "half")


@pytest.mark.parametrize("tag", ["", "a/b", "..", ".hidden", "latest"])
def test_a_tag_that_is_no_folder_name_is_refused(tmp_path, tag):
    with pytest.raises(CheckpointError, match="cannot name a checkpoint"):
        start().save_checkpoint(tmp_path, tag)


@pytest.mark.parametrize("optimizer", ["AdamW", "Adagrad"])
def test_saved_before_the_first_step_loaded_after_some(tmp_path, optimizer):
    engine = start(optimizer=optimizer)
    engine.save_checkpoint(tmp_path, "start")
    step(engine)
    first = weights(engine)
    step(engine)
    engine.load_checkpoint(tmp_path, "start")
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (0, 0, 0)
    step(engine)
    assert same(first, weights(engine)), "moments of the later steps were still there"


def test_loading_twice_is_loading_once(tmp_path):
    engine = start()
    step(engine)
    engine.save_checkpoint(tmp_path)
    step(engine)
    expected = weights(engine)
    for _ in range(2):
        engine.load_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path)
        step(engine)
        assert same(expected, weights(engine))


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("ends", ["with a micro-batch of the other head", "at once"])
def test_a_window_goes_on_with_the_gradients_that_were_there_at_the_save(tmp_path, stage, ends):
    batch = numbers(12, 6)

    def end(engine):
        if ends == "at once":
            engine.flush()
        else:
            engine.backward(engine(*batch, 1))
            engine.step()
        return weights(engine)

    engine = start(TwoHeads(), stage, gradient_accumulation_steps=2)
    engine.backward(engine(*batch, 0))
    with pytest.raises(EngineStateError, match=r"between engine\.backward\(loss\) and engine\.step\(\)"):
        engine.save_checkpoint(tmp_path)
    engine.step()
    engine.save_checkpoint(tmp_path)
    expected = end(engine)
    fresh = start(TwoHeads(), stage, gradient_accumulation_steps=2)
    fresh.load_checkpoint(tmp_path)
    assert fresh.is_gradient_accumulation_boundary() and fresh.global_steps == 0
    assert same(expected, end(fresh))
    assert fresh.global_steps == 1 and not fresh.is_gradient_accumulation_boundary()


def test_a_load_drops_the_window_it_interrupts(tmp_path):
    engine = start(gradient_accumulation_steps=2)
    engine.save_checkpoint(tmp_path)
    for _ in range(2):
        step(engine)
    expected = weights(engine)
    step(engine)
    engine.load_checkpoint(tmp_path)
    for _ in range(2):
        step(engine)
    assert same(expected, weights(engine))


def test_inside_gathered_parameters_both_are_refused(tmp_path):
    engine = start(stage=3)
    engine.save_checkpoint(tmp_path)
    with sl.GatheredParameters(list(engine.module.parameters())):
        with pytest.raises(EngineStateError, match="GatheredParameters"):
            engine.save_checkpoint(tmp_path)
        with pytest.raises(EngineStateError, match="GatheredParameters"):
            engine.load_checkpoint(tmp_path)


def test_a_client_state_that_needs_code_is_refused_when_it_is_saved(tmp_path):
    engine = start()
    with pytest.raises(CheckpointError, match=r"client_state holds.*Namespace.*add_safe_globals"):
        engine.save_checkpoint(tmp_path, client_state={"args": argparse.Namespace(lr=1)})
    assert not (tmp_path / "latest").exists()
    with torch.serialization.safe_globals([argparse.Namespace]):
        engine.save_checkpoint(tmp_path, client_state={"args": argparse.Namespace(lr=1)})
        assert engine.load_checkpoint(tmp_path)[1]["args"].lr == 1
    with pytest.raises(CheckpointError, match="add_safe_globals"):
        engine.load_checkpoint(tmp_path)


def test_parts_may_be_left_out_of_a_load(tmp_path):
    engine = start(scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4}})
    for _ in range(3):
        step(engine)
    engine.save_checkpoint(tmp_path, client_state={"a": 1})
    saved, rate = weights(engine), engine.get_lr()
    fresh = start(seed=4, scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 4}})
    begin = fresh.get_lr()
    assert fresh.load_checkpoint(tmp_path, load_module_only=True)[1] == {"a": 1}
    assert same(saved, weights(fresh)) and fresh.get_lr() == begin and fresh.global_steps == 0
    fresh.load_checkpoint(tmp_path, load_optimizer_states=False)
    assert fresh.get_lr() == rate and fresh.global_steps == 3 and not fresh.optimizer.state
    other = start(optimizer="SGD")
    with pytest.raises(CheckpointError, match=r"states of AdamW.*is SGD.*load_optimizer_states=False"):
        other.load_checkpoint(tmp_path)


# --- what is stored ------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """Every kind of value: tied, frozen, complex, wide, integer and empty parameters; views, extra state, buffers."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.table.weight
        self.base = nn.Linear(4, 4)
        self.base.requires_grad_(False)
        self.spectrum = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.randn(2, dtype=torch.float64))
        self.steps = nn.Parameter(torch.arange(4), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("view", torch.zeros(1000, 1000)[3, :7])
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.told = "before"

    def get_extra_state(self):
        return {"told": self.told}

    def set_extra_state(self, state):
        self.told = state["told"]

    def forward(self):
        hidden = torch.tanh(self.base(self.table.weight))
        return (self.out(hidden).square().mean() + self.spectrum.abs().sum() + self.wide.sum()).float()


@pytest.mark.parametrize("stage", [0, 3])
def test_every_kind_of_value_comes_back(tmp_path, stage):
    engine = start(Mixed(), stage=stage, optimizer="Adam", optimizer_params={"fused": False})
    module = engine.module
    engine.backward(engine())
    engine.step()
    with torch.no_grad():
        module.mask.logical_not_()
        module.view.add_(3)
        module.told = "saved"
    engine.save_checkpoint(tmp_path)
    saved = weights(engine)
    states = [{k: torch.as_tensor(v).clone() for k, v in s.items()} for s in engine.optimizer.state.values()]
    fresh = start(Mixed(), stage=stage, optimizer="Adam", optimizer_params={"fused": False})
    fresh.load_checkpoint(tmp_path)
    again = weights(fresh)
    assert same(saved, again)
    assert fresh.module.told == "saved" and fresh.module.mask.tolist() == [False, True]
    assert all(map(same, states, fresh.optimizer.state.values()))


def test_files_are_as_large_as_their_tensors_and_hold_each_element_once(tmp_path):
    engine = start(Mixed(), stage=2, optimizer="Adam", optimizer_params={"fused": False})
    engine.backward(engine())
    engine.step()
    engine.save_checkpoint(tmp_path)
    folder = tmp_path / "global_step1"
    manifest = read_manifest(folder)
    assert dict(manifest.tied) == {"out.weight": "table.weight"}
    assert {b.name for b in manifest.buffers} == {"mask", "view"}
    total = 0
    for file in manifest.files:
        assert (folder / file.name).stat().st_size == file.bytes
        if file.entries:
            tensors = load_file(folder / file.name)
            assert set(tensors) == {entry.key for entry in file.entries}
            assert all(tensor.numel() for tensor in tensors.values())
            payload = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
            assert file.bytes - payload < 400 * (1 + len(tensors)), "a view has dragged its storage along"
            total += payload
    trained = 20 * 4 + 3 * 8 + 2 * 8
    states = 2 * trained + 3 * 4
    assert total == trained + states + 20 * 4 + 4 * 8 + 2 + 7 * 4
    assert len({(e.of, e.role, e.start) for f in manifest.files for e in f.entries}) == len(manifest.entries())


def test_a_damaged_file_is_named_before_anything_is_loaded(tmp_path):
    engine = start()
    step(engine)
    engine.save_checkpoint(tmp_path)
    step(engine)
    before = weights(engine)
    victim = tmp_path / "global_step1/rank-00000/unit-0000.safetensors"
    content = bytearray(victim.read_bytes())
    content[-3] ^= 1
    victim.write_bytes(bytes(content))
    with pytest.raises(CheckpointError, match=r"unit-0000\.safetensors is damaged"):
        engine.load_checkpoint(tmp_path)
    victim.unlink()
    with pytest.raises(CheckpointError, match=r"No such file.*unit-0000\.safetensors"):
        engine.load_checkpoint(tmp_path)
    assert same(before, weights(engine)) and engine.global_steps == 2


class Odd(torch.optim.SGD):
    """Keeps a state of a kind that no checkpoint can hold."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].update(calls=self.state[parameter].get("calls", 0) + 1, note=self.note)

    note: object = None


def test_states_that_are_numbers_are_kept_and_others_refused_by_name(tmp_path):
    engine = start(optimizer_object=lambda groups: Odd(groups, lr=0.1))
    step(engine)
    step(engine)
    engine.save_checkpoint(tmp_path)
    fresh = start(optimizer_object=lambda groups: Odd(groups, lr=0.1))
    fresh.load_checkpoint(tmp_path)
    assert {state["calls"] for state in fresh.optimizer.state.values()} == {2}
    engine.optimizer.note = object()
    step(engine)
    with pytest.raises(EngineStateError, match=r"'note' of parameter 'first\.weight' cannot be saved.*object"):
        engine.save_checkpoint(tmp_path)


# --- asynchronous saves and retention ------------------------------------------------------------------------------


class SlowFiles(Files):
    """A disk that waits to be let go."""

    def __init__(self):
        self.go = threading.Event()
        self.error: OSError | None = None

    def write_parts(self, path, tensors):
        assert self.go.wait(20)
        if self.error is not None:
            raise self.error
        super().write_parts(path, tensors)


def test_an_asynchronous_save_holds_the_moment_of_its_call_and_does_not_block_training(tmp_path):
    engine = start(shardledger={"checkpoint": {"async": True}})
    step(engine)
    expected = weights(engine)
    engine.checkpoints.files = disk = SlowFiles()
    engine.save_checkpoint(tmp_path, "then")
    for _ in range(3):
        step(engine)
    assert not (tmp_path / "latest").exists() and not (tmp_path / "then").exists()
    disk.go.set()
    deadline = time.monotonic() + 20
    while engine.checkpoints.pending and time.monotonic() < deadline:
        step(engine)  # published by a step, without a call
    assert (tmp_path / "latest").read_text() == "then"
    (report,) = engine.checkpoints.take_reports()
    assert report.blocked_s < report.seconds and report.bytes > 0 and report.step == 1
    engine.load_checkpoint(tmp_path)
    assert same(expected, weights(engine)) and engine.global_steps == 1


def test_an_error_of_an_asynchronous_save_comes_up_at_a_later_step_and_training_can_go_on(tmp_path):
    engine = start(shardledger={"checkpoint": {"async": True}})
    engine.checkpoints.files = disk = SlowFiles()
    disk.error = OSError(28, "No space left on device", "somewhere")
    engine.save_checkpoint(tmp_path, "full")
    disk.go.set()
    with pytest.raises(CheckpointError, match="No space left on device"):
        for _ in range(1000):
            step(engine)
    engine.checkpoints.files = Files()
    engine.save_checkpoint(tmp_path, "next")
    engine.destroy()
    assert sorted(os.listdir(tmp_path)) == ["latest", "next"], "destroy publishes what is under way"


def test_two_engines_save_into_one_folder_at_once_but_not_as_one_tag(tmp_path):
    one, other = (start(shardledger={"checkpoint": {"async": True}}) for _ in range(2))
    one.checkpoints.files = disk = SlowFiles()
    one.save_checkpoint(tmp_path, "one")
    other.save_checkpoint(tmp_path, "other")
    other.checkpoints.wait()
    with pytest.raises(CheckpointError, match="is being saved by another run or engine at this moment"):
        other.save_checkpoint(tmp_path, "one")
    disk.go.set()
    one.checkpoints.wait()
    other.save_checkpoint(tmp_path, "one")
    other.checkpoints.wait()
    assert sorted(os.listdir(tmp_path)) == ["latest", "one", "other"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_lock_ends_with_its_process_although_a_child_of_it_lives_on(tmp_path):
    reader, writer = os.pipe()
    holder = os.fork()
    if holder == 0:
        Files().lock(tmp_path)
        if os.fork():
            os.write(writer, b"x")
        time.sleep(5)  # both, unless killed
        os._exit(0)
    os.read(reader, 1)
    assert Files().in_use(tmp_path)
    os.kill(holder, 9)
    os.waitpid(holder, 0)
    assert not Files().in_use(tmp_path)


def test_an_asynchronous_save_copies_to_the_same_memory_every_time(tmp_path):
    engine = start(shardledger={"checkpoint": {"async": True}})
    step(engine)
    seen = []
    for tag in "ab":
        engine.save_checkpoint(tmp_path, tag)
        step(engine)
        engine.checkpoints.wait()
        seen.append({place: tensor.data_ptr() for place, tensor in engine.checkpoints._staging._kept.items()})
    assert seen[0] == seen[1] and seen[0]


def test_retention_keeps_the_last_ones_and_every_so_manieth_and_what_users_named(tmp_path):
    engine = start(shardledger={"checkpoint": {"keep_last": 2, "keep_every": 4}})
    engine.save_checkpoint(tmp_path, "best")
    for _ in range(9):
        step(engine)
        engine.save_checkpoint(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["best", "global_step4", "global_step8", "global_step9", "latest"]


def test_leftovers_of_interrupted_saves_are_removed_by_the_next_one(tmp_path):
    engine = start()
    (tmp_path / ".old.saving/rank-00000").mkdir(parents=True)
    (tmp_path / ".older.removing").mkdir()
    with pytest.warns(UserWarning, match="An interrupted save has left old"):
        assert engine.load_checkpoint(tmp_path) == (None, {})
    engine.save_checkpoint(tmp_path, "new")
    assert sorted(os.listdir(tmp_path)) == ["latest", "new"]


def test_a_manifest_that_leads_out_of_its_folder_or_is_newer_is_refused(tmp_path):
    engine = start()
    engine.save_checkpoint(tmp_path, "x")
    path = Path(tmp_path / "x/manifest.json")
    plain = json.loads(path.read_text())
    for change, message in (
        ({"version": 2}, "version 2 of the format"),
        ({"format": "other"}, "not the manifest"),
        ({"files": [{**plain["files"][0], "name": "../../secret"}]}, "damaged"),
        ({"counters": None}, "damaged"),
    ):
        path.write_text(json.dumps({**plain, **change}))
        with pytest.raises(CheckpointError, match=message):
            engine.load_checkpoint(tmp_path)
    path.write_text(json.dumps(plain)[:100])
    with pytest.raises(CheckpointError, match="not JSON"):
        engine.load_checkpoint(tmp_path)


def test_a_destroyed_engine_says_so(tmp_path):
    engine = start()
    engine.destroy()
    with pytest.raises(EngineStateError, match="destroyed"):
        engine.save_checkpoint(tmp_path)
