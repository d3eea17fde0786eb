"""What to do when: module events in, actions out. Pure; it holds no tensors and imports no torch.

Rules, for units whose parameters are sharded:
* a unit is gathered before it runs and released after, in forward and in backward;
* while it runs, the unit that ran next last time is gathered ahead, so that at most two units besides the root are full;
* in backward, that gather waits until the reduction of the unit before is over: of the next unit's weights and the last
  one's gradients only one is alive at a time. Both still run beside compute, one after the other, as they share a wire;
* a forward pass inside a backward pass is a recomputation: its unit stays full for the backward pass that follows.

Rules for gradients: each trainable unit is reduced once per backward pass, when its gradients are complete, its weights
have been released, and all units before it in ``reduce_order`` have been launched, the rest at the end; so every rank
launches the same reductions in the same order whatever its own graph looked like.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum


class Act(Enum):
    """What the executor can be told."""

    GATHER = "gather"
    WAIT = "wait"
    RELEASE = "release"
    REDUCE = "reduce"
    SETTLE = "settle"
    """Wait for the reductions under way. A moment that is the same on all ranks, unlike that at which one is found done."""


@dataclass(frozen=True)
class Action:
    """One act on one unit."""

    act: Act
    unit: int


@dataclass(frozen=True)
class UnitFacts:
    """What the schedule needs to know about a unit."""

    sharded: bool
    """Whether its parameters must be gathered."""
    trainable: bool
    """Whether it has gradients to reduce."""
    frozen: bool
    """Whether it has frozen parameters too, whose use in backward no gradient announces."""
    numel: int
    """Elements that gathering it brings."""


ROOT = 0
"""Index of the root unit."""

_LIVE_UNITS = 2
"""Gathered units besides the root: the one that computes and the one that comes next."""


@dataclass
class _Backward:
    """How far the current backward pass is."""

    position: int = 0
    """Of the unit it has reached, in the order of the forward pass."""
    launched: int = 0
    """How many of ``reduce_order`` have been reduced."""
    reducing: int | None = None
    """The unit whose reduction was started last, until it is settled."""
    unit: int = -1
    """The unit whose outputs were reached last."""
    reached: set[int] = field(default_factory=set)
    """Units whose first input has its gradient."""
    open: set[int] = field(default_factory=set)
    """Units with all gradients whose inputs are still to come: weights are released before gradients are reduced, so that
    what a reduction receives takes their place."""


class Schedule:
    """The state machine of one engine's units."""

    def __init__(self, units: Sequence[UnitFacts], *, prefetch: bool, max_live_numel: int) -> None:
        self.units = tuple(units)
        self.in_backward = False
        self.reduce_order = tuple(u for u in reversed(range(len(units))) if units[u].trainable)
        self.completed: list[int] = []
        """Units whose gradients were complete in the current backward pass, in that order."""
        self._max_live = max_live_numel if prefetch else -1
        self._gathered: set[int] = set()
        self._orders: tuple[list[int], list[int]] = ([], [])
        """Units in the order in which the previous forward pass, and this one, ran them."""
        self._back = _Backward()
        self._wanted: int | None = None
        self._calls = [0] * len(units)
        """Tracked forward calls whose backward has not passed yet."""
        self._untracked: set[int] = set()
        self._fresh = False
        """Whether a forward pass with a graph has begun since the last backward pass."""
        self._active: Counter[int] = Counter()
        """Units whose forward is under way: a backward pass inside it (a gradient as part of the loss) keeps them."""

    @property
    def at_work(self) -> int:
        """The unit that runs or ran last, in forward or in backward; for messages."""
        if self.in_backward:
            return self._order[self._back.position] if self._back.position < len(self._order) else ROOT
        return next((unit for unit in reversed(self._order) if self._active[unit] > 0), ROOT)

    @property
    def _order(self) -> list[int]:
        return self._orders[1]

    @property
    def _last_order(self) -> list[int]:
        return self._orders[0]

    def pre_forward(self, unit: int, *, graph: bool = True) -> list[Action]:
        """A unit is about to run; ``graph`` tells whether autograd records it."""
        if self.in_backward:
            return self._gather(unit)
        if unit == ROOT:
            self._active.clear()
            self._fresh = self._fresh or graph
            self._orders = (self._order, [])
        self._order.append(unit)
        self._active[unit] += 1
        actions = self._gather(unit)
        self._wanted = self._next_forward()
        return actions + self._look_ahead()

    def post_forward(self, unit: int) -> list[Action]:
        """A unit has run."""
        if self.in_backward:
            return []
        self._active[unit] -= 1
        if unit == ROOT:
            self._wanted = None
            return [self._release(u) for u in sorted(self._gathered)]
        return self._release_if_gathered(unit) + self._look_ahead()

    def track_call(self, unit: int) -> bool:
        """Whether a forward call must be followed through its backward: not when it only recomputes such a call."""
        if self.in_backward and self._calls[unit] > 0:
            return False
        self._calls[unit] += 1
        return True

    def untracked_call(self, unit: int) -> None:
        """A forward call none of whose inputs will have a gradient: its backward ends without a sign of its own."""
        self._untracked.add(unit)

    def pre_backward(self, unit: int) -> list[Action]:
        """The backward pass reaches a unit's outputs."""
        if not self.in_backward:
            self.in_backward = True
            self._back = _Backward(position=len(self._order))
            self.completed = []
        self._back.unit = unit
        actions = self._gather(unit)
        self._wanted = self._next_backward(unit)
        return actions + self._look_ahead()

    def post_backward(self, unit: int) -> list[Action]:
        """The backward pass has left one tracked call of a unit through its inputs."""
        self._calls[unit] = max(0, self._calls[unit] - 1)
        if not self._calls[unit]:
            self._back.open.discard(unit)
        if self._calls[unit] or not self.in_backward or not self._counted(unit):
            return []
        return self._complete(unit) + self._release_if_gathered(unit) + self._launch() + self._look_ahead()

    def input_reached(self, unit: int) -> list[Action]:
        """The first input of a tracked call has its gradient; others (shared with other units, say) may be open."""
        self._back.reached.add(unit)
        return self._release_if_spent(unit)

    def gradients_begun(self, unit: int) -> list[Action]:
        """A unit's first large gradient has come: what was reduced meanwhile should be done, and make room."""
        return self._make_room()

    def gradients_complete(self, unit: int) -> list[Action]:
        """Every trainable parameter of a unit has received a gradient."""
        actions = self._complete(unit)
        if self.units[unit].sharded and self._fresh and self._calls[unit] > 0 and unit not in self._untracked:
            self._back.open.add(unit)
        return actions + self._release_if_spent(unit) + self._launch()

    def end_backward(self, late: Sequence[int] = ()) -> list[Action]:
        """The backward pass is over. ``late``: units that received gradients after they were reduced."""
        if not self.in_backward:
            return []
        rest = self.reduce_order[self._back.launched :]
        actions = [Action(Act.REDUCE, u) for u in rest]
        actions += [Action(Act.REDUCE, u) for u in self.reduce_order if u in late and u not in rest]
        actions += [self._release(u) for u in sorted(self._gathered) if self._active[u] <= 0]
        self._end()
        return actions

    def demand(self, unit: int) -> list[Action]:
        """A saved weight of a unit is needed now."""
        return self._gather(unit)

    def abort(self) -> list[Action]:
        """An exception left the pass unfinished: everything returns to its shards, gradients are not reduced."""
        self._active.clear()
        actions = [self._release(u) for u in sorted(self._gathered)]
        self._end()
        return actions

    def _end(self) -> None:
        self.in_backward = False
        self._back = _Backward()
        self._wanted = None
        self._fresh = False
        self._untracked = set()
        self._calls = [0] * len(self.units)

    def _complete(self, unit: int) -> list[Action]:
        if unit in self.completed or not self.units[unit].trainable:
            return []
        self.completed.append(unit)
        return self._make_room()  # where no gradient has begun: all ranks gather before they reduce

    def _launch(self) -> list[Action]:
        """Reduce what is complete and next in order, except units whose weights are about to be released."""
        actions, back = [], self._back
        while back.launched < len(self.reduce_order):
            unit = self.reduce_order[back.launched]
            if unit not in self.completed or unit in back.open:
                break
            back.launched += 1
            back.reducing = unit
            actions.append(Action(Act.REDUCE, unit))
        return actions

    def _make_room(self) -> list[Action]:
        """Gather the wanted unit, after the reduction that it waits for."""
        reducing, self._back.reducing = self._back.reducing, None
        actions = self._look_ahead() if reducing is not None else []
        if reducing is None or not actions:
            self._back.reducing = reducing
            return []
        return [Action(Act.SETTLE, reducing), *actions]

    @property
    def _holds(self) -> bool:
        """Whether the next gather waits for a reduction: until gradients of the unit at work come."""
        back = self._back
        if back.reducing is None or back.unit < 0:
            return False
        return self.units[back.unit].trainable and back.unit not in self.completed

    def _release_if_spent(self, unit: int) -> list[Action]:
        """Release a unit all of whose weights have been used: their gradients are complete and its backward has ended.

        Gradients alone do not tell of frozen weights, nor of calls under a second backward.
        """
        if unit == ROOT or unit not in self.completed or self.units[unit].frozen or not self._fresh:
            return []
        if self._calls[unit] == 0 or (self._calls[unit] == 1 and unit in self._back.reached):
            self._back.open.discard(unit)
            return self._release_if_gathered(unit) + self._launch() + self._look_ahead()
        return []

    def _counted(self, unit: int) -> bool:
        """Whether the calls on record are all that this backward pass will see of a unit.

        Not in a second pass over a graph, or over one older than the last forward; nor, before its gradients are
        complete, of a unit with calls that nothing announces the end of.
        """
        if unit in self._untracked:
            return self._fresh and unit in self.completed and not self.units[unit].frozen
        return self._fresh

    def _gather(self, unit: int) -> list[Action]:
        if not self.units[unit].sharded:
            return []
        if unit in self._gathered:
            return [Action(Act.WAIT, unit)]
        self._gathered.add(unit)
        return [Action(Act.GATHER, unit), Action(Act.WAIT, unit)]

    def _look_ahead(self) -> list[Action]:
        """Gather the wanted unit if there is room for it."""
        unit = self._wanted
        if unit is None or self._holds or not self.units[unit].sharded or unit in self._gathered:
            return []
        live = [u for u in self._gathered if u != ROOT]
        if len(live) >= _LIVE_UNITS:
            return []
        if sum(self.units[u].numel for u in self._gathered) + self.units[unit].numel > self._max_live:
            return []
        self._wanted = None
        self._gathered.add(unit)
        return [Action(Act.GATHER, unit)]

    def _next_forward(self) -> int | None:
        """The unit that ran after this point in the previous pass, when this pass has gone the same way so far."""
        here = len(self._order)
        if here < len(self._last_order) and self._last_order[here - 1] == self._order[-1]:
            return self._last_order[here]
        return None

    def _next_backward(self, unit: int) -> int | None:
        """The unit that ran before ``unit`` in the forward pass; before the root's end, the last one."""
        if unit == ROOT:
            return self._order[-1] if self._order and self._order[-1] != ROOT else None
        for position in range(min(self._back.position, len(self._order)) - 1, -1, -1):
            if self._order[position] == unit:
                self._back.position = position
                before = self._order[position - 1] if position > 0 else ROOT
                return before if before != ROOT else None
        return None

    def _release(self, unit: int) -> Action:
        self._gathered.discard(unit)
        return Action(Act.RELEASE, unit)

    def _release_if_gathered(self, unit: int) -> list[Action]:
        return [self._release(unit)] if unit in self._gathered and self._active[unit] <= 0 else []
