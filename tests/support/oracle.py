"""The reference: one process, the whole global batch, plain torch. No buckets, no overlap, no shards.

Samples are dealt out rank-major: rank r's micro-batch m is chunk r * accumulation + m of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

# Results depend on the number of threads, and ranks run with one.
torch.set_num_threads(1)

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@dataclass
class Reference:
    """What the one process arrived at: final weights, and per step the mean loss and the norm before clipping."""

    weights: dict[str, Tensor]
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def micro_batches(batch: Sequence[Tensor], rank: int, world: int, accumulation: int) -> list[tuple[Tensor, ...]]:
    """This rank's micro-batches of the global batch."""
    chunks = list(zip(*(part.chunk(world * accumulation) for part in batch), strict=True))
    if len(chunks) != world * accumulation or len({len(chunk[0]) for chunk in chunks}) != 1:
        raise ValueError(f"{len(batch[0])} samples do not split into {world} x {accumulation} equal micro-batches")
    return chunks[rank * accumulation : (rank + 1) * accumulation]


def make_optimizer(name: str, **options: object) -> MakeOptimizer:
    """A torch.optim class by name, with its options."""
    return lambda parameters: getattr(torch.optim, name)(parameters, **options)


def reference(
    model: nn.Module,
    batch: Sequence[Tensor],
    optimizer: MakeOptimizer,
    steps: int = 5,
    pieces: int = 1,
    clip: float = 0.0,
) -> Reference:
    """Train `model` in fp32 on the same global batch for `steps` steps, taken in `pieces` equal micro-batches."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    optim = optimizer(trainable)
    result = Reference({})
    for _ in range(steps):
        optim.zero_grad(set_to_none=True)
        losses = [model(*micro) for micro in micro_batches(batch, 0, 1, pieces)]
        (torch.stack(losses).sum() / pieces).backward()
        norm = torch.nn.utils.clip_grad_norm_(trainable, clip if clip else float("inf"))
        optim.step()
        result.losses.append(float(torch.stack(losses).mean().detach()))
        result.norms.append(float(norm))
    result.weights = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return result


def reference_bf16(
    model: nn.Module, batch: Sequence[Tensor], optimizer: MakeOptimizer, steps: int = 5, pieces: int = 1
) -> Reference:
    """bf16 compute, gradients summed in fp32, fp32 masters: the naive loop that casts the masters before each step."""
    masters = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    parameters = dict(model.named_parameters())
    for p in parameters.values():
        p.data = p.data.to(torch.bfloat16)
    optim = optimizer([masters[name].requires_grad_() for name, p in parameters.items() if p.requires_grad])
    result = Reference({})
    for _ in range(steps):
        sums: dict[str, Tensor] = {}
        losses = []
        for micro in micro_batches([_to_bf16(part) for part in batch], 0, 1, pieces):
            model.zero_grad(set_to_none=True)
            loss = model(*micro)
            loss.backward()
            losses.append(float(loss.detach()))
            for name, p in parameters.items():
                if p.grad is not None:
                    sums[name] = sums.get(name, torch.zeros_like(masters[name])) + p.grad.float() / pieces
        for name, master in masters.items():
            master.grad = sums.get(name)
        optim.step()
        for name, p in parameters.items():
            p.data.copy_(masters[name].detach())
        result.losses.append(sum(losses) / pieces)
        result.norms.append(float(torch.stack([g.norm() for g in sums.values()]).norm()))
    result.weights = {name: master.detach().clone() for name, master in masters.items()}
    return result


def _to_bf16(part: Tensor) -> Tensor:
    return part.to(torch.bfloat16) if part.is_floating_point() else part


def tree_sum(terms: Sequence[Tensor]) -> Tensor:
    """Sum in fp32 over a balanced binary tree: [0, n) splits at the largest power of two below n: (0+1)+(2+3)."""
    if len(terms) == 1:
        return terms[0].float()
    middle = 1 << ((len(terms) - 1).bit_length() - 1)
    return tree_sum(terms[:middle]) + tree_sum(terms[middle:])


def rank_gradients(model: nn.Module, batch: Sequence[Tensor], world: int) -> list[dict[str, Tensor]]:
    """Each rank's own gradient of its part of the batch, by parameter name."""
    found = []
    for rank in range(world):
        model.zero_grad(set_to_none=True)
        model(*micro_batches(batch, rank, world, 1)[0]).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    model.zero_grad(set_to_none=True)
    return found


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Largest absolute difference over all entries; the keys and shapes must agree."""
    if set(ours) != set(theirs):
        raise AssertionError(f"keys differ: {sorted(set(ours) ^ set(theirs))}")
    wrong = {name: (tuple(ours[name].shape), tuple(theirs[name].shape)) for name in ours}
    wrong = {name: shapes for name, shapes in wrong.items() if shapes[0] != shapes[1]}
    if wrong:
        raise AssertionError(f"shapes differ (ours, theirs): {wrong}")
    gaps = [(ours[name].double() - theirs[name].double()).abs().max().item() for name in ours if ours[name].numel()]
    return max(gaps, default=0.0)


def same_bits(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Names of the entries that are not equal bit for bit; empty when all are."""
    if set(ours) != set(theirs):
        raise AssertionError(f"keys differ: {sorted(set(ours) ^ set(theirs))}")
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]
