"""Units of one plan may shard differently and be recomputed or not: the numbers stay the same, the bytes are as predicted."""

import hashlib

import torch

import shardledger as sl
from shardledger.ledger import STATE_CATEGORIES
from support.ranks import run_ranks
from support.training import group

MIXTURES = {
    "alike": {},
    "root and last block whole": {"unit_stages": {"(root)": 2, "blocks.3": 2}},
    "first block whole, two recomputed": {
        "unit_stages": {"blocks.0": 2},
        "activation_checkpointing": True,
        "recomputed_units": ["blocks.1", "blocks.2"],
    },
    "a block of every stage": {"unit_stages": {"blocks.0": 0, "blocks.1": 1, "blocks.2": 2}},
}


def trained(precision):
    from shardledger.workload import GPT, GPTConfig

    found = {}
    with group():
        for name, own in MIXTURES.items():
            torch.manual_seed(0)
            config = {
                "train_micro_batch_size_per_gpu": 2,
                "bf16": {"enabled": precision == "bf16"},
                "zero_optimization": {"stage": 3},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
                "shardledger": own,
            }
            model = GPT(GPTConfig(layers=4, heads=4, width=64, context=16))
            engine = sl.initialize(model=model, config=config, device="cpu")[0]
            draw = torch.Generator().manual_seed(engine.rank)
            for _ in range(3):
                tokens = torch.randint(0, 256, (2, 16), generator=draw)
                engine.backward(engine(tokens, tokens))
                engine.step()
            ledger = engine.ledger()
            states = [[ledger[side][name] for name in STATE_CATEGORIES] for side in ("predicted", "measured")]
            sent = sum(kind["bytes"] for kind in engine.communication()["step"].values())
            weights = engine.state_dict(all_ranks=True)
            digest = hashlib.sha256(b"".join(value.numpy().tobytes() for value in weights.values())).hexdigest()
            numel = {unit.label: sum(f.layout.padded_numel for f in unit.flats) for unit in engine._live().units}
            engine.destroy()
            found[name] = digest, states, sent, numel
    return found


def test_units_at_different_stages_compute_the_same_bits_and_hold_and_send_what_is_predicted():
    for precision, width in (("fp32", 4), ("bf16", 2)):
        for found in run_ranks(trained, 2, precision, timeout=90):
            alike, _, sent, numel = found["alike"]
            assert {digest for digest, *_ in found.values()} == {alike}
            for predicted, measured in (states for _, states, *_ in found.values()):
                assert predicted == measured
            # A unit that stays whole is gathered once less: (N - 1) / N of its weights, N = 2.
            whole = width * (numel["(root)"] + numel["blocks.3"]) // 2
            assert sent - found["root and last block whole"][2] == whole
