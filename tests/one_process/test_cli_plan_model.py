"""The plan of a whole model as the command shows it, over rows that a stand-in for the dry run makes."""

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from shardledger.cli.plan_model import plan_model, question_of
from shardledger.cli.plan_options import PlanOptions, hardware_of
from shardledger.cli.plan_plot import timeline_lines
from shardledger.cli.plan_question import Planned
from shardledger.config import load_config
from shardledger.errors import ConfigError, DoesNotFitError
from shardledger.ledger.categories import CATEGORIES
from shardledger.ledger.plot import COLORS, Rect, picture, svg
from support.rows import GIB, rows_of

ROW_KEYS = {
    "stage", "offload", "checkpointing", "params", "grads", "master", "optimizer", "activations", "communication",
    "temporary", "framework", "total", "peak_phase", "fits", "sent_bytes_per_step",
}  # fmt: skip
TIMELINE = [("forward", "blocks.0", 10 * GIB), ("backward", "blocks.0", 30 * GIB), ("step", "", 20 * GIB)]


class Planner:
    """Answers with rows whose activations are proportional to the micro-batch, and remembers the questions."""

    def __init__(self, parameters=7e9, gib_per_sample=2.5):
        self.questions = []
        self.parameters, self.gib_per_sample = int(parameters), gib_per_sample

    def __call__(self, question):
        self.questions.append(question)
        frozen = 0.995 if question.trainable != "all" else 0.0
        rows = rows_of(
            self.parameters,
            question.world,
            activations=self.gib_per_sample * question.micro_batch,
            micro_batches=(question.micro_batch,),
            frozen=frozen,
        )
        trained = self.parameters - round(self.parameters * frozen)
        return Planned(rows=rows, parameters=self.parameters, trained=trained, timeline=TIMELINE)


def options(**changes) -> PlanOptions:
    values = {"model": "gpt:7b", "world": 8, "device_memory": "80GiB", "micro_batch": 8, "seq_len": 2048, **changes}
    return PlanOptions(**values)


def show(capsys, planner=None, **changes):
    asked = options(**changes)
    plan_model(asked, hardware_of(asked), planner or Planner())
    return capsys.readouterr().out


def test_the_table_the_bars_and_the_recommendation_are_printed(capsys):
    text = show(capsys)
    assert text.startswith("gpt:7b, 7 B parameters, 8 ranks, micro-batch 8 x 2048 tokens, accumulation 1, 80.0 GiB")
    lines = text.splitlines()
    header = next(line for line in lines if line.startswith("stage  offload"))
    for word in (
        "recomp",
        "params",
        "activ",
        "comm",
        "temp",
        "frame",
        "peak GiB",
        "fits",
        "free GiB",
        "sent GiB",
        "peak in",
    ):
        assert word in header
    row = next(line for line in lines if line.startswith("1      none") and " no " in line)
    assert "59.62" in row and "yes" in row and "20.38" in row and row.endswith("backward blocks.0")
    assert "| device 80.0 GiB" in text
    assert "peak 30.0 GiB, backward blocks.0" in text
    assert "recommended: stage 1, micro-batch 8" in text


def test_json_has_the_documented_keys_and_no_others(capsys):
    content = json.loads(show(capsys, json=True))
    assert set(content) == {"stages", "recommended"}
    assert set(content["recommended"]) == {"stage", "offload", "checkpointing", "micro_batch", "reason"}
    assert all(set(row) == ROW_KEYS for row in content["stages"])
    for row in content["stages"]:
        assert row["total"] == sum(row[category] for category in CATEGORIES)
        assert row["fits"] == (row["total"] <= 80 * GIB)
    assert content["recommended"]["stage"] == 1


def test_a_smaller_micro_batch_is_planned_before_it_is_recommended(capsys):
    planner = Planner(parameters=1e9, gib_per_sample=10)
    text = show(capsys, planner, device_memory="40GiB")
    assert [question.micro_batch for question in planner.questions] == [8, 2]
    assert [question.accumulation for question in planner.questions] == [1, 4]
    assert "recommended: stage 0, micro-batch 2" in text
    assert "is scaled from" not in text


def test_little_task_data_plans_adapters_as_well(capsys):
    planner = Planner()
    text = show(capsys, planner, device_memory="40GiB", task_samples=300)
    assert [question.trainable for question in planner.questions] == ["all", "lora:r=16"]
    assert "LoRA adapters" in text and "300 samples are little" in text


def test_speeds_add_the_bound_of_a_step_and_whether_traffic_hides(capsys):
    text = show(capsys, bandwidth="50GB/s", flops="400TFLOP/s")
    assert "step s" in text and "hidden" in text
    row = next(line for line in text.splitlines() if line.startswith("0      none") and " no " in line)
    # 6 x 7e9 x 8 x 2048 operations at 400e12 a second; 24.5 GB take 0.49 s.
    assert "1.72" in row and " yes " in row


def test_nothing_fits_is_an_error_after_the_table(capsys):
    asked = options(device_memory="512MiB", host_memory="1GiB", micro_batch=1)
    with pytest.raises(DoesNotFitError, match="256.0 MiB of device memory per rank are missing"):
        plan_model(asked, hardware_of(asked), Planner())
    assert "recommended: nothing fits" in capsys.readouterr().out


def test_the_written_config_keeps_the_users_keys_and_the_global_batch(tmp_path, capsys):
    source, target = tmp_path / "ds.json", tmp_path / "out.json"
    written = {
        "train_batch_size": 128,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "overlap_comm": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-5}},
        "shardledger": {"cast_inputs": False},
    }
    source.write_text(json.dumps(written))
    planner = Planner(parameters=1e9, gib_per_sample=10)
    show(capsys, planner, device_memory="40GiB", micro_batch=None, config=str(source), write=str(target))
    content = json.loads(target.read_text())
    assert content["zero_optimization"] == {"stage": 0, "overlap_comm": True}
    assert (content["train_micro_batch_size_per_gpu"], content["gradient_accumulation_steps"]) == (2, 8)
    assert content["optimizer"] == written["optimizer"] and content["gradient_clipping"] == 0.5
    config = load_config(target, world=8)
    assert config.train_batch_size == 128
    assert config.shardledger.cast_inputs is False


def test_recomputation_is_written_under_our_own_key(tmp_path, capsys):
    target = tmp_path / "out.json"
    show(capsys, Planner(1e9, 60), device_memory="40GiB", micro_batch=1, write=str(target))
    assert load_config(target, world=8).shardledger.activation_checkpointing is True


def test_the_picture_is_svg_whose_bars_are_as_long_as_the_bytes(tmp_path, capsys):
    file = tmp_path / "plan.svg"
    show(capsys, plot=str(file))
    root = ElementTree.parse(file).getroot()
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "device 80.0 GiB" in texts and "peak 30.0 GiB, backward blocks.0" in texts
    assert "stage 3 · optimizer:cpu+param:cpu · recomputed" in texts


def test_bars_are_proportional_and_cut_where_the_device_would_vanish():
    small, large = rows_of(1e9, 8, activations=4)[0], rows_of(70e9, 8, activations=4)[0]
    drawn = picture([small, large], 80 * GIB)
    bars = [s for s in drawn.shapes if isinstance(s, Rect) and s.title]
    rows = {y: [bar for bar in bars if bar.y == y] for y in sorted({bar.y for bar in bars})}
    first, second = rows.values()
    lengths = {bar.title.partition(":")[0]: bar.width for bar in first}
    assert lengths["optimizer"] / lengths["params"] == pytest.approx(4)
    assert [bar.color for bar in first] == [COLORS[c] for c in CATEGORIES if getattr(small, c)]
    assert all(bar.x + bar.width <= drawn.width for bar in second)
    line = max(bar.x + bar.width for bar in second)
    assert line > max(bar.x + bar.width for bar in first) * 1.5


def test_names_in_a_picture_cannot_break_it():
    row = rows_of(1e9, 8, activations=4)[0]
    ElementTree.fromstring(svg(picture([row], GIB, [("forward", "<a&b>", 5)], title="<x> & y")))


def test_png_without_matplotlib_names_svg(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    planner = Planner()
    with pytest.raises(ConfigError, match="write --plot plan.svg"):
        show(capsys, planner, plot="plan.png")
    assert planner.questions == []  # told before anything is planned


@pytest.mark.parametrize("file", ["plan.jpg", "plan"])
def test_another_picture_format_is_a_lesson(file, capsys):
    with pytest.raises(ConfigError, match=r"\.svg or \.png"):
        show(capsys, plot=file)


def test_the_timeline_marks_the_peak_wherever_it_is():
    for at in range(40):
        moments = [("forward", f"u{i}", GIB + (i == at) * GIB) for i in range(40)]
        lines = timeline_lines(moments, 30)
        assert len(lines[1]) <= 30
        column = next(line for line in lines if "^" in line).index("^")
        assert lines[1][column] == "█"
        assert f"peak 2.0 GiB, forward u{at}" in "".join(lines)


def test_a_wrong_config_is_refused_with_its_problems(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimisation": {"stage": 2}}')
    with pytest.raises(ConfigError, match="zero_optimization"):
        question_of(options(config=str(file)))


@pytest.mark.parametrize("trainable", ["lora:r=0", "qlora:r=8", "lora:16"])
def test_a_wrong_trainable_is_a_lesson(trainable):
    with pytest.raises(ConfigError, match="or lora:r=16"):
        question_of(options(trainable=trainable))


def test_the_command_lines_batch_replaces_the_configs(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}')
    asked = question_of(options(config=str(file), micro_batch=None))
    assert (asked.micro_batch, asked.accumulation) == (4, 3)
    asked = question_of(replace(options(config=str(file)), micro_batch=2))
    assert (asked.micro_batch, asked.accumulation) == (2, 3)


def test_a_budget_takes_the_cheapest_row_under_it(tmp_path, capsys):
    target = tmp_path / "out.json"
    text = show(capsys, device_memory=None, memory_budget="30GiB", write=str(target))
    assert "recommended: stage 2, activations recomputed, micro-batch 8" in text
    assert "memory budget 30.0 GiB" in text and "the next cheaper, stage 1, activations recomputed" in text
    config = load_config(target, world=8)
    assert (config.zero_optimization.stage, config.shardledger.activation_checkpointing) == (2, True)
    assert not config.stage_is_open


def test_a_budget_counts_the_host_memory_that_offload_takes(capsys):
    # Parameters, masters and moments away: 13 GiB a rank, 104 GiB a machine of eight.
    text = show(capsys, device_memory=None, memory_budget="3GiB", host_memory="128GiB")
    assert "recommended: stage 3, offload optimizer:cpu+param:cpu, activations recomputed" in text
    with pytest.raises(DoesNotFitError):
        show(capsys, device_memory=None, memory_budget="3GiB", host_memory="96GiB")


@pytest.mark.parametrize(
    ("content", "changes", "lesson"),
    [
        ({"bf16": {"enabled": True}}, {"precision": "fp32"}, "precision is bf16 in .*but fp32 in --precision"),
        ({}, {"precision": "bf16"}, "precision is fp32 in .*neither bf16 nor fp16 is on.*but bf16 in --precision"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": 1}}},
            {"optimizer": "sgd"},
            "AdamW in .*--optimizer says sgd",
        ),
        (
            {"optimizer": {"type": "SGD", "params": {"lr": 1, "momentum": 0.9}}},
            {"optimizer": "sgd"},
            "SGD in .*--optimizer says sgd",
        ),
    ],
)
def test_options_that_contradict_the_config_are_refused_with_both_values(tmp_path, content, changes, lesson):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=lesson):
        question_of(options(config=str(file), **changes))


def test_options_fill_in_what_the_config_leaves_open_and_may_repeat_it(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"fp16": {"enabled": True}}))
    asked = question_of(options(config=str(file), precision="fp16", optimizer="sgd-momentum"))
    assert asked.config["optimizer"]["type"] == "SGD" and asked.config["optimizer"]["params"]["momentum"] == 0.9
    assert asked.config["fp16"]["enabled"]


def test_a_choice_by_unit_is_written_and_shown(tmp_path, capsys):
    target = tmp_path / "out.json"

    class Mixing(Planner):
        def __call__(self, question):
            planned = super().__call__(question)
            row = next(row for row in planned.rows if row.stage == 3 and row.checkpointing)
            mixed = replace(row, unit_stages=(("(root)", 2),), recomputed_units=("blocks.0",))
            return replace(planned, within=lambda budget, host: mixed)

    text = show(capsys, Mixing(), device_memory=None, memory_budget="30GiB", write=str(target))
    assert "stage 3, 1 unit ((root)) at stage 2, activations of 1 unit (blocks.0) recomputed" in text
    assert "3/2    none" in text and "some" in text
    own = load_config(target, world=8).shardledger
    assert (own.unit_stages, own.recomputed_units) == ({"(root)": 2}, ("blocks.0",))
    answer = json.loads(show(capsys, Mixing(), device_memory=None, memory_budget="30GiB", json=True))["recommended"]
    assert (answer["unit_stages"], answer["recomputed_units"]) == ({"(root)": 2}, ["blocks.0"])


def test_a_budget_that_nothing_meets_is_exit_code_3_material(capsys):
    asked = options(device_memory=None, memory_budget="2GiB")
    with pytest.raises(DoesNotFitError, match="512.0 MiB of device memory per rank are missing"):
        plan_model(asked, hardware_of(asked), Planner())
    assert "what would help" in capsys.readouterr().out


def test_the_command_plans_a_model_of_a_size_no_laptop_holds_for_many_ranks(tmp_path):
    from typer.testing import CliRunner

    from shardledger.cli.main import app

    file = tmp_path / "ds.json"
    arguments = ["plan", "--model", "gpt:1m", "--world", "64", "--device-memory", "16MiB", "--seq-len", "32", "--json"]
    result = CliRunner().invoke(app, [*arguments, "--framework", "0", "--write", str(file)])
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert {(row["stage"], row["offload"], row["checkpointing"]) for row in content["stages"]} == {
        (stage, offload, checkpointing)
        for stage in range(4)
        for checkpointing in (False, True)
        for offload in (
            "none",
            "optimizer:cpu",
            "optimizer:nvme",
            "optimizer:cpu+param:cpu",
            "optimizer:nvme+param:nvme",
        )
        if stage == 3 or "param:" not in offload
    }
    for row in content["stages"]:
        assert row["total"] == sum(row[category] for category in CATEGORIES)
    assert content["recommended"]["stage"] == load_config(file, world=64).zero_optimization.stage > 0


def test_what_is_recommended_is_verified_by_real_steps_on_request():
    from typer.testing import CliRunner

    from shardledger.cli.main import app

    arguments = ["plan", "--model", "gpt:1m", "--device-memory", "1GiB", "--seq-len", "16", "--verify"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    table = result.stdout.split("verified on 1 CPU rank")[1]
    error = float(table.split("error of the total ")[1].partition("%")[0])
    assert abs(error) < 1
    for category in (*CATEGORIES, "total"):
        assert f"\n  {category} " in table
    assert "note: framework: 768.0 MiB assumed for CUDA's context and NCCL; --framework says otherwise" in result.stdout


def test_a_model_too_large_to_verify_here_is_a_lesson():
    from shardledger.cli.plan_verify import check_room

    with pytest.raises(ConfigError, match="Verify a smaller model of the same kind"):
        check_room(10**13, 2)
    check_room(1000, 2)
