"""How do bytes move? The only room that knows torch.distributed."""

from shardledger.transport.group import Place, find_place, join, leave
from shardledger.transport.port import Counters, Mailbox, ReduceHow, Traffic, Transport, Work

__all__ = ["Counters", "Mailbox", "Place", "ReduceHow", "Traffic", "Transport", "Work", "find_place", "join", "leave"]
