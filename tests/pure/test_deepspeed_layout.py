"""Where DeepSpeed puts elements: every element of every parameter on exactly one rank, none on top of another."""

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from shardledger.checkpoint.deepspeed_layout import parameter_by_parameter, whole_group

shapes = st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), max_size=6).map(
    lambda found: {f"p{i}": shape for i, shape in enumerate(found)}
)
worlds = st.integers(1, 7)


def check(layout, group):
    taken = set()
    for name, shape in group.items():
        elements = []
        for piece in layout.pieces(name):
            assert 0 <= piece.rank < layout.world and piece.numel > 0
            assert piece.in_flat >= 0 and piece.in_flat + piece.numel <= layout.partition_numel
            elements += range(piece.in_parameter, piece.in_parameter + piece.numel)
            places = {(piece.rank, at) for at in range(piece.in_flat, piece.in_flat + piece.numel)}
            assert not places & taken
            taken |= places
        assert elements == list(range(prod(shape)))


@given(shapes, worlds, st.data())
def test_stages_1_and_2_cut_the_whole_group(group, world, data):
    paddings = data.draw(st.none() | st.lists(st.integers(0, 3), min_size=len(group), max_size=len(group)))
    total = sum(map(prod, group.values())) + sum(paddings or ())
    partition = max(1, -(-total // (2 * world)) * 2)  # as DeepSpeed: the whole is a multiple of 2 * world
    layout = whole_group(group, paddings, partition, world)
    check(layout, group)
    if group and not paddings and prod(list(group.values())[0]):
        first = next(layout.pieces("p0"))
        assert (first.rank, first.in_flat) == (0, 0)


@given(shapes, worlds)
def test_stage_3_cuts_every_parameter_alone(group, world):
    layout = parameter_by_parameter(group, world)
    check(layout, group)
    assert layout.partition_numel == sum(-(-prod(shape) // world) for shape in group.values())
