"""What a command line becomes: settings, ranks told from the environment, exit codes, and messages about failures."""

import json
import signal

import pytest
from typer.testing import CliRunner

from shardledger.cli.exits import RunFailure, UsageFailure, exit_code
from shardledger.cli.launch import Ending, describe_failures, rank_environment
from shardledger.cli.main import app
from shardledger.cli.ranks import LAUNCHED_BY, rank_of, world_of
from shardledger.cli.settings import Options, demo_settings, train_settings
from shardledger.errors import ConfigError, DataError, DoesNotFitError


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", LAUNCHED_BY):
        monkeypatch.delenv(name, raising=False)


def options(**changes) -> Options:
    values = {"data": None, "steps": 300, "seed": 0, "device": "auto", "out": None, "nproc": None}
    return Options(**{**values, **changes})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_demo_is_a_config_in_deepspeeds_keys(stage, precision):
    settings = demo_settings(options(), stage=stage, precision=precision)
    assert settings.world == 2
    assert settings.config["zero_optimization"]["stage"] == stage
    assert settings.config["bf16"]["enabled"] == (precision == "bf16")
    assert settings.config["train_batch_size"] == 32


@pytest.mark.parametrize("steps", [1, 2, 3, 10])
def test_a_short_demo_is_a_valid_config_too(steps):
    settings = demo_settings(options(steps=steps, nproc=1), stage=2, precision="fp32")
    assert settings.eval_every >= 1


def write(path, config) -> str:
    path.write_text(json.dumps(config))
    return str(path)


def test_a_config_without_optimizer_trains_with_adamw_and_says_so(tmp_path):
    config = write(tmp_path / "ds.json", {"train_batch_size": 8})
    settings = train_settings(options(), config=config, model="gpt:1m", seq_len=8, eval_every=0)
    assert settings.config["optimizer"]["type"] == "AdamW"
    assert settings.config["optimizer"]["params"]["lr"] == 3e-4
    assert any("AdamW with lr 3e-4" in note for note in settings.notes)


def test_a_config_with_optimizer_is_taken_as_it_is(tmp_path):
    config = write(tmp_path / "ds.json", {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 1.0}}})
    settings = train_settings(options(), config=config, model="gpt:1m", seq_len=8, eval_every=0)
    assert settings.config["optimizer"]["type"] == "SGD"
    assert settings.notes == ()


def test_the_batch_is_resolved_for_the_ranks_that_will_run(tmp_path):
    config = write(tmp_path / "ds.json", {"train_batch_size": 8, "gradient_accumulation_steps": 1})
    settings = train_settings(options(nproc=4), config=config, model="gpt:1m", seq_len=8, eval_every=0)
    assert settings.config["train_micro_batch_size_per_gpu"] == 2
    with pytest.raises(ConfigError, match="--nproc"):
        train_settings(options(nproc=3), config=config, model="gpt:1m", seq_len=8, eval_every=0)


def test_an_outer_launcher_decides_the_number_of_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    settings = demo_settings(options(nproc=2), stage=2, precision="fp32")
    assert settings.world == 3
    assert "--nproc 2 has no effect" in settings.notes[0]


@pytest.mark.parametrize(
    ("environment", "rank", "world"),
    [
        ({}, None, 1),
        ({"RANK": "1", "WORLD_SIZE": "2"}, 1, 2),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, 3, 4),
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "ENVIRONMENT": "BATCH"}, 3, 4),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "ENVIRONMENT": "BATCH"}, None, 1),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "4294967291"}, None, 1),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, 1, 2),
        ({"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, 0, 2),
    ],
)
def test_ranks_are_told_from_the_environment(environment, rank, world):
    assert rank_of(environment) == rank
    assert world_of(environment)[0] == world


def test_ranks_share_the_cores_and_keep_what_the_user_has_set():
    assert int(rank_environment({}, 1000)["OMP_NUM_THREADS"]) == 1
    assert rank_environment({}, 1)["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")
    kept = rank_environment({"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth9"}, 2)
    assert "OMP_NUM_THREADS" not in kept and "GLOO_SOCKET_IFNAME" not in kept


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("x"), 2),
        (UsageFailure("x"), 2),
        (DoesNotFitError("x"), 3),
        (DataError("x"), 1),
        (RuntimeError("x"), 1),
        (RunFailure("x", 143), 143),
        (KeyboardInterrupt(), 130),
    ],
)
def test_an_error_has_one_exit_code(error, code):
    assert exit_code(error) == code


KILLED = Ending(rank=1, pid=7, exit_code=-signal.SIGKILL)
LONELY = Ending(rank=0, pid=6, exit_code=1, message="rank 1 was lost", kind="PeerLostError", moment=1.0)
ABORTED = Ending(rank=2, pid=8, exit_code=-signal.SIGABRT)
WRONG = Ending(rank=3, pid=9, exit_code=1, message="bad text", kind="DataError", moment=5.0)
LATER = Ending(rank=0, pid=6, exit_code=1, message="no file", kind="RuntimeError", moment=6.0)
REFUSED = Ending(rank=0, pid=6, exit_code=2, message="no such key", kind="ConfigError", moment=1.0)


@pytest.mark.parametrize(
    ("endings", "pieces", "code"),
    [
        ([LONELY, KILLED], ["rank 1 (pid 7) was killed by SIGKILL", "the other ranks were stopped"], 1),
        ([LONELY, ABORTED, WRONG], ["rank 3 (pid 9) failed", "bad text"], 1),
        ([LATER, WRONG], ["rank 3", "bad text"], 1),
        ([LONELY, ABORTED], ["rank 2 (pid 8) was killed by SIGABRT"], 1),
        ([LONELY], ["rank 0", "rank 1 was lost"], 1),
        ([REFUSED], ["no such key"], 2),
        ([Ending(rank=1, pid=7, exit_code=9)], ["rank 1 (pid 7) ended with exit code 9 and no message"], 1),
    ],
)
def test_the_message_names_the_cause_and_not_its_consequences(endings, pieces, code):
    failure = describe_failures(endings)
    assert all(piece in str(failure) for piece in pieces)
    assert failure.code == code


@pytest.mark.parametrize(
    ("arguments", "options_shown"),
    [
        (["demo"], ["--stage", "--nproc", "--steps", "--precision", "--data", "--seed", "--device", "--out"]),
        (["train"], ["--config", "--model", "--data", "--nproc", "--steps", "--seq-len", "--eval-every", "--out"]),
        ([], ["demo", "train", "env"]),
    ],
)
def test_help_shows_every_option(arguments, options_shown):
    result = CliRunner().invoke(app, [*arguments, "--help"])
    assert result.exit_code == 0
    assert all(option in result.output for option in options_shown)


@pytest.mark.parametrize(
    "arguments",
    [["demo", "--stage", "4"], ["demo", "--nproc", "0"], ["demo", "--precision", "fp8"], ["train"], ["nothing"]],
)
def test_a_wrong_option_is_a_usage_error(arguments):
    assert CliRunner().invoke(app, arguments).exit_code == 2


def test_a_memory_budget_replaces_the_stage_of_the_config(tmp_path):
    from shardledger.cli.settings import with_budget

    config = write(tmp_path / "ds.json", {"train_batch_size": 8, "zero_optimization": {"stage": 3}})
    settings = train_settings(options(), config=config, model="gpt:1m", seq_len=8, eval_every=0)
    changed = with_budget(settings, "22GiB")
    assert changed.config["zero_optimization"]["stage"] == "auto"
    assert changed.config["shardledger"]["memory_budget"] == f"{22 * 2**30}B"
    with pytest.raises(ConfigError, match="--memory-budget: '22' without a unit"):
        with_budget(settings, "22")


def test_the_stage_is_decided_for_the_run_and_said(tmp_path, capsys):
    from shardledger.cli.decide import decided_config
    from shardledger.cli.settings import with_budget

    config = write(tmp_path / "ds.json", {"train_micro_batch_size_per_gpu": 2})
    settings = train_settings(options(), config=config, model="gpt:1m", seq_len=8, eval_every=0)
    assert decided_config(settings, "cpu") == settings.config
    decided = decided_config(with_budget(settings, "64MiB"), "cpu")
    assert (decided.zero_optimization.stage, decided.stage_is_open) == (0, False)
    assert "memory budget 64.0 MiB: stage 0" in capsys.readouterr().out
