"""LoRA adapters for plans: what is trained, what it weighs, and that a fresh adapter changes nothing."""

import pytest
import torch
from torch import nn

from shardledger.errors import ConfigError
from shardledger.workload import load_model
from shardledger.workload.hugging_face import hugging_face_factory, is_hugging_face
from shardledger.workload.lora import add_adapters


def test_only_the_adapters_are_trained_and_they_weigh_rank_times_both_sides():
    model = load_model("gpt:1m", 16)
    linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
    expected = sum(4 * (m.in_features + m.out_features) for m in linears)
    before = sum(p.numel() for p in model.parameters())
    add_adapters(model, 4)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert sum(p.numel() for p in trained.values()) == expected
    assert all(name.endswith(("down.weight", "up.weight")) for name in trained)
    assert sum(p.numel() for p in model.parameters()) == before + expected


def test_a_fresh_adapter_changes_no_output_and_learns():
    torch.manual_seed(0)
    model = load_model("gpt:1m", 16)
    tokens = torch.randint(0, 256, (2, 16))
    before = model(tokens, tokens)
    loss = add_adapters(model, 4)(tokens, tokens)
    assert torch.equal(before, loss)
    loss.backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    assert any(float(p.grad.abs().max()) > 0 for p in model.parameters() if p.requires_grad)


def test_adapters_stay_on_the_meta_device_and_need_linear_layers():
    with torch.device("meta"):
        model = add_adapters(load_model("gpt:1m", 16), 4)
    assert all(p.is_meta for p in model.parameters())
    with pytest.raises(ConfigError, match="no nn.Linear"):
        add_adapters(nn.Embedding(3, 3), 4)


@pytest.mark.parametrize(
    ("text", "lesson"),
    [("{", "is not JSON"), ("{}", "no model_type"), ("[]", "no model_type"), (None, "cannot be read")],
)
def test_a_file_that_is_no_hugging_face_config_is_a_lesson(tmp_path, text, lesson):
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    assert is_hugging_face(str(file))
    with pytest.raises(ConfigError, match=lesson):
        hugging_face_factory(str(file))


def test_without_transformers_the_way_out_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert is_hugging_face(str(tmp_path))
    with pytest.raises(ConfigError, match="pip install transformers, or count states alone with --params"):
        hugging_face_factory(str(tmp_path))


def test_other_names_are_not_taken_for_files():
    assert not is_hugging_face("gpt:1m")
    assert not is_hugging_face("package.module:function")
