"""The values of the store: frozen, checked in their constructors, standard library only."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, NewType

from kvstore.proto.errors import LayoutMismatchError, ModelError, check_text, is_whole
from kvstore.proto.plans import LoadPlan

Namespace = NewType("Namespace", bytes)
"""16 bytes: keyed hash of (tenant salt, Model). See ``keys.namespace``."""

ChainDigest = NewType("ChainDigest", bytes)
"""16 bytes: names a chunk by its tokens and everything before them. See ``keys.chain_digests``."""

ChunkKey = NewType("ChunkKey", bytes)
"""32 bytes: namespace, then chain digest. LMDB's key in binary, Redis's in hex."""

DIGEST_BYTES = 16
KEY_BYTES = 32
ROOT = ChainDigest(bytes(DIGEST_BYTES))
"""The parent of a chain's first chunk."""

DEFAULT_CHUNK_TOKENS = 256
MIN_CHUNK_TOKENS = 16
"""The shortest last chunk worth its metadata."""
MAX_CHUNK_TOKENS = 8192

MAX_IDENTITY_CHARS = 256
"""Length of each text in a Model."""
MAX_LAYERS = 512
MAX_LAYER_GROUPS = 32
MAX_ROPE_FACTORS = 32
MAX_FACTOR_CHARS = 64
"""Length of a factor's name."""

_LAYER_IDS = tuple(range(MAX_LAYERS))
"""Integers shared by all Models: a server keeps a thousand of them."""


class DType(IntEnum):
    """Element types by their number in frames. Names are torch's."""

    item_bytes: int
    """Bytes of one element."""

    bfloat16 = 0, 2
    float16 = 1, 2
    float32 = 2, 4
    float8_e4m3fn = 3, 1
    float8_e5m2 = 4, 1
    uint8 = 5, 1
    int8 = 6, 1

    def __new__(cls, number: int, item_bytes: int = 0) -> DType:
        """Return the member of *number*."""
        member = int.__new__(cls, number)
        member._value_ = number
        member.item_bytes = item_bytes
        return member

    @classmethod
    def parse(cls, name: object) -> DType:
        """Return the type called *name*: a string, or a dtype of torch or numpy."""
        text = getattr(name, "name", getattr(name, "__name__", name))
        try:
            return cls[str(text).removeprefix("torch.")]
        except KeyError:
            known = ", ".join(member.name for member in cls)
            raise ModelError("dtype", name, f"use one of {known}") from None


class LayerKind(IntEnum):
    """What a layer keeps per request, by its number in frames."""

    attention = 0
    mla = 1
    window = 2
    state = 3


END_KINDS = (LayerKind.window, LayerKind.state)
"""Kinds whose cache is useful only at the end of a prefix; a chunk may lack them."""


class Accuracy(IntEnum):
    """How far a copy may be from the original. Belongs to the copy, never to the key."""

    approximate = 0
    bounded = 1
    exact = 2


class Stated(NamedTuple):
    """A copy's stated accuracy; ``codec_id`` is its lossy codec if it is approximate, else 0."""

    accuracy: Accuracy
    codec_id: int = 0


EXACT = Stated(Accuracy.exact)


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one model that keep KV of the same kind and shape.

    ``layer_ids`` are the model's own layer numbers, ascending and below MAX_LAYERS.
    ``window_tokens`` is 0 for every kind but ``window``.
    """

    kind: LayerKind
    dtype: DType
    layer_ids: tuple[int, ...]
    kv_heads: int
    head_dim: int
    window_tokens: int = 0

    def __post_init__(self) -> None:
        check_count("layer_ids", len(self.layer_ids), MAX_LAYERS)
        if not self.layer_ids or list(self.layer_ids) != sorted(set(self.layer_ids)):
            fix = "name each layer of the group once, ascending"
            raise ModelError("layer_ids", self.layer_ids, fix)
        if not 0 <= self.layer_ids[0] <= self.layer_ids[-1] < MAX_LAYERS:
            fix = f"number layers from 0 to {MAX_LAYERS - 1}"
            raise ModelError("layer_ids", self.layer_ids, fix)
        object.__setattr__(self, "layer_ids", tuple(_LAYER_IDS[one] for one in self.layer_ids))
        for name in ("kv_heads", "head_dim"):
            count = getattr(self, name)
            if not is_whole(count) or not 1 <= count < 1 << 24:
                raise ModelError(name, count, "give a positive count, a whole number below 2^24")
        if (self.kind is LayerKind.window) != (self.window_tokens > 0):
            fix = "positive for window layers, else 0"
            raise ModelError("window_tokens", self.window_tokens, fix)

    @property
    def parts(self) -> int:
        """Tensors a layer keeps: K and V, or one latent or state."""
        return 2 if self.kind in (LayerKind.attention, LayerKind.window) else 1


@dataclass(frozen=True, slots=True)
class RopeParameters:
    """The rotary embedding applied to stored keys.

    ``scaling`` is the engine's name of the scaling rule (``default``, ``linear``, ``dynamic``,
    ``yarn``, ``llama3``; ``none`` for models without rotary embedding) and ``factors`` its
    numbers, sorted by name.
    """

    theta: float
    rotary_dim: int
    scaling: str = "default"
    factors: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        if not self.scaling:
            raise ModelError("rope.scaling", self.scaling, "name the rule, or 'none'")
        check_text("rope.scaling", self.scaling, MAX_FACTOR_CHARS, ModelError)
        check_count("rope.factors", len(self.factors), MAX_ROPE_FACTORS)
        for name, _ in self.factors:
            check_text("rope.factors", name, MAX_FACTOR_CHARS, ModelError)
            if not name.isascii():
                raise ModelError("rope.factors", name, "name them in ASCII")
        if list(self.factors) != sorted(self.factors):
            raise ModelError("rope.factors", self.factors, "sort them by name")


@dataclass(frozen=True, slots=True)
class Model:
    """Everything that makes two KV tensors interchangeable. An incomplete one is refused.

    ``model_revision`` is a commit or a digest of the weights, never a branch.
    ``adapter_digest`` is the LoRA's digest, or ``none``. ``quantization`` is the KV
    quantisation, or ``none``. Parallelism (TP, PP) and chunk size are not part of the identity.
    """

    model_id: str
    model_revision: str
    adapter_digest: str
    quantization: str
    layer_groups: tuple[LayerGroup, ...]
    rope: RopeParameters
    tokenizer_digest: str
    layout_version: int = 1

    @classmethod
    def uniform(
        cls, name: str, revision: str, *, layers: int, kv_heads: int, head_dim: int, dtype: object
    ) -> Model:
        """Return a model whose layers all keep K and V of every token.

        *revision* names the weights, and must also cover tokenizer and rotation. *dtype*: see
        ``DType.parse``. Raises ModelError.
        """
        if not is_whole(layers):
            raise ModelError("layers", layers, "give their number")
        group = LayerGroup(
            LayerKind.attention, DType.parse(dtype), tuple(range(layers)), kv_heads, head_dim
        )
        rope = RopeParameters(0.0, 0, "none")
        return cls(name, revision, "none", "none", (group,), rope, "of the weights")

    @classmethod
    def from_hf(cls, config: Any, *, revision: str, dtype: str = "") -> Model:
        """Return the model of a Hugging Face *config*, from ``AutoConfig.from_pretrained``.

        *revision* names the weights, as in ``uniform``. *dtype* is the KV's, by default that of
        the weights. Raises ModelError for a config that does not determine the KV's layout.
        """
        from kvstore.proto.hf_config import model_of

        return model_of(config, revision, dtype)

    def __post_init__(self) -> None:
        for name, fix in _IDENTITY_FIXES.items():
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise ModelError(name, value, fix)
            check_text(name, value, MAX_IDENTITY_CHARS, ModelError)
        if _WORD_ENDS.sub("", self.model_revision.lower()).rpartition("/")[2] in _NO_REVISIONS:
            fix = f"{_IDENTITY_FIXES['model_revision']}: others may have this name, too"
            raise ModelError("model_revision", self.model_revision, fix)
        if self.layout_version < 1:
            raise ModelError("layout_version", self.layout_version, "use 1")
        check_count("layer_groups", len(self.layer_groups), MAX_LAYER_GROUPS)
        if not self.layer_groups:
            raise ModelError("layer_groups", (), "describe every layer that keeps KV")
        ids = [layer for group in self.layer_groups for layer in group.layer_ids]
        if len(ids) != len(set(ids)):
            raise ModelError("layer_groups", ids, "put each layer into one group")


def check_count(field: str, count: int, most: int) -> None:
    """Raise ModelError when an identity has more than *most* of something."""
    if count > most:
        raise ModelError(field, count, f"at most {most}")


_IDENTITY_FIXES = {
    "model_id": "name the model",
    "model_revision": "give the commit or a digest of the weights",
    "adapter_digest": "give the LoRA's digest, or 'none'",
    "quantization": "name the KV quantisation, or 'none'",
    "tokenizer_digest": "give a digest of the tokenizer's files",
}
_NO_REVISIONS = frozenset(
    {
        *("main", "master", "head", "trunk", "dev", "develop", "latest", "stable", "default"),
        *("commit", "commit_hash", "revision", "model_revision", "sha", "digest", "branch", "tag"),
        *("unknown", "todo", "tbd", "xxx"),
    }
)
"""Names of branches, and placeholders from examples."""
_WORD_ENDS = re.compile(r"^[^a-z0-9]+|[^a-z0-9]+$")


@dataclass(frozen=True)
class Component:
    """One layer group of one chunk. A layer's tensors: parts x (kv_heads, tokens, head_dim).

    A window keeps the last ``tokens`` of the chunk's ``chunk_tokens``, a state one row at the
    chunk's end. ``chunk_tokens`` is 0 when all tokens of the chunk are kept.
    """

    kind: LayerKind
    dtype: DType
    layers: int
    kv_heads: int
    head_dim: int
    tokens: int
    chunk_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim", "tokens"):
            if not 1 <= getattr(self, name) < 1 << 24:
                raise LayoutMismatchError(name, getattr(self, name), "give a positive count")
        if not self.chunk_tokens:
            return
        if not self.tokens <= self.chunk_tokens < 1 << 24:
            fix = f"at least the {self.tokens} kept tokens"
            raise LayoutMismatchError("chunk_tokens", self.chunk_tokens, fix)
        if self.chunk_tokens == self.tokens:
            object.__setattr__(self, "chunk_tokens", 0)  # the canonical form
        elif self.kind not in END_KINDS:
            fix = f"{self.kind.name} layers keep every token of a chunk"
            raise LayoutMismatchError("chunk_tokens", self.chunk_tokens, fix)

    @cached_property
    def parts(self) -> int:
        """Tensors a layer keeps: K and V, or one latent or state."""
        return 2 if self.kind in (LayerKind.attention, LayerKind.window) else 1

    @cached_property
    def first_token(self) -> int:
        """Index in the chunk of the first token that is kept."""
        return self.chunk_tokens - self.tokens if self.chunk_tokens else 0

    @cached_property
    def shape(self) -> tuple[int, int, int]:
        """Shape of one part: (kv_heads, tokens, head_dim)."""
        return (self.kv_heads, self.tokens, self.head_dim)

    @cached_property
    def part_bytes(self) -> int:
        """Decoded bytes of one part of one layer."""
        return self.kv_heads * self.tokens * self.head_dim * self.dtype.item_bytes

    @cached_property
    def layer_bytes(self) -> int:
        """Decoded bytes of one layer."""
        return self.parts * self.part_bytes


@dataclass(frozen=True)
class KVLayout:
    """The components of one chunk, in the order of the Model's layer groups."""

    components: tuple[Component, ...]

    def __post_init__(self) -> None:
        if not self.components:
            raise LayoutMismatchError("components", (), "a chunk has at least one component")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.components)  # cached: caches look layouts up for every chunk

    @classmethod
    def of(
        cls, representation: Model, tokens: int, *, window: bool = True, state: bool = True
    ) -> KVLayout:
        """Return the layout of a chunk of *tokens* tokens.

        *window*: it has the window layers' last w - 1 tokens, which the next token attends to.
        *state*: it is a checkpoint with the states after its last token. Raises
        LayoutMismatchError.
        """
        return _layout_of(representation, tokens, window, state)

    def is_of(self, representation: Model) -> bool:
        """Return whether it is the layout of a chunk of *representation*."""
        window, state = self.has(LayerKind.window), self.has(LayerKind.state)
        try:
            return self == KVLayout.of(representation, self.tokens, window=window, state=state)
        except LayoutMismatchError:
            return False

    def has(self, kind: LayerKind) -> bool:
        """Return whether there is a component of *kind*."""
        return any(component.kind is kind for component in self.components)

    @cached_property
    def tokens(self) -> int:
        """Tokens the chunk covers."""
        return max(component.chunk_tokens or component.tokens for component in self.components)

    @cached_property
    def raw_bytes(self) -> int:
        """Decoded bytes of the whole chunk."""
        return sum(component.layers * component.layer_bytes for component in self.components)

    @cached_property
    def segment_count(self) -> int:
        """Segments of its frame: one per layer of each component."""
        return sum(component.layers for component in self.components)


@lru_cache(maxsize=256)
def _layout_of(model: Model, tokens: int, window: bool, state: bool) -> KVLayout:
    """Return the shared layout of such chunks, so that its derived values are computed once."""
    if not MIN_CHUNK_TOKENS <= tokens <= MAX_CHUNK_TOKENS:
        fix = f"a chunk has {MIN_CHUNK_TOKENS} to {MAX_CHUNK_TOKENS} tokens"
        raise LayoutMismatchError("tokens", tokens, fix)
    left_out = {LayerKind.window: not window, LayerKind.state: not state}
    groups = (one for one in model.layer_groups if not left_out.get(one.kind))
    components = tuple(_component(group, tokens) for group in groups)
    if not components:
        fix = "each chunk of this model needs them: its layers keep nothing else"
        raise LayoutMismatchError("window, state", (window, state), fix)
    return KVLayout(components)


def _component(group: LayerGroup, tokens: int) -> Component:
    layers, heads, dim = len(group.layer_ids), group.kv_heads, group.head_dim
    if group.kind not in END_KINDS:
        return Component(group.kind, group.dtype, layers, heads, dim, tokens)
    # The tokens that a layer needs to continue after the chunk.
    kept = min(tokens, max(1, group.window_tokens - 1))
    return Component(group.kind, group.dtype, layers, heads, dim, kept, tokens)


@dataclass(frozen=True, slots=True)
class ChunkInfo:
    """Metadata of a stored chunk. ``size_bytes`` is the size of its frame."""

    key: ChunkKey
    parent: ChainDigest
    layout: KVLayout
    codec_id: int
    size_bytes: int
    accuracy: Accuracy = Accuracy.exact
    prefill_flops: float = 0.0

    def __post_init__(self) -> None:
        if len(self.key) != KEY_BYTES:
            raise LayoutMismatchError("key", self.key.hex(), f"a key has {KEY_BYTES} bytes")
        if len(self.parent) != DIGEST_BYTES:
            fix = f"a digest has {DIGEST_BYTES} bytes"
            raise LayoutMismatchError("parent", self.parent.hex(), fix)

    @property
    def parent_key(self) -> ChunkKey | None:
        """Key of the chunk before this one; None at the start of a chain."""
        if self.parent == ROOT:
            return None
        return ChunkKey(self.key[:DIGEST_BYTES] + self.parent)


@dataclass(frozen=True, slots=True)
class Match:
    """Answer to a lookup: the longest prefix that can be read; a miss is a Match of 0.

    ``sources`` has a byte for each ready chunk: the index in ``tier_names`` of its fastest tier;
    ``loads`` four, little-endian: the estimated load time in microseconds. A prompt has hundreds
    of chunks, so they stay packed until ``tiers`` or ``load_us`` is read. ``pending`` counts
    chunks being written directly after the ready ones. ``lease_id`` is 0 when no lease was
    requested or nothing is ready; a long prompt needs several requests and has ``more_leases``,
    in order.
    """

    ready: int
    pending: int
    missing: int
    tier_names: tuple[str, ...]
    sources: bytes
    loads: bytes
    lease_id: int = 0
    lease_ttl_ms: int = 0
    more_leases: tuple[int, ...] = ()
    plan: LoadPlan | None = None
    """Which chunks to load and to recompute, if the lookup had the engine's speed."""
    shared: int = 0
    """For models with windows or states: known chunks, including those without a checkpoint."""

    @property
    def leases(self) -> tuple[int, ...]:
        """All leases of this answer; none when nothing was leased."""
        return (self.lease_id, *self.more_leases) if self.lease_id else ()

    @property
    def tiers(self) -> tuple[str, ...]:
        """The fastest tier of each ready chunk."""
        return tuple(map(self.tier_names.__getitem__, self.sources))

    @property
    def load_us(self) -> tuple[int, ...]:
        """The estimated load time of each ready chunk in microseconds."""
        return struct.unpack(f"<{len(self.loads) // 4}I", self.loads)


class PutOutcome(IntEnum):
    """The outcome of one chunk of a put. None of these is an error."""

    stored = 0
    exists = 1
    refused = 2
    pending = 3
    """This shard is stored; the chunk is complete once its other shards are."""


class Extent(NamedTuple):
    """Layers and KV heads of one component; stops are exclusive."""

    first_layer: int
    layer_stop: int
    first_head: int
    head_stop: int

    @classmethod
    def whole(cls, component: Component) -> Extent:
        """Return all of *component*."""
        return cls(0, component.layers, 0, component.kv_heads)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.layer_stop - self.first_layer

    @property
    def heads(self) -> int:
        """Number of KV heads."""
        return self.head_stop - self.first_head


@dataclass(frozen=True, slots=True)
class ChunkShard:
    """The extents of a chunk of layout ``whole`` that a frame covers, one for each component.

    None: nothing of that component, as for a pipeline stage without layers of a group. Raises
    LayoutMismatchError when an extent is empty or exceeds its component, or all are None.
    """

    whole: KVLayout
    extents: tuple[Extent | None, ...]

    def __post_init__(self) -> None:
        if len(self.extents) != len(self.whole.components):
            fix = f"give {len(self.whole.components)}, or None"
            raise LayoutMismatchError("rectangle", len(self.extents), fix)
        for at, extent in self.numbered:
            first, stop, head, head_stop = extent
            layers, heads = self.whole.components[at].layers, self.whole.components[at].kv_heads
            if not (0 <= first < stop <= layers and 0 <= head < head_stop <= heads):
                fix = f"within {layers} layers x {heads} kv_heads, not empty"
                raise LayoutMismatchError("rectangle", extent, fix)
        if not any(self.extents):
            raise LayoutMismatchError("rectangle", self.extents, "cover some of the chunk")

    @property
    def is_whole(self) -> bool:
        """Whether it covers the whole chunk."""
        return self.extents == tuple(map(Extent.whole, self.whole.components))

    @property
    def layout(self) -> KVLayout:
        """The covered part as a layout, without the components that are not covered."""
        pairs = [(self.whole.components[at], extent) for at, extent in self.numbered]
        return KVLayout(tuple(replace(c, layers=e.layers, kv_heads=e.heads) for c, e in pairs))

    @property
    def numbered(self) -> list[tuple[int, Extent]]:
        """The covered extents, each with the number of its component."""
        return [(at, extent) for at, extent in enumerate(self.extents) if extent is not None]


@lru_cache(maxsize=64)
def layer_order(representation: Model) -> tuple[tuple[int, int], ...]:
    """Return the model's layer numbers in order, each with its segment number in a frame.

    Segments lie group by group, and the layers of groups may interleave.
    """
    ids = [layer for group in representation.layer_groups for layer in group.layer_ids]
    return tuple(sorted((layer, segment) for segment, layer in enumerate(ids)))


POLICIES = ("lru", "marconi", "hit_density", "discard_hint", "learned")
"""Names of the eviction policies; server/eviction/policy.py maps them to modules."""

REPLACED_POLICIES = {
    "adaptive": "hit_density",
    "discard_bit": "discard_hint",
    "gdsf": "hit_density",
    "lfu": "hit_density",
    "marconi_linear": "hit_density",
    "s3fifo": "hit_density",
}
"""Removed names and their successors."""


def policy_instead_of(name: str, known: Sequence[str] = POLICIES) -> str:
    """Return the fix for the unknown *name*: its successor, or the *known* names."""
    if name in REPLACED_POLICIES:
        return f"{REPLACED_POLICIES[name]}, which replaces {name}"
    return f"one of {', '.join(known)}"
