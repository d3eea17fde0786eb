"""What ranks of several machines agree on before they train: the network, where rank 0 is, the run's folder."""

from __future__ import annotations

import socket

import psutil
import pytest

from shardledger.cli.resume import agree
from shardledger.errors import CheckpointError, ConfigError
from shardledger.telemetry import RunFolder
from shardledger.transport import interface
from shardledger.transport.group import Place, _set_meeting_point
from shardledger.transport.interface import VARIABLE, choose_interface


class Board(dict):
    def set(self, key, value):
        self[key] = value.encode()

    def get(self, key):
        return self[key]


LOOPBACK = next(
    name for name, addresses in psutil.net_if_addrs().items() if any(item.address == "127.0.0.1" for item in addresses)
)


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.setenv(VARIABLE, "to be removed again")
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(interface, "interface_of", {"127.0.1.1": LOOPBACK, "10.0.0.1": "eth7"}.get)
    return monkeypatch


def test_ranks_of_one_machine_use_its_loopback_whatever_the_machine_is_called():
    assert interface.interface_of(interface.address_towards("127.0.0.1", 1)) == LOOPBACK
    assert interface.interface_of("192.0.2.77") is None
    assert interface.address_towards("no-such-host.invalid", 1) == ""


def test_rank_zero_whose_own_name_is_loopback_takes_the_interface_towards_another_rank(environment):
    import os

    routes = {"node-0": "127.0.1.1", "10.0.0.2": "10.0.0.1"}
    environment.setattr(interface, "address_towards", lambda host, port: routes[host])
    choose_interface(Board({"address/1": b"10.0.0.2"}), 0, 2, "node-0", 1)
    assert os.environ[VARIABLE] == "eth7"
    environment.delenv(VARIABLE)
    choose_interface(Board({"address/1": b"127.0.0.1"}), 0, 2, "node-0", 1)
    assert os.environ[VARIABLE] == LOOPBACK
    environment.setenv(VARIABLE, "mine")
    choose_interface(Board({"address/1": b"10.0.0.2"}), 0, 2, "node-0", 1)
    assert os.environ[VARIABLE] == "mine"


def test_slurm_ranks_on_two_machines_are_told_that_master_addr_is_missing(monkeypatch):
    place = Place(1, 2, 0, "SLURM_PROCID/SLURM_NTASKS")
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "to be removed again")
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_NNODES", "2")
    with pytest.raises(ConfigError, match=r"(?s)2 ranks on 2 machines.*export MASTER_ADDR=.*scontrol show hostnames"):
        _set_meeting_point(place)
    monkeypatch.setenv("MASTER_ADDR", socket.gethostname())
    _set_meeting_point(place)


class Engine:
    """Rank 1 of two; what rank 0 sends is known."""

    def __init__(self, *theirs):
        self.theirs = list(theirs)

    def gather_scalars(self, values):
        return [[*map(float, self.theirs.pop(0))], values]


def test_the_runs_folder_is_the_one_that_rank_zero_names(tmp_path):
    name = b"runs/train-20260101-120000"
    engine = Engine([len(name), 0], name)
    assert str(agree(engine, RunFolder("runs/train-20260101-115959-2"), None).path) == name.decode()


def test_a_checkpoint_that_only_some_ranks_see_is_an_error_before_anything_is_loaded(tmp_path):
    with pytest.raises(CheckpointError, match=r"(?s)ranks \[1\] see no checkpoint.*All machines must see one folder"):
        agree(Engine([4, 1]), RunFolder("runs"), None)
