"""The counter of live bytes: every allocation until its release, under the right category."""

import torch
import torch.nn.functional as F
from torch import nn

from shardledger.telemetry.live import LiveBytes

KIB = 256  # fp32 elements


def test_a_tensor_counts_until_its_last_reference_is_gone():
    with LiveBytes() as meter:
        a = torch.empty(KIB)
        b = a.view(2, -1)[0]
        assert meter.total == 1024
        del a
        assert meter.total == 1024  # b keeps the storage
        del b
        assert meter.total == 0
    assert meter.peaks.highest.total == 1024


def test_the_peak_is_between_operators_not_after_them():
    with LiveBytes() as meter:
        kept = (torch.ones(KIB) + 1).sum()
    assert meter.peaks.highest.total == 2 * 1024  # ones and ones + 1, before the sum
    assert meter.total == kept.untyped_storage().nbytes()


def test_a_storage_that_is_emptied_and_refilled_counts_what_it_holds():
    with LiveBytes() as meter:
        flat = torch.empty(KIB)
        view = flat[:4]
        flat.untyped_storage().resize_(0)
        assert meter.total == 0
        flat.untyped_storage().resize_(2048)
        assert meter.total == 2048
        del flat
        assert meter.total == 2048 and view.numel() == 4
    assert torch.empty(3).untyped_storage().resize_.__qualname__ != "LiveBytes.__enter__.<locals>.resized"


def test_what_autograd_saves_counts_until_backward():
    x = torch.ones(KIB, requires_grad=True)
    with LiveBytes() as meter:
        meter.enter("forward")
        y = x.exp().exp().sum()
        saved = meter.total
        meter.enter("backward")
        y.backward()
        del y
    assert saved >= 1024 + 2 * 1024  # x, and both results
    assert meter.total == 1024 + 1024  # x and its gradient
    assert meter.peaks.readings["forward"].by_category["activations"] == saved
    assert meter.peaks.readings["backward"].by_category["temporary"] > 0


def test_recomputation_in_backward_makes_activations_and_autograd_makes_temporaries():
    layer = nn.Linear(16, 16)
    x = torch.ones(4, 16, requires_grad=True)
    with LiveBytes() as meter:
        meter.enter("forward")
        y = torch.utils.checkpoint.checkpoint(lambda v: F.gelu(layer(v)), x, use_reentrant=False)
        before = meter.by_category["activations"]
        meter.enter("backward")
        y.sum().backward()
    assert meter.peaks.readings["backward"].by_category["activations"] > before


def test_assigned_storages_keep_their_category_and_others_on_another_device_are_left_out():
    with LiveBytes() as meter:
        weights, elsewhere = torch.empty(KIB), torch.empty(KIB)
        meter.assign("params", [weights, weights[:3]])
        assert meter.by_category["params"] == 1024
        del weights
        assert meter.by_category["params"] == 0
    assert elsewhere.numel()
    other = LiveBytes()
    other.ignore([elsewhere])
    with other:
        elsewhere.add_(1)
        assert other.total == 0
        del elsewhere
        again = [torch.empty(KIB) for _ in range(20)]  # one of them may get the address of the ignored storage
        assert other.total == 20 * 1024 == sum(t.nbytes for t in again)


def test_the_timeline_names_phases_and_units_in_order():
    with LiveBytes() as meter:
        for phase, unit in (("forward", "a"), ("forward", "b"), ("backward", "b"), ("step", "")):
            meter.enter(phase)
            meter.scope.unit = unit
            torch.empty(KIB)
            torch.empty(2 * KIB)
    found = [(phase, unit) for phase, unit, _ in meter.peaks.timeline if unit or phase == "step"]
    assert found == [("forward", "a"), ("forward", "b"), ("backward", "b"), ("step", "")]
    assert max(nbytes for *_, nbytes in meter.peaks.timeline) == 2048
