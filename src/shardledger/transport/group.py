"""Joining the other ranks: from the environment that torchrun, SLURM or MPI set, or an existing process group."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardledger.errors import ConfigError, PeerLostError
from shardledger.transport.gloo import forget_messages
from shardledger.transport.interface import choose_interface
from shardledger.transport.local import SoloMailbox
from shardledger.transport.meeting import meet
from shardledger.transport.native import NativeTransport
from shardledger.transport.peers import PeerTransport
from shardledger.transport.port import Transport

_SOURCES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)

_MACHINES = ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES")

_stores: dict[str, dist.Store] = {}
_joined: dict[str, int] = {}
"""Process groups made so far on each store; counts alike on every rank."""
_engines: dict[str, Any] = {"group": None, "count": 0}
"""Transports made so far on the present process group; counts alike on every rank."""
_made: dict[str, Any] = {"group": None, "users": 0}
"""The process group that ``join`` made, and how many transports use it."""


@dataclass(frozen=True)
class Place:
    """Where this process stands."""

    rank: int
    world: int
    local_rank: int
    source: str
    """What told: ``"process group"``, ``"RANK/WORLD_SIZE"``, …, or ``"alone"``."""


def find_place() -> Place:
    """Rank and world size, without joining anything.

    Raises:
        ConfigError: the environment names a rank but no world size, or no integers.
    """
    if dist.is_available() and dist.is_initialized():
        rank = dist.get_rank()
        return Place(rank, dist.get_world_size(), int(os.environ.get("LOCAL_RANK", rank)), "process group")
    for rank_name, world_name, local_name in _SOURCES:
        if rank_name not in os.environ:
            continue
        if world_name not in os.environ:
            raise ConfigError(f"{rank_name} is set but {world_name} is not: start with torchrun, or set both.")
        try:
            rank, world = int(os.environ[rank_name]), int(os.environ[world_name])
            local = int(os.environ.get(local_name, rank))
        except ValueError as error:
            raise ConfigError(f"{rank_name}, {world_name} and {local_name} must be integers: {error}.") from None
        if not 0 <= rank < world:
            raise ConfigError(f"{rank_name}={rank} is not a rank of {world_name}={world} ranks.")
        return Place(rank, world, local, f"{rank_name}/{world_name}")
    return Place(0, 1, 0, "alone")


def join(
    place: Place, device: torch.device, timeout_s: float, *, may_create: bool = True, wire: str = "gloo"
) -> tuple[Transport, bool]:
    """Connect to the other ranks. Returns the transport and whether ``leave`` is due when it has ended.

    ``wire`` says how ranks on CPUs exchange payloads: ``"auto"``, ``"shared_memory"`` or ``"gloo"``.

    Raises:
        PeerLostError: the other ranks did not come in time.
    """
    if place.world == 1 and place.source != "process group":
        return PeerTransport(SoloMailbox()), False
    if not dist.is_initialized():
        _make_group(place, device, timeout_s, may_create=may_create)
        _made.update(group=dist.group.WORLD, users=0)
    ours = _made["group"] is dist.group.WORLD
    _made["users"] += ours
    try:
        return _transport(place, device, timeout_s, wire), ours
    except BaseException:
        if ours:
            leave()
        raise


def _make_group(place: Place, device: torch.device, timeout_s: float, *, may_create: bool) -> None:
    if not may_create:
        raise ConfigError(
            f"there is no process group, {place.source} says {place.world} ranks, and dist_init_required=False "
            f"forbids to make one: call torch.distributed.init_process_group first, or leave that argument out."
        )
    backend = "nccl" if device.type == "cuda" else "gloo"
    _set_meeting_point(place)
    try:
        store = _fresh_store(place, timeout_s)
        if backend == "gloo":
            where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            choose_interface(store, place.rank, place.world, *where)
        dist.init_process_group(
            backend,
            store=store,
            rank=place.rank,
            world_size=place.world,
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError) as error:
        raise PeerLostError(
            f"rank {place.rank} of {place.world} could not join the others at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within {timeout_s:g} s "
            f"(rank and world size from {place.source}): {error}"
        ) from error


def _transport(place: Place, device: torch.device, timeout_s: float, wire: str) -> Transport:
    if place.world == 1:
        return PeerTransport(SoloMailbox())
    if dist.get_backend() == "gloo" or device.type == "cpu" and "gloo" in str(dist.get_backend()):
        return meet(_number_of_engine(), wire, timeout_s)
    return NativeTransport(None, device)


def _number_of_engine() -> int:
    """Keeps apart the messages of engines that share, or follow each other on, one process group."""
    group = dist.group.WORLD
    if _engines["group"] is not group:
        forget_messages()
        _engines.update(group=group, count=0)
    _engines["count"] += 1
    return int(_engines["count"])


def _set_meeting_point(place: Place) -> None:
    """Ranks of one machine meet there; those of several must be told where.

    Raises:
        ConfigError: they have not been told.
    """
    machines = next((os.environ[name] for name in _MACHINES if os.environ.get(name, "").isdigit()), "1")
    if place.source.startswith("SLURM") and int(machines) > 1 and "MASTER_ADDR" not in os.environ:
        raise ConfigError(
            f"{place.world} ranks on {machines} machines, and MASTER_ADDR does not say where rank 0 is. In the batch "
            f'script, before srun: export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
        )
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")


def _fresh_store(place: Place, timeout_s: float) -> dist.Store:
    """A key space that no earlier process group has used.

    The store of a launcher outlives the groups made on it, and a group that finds the addresses of a dead one under its
    own keys connects to nobody.
    """
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    if address not in _stores:
        rendezvous = dist.rendezvous(
            "env://", rank=place.rank, world_size=place.world, timeout=timedelta(seconds=timeout_s)
        )
        store, _, _ = next(rendezvous)
        _stores[address] = store
    _joined[address] = _joined.get(address, 0) + 1
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"shardledger/{restart}/{_joined[address]}", _stores[address])


def leave() -> None:
    """A transport has ended; the last one ends the process group, if ``join`` made it."""
    _made["users"] -= 1
    if _made["users"] <= 0 and dist.is_initialized() and _made["group"] is dist.group.WORLD:
        dist.destroy_process_group()
        forget_messages()
        _engines.update(group=None, count=0)
        _made.update(group=None, users=0)
