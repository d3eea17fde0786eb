"""Checkpoints of DeepSpeed, read without DeepSpeed and without running what is in them."""

import os
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardledger.checkpoint.deepspeed import open_deepspeed
from shardledger.checkpoint.deepspeed_pickle import load_restricted
from shardledger.errors import CheckpointError
from support.deepspeed import NAMES, OLD_FIXTURES, OLD_NAMES, checkpoint_of, expected_facts, expected_tensors


def same_bits(found, wanted):
    """Equal dtype, shape and bytes; `torch.equal` alone takes -0.0 for 0.0."""
    as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (found, wanted)]
    return found.dtype == wanted.dtype and found.shape == wanted.shape and torch.equal(*as_bytes)


def read(checkpoint, what, name):
    if what == "model":
        return checkpoint.weight(name)
    if what == "buffer":
        return checkpoint.buffers[name]
    if what == "fp32":
        return checkpoint.master(name)
    value = checkpoint.state(name, what)
    return torch.tensor(int(value)) if what == "step" else value


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_comes_out_bit_for_bit(name):
    checkpoint = open_deepspeed(checkpoint_of(name), checksums=True)
    wanted = {k.removeprefix("save/"): v for k, v in expected_tensors(name).items() if k.startswith("save/")}
    assert len(wanted) == 79
    assert [k for k, v in wanted.items() if not same_bits(read(checkpoint, *k.split("/", 1)), v)] == []
    assert {p.name for p in checkpoint.parameters} == {k.split("/", 1)[1] for k in wanted if k.startswith("model/")}


@pytest.mark.parametrize("name", OLD_NAMES)
def test_checkpoints_of_version_0_16_come_out_bit_for_bit(name):
    checkpoint = open_deepspeed(OLD_FIXTURES / name / "checkpoint", checksums=True)
    wanted = load_file(OLD_FIXTURES / name / "expected.safetensors")
    assert checkpoint.facts.version == "0.16.9" and len(wanted) == 45
    assert [k for k, v in wanted.items() if not same_bits(read(checkpoint, *k.split("/", 1)), v)] == []
    assert checkpoint.facts.stage == int(name[1])


@pytest.mark.parametrize("name", NAMES)
def test_everything_beside_the_tensors_comes_out(name):
    facts, wanted = open_deepspeed(checkpoint_of(name)).facts, expected_facts(name)
    assert (facts.stage, facts.world, facts.tag) == (wanted["stage"], wanted["world_size"], wanted["tag"])
    counters = wanted["counters_at_save"]
    assert (facts.global_steps, facts.global_samples) == (counters["global_steps"], counters["global_samples"])
    assert facts.scheduler == counters["lr_scheduler"]
    assert facts.client_state == wanted["client_state"]
    assert facts.config == wanted["config"]
    groups = [(g["names"], g["lr"], g["weight_decay"]) for g in facts.param_groups]
    assert [(sorted(n), lr, decay) for n, lr, decay in groups] == [
        (sorted(g["names"]), g["lr_at_save"], g["weight_decay"]) for g in wanted["param_groups"]
    ]
    scaler = wanted["loss_scaler_at_save"]
    assert {**facts.loss_scaler, "dtype": None} == {**scaler, "dtype": None}


def test_tied_names_are_known_although_only_rank_0_of_stage_3_notes_them():
    checkpoint = open_deepspeed(checkpoint_of("stage3_bf16_w3"))
    assert checkpoint.tied == {"head.weight": "embed.weight"}
    assert same_bits(checkpoint.weight("head.weight"), checkpoint.weight("embed.weight"))


def test_one_parameter_is_read_at_a_time(tmp_path):
    """Memory: a file of 64 MiB is opened and one of its parameters read within a few MiB."""
    numel, big = 2**24, torch.ones(2**24)
    model = {
        "module": {"a": torch.empty(0), "b": torch.empty(0)},
        "buffer_names": [],
        "param_shapes": [{"a": torch.Size([numel - 8]), "b": torch.Size([8])}],
        "ds_config": {},
        "ds_version": "0.18.0",
    }
    inner = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    flat = {"fp32_flat_groups": [big], "optimizer_state_dict": inner, "partition_count": 1, "zero_stage": 3}
    folder = tmp_path / "global_step1"
    folder.mkdir()
    torch.save(model, folder / "zero_pp_rank_0_mp_rank_00_model_states.pt")
    torch.save({"optimizer_state_dict": flat}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    del big, flat
    before = resident_bytes()
    checkpoint = open_deepspeed(folder)
    assert checkpoint.master("b").tolist() == [1.0] * 8
    assert resident_bytes() - before < 24 * 2**20


def resident_bytes():
    import psutil

    return psutil.Process().memory_info().rss


# --- what is not all there -------------------------------------------------------------------------------------------


@pytest.fixture
def broken(tmp_path):
    """A copy to break, and the folder of its tag."""

    def make(name):
        folder = Path(shutil.copytree(checkpoint_of(name), tmp_path / name))
        return folder, folder / "global_step6"

    return make


def refused(path, **options):
    with pytest.raises(CheckpointError) as caught:
        open_deepspeed(path, **options)
    return str(caught.value)


def test_a_missing_rank_is_named(broken):
    folder, tag = broken("stage3_bf16_w3")
    (tag / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    message = refused(folder)
    assert "saved by 3 ranks" in message and "optimizer states of rank 1 are missing" in message
    folder, tag = broken("stage3_fp32_w2")
    (tag / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    assert "missing: ranks 1" in refused(folder)
    folder, tag = broken("stage2_bf16_w2")
    (tag / "mp_rank_00_model_states.pt").unlink()
    assert "no *_model_states.pt, only optimizer states" in refused(folder)


def test_files_of_another_save_are_noticed(broken):
    folder, tag = broken("stage1_fp32_w2")
    name = "zero_pp_rank_2_mp_rank_00_optim_states.pt"
    shutil.copy(tag / name.replace("2_mp", "1_mp"), tag / name)
    assert "mixes saves of different numbers of ranks" in refused(folder)
    folder, tag = broken("stage2_bf16_w2")
    shutil.copy(
        checkpoint_of("stage1_bf16_w1") / "global_step6" / "mp_rank_00_model_states.pt",
        tag / "mp_rank_00_model_states.pt",
    )
    assert "saved by 1 ranks, the optimizer states beside it by 2" in refused(folder)


def test_a_file_that_breaks_off_is_named(broken):
    folder, tag = broken("stage2_fp16_w2")
    file = tag / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    whole = file.read_bytes()
    for length in (0, 100, len(whole) // 2, len(whole) - 10):
        file.write_bytes(whole[:length])
        message = refused(folder)
        assert file.name in message and "cut off" in message


def test_a_flipped_bit_in_a_tensor_is_found(broken):
    folder, tag = broken("stage1_bf16_w1")
    file = tag / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    whole = bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as archive:
        record = max(archive.infolist(), key=lambda item: item.file_size)
    whole[record.header_offset + len(record.filename) + 30 + 200] ^= 1
    file.write_bytes(whole)
    message = refused(folder, checksums=True)
    assert file.name in message and record.filename in message and "checksum" in message


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "is empty"),
        (lambda path: path.write_text("x"), "is a file"),
        (lambda path: (path.mkdir(), (path / "notes.txt").write_text("x")), "no DeepSpeed checkpoint in it"),
        (lambda path: (path.mkdir(), (path / "manifest.json").write_text("{}")), "a shardledger checkpoint already"),
        (lambda path: (path.mkdir(), (path / "latest").write_text("step9")), "names is not there ('step9')"),
    ],
)
def test_a_wrong_folder_is_explained(tmp_path, prepare, expected):
    prepare(tmp_path / "it")
    assert expected in refused(tmp_path / "it")


def test_a_wrong_tag_is_answered_with_those_that_are_there():
    assert "no DeepSpeed checkpoint 'global_step7'; there: global_step6" in refused(
        checkpoint_of("stage1_bf16_w1"), tag="global_step7"
    )


def test_the_folder_of_a_tag_and_a_folder_without_latest_are_understood(broken):
    folder, tag = broken("stage1_bf16_w1")
    assert open_deepspeed(tag).facts.global_steps == 6
    (folder / "latest").unlink()
    assert "no file 'latest'" in refused(folder) and "--tag: global_step6" in refused(folder)
    assert open_deepspeed(folder, "global_step6").facts.global_steps == 6


# --- what a pickle may name ------------------------------------------------------------------------------------------


class Bomb:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


class Mine:
    """A harmless object of the user's."""

    def __init__(self):
        self.seen = {"a": [1, 2]}


def repack(file, content, protocol):
    """Replace the pickle inside a file of torch.save."""
    with zipfile.ZipFile(file) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    (name,) = [name for name in records if name.endswith("/data.pkl")]
    records[name] = pickle.dumps(content, protocol=protocol)
    with zipfile.ZipFile(file, "w") as archive:
        for key, value in records.items():
            archive.writestr(key, value)


@pytest.mark.parametrize(("protocol", "expected"), [(2, f"names {os.name}.mkdir"), (4, "STACK_GLOBAL")])
def test_code_in_a_pickle_is_not_run_and_is_named(broken, tmp_path, protocol, expected):
    folder, tag = broken("stage2_bf16_w2")
    marker = tmp_path / "run"
    file = tag / "mp_rank_00_model_states.pt"
    repack(file, {"module": {}, "client": Bomb(marker)}, protocol)
    message = refused(folder)
    assert expected in message and file.name in message and "do not trust" in message
    assert not marker.exists()


def test_stand_ins_cannot_be_used_to_reach_other_names(tmp_path):
    """A dotted name inside an allowed module, and an attribute of an allowed class, stay closed."""
    for text in (b"ctorch\n_utils._rebuild_tensor_v2.__globals__\n.", b"ctorch._utils\n__builtins__\n."):
        file = tmp_path / "x.pt"
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("x/data.pkl", b"\x80\x02" + text)
        with pytest.raises(CheckpointError, match="only the classes"):
            load_restricted(file)


def test_objects_of_the_users_own_are_skipped_on_request(broken):
    folder, tag = broken("stage1_bf16_w1")
    file = tag / "mp_rank_00_model_states.pt"
    state = torch.load(file, weights_only=True)
    torch.save({**state, "mine": Mine(), "after": 5}, file)
    name = f"{Mine.__module__}.Mine"
    assert f"--inert {name}" in refused(folder)
    facts = open_deepspeed(folder, inert=[name]).facts
    assert facts.client_state["after"] == 5 and facts.client_state["consumed_samples"] == 24
