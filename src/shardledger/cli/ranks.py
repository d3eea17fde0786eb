"""Is this process a rank of a run that something has started already? Told from the environment alone."""

from __future__ import annotations

from collections.abc import Mapping

LAUNCHED_BY = "SHARDLEDGER_LAUNCHED_BY"  # process id of our own launcher, in the environment of its ranks
RUN_FOLDER = "SHARDLEDGER_RUN_FOLDER"  # the folder our own launcher has chosen, so that its ranks agree on the name

# In the order in which the transport looks: torchrun's variables win over those of a SLURM job it runs in.
_LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)
_FIRST_SPECIAL_STEP = 0xFFFFFF00  # SLURM numbers the steps that are not srun's (batch script, shell) from the top


def rank_of(environment: Mapping[str, str]) -> int | None:
    """This process's rank, or None when no launcher has made it one."""
    names = _launcher(environment)
    return None if names is None else int(environment[names[0]])


def world_of(environment: Mapping[str, str]) -> tuple[int, str]:
    """Number of ranks and the variable that says so; (1, "a single process") without a launcher."""
    names = _launcher(environment)
    if names is None:
        return 1, "a single process"
    return int(environment.get(names[1], "1")), names[1]


def _launcher(environment: Mapping[str, str]) -> tuple[str, str] | None:
    for names in _LAUNCHERS:
        if environment.get(names[0], "").isdigit() and not (names[0] == "SLURM_PROCID" and _is_batch(environment)):
            return names
    return None


def _is_batch(environment: Mapping[str, str]) -> bool:
    """Whether this is a SLURM job's batch script, which looks like rank 0 of its job but has no peers."""
    step = environment.get("SLURM_STEP_ID", "")
    if step.isdigit():
        return int(step) >= _FIRST_SPECIAL_STEP
    return environment.get("ENVIRONMENT") == "BATCH"
