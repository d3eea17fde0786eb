"""inspect, verify, diff, export and import, as a user types them."""

import ctypes
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from shardledger.checkpoint.manifest import Entry, parse_manifest
from shardledger.checkpoint.stream import Promise, write_safetensors
from shardledger.cli.main import run
from support.deepspeed import checkpoint_of, expected_tensors, model_code
from support.training import config


@pytest.fixture(autouse=True)
def no_rank(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def shell(capsys):
    """Type a command; gives back its exit code, what it printed, and its error message."""

    def type_in(*arguments):
        with pytest.raises(SystemExit) as ended:
            run([str(argument) for argument in arguments])
        shown = capsys.readouterr()
        return ended.value.code or 0, shown.out, shown.err

    return type_in


class Settings:
    def to_dict(self):
        return {"model_type": "tiny", "width": 4}


class Tiny(nn.Module):
    """Two units, a tied weight, a frozen one, a buffer, and a configuration of its own."""

    def __init__(self):
        super().__init__()
        self.config = Settings()
        self.table = nn.Embedding(6, 4)
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight
        self.blocks[0].bias.requires_grad_(False)
        self.register_buffer("count", torch.tensor(2**40 + 1))

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def trained(folder, steps, lr=0.05):
    """Two checkpoints of a run on one rank, and its weights at the last."""
    import shardledger as sl

    torch.manual_seed(0)
    engine = sl.initialize(model=Tiny(), config=config(3, optimizer="AdamW", lr=lr), device="cpu")[0]
    for step in range(1, steps + 1):
        engine.backward(engine(torch.arange(6).view(1, 6)))
        engine.step()
        engine.save_checkpoint(folder, f"step-{step:06d}")
    weights = engine.state_dict()
    engine.destroy()
    return weights


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """`run/checkpoints/step-00000N`, as a run leaves them."""
    folder = tmp_path_factory.mktemp("tools") / "run"
    return folder, trained(folder / "checkpoints", 2)


@pytest.fixture
def copy(run_folder, tmp_path):
    """A copy to break: the latest checkpoint."""
    return Path(shutil.copytree(run_folder[0] / "checkpoints" / "step-000002", tmp_path / "copy"))


def manifest_of(folder):
    return parse_manifest((folder / "manifest.json").read_text(), "")


# --- inspect ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "part", ["", "checkpoints", "checkpoints/step-000002", "checkpoints/step-000002/manifest.json"]
)
def test_a_run_its_checkpoints_and_one_of_them_are_the_latest_checkpoint(shell, run_folder, part):
    code, out, _ = shell("inspect", run_folder[0] / part, "--json")
    facts = json.loads(out)
    assert (code, facts["step"], facts["stage"], facts["world"]) == (0, 2, 3, 1)


def test_inspect_accounts_for_every_byte(shell, run_folder):
    _, out, _ = shell("inspect", run_folder[0], "--json")
    facts = json.loads(out)
    folder = Path(facts["path"])
    files = [item for item in folder.rglob("*") if item.is_file() and item.name != "manifest.json"]
    assert facts["bytes"].pop("total") == sum(facts["bytes"].values()) == sum(f.stat().st_size for f in files)
    trained_elements = 6 * 4 + 2 * 16 + 4
    assert facts["bytes"]["master weights"] == 4 * trained_elements
    assert facts["bytes"]["frozen weights"] == 4 * 4
    assert facts["bytes"]["optimizer states"] == 8 * trained_elements + 4 * 4  # two moments, four step counts
    assert facts["bytes"]["buffers"] == 8
    assert facts["optimizer"]["states"] == ["exp_avg", "exp_avg_sq", "step"]
    _, text, _ = shell("inspect", run_folder[0])
    assert "AdamW" in text and "head.weight = table.weight" in text and "lr 0.05" in text


def test_inspect_of_two_shows_where_their_runs_differ(shell, run_folder, tmp_path):
    trained(tmp_path, 1, lr=0.01)
    code, out, _ = shell("inspect", run_folder[0], tmp_path)
    assert code == 0
    lines = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.startswith("  ")}
    assert lines == {"step": ["2", "->", "1"], "config.optimizer.params.lr": ["0.05", "->", "0.01"]}
    assert "no difference" in shell("inspect", run_folder[0], run_folder[0])[1]


# --- verify ----------------------------------------------------------------------------------------------------------


def test_a_whole_checkpoint_is_whole(shell, copy):
    (copy / "notes.txt").write_text("mine")
    code, out, _ = shell("verify", copy)
    assert code == 0 and "is whole" in out and "note: notes.txt is not part of the checkpoint" in out


def damage_byte(file):
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (damage_byte, "has other contents than were written"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "bytes were written"),
        (lambda file: file.unlink(), "is missing"),
    ],
)
def test_the_damaged_file_is_named(shell, copy, damage, expected):
    for record in manifest_of(copy).files:
        kept = (copy / record.name).read_bytes()
        damage(copy / record.name)
        code, out, err = shell("verify", copy)
        assert code == 1 and record.name in err and expected.split()[0] in err, (record.name, err)
        code, out, _ = shell("verify", copy, "--json")
        verdict = json.loads(out)
        assert (code, verdict["whole"], verdict["damaged"]) == (1, False, [record.name])
        (copy / record.name).write_bytes(kept)
    assert shell("verify", copy)[0] == 0


def with_entry(manifest, change):
    """The manifest with one entry of a moment changed: dropped (None), or other."""
    files, done = [], False
    for file in manifest.files:
        entries = []
        for entry in file.entries:
            if entry.role == "exp_avg" and entry.stop - entry.start > 8 and not done:
                done = True
                entries += change(entry)
            else:
                entries.append(entry)
        files.append(replace(file, entries=tuple(entries)))
    assert done
    return replace(manifest, files=tuple(files))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda entry: [replace(entry, start=4)], "elements 0 to 4 are in no file"),
        (lambda entry: [entry, replace(entry, key="again")], "are in two files"),
        (lambda entry: [replace(entry, stop=entry.stop - 1)], "elements end at"),
        (lambda entry: [replace(entry, of="nobody")], "belongs to no parameter or buffer"),
        (lambda entry: [replace(entry, key="other")], "lacks the tensor 'other'"),
        (lambda entry: [replace(entry, dtype="bfloat16")], "is F32 in the file, bfloat16 in the manifest"),
    ],
)
def test_every_element_of_every_role_is_there_exactly_once(shell, copy, change, expected):
    (copy / "manifest.json").write_text(with_entry(manifest_of(copy), change).to_json())
    code, _, err = shell("verify", copy)
    assert code == 1 and expected in err


def test_a_broken_manifest_is_damage_and_not_a_wrong_path(shell, copy):
    for text in ("{", "[]", '{"format": "shardledger-checkpoint", "version": 1}'):
        (copy / "manifest.json").write_text(text)
        code, out, err = shell("verify", copy)
        assert code == 1 and "manifest.json" in err
        assert json.loads(shell("verify", copy, "--json")[1])["damaged"] == ["manifest.json"]


# --- diff ------------------------------------------------------------------------------------------------------------


def test_diff_says_where_tensors_differ_most(shell, run_folder, copy):
    assert shell("diff", run_folder[0], copy)[0] == 0
    steps = run_folder[0] / "checkpoints"
    code, out, err = shell("diff", steps / "step-000001", steps / "step-000002", "--json")
    found = {(row["name"], row["role"]): row for row in json.loads(out)["differences"]}
    assert code == 1 and "tensors differ" in err
    assert found["table.weight", "step"]["largest"] == 1.0
    row = found["table.weight", "value"]
    one, two = row["values"]
    assert row["largest"] == abs(one - two) and row["at"][0] < 6 and row["at"][1] < 4
    assert ("blocks.0.bias", "value") not in found and ("count", "value") not in found
    assert shell("diff", steps / "step-000001", steps / "step-000002", "--tolerance", "2")[0] == 0
    rows = json.loads(shell("diff", steps / "step-000001", steps / "step-000002", "--weights", "--json")[1])
    assert {row["role"] for row in rows["differences"]} == {"value"}


def test_diff_names_what_only_one_has_and_values_that_are_no_numbers(shell, run_folder, copy):
    manifest = manifest_of(copy)
    renamed = [replace(p, name="renamed") if p.name == "blocks.1.bias" else p for p in manifest.parameters]
    files = []
    for file in manifest.files:
        entries = [replace(e, of="renamed") if e.of == "blocks.1.bias" else e for e in file.entries]
        files.append(replace(file, entries=tuple(entries)))
        if any(e.of == "table.weight" and e.role == "master" for e in entries):
            tensors = {key: tensor.clone() for key, tensor in load_file(copy / file.name).items()}
            (copy / file.name).unlink()
            key = next(e.key for e in entries if e.of == "table.weight" and e.role == "master")
            tensors[key][5] = float("nan")
            write_safetensors(
                copy / file.name, [Promise(k, tuple(t.shape), t.dtype, lambda t=t: t) for k, t in tensors.items()]
            )
    (copy / "manifest.json").write_text(replace(manifest, parameters=tuple(renamed), files=tuple(files)).to_json())
    code, out, _ = shell("diff", run_folder[0], copy, "--weights")
    assert code == 1
    assert "blocks.1.bias (value): only in A" in out and "renamed (value): only in B" in out
    assert "table.weight (value): inf at [1, 1]" in out


# --- export ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard_size", ["5GB", "100B"])
def test_exported_weights_load_in_plain_pytorch(shell, run_folder, tmp_path, shard_size):
    folder, weights = run_folder
    for dtype, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        out = tmp_path / dtype
        code, text, _ = shell("export", folder, out, "--dtype", dtype, "--shard-size", shard_size)
        assert code == 0 and "step 2" in text
        index = out / "model.safetensors.index.json"
        assert index.is_file() == (shard_size == "100B")
        state = {}
        for file in sorted(out.glob("*.safetensors")):
            part = load_file(file)
            if index.is_file():
                where = json.loads(index.read_text())["weight_map"]
                assert {where[key] for key in part} == {file.name}
                assert len(part) == 1 or sum(t.nbytes for t in part.values()) <= 100
            state |= part
        model = Tiny().to(kind)
        model.load_state_dict(state, strict=True)
        for name, value in model.state_dict().items():
            wanted = weights[name].to(kind) if value.is_floating_point() else weights[name]
            assert torch.equal(value, wanted) and state[name].dtype == wanted.dtype, name
        assert json.loads((out / "config.json").read_text()) == {
            "model_type": "tiny",
            "width": 4,
            "torch_dtype": str(kind).removeprefix("torch."),
        }
        assert [item.name for item in tmp_path.iterdir() if item.name.startswith(".")] == []


def test_export_takes_a_config_and_can_leave_tied_names_out(shell, run_folder, tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"dtype": "float32", "layers": 2}')
    code, _, _ = shell(
        "export", run_folder[0], tmp_path / "out", "--config", tmp_path / "base", "--drop-tied", "--dtype", "bf16"
    )
    assert code == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"dtype": "bfloat16", "layers": 2}
    state = load_file(tmp_path / "out" / "model.safetensors")
    assert "table.weight" in state and "head.weight" not in state


@pytest.mark.parametrize("damage", [damage_byte, Path.unlink])
def test_damaged_weights_are_not_exported_and_nothing_is_left(shell, copy, tmp_path, damage):
    damaged = next(record for record in manifest_of(copy).files if record.entries)
    damage(copy / damaged.name)
    code, _, err = shell("export", copy, tmp_path / "out")
    assert code == 1 and damaged.name in err
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


def test_exported_models_load_by_from_pretrained(shell, tmp_path):
    transformers = pytest.importorskip("transformers")
    import shardledger as sl

    torch.manual_seed(0)
    sizes = {
        "vocab_size": 31,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=True))
    engine = sl.initialize(model=model, config=config(3, optimizer="AdamW", precision="bf16"), device="cpu")[0]
    tokens = torch.arange(8).view(1, 8)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    engine.save_checkpoint(tmp_path / "checkpoints")
    weights = engine.state_dict()
    engine.destroy()
    for dtype, options in (("fp32", []), ("bf16", ["--shard-size", "3KB", "--drop-tied"])):
        out = tmp_path / dtype
        assert shell("export", tmp_path, out, "--dtype", dtype, *options)[0] == 0
        loaded = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto")
        assert loaded.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        state = loaded.state_dict()
        assert [
            k for k, v in state.items() if v.is_floating_point() and not torch.equal(v, weights[k].to(v.dtype))
        ] == []


# --- import ----------------------------------------------------------------------------------------------------------


def test_an_imported_checkpoint_is_whole_and_exports_what_deepspeed_had(shell, tmp_path):
    code, out, _ = shell("import", checkpoint_of("stage3_bf16_w3"), tmp_path / "ours", "--json")
    facts = json.loads(out)
    assert code == 0
    assert (facts["deepspeed"], facts["stage"], facts["world"], facts["step"], facts["optimizer"], facts["notes"]) == (
        *("0.19.8", 3, 3, 6, "AdamW"),
        [],
    )
    assert shell("verify", tmp_path / "ours")[0] == 0
    assert shell("export", tmp_path / "ours", tmp_path / "bf16", "--dtype", "bf16")[0] == 0
    state, wanted = load_file(tmp_path / "bf16" / "model.safetensors"), expected_tensors("stage3_bf16_w3")
    model = model_code().build_model().bfloat16()
    model.load_state_dict(state, strict=True)
    for key, value in wanted.items():
        when, what, name = key.split("/", 2)
        if when == "save" and what in ("model", "buffer"):
            assert torch.equal(state[name], value) and state[name].dtype == value.dtype, key


def test_two_tags_share_a_folder_and_none_is_overwritten(shell, tmp_path):
    both = Path(shutil.copytree(checkpoint_of("stage1_fp32_w2"), tmp_path / "theirs"))
    shutil.copytree(both / "global_step6", both / "global_step7")
    assert shell("import", both, tmp_path / "ours")[0] == 0
    assert shell("import", both, tmp_path / "ours", "--tag", "global_step7")[0] == 0
    assert shell("diff", tmp_path / "ours" / "global_step6", tmp_path / "ours")[0] == 0
    code, _, err = shell("import", both, tmp_path / "ours")
    assert code == 2 and "global_step6 exists; import does not overwrite" in err


def test_a_failed_import_leaves_nothing(shell, tmp_path):
    theirs = Path(shutil.copytree(checkpoint_of("stage1_fp32_w2"), tmp_path / "theirs"))
    file = theirs / "global_step6" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    code, _, err = shell("import", theirs, tmp_path / "ours")
    assert code == 1 and file.name in err and "damaged" in err
    assert not (tmp_path / "ours").exists()


# --- wrong paths -----------------------------------------------------------------------------------------------------


def test_wrong_paths_are_explained_and_end_with_code_2(shell, run_folder, tmp_path):
    folder = run_folder[0]
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    theirs = checkpoint_of("stage1_bf16_w1")
    for command in (["inspect"], ["verify"], ["export"], ["diff"]):
        rest = {"export": [tmp_path / "new"], "diff": [folder]}.get(command[0], [])
        for path, expected in (
            (tmp_path / "emtpy", f"Did you mean {tmp_path / 'empty'}?"),
            (tmp_path / "emtpy" / "checkpoints", f"Did you mean {tmp_path / 'empty'}?"),
            (tmp_path / "empty", "is empty"),
            (tmp_path / "file", "is a file"),
            (theirs, f"convert it first: shardledger import {theirs}"),
            (theirs / "global_step6", "convert it first"),
            (folder / "checkpoints" / "step-000002" / "rank-00000", "is a part of the checkpoint"),
            (folder.parent, "is no checkpoint"),
        ):
            code, out, err = shell(*command, path, *rest)
            assert (code, out) == (2, "") and expected in err, (command, path, err)
    for arguments, expected in (
        (["export", folder, tmp_path / "file"], "is a file"),
        (["export", folder, folder], "is not empty"),
        (["export", folder, tmp_path / "new", "--shard-size", "many"], "is no size of a file"),
        (["export", folder, tmp_path / "new", "--config", tmp_path / "file"], "is not JSON"),
        (["import", folder, tmp_path / "new"], "a shardledger checkpoint already"),
        (["import", theirs.parent, tmp_path / "new"], f"Did you mean {theirs}?"),
        (["import", theirs, theirs], "global_step6 exists; import does not overwrite"),
        (["import", theirs, theirs.parent], "not empty and holds no checkpoints of shardledger"),
        (["import", theirs, tmp_path / "file"], "is a file"),
        (["import", theirs / "latest", tmp_path / "new"], "is a file"),
    ):
        code, out, err = shell(*arguments)
        assert (code, out) == (2, "") and expected in err, (arguments, err)
    assert not (tmp_path / "new").exists()


# --- memory ----------------------------------------------------------------------------------------------------------

#: 40 MiB, and 20 in bf16: with ``give_back`` above the sizes that the allocator may keep for itself.
LARGE, COUNT = 10 * 2**20, 4
_M_MMAP_THRESHOLD = -3


def give_back():
    """Large blocks go back to the system at once; else what the process did before decides what stays."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 16 * 2**20)


def large_checkpoint(folder):
    """Four tensors of 40 MiB in two files."""
    from shardledger.checkpoint.files import Files
    from shardledger.checkpoint.manifest import FileRecord, Manifest, OptimizerRecord, ParameterRecord

    files, names = [], [f"w{i}" for i in range(COUNT)]
    folder.mkdir()
    for number in range(2):
        mine = names[number::2]
        entries = tuple(Entry(key=name, of=name, role="master", dtype="float32", start=0, stop=LARGE) for name in mine)
        name = f"{number}.safetensors"
        promises = [Promise(key, (LARGE,), torch.float32, lambda: torch.ones(LARGE)) for key in mine]
        write_safetensors(folder / name, promises)
        size, check = Files().check(folder / name)
        files.append(FileRecord(name=name, bytes=size, crc32=check, entries=entries))
    manifest = Manifest(
        **{"step": 1, "stage": 3, "world": 2, "precision": "float32", "plan_fingerprint": None, "versions": {}},
        **{"config": None, "tied": {}, "buffers": (), "files": tuple(files), "counters": {}},
        parameters=tuple(
            ParameterRecord(name=n, shape=(2, LARGE // 2), dtype="float32", trainable=True) for n in names
        ),
        optimizer=OptimizerRecord(class_name="SGD", param_groups=()),
    )
    (folder / "manifest.json").write_text(manifest.to_json())


def peak_growth(action):
    """Bytes by which the process grew at most while `action` ran."""
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    action()
    return status("VmHWM") - before


def status(key):
    line = next(text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith(key))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_the_tools_hold_one_tensor_at_a_time(shell, tmp_path):
    give_back()
    large_checkpoint(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    shell("inspect", tmp_path / "one")  # what is imported once is not counted
    shell("export", tmp_path / "one", tmp_path / "first", "--dtype", "bf16")
    tensor = 4 * LARGE
    commands = {
        ("verify", tmp_path / "one"): 0.5,
        ("diff", tmp_path / "one", tmp_path / "two"): 3.3,  # a tensor of each, and what is read at once
        ("export", tmp_path / "one", tmp_path / "out"): 2.3,
        ("export", tmp_path / "one", tmp_path / "half", "--dtype", "bf16"): 2.8,
    }
    for command, most in commands.items():
        grown = peak_growth(lambda command=command: shell(*command))
        assert grown < most * tensor, (command, grown / tensor)
