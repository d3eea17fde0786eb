"""A run's ledger on CPU: live bytes of its highest moment, beside what the system says of the process."""

import json
from dataclasses import replace

import torch

from shardledger.cli.ledger import read_ledger, show
from shardledger.cli.live_count import LiveCount
from shardledger.cli.settings import Options, demo_settings
from shardledger.cli.training import train
from shardledger.ledger import CATEGORIES
from shardledger.telemetry import RunFolder
from shardledger.telemetry.live import PHASES
from shardledger.workload import GPT, GPTConfig


def test_the_ledger_of_a_run_is_predicted_to_the_byte(tmp_path, monkeypatch, capsys):
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        monkeypatch.delenv(name, raising=False)
    options = Options(data=None, steps=3, seed=3, device="cpu", out=None, nproc=1)
    settings = demo_settings(options, stage=2, precision="bf16")
    config = {**settings.config, "shardledger": {"checkpoint": {"every": 2, "async": True}}}
    train(replace(settings, config=config), RunFolder(tmp_path / "run"), "cpu")
    (rank,) = read_ledger(str(tmp_path / "run"))["ranks"]
    assert set(rank["measured"]) == {*CATEGORIES, "total"}
    assert rank["measured"] == rank["predicted"]
    assert rank["measured"]["total"] == sum(rank["measured"][category] for category in CATEGORIES)
    assert rank["measured"]["activations"] > 0 and rank["measured"]["optimizer"] > 0
    # The process has Python and PyTorch beside it, and grows at least by the states that it gets.
    assert rank["process"]["before_the_model"] > 2**26
    assert rank["process"]["peak"] > rank["process"]["before_the_model"]
    # At least the batch comes before the forward pass in a run, and numbers are exchanged during a save.
    assert list(rank["phases"]) == list(rank["predicted_phases"]) == list(PHASES)
    assert all(abs(rank["phases"][p] - rank["predicted_phases"][p]) < 2**14 for p in PHASES)
    assert rank["phases"]["backward"] == rank["measured"]["total"]
    capsys.readouterr()
    show(str(tmp_path / "run"))
    shown = capsys.readouterr().out
    assert "MiB resident before the model" in shown and "by phase, predicted / measured MiB: init" in shown
    assert json.loads((tmp_path / "run" / "ledger.json").read_text())["world"] == 1


def test_a_compiled_model_and_an_engine_of_another_kind_are_not_counted():
    model = GPT(GPTConfig(layers=1, heads=1, width=8, context=4))
    count = LiveCount(model, "cpu")
    count.attach(object())
    with count.step():
        torch.ones(3)
    assert count.highest is None
    model.blocks[0].compile(backend="eager")
    compiled = LiveCount(model, "cpu")
    with compiled.initializing():
        assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert compiled.highest is None
