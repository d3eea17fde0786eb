"""The command as a user runs it: real ranks, and what is left of them when one dies, errs, or the command is stopped."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
END_WITHIN_S = 15
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID")

USER_MODULE = """
import os
import re
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(256, 8)
        self.head = nn.Linear(8, 256)
        self.calls = 0

    def forward(self, tokens, targets):
        self.calls += 1
        if os.environ.get("FAIL_ON") == os.environ.get("RANK") and self.calls > 30:
            raise ArithmeticError("my own trouble")
        loss = nn.functional.cross_entropy(self.head(self.table(tokens)).flatten(0, 1), targets.flatten())
        return loss, None

def build():
    if os.environ.get("REFUSE_ON") == os.environ.get("RANK", "none"):
        from shardledger.errors import ConfigError
        raise ConfigError("this model refuses")
    return Model()
"""


def environment(**extra: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in LAUNCHER_VARIABLES}
    path = os.pathsep.join(filter(None, [str(SOURCE), kept.get("PYTHONPATH")]))
    return {**kept, "PYTHONPATH": path, **extra}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "shardledger", *arguments]


def run(folder: Path, *arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=folder, env=environment(**extra), capture_output=True, text=True, timeout=120
    )


@pytest.fixture
def user_folder(tmp_path):
    (tmp_path / "my_model.py").write_text(USER_MODULE)
    (tmp_path / "ds.json").write_text(json.dumps({"train_micro_batch_size_per_gpu": 2}))
    (tmp_path / "text.txt").write_text("some words and more words\n" * 200)
    return tmp_path


TRAIN = ("train", "--config", "ds.json", "--model", "my_model:build", "--data", "text.txt", "--seq-len", "16")


class Running:
    """A demo of two ranks in the middle of its training."""

    def __init__(self, folder: Path) -> None:
        self.errors = (folder / "errors").open("w+")
        self.process = subprocess.Popen(
            command("demo", "--device", "cpu", "--steps", "100000", "--out", str(folder / "run")),
            cwd=folder,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )
        for line in self.process.stdout:
            if line.startswith("step=3 "):
                break
        self.ranks = psutil.Process(self.process.pid).children(recursive=True)

    def rank(self, number: int) -> psutil.Process:
        return next(process for process in self.ranks if process.environ().get("RANK") == str(number))

    def ended(self) -> tuple[int, str]:
        """Exit code and standard error, once the command and every rank are gone; fails when that takes too long."""
        deadline = time.monotonic() + END_WITHIN_S
        self.process.stdout.read()  # as a terminal would: a full pipe must not hold the ranks up
        code = self.process.wait(END_WITHIN_S)
        left = [rank for rank in self.ranks if not gone(rank, deadline)]
        self.errors.seek(0)
        assert time.monotonic() < deadline and left == []
        return code, self.errors.read()

    def clean(self) -> None:
        for process in [*self.ranks, self.process]:
            if process.is_running() if isinstance(process, psutil.Process) else process.poll() is None:
                process.kill()
        self.process.wait(10)
        self.process.stdout.close()
        self.errors.close()


def gone(process: psutil.Process, deadline: float) -> bool:
    while time.monotonic() < deadline:
        try:
            if process.status() == psutil.STATUS_ZOMBIE:  # an orphan nobody has collected yet
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def running(tmp_path):
    run = Running(tmp_path)
    yield run
    run.clean()


def test_a_killed_rank_ends_the_run_and_is_named(running):
    victim = running.rank(1)
    victim.kill()
    code, errors = running.ended()
    assert code == 1
    assert f"rank 1 (pid {victim.pid}) was killed by SIGKILL; the other ranks were stopped" in errors
    assert "Traceback" not in errors and len(errors.splitlines()) == 1


@pytest.mark.parametrize(
    ("number", "code", "message"),
    [(signal.SIGINT, 130, "stopped by Ctrl-C"), (signal.SIGTERM, 143, "stopped by SIGTERM")],
)
def test_a_stopped_command_leaves_no_rank(running, number, code, message):
    running.process.send_signal(number)
    found, errors = running.ended()
    assert found == code
    assert message in errors and "Traceback" not in errors


def test_a_killed_command_leaves_no_rank(running):
    running.process.kill()
    assert running.ended()[0] == -signal.SIGKILL


def test_a_ranks_own_error_is_shown_once_with_its_traceback(user_folder):
    result = run(user_folder, *TRAIN, "--nproc", "2", "--steps", "50", FAIL_ON="1")
    assert result.returncode == 1
    assert "rank 1 (pid" in result.stderr
    assert result.stderr.count("ArithmeticError: my own trouble") == 1
    assert "my_model.py" in result.stderr


def test_a_config_error_in_a_rank_keeps_its_exit_code(user_folder):
    result = run(user_folder, *TRAIN, "--nproc", "2", REFUSE_ON="1")
    assert result.returncode == 2
    assert result.stderr.count("this model refuses") == 1
    assert "Traceback" not in result.stderr


def test_a_users_model_config_and_text_train(user_folder):
    result = run(user_folder, *TRAIN, "--nproc", "2", "--steps", "6", "--eval-every", "3", "--out", "out")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    lines = [json.loads(line) for line in (user_folder / "out/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "eval"] == [0, 3, 6]
    assert len(lines[-2]["memory_peak_bytes"]) == 2
    assert json.loads((user_folder / "out/ledger.json").read_text())["world"] == 2
    again = run(user_folder, *TRAIN, "--out", "out")
    assert again.returncode == 2
    assert "never overwritten" in again.stderr


def test_under_another_launcher_the_command_is_one_rank(user_folder):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*launcher, "-m", "shardledger", *TRAIN, "--steps", "2", "--out", "out"],
        cwd=user_folder,
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "2 ranks" in result.stdout
    assert result.stdout.count("run folder: out") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--config", "missing.json"), "missing.json"),
        (("--config", '{"zero_optimisation": {"stage": 2}}'), "zero_optimization"),
        (("--model", "gpt:12m"), "25m"),
        (("--model", "my_model:bild"), "Did you mean my_model:build"),
        (("--data", "nothing.txt"), "nothing.txt does not exist"),
        (("--seq-len", "4000"), "5200 bytes.*8002"),
    ],
)
def test_a_mistake_is_found_before_any_rank_exists(user_folder, arguments, message):
    result = run(user_folder, *TRAIN, "--nproc", "2", *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert re.search(message, result.stderr), result.stderr
    assert "Traceback" not in result.stderr
    assert not (user_folder / "runs").exists()


def test_env_is_text_to_paste(tmp_path):
    result = run(tmp_path, "env", NCCL_DEBUG="INFO", SHARDLEDGER_TOKEN="secret")
    assert result.returncode == 0
    for name in ("python:", "torch:", "shardledger:", "platform:", "cores:", "memory:", "cuda devices:", "gloo:"):
        assert f"\n{name}" in "\n" + result.stdout
    assert "NCCL_DEBUG=INFO" in result.stdout
    assert "secret" not in result.stdout


def test_help_imports_neither_torch_nor_rich(tmp_path):
    code = (
        "import sys\nfrom shardledger.cli.main import run\n"
        "try:\n    run(['demo', '--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "print([name for name in ('torch', 'rich') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert result.stdout.splitlines()[-1] == "[]", result.stdout + result.stderr


def test_the_environment_is_the_same_after_a_launch():
    """What stays behind makes the next command of this process, or another launcher below it, take itself for a rank."""
    from shardledger.cli.launch import launch

    before = dict(os.environ)
    launch(["env"], 1, {"SHARDLEDGER_TOLD": "something"})
    assert dict(os.environ) == before
