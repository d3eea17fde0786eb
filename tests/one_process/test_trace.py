"""A trace names what happens when, and changes nothing."""

import json

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import shardledger as sl
from shardledger.cli.trace import Trace, check_trace
from shardledger.errors import ConfigError
from shardledger.telemetry.trace import Spans
from shardledger.transport import ReduceHow
from shardledger.transport.local import SoloMailbox
from shardledger.transport.peers import PeerTransport
from shardledger.transport.traced import TracedTransport
from shardledger.workload import GPT, GPTConfig

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}


def train(path):
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, heads=2, width=16, context=8))
    engine = sl.initialize(model=model, config=CONFIG, device="cpu")[0]
    tokens = torch.arange(16).view(2, 8)
    losses = []
    with Trace(engine, path):
        for _ in range(2):
            loss = engine(tokens, tokens)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    engine.destroy()
    return losses


def test_a_trace_names_phases_units_collectives_and_the_optimizer(tmp_path, capsys):
    file = tmp_path / "trace.json"
    assert train(str(file)) == train(None)
    assert "trace of rank 0" in capsys.readouterr().out
    events = json.loads(file.read_text())["traceEvents"]
    names = [event["name"] for event in events if event["ph"] in "Xbi"]
    for phase in ("forward", "backward", "step"):
        assert names.count(phase) == 2
    for unit in ("blocks.0", "blocks.1"):
        for what in ("forward", "backward", "gather", "reduce"):
            assert f"{what} {unit}" in names, f"{what} {unit}"
    assert names.count("optimizer") == 2
    spans = {event["name"]: event for event in events if event["ph"] == "X"}
    inner, outer = spans["backward blocks.0"], spans["backward"]  # of the last step
    assert outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    opened = [event["id"] for event in events if event["ph"] == "b"]
    assert sorted(opened) == sorted(event["id"] for event in events if event["ph"] == "e") and opened


def test_a_reduction_that_another_collective_s_wait_has_finished_keeps_its_spans(tmp_path):
    spans = Spans()
    transport = TracedTransport(PeerTransport(SoloMailbox()), spans)
    how = ReduceHow(wire=torch.float32, accumulate=False, bucket_numel=2, label="blocks.0")
    work = transport.reduce_scatter(torch.ones(8), torch.empty(8), how)
    transport.all_gather(torch.ones(8), "blocks.1").wait()
    assert work.done
    work.wait()
    work.wait()
    spans.write(tmp_path / "trace.json", "one")
    names = [(event["name"], event["ph"]) for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]]
    for span in (("wait for reduce blocks.0", "X"), ("reduce blocks.0", "b"), ("reduce blocks.0", "e")):
        assert names.count(span) == 1, span


def test_a_trace_is_written_also_when_the_run_fails(tmp_path):
    engine = sl.initialize(model=torch.nn.Linear(2, 1), config=CONFIG, device="cpu")[0]
    with pytest.raises(ZeroDivisionError), Trace(engine, str(tmp_path / "trace.json")):
        engine(torch.ones(1, 2))
        raise ZeroDivisionError
    engine.destroy()
    assert "forward" in (tmp_path / "trace.json").read_text()


def test_a_repeated_forward_of_the_model_s_own_is_marked(tmp_path):
    class Stack(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x.sum()

    engine = sl.initialize(model=Stack(), config=CONFIG, device="cpu")[0]
    with Trace(engine, str(tmp_path / "trace.json")):
        engine.backward(engine(torch.ones(1, 4, requires_grad=True)))
        engine.step()
    engine.destroy()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["name"] for e in events if e["ph"] == "i"] == ["recompute blocks.1", "recompute blocks.0"]
    assert [e["name"] for e in events if e["name"].startswith("forward b")] == ["forward blocks.0", "forward blocks.1"]


def test_a_full_record_keeps_what_it_has_and_counts_the_rest(tmp_path):
    spans = Spans(most=3)
    for number in range(3):
        with spans.span(f"span {number}", "test"):
            pass
    spans.add_beside("beside", "test", 0.0)
    spans.write(tmp_path / "full.json", "rank 0")
    names = [e["name"] for e in json.loads((tmp_path / "full.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert names == ["span 0", "span 1", "span 2"]
    assert spans.dropped == 1


def test_a_trace_that_cannot_be_written_is_refused_before_the_run(tmp_path):
    with pytest.raises(ConfigError, match="folder that does not exist"):
        check_trace(str(tmp_path / "missing" / "trace.json"))
    with pytest.raises(ConfigError, match="is a folder"):
        check_trace(str(tmp_path))
    check_trace(str(tmp_path / "trace.json"))
    check_trace(None)
