"""One rank's run from start to end: build, train, save, report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shardledger
from shardledger.cli.decide import decided_config
from shardledger.cli.live_count import LiveCount
from shardledger.cli.loop import TrainingLoop
from shardledger.cli.predicted import predict_ledgers
from shardledger.cli.resume import agree
from shardledger.cli.run_checkpoints import RunCheckpoints
from shardledger.cli.settings import RunSettings
from shardledger.cli.stop import StopRequest
from shardledger.cli.trace import Trace
from shardledger.telemetry import CATEGORIES, JsonLinesSink, RunFolder, SinkGroup, console_sink, print_ledger
from shardledger.workload import (
    GPT,
    BatchSampler,
    BatchShape,
    GPTConfig,
    TextData,
    describe_model,
    generate,
    load_model,
    read_corpus,
    save_final,
)

if TYPE_CHECKING:
    from torch import Tensor

PROMPT_BYTES = 24
SAMPLE_BYTES = 240
SAMPLE_BYTES_LARGE = 64  # every byte costs one pass through the model, on one CPU
LARGE_PARAMETERS = 50_000_000
Ledger = dict[str, dict[str, int | None]]


def train(settings: RunSettings, folder: RunFolder, device: str, source: tuple[Path, str | None] | None = None) -> None:
    """Train as ``settings`` say and write ``folder``. Every rank calls this; rank 0 prints and writes.

    ``source``: folder and tag of the checkpoint to go on from.

    Raises:
        ShardledgerError: whatever the engine, the model or the data complain about.
    """
    import torch

    text = TextData(read_corpus(settings.options.data), settings.seq_len)
    torch.manual_seed(settings.options.seed)
    model = load_model(settings.model, settings.seq_len)
    description = describe_model(model, settings.model, settings.seq_len)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    config = decided_config(settings, device)
    count = LiveCount(model, device)
    with count.initializing():
        engine, *_ = shardledger.initialize(model=model, config=config, device=device)
    trace = Trace(engine, settings.options.trace)
    count.attach(engine)
    folder = agree(engine, folder, source)
    leads = engine.rank == 0
    if leads:
        folder.create(reuse=settings.options.resume is not None)
        folder.write_config(engine.config.to_dict())
        _print_header(settings, engine, text, parameters)
    sampler = BatchSampler(text, _batch_shape(engine), rank=engine.rank, seed=settings.options.seed)
    engine.training_dataloader = sampler  # its position is saved and restored with the engine
    if leads and settings.options.resume is not None:
        folder.forget_after(_step_of(source))
    sinks = [JsonLinesSink(folder.metrics), console_sink(settings.options.steps)] if leads else []
    with SinkGroup(sinks) as group, StopRequest() as stop:
        checkpoints = RunCheckpoints(engine, folder, group, count.saving)
        begin = checkpoints.load(source, sampler) if source is not None else 0
        loop = TrainingLoop(engine, text, sampler, group, count)
        with trace:
            first, last = loop.run(
                settings.options.steps, settings.eval_every, begin=begin, checkpoints=checkpoints, stop=stop
            )
    ledgers = gather_ledgers(engine, count.highest, count.phases)
    stage, config = engine.zero_optimization_stage(), engine.config
    state = engine.state_dict()
    engine.destroy()
    if not leads:
        return
    save_final(folder.final, state, description)
    unknown = predict_ledgers(settings, config, device, ledgers)
    folder.write_ledger(stage, ledgers)
    if "gpt" in description:
        _print_sample(state, GPTConfig(**description["gpt"]), text, settings.options.seed)
    print()
    print_ledger(ledgers, stage)
    if unknown:
        print(f"note: only states are predicted: {unknown}")
    print(f"validation loss {first:.4f} -> {last:.4f}")
    print(f"run folder: {folder.path}")


def gather_ledgers(
    engine: Any, counted: Mapping[str, int] | None = None, phases: Mapping[str, int] | None = None
) -> list[Ledger]:
    """Every rank's ledger, on every rank. Collective.

    ``counted`` are the live bytes of this rank's highest moment, ``phases`` those of each phase; with them the measured
    side is that moment, and what the system says of the process stands beside it.
    """
    own: dict[str, Mapping[str, int | None]] = dict(engine.ledger())
    if counted is not None:
        process = {"before_the_model": own["measured"]["framework"], "peak": own["measured"]["total"]}
        own |= {"measured": counted, "process": process, "phases": phases or {}}
    # The engine exchanges numbers, not dicts: the same keys in the same order on all ranks, NaN for what is not known.
    keys = [(side, key) for side, values in own.items() for key in _keys(side, values)]
    values = [own[side].get(key) for side, key in keys]
    gathered = engine.gather_scalars([math.nan if value is None else float(value) for value in values])
    ledgers: list[Ledger] = []
    for row in gathered:
        ledger: Ledger = {side: {} for side in own}
        for (side, key), value in zip(keys, row, strict=True):
            ledger[side][key] = None if math.isnan(value) else int(value)
        ledgers.append(ledger)
    return ledgers


def _keys(side: str, values: Mapping[str, Any]) -> Sequence[str]:
    return CATEGORIES if side in ("predicted", "measured") else list(values)


def _step_of(source: tuple[Path, str | None] | None) -> int:
    """Step of the checkpoint that is about to be loaded, for the records that stay; 0 without one."""
    if source is None:
        return 0
    from shardledger.checkpoint.folder import find, read_manifest

    path = find(*source)
    assert path is not None
    manifest = read_manifest(path)
    return manifest.counters.get("global_steps", 0) + manifest.counters.get("skipped_steps", 0)


def _batch_shape(engine: Any) -> BatchShape:
    config = engine.config
    return BatchShape(
        micro=config.train_micro_batch_size_per_gpu,
        accumulation=config.gradient_accumulation_steps,
        world=engine.world,
    )


def _print_header(settings: RunSettings, engine: Any, text: TextData, parameters: int) -> None:
    import torch

    config = engine.config
    corpus = text.corpus
    _print_lines(
        [
            f"model {settings.model}: {parameters:,} parameters",
            f"text: {corpus.size:,} bytes in {corpus.files} file{'s' if corpus.files != 1 else ''} of {corpus.source}",
            f"engine: stage {engine.zero_optimization_stage()}, {engine.world} rank{'s' if engine.world != 1 else ''}, "
            f"{config.precision}, {engine.device.type}, {torch.get_num_threads()} thread(s) a rank",
            f"batch: {config.train_batch_size} sequences of {settings.seq_len} bytes "
            f"({config.train_micro_batch_size_per_gpu} x accumulation {config.gradient_accumulation_steps} "
            f"x {engine.world} ranks)",
            *(f"note: {line}" for line in settings.notes),
            *(f"warning: {line}" for line in config.warnings),
            *(f"no effect here: {line}" for line in config.no_effect),
        ]
    )


def _print_lines(lines: Sequence[str]) -> None:
    for line in lines:
        print(line, flush=True)


def _print_sample(state: Mapping[str, Tensor], config: GPTConfig, text: TextData, seed: int) -> None:
    """Continue a piece of held-out text with the trained weights in a plain module: no engine, no other rank."""
    import torch

    model = GPT(config)
    model.load_state_dict(dict(state))
    size = sum(parameter.numel() for parameter in model.parameters())
    prompt_tokens, _ = text.validation(torch.tensor([0]))
    prompt = bytes(prompt_tokens[0, :PROMPT_BYTES].tolist())
    count = SAMPLE_BYTES if size < LARGE_PARAMETERS else SAMPLE_BYTES_LARGE
    sample = generate(model, prompt, count, seed=seed)
    print(f"\nsample (the first {len(prompt)} bytes are held-out text, the rest is the model's):")
    print("  " + printable(sample).replace("\n", "\n  "))


def printable(text: bytes) -> str:
    """Decoded text in which nothing can steer a terminal: bytes that are not text become the replacement character."""
    decoded = text.decode("utf-8", errors="replace")
    return "".join(character if character.isprintable() or character == "\n" else "\ufffd" for character in decoded)
