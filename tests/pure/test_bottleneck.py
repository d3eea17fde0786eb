"""Offload that holds training up is told once, with numbers."""

from shardledger.telemetry.bottleneck import Bottleneck

IDLE = {"read_bytes": 0.0, "written_bytes": 0.0, "wait_s": 0.0, "busy_s": 0.0}


def test_it_is_told_once_after_the_first_steps_with_share_bytes_and_cure():
    disk = {"read_bytes": 3e9, "written_bytes": 1e9, "wait_s": 2.5, "busy_s": 8.0}
    watch = Bottleneck()
    told = [watch.look(4.0, {"host": IDLE, "disk": disk}) for _ in range(6)]
    assert [line is not None for line in told] == [False, False, True, False, False, False]
    assert told[2] is not None
    for piece in (
        "62%",
        "the disk",
        "3.00 GB read",
        "1.00 GB written",
        "1.00 GB/s",
        "1.50 s instead of 4.00 s",
        "ratio",
        "cpu",
    ):
        assert piece in told[2]


def test_short_waits_are_not_worth_a_word():
    watch = Bottleneck()
    host = {**IDLE, "wait_s": 0.1}
    assert [watch.look(1.0, {"host": host, "disk": IDLE}) for _ in range(5)] == [None] * 5
