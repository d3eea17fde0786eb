"""Whatever order module events come in, the schedule's actions can be performed and leave nothing behind."""

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from shardledger.runtime.schedule import Act, Action, Schedule, UnitFacts


@dataclass(frozen=True)
class Pass:
    """One pass over the model. ``ends``: how far it gets. ``order``: the units called, in that order."""

    order: list[int]
    ends: str
    tracked: list[bool]
    missing: set[int]
    late: set[int]
    recompute: str


@dataclass
class Memory:
    """Performs actions on sets, and refuses what an executor could not do."""

    units: tuple[UnitFacts, ...]
    gathered: set[int] = field(default_factory=set)
    ready: set[int] = field(default_factory=set)
    reduced: list[int] = field(default_factory=list)
    most_live: int = 0

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            unit = action.unit
            if action.act is Act.GATHER:
                assert self.units[unit].sharded and unit not in self.gathered, f"{unit} is gathered twice"
                self.gathered.add(unit)
            elif action.act is Act.WAIT:
                assert unit in self.gathered, f"{unit} is waited for without a gather"
                self.ready.add(unit)
            elif action.act is Act.RELEASE:
                assert unit in self.gathered, f"{unit} is released without a gather"
                self.gathered.discard(unit)
                self.ready.discard(unit)
            elif action.act is Act.SETTLE:
                assert unit in self.reduced, f"{unit} is waited for without a reduction"
            else:
                assert self.units[unit].trainable, f"{unit} has nothing to reduce"
                self.reduced.append(unit)
            self.most_live = max(self.most_live, len(self.gathered - {0}))

    def use(self, unit: int) -> None:
        assert not self.units[unit].sharded or unit in self.ready, f"{unit} runs without its weights"


def run_forward(made: Schedule, memory: Memory, one: Pass) -> bool:
    """The forward pass of ``one``; whether it got to its end."""
    grad = one.ends != "evaluation" and one.recompute != "reentrant"
    memory.perform(made.pre_forward(0))
    memory.use(0)
    for unit, tracked in zip(one.order, one.tracked, strict=True):
        memory.perform(made.pre_forward(unit))
        memory.use(unit)
        memory.use(0)
        if one.ends == "raises in forward":
            memory.perform(made.abort())
            return False
        if grad and tracked:
            made.track_call(unit)
        memory.perform(made.post_forward(unit))
    memory.perform(made.post_forward(0))
    return True


def run_backward(made: Schedule, memory: Memory, one: Pass) -> None:
    memory.perform(made.pre_backward(0))
    calls = list(zip(one.order, one.tracked, strict=True))
    for here in reversed(range(len(calls))):
        unit, tracked = calls[here]
        if one.recompute != "reentrant":
            memory.perform(made.pre_backward(unit))
        if one.recompute != "none":
            memory.perform(made.pre_forward(unit))
            memory.use(unit)
            made.track_call(unit) if tracked else None
            memory.perform(made.post_forward(unit))
        memory.perform(made.pre_backward(unit))
        memory.use(unit)
        if one.ends == "raises in backward":
            memory.perform(made.abort())
            return
        first_call = unit not in one.order[:here]
        if first_call and unit not in one.missing and made.units[unit].trainable:
            memory.perform(made.gradients_complete(unit))
        if tracked:
            memory.perform(made.post_backward(unit))
    if 0 not in one.missing and made.units[0].trainable:
        memory.perform(made.gradients_complete(0))
    late = one.late & set(memory.reduced)
    memory.perform(made.end_backward(sorted(late)))
    again = [unit for unit in made.reduce_order if unit in late]
    assert memory.reduced == [*made.reduce_order, *again], "each once, in the agreed order, and the late ones again"


FACTS = st.builds(UnitFacts, sharded=st.booleans(), trainable=st.booleans(), frozen=st.booleans(), numel=st.just(10))


@st.composite
def passes(draw, units: int) -> Pass:
    order = draw(st.lists(st.integers(1, units - 1), max_size=6)) if units > 1 else []
    return Pass(
        order=order,
        ends=draw(st.sampled_from(["step", "step", "evaluation", "raises in forward", "raises in backward"])),
        tracked=draw(st.lists(st.booleans(), min_size=len(order), max_size=len(order))),
        missing=draw(st.sets(st.integers(0, units - 1))),
        late=draw(st.sets(st.integers(0, units - 1))),
        recompute=draw(st.sampled_from(["none", "none", "non-reentrant", "reentrant"])),
    )


@settings(max_examples=250, deadline=None)
@given(data=st.data(), facts=st.lists(FACTS, min_size=1, max_size=6), prefetch=st.booleans())
def test_no_sequence_of_events_breaks_a_rule(data, facts, prefetch):
    made = Schedule(facts, prefetch=prefetch, max_live_numel=data.draw(st.sampled_from([0, 25, 10**9])))
    made.reduce_order = tuple(data.draw(st.permutations(made.reduce_order)))
    memory = Memory(tuple(facts))
    for one in data.draw(st.lists(passes(len(facts)), min_size=1, max_size=5)):
        memory.reduced.clear()
        if run_forward(made, memory, one) and one.ends != "evaluation":
            assert not memory.gathered, "nothing stays gathered between forward and backward"
            run_backward(made, memory, one)
        assert not memory.gathered and not made.in_backward, "every gather has been released"


@settings(max_examples=60, deadline=None)
@given(
    blocks=st.integers(1, 9), ends=st.lists(st.sampled_from(["step", "evaluation", "raises in backward"]), max_size=4)
)
def test_a_model_that_always_goes_the_same_way_has_at_most_two_blocks_gathered(blocks, ends):
    block = UnitFacts(sharded=True, trainable=True, frozen=False, numel=10)
    made = Schedule([block] * (blocks + 1), prefetch=True, max_live_numel=10**9)
    memory = Memory(made.units)
    order = list(range(1, blocks + 1))
    for end in ["step", *ends]:
        memory.reduced.clear()
        one = Pass(order, end, [True] * blocks, set(), set(), "none")
        if run_forward(made, memory, one) and end != "evaluation":
            run_backward(made, memory, one)
    assert memory.most_live <= 2
