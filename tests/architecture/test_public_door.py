"""What `import shardledger` offers, and what it costs."""

import resource
import subprocess
import sys

import shardledger

#: The public names. Adding one is a decision, removing one breaks somebody.
EXPECTED = [
    "Config",
    "ConfigError",
    "Engine",
    "EngineStateError",
    "GatheredParameters",
    "PeerLostError",
    "PlanError",
    "RanksDisagreeError",
    "ReleasedParameterError",
    "ShardledgerError",
    "TransportError",
    "initialize",
    "load_config",
    "plan",
]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_the_public_names_are_frozen():
    assert sorted(shardledger.__all__) == sorted(EXPECTED)


def test_every_public_name_resolves_and_is_listed():
    missing = [name for name in shardledger.__all__ if not hasattr(shardledger, name)]
    assert missing == []
    assert sorted(set(shardledger.__all__) - set(dir(shardledger))) == []


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(shardledger, "no_such_name")


def test_importing_the_door_does_not_import_torch():
    found = run("-c", "import sys, shardledger; print('torch' in sys.modules)")
    assert found.stdout.strip() == "False", found.stderr


def test_pure_rooms_do_not_import_torch():
    for room in ("errors", "config", "plan", "layout", "ledger"):
        found = run("-c", f"import sys, shardledger.{room}; print('torch' in sys.modules)")
        assert found.stdout.strip() == "False", f"{room}: {found.stdout}{found.stderr}"


def test_help_imports_no_torch():
    found = run("-X", "importtime", "-m", "shardledger", "--help")
    assert found.returncode == 0, found.stderr
    assert "demo" in found.stdout
    imported = [line.rpartition("|")[2].strip() for line in found.stderr.splitlines()]
    assert [name for name in imported if name.partition(".")[0] in {"torch", "numpy"}] == []


def test_help_needs_less_than_half_a_second_of_processor_time():
    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run("-m", "shardledger", "--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(spent) < 0.5
