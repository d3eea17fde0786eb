"""Where ranks hold parts of the masters, the optimizer is called bucket after bucket, and nobody can tell."""

import torch

from support.models import build, data
from support.oracle import same_bits
from support.ranks import run_ranks
from support.training import config, group, train

CLIPPED = {"lr": 0.01, "weight_decay": 0.1}


class Subclass(torch.optim.AdamW):
    """Might look at several tensors together: nobody knows."""


def calls_and_weights():
    """Of each way to ask for AdamW: how often it was called in 3 steps, how often a user's hook, and the weights."""
    import shardledger.runtime.bucket_step as bucket_step

    found, numel_before = {}, bucket_step.BUCKET_NUMEL
    with group():
        for way, stage, numel in (
            ("whole", 1, 1 << 40),
            ("buckets", 1, 1),
            ("buckets", 2, 1),
            ("hooks", 1, 1),
            ("subclass", 2, 1),
            ("stage 3", 3, 1),
        ):
            bucket_step.BUCKET_NUMEL = numel
            fired = []
            cls = Subclass if way == "subclass" else torch.optim.AdamW
            calls = count_calls(cls)

            def make(groups, cls=cls, way=way, fired=fired):
                made = cls(groups, **CLIPPED)
                if way == "hooks":
                    made.register_step_post_hook(lambda *_: fired.append(1))
                return made

            settings = config(stage, gradient_clipping=0.1)
            outcome = train(build("transformer"), settings, data("transformer", 12), 3, optimizer=make)
            cls._init_group = calls.inner
            found[way, stage] = (calls.number, len(fired), outcome.losses, outcome.weights)
    bucket_step.BUCKET_NUMEL = numel_before
    return found


class count_calls:
    """Counts how often a class collects the tensors that it updates."""

    def __init__(self, cls):
        self.number, self.inner = 0, cls._init_group

        def counted(optimizer, *arguments):
            self.number += 1
            return self.inner(optimizer, *arguments)

        cls._init_group = counted


def test_the_optimizer_is_called_for_each_bucket_to_the_same_bits_and_once_where_that_could_be_noticed():
    for found in run_ranks(calls_and_weights, 2, timeout=120):
        _, _, losses, weights = found["whole", 1]
        for key, (_, _, other_losses, other_weights) in found.items():
            assert other_losses == losses and not same_bits(other_weights, weights), key
        calls = {key: calls for key, (calls, _, _, _) in found.items()}
        once = calls["whole", 1]  # a step each, and what initialize tries out
        assert calls["buckets", 1] > once and calls["buckets", 2] > once
        assert calls["hooks", 1] == calls["subclass", 2] == calls["stage 3", 3] == once
        assert found["hooks", 1][1] == 3
