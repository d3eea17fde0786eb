"""What --resume goes on from, and where it may write."""

from __future__ import annotations

import json

import pytest

from shardledger.cli.arguments import with_resume_value
from shardledger.cli.exits import UsageFailure
from shardledger.cli.resume import check_folder, run_folder_of, source_of
from shardledger.errors import ConfigError
from shardledger.telemetry import RunFolder


def a_run(path, *, checkpoint):
    folder = RunFolder(path)
    folder.create()
    folder.write_config({})
    if checkpoint:
        (folder.checkpoints / "step-000004").mkdir(parents=True)
        (folder.checkpoints / "step-000004/manifest.json").write_text("{}")
        (folder.checkpoints / "latest").write_text("step-000004")
    return folder


def test_resume_alone_means_the_latest():
    assert with_resume_value(["train", "--resume"]) == ["train", "--resume", "latest"]
    assert with_resume_value(["--resume", "--steps", "3"]) == ["--resume", "latest", "--steps", "3"]
    assert with_resume_value(["--resume", "auto"]) == ["--resume", "auto"]


def test_the_source_is_the_latest_of_the_folder_or_the_path_that_was_given(tmp_path):
    folder = a_run(tmp_path / "run", checkpoint=True)
    for resume in ("latest", "auto", str(folder.path), str(folder.checkpoints)):
        assert source_of(resume, folder) == (folder.checkpoints, None)
    one = folder.checkpoints / "step-000004"
    assert source_of(str(one), RunFolder(tmp_path / "other")) == (folder.checkpoints, "step-000004")
    assert source_of(None, folder) is None


def test_without_a_checkpoint_auto_starts_anew_and_the_others_are_usage_errors(tmp_path):
    folder = a_run(tmp_path / "run", checkpoint=False)
    assert source_of("auto", folder) is None
    with pytest.raises(UsageFailure, match=r"no complete checkpoint.*--resume auto"):
        source_of("latest", folder)
    with pytest.raises(UsageFailure, match="neither a checkpoint"):
        source_of(str(tmp_path), folder)


def test_the_folder_is_outs_or_that_of_the_run_that_is_named(tmp_path):
    folder = a_run(tmp_path / "run", checkpoint=True)
    assert run_folder_of(None, None) is None
    assert run_folder_of(str(folder.path), None) == str(folder.path)
    assert run_folder_of(str(folder.checkpoints / "step-000004"), None) is None
    assert run_folder_of("auto", "here") == "here"
    for resume in ("latest", "auto"):
        with pytest.raises(UsageFailure, match="needs --out"):
            run_folder_of(resume, None)


def test_a_folder_of_something_else_is_never_written_to(tmp_path):
    ours, other = a_run(tmp_path / "ours", checkpoint=True), a_run(tmp_path / "other", checkpoint=False)
    check_folder("latest", ours, source_of("latest", ours))
    check_folder("auto", other, None)  # killed before its first checkpoint
    with pytest.raises(ConfigError, match="already exists"):
        check_folder(str(ours.path), other, source_of(str(ours.path), other))
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/diary.txt").write_text("mine")
    with pytest.raises(ConfigError, match="already exists"):
        check_folder("auto", RunFolder(tmp_path / "notes"), None)


def test_records_of_steps_that_are_taken_again_are_dropped(tmp_path):
    folder = a_run(tmp_path / "run", checkpoint=True)
    lines = [json.dumps({"event": "step", "step": step}) for step in range(1, 7)]
    folder.metrics.write_text("\n".join(lines) + '\n{"event": "step", "st')
    folder.forget_after(4)
    assert folder.metrics.read_text().splitlines() == lines[:4]
