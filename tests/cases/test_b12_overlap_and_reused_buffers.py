"""B12: with overlapped communication a buffer is written again before its reduction has finished."""

import random
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support.models import numbers
from support.oracle import micro_batches, same_bits
from support.ranks import run_ranks
from support.training import config, group, place

STAGES = (0, 1, 2, 3)
WIDTH = 12
STEPS = 20


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Four(nn.Module):
    """Four blocks of 156 elements; x[n, 12], y[n, 12]."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, y)


def make():
    torch.manual_seed(0)
    return Four()


class Late:
    """A collective's handle: waiting takes longer, and the buffers it was given must not have changed by then."""

    def __init__(self, work, source, watch):
        self.work, self.source, self.watch = work, source, watch
        self.before = source.clone()

    def wait(self):
        time.sleep(self.watch.random.uniform(0, 0.003))
        rank, world = place()
        now, before = (tensor.view(world, -1) for tensor in (self.source, self.before))
        # This rank's own interval is the reduction's scratch, and what has come is summed before anybody waits.
        watched = [row for row in range(world) if row != rank]
        if not torch.equal(now[watched], before[watched]):
            self.watch.overwritten += 1
        self.watch.open -= 1
        return self.work.wait()

    def __getattr__(self, name):
        return getattr(self.work, name)


class Watch:
    def __init__(self, seed):
        self.random = random.Random(seed)
        self.overwritten = self.open = self.most_open = self.beside = 0

    def follow(self, model):
        """Count the gradients that autograd finds while a reduction is under way."""
        for parameter in model.parameters():
            parameter.register_hook(self.note)

    def note(self, gradient):
        self.beside += self.open > 0

    def attach(self, transport):
        """Every reduction is launched a little late and waited for a little late."""
        launch = transport.reduce_scatter

        def reduce_scatter(source, *args, **kwargs):
            time.sleep(self.random.uniform(0, 0.002))
            self.open += 1
            self.most_open = max(self.most_open, self.open)
            work = launch(source, *args, **kwargs)
            return Late(work, source, self)

        transport.reduce_scatter = reduce_scatter


def train_four(bucket, overlap, watched, accumulation):
    import shardledger as sl

    found = {}
    rank, world = place()
    with group(30):
        for stage in STAGES:
            zero = {"reduce_bucket_size": bucket, "overlap_comm": overlap}
            settings = config(stage, accumulation=accumulation, zero=zero)
            model, watch = make(), Watch(seed=rank)
            watch.follow(model)
            engine = sl.initialize(model=model, config=settings)[0]
            if watched:
                watch.attach(engine._parts.transport)
            norms = []
            parts = micro_batches(numbers(world * accumulation, WIDTH, WIDTH), rank, world, accumulation)
            for _ in range(STEPS):
                for part in parts:
                    engine.backward(engine(*part))
                    engine.step()
                norms.append(engine.get_global_grad_norm())
            found[stage] = (engine.state_dict(), norms, watch.overwritten, (watch.most_open, watch.beside))
            engine.destroy()
    return found


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("bucket", [16, 100])
def test_overlap_and_delays_change_no_bit_and_no_open_buffer_is_written(bucket, accumulation):
    plain = run_ranks(train_four, 2, bucket, False, False, accumulation)
    for overlap in (True, False):
        for rank, found in enumerate(run_ranks(train_four, 2, bucket, overlap, True, accumulation)):
            for stage, (weights, norms, overwritten, (most_open, beside)) in found.items():
                where = f"stage {stage}, overlap {overlap}"
                assert same_bits(weights, plain[rank][stage][0]) == [], where
                assert norms == plain[rank][stage][1], where
                assert overwritten == 0, where
                if not overlap:
                    assert (most_open, beside) == (1, 0), where


def test_reductions_overlap_with_the_backward_pass_when_asked():
    for found in run_ranks(train_four, 2, 16, True, True, 1):
        for stage, (*_, (most_open, beside)) in found.items():
            # Of gradients that do not stay in place one unit's are reduced at a time: the next one takes their room.
            assert most_open == (2 if stage < 2 else 1), (stage, most_open)
            assert beside >= STEPS, (stage, beside)
