"""B57: the batch triple is derived where it can be, and explained where it cannot."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardledger.config import load_config
from shardledger.config.model import BATCH_KEYS
from shardledger.errors import ConfigError


def keys(train: Any = None, micro: Any = None, accumulation: Any = None) -> dict[str, Any]:
    sizes = zip(BATCH_KEYS, (train, micro, accumulation), strict=True)
    return {key: size for key, size in sizes if size is not None}


def triple(given: dict[str, Any], world: int) -> tuple[int, int, int]:
    config = load_config(given, world=world)
    return (config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps)


@pytest.mark.parametrize("world", [2, 7])
@pytest.mark.parametrize(
    ("given_sizes", "micro", "accumulation"),
    [
        (("train", "micro", "accumulation"), 3, 5),
        (("train", "micro"), 3, 5),
        (("train", "accumulation"), 3, 5),
        (("micro", "accumulation"), 3, 5),
        (("train",), 15, 1),
        (("micro",), 3, 1),
        (("accumulation",), 1, 5),
        ((), 1, 1),
    ],
)
def test_whatever_is_missing_is_derived(
    given_sizes: tuple[str, ...], micro: int, accumulation: int, world: int
) -> None:
    full = {"train": 15 * world, "micro": 3, "accumulation": 5}
    sizes = keys(**{name: full[name] for name in given_sizes})
    assert triple(sizes, world) == (micro * accumulation * world, micro, accumulation)
    lines = load_config(sizes, world=world).resolutions
    for key in BATCH_KEYS:
        assert any(line.startswith(f"{key} = ") for line in lines) == (key not in sizes)


def test_the_derivation_is_told() -> None:
    lines = load_config(keys(train=32, micro=1), world=2).resolutions
    assert "gradient_accumulation_steps = 16 (train_batch_size 32 / (micro 1 x world 2))" in lines


@pytest.mark.parametrize("accumulation", [None, 18])
def test_256_with_micro_2_on_7_ranks_is_answered_with_252_or_266(accumulation: int | None) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(keys(256, 2, accumulation), world=7, world_source="the process group")
    (problem,) = caught.value.problems
    shown = "not given" if accumulation is None else "= 18"
    assert f"train_batch_size = 256, train_micro_batch_size_per_gpu = 2, gradient_accumulation_steps {shown}" in problem
    assert "world size 7 (from the process group)" in problem
    assert "252 (accumulation 18) or 266 (accumulation 19)" in problem


def test_exact_words_of_the_common_mistake() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(keys(256, 2), world=7)
    assert str(caught.value) == (
        "train_batch_size = 256, train_micro_batch_size_per_gpu = 2, gradient_accumulation_steps not given, "
        "world size 7 (from WORLD_SIZE): 256 is not a multiple of 2 x 7 = 14; "
        "nearest valid train_batch_size: 252 (accumulation 18) or 266 (accumulation 19)"
    )


def test_too_small_a_batch_has_one_neighbour() -> None:
    with pytest.raises(ConfigError, match=r"nearest valid train_batch_size: 7 \(micro batch 1\)$"):
        load_config(keys(train=3), world=7)
    with pytest.raises(ConfigError, match=r"63 \(micro batch 3\) or 84 \(micro batch 4\)"):
        load_config(keys(train=64, accumulation=3), world=7)


def test_a_forgotten_launcher_is_recognised() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(keys(64, 2, 4), world=1, world_source="default, WORLD_SIZE is not set")
    for piece in ("2 x 4 x 1 = 8, not 64", "8 ranks", "torchrun --nproc-per-node 8", "WORLD_SIZE is not set", "to 32"):
        assert piece in str(caught.value)


@pytest.mark.parametrize("key", BATCH_KEYS)
@pytest.mark.parametrize("value", [0, -4, 1.5, True, "two", [2]])
def test_what_is_no_positive_whole_number_is_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{key} = "):
        load_config({key: value}, world=2)


def test_text_and_floats_are_read_as_numbers() -> None:
    assert triple(keys("16", 2.0, "4"), 2) == (16, 2, 4)


@pytest.mark.parametrize("world", [0, -1])
def test_a_world_without_ranks_is_refused(world: int) -> None:
    with pytest.raises(ConfigError, match="at least one rank"):
        load_config({}, world=world)


sizes = st.none() | st.integers(min_value=1, max_value=64)


@given(train=sizes, micro=sizes, accumulation=sizes, world=st.integers(min_value=1, max_value=9))
def test_the_product_always_holds_and_given_sizes_are_kept(
    train: int | None, micro: int | None, accumulation: int | None, world: int
) -> None:
    try:
        result = triple(keys(train, micro, accumulation), world)
    except ConfigError as error:
        assert train is not None and "world size" in str(error)
        return
    assert result[0] == result[1] * result[2] * world
    for asked, got in zip((train, micro, accumulation), result, strict=True):
        assert asked in (None, got)
