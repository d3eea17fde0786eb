"""Models by name, losses out of what they return, and final weights that load anywhere."""

import json
import types

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from shardledger.errors import ConfigError, DataError, OutputError
from shardledger.workload import (
    GPT,
    GPTConfig,
    describe_model,
    find_model,
    load_final,
    load_model,
    loss_of,
    save_final,
)

USER_MODULE = """
from torch import nn
missing_on_purpose = 3
def build(): return nn.Linear(2, 2)
def sized(seq_len): return nn.Linear(seq_len, 1)
def wrong(): return "a string"
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    (tmp_path / "my_models_for_test.py").write_text(USER_MODULE)
    (tmp_path / "my_broken_models_for_test.py").write_text("import a_module_that_is_not_there")
    (tmp_path / "my_raising_models_for_test.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)


def test_a_users_function_is_called_with_the_sequence_length_when_it_takes_one(user_module):
    assert load_model("my_models_for_test:build", 9).in_features == 2
    assert load_model("my_models_for_test:sized", 9).in_features == 9


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt", "not a model's name.*gpt:SIZE"),
        ("gpt:", "not a model's name"),
        ("my_models_for_test:bild", "no function 'bild'.*Did you mean my_models_for_test:build"),
        ("my_models_for_test:missing_on_purpose", "no function"),
        ("my_model:build", "no module 'my_model'"),
        ("my_models_for_test.deeper:build", "failed|no module"),
        ("my_broken_models_for_test:build", "importing .* failed.*a_module_that_is_not_there"),
        ("my_raising_models_for_test:build", "ZeroDivisionError"),
    ],
)
def test_a_name_that_leads_nowhere_says_where_it_ended(user_module, name, message):
    with pytest.raises(ConfigError, match=message):
        find_model(name)


def test_a_function_that_makes_no_module_is_refused(user_module):
    with pytest.raises(ConfigError, match="type str, not a torch.nn.Module"):
        load_model("my_models_for_test:wrong", 9)


def test_the_loss_is_found_in_every_promised_place():
    loss = torch.tensor(2.0)
    for output in (loss, loss.reshape(1), (loss, "logits"), [loss], types.SimpleNamespace(loss=loss)):
        assert loss_of(output).shape == ()
        assert loss_of(output) == 2


@pytest.mark.parametrize(
    ("output", "message"), [(torch.zeros(2, 3), r"shape \(2, 3\)"), ((), "tuple"), ("text", "str"), (None, "NoneType")]
)
def test_an_output_without_a_loss_is_named(output, message):
    with pytest.raises(ConfigError, match=message):
        loss_of(output)


@pytest.mark.parametrize("tied", [True, False])
def test_final_weights_load_by_name_and_in_plain_pytorch(tmp_path, tied):
    model = GPT(GPTConfig(layers=1, heads=2, width=16, context=8, tied=tied))
    save_final(tmp_path / "final", model.state_dict(), describe_model(model, "gpt:1m", 8))
    tokens = torch.randint(256, (2, 8))
    expected = model(tokens)

    ours = load_final(tmp_path)  # the run folder does as well as final/ itself
    assert torch.equal(ours(tokens), expected)

    plain = GPT(GPTConfig(**json.loads((tmp_path / "final/config.json").read_text())["gpt"]))
    plain.load_state_dict(load_file(tmp_path / "final/model.safetensors"))  # strict
    assert torch.equal(plain(tokens), expected)
    assert (plain.head.weight is plain.token_table.weight) == tied


def test_final_weights_of_a_users_model_load_through_its_function(tmp_path, user_module):
    model = load_model("my_models_for_test:build", 4)
    save_final(tmp_path, model.state_dict(), describe_model(model, "my_models_for_test:build", 4))
    assert torch.equal(load_final(tmp_path).weight, model.weight)


def test_views_and_shared_storage_are_saved(tmp_path):
    flat = torch.arange(6.0)
    state = {"a": flat[:4].view(2, 2).t(), "b": flat[4:]}
    save_final(tmp_path, state, {})
    loaded = load_file(tmp_path / "model.safetensors")
    assert torch.equal(loaded["a"], state["a"]) and torch.equal(loaded["b"], state["b"])


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_full_disk_is_told_with_the_file(tmp_path, file, monkeypatch):
    def full(*_):
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    (tmp_path / "config.json").symlink_to("/dev/full")
    if file == "model.safetensors":  # it replaces a file, so that /dev/full would not do
        monkeypatch.setattr("shardledger.workload.final.save_file", full)
    with pytest.raises(OutputError, match=rf"{file} cannot be written: .*No space left on device.*Make room"):
        save_final(tmp_path, {"a": torch.ones(4)}, {})


def test_a_folder_without_weights_is_named(tmp_path):
    with pytest.raises(DataError, match=r"no config.json and no model.safetensors"):
        load_final(tmp_path)


def test_a_function_that_needs_arguments_is_a_lesson():
    with pytest.raises(ConfigError, match="'torch.nn:Linear': it is called with no arguments, which it does not take"):
        load_model("torch.nn:Linear", 8)
