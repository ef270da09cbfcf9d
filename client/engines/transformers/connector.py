"""The transformers connector: prefixes of models that generate with a DynamicCache.

    client = Client(address, representation_of(model, tokenizer))
    output = TransformersConnector(client, model).generate(input_ids).output

Layers may keep every token, a window or a state; a batch has prompts padded on the left.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    StoppingCriteria,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput
from typing_extensions import override

from kvstore.client.client import Client
from kvstore.client.decode import Room
from kvstore.client.engines.base import Connector
from kvstore.client.engines.identity import EPOCH_BYTES, is_exact, rope_parameters
from kvstore.client.engines.prefix import AboutOf, Allowed, Prefix, Source, Span, least_of
from kvstore.client.engines.transformers.attention import noting_attention
from kvstore.client.engines.transformers.batch import (
    Row,
    checked_deadline,
    ends_of,
    inputs_of,
    joined,
    mask_of,
    prompt_of,
    prompts_of,
    settings_of,
)
from kvstore.client.engines.transformers.cache import (
    CacheShape,
    as_argument,
    exact_tokens_of,
    new_cache,
    note_lossy,
)
from kvstore.client.engines.transformers.checkpoints import (
    Beside,
    FirstToken,
    Watch,
    continues,
    pauses,
    prefill,
)
from kvstore.client.engines.transformers.ends import EndSource, PrefixRoom, Snapshot, length
from kvstore.client.engines.transformers.gate import Comparisons, comparison
from kvstore.client.engines.transformers.identity import (
    WeightsWatch,
    cache_shape,
    representation_of,
)
from kvstore.client.engines.transformers.layers import LayerLoad, Link, is_compiled
from kvstore.client.engines.transformers.staging import Staging, device_of
from kvstore.client.prefill import Deadline
from kvstore.client.tensors import LayerTensors, to_arrays
from kvstore.proto.blend import GateView
from kvstore.proto.device import Device
from kvstore.proto.errors import InvalidRequestError, ModelError
from kvstore.proto.types import Accuracy, ChunkKey, KVLayout, Stated

__all__ = ["Generation", "TransformersConnector", "representation_of"]


@dataclass(frozen=True, slots=True)
class Generation:
    """What ``generate`` returned: transformers' own output, and the prompt tokens it skipped.

    ``row_hits`` are the same for each row of a batch.
    """

    output: GenerateDecoderOnlyOutput
    hit_tokens: int
    row_hits: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Weights:
    """The weights of a moment: what names them beside the client's identity, and the changes."""

    name: bytes = b""
    changes: int = 0
    """Since the connector's birth: a name may come again, and what was computed between not."""

    def named(self, extra: Sequence[bytes]) -> Sequence[bytes]:
        return [self.name, *extra] if self.name else extra


_AT_BIRTH = _Weights()


class _Terms(NamedTuple):
    """What a call says of its prompts: what else names them, which copies are read, and when the
    first token has to be there, of a call that began then; 0: no matter."""

    extra: Sequence[bytes]
    allowed: Allowed
    deadline_ms: int = 0
    began_s: float = 0.0

    def of(self, weights: _Weights) -> _Terms:
        """Return the same for prompts of *weights*."""
        return self._replace(extra=weights.named(self.extra))


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A cache with a prefix, what is known of it, and what it had of its end on the way."""

    cache: Cache
    prefix: Prefix
    snapshots: list[Snapshot]
    to_compare: Cache | None = None
    """What was loaded, if that is to be compared with a full prefill."""


class TransformersConnector(Connector):
    """Loads and saves prefixes of one model. Thread-safe as far as the model is.

    *client* must have been made with ``representation_of`` this model: ModelError, as
    for a model that does not go on from a prefix as it would have gone on by itself. Weights that
    change afterwards are noticed before each prompt: nothing older is loaded any more.

    Chunks of a model that is not on the CPU pass through a ring of host memory of RING_BYTES.
    *device*: how to reach the model's, if not by ``open_device``; given one, a model on the CPU
    has a ring too. *deadline_ms*: of requests that have none of their own, from their call to their
    first token; 0: none.

    *accuracy*: as for Connector; models that keep windows or states are read exactly only, and
    InvalidRequestError raised for another. A cache says itself which of its tokens are not exact,
    and its copies do, so that ``save`` stores nothing that was computed behind them.
    """

    def __init__(
        self,
        client: Client,
        model: PreTrainedModel,
        *,
        durable: bool = False,
        device: Device | None = None,
        deadline_ms: int = 0,
        accuracy: str = "exact",
    ) -> None:
        self._deadline_ms = checked_deadline(deadline_ms)
        self._shape = cache_shape(model)
        self._least(accuracy)
        stated = (client.model.layer_groups, client.model.rope)
        if stated != (self._shape.groups, rope_parameters(model.config)):
            raise ModelError("client", stated, "make it with representation_of(model, tokenizer)")
        if self._shape.is_probed:
            continues(model, self._shape, client.model)
        self._model = model
        self._watch = WeightsWatch(model)
        self._comparisons = Comparisons()
        self._now = _AT_BIRTH
        self._made_of: WeakKeyDictionary[Cache, _Weights] = WeakKeyDictionary()
        # Guards the three above: the watch, what it led to, and of which weights caches are.
        self._weights = threading.Lock()
        device = device or device_of(model)
        self._link = Link()
        self._staging: Staging | None = None
        if device is not None:
            tokens = client.options.chunk_tokens
            self._staging = Staging(device, model.device, self._shape, tokens)
        # Last, as from then on a fork asks for all of the above.
        super().__init__(
            client,
            durable=durable,
            token_flops=2.0 * model.num_parameters(exclude_embeddings=True),
            accuracy=accuracy,
        )
        if self._staging is not None:
            self._at_once = self._staging.slots

    @override
    def _after_fork(self) -> None:
        """In a child: other threads may have had the locks."""
        super()._after_fork()
        if self._weights.locked():
            self._changed()  # a change may have been seen, and not have been named
        self._weights = threading.Lock()
        self._link = Link()
        if self._staging is not None:
            self._staging.lock = threading.RLock()

    def reset(self, revision: str | None = None) -> None:
        """Load nothing any more that was stored before: the model's weights are others now.

        With *revision*, a commit or a digest that names those weights beside what the client was
        made with, connectors that were given the same one share; else nobody shares. Raises
        InvalidRequestError for a revision that may name others, too.
        """
        if revision is not None and not is_exact(revision):
            fix = "give a commit or a digest of the weights, or nothing"
            raise InvalidRequestError("revision", revision, fix)
        with self._weights:
            self._watch.has_changed()
            self._changed(revision)

    def _changed(self, revision: str | None = None) -> None:
        name = revision.encode() if revision else os.urandom(EPOCH_BYTES)
        self._now = _Weights(b"weights:" + name, self._now.changes + 1)

    def _follow(self, cache: Cache | None = None) -> _Weights:
        """Look at the weights, and return which they are now; a new *cache* is to be of those."""
        with self._weights:
            if self._watch.has_changed():
                self._changed()
            if cache is not None:
                self._made_of[cache] = self._now
            return self._now

    def _is_still(self, weights: _Weights, cache: Cache) -> bool:
        """Return whether all of *cache*, computed from a look at *weights* on, is of those."""
        is_still = self._follow() == weights
        if is_still:
            with self._weights:
                self._made_of[cache] = weights
        return is_still

    def _least(self, accuracy: str | None) -> Accuracy:
        """Return the least accuracy of what a call reads; *accuracy* None: the connector's."""
        least = self.least if accuracy is None else least_of(accuracy)
        if self._shape.has_ends and least is not Accuracy.exact:
            fix = "use exact: of models that keep windows or states no lossy copy is read"
            raise InvalidRequestError("accuracy", accuracy, fix)
        return least

    def load(
        self, input_ids: Any, extra: Sequence[bytes] = (), accuracy: str | None = None
    ) -> tuple[DynamicCache, int]:
        """Return a cache with the longest stored prefix, and how many tokens it holds.

        *input_ids*: (1, tokens), a tensor or a list. At least the last token is left to compute; a
        miss is an empty cache and 0. Pass the cache with all of *input_ids* to ``generate``, or
        with ``input_ids[:, hit_tokens:]`` to the model. *accuracy*: of this call alone.
        """
        terms = _Terms(extra, self.allowed(self._least(accuracy)))
        tokens = prompt_of(input_ids, self._model.device)
        cache = DynamicCache(config=self._model.config)
        weights = self._follow(cache)
        prefix = self._load_into(cache, tokens, terms.of(weights))
        return cache, prefix.hit_tokens

    def calibrate(self, input_ids: Any, codec: str, extra: Sequence[bytes] = ()) -> GateView | None:
        """Compare a prompt behind *codec*'s lossy copies with its full prefill; return the gate.

        *input_ids*: (1, tokens). 64 such comparisons within the server's bounds open the gate of
        the model and *codec* for ``accuracy="approximate"``. Nothing is stored. None where no copy
        of *codec* without a bound was read, or the store failed.
        """
        terms = _Terms(extra, Allowed(self._least("approximate"), frozenset([codec])))
        tokens = prompt_of(input_ids, self._model.device)
        cache = DynamicCache(config=self._model.config)
        prefix = self._load_into(cache, tokens, terms.of(self._follow(cache)))
        return self._compare(tokens, cache if prefix.codecs else None, prefix)

    def _compare(
        self, tokens: Sequence[int], cache: Cache | None, prefix: Prefix
    ) -> GateView | None:
        if cache is None:
            return None
        told = partial(comparison, self._model, tokens, cache, prefix)
        return self.ask(lambda: self.client.report_reuse(told()), None)

    def _room(self, rooms: list[PrefixRoom]) -> Callable[[Sequence[Span]], Sequence[LayerTensors]]:
        """Return what makes room for chunks, and puts that into *rooms*."""

        def room(spans: Sequence[Span]) -> Sequence[LayerTensors]:
            rooms.append(PrefixRoom(self._shape, spans, self._model.device))
            layouts = [KVLayout.of(self.client.model, stop - at) for at, stop in spans]
            return [rooms[0].chunk(index, layout) for index, layout in enumerate(layouts)]

        return room

    def _load_within(self, cache: DynamicCache, tokens: Sequence[int], terms: _Terms) -> Prefix:
        """Have the prefix of *tokens* in *cache* soon: the model computes what loads too slowly."""
        rooms: list[PrefixRoom] = []
        chunk_tokens = self.client.options.chunk_tokens
        beside = Beside(self._model, cache, tokens, chunk_tokens, self.learned.observe)
        within = Deadline(terms.deadline_ms / 1000, beside, began_s=terms.began_s)
        prefix = self.load_chunks(tokens, self._room(rooms), terms.extra, terms.allowed, within)
        if beside.error is not None:
            raise beside.error  # the model's own
        done = length(cache, self._shape)
        if prefix.hit_tokens:
            rooms[0].copy_into(cache, done + prefix.hit_tokens, done)
        if prefix.lossy_tokens:
            note_lossy(cache, prefix.exact_tokens)
        return prefix

    def _load_into(
        self, cache: Cache, tokens: Sequence[int], terms: _Terms, load: LayerLoad | None = None
    ) -> Prefix:
        """Have the prefix of *tokens* in *cache*, or with *load* on its way there."""
        rooms: list[PrefixRoom] = []
        has_ends, (extra, allowed, *_) = self._shape.has_ends, terms

        def by_layout(spans: Sequence[Span]) -> Room:
            rooms.append(PrefixRoom(self._shape, spans, self._model.device))
            return lambda index, layout: to_arrays(rooms[0].chunk(index, layout))

        def staged(
            keys: Sequence[ChunkKey], spans: Sequence[Span], first: int, least: Accuracy
        ) -> Sequence[Stated]:
            assert self._staging is not None
            rooms[:] = rooms or [PrefixRoom(self._shape, spans, self._model.device)]
            found = self._staging.read(self.client, keys, rooms[0], first, least)
            return () if has_ends and len(found) < len(keys) else found

        if self._staging is not None:
            with self._staging.lock:
                prefix = self._counted(tokens, staged, extra, allowed, whole=has_ends)
        elif has_ends:
            prefix = self.load_ends(tokens, by_layout, extra)
        else:
            can_wait = load is not None and isinstance(cache, DynamicCache)
            by = load if load and can_wait and not is_compiled(self._model) else self
            prefix = by.load_chunks(tokens, self._room(rooms), extra, allowed)
        if prefix.hit_tokens and isinstance(cache, DynamicCache):
            rooms[0].move_into(cache, prefix.hit_tokens)
            if load is not None:
                load.attach(cache)
        elif prefix.hit_tokens:
            rooms[0].copy_into(cache, prefix.hit_tokens)
        if prefix.lossy_tokens:
            note_lossy(cache, prefix.exact_tokens)
        return prefix

    def save(
        self,
        input_ids: Any,
        cache: Cache,
        from_token: int = 0,
        extra: Sequence[bytes] = (),
    ) -> int:
        """Store what *cache* holds of *input_ids*, (1, tokens); return how many chunks were new.

        *from_token*: what ``load`` said is stored. Windows and states are stored of the last
        chunk's end, if the cache ends there. Nothing is stored of a cache that may be of weights
        which changed since: once they changed, only of those that ``load`` and ``generate``
        returned since then; nor anything from where a lossy copy was read into it. Raises
        ModelError for a cache of another kind.
        """
        tokens = prompt_of(input_ids, self._model.device)[: cache.get_seq_length()]
        if not tokens:
            return 0
        if CacheShape.of_cache(cache).groups != self._shape.groups:
            raise ModelError("cache", type(cache).__name__, "give one of this model")
        layers: Sequence[Any] = cache.layers
        rows = {int(layers[s.layer].keys.shape[0]) for s in self._shape.tokens}
        if rows != {1}:
            raise InvalidRequestError("cache", rows, "give one of (1, kv_heads, tokens, head_dim)")
        with self._weights:
            weights = self._made_of.get(cache, _AT_BIRTH)
        if self._follow() != weights:
            return 0
        taken = [Snapshot.of(cache, self._shape)]
        return self._save(tokens, cache, from_token, weights.named(extra), taken)

    @override
    def store_chunks(
        self,
        tokens: Sequence[int],
        source: Source,
        from_token: int = 0,
        extra: Sequence[bytes] = (),
        about: AboutOf | None = None,
    ) -> int:
        if self._staging is None:
            return super().store_chunks(tokens, source, from_token, extra, about)
        to_host = self._staging.to_host
        with self._staging.lock:
            return super().store_chunks(
                tokens, lambda span: to_host(source(span)), from_token, extra, about
            )

    def _save(
        self,
        tokens: Sequence[int],
        cache: Cache,
        from_token: int,
        extra: Sequence[bytes],
        snapshots: Sequence[Snapshot] = (),
    ) -> int:
        source = EndSource(self.client.model, self._shape, cache, snapshots)
        exact = exact_tokens_of(cache, len(tokens))
        if exact < len(tokens):
            self.note_unstored(len(tokens), max(exact, from_token))
            tokens = tokens[:exact]
        for span in self._spans(len(tokens)) if self._shape.has_ends else ():
            is_short = span[1] - span[0] < self.client.options.chunk_tokens
            if span[1] > from_token and not source.has(span, must_end=is_short):
                tokens = tokens[: span[0]]
                break
        return self.store_chunks(tokens, source.tensors, from_token, extra, source.about)

    def generate(
        self,
        input_ids: Any,
        config: GenerationConfig | None = None,
        extra: Sequence[bytes] = (),
        attention_mask: Any = None,
        accuracy: str | None = None,
        deadline_ms: int | None = None,
        **settings: Any,
    ) -> Generation:
        """Generate as the model does, from the longest stored prefix on; store what is new.

        *input_ids*: (prompts, tokens), as a tensor, as lists or as the tokenizer returned them;
        where several prompts differ in length, padded on the left, with *attention_mask* 0 there.
        *config* is the model's own when None, with *settings* as ``model.generate`` takes them
        (``max_new_tokens=8``); it keeps one sequence a prompt in a dynamic or static cache, or
        InvalidRequestError is raised. A prompt is stored to its last token, so that asking again
        hits all of it, and so is what was generated, but for the last token. Models with windows
        or states are stored, and hit, in whole chunks. *accuracy* and *deadline_ms*, to the first
        token of each prompt, are of this call alone: see ``TransformersConnector``.
        """
        began_s = time.monotonic()
        if not isinstance(self._model, GenerationMixin):
            name = type(self._model).__name__
            raise InvalidRequestError("model", name, "give one that generates")
        within = self._deadline_ms if deadline_ms is None else checked_deadline(deadline_ms)
        terms = _Terms(extra, self.allowed(self._least(accuracy)), within, began_s)
        stated = settings_of(self._model, config, settings)
        ids, mask = inputs_of(input_ids, attention_mask, self._model.device)
        prompts = prompts_of(ids, mask)
        weights = self._follow()
        if len(prompts) > 1:
            return self._generate_batch(ids, prompts, stated, weights, terms)
        return self._generate_one(ids[:, -len(prompts[0]) :], stated, weights, terms)

    def _generate_one(
        self,
        input_ids: torch.Tensor,
        settings: GenerationConfig,
        weights: _Weights,
        terms: _Terms,
    ) -> Generation:
        tokens: list[int] = input_ids[0].tolist()
        terms = terms.of(weights)
        cache = new_cache(self._model.config, settings, self._shape, len(tokens))
        load, chunk_tokens = LayerLoad(self, self._link), self.client.options.chunk_tokens
        loaded = self._prefilled(tokens, cache, terms, load)
        watch = Watch(cache, self._shape, chunk_tokens)
        weighed = len(tokens) if self.client.weighs else 0

        def run() -> GenerateDecoderOnlyOutput:
            left = len(tokens) - length(cache, self._shape)
            watches: list[StoppingCriteria] = [FirstToken(partial(load.note, left))]
            watches += [watch] if self._shape.has_ends else []
            with noting_attention(self._model, cache, self._shape, weighed) as look:
                return self._run(input_ids, settings, cache, [*watches, *look])

        output, prefix = load.run(cache, loaded.prefix, run)
        found = Generation(output, prefix.hit_tokens, (prefix.hit_tokens,))
        if not self._is_still(weights, cache):
            return found
        self._compare(tokens, loaded.to_compare, prefix)
        sequence = output.sequences[0].tolist()[: length(cache, self._shape)]
        taken = [*loaded.snapshots, *watch.snapshots]
        self._save(sequence[: len(tokens)], cache, prefix.stored_tokens, terms.extra, taken)
        if len(sequence) > len(tokens):
            stored = len(tokens) // chunk_tokens * chunk_tokens
            self._save(sequence, cache, stored, terms.extra, taken)
        return found

    def _prefilled(
        self, tokens: Sequence[int], cache: Cache, terms: _Terms, load: LayerLoad | None = None
    ) -> _Loaded:
        """Load a prompt's prefix into *cache*; of windows and states compute to the last pause."""
        is_whole = self._shape.has_ends or self._staging is not None
        if terms.deadline_ms and isinstance(cache, DynamicCache) and not is_whole:
            prefix = self._load_within(cache, tokens, terms)
        else:
            prefix = self._load_into(cache, tokens, terms, load)
        to_compare, snapshots = self._comparisons.next(prefix, cache), list[Snapshot]()
        if self._shape.has_ends:
            span = (prefix.hit_tokens, len(tokens))
            places = pauses(
                self._shape, span, prefix.shared_tokens, self.client.options.chunk_tokens
            )
            ids = torch.tensor([tokens], device=self._model.device)
            snapshots = prefill(self._model, ids, cache, self._shape, places)
        return _Loaded(cache, prefix, snapshots, to_compare)

    def _run(
        self,
        input_ids: torch.Tensor,
        settings: GenerationConfig,
        cache: Cache,
        watches: Sequence[StoppingCriteria],
        attention_mask: torch.Tensor | None = None,
    ) -> GenerateDecoderOnlyOutput:
        model: Any = self._model
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        output: GenerateDecoderOnlyOutput = model.generate(
            input_ids,
            generation_config=settings,
            attention_mask=mask,
            **as_argument(cache),
            stopping_criteria=watches,
        )
        return output

    def _generate_batch(
        self,
        input_ids: torch.Tensor,
        prompts: Sequence[Sequence[int]],
        settings: GenerationConfig,
        weights: _Weights,
        terms: _Terms,
    ) -> Generation:
        """Compute each prompt to its last token by itself, then generate from all together."""
        if settings.cache_implementation == "static":
            fix = "rows of different prefixes are joined in a dynamic cache"
            raise InvalidRequestError("cache_implementation", "static", fix)
        settings.cache_implementation = None
        loaded = [self._computed(tokens, weights, terms) for tokens in prompts]
        cache = joined(
            [one.cache for one in loaded], self._shape, self._model.config, self._model.device
        )
        rows = [
            Row(
                number, int(input_ids.shape[1]), tokens, one.prefix.stored_tokens,
                ends_of(settings), one.prefix.lossy_tokens > 0,
            )
            for number, (tokens, one) in enumerate(zip(prompts, loaded, strict=True))
        ]  # fmt: skip
        if any(row.is_lossy for row in rows):
            note_lossy(cache, 0)
        output = self._run(input_ids, settings, cache, [], mask_of(input_ids, rows))
        if not self._shape.has_ends and self._is_still(weights, cache):
            self._save_rows(output, cache, rows, terms.of(weights).extra)
            for tokens, one in zip(prompts, loaded, strict=True):
                self._compare(tokens, one.to_compare, one.prefix)
        hits = tuple(one.prefix.hit_tokens for one in loaded)
        return Generation(output, sum(hits), hits)

    def _computed(self, tokens: Sequence[int], weights: _Weights, terms: _Terms) -> _Loaded:
        """Return the cache of a prompt but for its last token; what is new of it is stored."""
        terms = terms.of(weights)
        loaded = self._prefilled(tokens, DynamicCache(config=self._model.config), terms)
        held, last = length(loaded.cache, self._shape), len(tokens) - 1
        if held < last:
            ids, began_s = torch.tensor([tokens], device=self._model.device), time.monotonic()
            prefill(self._model, ids, loaded.cache, self._shape, [last])
            if self._staging is None:  # a device computes on when the call is over
                self.learned.observe(last - held, time.monotonic() - began_s)
        if self._shape.has_ends and self._is_still(weights, loaded.cache):
            stored = loaded.prefix.stored_tokens
            self._save(tokens[:last], loaded.cache, stored, terms.extra, loaded.snapshots)
        return loaded

    def _save_rows(
        self,
        output: GenerateDecoderOnlyOutput,
        cache: Cache,
        rows: Sequence[Row],
        extra: Sequence[bytes],
    ) -> None:
        """Store each row's prompt and what was generated behind it, but for what ended it."""
        held = length(cache, self._shape)
        for row in rows:
            tokens = row.until_end(output.sequences[row.number, row.first : held].tolist())
            if row.is_lossy:
                self.note_unstored(max(len(tokens), len(row.prompt)), row.stored_tokens)
                continue
            source = EndSource(self.client.model, self._shape, cache, (), row)
            self.store_chunks(row.prompt, source.tensors, row.stored_tokens, extra)
            chunk_tokens = self.client.options.chunk_tokens
            stored = len(row.prompt) // chunk_tokens * chunk_tokens
            if len(tokens) > len(row.prompt):
                self.store_chunks(tokens, source.tensors, stored, extra)
