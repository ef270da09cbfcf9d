"""The stand-in engine with its decode steps in a CUDA graph; on a CPU the same without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from helpers.paged_engine import BLOCK_TOKENS, BLOCKS, HEAD_DIM, PagedEngine, _Batch, indices
from typing_extensions import override

ROWS = 4
"""Most requests of a step; unused rows write into the null block."""
ROW_BLOCKS = BLOCKS // 2
"""Most blocks of a request."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Static inputs of a decode step, refilled for each."""

    pages: Sequence[torch.Tensor]
    ids: torch.Tensor
    positions: torch.Tensor
    tables: torch.Tensor

    @property
    def slots(self) -> torch.Tensor:
        blocks = self.tables.gather(1, self.positions[:, None] // BLOCK_TOKENS)[:, 0]
        return blocks * BLOCK_TOKENS + self.positions % BLOCK_TOKENS

    def attend(self, pages: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        """Return attention of *query* (heads, requests, head_dim) over each request's blocks."""
        whole = pages[self.tables].transpose(1, 2).flatten(2, 3)
        keys, values = whole.split(HEAD_DIM, -1)
        at = torch.arange(keys.shape[2], device=pages.device)
        seen = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(0, 1)[:, :, None], keys, values,
            (at <= self.positions[:, None])[:, None, None], enable_gqa=True,
        )  # fmt: skip
        return seen[:, :, 0][None]


class GraphEngine(PagedEngine):
    """Replays a captured graph if every request of a step computes one token."""

    def __init__(self, address: str | None, *more: Any, **settings: Any) -> None:
        super().__init__(address, *more, **settings)
        self.replays = 0
        ids, positions = self._zeros(ROWS), self._zeros(ROWS)
        self._rows = _Rows(self.pages, ids, positions, self._zeros(ROWS, ROW_BLOCKS))
        self._graph: torch.cuda.CUDAGraph | None = None
        self._sampled = self._decode()
        if self.place.type == "cuda":
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            # Threads of the store run meanwhile.
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._sampled = self._decode()

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.long, device=self.place)

    def _decode(self) -> torch.Tensor:
        model: Any = self.model
        with torch.inference_mode():
            logits: torch.Tensor = model(
                input_ids=self._rows.ids[None], position_ids=self._rows.positions[None],
                use_cache=False, batch=self._rows,
            ).logits  # fmt: skip
            return logits[0].argmax(-1)

    @override
    def _compute(
        self,
        batch: _Batch,
        ids: Sequence[Callable[[], torch.Tensor]],
        outs: Sequence[tuple[int, list[torch.Tensor]]],
    ) -> None:
        rows = batch.rows
        if any(row.tokens > 1 for row in rows):
            super()._compute(batch, ids, outs)
            return
        static = self._rows
        with torch.inference_mode():
            for each in (static.positions, static.tables):
                each.zero_()
            static.ids[: len(rows)].copy_(torch.cat([each() for each in ids]))
            starts = indices([row.start for row in rows], self.place)
            static.positions[: len(rows)].copy_(starts)
            for at, row in enumerate(rows):
                static.tables[at, : len(row.table)].copy_(row.table)
            if self._graph is None:
                self._sampled = self._decode()
            else:
                self._graph.replay()
        self.replays += 1
        self._give(outs, [self._sampled[at].reshape(1) for at, _ in outs])
