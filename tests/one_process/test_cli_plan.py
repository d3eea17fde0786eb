"""``shardledger plan`` with a parameter count: at once, without torch, in numbers that can be checked by hand."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from shardledger.cli.main import app
from shardledger.config import load_config
from shardledger.ledger.account import OPTIMIZER_BYTES
from shardledger.ledger.recommend import Recommendation

ROW_KEYS = {
    "stage", "offload", "checkpointing", "params", "grads", "master", "optimizer", "activations", "communication",
    "temporary", "framework", "total", "peak_phase", "fits", "sent_bytes_per_step",
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)


def plan(*arguments: str):
    return CliRunner().invoke(app, ["plan", *arguments])


def plan_json(*arguments: str):
    result = plan(*arguments, "--json")
    return result, json.loads(result.stdout)


def test_the_account_of_states_imports_no_torch_and_takes_under_a_second():
    code = (
        "import sys; from shardledger.cli.main import run\n"
        "try: run(['plan', '--params', '7.5e9', '--world', '64', '--device-memory', '80GiB'])\n"
        "except SystemExit as e: print('torch' in sys.modules, e.code)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=False)
    assert ended.stdout.splitlines()[-1] == "False 0", ended.stderr
    assert "stage  offload" in ended.stdout


def test_the_articles_example_in_gigabytes():
    result, content = plan_json("--params", "7.5e9", "--world", "64")
    assert result.exit_code == 0
    totals = [row["total"] for row in content["stages"] if row["offload"] == "none"]
    assert [round(total / 1e9, 1) for total in totals] == [120.0, 31.4, 16.6, 1.9]
    assert content["recommended"] is None
    assert all(set(row) >= ROW_KEYS | {"engine_total"} for row in content["stages"])
    assert [row["fits"] for row in content["stages"]] == [None] * 14


def test_the_table_shows_gb_and_gib():
    text = plan("--params", "7B", "--world", "1").stdout
    assert "total GB" in text and "total GiB" in text
    line = next(line for line in text.splitlines() if line.startswith("0      none"))
    assert "112.0" in line and "104.3" in line


def test_every_optimizer_of_the_account_keeps_in_torch_what_the_account_says():
    import torch

    from shardledger.runtime.census import probe_optimizer

    options = {"sgd-momentum": {"momentum": 0.9}}
    names = {cls.lower(): cls for cls in dir(torch.optim) if cls[0].isupper()}
    for name, per_element in OPTIMIZER_BYTES.items():
        cls = getattr(torch.optim, names[name.partition("-")[0]])
        optimizer = cls([torch.zeros(8, 8, requires_grad=True)], lr=0.1, **options.get(name, {}))
        assert probe_optimizer(optimizer).per_element == per_element, name


def test_device_memory_brings_a_recommendation_with_reasons():
    result, content = plan_json("--params", "7B", "--world", "8", "--device-memory", "80GiB")
    assert result.exit_code == 0
    assert set(content) == {"stages", "recommended"}
    assert set(content["recommended"]) == {"stage", "offload", "checkpointing", "micro_batch", "reason"}
    assert content["recommended"]["stage"] == 1
    assert "GiB" in content["recommended"]["reason"]
    assert {row["fits"] for row in content["stages"]} == {True, False}


def test_nothing_fits_is_exit_code_3_and_says_what_is_missing():
    result, content = plan_json("--params", "700B", "--world", "2", "--device-memory", "8GiB")
    assert result.exit_code == 3
    assert "GiB of device memory per rank are missing" in result.stderr
    assert content["recommended"]["stage"] is None
    assert "Nothing fits" in content["recommended"]["reason"]
    assert "Nothing fits" in plan("--params", "700B", "--world", "2", "--device-memory", "8GiB").stdout


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZER_BYTES))
def test_the_written_config_loads_and_says_what_was_recommended(tmp_path, precision, optimizer):
    file = tmp_path / "ds.json"
    result = plan(
        *("--params", "7B", "--world", "8", "--device-memory", "79GiB", "--precision", precision),
        *("--optimizer", optimizer, "--micro-batch", "2", "--write", str(file)),
    )
    assert result.exit_code == 0, result.output
    assert f"wrote {file}" in result.stdout
    config = load_config(file, world=8)
    assert config.precision == precision
    assert config.train_micro_batch_size_per_gpu == 2
    assert f"recommended: stage {config.zero_optimization.stage}, micro-batch 2" in result.stdout


def test_a_recommended_offload_is_written_for_us_and_for_deepspeed(tmp_path):
    file = tmp_path / "ds.json"
    plan("--params", "70B", "--world", "8", "--device-memory", "24GiB", "--write", str(file))
    zero = json.loads(file.read_text())["zero_optimization"]
    assert zero["stage"] == 3 and zero["offload_optimizer"]["device"] == "cpu"
    assert load_config(file, world=8).zero_optimization.offload_optimizer.device == "cpu"


WRONG = [
    ((), "plan needs a model"),
    (("--params", "-7B"), "more than zero"),
    (("--params", "7.5"), "did you mean 7.5B?"),
    (("--params", "7B", "--model", "gpt:1m"), "exclude each other"),
    (("--params", "7B", "--device-memory", "80G"), "80GiB (85,899,345,920 bytes)"),
    (("--params", "7B", "--optimizer", "adamwe"), "did you mean adamw?"),
    (("--params", "7B", "--precision", "int4"), "one of bf16, fp16, fp32"),
    (("--params", "7B", "--frozen", "99"), "0.99 freezes 99 %"),
    (("--params", "7B", "--frozen", "nan"), "share between 0 and 1"),
    (("--params", "7B", "--bandwidth", "400Gb/s"), "50GB/s"),
    (("--params", "7B", "--write", "x.json"), "--write needs --device-memory"),
    (("--params", "7B", "--device-memory", "8GiB", "--write", "no/such/folder/x.json"), "there is no folder"),
    (("--params", "7B", "--config", "x.json"), "--config needs --model"),
    (("--params", "7B", "--world", "0"), "--world"),
    (("--params", "7B", "--device-memory", "8GiB", "--bandwidth", "5"), "did you mean 5GB/s?"),
    (("--params", "7B", "--bandwidth", "50GB/s", "--flops", "400"), "did you mean 400TFLOP/s?"),
    (("--params", "7B", "--flops", "4e14"), "--flops needs --bandwidth"),
    (("--model", "gpt:1m", "--device-memory", "8GiB", "--no-master"), "--no-master goes with --params"),
    (("--model", "gpt:1m", "--device-memory", "8GiB", "--memory-budget", "9GiB"), "could not stay under both"),
    (("--params", "7B", "--framework", "-1GiB"), "--framework"),
]


@pytest.mark.parametrize(("arguments", "lesson"), WRONG)
def test_a_wrong_option_is_exit_code_2_and_a_lesson(arguments, lesson):
    result = plan(*arguments)
    assert result.exit_code == 2, result.output
    assert lesson in result.output


def test_several_mistakes_are_told_at_once():
    output = plan("--params", "7B", "--optimizer", "adamwe", "--precision", "int4", "--frozen", "2").output
    assert all(word in output for word in ("adamw?", "bf16", "share between"))


def test_the_headline_of_an_answer_without_a_row_says_nothing_fits():
    from shardledger.cli.plan_output import sentences

    assert sentences(Recommendation(row=None, reasons=("x",))).startswith("recommended: nothing fits")


def test_this_machine_is_measured_in_numbers_that_can_be_given_back():
    result = plan("--measure")
    assert result.exit_code == 0, result.output
    options = result.stdout.split("as options of plan: ")[1].split()
    assert options[0] == "--bandwidth" and options[2] == "--flops"
    # Between a slow and a fast CPU: 1 GFLOP/s to 100 TFLOP/s, 1 MB/s to 1 TB/s over loopback.
    assert 1e9 < float(options[3]) < 1e14
    assert 1e6 < float(options[1]) < 1e12
    assert plan("--params", "7B", "--world", "4", "--device-memory", "58GiB", *options).exit_code == 0


def test_a_link_that_cannot_be_measured_names_the_way_out(monkeypatch):
    from shardledger.cli import measure

    monkeypatch.setattr(measure.sys, "executable", "/bin/false")
    monkeypatch.setattr(measure, "matmul_flops", lambda kind: 1e12)
    result = plan("--measure")
    assert result.exit_code == 1
    assert "give --bandwidth instead" in result.output


def test_what_the_process_has_before_the_model_counts_against_the_device():
    fit = [
        plan_json("--params", "1B", "--world", "1", "--device-memory", "17GiB", *more)[1]["stages"][0]["fits"]
        for more in ((), ("--framework", "0.5GiB"))
    ]
    assert fit == [True, False]  # 16.8 GiB of states
