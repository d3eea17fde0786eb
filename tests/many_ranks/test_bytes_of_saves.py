"""What a plan says of checkpoints: bytes that each rank writes, and what it holds twice meanwhile."""

import json

import torch

import shardledger as sl
from shardledger.ledger.saves import save_bytes
from support.memory import PeakMeter
from support.ranks import run_ranks
from support.training import group

CASES = [(0, "fp32", False), (2, "bf16", False), (3, "bf16", True), (3, "fp32", True)]


def tensor_bytes(folder):
    """Bytes of tensors in a rank's files, headers left out."""
    total = 0
    for file in folder.glob("*.safetensors"):
        content = file.read_bytes()
        header = int.from_bytes(content[:8], "little")
        assert json.loads(content[8 : 8 + header])
        total += len(content) - 8 - header
    return total


def seen_states(engine, meter):
    """Show the meter every state, so that what it counts more is new; bytes of the states."""
    for unit in engine._live().units:
        for flat in unit.flats:
            for tensor in (flat.full, flat.shard, flat.master):
                if tensor is not None:
                    tensor.detach()
    for state in engine.optimizer.state.values():
        for value in state.values():
            value.detach()
    return meter.bytes()


def saved(folder):
    from pathlib import Path

    from shardledger.workload import GPT, GPTConfig

    found = []
    with group():
        for number, (stage, precision, asynchronous) in enumerate(CASES):
            config = {
                "train_micro_batch_size_per_gpu": 2,
                "bf16": {"enabled": precision == "bf16"},
                "zero_optimization": {"stage": stage},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
                "shardledger": {"checkpoint": {"async": asynchronous}},
            }
            model = GPT(GPTConfig(layers=4, heads=2, width=32, context=16))
            model.blocks[1].requires_grad_(False)
            engine = sl.initialize(model=model, config=config, device="cpu")[0]
            tokens = torch.randint(0, 256, (2, 16))
            engine.backward(engine(tokens, tokens))
            engine.step()
            expected = save_bytes(
                engine.layout, engine._account.optimizer_bytes, engine.rank, asynchronous=asynchronous
            )
            place = Path(folder) / str(number)
            with PeakMeter() as meter:
                before = seen_states(engine, meter)
                engine.save_checkpoint(place)
                engine.checkpoints.wait()
            (rank_folder,) = place.glob(f"*/rank-{engine.rank:05d}")
            found.append((expected, tensor_bytes(rank_folder), meter.peak - before))
            engine.destroy()
    return found


def test_a_save_writes_and_holds_what_the_plan_says(tmp_path):
    for found in run_ranks(saved, 2, str(tmp_path), timeout=90):
        for (stage, _, asynchronous), (expected, written, held) in zip(CASES, found, strict=True):
            assert written == expected.written, f"stage {stage}"
            # A synchronous save writes from the states themselves; ranks tell each other what they wrote, as JSON.
            if asynchronous:
                assert 0 <= held - expected.copied < 16384, f"stage {stage}"
            else:
                assert held < expected.written // 2, f"stage {stage}"
