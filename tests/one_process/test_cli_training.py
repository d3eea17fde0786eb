"""One rank's run from start to end, on a stand-in engine: the records, the folder, the sample, the table."""

import contextlib
import io
import json
import math

import pytest
import stand_in_engine
import torch
from safetensors.torch import load_file

import shardledger
from shardledger.cli.loop import TrainingLoop
from shardledger.cli.settings import Options, demo_settings
from shardledger.cli.training import gather_ledgers, printable, train
from shardledger.telemetry import CATEGORIES, Record, RunFolder, SinkGroup
from shardledger.workload import GPT, BatchSampler, BatchShape, GPTConfig, TextData, load_final, read_corpus


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    # Two threads of one process wait for each other in a busy loop: on a machine with other work, for whole seconds.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def use_stand_in(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(shardledger, "initialize", stand_in_engine.initialize)


@pytest.fixture
def stand_in(monkeypatch):
    use_stand_in(monkeypatch)


def settings(steps=4):
    options = Options(data=None, steps=steps, seed=3, device="cpu", out=None, nproc=1)
    return demo_settings(options, stage=2, precision="fp32")


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("training") / "run"
    output = io.StringIO()
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.redirect_stdout(output):
        use_stand_in(monkeypatch)
        train(settings(), RunFolder(folder), "cpu")
    return folder, output.getvalue()


def test_a_run_leaves_everything_it_promises(finished_run):
    folder, output = finished_run
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert names == {
        "config.resolved.json", "metrics.jsonl", "ledger.json", "final/model.safetensors", "final/config.json",
    }  # fmt: skip
    assert f"run folder: {folder}" in output
    assert "sample (" in output
    assert "params" in output and "predicted" in output


def test_every_field_of_a_step_is_measured(finished_run):
    folder, output = finished_run
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["event"] == "step"]
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    for record in steps:
        assert 2 < record["loss"] < 7
        assert record["grad_norm"] > 0 and record["lr"] > 0
        assert record["tokens_per_s"] == pytest.approx(16 * 64 / record["step_s"])
        assert record["samples_per_s"] == pytest.approx(16 / record["step_s"])
        assert 0 < record["data_s"] < record["step_s"]
        assert 0 < record["utilization"] <= 1
        assert len(record["memory_peak_bytes"]) == 1 and record["memory_peak_bytes"][0] > 2**26
        assert record["offload"] == {"optimizer": "none", "param": "none"}
        assert (record["stage"], record["skipped"], record["loss_scale"]) == (2, False, 1.0)
    assert sum(line.startswith("step=") for line in output.splitlines()) == 4
    assert [record["step"] for record in records if record["event"] == "eval"] == [0, 1, 2, 3, 4]


def test_the_final_weights_are_the_trained_ones_and_load_in_plain_pytorch(finished_run):
    folder, _ = finished_run
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    plain = GPT(GPTConfig(**json.loads((folder / "final/config.json").read_text())["gpt"]))
    plain.load_state_dict(load_file(folder / "final/model.safetensors"))
    text = TextData(read_corpus(), 64)
    with torch.no_grad():
        for model in (plain, load_final(folder)):
            losses = [model(*batch).item() for batch in text.validation_batches(128, 8, 0, 1)]
            assert sum(losses) / len(losses) == pytest.approx(last["loss"], abs=1e-5)


def test_the_resolved_config_is_a_config(finished_run):
    folder, _ = finished_run
    config = shardledger.load_config(folder / "config.resolved.json")
    assert config.train_batch_size == 16 and config.zero_optimization.stage == 2


def test_the_ledger_keeps_large_numbers_exact_and_unknown_ones_null(finished_run):
    folder, _ = finished_run
    ledger = json.loads((folder / "ledger.json").read_text())
    assert ledger["ranks"][0]["predicted"]["total"] == 2**33 + 1
    assert ledger["ranks"][0]["predicted"]["activations"] is None
    assert list(ledger["ranks"][0]["measured"]) == list(CATEGORIES)


def test_the_seed_decides_weights_and_data(stand_in, tmp_path):
    losses = []
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        torch.manual_seed(hash(name) % 1000)
        options = Options(data=None, steps=2, seed=seed, device="cpu", out=None, nproc=1)
        train(demo_settings(options, stage=2, precision="fp32"), RunFolder(tmp_path / name), "cpu")
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses.append([line["loss"] for line in lines])
    assert losses[0] == losses[1]
    assert all(first != other for first, other in zip(losses[0], losses[2], strict=True))


class Recorder:
    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, record: Record) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass


def small_loop(model, accumulation=1):
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulation}
    engine = stand_in_engine.StandInEngine(model, config)
    text = TextData(read_corpus(), 8)
    recorder = Recorder()
    sampler = BatchSampler(text, BatchShape(micro=2, accumulation=accumulation))
    return TrainingLoop(engine, text, sampler, SinkGroup([recorder])), recorder, engine


def tiny() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(layers=1, heads=1, width=8, context=8))


def test_an_accumulated_step_reports_the_mean_loss_of_its_micro_batches(stand_in):
    loop, _, engine = small_loop(tiny(), accumulation=3)
    expected = [tiny()(*batch).item() for batch in loop.sampler.batch_of(0)]
    record = loop.train_step(1)
    assert len(expected) == 3
    assert record.loss == pytest.approx(sum(expected) / 3)
    assert (engine.micro_steps, engine.global_steps) == (3, 1)
    assert record.samples_per_s * record.step_s == pytest.approx(6)


@pytest.mark.parametrize(("every", "steps"), [(0, [0, 5]), (2, [0, 2, 4, 5]), (5, [0, 5])])
def test_evaluations_come_when_asked_and_at_both_ends(stand_in, every, steps):
    loop, recorder, _ = small_loop(tiny())
    first, last = loop.run(5, every)
    evaluations = [record for record in recorder.records if record.event == "eval"]
    assert [record.step for record in evaluations] == steps
    assert (evaluations[0].loss, evaluations[-1].loss) == (first, last)


def test_evaluation_makes_no_gradients_and_returns_to_training(stand_in):
    model = tiny()
    loop, _, _ = small_loop(model)
    assert loop.evaluate(0) == loop.evaluate(0)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training


def test_waiting_lowers_the_utilization(stand_in):
    loop, _, engine = small_loop(tiny())
    step = engine.step

    def waiting_step() -> None:
        step()
        engine.comm_wait_s += 100.0

    engine.step = waiting_step
    record = loop.train_step(1)
    assert record.comm_wait_s == 100.0
    assert record.utilization == 0.0


def test_a_skipped_step_says_so(stand_in):
    loop, _, engine = small_loop(tiny())
    assert not loop.train_step(1).skipped
    step = engine.step

    def skipping_step() -> None:
        step()
        engine.skipped_steps += 1

    engine.step = skipping_step
    assert loop.train_step(2).skipped


def test_ledgers_are_gathered_as_numbers(stand_in):
    _, _, engine = small_loop(tiny())
    (ledger,) = gather_ledgers(engine)
    assert ledger == engine.ledger()
    assert math.isfinite(ledger["measured"]["total"])


def test_a_sample_cannot_steer_the_terminal():
    assert printable(b"ok\n\x1b[2J\x07\xff") == "ok\n\ufffd[2J\ufffd\ufffd"
