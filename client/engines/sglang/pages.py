"""Pages of SGLang's host pools as chunks of the store. Depends on pool layouts, not on SGLang.

A page is a chunk: its tensors are views of the pool's memory in any layout. Auxiliary pools
(recurrent states, windows, indices) are stored as bytes, page by page. SGLang's hashes cover
tokens, cache salts and adapter ids; everything else that KV depends on is in the Model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

import torch
from blake3 import blake3

from kvstore.client.chunk import Chunk, LayerTensors, Shard
from kvstore.client.client import Client
from kvstore.client.engines import identity as shared
from kvstore.client.engines.base import Connector
from kvstore.client.engines.identity import BYTE_ROWS, Departures, EngineSettings, Weights, stated
from kvstore.client.engines.prefix import Prefix, least_of
from kvstore.proto.errors import InvalidRequestError, ModelError
from kvstore.proto.types import (
    DIGEST_BYTES,
    MIN_CHUNK_TOKENS,
    ROOT,
    Accuracy,
    ChainDigest,
    DType,
    LayerGroup,
    LayerKind,
    Model,
    PutOutcome,
)

LAYOUTS = {
    "layer_first": "plthd",
    "page_first": "ptlhd",
    "page_first_direct": "pnlthd",
    "page_head": "pnhtld",
}
"""Axes of a pool's buffer: K and V (p), pages (n), layers, tokens, heads, elements of a head (d).
Without n the tokens of all pages are contiguous. Latents have no p."""
SERVER_ARGS = (
    *("dtype", "quantization", "quantization_param_path", "kv_cache_dtype", "revision"),
    *("json_model_override_args", "model_impl", "modelopt_quant", "model_loader_extra_config"),
    *("language_model_only", "mm_process_config", "quantize_and_serve", "rl_quant_profile"),
    *("mamba_ssm_dtype", "enable_int8_mamba_checkpoint", "enable_mamba_cache_stochastic_rounding"),
    *("qsa_indexer_dtype", "enable_deepseek_v4_fp4_indexer", "uno_lora_path"),
    *("speculative_draft_model_path", "speculative_draft_model_revision"),
    *("speculative_draft_model_quantization", "load_format", "custom_weight_loader"),
    *("modelopt_checkpoint_restore_path", "enable_quant_communications"),
)
"""Arguments that KV depends on. Draft models are included: their layers may share the pages."""
BATCH = 16
"""Byte pages copied at a time, between the pool and the store."""
STATES = "mamba"
"""The pool of recurrent states: one per rank, even for models whose KV all ranks share."""
OF_OTHER_WEIGHTS = ("draft", "draft_swa")
"""Pools of another model, whose weights have no name."""
NO_ADAPTER = "none"
_SGLANG_SETTINGS = frozenset({"backend_name", "module_path", "class_name", "interface_v1"})


HostPool: TypeAlias = Any
"""SGLang's ``HostKVCache``: ``layout``, ``page_size``, ``start_layer``, ``layer_num`` and
``kv_buffer``, and pages as flat tensors. Auxiliary pools need no buffer."""


# --- identity of pages


@dataclass(frozen=True, slots=True)
class ServerArgsDigest:
    """The engine's arguments that KV depends on."""

    settings: dict[str, str] | None = None
    """Those that were given; None if the engine's arguments are unknown."""
    kv_cache_dtype: str = ""
    adapters: tuple[str, ...] = ()
    """Folders of LoRA adapters: SGLang derives their ids from names and paths only."""
    model_path: str = ""
    commit: str = ""
    """The hub model's commit, if given."""

    @classmethod
    def of(cls, arguments: Any, *, is_hip: bool = False) -> ServerArgsDigest:
        """Read *arguments*, a ServerArgs, by its fields. *is_hip*: AMD's fp8 format differs."""
        if getattr(arguments, "load_format", None) == "dummy":
            raise ModelError("load_format", "dummy", "random weights have no name")
        settings = stated({name: getattr(arguments, name, None) for name in SERVER_ARGS})
        if is_hip:
            settings["hip"] = "True"
        is_commit = shared.is_exact(settings.get("revision", ""))
        return cls(
            commit=settings.pop("revision") if is_commit else "",
            settings=settings,
            kv_cache_dtype=shared.in_words(getattr(arguments, "kv_cache_dtype", None)),
            adapters=tuple(sorted(set(_adapter_paths(getattr(arguments, "lora_paths", None))))),
            model_path=str(getattr(arguments, "model_path", None) or ""),
        )

    def adapter_digest(self, given: str) -> str:
        """Return the digest *given* by the user, or else one of the adapters' files."""
        if given != NO_ADAPTER or not self.adapters:
            return given
        digest = blake3()
        for path in self.adapters:
            if not Path(path).is_dir():
                fix = "its files are not in a local folder: give adapter_digest in the extra config"
                raise ModelError("lora_paths", path, fix)
            digest.update(shared.files_digest(shared.adapter_files(path)))
        return digest.hexdigest()


UNKNOWN = ServerArgsDigest()
"""For pools without an engine."""


def _adapter_paths(given: Any) -> Iterator[str]:
    """Yield the paths in every form of ``--lora-paths``."""
    for one in given.values() if isinstance(given, Mapping) else given or ():
        if isinstance(one, Mapping):
            yield str(one["lora_path"])
        elif isinstance(one, str):
            yield one.partition("=")[2] or one
        else:
            yield str(one.lora_path)


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The rank that owns pages. A tensor-parallel rank has some of the heads of each page."""

    is_mla: bool
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1

    @property
    def extent(self) -> str:
        """This rank's part of the layers or tokens, which chunks are not split by."""
        ranks = [("pp", self.pp_rank, self.pp_size), ("cp", self.cp_rank, self.cp_size)]
        return ",".join(f"{name}{rank}of{size}" for name, rank, size in ranks if size > 1)

    def all_heads(self, heads: int, model_heads: int) -> int:
        """Return the model's number of heads: *model_heads*, or if 0 this rank's *heads* by ranks.

        Raises ModelError if *heads* is not an equal share.
        """
        total = model_heads or heads * self.tp_size
        is_even = not (total % self.tp_size and self.tp_size % total)
        if not is_even or heads != max(1, total // self.tp_size):
            raise ModelError("kv_heads", total, f"each of {self.tp_size} ranks has {heads}")
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSettings(EngineSettings):
    """The backend's extra configuration, and its engine's weights and arguments."""

    adapter_digest: str = NO_ADAPTER
    kv_heads: int = 0
    """The model's, needed if ranks outnumber them; 0: each rank has its own heads."""
    reset_on_flush: bool = True
    weights: Weights
    engine: ServerArgsDigest = UNKNOWN

    @classmethod
    def parse(
        cls, extra: Mapping[str, Any], model_name: str, engine: ServerArgsDigest = UNKNOWN
    ) -> PageSettings:
        """Read *extra*. The weights are *engine*'s ``model_path``, or else *model_name*.

        Raises InvalidRequestError for invalid settings, ModelError for weights without a name.
        """
        known = {one.name for one in fields(cls)} - {"weights", "engine"}
        for name in sorted(extra.keys() - known - _SGLANG_SETTINGS):
            if not name.startswith(("prefetch_", "hicache_")):
                raise InvalidRequestError(name, extra[name], f"use {sorted(known)}")
        given = {name: extra[name] for name in known & extra.keys()}
        given["model_revision"] = str(given.get("model_revision") or "")
        path = engine.model_path or model_name
        weights = shared.weights_of(path, given["model_revision"], engine.commit)
        found = cls(**given, weights=weights, engine=engine)
        if found.kv_heads < 0:
            raise InvalidRequestError("kv_heads", found.kv_heads, "give the model's number")
        if least_of(found.accuracy) is not Accuracy.exact:
            # SGLang does not report which pages one was computed after.
            fix = "use exact: KV computed after a lossy page would be stored as exact"
            raise InvalidRequestError("accuracy", found.accuracy, fix)
        return replace(found, adapter_digest=engine.adapter_digest(found.adapter_digest))

    def identity(self, group: LayerGroup, part: str, quantization: str = "none") -> Model:
        """Return the identity of pages of *group*; *part* is a suffix of the model's id."""
        settings = self.engine.settings
        departs = {"arguments": "unknown"} if settings is None else dict(settings)
        if departs.get("dtype") == group.dtype.name:
            del departs["dtype"]  # the layer group states it
        # With other arguments the config that SGLang runs with is unknown.
        config = None if departs else self.weights.config
        return shared.identity_of(
            replace(self.weights, model_id=f"{self.weights.model_id}{part}"),
            (group,),
            shared.own_rope(config),
            config,
            Departures("sglang", departs, self.adapter_digest, quantization),
        )


def kv_model(pool: HostPool, rank: RankInfo, settings: PageSettings) -> Model:
    """Return the identity of *pool*'s KV pages. Raises ModelError."""
    if getattr(pool, "kv_buffer", None) is None:
        raise ModelError("host pool", type(pool).__name__, "it has no KV of its own")
    if pool.layout not in LAYOUTS or (rank.is_mla and pool.layout == "page_head"):
        raise ModelError("layout", pool.layout, f"use one of {', '.join(LAYOUTS)}")
    if pool.page_size < MIN_CHUNK_TOKENS:
        fix = f"start SGLang with --page-size {MIN_CHUNK_TOKENS} or more"
        raise ModelError("page_size", pool.page_size, fix)
    views = page_views(pool, rank.is_mla, 0)
    in_buffer = sum(part.nbytes for layers in views for parts in layers for part in parts)
    page_bytes = _flat_page(pool, type(pool).__name__).nbytes
    if in_buffer != page_bytes:  # such as pools that keep scales elsewhere
        fix = f"a page has {page_bytes} bytes, but {in_buffer} in its buffer"
        raise ModelError("host pool", type(pool).__name__, fix)
    dtype, quantization = DType.parse(str(pool.kv_buffer.dtype)), "none"
    if dtype is DType.uint8:  # SGLang keeps every kind of fp8 as bytes
        if not settings.engine.kv_cache_dtype:
            fix = "the type of its bytes is unknown without this engine's arguments"
            raise ModelError("dtype", dtype.name, fix)
        quantization = f"bytes-of:{settings.engine.kv_cache_dtype}"
    kind, heads = LayerKind.mla, 1
    if not rank.is_mla:
        own = int(pool.kv_buffer.shape[LAYOUTS[pool.layout].index("h")])
        kind, heads = LayerKind.attention, rank.all_heads(own, settings.kv_heads)
    layers = tuple(range(pool.start_layer, pool.start_layer + pool.layer_num))
    group = LayerGroup(kind, dtype, layers, heads, int(pool.kv_buffer.shape[-1]))
    return settings.identity(group, f"#{rank.extent}" if rank.extent else "", quantization)


def aux_model(pool: HostPool, name: str, rank: RankInfo, settings: PageSettings) -> Model:
    """Return the identity of pages of the auxiliary pool *name*. Raises ModelError."""
    if name in OF_OTHER_WEIGHTS:
        raise ModelError("host pool", name, "the weights of draft models have no name")
    page = _flat_page(pool, name)
    parts = [name, type(pool).__name__, pool.layout, str(pool.page_size), str(page.dtype)]
    if rank.tp_size > 1 and (not rank.is_mla or name == STATES):
        parts.append(f"tp{rank.tp_rank}of{rank.tp_size}")
    parts += [rank.extent] if rank.extent else []
    group = shared.byte_group(page.nbytes, "host pool", name)
    return settings.identity(group, f"#{':'.join(parts)}")


def _flat_page(pool: HostPool, name: str) -> torch.Tensor:
    try:
        page: torch.Tensor = pool.get_dummy_flat_data_page()
    except (NotImplementedError, AttributeError) as error:
        fix = f"its pages are not available as flat tensors: {error}"
        raise ModelError("host pool", name, fix) from None
    return page


class WeightsEpoch:
    """Names pages by the engine's current weights, which may change while it runs.

    *version* returns SGLang's current name of the weights, *agree* fresh bytes, the same on each
    rank. *resets_on_flush*: every flush counts as a change of weights: SGLang does not report one.
    ``named`` is for any thread; SGLang flushes from one, while those that store are stopped.
    """

    def __init__(
        self, version: Callable[[], str], agree: Callable[[], bytes], *, resets_on_flush: bool
    ) -> None:
        self._version = version
        self._agree = agree
        self._resets_on_flush = resets_on_flush
        self._known = version()
        self._epoch = b""

    def named(self, hashes: Sequence[str]) -> list[str]:
        """Return the store's names of pages; [] while the pool may hold pages of older weights."""
        if self._version() != self._known:
            return []
        epoch = self._epoch
        return [blake3(epoch + one.encode()).hexdigest() if epoch else one for one in hashes]

    def flushed(self) -> None:
        """Start a new epoch once the pool is empty: pages stored before are not loaded again.

        Engines share the epoch of a version that is a commit or a digest.
        """
        agreed, version = self._agree(), self._version()
        if version != self._known and shared.is_exact(version):
            self._epoch = b"version:" + version.encode()
        elif version != self._known or self._resets_on_flush:
            self._epoch = agreed
        self._known = version


# --- memory of pages


def page_views(
    pool: HostPool, is_mla: bool, number: int, flat: torch.Tensor | None = None
) -> LayerTensors:
    """Return views of page *number* of the pool, or *flat*: (kv_heads, page_size, head_dim)."""
    axes, buffer = LAYOUTS[pool.layout], pool.kv_buffer
    axis = axes.index("n" if "n" in axes else "t")
    length = 1 if "n" in axes else pool.page_size
    if flat is not None:
        shape = list(buffer.shape)
        shape[axis - is_mla] = length
        buffer = flat.view(shape)
    page = (buffer[None] if is_mla else buffer).narrow(axis, number * length, length)
    if "n" in axes:
        page, axes = page.squeeze(axis), axes.replace("n", "")
    by_layer = page.permute([axes.index(name) for name in "lphtd"])
    return [[list(parts) for parts in by_layer]]


def digests_of(hashes: Sequence[str]) -> list[ChainDigest]:
    """Return the first half of each hash: SHA-256 over a page's tokens and all before them."""
    for one in hashes:
        if not re.fullmatch("[0-9a-fA-F]{32,}", one):
            raise InvalidRequestError("key", one, "give SGLang's page hashes, in hexadecimal")
    return [ChainDigest(bytes.fromhex(one[: 2 * DIGEST_BYTES])) for one in hashes]


# --- stores


def _taken(outcomes: Sequence[PutOutcome], count: int) -> list[bool]:
    """Return which of *count* pages a put stored; none if it failed."""
    return [one is not PutOutcome.refused for one in outcomes] or [False] * count


class PageStore(Connector):
    """Stores and loads pages by SGLang's hashes. Thread-safe. Only creation raises: ModelError."""

    def __init__(self, pool: HostPool, rank: RankInfo, settings: PageSettings) -> None:
        self._pool = pool
        self._is_mla = rank.is_mla
        model, shard = kv_model(pool, rank, settings), None
        if not rank.is_mla and rank.tp_size > 1:
            shard = Shard.of_rank(model, rank.tp_rank, rank.tp_size)
        options = settings.options(pool.page_size, shard=shard)
        super().__init__(Client(settings.address, model, options))

    def count(self, hashes: Sequence[str]) -> int:
        """Return the length of the longest stored prefix of *hashes*."""
        client = self.client
        return self.guard(lambda: client.lookup(keys=self.keys_of(digests_of(hashes))).ready, 0)

    def load(self, hashes: Sequence[str], places: Sequence[LayerTensors]) -> int:
        """Read the longest stored prefix of *hashes* into *places*; return its page count."""
        get, size = self.client.get_chunks, self._pool.page_size
        read = self.guard(lambda: len(get(self.keys_of(digests_of(hashes)), places)), 0)
        self.note_load(size * len(hashes), Prefix(size * read, size * read), reason="")
        return read

    def store(
        self, hashes: Sequence[str], places: Sequence[LayerTensors], before: Sequence[str]
    ) -> list[bool]:
        """Store pages that follow those named *before*; return which were stored.

        A page becomes visible once every rank has stored its heads.
        """

        def chunks() -> list[Chunk]:
            digests = digests_of(hashes)
            above = [*(digests_of(before[-1:]) or [ROOT]), *digests]
            pages = zip(self.keys_of(digests), places, strict=True)
            size, first = self._pool.page_size, len(before)
            return [
                Chunk(key, place, parent=above[at], position=(first + at) * size)
                for at, (key, place) in enumerate(pages)
            ]

        return _taken(self.write_each(chunks), len(hashes))

    def page(self, number: int, flat: torch.Tensor | None = None) -> LayerTensors:
        """Return views of page *number* of the pool, or of the page in *flat*."""
        return page_views(self._pool, self._is_mla, number, flat)


class AuxPoolStore(Connector):
    """Stores and loads pages of one auxiliary pool, by the hashes of their KV.

    Thread-safe. Only creation raises: ModelError. ``is_own``: every rank stores its own pages.
    """

    def __init__(self, pool: HostPool, name: str, rank: RankInfo, settings: PageSettings) -> None:
        self._pool = pool
        self.is_own = not rank.is_mla or name == STATES
        self.page_size: int = pool.page_size
        model = aux_model(pool, name, rank, settings)
        super().__init__(Client(settings.address, model, settings.options(BYTE_ROWS)))

    def present(self, hashes: Sequence[str]) -> list[bool]:
        """Return which of *hashes* are stored, prefix or not."""
        digests = digests_of(hashes)
        found = self.stored(digests)
        return [bytes(one) in found for one in digests]

    def load(self, hashes: Sequence[str], slots: Sequence[int]) -> list[bool]:
        """Fill the pages that begin at *slots*, up to the first miss; return which were filled."""
        read = 0
        for start in range(0, len(hashes), BATCH):
            if read < start:
                break
            pages = [self._pool.get_dummy_flat_data_page() for _ in hashes[start : start + BATCH]]
            digests = digests_of(hashes[start : start + BATCH])
            read += self.read(digests, [_rows(page) for page in pages])
            for slot, page in zip(slots[start:read], pages, strict=False):
                self._pool.set_from_flat_data_page(slot, page)
        return [at < read for at in range(len(hashes))]

    def store(self, hashes: Sequence[str], slots: Sequence[int]) -> list[bool]:
        """Store the pages that begin at *slots*; return which were stored."""
        taken: list[bool] = []
        for start in range(0, len(hashes), BATCH):
            some = hashes[start : start + BATCH]
            outcomes = self.write_each(partial(self._chunks_of, some, slots[start:]))
            taken += _taken(outcomes, len(some))
        return taken

    def _chunks_of(self, hashes: Sequence[str], slots: Sequence[int]) -> list[Chunk]:
        return [
            Chunk(key, _rows(self._pool.get_data_page(slot).contiguous()))
            for key, slot in zip(self.keys_of(digests_of(hashes)), slots, strict=False)
        ]


def _rows(page: torch.Tensor) -> LayerTensors:
    return shared.byte_tensors(page.view(torch.uint8))


def prefix_ends(present: Sequence[bool], trailing: int) -> list[int]:
    """Return the lengths of usable prefixes: their last *trailing* pages, 0: all, are *present*."""
    runs = list(accumulate(present, lambda run, is_there: run + 1 if is_there else 0, initial=0))
    return [
        count for count, run in enumerate(runs) if count and run >= min(trailing or count, count)
    ]
