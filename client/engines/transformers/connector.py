"""The transformers connector: prefixes of models that generate with a DynamicCache.

    client = Client(address, representation_of(model, tokenizer))
    output = TransformersConnector(client, model).generate(input_ids).output

Layers may keep every token, a window or a state; a batch has prompts padded on the left.
"""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
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
from kvstore.client.engines.base import Connector
from kvstore.client.engines.identity import is_exact
from kvstore.client.engines.prefix import Allowed, Asked, Prefix, Span, least_of
from kvstore.client.engines.transformers.cache import (
    CacheShape,
    as_argument,
    join_rows,
    length,
    new_cache,
    notes_of,
)
from kvstore.client.engines.transformers.chunks import (
    CacheCheckpoint,
    CacheReader,
    CheckpointCriteria,
    PrefixBuffers,
    Staging,
    check_resumable,
    checkpoint_positions,
    device_of,
    prefill,
)
from kvstore.client.engines.transformers.identity import (
    NO_CHANGE,
    WeightsChange,
    WeightsWatch,
    cache_shape,
    representation_of,
)
from kvstore.client.engines.transformers.measures import FirstToken, comparison, noting_attention
from kvstore.client.engines.transformers.overlap import Beside, LayerLoad, Link, is_compiled
from kvstore.client.engines.transformers.requests import (
    PASSED,
    checked_deadline,
    inputs_of,
    prompt_of,
    prompts_of,
    settings_of,
    until_end,
)
from kvstore.client.planning import Deadline
from kvstore.client.tensors import to_arrays
from kvstore.codecs.base import AnyTensors
from kvstore.proto.blend import GateView
from kvstore.proto.device import Device
from kvstore.proto.errors import InvalidRequestError, ModelError
from kvstore.proto.hf_config import rope_parameters
from kvstore.proto.types import Accuracy, ChunkKey, KVLayout, Stated

__all__ = ["Generation", "TransformersConnector", "representation_of"]

ALWAYS_COMPARED = 8
COMPARED_EVERY = 200
"""Prompts behind copies without a bound that are compared with a full prefill: the first ones of a
connector, then one in so many."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What ``generate`` returned: transformers' own output, and the prompt tokens it skipped.

    ``row_hits`` are the same for each row of a batch.
    """

    output: GenerateDecoderOnlyOutput
    hit_tokens: int
    row_hits: tuple[int, ...] = ()


class _Call(NamedTuple):
    """What all prompts of a call have in common."""

    extra: Sequence[bytes]
    """What names them beside their tokens, the change of the weights among it."""
    weights: WeightsChange
    allowed: Allowed
    """The copies that are read."""
    settings: Any = None
    """A GenerationConfig."""
    passed: Mapping[str, Any] = MappingProxyType({})
    """Other arguments of ``model.generate``."""
    deadline_ms: int = 0
    """Of the first token, from ``began_s`` on; 0: none."""
    began_s: float = 0.0


class _Loaded(NamedTuple):
    """A cache with a prefix, what is known of it, and what it had of its end on the way."""

    cache: Cache
    prefix: Prefix
    checkpoints: list[CacheCheckpoint]
    to_compare: Cache | None
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
            check_resumable(model, self._shape, client.model)
        self._model = model
        self._watch = WeightsWatch(model)
        self._compared = itertools.count()
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
        self._watch.after_fork()
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
        self._watch.reset(revision)

    def _least(self, accuracy: str | None) -> Accuracy:
        """Return the least accuracy of what a call reads; *accuracy* None: the connector's."""
        least = self.least if accuracy is None else least_of(accuracy)
        if self._shape.has_ends and least is not Accuracy.exact:
            fix = "use exact: of models that keep windows or states no lossy copy is read"
            raise InvalidRequestError("accuracy", accuracy, fix)
        return least

    def _call(self, extra: Sequence[bytes], allowed: Allowed, *within: Any) -> _Call:
        weights = self._watch.current()
        return _Call(weights.named(extra), weights, allowed, *within)

    def _is_still(self, weights: WeightsChange, cache: Cache) -> bool:
        """Return whether all of *cache*, computed from a look at *weights* on, is of those."""
        notes_of(cache).weights = weights
        return self._watch.current() == weights

    # --- load

    def load(
        self, input_ids: Any, extra: Sequence[bytes] = (), accuracy: str | None = None
    ) -> tuple[DynamicCache, int]:
        """Return a cache with the longest stored prefix, and how many tokens it holds.

        *input_ids*: (1, tokens), a tensor or a list. At least the last token is left to compute; a
        miss is an empty cache and 0. Pass the cache with all of *input_ids* to ``generate``, or
        with ``input_ids[:, hit_tokens:]`` to the model. *accuracy*: of this call alone.
        """
        allowed = self.allowed(self._least(accuracy))
        _, cache, prefix = self._load_one(input_ids, extra, allowed)
        return cache, prefix.hit_tokens

    def calibrate(self, input_ids: Any, codec: str, extra: Sequence[bytes] = ()) -> GateView | None:
        """Compare a prompt behind *codec*'s lossy copies with its full prefill; return the gate.

        *input_ids*: (1, tokens). 64 such comparisons within the server's bounds open the gate of
        the model and *codec* for ``accuracy="approximate"``. Nothing is stored. None where no copy
        of *codec* without a bound was read, or the store failed.
        """
        allowed = Allowed(self._least("approximate"), frozenset([codec]))
        tokens, cache, prefix = self._load_one(input_ids, extra, allowed)
        return self._compare(tokens, cache if prefix.codecs else None, prefix)

    def _load_one(
        self, input_ids: Any, extra: Sequence[bytes], allowed: Allowed
    ) -> tuple[list[int], DynamicCache, Prefix]:
        tokens = prompt_of(input_ids, self._model.device)
        cache, call = DynamicCache(config=self._model.config), self._call(extra, allowed)
        notes_of(cache).weights = call.weights
        return tokens, cache, self._load_into(cache, tokens, call)

    def _compare(
        self, tokens: Sequence[int], cache: Cache | None, prefix: Prefix
    ) -> GateView | None:
        if cache is None:
            return None
        found = partial(comparison, self._model, tokens, cache, prefix)
        return self.ask(lambda: self.client.report_reuse(found()), None)

    def _to_compare(self, prefix: Prefix, cache: Cache) -> Cache | None:
        """Return a copy of *cache*, which holds *prefix* alone, to compare once there is time.

        None for most prompts; where no copy without a bound is in it; and where several codecs made
        such ones, as nobody could say whose fault it were.
        """
        if len(prefix.codecs) != 1:
            return None
        number = next(self._compared)
        is_compared = number < ALWAYS_COMPARED or number % COMPARED_EVERY == 0
        return copy.deepcopy(cache) if is_compared else None

    def _load_into(
        self, cache: Cache, tokens: Sequence[int], call: _Call, layered: LayerLoad | None = None
    ) -> Prefix:
        """Have the longest stored prefix of *tokens* in *cache*, or with *layered* on its way.

        For a deadline the model computes what loads too slowly. Raises what the model raises.
        """
        client, shape, staging = self.client, self._shape, self._staging
        is_plain = staging is None and not shape.has_ends
        can_wait = is_plain and isinstance(cache, DynamicCache)
        beside, within = self._beside(cache, tokens, call) if can_wait else (None, None)
        if within or not can_wait or is_compiled(self._model):
            layered = None
        made: list[PrefixBuffers] = []

        def read(
            keys: Sequence[ChunkKey], spans: Sequence[Span], first: int, least: Accuracy
        ) -> Sequence[Stated]:
            made[:] = made or [PrefixBuffers(shape, spans, self._model.device)]
            if not is_plain:
                return self._read_whole(keys, made[0], first, least)
            out = made[0].chunks(client.model)
            if within is not None:
                tail_tokens = len(tokens) - spans[-1][1]
                return self._read_within(keys, out, first, least, within, tail_tokens)
            if layered is not None:
                return layered.read(keys[first:], out[first:], spans[first:], least)
            stated: list[Stated] = []
            client.get_chunks(keys[first:], out[first:], accuracy=least, stated=stated)
            return stated

        asked = Asked(len(tokens), shape.has_ends, within)
        with nullcontext() if staging is None else staging.lock:
            prefix, reason = self.attempt(tokens, read, call.extra, call.allowed, asked)
        if layered is None or not layered.is_on_its_way(prefix, reason):
            self.note_load(len(tokens), prefix, reason)
        if beside is not None and beside.error is not None:
            raise beside.error
        if prefix.hit_tokens:
            made[0].fill(cache, prefix.hit_tokens)
        if layered is not None:
            layered.attach(cache)
        notes_of(cache).exact_tokens = prefix.exact_tokens if prefix.lossy_tokens else None
        return prefix

    def _beside(
        self, cache: Cache, tokens: Sequence[int], call: _Call
    ) -> tuple[Beside, Deadline] | tuple[None, None]:
        """Return what computes beside loads, and the deadline that it does so for."""
        if not call.deadline_ms:
            return None, None
        chunk_tokens = self.client.options.chunk_tokens
        beside = Beside(self._model, cache, tokens, chunk_tokens, self.learned.observe)
        return beside, Deadline(call.deadline_ms / 1000, beside, began_s=call.began_s)

    def _read_whole(
        self, keys: Sequence[ChunkKey], buffers: PrefixBuffers, first: int, least: Accuracy
    ) -> Sequence[Stated]:
        """Read chunks of which some have windows or states, or that go to a device."""
        stated: list[Stated] = []
        if self._staging is not None:
            stated = self._staging.read(self.client, keys, buffers, first, least)
        else:

            def place(index: int, layout: KVLayout) -> AnyTensors:
                return to_arrays(buffers.chunk(first + index, layout))

            self.client.get_chunks(keys[first:], place, accuracy=least, stated=stated)
        return () if self._shape.has_ends and len(stated) < len(keys) else stated

    # --- save

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
        weights = self._watch.current()
        if (notes_of(cache).weights or NO_CHANGE) != weights:
            return 0
        taken = [CacheCheckpoint.of(cache, self._shape)]
        reader = CacheReader(self.client.model, self._shape, cache, taken)
        exact = notes_of(cache).exact_tokens
        return self._save(tokens, reader, from_token, weights.named(extra), exact)

    def _save_new(
        self, prompt: Sequence[int], tokens: Sequence[int], prefix: Prefix, reader: CacheReader,
        extra: Sequence[bytes],
    ) -> None:  # fmt: skip
        """Store *prompt*, whose last chunk is hit by the same prompt alone, then all *tokens*."""
        exact = prefix.exact_tokens if prefix.lossy_tokens else None
        self._save(tokens[: len(prompt)], reader, prefix.stored_tokens, extra, exact)
        if len(tokens) > len(prompt):
            chunk_tokens = self.client.options.chunk_tokens
            whole = len(prompt) // chunk_tokens * chunk_tokens
            self._save(tokens, reader, whole, extra, exact)

    def _save(
        self,
        tokens: Sequence[int],
        reader: CacheReader,
        from_token: int,
        extra: Sequence[bytes],
        exact: int | None,
    ) -> int:
        """Store the prompt of *tokens* that *reader* reads, up to the *exact* ones: None, all."""
        if exact is not None and exact < len(tokens):
            self.note_unstored(len(tokens), max(exact, from_token))
            tokens = tokens[:exact]
        for span in self._spans(len(tokens)) if self._shape.has_ends else ():
            is_short = span[1] - span[0] < self.client.options.chunk_tokens
            if span[1] > from_token and not reader.has(span, must_end=is_short):
                tokens = tokens[: span[0]]
                break
        staging, source = self._staging, reader.tensors
        if staging is None:
            return self.store_chunks(tokens, source, from_token, extra, reader.about)
        with staging.lock:
            return self.store_chunks(
                tokens,
                lambda span: staging.to_host(source(span)),
                from_token,
                extra,
                reader.about,
            )

    # --- generate

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
        (``max_new_tokens=8``, ``streamer=...``); it keeps one sequence a prompt in a dynamic or
        static cache, or InvalidRequestError is raised. A prompt is stored to its last token, so
        that asking again hits all of it, and so is what was generated, but for the last token.
        Models with windows or states are stored, and hit, in whole chunks. *accuracy* and
        *deadline_ms*, to the first token of each prompt, are of this call alone: see
        ``TransformersConnector``.
        """
        began_s = time.monotonic()
        if not isinstance(self._model, GenerationMixin):
            name = type(self._model).__name__
            raise InvalidRequestError("model", name, "give one that generates")
        within = self._deadline_ms if deadline_ms is None else checked_deadline(deadline_ms)
        allowed = self.allowed(self._least(accuracy))
        passed = {name: settings.pop(name) for name in PASSED if name in settings}
        stated = settings_of(self._model, config, settings)
        ids, mask = inputs_of(input_ids, attention_mask, self._model.device)
        prompts = prompts_of(ids, mask)
        # Padding that all rows have is cut off, but counts for these, as when the model generates.
        padding = ids.shape[1] - max(map(len, prompts))
        for name in ("max_length", "min_length"):
            if getattr(stated, name):
                setattr(stated, name, max(1, getattr(stated, name) - padding))
        call = self._call(extra, allowed, stated, passed, within, began_s)
        if len(prompts) == 1:
            return self._generate_one(ids[:, -len(prompts[0]) :], call)
        return self._generate_batch(ids, mask, prompts, call)

    def _generate_one(self, ids: Tensor, call: _Call) -> Generation:
        tokens: list[int] = ids[0].tolist()
        cache = new_cache(self._model.config, call.settings, self._shape, len(tokens))
        load = LayerLoad(self, self._link, len(tokens))
        # A forward that is begun again would give a streamer the prompt twice.
        layered = load if call.passed.get("streamer") is None else None
        loaded = self._prefilled(tokens, cache, call, layered)
        watch = CheckpointCriteria(cache, self._shape, self.client.options.chunk_tokens)
        weighed = len(tokens) if self.client.weighs else 0

        def run() -> GenerateDecoderOnlyOutput:
            left = len(tokens) - length(cache, self._shape)
            watches: list[StoppingCriteria] = [FirstToken(partial(load.note, left))]
            watches += [watch] if self._shape.has_ends else []
            with noting_attention(self._model, cache, self._shape, weighed) as look:
                return self._run(ids, call, cache, None, [*watches, *look])

        output, prefix = load.run(cache, loaded.prefix, run)
        if self._is_still(call.weights, cache):
            self._compare(tokens, loaded.to_compare, prefix)
            sequence = output.sequences[0].tolist()[: length(cache, self._shape)]
            taken = [*loaded.checkpoints, *watch.checkpoints]
            reader = CacheReader(self.client.model, self._shape, cache, taken)
            self._save_new(tokens, sequence, prefix, reader, call.extra)
        return Generation(output, prefix.hit_tokens, (prefix.hit_tokens,))

    def _prefilled(
        self, tokens: Sequence[int], cache: Cache, call: _Call, layered: LayerLoad | None = None
    ) -> _Loaded:
        """Load a prompt's prefix into *cache*; of windows and states compute to the last pause."""
        prefix = self._load_into(cache, tokens, call, layered)
        to_compare, taken = self._to_compare(prefix, cache), list[CacheCheckpoint]()
        if self._shape.has_ends:
            chunk_tokens, span = self.client.options.chunk_tokens, (prefix.hit_tokens, len(tokens))
            places = checkpoint_positions(self._shape, span, prefix.shared_tokens, chunk_tokens)
            taken = prefill(self._model, tokens, cache, self._shape, places)
        return _Loaded(cache, prefix, taken, to_compare)

    def _run(
        self,
        ids: Tensor,
        call: _Call,
        cache: Cache,
        mask: Tensor | None,
        watches: Sequence[StoppingCriteria] = (),
    ) -> GenerateDecoderOnlyOutput:
        model: Any = self._model
        given = dict(call.passed)
        stopping = [*watches, *(given.pop("stopping_criteria", None) or ())]
        output: GenerateDecoderOnlyOutput = model.generate(
            ids,
            generation_config=call.settings,
            attention_mask=torch.ones_like(ids) if mask is None else mask,
            **as_argument(cache),
            stopping_criteria=stopping,
            **given,
        )
        return output

    def _generate_batch(
        self,
        ids: Tensor,
        mask: Tensor | None,
        prompts: Sequence[Sequence[int]],
        call: _Call,
    ) -> Generation:
        """Compute each prompt to its last token by itself, then generate from all together."""
        settings = call.settings
        if settings.cache_implementation == "static":
            fix = "rows of different prefixes are joined in a dynamic cache"
            raise InvalidRequestError("cache_implementation", "static", fix)
        settings.cache_implementation = None
        model, shape, width = self._model, self._shape, max(map(len, prompts))
        loaded = [self._computed(tokens, call) for tokens in prompts]
        cache = join_rows([one.cache for one in loaded], shape, model.config, model.device)
        if any(one.prefix.lossy_tokens for one in loaded):
            notes_of(cache).exact_tokens = 0
        seen = None if mask is None else mask[:, -width:].ne(0).long()
        output = self._run(ids[:, -width:], call, cache, seen)
        if not shape.has_ends and self._is_still(call.weights, cache):
            held = length(cache, shape)
            for row, (prompt, one) in enumerate(zip(prompts, loaded, strict=True)):
                first = width - len(prompt)
                generated = output.sequences[row, first:held].tolist()
                tokens = until_end(generated, len(prompt), settings)
                reader = CacheReader(self.client.model, shape, cache, (), row, first)
                self._save_new(prompt, tokens, one.prefix, reader, call.extra)
                self._compare(prompt, one.to_compare, one.prefix)
        # As the model returns it: with the padding that all rows have, which was cut off above.
        padded: Any = torch.cat([ids[:, :-width], output.sequences], dim=1)
        output.sequences = padded
        hits = tuple(one.prefix.hit_tokens for one in loaded)
        return Generation(output, sum(hits), hits)

    def _computed(self, tokens: Sequence[int], call: _Call) -> _Loaded:
        """Return the cache of a prompt but for its last token; what is new of it is stored."""
        loaded = self._prefilled(tokens, DynamicCache(config=self._model.config), call)
        held, last = length(loaded.cache, self._shape), len(tokens) - 1
        if held < last:
            began_s = time.monotonic()
            prefill(self._model, tokens, loaded.cache, self._shape, [last])
            if self._staging is None:  # a device computes on when the call is over
                self.learned.observe(last - held, time.monotonic() - began_s)
        if self._shape.has_ends and self._is_still(call.weights, loaded.cache):
            taken, stored = loaded.checkpoints, loaded.prefix.stored_tokens
            reader = CacheReader(self.client.model, self._shape, loaded.cache, taken)
            self._save(tokens[:last], reader, stored, call.extra, None)
        return loaded
