"""B06: the mean of per-micro-batch means is not the mean over tokens when lengths differ."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support.oracle import largest_difference
from support.ranks import run_ranks
from support.training import config, group, place

STAGES = (0, 1, 2, 3)
#: Mean gradient over the contribution's tokens, and how many tokens: (1 * 2 + 5 * 8) / 10 = 4.2.
CONTRIBUTIONS = ((1.0, 2), (5.0, 8))


class Product(nn.Module):
    """loss = w * x with w = 0: the gradient is x, the weight after a step of lr 1 is minus the gradient applied."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.w * x


def start(model, stage, **settings):
    import shardledger as sl

    return sl.initialize(model=model, config=config(stage, **settings))[0]


def weigh(pieces, with_tokens, settings):
    """`pieces[rank]` are this rank's micro-batches; the weight after two steps, by stage."""
    found = {}
    rank, _ = place()
    mine = pieces[rank]
    with group():
        for stage in STAGES:
            engine = start(Product(), stage, lr=1.0, accumulation=len(mine), **settings)
            for _ in range(2):
                for value, tokens in mine:
                    loss = engine(torch.tensor(value))
                    handed_back = engine.backward(loss, denominator=tokens) if with_tokens else engine.backward(loss)
                    assert handed_back is loss
                    engine.step()
            found[stage] = (-float(engine.state_dict(all_ranks=True)["w"]) / 2, engine.get_global_grad_norm())
            engine.destroy()
    return found


ON_ONE_RANK = [list(CONTRIBUTIONS)]
ON_TWO_RANKS = [[CONTRIBUTIONS[0]], [CONTRIBUTIONS[1]]]
WITH_AN_EMPTY_RANK = [*ON_TWO_RANKS, [(math.nan, 0)]]
TWO_BY_TWO = [[(1.0, 2), (math.nan, 0)], [(5.0, 6), (5.0, 2)]]


@pytest.mark.parametrize("pieces", [ON_ONE_RANK, ON_TWO_RANKS, WITH_AN_EMPTY_RANK, TWO_BY_TWO])
def test_with_a_denominator_every_token_weighs_the_same(pieces):
    for found in run_ranks(weigh, len(pieces), pieces, True, {}):
        for stage, (gradient, norm) in found.items():
            assert gradient == pytest.approx(4.2, rel=1e-6), f"stage {stage}"
            assert norm == pytest.approx(4.2, rel=1e-6), f"stage {stage}"


@pytest.mark.parametrize("pieces", [ON_ONE_RANK, ON_TWO_RANKS])
def test_without_one_every_micro_batch_weighs_the_same(pieces):
    for found in run_ranks(weigh, len(pieces), pieces, False, {}):
        for stage, (gradient, _) in found.items():
            assert gradient == pytest.approx(3.0, rel=1e-6), f"stage {stage}"


def test_sums_over_ranks_on_request():
    """The caller divides by the global number of tokens: 1 * 2 / 10 + 5 * 8 / 10."""
    shares = [[(value * tokens / 10, tokens)] for value, tokens in CONTRIBUTIONS]
    for found in run_ranks(weigh, 2, shares, False, {"gradient_allreduce_op": "sum"}):
        for stage, (gradient, norm) in found.items():
            assert gradient == pytest.approx(4.2, rel=1e-6), f"stage {stage}"
            assert norm == pytest.approx(4.2, rel=1e-6), f"stage {stage}"


# --- a model of tokens ----------------------------------------------------------------------------------------------

IGNORED = -100


class Tokens(nn.Module):
    """Blocks between an embedding and a head; the mean cross entropy over labels that are not ignored: NaN without any."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)))
        self.head = nn.Linear(6, 7)

    def forward(self, tokens, labels):
        logits = self.head(self.blocks(self.embedding(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)


def make():
    torch.manual_seed(0)
    return Tokens()


def text(rank, micro, step):
    """Tokens and labels [1, 6]; how many labels count differs, and rank 2 has none."""
    generator = torch.Generator().manual_seed(100 * rank + 10 * micro + step)
    tokens = torch.randint(7, (1, 6), generator=generator)
    labels = torch.randint(7, (1, 6), generator=generator)
    valid = 0 if rank == 2 else 1 + (rank + 2 * micro + step) % 5
    labels[:, valid:] = IGNORED
    return tokens, labels


def train_tokens(settings):
    found = {}
    rank, _ = place()
    with group():
        for stage in STAGES:
            engine = start(make(), stage, accumulation=2, **settings)
            for step in range(4):
                for micro in range(2):
                    tokens, labels = text(rank, micro, step)
                    loss = engine(tokens, labels)
                    engine.backward(loss, denominator=(labels != IGNORED).sum())
                    engine.step()
            found[stage] = engine.state_dict()
            engine.destroy()
    return found


@pytest.mark.parametrize("settings", [{}, {"gradient_clipping": 0.5}], ids=["", "clipped"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_language_model_with_uneven_labels_equals_one_process(world, settings):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        batch = [text(rank, micro, step) for rank in range(world) for micro in range(2)]
        model(*(torch.cat(parts) for parts in zip(*batch, strict=True))).backward()
        if settings:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    for stage, weights in run_ranks(train_tokens, world, settings)[0].items():
        assert largest_difference(weights, model.state_dict()) <= 1e-6, f"stage {stage}"


def mix_weights():
    import shardledger as sl

    found = {}
    with group():
        for stage in STAGES:
            engine = start(Product(), stage, lr=1.0, accumulation=2)
            engine.backward(engine(torch.tensor(1.0)), denominator=2)
            engine.step()
            try:
                engine.backward(engine(torch.tensor(1.0)))
            except sl.EngineStateError as error:
                found[stage] = str(error)
            engine.destroy()
    return found


def test_a_step_whose_micro_batches_disagree_on_having_a_denominator_is_refused():
    for found in run_ranks(mix_weights, 2):
        assert set(found) == set(STAGES)
        assert all("denominator" in text for text in found.values()), found
