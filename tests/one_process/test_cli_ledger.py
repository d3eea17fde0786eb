"""``shardledger ledger RUN_DIR``: predicted beside measured, the worst rank first, lessons for wrong folders."""

import json

import pytest
from typer.testing import CliRunner

from shardledger.cli.ledger import percent, read_ledger, worst_rank
from shardledger.cli.main import app
from shardledger.errors import ConfigError
from shardledger.ledger import CATEGORIES

MIB = 2**20


def rank(predicted: int, measured: int) -> dict:
    known = dict.fromkeys(CATEGORIES, 0)
    return {
        "predicted": {**known, "params": predicted, "total": predicted},
        "measured": {**known, "params": measured, "total": measured},
    }


@pytest.fixture
def run_folder(tmp_path):
    content = {"world": 2, "stage": 3, "ranks": [rank(100 * MIB, 100 * MIB), rank(99 * MIB, 100 * MIB)]}
    (tmp_path / "ledger.json").write_text(json.dumps(content))
    return tmp_path


def ledger(*arguments: str):
    return CliRunner().invoke(app, ["ledger", *arguments])


def test_the_rank_that_is_predicted_worst_is_shown(run_folder):
    found = ledger(str(run_folder))
    assert found.exit_code == 0, found.output
    assert "stage 3, 2 rank(s); MiB of rank 1" in found.output
    assert "-1,048,576" in found.output and "-1.00 %" in found.output
    assert "error of the total by rank: 0 %, -1.00 %" in found.output


def test_a_rank_can_be_asked_for(run_folder):
    assert "MiB of rank 0" in ledger(str(run_folder), "--rank", "0").output
    assert ledger(str(run_folder), "--rank", "2").exit_code == 2


def test_what_is_not_known_has_no_error(run_folder):
    content = json.loads((run_folder / "ledger.json").read_text())
    content["ranks"][0]["predicted"] = dict.fromkeys((*CATEGORIES, "total"))
    (run_folder / "ledger.json").write_text(json.dumps(content))
    assert worst_rank(content["ranks"]) == 1
    assert "error of the total by rank: -, -1.00 %" in ledger(str(run_folder)).output


@pytest.mark.parametrize(
    ("text", "words"), [(None, "holds no ledger.json"), ("{", "cannot be read"), ("{}", "is no ledger")]
)
def test_a_folder_without_a_ledger_is_a_lesson(tmp_path, text, words):
    if text is not None:
        (tmp_path / "ledger.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_ledger(str(tmp_path))
    assert ledger(str(tmp_path)).exit_code == 2


def test_no_folder_is_a_usage_error():
    assert ledger().exit_code == 2


def test_per_cent_of_what_was_measured():
    assert percent(110, 100) == "+10.00 %" and percent(100, 100) == "0 %" and percent(0, 0) == "0 %"
    assert percent(None, 1) == percent(1, None) == percent(1, 0) == "-"
