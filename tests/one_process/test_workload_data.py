"""Text as data: what is read, what is held out, and that a global batch is the same however it is spread."""

import pytest
import torch

from shardledger.errors import DataError
from shardledger.workload import BatchSampler, BatchShape, Corpus, TextData, read_corpus
from shardledger.workload.data import PERIOD_BYTES


def corpus_of(size: int) -> Corpus:
    return Corpus(tokens=(torch.arange(size) % 251).to(torch.uint8), source="test", files=1)


def positions(size: int) -> TextData:
    """Data whose tokens cannot tell their position beyond 251: for counting, not for reading."""
    return TextData(corpus_of(size), 16)


def test_the_default_corpus_is_this_pythons_library_and_enough_of_it():
    corpus = read_corpus()
    assert corpus.size > 1_000_000
    assert "standard library" in corpus.source
    assert bytes(corpus.tokens[:2000].tolist()).isascii()


def test_a_file_is_read_as_it_is(tmp_path):
    file = tmp_path / "text.txt"
    file.write_bytes(bytes(range(256)) * 3)
    assert bytes(read_corpus(file).tokens.tolist()) == file.read_bytes()


def test_a_directory_is_joined_in_path_order_without_what_is_not_text(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "__pycache__").mkdir()
    for name, content in {
        "c.txt": b"three",
        "a.txt": b"one",
        "b/x.txt": b"two",
        "b/image": b"\x89PNG\0\0",
        ".hidden": b"no",
        ".git/config": b"no",
        "__pycache__/x.py": b"no",
        "empty": b"",
    }.items():
        (tmp_path / name).write_bytes(content)
    corpus = read_corpus(tmp_path)
    assert bytes(corpus.tokens.tolist()) == b"onethreetwo"
    assert corpus.files == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path / "missing", "does not exist"),
        (lambda path: (path / "empty").touch() or path / "empty", "0 bytes"),
        (lambda path: path, "holds no text files"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, make, message):
    with pytest.raises(DataError, match=message):
        read_corpus(make(tmp_path))


def test_too_short_a_text_is_refused_with_the_numbers():
    with pytest.raises(DataError, match=r"33 bytes.*sequences of 16 bytes.*34"):
        TextData(corpus_of(33), 16)
    data = TextData(corpus_of(34), 16)
    assert (data.training_windows, data.validation_windows) == (1, 1)


@pytest.mark.parametrize("size", [34, 35, 400, 5_000, PERIOD_BYTES - 1, 3 * PERIOD_BYTES + 7])
def test_training_never_touches_what_is_held_out(size):
    data = TextData(Corpus(tokens=torch.zeros(size, dtype=torch.uint8), source="test", files=1), 16)
    data._cut = lambda starts: (starts, starts)  # windows as positions
    training = data.training(torch.arange(data.training_windows))[0]
    held_out = data.validation(torch.arange(data.validation_windows))[0]
    used = torch.zeros(size, dtype=torch.bool)
    for offset in range(17):
        used[training + offset] = True
    for offset in range(17):
        assert not used[held_out + offset].any()
    assert training.unique().numel() == data.training_windows
    assert held_out.unique().numel() == data.validation_windows
    assert used.sum() >= size * 0.45


def test_targets_are_the_inputs_shifted_by_one():
    data = positions(4000)
    inputs, targets = data.training(torch.tensor([0, 5, 999]))
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert inputs[1].tolist() == list(range(5, 21))


@pytest.mark.parametrize(("world", "micro", "accumulation"), [(1, 8, 1), (2, 4, 1), (4, 2, 1), (1, 4, 2), (2, 2, 2)])
def test_the_global_batch_does_not_depend_on_how_it_is_spread(world, micro, accumulation):
    data = positions(50_000)
    expected = torch.cat([row for row, _ in BatchSampler(data, BatchShape(micro=8), seed=5).batch_of(3)])
    shape = BatchShape(micro=micro, accumulation=accumulation, world=world)
    ranks = [BatchSampler(data, shape, rank=rank, seed=5).batch_of(3) for rank in range(world)]
    rows = [ranks[rank][step][0] for step in range(accumulation) for rank in range(world)]
    assert torch.equal(torch.cat(rows), expected)


def test_batches_depend_on_seed_and_step_and_not_on_what_was_drawn_before():
    sampler = BatchSampler(positions(50_000), BatchShape(micro=8), seed=1)
    torch.manual_seed(0)
    first, second = sampler.next_batch()[0][0], sampler.next_batch()[0][0]
    torch.manual_seed(99)
    assert torch.equal(sampler.batch_of(1)[0][0], second)
    assert not torch.equal(first, second)
    assert not torch.equal(BatchSampler(sampler.data, sampler.shape, seed=2).batch_of(0)[0][0], first)


def test_the_position_survives():
    data = positions(50_000)
    sampler = BatchSampler(data, BatchShape(micro=8), seed=1)
    sampler.next_batch()
    other = BatchSampler(data, BatchShape(micro=4, world=2), rank=1)
    other.load_state_dict(sampler.state_dict())
    assert torch.equal(other.next_batch()[0][0], sampler.next_batch()[0][0][4:])


@pytest.mark.parametrize("world", [1, 2, 4])
def test_validation_batches_are_the_same_rows_at_every_world_size(world):
    data = positions(50_000)
    expected = torch.cat([inputs for inputs, _ in data.validation_batches(32, 4, 0, 1)])
    ranks = [data.validation_batches(32, 4, rank, world) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    rows = torch.cat([ranks[rank][index][0] for index in range(len(ranks[0])) for rank in range(world)])
    assert torch.equal(rows, expected)
