"""The run folder, the memory meter, and the ledger as a table."""

import io
import json
import subprocess
import sys

import psutil
import pytest

from shardledger.errors import ConfigError
from shardledger.telemetry import CATEGORIES, MemoryMeter, RunFolder, mebibytes, peak_resident_bytes, print_ledger


def rank_ledger(**predicted):
    return {
        "predicted": {category: predicted.get(category) for category in CATEGORIES},
        "measured": dict.fromkeys(CATEGORIES, 3 * 2**20),
    }


def test_the_ledger_file_has_the_promised_form(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    folder.write_ledger(2, [rank_ledger(params=5), rank_ledger(params=6)])
    read = json.loads((tmp_path / "run" / "ledger.json").read_text())
    assert list(read) == ["world", "stage", "ranks"]
    assert (read["world"], read["stage"]) == (2, 2)
    assert [list(rank) for rank in read["ranks"]] == [["predicted", "measured"]] * 2
    assert list(read["ranks"][1]["predicted"]) == list(CATEGORIES)
    assert read["ranks"][1]["predicted"]["params"] == 6
    assert read["ranks"][1]["predicted"]["activations"] is None


def test_names_are_those_of_the_contract(tmp_path):
    folder = RunFolder(tmp_path)
    paths = (folder.config, folder.metrics, folder.ledger, folder.checkpoints, folder.final)
    assert [path.name for path in paths] == [
        "config.resolved.json", "metrics.jsonl", "ledger.json", "checkpoints", "final",
    ]  # fmt: skip


def test_a_run_is_never_overwritten(tmp_path):
    (tmp_path / "empty").mkdir()
    RunFolder(tmp_path / "empty").create()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "metrics.jsonl").write_text("old")
    (tmp_path / "file").write_text("old")
    for name in ("used", "file"):
        with pytest.raises(ConfigError, match=rf"{name} .*never overwritten.*--out"):
            RunFolder(tmp_path / name).create()
    assert (tmp_path / "used" / "metrics.jsonl").read_text() == "old"
    with pytest.raises(ConfigError, match="cannot be made"):
        RunFolder(tmp_path / "file" / "below").create()


def test_fresh_names_differ_within_one_second(tmp_path, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda _: "20300101-000000")
    names = []
    for _ in range(3):
        folder = RunFolder.fresh(tmp_path, "demo")
        folder.create()
        names.append(folder.path.name)
    assert names == ["demo-20300101-000000", "demo-20300101-000000-2", "demo-20300101-000000-3"]


def test_the_peak_is_at_least_what_is_resident_and_never_falls():
    meter = MemoryMeter("cpu")
    before = meter.peak_bytes()
    assert before >= meter.baseline_bytes > 2**20
    block = bytearray(64 * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    assert meter.current_bytes() >= meter.baseline_bytes + 60 * 2**20
    grown = meter.peak_bytes()
    assert grown >= before
    del block
    assert meter.peak_bytes() >= grown


def test_the_peak_is_this_process_own_and_in_bytes():
    # A child of a large process must not report its parent's peak, and KiB must not be taken for bytes.
    block = bytearray(256 * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    code = (
        "from shardledger.telemetry.memory import peak_resident_bytes, psutil\n"
        "print(peak_resident_bytes(), psutil.Process().memory_info().rss)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    peak, resident = map(int, answer.split())
    assert resident * 0.95 <= peak <= resident * 1.5
    assert peak_resident_bytes() >= psutil.Process().memory_info().rss * 0.95
    assert len(block)


def test_the_table_shows_every_category_and_a_dash_where_nothing_is_predicted():
    stream = io.StringIO()
    print_ledger([rank_ledger(params=2**20), rank_ledger(params=0)], 3, stream)
    lines = {line.split()[0]: line.split()[1:] for line in stream.getvalue().splitlines() if line.strip()}
    assert lines["params"] == ["1.000", "3.000", "0", "3.000"]
    assert lines["activations"] == ["-", "3.000", "-", "3.000"]
    assert set(CATEGORIES) <= set(lines)
    assert "stage 3, 2 ranks" in stream.getvalue()


def test_a_table_of_many_ranks_says_where_the_others_are():
    stream = io.StringIO()
    print_ledger([rank_ledger()] * 6, 0, stream)
    assert "2 more ranks are in ledger.json" in stream.getvalue()
    assert "rank 3" in stream.getvalue() and "rank 4" not in stream.getvalue()


def test_units_are_readable_at_every_size():
    assert [mebibytes(count) for count in (None, 0, 1024, 5 * 2**20, 2**33)] == ["-", "0", "0.001", "5.000", "8,192.0"]
