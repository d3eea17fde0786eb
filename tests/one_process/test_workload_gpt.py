"""The reference GPT: its size, its initialisation unit by unit, its causality, and its text."""

import pytest
import torch

from shardledger.errors import ConfigError
from shardledger.workload import GPT, SIZES, GPTConfig, generate, gpt_config, load_model

TINY = GPTConfig(layers=2, heads=2, width=16, context=8)


def parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("size", "millions"), [("1m", 1), ("25m", 25), ("124m", 124), ("350m", 350)])
def test_a_size_weighs_what_its_name_says(size, millions):
    with torch.device("meta"):
        model = GPT(gpt_config(size))
    assert parameters(model) == pytest.approx(millions * 1e6, rel=0.04)


def test_context_changes_only_the_position_table():
    with torch.device("meta"):
        short, long = GPT(gpt_config("1m", context=64)), GPT(gpt_config("1m", context=256))
    assert parameters(long) - parameters(short) == (256 - 64) * SIZES["1m"].width


@pytest.mark.parametrize("name", ["gpt:12m", "gpt:nano"])
def test_an_unknown_size_lists_the_known_ones(name):
    with pytest.raises(ConfigError, match="1m, 25m, 124m, 350m"):
        load_model(name, 8)


@pytest.mark.parametrize(
    ("wanted", "nearest"), [("125m", "124m"), ("12m", "25m"), ("1b", "1.3b"), ("0.5m", "1m"), ("124mb", "124m")]
)
def test_an_unknown_size_names_the_nearest(wanted, nearest):
    with pytest.raises(ConfigError, match=rf"Did you mean gpt:{nearest}\?"):
        load_model(f"gpt:{wanted}", 8)


def test_shapes_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="width 10 is not divisible by heads 3"):
        GPTConfig(width=10, heads=3)
    with pytest.raises(ConfigError, match="layers = 0"):
        GPTConfig(layers=0)


def test_a_sequence_longer_than_the_context_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"9 tokens.*context of 8"):
        GPT(TINY)(torch.zeros(1, 9, dtype=torch.int64))


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_from_the_meta_device_starts_as_one_from_the_cpu(tied):
    config = GPTConfig(layers=2, heads=2, width=16, context=8, tied=tied)
    torch.manual_seed(3)
    expected = GPT(config)
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device="cpu")
    if tied:
        model.head.weight = model.token_table.weight  # to_empty makes two tensors of a shared one
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.reset_parameters()
    for name, parameter in model.named_parameters():
        like = dict(expected.named_parameters())[name]
        assert parameter.isfinite().all()
        assert parameter.std().item() == pytest.approx(like.std().item(), rel=0.35, abs=1e-3), name


def test_tied_head_shares_the_token_table_and_untied_does_not():
    tied, untied = GPT(TINY), GPT(GPTConfig(layers=2, heads=2, width=16, context=8, tied=False))
    assert tied.head.weight is tied.token_table.weight
    assert parameters(untied) - parameters(tied) == 256 * 16


def test_residual_projections_start_smaller_the_deeper_the_model():
    model = GPT(GPTConfig(layers=8, heads=2, width=64, context=8))
    assert model.blocks[0].attention.project.weight.std().item() == pytest.approx(0.02 / 4, rel=0.1)
    assert model.blocks[0].feed_forward.expand.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_no_position_sees_a_later_one():
    model = GPT(TINY)
    tokens = torch.randint(256, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 256
    difference = (model(tokens) - model(changed)).abs().amax(dim=2)[0]
    assert (difference[:5] == 0).all()
    assert (difference[5:] > 0).all()


def test_loss_is_the_mean_cross_entropy_in_fp32():
    model = GPT(TINY).bfloat16()
    tokens, targets = torch.randint(256, (2, 3, 8))
    loss = model(tokens, targets)
    expected = torch.nn.functional.cross_entropy(model(tokens).float().reshape(-1, 256), targets.reshape(-1))
    assert loss.shape == () and loss.dtype == torch.float32
    assert torch.equal(loss, expected)


def test_generated_text_depends_on_the_seed_alone_and_leaves_the_mode():
    model = GPT(TINY).train()
    first = generate(model, b"ab", 20, seed=1)
    assert first == generate(model, b"ab", 20, seed=1) != generate(model, b"ab", 20, seed=2)
    assert first.startswith(b"ab") and len(first) == 22
    assert len(generate(model, b"", 5, temperature=0)) == 5
    assert model.training
