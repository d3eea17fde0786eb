"""From checked settings to running ranks: run in this process, or launch and wait."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from shardledger.cli.exits import UsageFailure
from shardledger.cli.ranks import LAUNCHED_BY, RUN_FOLDER, rank_of
from shardledger.cli.settings import RunSettings
from shardledger.errors import ConfigError, ShardledgerError


def start(settings: RunSettings, arguments: Sequence[str]) -> None:
    """Train. In a rank, or with one rank, here; otherwise in ``settings.world`` processes started with ``arguments``.

    Raises:
        UsageFailure, ConfigError: something is wrong with the arguments; nothing was started.
        RunFailure: a rank failed.
    """
    from shardledger.cli.resume import check_folder, run_folder_of, source_of
    from shardledger.telemetry import RunFolder

    rank = rank_of(os.environ)
    resume = settings.options.resume
    given = run_folder_of(resume, settings.options.out) or os.environ.get(RUN_FOLDER)
    folder = RunFolder(given) if given else RunFolder.fresh("runs", settings.name)
    source = source_of(resume, folder)
    if rank is None or rank == 0:
        check_folder(resume, folder, source)
    if LAUNCHED_BY not in os.environ:  # our own launcher has checked already, so that a mistake is reported once
        check_arguments(settings)
    device = choose_device(settings)
    if rank is None:
        os.environ.pop("SLURM_PROCID", None)  # a batch script's: nothing further down may take it for a rank
    if rank is None and settings.world > 1:
        from shardledger.cli.launch import launch

        launch(arguments, settings.world, {RUN_FOLDER: str(folder.path)})
        return
    if rank is not None:
        from shardledger.cli.guard import guard_rank

        guard_rank()
    from shardledger.cli.training import train

    train(settings, folder, device, source)


def check_arguments(settings: RunSettings) -> None:
    """Find the model and read the data, so that a mistake is reported before any rank exists.

    Raises:
        UsageFailure, ConfigError: there is no such model, or the data is missing or too short.
    """
    from shardledger.cli.trace import check_trace
    from shardledger.workload import TextData, find_model, read_corpus

    check_trace(settings.options.trace)
    find_model(settings.model)
    try:
        TextData(read_corpus(settings.options.data), settings.seq_len)
    except ShardledgerError as error:
        raise UsageFailure(str(error)) from error


def choose_device(settings: RunSettings) -> str:
    """ "cpu" or "cuda": the same answer in the command and in its ranks."""
    import torch

    wanted = settings.options.device
    if wanted == "cpu":
        return "cpu"
    local = int(os.environ.get("LOCAL_WORLD_SIZE", settings.world if rank_of(os.environ) is None else 1))
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices >= local:
        return "cuda"
    if wanted == "cuda":
        raise ConfigError(
            f"--device cuda needs one CUDA device per rank: {local} for the ranks of this machine, but PyTorch "
            f"{torch.__version__} sees {devices}; use --device cpu or a smaller --nproc."
        )
    if devices and rank_of(os.environ) is None:
        hint = f"{devices} CUDA devices for {local} ranks: training on CPU; --nproc {devices} uses CUDA"
        print(hint, file=sys.stderr)
    return "cpu"
