"""The reference of ``shardledger check``, its judge, and one rank against it."""

import json
import math
import random
from dataclasses import replace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from shardledger.cli.check import seed_generators
from shardledger.cli.check_report import CAUSES, PLACES
from shardledger.cli.differences import FACTOR, Judge
from shardledger.cli.main import app
from shardledger.workload.one_process import Arithmetic, Makers, OneProcess, adopt, equal_tensors, named_tensors
from support.oracle import tree_sum

CPU = torch.device("cpu")
FP32 = Arithmetic(
    compute=torch.float32,
    accumulate=torch.float32,
    local_accumulate=torch.float32,
    wire=torch.float32,
    rounding=torch.float32,
    autocast=None,
    every_micro_batch=False,
    micro_batch_tree=False,
    average=True,
    clip_norm=0.0,
    norm_order=2.0,
    world=1,
    accumulation=1,
)
SGD = Makers(optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1))


class Regressor(nn.Module):
    """Returns the mean squared error; a batch norm, a counter, and a weight that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 1)
        self.unused = nn.Linear(2, 2)

    def forward(self, x, y):
        hidden = self.norm(self.first(x.to(self.first.weight.dtype)).float())
        return nn.functional.mse_loss(self.last(torch.tanh(hidden).to(self.last.weight.dtype)).float(), y)


def model() -> Regressor:
    torch.manual_seed(0)
    return Regressor()


def batches(world: int, accumulation: int, rows: int = 4):
    generator = torch.Generator().manual_seed(1)
    return [
        [
            (torch.randn(rows, 3, generator=generator), torch.randn(rows, 1, generator=generator))
            for _ in range(accumulation)
        ]
        for _ in range(world)
    ]


def nothing(rank: int, micro_batch: int) -> None:
    pass


@pytest.mark.parametrize("every", [False, True])
def test_a_step_is_the_plain_loop_over_all_micro_batches(every):
    arithmetic = replace(FP32, world=3, accumulation=2, clip_norm=0.5, every_micro_batch=every)
    run, plain, given = OneProcess(model(), arithmetic, SGD, CPU), model(), batches(3, 2)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        result = run.step(given, nothing)
        optimizer.zero_grad()
        losses = [[plain(*batch) for batch in row] for row in given]
        (sum(loss for row in losses for loss in row) / 6).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        assert result.grad_norm == pytest.approx(float(norm), rel=1e-6)
        assert result.losses == [[pytest.approx(loss.item(), rel=1e-6) for loss in row] for row in losses]
    for name, weight in plain.named_parameters():
        assert torch.allclose(run.state()[name], weight.detach(), atol=1e-6), name
    assert torch.equal(run.state()["unused.weight"], plain.unused.weight)


@pytest.mark.parametrize("world", range(1, 9))
def test_ranks_are_added_as_the_balanced_tree(world):
    given = batches(world, 1)
    apart = []
    for row in given:
        fresh = model()
        fresh(*row[0]).backward()
        apart.append(fresh.first.weight.grad)
    run = OneProcess(model(), replace(FP32, world=world, average=False), SGD, CPU)
    before = run.state()["first.weight"]
    run.step(given, nothing)
    assert torch.equal(run.state()["first.weight"], before.sub(tree_sum(apart), alpha=0.1))


def test_in_bf16_the_masters_are_fp32_and_batch_norms_and_buffers_keep_their_dtype():
    lowered = replace(FP32, compute=torch.bfloat16, wire=torch.bfloat16)
    run = OneProcess(model(), lowered, SGD, CPU)
    module = run.module
    assert module.first.weight.dtype is torch.bfloat16
    assert module.norm.weight.dtype is module.norm.running_mean.dtype is torch.float32
    start = run.state()
    run.step(batches(1, 1), nothing)
    moved = run.state()["first.weight"] - start["first.weight"]
    assert run.state()["first.weight"].dtype is torch.float32
    assert not torch.equal(run.state()["first.weight"], module.first.weight.float())  # not rounded to 16 bits
    assert torch.equal(run.state()["first.weight"].bfloat16(), module.first.weight) and moved.any()


def test_buffers_belong_to_a_rank():
    run = OneProcess(model(), replace(FP32, world=2), SGD, CPU)
    alone = OneProcess(model(), FP32, SGD, CPU)
    given = batches(2, 1)
    run.step(given, nothing)
    alone.step(given[:1], nothing)
    assert torch.equal(run.state()["norm.running_mean"], alone.state()["norm.running_mean"])
    assert run.state()["norm.num_batches_tracked"] == 1
    assert run.split_buffers() == ["norm.running_mean", "norm.running_var"]
    assert run.kinds()["norm.running_mean"] == "buffer" and run.kinds()["first.bias"] == "weight"


def test_a_gradient_that_is_not_finite_changes_nothing():
    run = OneProcess(model(), FP32, SGD, CPU)
    start = run.state()
    ((x, y),) = batches(1, 1)[0]
    result = run.step([[(x, y * math.inf)]], nothing)
    assert not math.isfinite(result.grad_norm)
    assert torch.equal(run.state()["first.weight"], start["first.weight"])


def test_jitter_is_one_rounding():
    plain = OneProcess(model(), FP32, SGD, CPU).state()
    shaken = OneProcess(model(), FP32, SGD, CPU, torch.Generator().manual_seed(0)).state()
    apart = (plain["first.weight"] - shaken["first.weight"]).abs() / plain["first.weight"].abs()
    assert 0 < float(apart.max()) <= torch.finfo(torch.float32).eps


def test_the_loss_of_two_micro_batches_tells_a_sum_from_a_mean():
    run = OneProcess(model(), FP32, SGD, CPU)
    assert run.loss_of_two(batches(2, 1)) == pytest.approx(1, abs=1e-6)
    assert run.loss_of_two(batches(1, 1)) is None
    assert all(module.training for module in run.module.modules())


def test_a_module_on_the_meta_device_takes_weights_and_keeps_its_ties():
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        module[1].weight = module[0].weight
    values = {"0.weight": torch.ones(3, 3), "1.weight": torch.ones(3, 3)}
    adopt(module, values)
    assert module[0].weight is module[1].weight and torch.equal(module[0].weight, values["0.weight"])
    assert [name for name, _ in named_tensors(module)] == ["0.weight", "1.weight"]
    assert equal_tensors(model(), model()) and not equal_tensors(Regressor(), Regressor())


def test_all_global_generators_are_seeded():
    def draw():
        return torch.rand(1).item(), random.random()

    draws = []
    for words in ((0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 0, 1)):
        seed_generators(*words)
        draws.append(draw())
    assert draws[0] == draws[2] and draws[0] != draws[1]


KINDS = {"weight": "weight", "still": "frozen weight"}
START = {"weight": torch.zeros(4), "still": torch.ones(2)}
HERE = {"weight": torch.full((4,), 1e-3), "still": torch.ones(2)}


def judge(**options) -> Judge:
    return Judge(START, KINDS, **{"sixteen_bit": False, "tolerance": None, **options})


def moved(name: str, by: list[float]) -> dict:
    return {**HERE, name: HERE[name] + torch.tensor(by)}


def test_a_tensor_may_be_as_far_away_as_rounding_takes_it_times_a_factor():
    noisy = moved("weight", [0, 0, 2e-6, 0])
    near, far = moved("weight", [FACTOR * 1.9e-6, 0, 0, 0]), moved("weight", [0, FACTOR * 3e-6, 0, 0])
    verdict = judge().tensors(1, near, HERE, noisy)
    assert verdict.first is None and verdict.largest == pytest.approx(1.9e-5, rel=1e-3)
    found = judge().tensors(1, far, HERE, noisy).first
    assert (found.kind, found.name, found.element, found.step) == ("weight", "weight", (1,), 1)
    assert found.size > found.allowed > 1.9e-5
    assert found.engine == pytest.approx(1e-3 + 3e-5, rel=1e-4) and found.reference == pytest.approx(1e-3)


def test_what_is_not_trained_must_be_equal_to_the_bit():
    found = judge(tolerance=0.1).tensors(2, moved("still", [0, 1.2e-7]), HERE, None).first
    assert (found.kind, found.name, found.allowed) == ("frozen weight", "still", 0.0)


def test_a_value_that_is_not_finite_on_one_side_is_a_difference():
    broken = moved("weight", [0, math.nan, 0, 0])
    assert judge().tensors(1, broken, HERE, HERE).first.element == (1,)
    assert judge().tensors(1, broken, broken, broken).first is None
    assert judge().norm(1, math.inf, 1.0, 1.0) is not None
    assert judge().norm(1, math.inf, math.nan, math.nan) is None


def test_the_first_loss_that_differs_is_named_by_rank_and_micro_batch():
    reference = [[2.0, 2.0], [2.0, 2.0]]
    close, far = [[2.0, 2.0], [2.0, 2.0000001]], [[2.0, 2.0], [2.001, 2.1]]
    assert judge().losses(1, close, reference, close) is None
    found = judge().losses(1, far, reference, close)
    assert (found.rank, found.micro_batch, found.kind) == (1, 0, "loss")
    assert judge(tolerance=1e-2).losses(1, [[2.0, 2.0], [2.001, 2.0]], reference, None) is None


def test_a_model_that_does_not_repeat_itself_does_not_widen_the_tolerance_without_end():
    wild = [[2.5]]
    assert judge().losses(1, [[2.01]], [[2.0]], wild) is not None


def test_every_kind_of_difference_has_its_words():
    kinds = {"loss", "gradient norm", "drift", *KINDS.values(), "buffer"}
    assert set(CAUSES) == set(PLACES) == kinds


MODELS = """
import torch
from torch import nn
from shardledger.workload import GPT, gpt_config

class Bytes(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(256, 256)

    def forward(self, tokens, targets):
        return nn.functional.cross_entropy(self.table(tokens).flatten(0, 1), targets.flatten(), reduction="sum")

def unseeded():
    torch.seed()
    return Bytes()

def meta():
    with torch.device("meta"):
        return GPT(gpt_config("1m", context=8))
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "models_to_check.py").write_text(MODELS)
    monkeypatch.syspath_prepend(tmp_path)
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2}}

    def run(model: str, *more: str, **options):
        given = json.dumps({**config, **options})
        arguments = ["check", model, "--config", given, "--nproc", "1", "--steps", "1", "--seq-len", "8", *more]
        return CliRunner().invoke(app, [*arguments, "--device", "cpu"], obj=arguments)

    return run


def test_one_rank_is_checked_in_this_process(run):
    result = run("gpt:1m")
    assert result.exit_code == 0, result.output
    assert (
        "equal: 1 step of 1 rank, stage 2, fp32, cpu agree with one process; every tensor bit for bit" in result.output
    )
    assert 'the config has no "optimizer" section' in result.output


def test_a_model_on_the_meta_device_is_checked(run):
    result = run("models_to_check:meta", optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}})
    assert result.exit_code == 0, result.output
    assert "every tensor bit for bit" in result.output


def test_a_sum_of_losses_and_an_unseeded_model_are_noted(run):
    result = run("models_to_check:unseeded")
    assert result.exit_code == 0, result.output
    assert "note: two micro-batches taken as one have 2 times the mean of their losses" in result.output
    assert "note: models_to_check:unseeded gives other weights each time" in result.output


def test_a_tolerance_of_nothing_asks_for_equal_bits(run):
    assert run("gpt:1m", "--tolerance", "0").exit_code == 1  # of the norm, a sum taken in another order
    assert run("gpt:1m", "--tolerance", "1e-6").exit_code == 0


@pytest.mark.parametrize(
    "wrong",
    [
        ("gpt:12m",),
        ("gpt:1m", "--tolerance", "-1"),
        ("gpt:1m", "--data", "no such file"),
        ("gpt:1m", "--seq-len", "100000000"),
        ("gpt:1m", "--config", "no such file.json"),
        ("gpt:1m", "--config", '{"train_micro_batch_size_per_gpu": 0}'),
    ],
)
def test_a_wrong_argument_is_a_usage_error(run, wrong):
    assert run(*wrong).exit_code == 2
