"""The benchmark works from end to end: processes, turns, losses, files."""

import json
import subprocess
import sys

from support.source import ROOT


def test_an_engine_or_a_number_of_rounds_that_makes_no_sense_is_refused_at_once(tmp_path):
    for wrong in (["--engines", "DDP, Foo"], ["--rounds", "0"], ["--starts", "-2"], ["--cases", "nope"]):
        command = [sys.executable, str(ROOT / "benchmarks" / "bench.py"), "--smoke", "--out", str(tmp_path), *wrong]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert ran.returncode == 2 and wrong[1].split()[-1].lower() in ran.stderr, ran.stderr
    assert not list(tmp_path.iterdir())


def test_two_engines_take_turns_and_train_alike(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "bench.py"), "--smoke", "--rounds", "2"]
    command += ["--engines", "DDP, shardledger stage 3", "--out", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = json.loads((tmp_path / "latest.json").read_text())["rows"]
    assert [(row["engine"], row["stage"], row["world"]) for row in rows] == [("shardledger", 3, 2), ("DDP", 0, 2)]
    assert all(row[key] > 0 for row in rows for key in ("tokens_per_s", "ratio_to_ddp", "peak_rss_bytes", "sent_bytes"))
    # 40,000 parameters at 4 bytes: stage 3 sends half of them three times, DDP twice; loopback adds headers.
    parameters = 12 * 2 * 32 * 32 + 26 * 32 + (256 + 128 + 2) * 32
    assert 0.9 < rows[0]["sent_bytes"] / (3 * 2 * parameters) < 1.2
    assert "Losses of all engines that ran agree" in ran.stdout
    assert (tmp_path / "side-by-side.svg").is_file() and (tmp_path / "side-by-side.md").is_file()
