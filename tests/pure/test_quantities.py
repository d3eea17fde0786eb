"""Amounts as people write them, and what they are told when an amount cannot be meant."""

import pytest

from shardledger.config.quantities import bandwidth, byte_size, element_count, flop_rate


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("80GiB", 80 * 2**30),
        ("80GB", 80 * 10**9),
        ("80 gib", 80 * 2**30),
        ("22e9", 22 * 10**9),
        ("1.5TiB", 3 * 2**39),
        ("22_000_000_000", 22 * 10**9),
        (22_000_000_000, 22 * 10**9),
        (2.2e10, 22 * 10**9),
        ("512KiB", 2**19),
        ("4096B", 4096),
    ],
)
def test_memory_sizes(text, right):
    assert byte_size(text) == right


@pytest.mark.parametrize(
    ("text", "lesson"),
    [
        ("80G", "write 80GB (80,000,000,000 bytes) or 80GiB (85,899,345,920 bytes)"),
        ("80", "did you mean 80GiB?"),
        (80, "did you mean 80GiB?"),
        ("0", "more than zero"),
        ("-1GiB", "more than zero"),
        ("1e999", "more than zero"),
        ("nan", "write 80GiB"),
        ("", "write 80GiB"),
        ("GiB", "write 80GiB"),
        ("80Gibs", "unit 'gibs' is not known"),
        ("1,5GiB", "write 80GiB"),
        (True, "write 80GiB"),
        (None, "write 80GiB"),
        (float("inf"), "write 80GiB"),
    ],
)
def test_a_memory_size_that_cannot_be_meant_is_a_lesson(text, lesson):
    with pytest.raises(ValueError) as error:
        byte_size(text)
    assert lesson in str(error.value)


@pytest.mark.parametrize(
    ("text", "right"),
    [("7.5e9", 7_500_000_000), ("7.5B", 7_500_000_000), ("125m", 125_000_000), ("1T", 10**12), (1000, 1000)],
)
def test_numbers_of_parameters(text, right):
    assert element_count(text) == right


@pytest.mark.parametrize(
    ("text", "lesson"),
    [("7.5", "did you mean 7.5B?"), ("0", "more than zero"), ("7GB", "use K, M, B or T"), ("1e30", "any model")],
)
def test_a_number_of_parameters_that_cannot_be_meant_is_a_lesson(text, lesson):
    with pytest.raises(ValueError) as error:
        element_count(text)
    assert lesson in str(error.value)


@pytest.mark.parametrize("text", ["50GB/s", "50GBps", "50gb/s", "50GB", "50e9", 50e9])
def test_bandwidths(text):
    assert bandwidth(text) == 50e9


@pytest.mark.parametrize("text", ["400Gb/s", "400Gbps", "400Gbit/s"])
def test_bits_per_second_are_not_taken_for_bytes(text):
    with pytest.raises(ValueError, match="divide by 8 and write bytes, as in 50GB/s"):
        bandwidth(text)


@pytest.mark.parametrize("text", ["400TFLOP/s", "400TFLOPS", "400T", "4e14"])
def test_speeds(text):
    assert flop_rate(text) == 4e14


@pytest.mark.parametrize("text", ["fast", "0", "400TB/s"])
def test_a_speed_that_cannot_be_meant_is_a_lesson(text):
    with pytest.raises(ValueError, match="speed"):
        flop_rate(text)
