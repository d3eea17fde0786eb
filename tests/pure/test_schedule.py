"""Module events in, actions out, compared as lists.

An action is written as a letter and its unit: G gather, W wait, R release, D reduce, S settle. Unit 0 is the root.
"""

import pytest

from shardledger.runtime.schedule import Action, Schedule, UnitFacts

LETTERS = {"gather": "G", "wait": "W", "release": "R", "reduce": "D", "settle": "S"}
SHARDED = UnitFacts(sharded=True, trainable=True, frozen=False, numel=10)
WHOLE = UnitFacts(sharded=False, trainable=True, frozen=False, numel=0)
FROZEN = UnitFacts(sharded=True, trainable=False, frozen=True, numel=10)
PARTLY_FROZEN = UnitFacts(sharded=True, trainable=True, frozen=True, numel=10)


def schedule(*units: UnitFacts, prefetch: bool = True, max_live: int = 10**9) -> Schedule:
    return Schedule(units or [SHARDED] * 4, prefetch=prefetch, max_live_numel=max_live)


def text(actions: list[Action]) -> str:
    return " ".join(f"{LETTERS[action.act.value]}{action.unit}" for action in actions)


def forward(made: Schedule, order=(1, 2, 3), *, track: bool = True) -> list[str]:
    """The root's forward, the units of ``order`` inside it; one line per event."""
    lines = [text(made.pre_forward(0))]
    for unit in order:
        lines.append(text(made.pre_forward(unit)))
        if track:
            made.track_call(unit)
        lines.append(text(made.post_forward(unit)))
    return [*lines, text(made.post_forward(0))]


def backward(made: Schedule, order=(3, 2, 1)) -> list[str]:
    """The root's outputs, then each unit: its outputs are reached, its gradients complete, its inputs are left."""
    lines = [text(made.pre_backward(0))]
    for unit in order:
        lines.append(text(made.pre_backward(unit)))
        lines.append(text(made.gradients_complete(unit)))
        lines.append(text(made.post_backward(unit)))
    lines.append(text(made.gradients_complete(0)))
    return [*lines, text(made.end_backward())]


# --- forward ---------------------------------------------------------------------------------------------------------


def test_the_first_forward_gathers_each_unit_before_it_runs_and_releases_it_after():
    assert forward(schedule()) == ["G0 W0", "G1 W1", "R1", "G2 W2", "R2", "G3 W3", "R3", "R0"]


def test_the_second_forward_gathers_the_next_unit_ahead():
    made = schedule()
    forward(made, track=False)
    assert forward(made) == ["G0 W0 G1", "W1 G2", "R1", "W2 G3", "R2", "W3", "R3", "R0"]


def test_without_prefetch_every_forward_is_like_the_first():
    made = schedule(prefetch=False)
    first = forward(made, track=False)
    assert forward(made, track=False) == first == ["G0 W0", "G1 W1", "R1", "G2 W2", "R2", "G3 W3", "R3", "R0"]


def test_prefetch_stops_at_the_most_gathered_elements_allowed():
    made = schedule(max_live=20)
    forward(made, track=False)
    # Root and one unit are 20 elements: the next unit is gathered when the one before has been released.
    assert forward(made) == ["G0 W0 G1", "W1", "R1 G2", "W2", "R2 G3", "W3", "R3", "R0"]


def test_units_that_are_not_sharded_need_nothing_in_forward():
    made = schedule(WHOLE, WHOLE, WHOLE, WHOLE)
    assert forward(made) == [""] * 8


def test_only_sharded_units_are_gathered_in_a_mixed_model():
    made = schedule(WHOLE, SHARDED, WHOLE, SHARDED)
    assert forward(made, track=False) == ["", "G1 W1", "R1", "", "", "G3 W3", "R3", ""]
    assert forward(made) == ["G1", "W1", "R1", "G3", "", "W3", "R3", ""]


def test_a_unit_called_twice_is_gathered_for_each_call():
    made = schedule()
    assert forward(made, (1, 1, 2), track=False) == ["G0 W0", "G1 W1", "R1", "G1 W1", "R1", "G2 W2", "R2", "R0"]
    # Its second call is wanted while it runs: it is gathered again as soon as it has been released.
    assert forward(made, (1, 1, 2)) == ["G0 W0 G1", "W1", "R1 G1", "W1 G2", "R1", "W2", "R2", "R0"]


def test_another_branch_ends_the_prefetch_and_what_was_gathered_in_vain_is_released():
    made = schedule()
    forward(made, (1, 2, 3), track=False)
    assert forward(made, (2, 3), track=False) == ["G0 W0 G1", "G2 W2", "R2", "G3 W3", "R3", "R0 R1"]
    # From then on the new way is the expected one.
    assert forward(made, (2, 3)) == ["G0 W0 G2", "W2 G3", "R2", "W3", "R3", "R0"]


def test_a_longer_pass_than_last_time_is_gathered_on_demand():
    made = schedule()
    forward(made, (1, 2), track=False)
    assert forward(made, (1, 2, 3, 1)) == ["G0 W0 G1", "W1 G2", "R1", "W2", "R2", "G3 W3", "R3", "G1 W1", "R1", "R0"]


def test_a_unit_called_alone_is_gathered_and_released():
    made = schedule()
    assert [text(made.pre_forward(2)), text(made.post_forward(2))] == ["G2 W2", "R2"]


# --- backward --------------------------------------------------------------------------------------------------------


def test_backward_gathers_each_unit_reduces_it_when_complete_and_releases_it_at_its_inputs():
    made = schedule(prefetch=False)
    forward(made)
    assert backward(made) == [
        "G0 W0",
        "G3 W3", "", "R3 D3",
        "G2 W2", "", "R2 D2",
        "G1 W1", "", "R1 D1",
        "D0", "R0",
    ]  # fmt: skip
    assert not made.in_backward


def test_backward_gathers_the_unit_before_ahead():
    made = schedule()
    forward(made)
    assert backward(made) == [
        "G0 W0 G3",
        "W3 G2", "", "R3 D3",
        "W2", "S3 G1", "R2 D2",
        "W1", "", "R1 D1",
        "D0", "R0",
    ]  # fmt: skip


def test_the_gather_ahead_follows_the_reduction_before_as_soon_as_gradients_come():
    """Else the weights of three units and the gradients of two, or two and three, would be alive at once."""
    made = schedule()
    forward(made)
    made.pre_backward(0)
    assert [text(made.pre_backward(3)), text(made.gradients_begun(3))] == ["W3 G2", ""]
    # The inputs of one unit are the outputs of the one before: whose hook comes first makes no difference.
    assert [text(made.gradients_complete(3)), text(made.pre_backward(2)), text(made.post_backward(3))] == [
        "", "W2", "R3 D3"]  # fmt: skip
    assert [text(made.gradients_begun(2)), text(made.gradients_begun(2))] == ["S3 G1", ""]
    assert [text(made.gradients_complete(2)), text(made.post_backward(2)), text(made.pre_backward(1))] == [
        "", "R2 D2", "W1"]  # fmt: skip
    # Nothing is wanted any more: the reduction goes on beside the last unit.
    assert [text(made.gradients_begun(1)), text(made.gradients_complete(1)), text(made.post_backward(1))] == [
        "", "", "R1 D1"]  # fmt: skip


def test_a_unit_without_gradients_gathers_ahead_before_it_is_reduced_as_the_others_do():
    made = schedule()
    forward(made)
    made.pre_backward(0)
    made.pre_backward(3)
    made.gradients_complete(3)
    assert [text(made.pre_backward(2)), text(made.post_backward(3)), text(made.post_backward(2))] == [
        "W2", "R3 D3", "S3 G1 R2 D2"]  # fmt: skip


def test_prefetch_in_backward_stops_at_the_most_gathered_elements_allowed():
    made = schedule(max_live=20)
    forward(made)
    assert backward(made) == [
        "G0 W0 G3",
        "W3", "", "R3 D3 G2",
        "W2", "", "R2 D2 G1",
        "W1", "", "R1 D1",
        "D0", "R0",
    ]  # fmt: skip


def test_units_that_are_not_sharded_are_only_reduced():
    made = schedule(WHOLE, WHOLE, WHOLE, WHOLE)
    forward(made)
    assert backward(made) == ["", "", "D3", "", "", "D2", "", "", "D1", "", "D0", ""]


def test_reductions_are_launched_in_the_agreed_order_whatever_order_gradients_come_in():
    made = schedule(WHOLE, WHOLE, WHOLE, WHOLE)
    forward(made)
    made.pre_backward(0)
    assert [text(made.gradients_complete(unit)) for unit in (1, 2, 0, 3)] == ["", "", "", "D3 D2 D1 D0"]
    assert made.completed == [1, 2, 0, 3]
    assert text(made.end_backward()) == ""


def test_an_order_agreed_between_ranks_replaces_the_first_guess():
    made = schedule(WHOLE, WHOLE, WHOLE, WHOLE)
    assert made.reduce_order == (3, 2, 1, 0)
    made.reduce_order = (1, 3, 0, 2)
    forward(made)
    made.pre_backward(0)
    assert [text(made.gradients_complete(unit)) for unit in (3, 2, 1, 0)] == ["", "", "D1 D3", "D0 D2"]


def test_units_without_trainable_parameters_are_never_reduced():
    made = schedule(SHARDED, FROZEN, SHARDED, prefetch=False)
    assert made.reduce_order == (2, 0)
    forward(made, (1, 2))
    assert text(made.pre_backward(0)) == "G0 W0"
    assert [text(made.pre_backward(2)), text(made.gradients_complete(2)), text(made.post_backward(2))] == [
        "G2 W2", "", "R2 D2"]  # fmt: skip
    assert [text(made.pre_backward(1)), text(made.post_backward(1))] == ["G1 W1", "R1"]
    assert text(made.end_backward()) == "D0 R0"


def test_missing_gradients_are_reduced_at_the_end_in_order():
    made = schedule(prefetch=False)
    forward(made)
    made.pre_backward(0)
    made.pre_backward(3)
    assert text(made.post_backward(3)) == "R3 D3"
    assert text(made.end_backward()) == "D2 D1 D0 R0"


def test_a_missing_unit_holds_back_the_ones_behind_it_until_the_end():
    made = schedule(prefetch=False)
    forward(made, (1, 3))
    lines = backward(made, (3, 1))
    assert lines == ["G0 W0", "G3 W3", "", "R3 D3", "G1 W1", "", "R1", "", "D2 D1 D0 R0"]


def test_a_backward_without_any_gradient_still_reduces_every_trainable_unit():
    made = schedule()
    forward(made)
    made.pre_backward(0)
    assert text(made.end_backward()).split()[:4] == ["D3", "D2", "D1", "D0"]


def test_late_gradients_are_reduced_once_more_at_the_end():
    made = schedule(WHOLE, WHOLE, WHOLE, WHOLE)
    forward(made)
    made.pre_backward(0)
    made.gradients_complete(3)
    # 3 and 2 have a gradient after all; 2 has not been launched, so once is enough for it.
    assert text(made.end_backward(late=[3, 2])) == "D2 D1 D0 D3"


def test_ending_a_backward_that_never_began_does_nothing():
    made = schedule()
    forward(made)
    assert made.end_backward() == []
    assert made.end_backward(late=[1]) == []


def test_each_backward_reduces_every_unit_anew():
    made = schedule(prefetch=False)
    for _ in range(3):
        forward(made)
        lines = backward(made)
        assert [line for line in lines if "D" in line] == ["R3 D3", "R2 D2", "R1 D1", "D0"]


# --- when weights have been used -------------------------------------------------------------------------------------


def test_a_unit_whose_inputs_need_no_gradient_is_released_when_its_gradients_are_complete():
    made = schedule(prefetch=False)
    forward(made, track=False)
    assert [text(made.pre_backward(3)), text(made.gradients_complete(3))] == ["G3 W3", "R3 D3"]


def test_a_unit_with_frozen_weights_waits_for_its_inputs():
    made = schedule(SHARDED, PARTLY_FROZEN, prefetch=False)
    forward(made, (1,))
    made.pre_backward(0)
    assert [text(made.pre_backward(1)), text(made.gradients_complete(1)), text(made.post_backward(1))] == [
        "G1 W1", "", "R1 D1"]  # fmt: skip


def test_a_unit_with_frozen_weights_and_untracked_inputs_stays_until_the_end():
    made = schedule(SHARDED, PARTLY_FROZEN, prefetch=False)
    forward(made, (1,), track=False)
    made.pre_backward(0)
    assert [text(made.pre_backward(1)), text(made.gradients_complete(1))] == ["G1 W1", "D1"]
    assert text(made.end_backward()) == "D0 R0 R1"


def test_a_unit_with_an_open_second_input_is_released_once_one_input_and_all_gradients_are_there():
    made = schedule(prefetch=False)
    forward(made)
    made.pre_backward(3)
    assert [text(made.input_reached(3)), text(made.gradients_complete(3))] == ["", "R3 D3"]
    made.pre_backward(2)
    assert [text(made.gradients_complete(2)), text(made.input_reached(2))] == ["", "R2 D2"]
    # The second input comes later and finds everything done.
    assert [text(made.post_backward(3)), text(made.post_backward(2))] == ["", ""]


def test_a_unit_called_twice_is_reduced_once_and_released_after_its_first_call_has_been_left():
    made = schedule(prefetch=False)
    forward(made, (1, 1, 2))
    made.pre_backward(0)
    made.pre_backward(2)
    made.post_backward(2)
    assert text(made.pre_backward(1)) == "G1 W1"
    assert text(made.post_backward(1)) == ""
    assert text(made.pre_backward(1)) == "W1"
    assert text(made.gradients_complete(1)) == ""  # held back: unit 3 was not called and is before it in the order
    assert text(made.post_backward(1)) == "R1"
    assert text(made.end_backward()) == "D3 D2 D1 D0 R0"


def test_a_shared_unit_with_one_call_open_is_not_released_by_its_gradients():
    made = schedule(prefetch=False)
    forward(made, (3, 3))
    made.pre_backward(0)
    made.pre_backward(3)
    assert text(made.gradients_complete(3)) == ""
    assert [text(made.post_backward(3)), text(made.post_backward(3))] == ["", "R3 D3"]


# --- recomputation ---------------------------------------------------------------------------------------------------


def test_non_reentrant_recomputation_finds_its_unit_gathered():
    made = schedule(prefetch=False)
    forward(made)
    made.pre_backward(0)
    assert text(made.pre_backward(3)) == "G3 W3"
    # Saved tensors are asked for: the unit runs again inside its own backward.
    assert text(made.pre_forward(3)) == "W3"
    assert made.track_call(3) is False
    assert text(made.post_forward(3)) == ""
    assert [text(made.gradients_complete(3)), text(made.post_backward(3))] == ["", "R3 D3"]


def test_reentrant_recomputation_gathers_and_is_followed_through_its_own_backward():
    made = schedule(prefetch=False)
    forward(made, track=False)  # the forward pass ran without gradients
    made.pre_backward(0)
    assert text(made.pre_forward(3)) == "G3 W3"
    assert made.track_call(3) is True
    assert text(made.post_forward(3)) == ""
    assert text(made.pre_backward(3)) == "W3"
    assert [text(made.gradients_complete(3)), text(made.post_backward(3))] == ["", "R3 D3"]
    assert text(made.end_backward()) == "D2 D1 D0 R0"


def test_a_recomputation_does_not_change_the_order_that_prefetch_follows():
    made = schedule()
    forward(made)
    made.pre_backward(0)
    for unit in (3, 2, 1):
        made.pre_backward(unit)
        made.pre_forward(unit)
        made.post_forward(unit)
        made.gradients_complete(unit)
        made.post_backward(unit)
    made.end_backward()
    assert forward(made) == ["G0 W0 G1", "W1 G2", "R1", "W2 G3", "R2", "W3", "R3", "R0"]


# --- failures --------------------------------------------------------------------------------------------------------


def test_an_aborted_forward_releases_everything_and_the_next_pass_starts_anew():
    made = schedule()
    forward(made, track=False)
    made.pre_forward(0)
    made.pre_forward(1)
    assert text(made.abort()) == "R0 R1 R2"
    assert forward(made) == ["G0 W0 G1", "W1", "R1", "G2 W2", "R2", "G3 W3", "R3", "R0"]


def test_an_aborted_backward_releases_everything_and_reduces_nothing():
    made = schedule(prefetch=False)
    forward(made)
    made.pre_backward(0)
    made.pre_backward(3)
    assert text(made.abort()) == "R0 R3"
    assert not made.in_backward
    assert made.end_backward() == []
    assert forward(made)[0] == "G0 W0"
    assert [line for line in backward(made) if "D" in line] == ["R3 D3", "R2 D2", "R1 D1", "D0"]


def test_calls_of_an_aborted_pass_are_forgotten():
    made = schedule(prefetch=False)
    forward(made)
    made.abort()
    forward(made, track=False)
    made.pre_backward(3)
    assert text(made.gradients_complete(3)) == "R3 D3"


def test_a_second_abort_does_nothing():
    made = schedule()
    made.pre_forward(0)
    assert text(made.abort()) == "R0"
    assert made.abort() == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_evaluation_between_passes_keeps_nothing_gathered(when):
    made = schedule()
    if when == "after":
        forward(made)
        backward(made)
    lines = forward(made, track=False) + forward(made, track=False)
    assert " ".join(lines).count("G") == " ".join(lines).count("R") == 8
