"""Intervals, flats and pieces: every element lives on exactly one rank, whatever the shapes and the world size."""

from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardledger.errors import LayoutError
from shardledger.layout.flat import FlatLayout, Interval, Slot, make_flat

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=4).map(tuple), max_size=7)
WORLDS = st.integers(1, 1024)
ALIGNMENTS = st.sampled_from([1, 2, 3, 8, 128])


def lay(shapes, world, alignment=8, sharded=(True, True, True)) -> FlatLayout:
    named = [(f"p{i}", tuple(shape)) for i, shape in enumerate(shapes)]
    return make_flat(named, unit=0, dtype="float32", trainable=True, sharded=sharded, world=world, alignment=alignment)


@settings(max_examples=80, deadline=None)
@given(shapes=SHAPES, world=WORLDS, alignment=ALIGNMENTS)
def test_every_element_is_on_exactly_one_rank(shapes, world, alignment):
    flat = lay(shapes, world, alignment)
    reached = {slot.name: 0 for slot in flat.slots}
    for rank in range(world):
        for piece in flat.pieces(rank):
            assert piece.in_parameter.start == reached[piece.name], "a gap or an overlap between ranks"
            assert piece.in_parameter.numel > 0
            reached[piece.name] = piece.in_parameter.stop
    assert reached == {slot.name: slot.numel for slot in flat.slots}


@settings(max_examples=80, deadline=None)
@given(shapes=SHAPES, world=WORLDS, alignment=ALIGNMENTS)
def test_shards_are_equal_aligned_and_cover_the_flat(shapes, world, alignment):
    flat = lay(shapes, world, alignment)
    assert flat.numel == sum(prod(shape) for shape in shapes)
    assert flat.shard_numel * world == flat.padded_numel
    assert flat.shard_numel % alignment == 0
    assert 0 <= flat.padded_numel - flat.numel < world * alignment
    ends = [0]
    for rank in range(world):
        assert flat.shard(rank).start == ends[-1]
        assert flat.shard(rank).numel == flat.shard_numel
        ends.append(flat.shard(rank).stop)
    assert ends[-1] == flat.padded_numel


@settings(max_examples=80, deadline=None)
@given(shapes=SHAPES, world=WORLDS, alignment=ALIGNMENTS, data=st.data())
def test_a_piece_names_the_same_elements_in_its_shard_and_in_its_parameter(shapes, world, alignment, data):
    flat = lay(shapes, world, alignment)
    rank = data.draw(st.integers(0, world - 1))
    slots = {slot.name: slot for slot in flat.slots}
    end = 0
    for piece in flat.pieces(rank):
        slot = slots[piece.name]
        assert piece.in_shard.numel == piece.in_parameter.numel
        assert flat.shard(rank).start + piece.in_shard.start == slot.start + piece.in_parameter.start
        assert end == piece.in_shard.start or piece.in_shard.start == 0, "pieces follow each other without gaps"
        assert piece.in_parameter.start >= 0 and piece.in_parameter.stop <= slot.numel
        end = piece.in_shard.stop
    assert end <= flat.shard_numel


@settings(max_examples=80, deadline=None)
@given(shapes=SHAPES, start=st.integers(0, 200), numel=st.integers(0, 200))
def test_pieces_of_any_interval_are_what_counting_elements_finds(shapes, start, numel):
    flat = lay(shapes, 3)
    interval = Interval(start, start + numel)
    found = {}
    for piece in flat.pieces_in(interval):
        for here, there in zip(
            range(piece.in_shard.start, piece.in_shard.stop),
            range(piece.in_parameter.start, piece.in_parameter.stop),
            strict=True,
        ):
            found[interval.start + here] = (piece.name, there)
    everywhere = {slot.start + i: (slot.name, i) for slot in flat.slots for i in range(slot.numel)}
    assert found == {at: owner for at, owner in everywhere.items() if interval.start <= at < interval.stop}


@given(a=st.integers(0, 12), b=st.integers(0, 12), c=st.integers(0, 12), d=st.integers(0, 12))
def test_overlap_is_the_common_elements(a, b, c, d):
    one, two = Interval(min(a, b), max(a, b)), Interval(min(c, d), max(c, d))
    common = set(range(one.start, one.stop)) & set(range(two.start, two.stop))
    found = one.overlap(two)
    assert found == two.overlap(one)
    assert set(range(found.start, found.stop)) == common if found else not common


def test_parameters_keep_their_order_and_shapes():
    flat = lay([(2, 3), (), (0, 5), (4,)], world=2)
    assert flat.slots == (
        Slot("p0", (2, 3), 0),
        Slot("p1", (), 6),
        Slot("p2", (0, 5), 7),
        Slot("p3", (4,), 7),
    )
    assert [slot.interval for slot in flat.slots] == [Interval(0, 6), Interval(6, 7), Interval(7, 7), Interval(7, 11)]
    assert (flat.numel, flat.padded_numel, flat.shard_numel) == (11, 16, 8)
    assert [piece.name for piece in flat.pieces(0)] == ["p0", "p1", "p3"]
    assert [(piece.name, piece.in_parameter) for piece in flat.pieces(1)] == [("p3", Interval(1, 4))]


@pytest.mark.parametrize("shapes", [[], [(0,)], [(3, 0), (0, 0, 2)]])
@pytest.mark.parametrize("world", [1, 7, 1024])
def test_a_flat_without_elements_takes_no_memory_and_has_no_pieces(shapes, world):
    flat = lay(shapes, world)
    assert (flat.numel, flat.padded_numel, flat.shard_numel) == (0, 0, 0)
    assert [list(flat.pieces(rank)) for rank in range(world)] == [[]] * world


def test_fewer_elements_than_ranks_leave_some_ranks_with_padding_only():
    flat = lay([(5,)], world=4, alignment=2)
    assert [[piece.in_parameter for piece in flat.pieces(rank)] for rank in range(4)] == [
        [Interval(0, 2)],
        [Interval(2, 4)],
        [Interval(4, 5)],
        [],
    ]


def test_billions_of_elements_over_a_thousand_ranks_are_arithmetic():
    flat = lay([(50_000, 20_000)] * 8 + [(3,)], world=1024)
    assert flat.numel == 8_000_000_003
    assert sum(p.in_parameter.numel for rank in range(1024) for p in flat.pieces(rank)) == flat.numel
    assert flat.padded_numel - flat.numel < 1024 * 8


def test_slots_with_a_gap_or_an_overlap_are_refused_by_name():
    flat = lay([(4,), (4,)], world=2)
    for start in (3, 5):
        with pytest.raises(LayoutError, match=f"'p1' starts at {start}, its predecessor ends at 4"):
            replace(flat, slots=(flat.slots[0], replace(flat.slots[1], start=start)))


@pytest.mark.parametrize("padded", [8, 11, 17])
def test_a_padded_size_that_cannot_hold_equal_shards_is_refused(padded):
    flat = lay([(6,), (4,)], world=2)
    with pytest.raises(LayoutError, match=f"{padded} elements cannot hold 10 in 2 equal intervals"):
        replace(flat, padded_numel=padded)
