"""SGLang's second pools: what a model keeps beside its KV, by the page, as bytes.

Recurrent states, windows and indices: their layouts are SGLang's to know. Knows no SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

from kvstore.client.chunk import Chunk
from kvstore.client.client import Client
from kvstore.client.engines.base import Connector
from kvstore.client.engines.identity import BYTE_ROWS, byte_group, byte_tensors
from kvstore.client.engines.sglang.pages import PageSettings, RankTerms, digest_of, pages_identity
from kvstore.client.tensors import LayerTensors
from kvstore.proto.errors import ModelError
from kvstore.proto.types import (
    ROOT,
    ChunkKey,
    Model,
    PutOutcome,
)

if TYPE_CHECKING:
    import torch

BATCH = 16
"""Pages that are copied at a time, between the pool and the store."""

STATES = "mamba"
"""The pool of recurrent states: every rank has its own, also of models whose KV all ranks share."""

OF_OTHER_WEIGHTS = ("draft", "draft_swa")
"""Pools of another model, whose weights nobody names."""


class SecondPool(Protocol):
    """What this file needs of SGLang's ``HostKVCache``: pages as flat tensors."""

    layout: str
    page_size: int

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        """Return a copy of the page whose first slot is *index*."""

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """Return room for a page."""

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        """Fill the page whose first slot is *index*."""


def second_representation(
    pool: SecondPool, name: str, rank: RankTerms, settings: PageSettings
) -> Model:
    """Return what makes pages of a second pool interchangeable. Raises ModelError."""
    if name in OF_OTHER_WEIGHTS:
        raise ModelError("host pool", name, "the weights of draft models have no name")
    try:
        page = pool.get_dummy_flat_data_page()
    except (NotImplementedError, AttributeError) as error:
        fix = f"only pools whose pages can be had as flat tensors: {error}"
        raise ModelError("host pool", name, fix) from None
    kind = type(pool).__name__
    form = f"{name}:{kind}:{pool.layout}:{pool.page_size}:{page.dtype}"
    shared = rank.is_mla and name != STATES
    whose = "" if shared or rank.tp_size == 1 else f":tp{rank.tp_rank}of{rank.tp_size}"
    extent = f":{rank.extent}" if rank.extent else ""
    group = byte_group(page.nbytes, "host pool", name)
    return pages_identity(rank, settings, group, f"#{form}{whose}{extent}", "none")


class SecondStore(Connector):
    """Stores and loads pages of one second pool, by SGLang's hashes of the KV they belong to.

    Thread-safe; never raises once it was made. ``is_own``: every rank stores its own pages.
    """

    def __init__(
        self, pool: SecondPool, name: str, rank: RankTerms, settings: PageSettings
    ) -> None:
        """Raises ModelError for pools that are not understood."""
        self._pool = pool
        self.is_own = not rank.is_mla or name == STATES
        identity = second_representation(pool, name, rank, settings)
        super().__init__(Client(settings.address, identity, settings.options(BYTE_ROWS)))

    def present(self, hashes: Sequence[str]) -> list[bool]:
        """Return which of *hashes* are stored, whatever is before them."""
        digests = [digest_of(one) for one in hashes]
        found = self.stored(digests)
        return [bytes(one) in found for one in digests]

    def load(self, hashes: Sequence[str], slots: Sequence[int]) -> list[bool]:
        """Fill the pages that begin at *slots*; return which were, all before one that was not."""
        read = 0
        for start in range(0, len(hashes), BATCH):
            some = hashes[start : start + BATCH]
            pages = [self._pool.get_dummy_flat_data_page() for _ in some]
            found = self.read([digest_of(one) for one in some], [_rows(page) for page in pages])
            for slot, page in zip(slots[start : start + found], pages, strict=False):
                self._pool.set_from_flat_data_page(slot, page)
            read += found
            if found < len(some):
                break
        return [at < read for at in range(len(hashes))]

    def store(self, hashes: Sequence[str], slots: Sequence[int]) -> list[bool]:
        """Store the pages that begin at *slots*; return which the store has taken."""
        taken: list[bool] = []
        for start in range(0, len(hashes), BATCH):
            some = hashes[start : start + BATCH]
            outcomes = self.write_each(partial(self._pages, some, slots[start : start + BATCH]))
            taken += [one is not PutOutcome.refused for one in outcomes]
            taken += [False] * (start + len(some) - len(taken))
        return taken

    def _pages(self, hashes: Sequence[str], slots: Sequence[int]) -> list[Chunk]:
        pages = [self._pool.get_data_page(slot).contiguous() for slot in slots]
        named = zip(self._named(hashes), pages, strict=True)
        return [Chunk(key, _rows(page), ROOT) for key, page in named]

    def clear(self) -> None:
        """Forget every page of this pool."""
        self._guarded(self.client.clear, 0, self._store_errors)

    def _named(self, hashes: Sequence[str]) -> list[ChunkKey]:
        return self._keys([digest_of(one) for one in hashes])


def _rows(page: torch.Tensor) -> LayerTensors:
    """Return the bytes of a flat page as tensors of a chunk."""
    import torch

    return byte_tensors(page.view(torch.uint8))


def ends(present: Sequence[bool], trailing: int) -> list[int]:
    """Return the numbers of pages that a prefix may have, of *present* ones the last *trailing*.

    With *trailing* 0 all of them have to be.
    """
    runs = list(accumulate(present, lambda run, is_there: run + 1 if is_there else 0, initial=0))
    return [
        count for count, run in enumerate(runs) if count and run >= min(trailing or count, count)
    ]
