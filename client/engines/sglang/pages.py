"""Pages of SGLang's host pools as chunks of the store. Knows the pools' layouts, not SGLang.

A page is a chunk: its tensors are views of the pool's memory, so that nothing is copied but
between the pool and the store, and instances whose pools are laid out otherwise share chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from kvstore.client.chunk import Chunk
from kvstore.client.client import Client
from kvstore.client.engines.base import Connector, client_options
from kvstore.client.engines.identity import NO_ROPE, Weights, identity_of, own_rope, weights_of
from kvstore.client.engines.prefix import least_of
from kvstore.client.engines.sglang.terms import UNSTATED, EngineTerms
from kvstore.client.options import ClientOptions
from kvstore.client.rectangle import Rectangle
from kvstore.client.tensors import LayerTensors, dtype_of
from kvstore.proto.errors import InvalidRequestError, ModelError
from kvstore.proto.types import (
    DIGEST_BYTES,
    MIN_CHUNK_TOKENS,
    ROOT,
    Accuracy,
    ChainDigest,
    ChunkKey,
    LayerGroup,
    LayerKind,
    Model,
    PutOutcome,
)

if TYPE_CHECKING:
    import torch

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
_OWN_SETTINGS = frozenset(
    {
        *("address", "model_revision", "transport", "deadline_ms", "adapter_digest"),
        *("token_file", "tls_ca", "tls_cert", "tls_key", "tenant", "kv_heads", "reset_on_flush"),
        "accuracy",
    }
)
_SGLANG_SETTINGS = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})


class HostPool(Protocol):
    """What this file needs of SGLang's ``HostKVCache``; ``kv_buffer`` is laid out by ``layout``."""

    layout: str
    page_size: int
    start_layer: int
    layer_num: int
    kv_buffer: torch.Tensor

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """Return room for all there is of a page."""


@dataclass(frozen=True, slots=True)
class RankTerms:
    """Whose pages these are. A tensor-parallel rank has some of the heads of a model's pages.

    ``engine``: what the engine was started with, as far as its KV depends on it.
    """

    model_name: str
    is_mla: bool
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    engine: EngineTerms = UNSTATED

    @property
    def extent(self) -> str:
        """Which layers or tokens of the model's KV this rank has, which chunks are not cut by."""
        ranks = [("pp", self.pp_rank, self.pp_size), ("cp", self.cp_rank, self.cp_size)]
        return ",".join(f"{name}{rank}of{size}" for name, rank, size in ranks if size > 1)

    def all_heads(self, heads: int, model_heads: int) -> int:
        """Return the heads of the model, of which this rank has *heads*; *model_heads* if known.

        Where it is not, 0, ranks are taken to have heads of their own. Raises ModelError
        when ranks of such a model do not have so many.
        """
        total = model_heads or heads * self.tp_size
        is_even = not (total % self.tp_size and self.tp_size % total)
        if not is_even or heads != max(1, total // self.tp_size):
            fix = f"{self.tp_size} ranks have {heads} of them each"
            raise ModelError("kv_heads", total, fix)
        return total

    def rectangle(self, heads: int, model_heads: int = 0) -> Rectangle | None:
        """Return which heads this rank has, *heads* of them, of all ranks'; None: all.

        Every rank has all of a latent. Of a model with fewer heads than ranks several have each,
        if *model_heads* says so.
        """
        if self.is_mla or self.tp_size == 1:
            return None
        first = self.tp_rank * self.all_heads(heads, model_heads) // self.tp_size
        return Rectangle(kv_heads=((first, first + heads),))


@dataclass(frozen=True, slots=True)
class PageSettings:
    """What the backend's extra configuration says. Raises InvalidRequestError by name."""

    address: str
    model_revision: str
    transport: Any = "auto"
    deadline_ms: int = 2000
    adapter_digest: str = "none"
    token_file: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tenant: str = ""
    kv_heads: int = 0
    """Of the model, where more ranks than that share them; 0: each rank has its own."""
    reset_on_flush: bool = True
    """Whether what was stored before SGLang flushed its cache is never loaded again."""
    weights: Weights | None = None
    """What ``model_revision`` is of; None where that is all that is known."""
    accuracy: str = "exact"
    """Nothing else is: see ``__post_init__``."""

    def __post_init__(self) -> None:
        if type(self.kv_heads) is not int or self.kv_heads < 0:
            raise InvalidRequestError("kv_heads", self.kv_heads, "give the model's number of them")
        if type(self.reset_on_flush) is not bool:
            raise InvalidRequestError("reset_on_flush", self.reset_on_flush, "give true or false")
        if least_of(self.accuracy) is not Accuracy.exact:
            fix = (
                "use exact: SGLang does not say behind which page one was computed, so what is "
                "computed behind a lossy page would be stored as exact"
            )
            raise InvalidRequestError("accuracy", self.accuracy, fix)

    def options(self, page_tokens: int) -> ClientOptions:
        """Return the options of a client whose chunks have so many tokens."""
        return client_options(self, page_tokens)

    @classmethod
    def parse(
        cls, extra: Mapping[str, Any], model_name: str, engine: EngineTerms = UNSTATED
    ) -> PageSettings:
        """Read *extra*. A revision that is no commit and no digest is resolved, where the weights
        of *engine* or of the folder *model_name* can be looked at, or else refused.
        """
        unknown = sorted(
            name for name in extra if name not in _OWN_SETTINGS | _SGLANG_SETTINGS
            and not name.startswith(("prefetch_", "hicache_"))
        )  # fmt: skip
        if unknown:
            raise InvalidRequestError(unknown[0], extra[unknown[0]], f"use {sorted(_OWN_SETTINGS)}")
        stated = str(extra.get("model_revision") or "")
        weights = weights_of(engine.model_path or model_name, stated, engine.commit)
        given = {name: extra[name] for name in _OWN_SETTINGS - {"model_revision"} if name in extra}
        own = {"model_revision": weights.revision, "weights": weights}
        return cls(**{"address": "127.0.0.1:7420", **given, **own})


def representation_of(pool: HostPool, rank: RankTerms, settings: PageSettings) -> Model:
    """Return what makes the pages of *pool* interchangeable. Raises ModelError."""
    if getattr(pool, "kv_buffer", None) is None:
        raise ModelError("host pool", type(pool).__name__, "it has no KV of its own")
    if pool.layout not in LAYOUTS or (rank.is_mla and pool.layout == "page_head"):
        raise ModelError("layout", pool.layout, f"use one of {', '.join(LAYOUTS)}")
    if pool.page_size < MIN_CHUNK_TOKENS:
        fix = f"start SGLang with --page-size {MIN_CHUNK_TOKENS} or more"
        raise ModelError("page_size", pool.page_size, fix)
    _check_whole(pool, rank.is_mla)
    buffer = pool.kv_buffer
    quantization = rank.engine.quantization_of(dtype_of(buffer))
    group = LayerGroup(
        LayerKind.mla if rank.is_mla else LayerKind.attention,
        dtype_of(buffer),
        tuple(range(pool.start_layer, pool.start_layer + pool.layer_num)),
        1 if rank.is_mla else rank.all_heads(_heads(pool), settings.kv_heads),
        int(buffer.shape[-1]),
    )
    extent = f"#{rank.extent}" if rank.extent else ""
    return pages_identity(rank, settings, group, extent, quantization)


def pages_identity(
    rank: RankTerms, settings: PageSettings, group: LayerGroup, which: str, quantization: str
) -> Model:
    """Return the identity of pages of *group*; *which*: of all that the model's may be."""
    name = rank.model_name.rstrip("/").rsplit("/", 1)[-1]
    weights = settings.weights or Weights(name, settings.model_revision)
    departures = rank.engine.departures(settings.adapter_digest, group.dtype, quantization)
    # SGLang does not tell a backend what it read the settings as.
    config = None if departures.stated else weights.config
    rope = NO_ROPE if config is None else own_rope(weights)
    named = replace(weights, model_id=f"{weights.model_id}{which}")
    return identity_of(named, (group,), rope, config, departures)


def _check_whole(pool: HostPool, is_mla: bool) -> None:
    """Raise ModelError where a page is more than its place in the buffer: some pools
    keep the scales of their elements beside it.
    """
    try:
        page_bytes = pool.get_dummy_flat_data_page().nbytes
    except (NotImplementedError, AttributeError) as error:
        fix = f"only pools whose pages can be had as flat tensors: {error}"
        raise ModelError("host pool", type(pool).__name__, fix) from None
    views = page_views(pool, pool.kv_buffer, 0, is_mla)
    taken = sum(part.nbytes for layers in views for parts in layers for part in parts)
    if taken != page_bytes:
        fix = f"a page is {page_bytes} bytes, and {taken} lie in its buffer"
        raise ModelError("host pool", type(pool).__name__, fix)


def _heads(pool: HostPool) -> int:
    return int(pool.kv_buffer.shape[2 if pool.layout == "page_head" else -2])


def page_views(pool: HostPool, buffer: torch.Tensor, page: int, is_mla: bool) -> LayerTensors:
    """Return views of the tensors of page number *page* in *buffer*, laid out as the pool is.

    Each (kv_heads, page_size, head_dim); *buffer* may also be one page by itself.
    """
    size, start = pool.page_size, page * pool.page_size
    whole = buffer.unsqueeze(0) if is_mla else buffer
    parts = []
    for part in whole:
        if pool.layout == "layer_first":
            layers = part[:, start : start + size].permute(0, 2, 1, 3)
        elif pool.layout == "page_first":
            layers = part[start : start + size].permute(1, 2, 0, 3)
        elif pool.layout == "page_first_direct":
            layers = part[page].permute(0, 2, 1, 3)
        else:  # page_head
            layers = part[page].permute(2, 0, 1, 3)
        parts.append(layers)
    return [[[part[layer] for part in parts] for layer in range(pool.layer_num)]]


def flat_views(pool: HostPool, flat: torch.Tensor, is_mla: bool) -> LayerTensors:
    """Return views of the tensors of the one page that *flat* holds, in the pool's order."""
    shape = list(pool.kv_buffer.shape)
    if pool.layout in ("layer_first", "page_first"):
        at = (0 if is_mla else 1) + (pool.layout == "layer_first")
        shape[at] = pool.page_size
    else:
        shape[0 if is_mla else 1] = 1
    return page_views(pool, flat.view(shape), 0, is_mla)


class PageStore(Connector):
    """Stores and loads pages by SGLang's hashes. Thread-safe; never raises once it was made."""

    def __init__(self, pool: HostPool, rank: RankTerms, settings: PageSettings) -> None:
        """Raises ModelError for pools that are not understood."""
        self._pool = pool
        self._is_mla = rank.is_mla
        identity = representation_of(pool, rank, settings)
        client = Client(settings.address, identity, settings.options(pool.page_size))
        super().__init__(client, rectangle=rank.rectangle(_heads(pool), settings.kv_heads))

    def count(self, hashes: Sequence[str]) -> int:
        """Return how many of the first of *hashes* are stored."""
        return self.ask(lambda: self.client.lookup(self._named(hashes)).ready, 0)

    def load(self, hashes: Sequence[str], places: Sequence[LayerTensors]) -> int:
        """Read the longest stored prefix of *hashes* into *places*; return how many pages.

        What lies in the places behind it is not to be used.
        """

        def get() -> int:
            keys = self._named(hashes)
            return len(self.client.get(keys, places, rectangle=self.rectangle))

        read = self.ask(get, 0)
        tokens = self._pool.page_size
        with self._lock:
            self._counts["lookups"] += 1
            self._counts["hit_tokens"] += tokens * read
            self._counts["miss_tokens"] += tokens * (len(hashes) - read)
        return read

    def store(
        self, hashes: Sequence[str], places: Sequence[LayerTensors], before: Sequence[str]
    ) -> list[bool]:
        """Store pages that follow those called *before*; return which the store has taken.

        It shows a page once every rank has stored its heads of it.
        """

        def work() -> list[PutOutcome]:
            keys = self._named(hashes)
            above = digest_of(before[-1]) if before else ROOT
            chunks = []
            for at, (key, place) in enumerate(zip(keys, places, strict=True), start=len(before)):
                chunks.append(Chunk(key, place, above, position=at * self._pool.page_size))
                above = ChainDigest(key[DIGEST_BYTES:])
            return [put.outcome for put in self.client.put(chunks, rectangle=self.rectangle)]

        refused = [PutOutcome.refused] * len(hashes)
        outcomes = self._guarded(work, refused, self._store_errors)
        with self._lock:
            for outcome in outcomes:
                self._counts[outcome.name] += 1
        return [outcome is not PutOutcome.refused for outcome in outcomes]

    def clear(self) -> None:
        """Forget every page of this model."""
        self._guarded(self.client.clear, 0, self._store_errors)

    def page(self, number: int) -> LayerTensors:
        """Return views of page *number* of the pool."""
        return page_views(self._pool, self._pool.kv_buffer, number, self._is_mla)

    def flat(self, page: torch.Tensor) -> LayerTensors:
        """Return views of a flat page tensor."""
        return flat_views(self._pool, page, self._is_mla)

    def _named(self, hashes: Sequence[str]) -> list[ChunkKey]:
        return self._keys([digest_of(one) for one in hashes])


def digest_of(page_hash: str) -> ChainDigest:
    """Return the first half of SGLang's SHA-256 over the page's tokens and all before them."""
    try:
        digest = bytes.fromhex(page_hash)[:DIGEST_BYTES]
    except ValueError:
        digest = b""
    if len(digest) < DIGEST_BYTES:
        raise InvalidRequestError("key", page_hash, "give SGLang's page hashes, in hexadecimal")
    return ChainDigest(digest)
