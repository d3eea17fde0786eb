"""From a plan and a model to the layout: every flat of every unit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from shardledger.errors import LayoutError
from shardledger.layout.flat import FlatLayout, Piece, make_flat, with_aligned_slots
from shardledger.plan.plan import Plan
from shardledger.plan.roles import Role
from shardledger.plan.spec import REAL_FLOATS, ModelSpec, ParameterSpec


@dataclass(frozen=True)
class Layout:
    """Where every element of a model lives. The rank is an argument of look-ups, never of building."""

    world: int
    flats: tuple[FlatLayout, ...]

    @cached_property
    def _flat_of(self) -> dict[str, FlatLayout]:
        return {slot.name: flat for flat in self.flats for slot in flat.slots}

    def flat_of(self, name: str) -> FlatLayout:
        """The flat that holds parameter ``name``.

        Raises:
            LayoutError: no such parameter.
        """
        try:
            return self._flat_of[name]
        except KeyError:
            raise LayoutError(f"no parameter {name!r} in this layout") from None

    def pieces(self, name: str, rank: int) -> tuple[Piece, ...]:
        """The part of parameter ``name`` that ``rank``'s shard holds: one piece, or none."""
        return tuple(piece for piece in self.flat_of(name).pieces(rank) if piece.name == name)

    def of_unit(self, unit: int) -> Iterator[FlatLayout]:
        """Flats of one unit."""
        return (flat for flat in self.flats if flat.unit == unit)

    def numbers_of_unit(self, unit: int) -> list[int]:
        """Places in ``flats`` of the flats of one unit."""
        return [number for number, flat in enumerate(self.flats) if flat.unit == unit]


def build_layout(plan: Plan, model: ModelSpec) -> Layout:
    """Lay out a model. Parameters of a unit share a flat when dtype, trainability and persistence agree."""
    specs = {p.name: p for p in model.parameters}
    flats = []
    for index, unit in enumerate(plan.units):
        groups: dict[tuple[str, bool, bool], list[ParameterSpec]] = {}
        for name in unit.parameters:
            spec = specs[name]
            key = (compute_dtype(spec, plan), spec.trainable, name in plan.persistent)
            groups.setdefault(key, []).append(spec)
        for (dtype, trainable, persistent), members in groups.items():
            flat = make_flat(
                [(spec.name, spec.shape) for spec in members],
                unit=index,
                dtype=dtype,
                trainable=trainable,
                sharded=(
                    Role.PARAM in unit.sharded and not persistent,
                    Role.GRAD in unit.sharded,
                    Role.OPTIM in unit.sharded,
                ),
                world=plan.world,
                alignment=plan.alignment,
            )
            flats.append(with_aligned_slots(flat, plan.alignment) if plan.reproducible else flat)
    return Layout(plan.world, tuple(flats))


def compute_dtype(spec: ParameterSpec, plan: Plan) -> str:
    """Dtype a parameter has in forward and backward: the plan's, except for dtypes the precision does not concern."""
    return plan.precision.compute if spec.dtype in REAL_FLOATS and not spec.keeps_dtype else spec.dtype
