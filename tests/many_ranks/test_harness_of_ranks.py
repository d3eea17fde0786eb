"""The pool of ranks itself: the other tests here are only worth what it reports."""

import os
import time

import pytest
import torch

from support.models import build, data
from support.oracle import largest_difference, micro_batches, rank_gradients, tree_sum
from support.ranks import RankError, run_ranks, run_ranks_raw
from support.training import group, place


def add_one(tensor):
    import torch.distributed as dist

    with group():
        total = tensor + place()[0]
        dist.all_reduce(total)
        return total


def leave_group_open():
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return dist.get_rank(), os.getpid()


def fail_on_rank_1():
    with group():
        if place()[0] == 1:
            raise KeyError("needle")
        time.sleep(60)


def die():
    if place()[0] == 1:
        os._exit(3)
    time.sleep(60)


def average_gradients():
    import torch.distributed as dist

    rank, world = place()
    model = build("transformer")
    with group():
        model(*micro_batches(data("transformer", 12), rank, world, 1)[0]).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
    return {name: p.grad for name, p in model.named_parameters()}


def test_results_come_back_in_rank_order_and_processes_are_used_again():
    assert [t.tolist() for t in run_ranks(add_one, 2, torch.tensor([1.0]))] == [[3.0], [3.0]]
    first = run_ranks(leave_group_open, 2)
    second = run_ranks(leave_group_open, 2)
    assert [rank for rank, _ in first] == [0, 1]
    assert first == second
    assert run_ranks(leave_group_open, 1)[0] == first[0]


def test_an_exception_in_a_rank_reaches_the_test_with_its_traceback():
    with pytest.raises(RankError, match=r"(?s)rank 1.*fail_on_rank_1.*needle"):
        run_ranks(fail_on_rank_1, 2, timeout=30)


def test_a_dead_rank_is_reported_and_the_next_call_works():
    with pytest.raises(RankError, match="ended with code 3"):
        run_ranks(die, 2, timeout=30)
    assert len(run_ranks(leave_group_open, 2)) == 2


def test_raw_ranks_report_codes_output_and_time():
    script = "import os, time; r = int(os.environ['RANK']); print('here', r); time.sleep(r * 0.5); raise SystemExit(r)"
    ranks = run_ranks_raw(script, 3)
    assert [rank.code for rank in ranks] == [0, 1, 2]
    assert "here 2" in ranks[2].output
    assert ranks[0].ended_s < ranks[2].ended_s
    late = run_ranks_raw("import time; time.sleep(60)", 1, timeout=0.5)
    assert late[0].code is None


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_tree_sum_of_rank_gradients_is_what_the_ranks_sum_to(world):
    ours = rank_gradients(build("transformer"), data("transformer", 12), world)
    summed = {name: tree_sum([g[name] for g in ours]) for name in ours[0]}
    for theirs in run_ranks(average_gradients, world):
        assert largest_difference(summed, theirs) < 1e-5


def test_the_tree_splits_at_the_largest_power_of_two():
    terms = torch.randn(7, 1000, generator=torch.Generator().manual_seed(0))
    a, b, c, d, e, f, g = terms
    assert torch.equal(tree_sum(list(terms)), ((a + b) + (c + d)) + ((e + f) + g))
    assert torch.equal(tree_sum([a, b, c]), (a + b) + c)
