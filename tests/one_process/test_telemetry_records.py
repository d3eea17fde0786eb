"""Records: the exact fields of the run folder's contract, one JSON object a line, and two console forms."""

import io
import json

import pytest

from shardledger.errors import OutputError
from shardledger.telemetry import (
    CheckpointRecord,
    EvalRecord,
    JsonLinesSink,
    LineSink,
    ProgressSink,
    SinkGroup,
    StepRecord,
    console_sink,
    format_line,
)


def step_record(**changes) -> StepRecord:
    values = {
        "step": 12,
        "loss": 3.21042,
        "lr": 1e-3,
        "grad_norm": 0.8123,
        "tokens_per_s": 12345.4,
        "samples_per_s": 96.0,
        "step_s": 0.25,
        "data_s": 0.001,
        "comm_wait_s": 0.05,
        "utilization": 0.8,
        "memory_peak_bytes": (2**20, 3 * 2**20),
        "stage": 2,
        "offload": {"optimizer": "none", "param": "none"},
        "skipped": False,
        "loss_scale": 1.0,
    }
    return StepRecord(**{**values, **changes})


def test_a_step_has_exactly_the_promised_fields_in_order():
    assert list(json.loads(step_record().to_json())) == [
        "event", "step", "loss", "lr", "grad_norm", "tokens_per_s", "samples_per_s", "step_s", "data_s", "comm_wait_s",
        "utilization", "memory_peak_bytes", "stage", "offload", "skipped", "loss_scale",
    ]  # fmt: skip
    assert json.loads(step_record().to_json())["memory_peak_bytes"] == [2**20, 3 * 2**20]


def test_evaluations_and_checkpoints_have_exactly_the_promised_fields():
    assert EvalRecord(step=3, loss=2.5, seconds=0.5).to_dict() == {
        "event": "eval", "step": 3, "loss": 2.5, "seconds": 0.5,
    }  # fmt: skip
    for action in ("save", "load"):
        record = CheckpointRecord(action=action, step=3, seconds=0.5, bytes=10, path="a/b")
        assert record.to_dict() == {
            "event": f"checkpoint_{action}", "step": 3, "seconds": 0.5, "bytes": 10, "path": "a/b",
        }  # fmt: skip


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_none_becomes_null_and_stays_json(bad):
    read = json.loads(step_record(loss=bad, grad_norm=bad).to_json(), parse_constant=pytest.fail)
    assert read["loss"] is None and read["grad_norm"] is None


def test_records_cannot_be_changed():
    with pytest.raises(AttributeError):
        step_record().loss = 0


def test_a_line_is_greppable():
    line = format_line(step_record())
    assert line.startswith("step=12 loss=3.2104 lr=1.0e-03 grad_norm=0.812 tokens_per_s=12345 ")
    assert all(part.count("=") == 1 for part in line.split())
    assert format_line(step_record(grad_norm=None, skipped=True)).count("grad_norm=- ") == 1
    assert "skipped=true" in format_line(step_record(skipped=True))
    assert format_line(EvalRecord(step=3, loss=2.5, seconds=0.5)) == "event=eval step=3 loss=2.5000 seconds=0.50"
    checkpoint = CheckpointRecord(action="save", step=3, seconds=0.5, bytes=10, path="a/b")
    assert format_line(checkpoint).startswith("event=checkpoint_save step=3 ")


def test_every_line_is_on_disk_before_the_file_is_closed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonLinesSink(path)
    for step in (1, 2):
        sink.write(step_record(step=step))
        assert len(path.read_text().splitlines()) == step
    sink.close()
    sink.close()


def test_a_pipe_gets_lines_and_a_terminal_a_bar(monkeypatch):
    for variable in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(variable, raising=False)
    assert isinstance(console_sink(10, io.StringIO()), LineSink)

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    sink = console_sink(12, terminal)
    assert isinstance(sink, ProgressSink)
    sink.write(step_record())
    sink.write(EvalRecord(step=12, loss=2.5, seconds=0.5))
    sink.close()
    assert "12/12" in terminal.getvalue() and "loss 3.210" in terminal.getvalue()
    assert "event=eval step=12 loss=2.5000" in terminal.getvalue()


def test_a_full_disk_is_told_with_the_file():
    sink = JsonLinesSink("/dev/full")
    with pytest.raises(OutputError, match=r"/dev/full cannot be written: No space left on device\. Make room"):
        sink.write(EvalRecord(step=1, loss=2.0, seconds=0.1))
    with pytest.raises(OutputError):
        sink.close()  # what is buffered fails again


def test_a_group_closes_its_sinks_when_training_fails(tmp_path):
    sink = JsonLinesSink(tmp_path / "metrics.jsonl")
    with pytest.raises(ZeroDivisionError), SinkGroup([sink]) as group:
        group.write(step_record())
        raise ZeroDivisionError
    with pytest.raises(ValueError, match="closed"):
        sink.write(step_record())
