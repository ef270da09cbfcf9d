"""Layers of a source, one ahead of the layer that is being computed."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as WaitedTooLong
from types import TracebackType

from kvstore.client.blend.source import LayerKV, LayerSource
from kvstore.proto.errors import DeadlineError


class LayerLoader:
    """Asks *source* for layers in order, in a thread of its own, one layer ahead.

    *wait_s*: how long ``take`` waits for one layer, *patience_s*: for all of them. ``load_s`` and
    ``wait_s`` are what the source took and what of it was waited for. A with statement ends the
    thread; a call of the source that is under way then is left to its own deadline.
    """

    def __init__(
        self,
        source: LayerSource,
        layers: Sequence[int],
        wait_s: float,
        patience_s: float = math.inf,
    ) -> None:
        self._source = source
        self._layers = list(layers)
        self._limit_s = wait_s
        self._patience_s = patience_s
        self._thread = ThreadPoolExecutor(1, "kvstore-blend")
        self._next: Future[Mapping[int, LayerKV]] | None = None
        self.load_s = 0.0
        self.wait_s = 0.0

    def __enter__(self) -> LayerLoader:
        self._ask()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._thread.shutdown(wait=kind is None, cancel_futures=True)

    def take(self) -> Mapping[int, LayerKV]:
        """Return the next layer and ask for the one behind it.

        Raises DeadlineError, and what the source raises.
        """
        pending = self._next
        if pending is None:
            raise DeadlineError("no layer is left to take")
        started = time.perf_counter()
        limit_s = max(0.0, min(self._limit_s, self._patience_s - self.wait_s))
        try:
            found = pending.result(limit_s)
        except WaitedTooLong as error:
            if pending.done():  # the source's own deadline
                raise
            self.wait_s += time.perf_counter() - started
            raise DeadlineError(f"a layer did not come within {limit_s:.3g} s") from error
        self.wait_s += time.perf_counter() - started
        self._ask()
        return found

    def narrow(self, rows: Sequence[int], from_layer: int) -> None:
        """Tell the source which rows it need not bring any more."""
        self._source.narrow(rows, from_layer)

    def _ask(self) -> None:
        layer = self._layers.pop(0) if self._layers else None
        self._next = None if layer is None else self._thread.submit(self._load, layer)

    def _load(self, layer: int) -> Mapping[int, LayerKV]:
        started = time.perf_counter()
        found = self._source.layer(layer)
        self.load_s += time.perf_counter() - started
        return found
