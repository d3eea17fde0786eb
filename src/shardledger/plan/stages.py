"""The same question asked at every stage."""

from __future__ import annotations

from shardledger.config import Config
from shardledger.plan.build import build_plan
from shardledger.plan.plan import Plan
from shardledger.plan.spec import ModelSpec


def at_every_stage(config: Config, model: ModelSpec, *, world: int) -> list[Plan]:
    """Plans of stages 0 to 3 that differ in nothing else; the configuration's own stage with its exceptions for units."""
    own = config.zero_optimization.stage
    return [build_plan(config if stage == own else at_stage(config, stage), model, world=world) for stage in range(4)]


def at_stage(config: Config, stage: int) -> Config:
    """The configuration with another ``zero_optimization.stage``, the same for all units."""
    zero = config.zero_optimization.model_copy(update={"stage": stage})
    own = config.shardledger.model_copy(update={"unit_stages": None})
    return config.model_copy(update={"zero_optimization": zero, "shardledger": own})
