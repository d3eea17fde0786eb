"""Random small models, trained by the engine in two drawn ways, equal plain torch and each other.

SHARDLEDGER_PROPERTY_MODELS  how many models (25; the nightly run takes 500)
SHARDLEDGER_PROPERTY_SEED    which ones (0)
SHARDLEDGER_PROPERTY_REPLAY  the JSON of one model, as a failure prints it: only that one is run
SHARDLEDGER_PROPERTY_SHRINK  1: a failing model is made simpler while it still fails
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from support.drawn import OPTIMIZERS, Drawn, Part, Result, Run, from_json, plain, simpler, train_drawn
from support.oracle import largest_difference, same_bits
from support.ranks import RankError, run_ranks
from support.training import group, place

MODELS = int(os.environ.get("SHARDLEDGER_PROPERTY_MODELS", "25"))
SEED = int(os.environ.get("SHARDLEDGER_PROPERTY_SEED", "0"))
SIZES = (0, 1, 3, 5, 7)
KINDS = ("linear", "bottleneck", "norm", "scale", "lora", "twice", "shared", "tied", "idle", "empty")
SHAPES = ((), (1,), (3,), (5,), (7,), (0,), (0, 5), (1, 7), (1, 1, 3), (3, 0, 1))
RECOMPUTE = (
    "none",
    "none",
    "units",
    "block",
    "segment",
    "inside",
    "block reentrant",
    "segment reentrant",
    "inside reentrant",
)
#: Models trained in one process group; on failure each is tried alone.
BATCH = 10
#: Failures after which the search ends.
ENOUGH = 8
#: Largest difference of a weight from plain torch after the steps, fp32.
TOLERANCE = {"SGD": 1e-6, "momentum": 1e-6, "AdamW": 1e-5, "RMSprop": 1e-5}


@st.composite
def runs(draw, reentrant: bool, threshold: int):
    """How the engine is asked to train the model."""
    allowed = RECOMPUTE if reentrant else [kind for kind in RECOMPUTE if not kind.endswith("reentrant")]
    return Run(
        stage=draw(st.integers(0, 3)),
        bucket=draw(st.sampled_from((None, 1, 7, 64, int(5e8)))),
        overlap=draw(st.booleans()),
        prefetch=draw(st.booleans()),
        threshold=threshold,
        habit=draw(st.sampled_from(("engine", "engine", "loss", "no_sync", "evaluate", "idle"))),
        recompute=draw(st.sampled_from(allowed)),
    )


@st.composite
def models(draw):
    """A model, its data and two ways to train it."""
    part = st.builds(
        Part, st.sampled_from(KINDS), st.sampled_from(SIZES), st.sampled_from((False, False, True)), st.booleans()
    )
    blocks = draw(st.lists(st.lists(part, min_size=1, max_size=3).map(tuple), max_size=4).map(tuple))
    order = st.lists(st.integers(0, len(blocks) - 1), max_size=5).map(tuple) if blocks else st.just(())
    straight = st.just((tuple(range(len(blocks))),))
    frozen_end = draw(st.sampled_from(("", "", "enter", "head", "shared")))
    tokens, tied = draw(st.booleans()), draw(st.booleans())
    precision = draw(st.sampled_from(("fp32", "fp32", "bf16")))
    # Reentrant checkpointing gives no gradients when its input needs none; and it adds up gradients that autograd
    # would have added first, which rounds otherwise in bf16.
    enter_trains = frozen_end != "enter" and not (tokens and tied and frozen_end == "head")
    reentrant = enter_trains and precision == "fp32"
    threshold = st.sampled_from((0, 4, 10**6))
    # Most pairs of runs share it, and then every bit.
    thresholds = draw(st.one_of(*[threshold.map(lambda one: (one, one))] * 3, st.tuples(threshold, threshold)))
    return Drawn(
        seed=draw(st.integers(0, 2**16)),
        width=draw(st.sampled_from((1, 3, 5, 7))),
        tokens=tokens,
        tied=tied,
        blocks=blocks,
        container=draw(st.sampled_from(("list", "sequential", "attributes"))),
        orders=draw(st.one_of(straight, st.lists(order, min_size=1, max_size=3).map(tuple))),
        extras=draw(st.lists(st.sampled_from(SHAPES), max_size=4).map(tuple)),
        extra_use=draw(st.sampled_from(("all", "none", "step", "rank"))),
        frozen_end=frozen_end,
        born=draw(st.sampled_from(("float32", "float32", "bfloat16", "float16"))),
        units=draw(st.sampled_from((None, None, ("DrawnBlock",), ("PartModule",), ("Linear",)))) if blocks else None,
        world=draw(st.integers(1, 4)),
        accumulation=draw(st.integers(1, 3)) if precision == "fp32" else 1,
        micro=draw(st.integers(1, 2)),
        precision=precision,
        optimizer=draw(st.sampled_from(tuple(OPTIMIZERS))),
        clip=draw(st.sampled_from((0.0, 0.0, 0.3, 100.0))),
        average=draw(st.booleans()),
        runs=tuple(draw(runs(reentrant, threshold)) for threshold in thresholds),
    )


def draw_models(count: int) -> list[Drawn]:
    """`count` models, the same ones for the same seed."""
    return [draw_one(SEED * 1_000_003 + number) for number in range(count)]


def draw_one(number: int) -> Drawn:
    """Each is drawn on its own: within one run hypothesis varies what it has drawn before, and models would be alike."""
    found: list[Drawn] = []

    @seed(number)
    @settings(
        max_examples=3,  # the first is the simplest there is
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(models())
    def collect(model: Drawn) -> None:
        found.append(model)

    collect()
    return found[-1]


def train_models(batch: list[str]) -> list[list[Result]]:
    """On a rank: both runs of every model."""
    rank, _ = place()
    with group(20):
        return [[train_drawn(drawn, run, rank) for run in drawn.runs] for drawn in map(from_json, batch)]


def rounding_of(run: Run) -> tuple[int, str]:
    """What bits may depend on; runs that agree in it must agree in every bit, whatever their stages.

    Parameters that the threshold keeps whole lie elsewhere in memory, and a CPU kernel may round otherwise when a matrix
    starts elsewhere in a cache line. Reentrant checkpoints add up the uses of a shared parameter in another order.
    """
    return run.threshold, run.recompute if run.recompute.endswith("reentrant") else ""


def differences(drawn: Drawn, by_rank: list[list[Result]]) -> str:
    """What is wrong with the runs of one model; empty when nothing is."""
    wrong = []
    firsts = by_rank[0]
    if drawn.accumulation == 1 and len({rounding_of(run) for run in drawn.runs}) < len(drawn.runs):
        names = same_bits(firsts[0].weights, firsts[1].weights)
        if names:
            gap = largest_difference(firsts[0].weights, firsts[1].weights)
            wrong.append(f"the runs differ from each other in the bits of {names}, by {gap:.3g}")
    if drawn.precision == "fp32":
        right = plain(drawn)
        for number, run in enumerate(drawn.runs):
            gap = largest_difference(firsts[number].weights, right.weights)
            if not gap <= TOLERANCE[drawn.optimizer] * (1 if drawn.average else drawn.world):
                wrong.append(f"run {number} (stage {run.stage}): weights differ from plain torch by {gap:.3g}")
            losses = [sum(step) for step in zip(*(results[number].losses for results in by_rank), strict=True)]
            if losses != pytest.approx(right.losses, rel=1e-4, abs=1e-6):
                wrong.append(f"run {number} (stage {run.stage}): losses {losses}, plain torch {right.losses}")
            if firsts[number].norms != pytest.approx(right.norms, rel=1e-4, abs=1e-6):
                wrong.append(f"run {number} (stage {run.stage}): norms {firsts[number].norms}, plain {right.norms}")
    return "; ".join(wrong)


def failures_of(batch: list[Drawn]) -> dict[str, str]:
    """Description -> what is wrong, for the models (of one world size) that fail."""
    lines = [drawn.to_json() for drawn in batch]
    try:
        by_rank = run_ranks(train_models, batch[0].world, lines, timeout=30 + 4 * len(batch))
    except RankError as error:
        if len(batch) == 1:
            return {lines[0]: _short(str(error))}
        alone = [failures_of([drawn]) for drawn in batch]
        found = {line: text for one in alone for line, text in one.items()}
        return found or {" and ".join(lines): f"fail together, each alone passes: {error}"}
    found = {}
    for index, drawn in enumerate(batch):
        wrong = differences(drawn, [results[index] for results in by_rank])
        if wrong:
            found[lines[index]] = wrong
    return found


def _short(text: str) -> str:
    """Of tracebacks what they end with: the frames nearest to each error, and the error."""
    return "\n".join("\n".join(one.splitlines()[-8:]) for one in text.split("Traceback (most recent call last):"))[
        -2500:
    ]


def shrink(drawn: Drawn, tries: int = 60) -> Drawn:
    """A simpler model that fails as well."""
    candidates = simpler(drawn)
    while candidates and tries:
        tries -= 1
        candidate = candidates.pop(0)
        if failures_of([candidate]):
            drawn, candidates = candidate, simpler(candidate)
    return drawn


def report(found: dict[str, str]) -> str:
    """The failures, each with the line that replays it."""
    texts = [f"{len(found)} model(s) fail."]
    for line, wrong in list(found.items())[:ENOUGH]:
        if os.environ.get("SHARDLEDGER_PROPERTY_SHRINK") and line.count('"runs"') == 1:
            line = shrink(from_json(line)).to_json()
        texts.append(f"{wrong}\nreplay: SHARDLEDGER_PROPERTY_REPLAY='{line}'")
    return "\n\n".join(texts)


@pytest.mark.timeout(120 + 12 * MODELS)
def test_random_models_equal_plain_torch_and_each_other():
    replay = os.environ.get("SHARDLEDGER_PROPERTY_REPLAY")
    drawn = [from_json(replay)] if replay else draw_models(MODELS)
    found: dict[str, str] = {}
    for world in range(1, 5):
        those = [model for model in drawn if model.world == world]
        for start in range(0, len(those), BATCH):
            if len(found) >= ENOUGH:
                break
            found.update(failures_of(those[start : start + BATCH]))
    assert not found, report(found)


def test_the_same_seed_draws_the_same_models_and_their_description_replays_them():
    first = draw_models(10)
    assert first == draw_models(10)
    assert [from_json(drawn.to_json()) for drawn in first] == first
    assert len(set(first)) == len(first)
