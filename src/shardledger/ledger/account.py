"""The account of states alone: what parameters, gradients, masters and optimizer cost a rank, from six numbers.

Two accounts stand side by side. The article's (arXiv 1910.02054, section 3.1 and Table 1) counts 2 + 2 + 4 + 8 bytes a
parameter for Adam in mixed precision and divides what a stage shards. The engine's counts what shardledger keeps; see
``ledger.predict.state_bytes``, whose result it approximates without a model: no padding, no step counters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardledger.ledger.traffic import Wire, sent_bytes

PRECISION_BYTES: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes per weight and gradient."""

OPTIMIZER_BYTES: Mapping[str, int] = {
    "adam": 8,
    "adamw": 8,
    "nadam": 8,
    "radam": 8,
    "adamax": 8,
    "adadelta": 8,
    "rprop": 8,
    "sgd": 0,
    "sgd-momentum": 4,
    "adagrad": 4,
    "rmsprop": 4,
    "asgd": 4,
}
"""fp32 bytes of moments per trained parameter. ``sgd-momentum`` is torch.optim.SGD with momentum, the others are classes
of torch.optim by name, with their default options."""

OFFLOADS = ("none", "optimizer:cpu", "optimizer:nvme")
"""Choices of offload at stages 0 to 2."""
OFFLOADS_STAGE_3 = (*OFFLOADS, "optimizer:cpu+param:cpu", "optimizer:nvme+param:nvme")
"""Choices at stage 3, where parameters are sharded and can sleep elsewhere too."""


@dataclass(frozen=True, kw_only=True)
class States:
    """What is asked about."""

    parameters: int
    world: int
    precision: str = "bf16"
    optimizer: str = "adamw"
    master: bool = True
    """Whether 16-bit training keeps fp32 masters in the article's account; the engine always does."""
    frozen: float = 0.0
    """Share of the parameters that are not trained."""
    accumulation: int = 1
    """Micro-batches per optimizer step."""

    @property
    def trained(self) -> int:
        """Parameters with gradients."""
        return self.parameters - round(self.parameters * self.frozen)

    @property
    def per_parameter(self) -> dict[str, int]:
        """Bytes per trained parameter by category; they add up to 16 for Adam in mixed precision."""
        width = PRECISION_BYTES[self.precision]
        return {
            "params": width,
            "grads": width,
            "master": 4 if self.master and width == 2 else 0,
            "optimizer": OPTIMIZER_BYTES[self.optimizer],
        }


@dataclass(frozen=True, kw_only=True)
class StateAccount:
    """Bytes of one rank at one stage under one choice of offload; ``params`` to ``optimizer`` are on the device."""

    stage: int
    offload: str
    params: int
    grads: int
    master: int
    optimizer: int
    host_bytes: int
    disk_bytes: int
    engine: Mapping[str, int]
    """What this engine keeps on the device, by the same four categories."""
    sent_bytes_per_step: int

    @property
    def total(self) -> int:
        """The article's account of the device."""
        return self.params + self.grads + self.master + self.optimizer

    @property
    def engine_total(self) -> int:
        """What this engine keeps on the device."""
        return sum(self.engine.values())


def state_accounts(states: States) -> tuple[StateAccount, ...]:
    """Every stage with every choice of offload, in that order."""
    return tuple(
        state_account(states, stage, offload)
        for stage in range(4)
        for offload in (OFFLOADS_STAGE_3 if stage == 3 else OFFLOADS)
    )


def state_account(states: States, stage: int, offload: str = "none") -> StateAccount:
    """One stage with one choice of offload, by the article and by the engine.

    Offload of the optimizer takes masters, moments and the gradients they are stepped with off the device
    (arXiv 2101.06840); where gradients are not sharded (stages 0 and 1) each rank's own stay on it. Offload of
    parameters takes the shards at stage 3; what is gathered for computing is not state and not in this account.
    """
    article, engine = _article(states, stage), _engine(states, stage)
    moved = 0
    if offload != "none":
        gone = ["master", "optimizer"] + (["grads"] if stage >= 2 else []) + (["params"] if "param:" in offload else [])
        moved = sum(article[c] for c in gone)
        if stage < 2:
            moved += article["grads"] // states.world if stage == 1 else article["grads"]  # the summed ones, copied
        for category in gone:
            article[category] = engine[category] = 0
        if stage == 3 and "param:" not in offload:
            engine["params"] = article["params"]  # with the masters away, the shards must rest on the device themselves
        if stage == 1:
            engine["grads"] = states.trained * PRECISION_BYTES[states.precision]
    width = PRECISION_BYTES[states.precision]
    return StateAccount(
        stage=stage,
        offload=offload,
        host_bytes=moved if ":cpu" in offload else 0,
        disk_bytes=moved if ":nvme" in offload else 0,
        engine=engine,
        sent_bytes_per_step=sent_bytes(
            stage,
            states.world,
            Wire(
                trained=states.trained,
                frozen=states.parameters - states.trained,
                weight_bytes=width,
                gradient_bytes=width,
                accumulation=states.accumulation,
            ),
        ),
        **article,
    )


def gathered_bytes(states: States) -> int:
    """About the bytes of one layer's weights and gradients, which stage 3 gathers to compute with it.

    A GPT has 12 h² parameters in each of, as is usual, h/128 layers: 213 M for 7 B, where Llama has 202 M. A plan of a
    real model knows its units and asks nothing of this.
    """
    width: float = (128 * states.parameters / 12) ** (1 / 3)
    return 2 * min(states.parameters, round(12 * width**2)) * PRECISION_BYTES[states.precision]


def _article(states: States, stage: int) -> dict[str, int]:
    each, trained = states.per_parameter, states.trained
    return {
        "params": _share(states.parameters * each["params"], states.world, stage >= 3),
        "grads": _share(trained * each["grads"], states.world, stage >= 2),
        "master": _share(trained * each["master"], states.world, stage >= 1),
        "optimizer": _share(trained * each["optimizer"], states.world, stage >= 1),
    }


def _engine(states: States, stage: int) -> dict[str, int]:
    """Gradients are summed in fp32, and stage 3 casts the masters while it gathers instead of keeping 16-bit shards."""
    width, trained, world = PRECISION_BYTES[states.precision], states.trained, states.world
    half = width == 2
    still = _share((states.parameters - trained) * width, world, stage >= 3)
    weights = 0 if half and stage == 3 else _share(trained * width, world, stage >= 3)
    if half and stage == 1 and states.accumulation == 1:
        grads = 2 * trained + _share(4 * trained, world, True)  # 16-bit as they arrive, fp32 where they are summed
    else:
        grads = _share(4 * trained, world, stage >= 2)
    return {
        "params": still + weights,
        "grads": grads,
        "master": _share(4 * trained, world, stage >= 1) if half else 0,
        "optimizer": _share(OPTIMIZER_BYTES[states.optimizer] * trained, world, stage >= 1),
    }


def _share(count: int, world: int, sharded: bool) -> int:
    return -(-count // world) if sharded else count
