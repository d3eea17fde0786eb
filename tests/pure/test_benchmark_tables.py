"""What the benchmark computes from its measurements: ratios within rounds, agreement of losses, rows, table, picture."""

import importlib
import json
import re
import sys
from xml.etree import ElementTree

import pytest

from support.source import ROOT

KEYS = {
    "engine",
    "stage",
    "model",
    "world",
    "precision",
    "tokens_per_s",
    "ratio_to_ddp",
    "peak_rss_bytes",
    "transient_bytes",
    "sent_bytes",
    "save_s",
    "load_s",
    "start_s",
}


@pytest.fixture(scope="module")
def bench():
    """The modules of the benchmark, by name."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        names = ("cases", "numbers", "report", "conductor", "targets", "kept")
        modules = {name: importlib.import_module(f"side_by_side.{name}") for name in names}
        yield {**modules, "bench": importlib.import_module("bench")}
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def measured(bench, engine, stage, seconds, losses=(2.0, 1.0)):
    contender = bench["cases"].Contender(engine, stage)
    row = bench["conductor"].Measured(contender, seconds=list(seconds), losses=list(losses))
    row.wire_bytes, row.starts, row.saves, row.loads = [1e6], [3.0], [0.5], [0.25]
    return row


def case(bench, precision="fp32"):
    return bench["cases"].Case(model="tiny", world=2, precision=precision, steps=1)


def found(bench, **losses):
    # The machine is half as fast in the second round, for both.
    rows = [measured(bench, "DDP", 0, [1.0, 2.0, 1.0]), measured(bench, "shardledger", 2, [0.8, 1.6, 0.5], **losses)]
    return [(case(bench), rows)]


def test_a_ratio_is_taken_within_rounds_so_a_slow_minute_does_not_count(bench):
    value = bench["numbers"].ratio([1.0, 2.0, 1.0], [0.8, 1.6, 0.5])
    assert (value.middle, value.lowest, value.highest) == (1.25, 1.25, 2.0)
    with pytest.raises(ValueError):
        bench["numbers"].ratio([1.0, 2.0], [1.0])


def test_losses_that_differ_are_told_and_nan_never_agrees(bench):
    agree = bench["numbers"].losses_agree
    assert agree([2.0, 1.0], [2.0, 1.0001], 1e-3) == ""
    assert "step 1" in agree([2.0, 1.0], [2.0, 1.01], 1e-3)
    assert "step 0" in agree([float("nan"), 1.0], [2.0, 1.0], 1e-3)
    assert "1 losses beside 2" in agree([2.0], [2.0, 1.0], 1e-3)


def test_rows_have_the_agreed_keys_and_the_ratio_is_of_speed(bench):
    rows = bench["report"].json_rows(found(bench))
    assert [set(row) for row in rows] == [KEYS, KEYS]
    assert [row["ratio_to_ddp"] for row in rows] == [1.0, 1.25]
    assert rows[1]["tokens_per_s"] == pytest.approx(2 * 2 * 128 / 0.8)
    json.dumps(rows)


def test_no_ratio_is_printed_when_engines_did_not_train_alike(bench):
    wrong = found(bench, losses=(2.0, 1.5))
    assert [row["ratio_to_ddp"] for row in bench["report"].json_rows(wrong)] == [None, None]
    text = bench["report"].markdown(wrong, bench["conductor"].Protocol(rounds=3), [])
    assert "did not train alike" in text and "step 1" in text
    assert not re.search(r"1\.25 \[", text)
    assert "1.25 [1.25 .. 2.00]" in bench["report"].markdown(found(bench), bench["conductor"].Protocol(rounds=3), [])


def test_in_bf16_engines_round_each_in_its_own_way_and_are_not_compared(bench):
    rows = found(bench, losses=(2.0, 1.5))[0][1]
    assert bench["report"].disagreements(case(bench, "bf16"), rows) == []
    assert bench["report"].disagreements(case(bench), rows) != []


def test_an_engine_that_failed_is_named_and_has_no_row(bench):
    ((of, rows),) = found(bench)
    rows[1].failed = "a rank ended\nout of memory"
    assert [row["engine"] for row in bench["report"].json_rows([(of, rows)])] == ["DDP"]
    assert any("out of memory" in line for line in bench["report"].table(of, rows))


def test_a_stage_that_failed_misses_a_target_and_one_engine_alone_agrees_with_nobody(bench):
    ((of, rows),) = found(bench)
    rows[
        1
    ].failed = (
        "shardledger stage 2: a rank ended at 'turn'; ended: rank 1 with exit code -9; the output ends:\n(nothing)"
    )
    assert [(v.target, v.met) for v in bench["targets"].verdicts(of, rows)] == [("stage 2 runs", False)]
    lines = bench["report"].table(of, rows)
    assert any("rank 1 with exit code -9" in line for line in lines)
    assert not any("agree" in line for line in lines)


def test_a_title_names_one_case_though_it_has_commas(bench):
    cases = bench["cases"].FULL
    named = bench["bench"].cases_named("25m parameters, 2 ranks, bf16", cases)
    assert [case.title for case in named] == ["25m parameters, 2 ranks, bf16"]
    assert len(bench["bench"].cases_named("3.4m,124m", cases)) == 4 and bench["bench"].cases_named("", cases) == cases


def test_a_part_of_the_protocol_leaves_the_results_alone_and_an_engine_that_failed_is_a_failure(
    bench, tmp_path, monkeypatch
):
    module = bench["bench"]
    assert module.asked_for(["--cases", "25m"])[0].out == module.RESULTS
    for part in (["--quick"], ["--engines", "DDP"], ["--rounds", "9"], ["--starts", "1"]):
        assert module.asked_for(part)[0].out == module.PART
    ((_, rows),) = found(bench)
    monkeypatch.setattr(module, "conduct", lambda *_: rows)
    assert module.main(["--smoke", "--out", str(tmp_path)]) == 0
    rows[1].failed = "a rank ended"
    assert module.main(["--smoke", "--out", str(tmp_path)]) == 1


def test_the_picture_is_xml_with_a_bar_for_each_engine(bench):
    from side_by_side.picture import draw

    root = ElementTree.fromstring(draw(bench["report"].bars(found(bench))))
    bars = [e for e in root.iter() if e.tag.endswith("rect") and e.get("fill") != "white"]
    assert len(bars) == 2 and float(bars[1].get("width")) > float(bars[0].get("width"))


def test_the_parameter_count_of_a_shape_is_the_model_s(bench):
    from shardledger.workload import GPT, GPTConfig

    for name in ("tiny", "3.4m"):
        model = GPT(GPTConfig(**bench["cases"].SHAPES[name]))
        assert bench["cases"].parameters(name) == sum(p.numel() for p in model.parameters())


def test_each_target_is_judged_and_a_miss_stands_out(bench):
    rows = found(bench)[0][1]
    rows[0].peak_bytes = rows[1].peak_bytes = 100
    slow = measured(bench, "shardledger", 0, [2.0, 4.0, 2.0])
    slow.peak_bytes, slow.starts = 99, [3.6]
    rows += [slow, measured(bench, "DeepSpeed", 2, [1.0, 2.0, 1.0])]
    rows[1].counted_bytes = [4 * 2 * bench["cases"].parameters("tiny") / 2 * 1.02]
    judged = {v.target: v for v in bench["targets"].verdicts(case(bench), rows)}
    met = {target: verdict.met for target, verdict in judged.items()}
    assert met == {
        "stage 0, speed / DDP": False,
        "stage 0, peak RSS / least peer's (DDP)": True,
        "stage 0, start to first step": False,
        "stage 2, speed / DDP": True,
        "stage 2, speed / DeepSpeed stage 2": True,
        "stage 2, bytes sent / formula": False,
        "stage 2, start to first step": True,
    }
    text = "\n".join(bench["targets"].table([(case(bench), rows)]))
    assert "4 of 7 are met" in text and "**0.50 [0.50 .. 0.50]**" in text


def test_cases_measured_before_on_the_same_terms_stay_and_others_go(bench, tmp_path):
    kept = bench["kept"]
    ((first, rows),) = found(bench)
    second = case(bench, "bf16")
    assert len(kept.add(tmp_path, "torch 1", first, rows)) == 1
    both = kept.add(tmp_path, "torch 1", second, rows)
    assert [of for of, _ in both] == [first, second] and both[0][1] == rows
    assert kept.set_aside(tmp_path, "torch 1") == ""
    assert [of for of, _ in kept.add(tmp_path, "torch 2", second, rows)] == [second]
    assert first.title in (tmp_path / kept.BEFORE).read_text(), "nothing that was measured is lost"
