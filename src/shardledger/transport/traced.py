"""A transport whose collectives are recorded as spans."""

from __future__ import annotations

import torch

from shardledger.telemetry.trace import Spans
from shardledger.transport.port import ReduceHow, Transport, Work
from shardledger.transport.wrapped import WrappedTransport


class TracedTransport(WrappedTransport):
    """Passes everything to ``inner``. A collective that does not block is a span from its start to the end of its wait.

    Gloo's thread moves bytes during that span, and so does a GPU. Through shared memory this rank's own copies and sums lie
    inside its calls (``start``, ``wait for``): the rest of the span is when the others may take what this rank has to give.
    """

    def __init__(self, inner: Transport, spans: Spans) -> None:
        super().__init__(inner)
        self._spans = spans

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor, how: ReduceHow) -> Work:
        """See ``Transport.reduce_scatter``."""
        begin = self._spans.now()
        with self._spans.span(f"start reduce {how.label}", "communication"):
            work = self._inner.reduce_scatter(full, out, how)
        return _TracedWork(work, self._spans, f"reduce {how.label}", begin)

    def all_gather(self, full: torch.Tensor, label: str) -> Work:
        """See ``Transport.all_gather``."""
        begin = self._spans.now()
        with self._spans.span(f"start gather {label}", "communication"):
            work = self._inner.all_gather(full, label)
        return _TracedWork(work, self._spans, f"gather {label}", begin)

    def gather_to(self, root: int, full: torch.Tensor | None, shard: torch.Tensor, label: str) -> None:
        """See ``Transport.gather_to``."""
        with self._spans.span(f"gather {label} to rank {root}", "communication"):
            self._inner.gather_to(root, full, shard, label)

    def scatter_from(self, root: int, full: torch.Tensor | None, shard: torch.Tensor, label: str) -> None:
        """See ``Transport.scatter_from``."""
        with self._spans.span(f"scatter {label} from rank {root}", "communication"):
            self._inner.scatter_from(root, full, shard, label)

    def broadcast(self, tensor: torch.Tensor, root: int, label: str) -> None:
        """See ``Transport.broadcast``."""
        with self._spans.span(f"broadcast {label} from rank {root}", "communication"):
            self._inner.broadcast(tensor, root, label)

    def exchange(self, values: torch.Tensor, label: str) -> torch.Tensor:
        """See ``Transport.exchange``."""
        with self._spans.span(label, "communication"):
            return self._inner.exchange(values, label)


class _TracedWork(Work):
    """Work whose wait is a span of the thread, and whose whole is one beside it."""

    def __init__(self, inner: Work, spans: Spans, name: str, begin: float) -> None:
        super().__init__(inner._counters, None)
        self._work = inner
        self._spans = spans
        self._name = name
        self._began = begin
        self._noted = False

    @property
    def done(self) -> bool:
        """See ``Work.done``."""
        return self._work.done

    def wait(self) -> None:
        """See ``Work.wait``."""
        if self._noted:
            return
        self._noted = True
        with self._spans.span(f"wait for {self._name}", "wait"):
            self._work.wait()  # at once where a later collective's wait has settled it
        self._spans.add_beside(self._name, "under way", self._began)
