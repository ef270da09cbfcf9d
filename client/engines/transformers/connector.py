"""The transformers connector: prefixes of models that generate with a DynamicCache.

    client = Client(address, representation_of(model, tokenizer))
    output = TransformersConnector(client, model).generate(input_ids).output

Layers may keep every token, a window or a state; prompts of a batch are padded on the left.
"""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
from kvstore.client.engines.prefix import Allowed, Source, least_of
from kvstore.client.engines.transformers import cache as caches
from kvstore.client.engines.transformers import generation, identity
from kvstore.client.engines.transformers.cache import CacheReader, CacheShape, Held, length
from kvstore.client.engines.transformers.identity import NO_CHANGE, WeightsChange, WeightsWatch
from kvstore.client.engines.transformers.loads import Call, Link, PrefixLoad, Staging
from kvstore.proto.blend import GateView
from kvstore.proto.device import Device, HostDevice, open_device
from kvstore.proto.errors import InvalidRequestError, ModelError
from kvstore.proto.hf_config import rope_parameters
from kvstore.proto.types import Accuracy

ALWAYS_COMPARED = 8
COMPARED_EVERY = 200
"""Prompts on approximate copies that are compared with a full prefill: a connector's first
ALWAYS_COMPARED, then one in COMPARED_EVERY."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The result of ``generate``: transformers' own output, and the prompt tokens skipped."""

    output: GenerateDecoderOnlyOutput
    hit_tokens: int
    row_hits: tuple[int, ...]
    """Those of each row of a batch."""


class TransformersConnector(Connector):
    """Loads and saves prefixes of one model. Thread-safe as far as the model is.

    *client* must be made with ``representation_of`` this model, and the model must continue from
    a stored prefix as from its own; else ModelError. Weight changes are detected before each
    prompt: nothing older is loaded afterwards.

    *device*: the model's device, if not from ``open_device``; with one, a model on the CPU uses a
    ring of host memory, too. *deadline_ms*: the default from a request's call to its first token;
    0: none. *accuracy*: as for Connector; InvalidRequestError for any but exact where models keep
    windows or states.
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
        self._deadline_ms = generation.checked_deadline(deadline_ms)
        model = identity.uncompiled(model)
        self._shape = identity.cache_shape(model)
        self._least(accuracy)
        stated = (client.model.layer_groups, client.model.rope)
        if stated != (self._shape.groups, rope_parameters(model.config)):
            raise ModelError("client", stated, "make it with representation_of(model, tokenizer)")
        if self._shape.is_probed:
            identity.check_resumable(model, self._shape, client.model)
        self._model = model
        self._watch = WeightsWatch(model)
        self._fitting = (0, True)
        """A number of changed structures, and whether the cache had the same layers then."""
        self._is_padding_checked = not self._shape.is_probed
        self._compared = itertools.count()
        self._chunk_tokens = client.options.chunk_tokens
        self._staging: Staging | None = None
        if device is None and model.device.type != "cpu":  # the CPU needs no copies
            # On devices other than CUDA torch's copies are synchronous.
            device = open_device(model.device) if model.device.type == "cuda" else HostDevice()
        if device is not None:
            self._staging = Staging(device, model.device, self._shape, self._chunk_tokens)
        self._link = Link(self, model, self._shape, self._staging)
        # Last: from here on a fork uses all of the above.
        flops = 2.0 * model.num_parameters(exclude_embeddings=True)
        super().__init__(client, durable=durable, token_flops=flops, accuracy=accuracy)
        if self._staging is not None:
            self._at_once = self._staging.slots

    @override
    def _after_fork(self) -> None:
        """In a child: other threads may have held the locks."""
        super()._after_fork()
        self._watch.after_fork()
        self._link = Link(self, self._model, self._shape, self._staging)
        if self._staging is not None:
            self._staging.lock = threading.RLock()

    def reset(self, revision: str | None = None) -> None:
        """Stop loading earlier chunks, because the model's weights have changed.

        *revision*, a commit or a digest (else InvalidRequestError), names the new weights beside
        the client's model identity: connectors with the same one share; without it none do.
        """
        if revision is not None and not is_exact(revision):
            fix = "give a commit or a digest of the weights, or nothing"
            raise InvalidRequestError("revision", revision, fix)
        self._watch.reset(revision)

    def _least(self, accuracy: str | None) -> Accuracy:
        """Return the least accuracy that a call reads; *accuracy* None: the connector's."""
        least = self.least if accuracy is None else least_of(accuracy)
        if self._shape.has_ends and least is not Accuracy.exact:
            fix = "use exact: models that keep windows or states read no lossy copies"
            raise InvalidRequestError("accuracy", accuracy, fix)
        return least

    def _is_still(self, weights: WeightsChange, cache: Cache) -> bool:
        """Return whether *weights* did not change while *cache* was computed; note them in it."""
        caches.notes_of(cache).weights = weights
        return self._watch.current() == weights

    def _fits(self, weights: WeightsChange) -> bool:
        """Return whether the model's cache still has the layers that the client stores."""
        if weights.structures != self._fitting[0]:

            def check() -> bool:
                # Its dtype is that of autocast for now only.
                with torch.autocast(self._model.device.type, enabled=False):
                    groups = CacheShape.of(self._model).groups
                if groups != self._shape.groups:
                    fix = "the model's cache has changed: make another client and connector"
                    raise ModelError("layers", len(groups), fix)
                return True

            self._fitting = (weights.structures, self.guard(check, False))
        return self._fitting[1]

    # --- load

    def load(
        self, input_ids: Any, extra: Sequence[bytes] = (), accuracy: str | None = None
    ) -> tuple[DynamicCache, int]:
        """Return a cache with the longest stored prefix, and how many tokens it holds.

        *input_ids*: (1, tokens), a tensor or a list. At least the last token is left to compute; a
        miss is an empty cache and 0. Pass the cache with all of *input_ids* to ``generate``, or
        with ``input_ids[:, hit_tokens:]`` to the model. *accuracy* applies to this call only.
        """
        prompt = self._load_one(input_ids, extra, self.allowed(self._least(accuracy)))
        return prompt.cache, prompt.prefix.hit_tokens

    def calibrate(self, input_ids: Any, codec: str, extra: Sequence[bytes] = ()) -> GateView | None:
        """Compare a prompt on *codec*'s lossy copies with its full prefill; return the gate.

        *input_ids*: (1, tokens). 64 comparisons within the server's bounds open the gate of the
        model and *codec* for ``accuracy="approximate"``. Nothing is stored. Returns None if no
        approximate copy of *codec* was read, or the store failed.
        """
        allowed = Allowed(self._least("approximate"), frozenset([codec]))
        prompt = self._load_one(input_ids, extra, allowed)
        prompt.to_compare = prompt.cache if prompt.prefix.codecs else None
        return self._compare(prompt)

    def _load_one(self, input_ids: Any, extra: Sequence[bytes], allowed: Allowed) -> PrefixLoad:
        tokens = generation.prompt_of(input_ids, self._model.device)
        weights = self._watch.current()
        call = Call(weights.named(extra), weights, allowed)
        prompt = PrefixLoad(self._link, call, tokens, DynamicCache(config=self._model.config))
        caches.notes_of(prompt.cache).weights = weights
        if self._fits(weights):
            prompt.load()
        return prompt

    def _compare(self, prompt: PrefixLoad) -> GateView | None:
        if prompt.to_compare is None:
            return None
        given = (self._model, prompt.tokens, prompt.to_compare, prompt.prefix)
        return self.guard(lambda: self.client.report_reuse(generation.comparison(*given)), None)

    # --- save

    def save(
        self, input_ids: Any, cache: Cache, from_token: int = 0, extra: Sequence[bytes] = ()
    ) -> int:
        """Store what *cache* holds of *input_ids*, (1, tokens); return how many chunks were new.

        *from_token*: the tokens that ``load`` returned. Windows and states are stored at the last
        chunk's end, if the cache ends there. After a weight change only caches that ``load`` and
        ``generate`` returned since are stored; nothing after a lossy copy is. Raises ModelError
        for a cache of another kind.
        """
        shape = self._shape
        if not isinstance(cache, Cache):
            raise ModelError("cache", type(cache).__name__, "give one of this model")
        tokens = generation.prompt_of(input_ids, self._model.device)[: cache.get_seq_length()]
        if not tokens:
            return 0
        if CacheShape.of_cache(cache).groups != shape.groups:
            raise ModelError("cache", type(cache).__name__, "give one of this model")
        layers: Sequence[Any] = cache.layers
        rows = {int(layers[s.layer].keys.shape[0]) for s in shape.tokens}
        if rows != {1}:
            raise InvalidRequestError("cache", rows, "give one of (1, kv_heads, tokens, head_dim)")
        notes, weights = caches.notes_of(cache), self._watch.current()
        if (notes.weights or NO_CHANGE) != weights:
            return 0
        reader = self._reader(cache, [Held.of_end(cache, shape)])
        return self._save(tokens, reader, from_token, weights.named(extra), notes.exact_tokens)

    def _reader(
        self, cache: Cache, ends: Sequence[Held], row: int = 0, first: int = 0
    ) -> CacheReader:
        whole = Held.of_row(cache, self._shape, row, first)
        importance = caches.notes_of(cache).importance
        return CacheReader(self.client.model, self._shape, whole, ends, importance)

    def _save_new(self, prompt: PrefixLoad, tokens: Sequence[int], reader: CacheReader) -> None:
        """Store *prompt*, whose last chunk only the same prompt hits, then all *tokens*."""
        prefix, count, extra = prompt.prefix, len(prompt.tokens), prompt.call.extra
        exact = prefix.exact_tokens if prefix.lossy_tokens else None
        self._save(tokens[:count], reader, prefix.stored_tokens, extra, exact)
        if len(tokens) > count:
            whole = count // self._chunk_tokens * self._chunk_tokens
            self._save(tokens, reader, whole, extra, exact)

    def _save(
        self,
        tokens: Sequence[int],
        reader: CacheReader,
        from_token: int,
        extra: Sequence[bytes],
        exact: int | None = None,
    ) -> int:
        """Store the prompt of *tokens* from *reader*, only its *exact* tokens if given."""
        if exact is not None and exact < len(tokens):
            self.note_unstored(len(tokens), max(exact, from_token))
            tokens = tokens[:exact]
        for span in self._spans(len(tokens)) if self._shape.has_ends else ():
            is_short = span[1] - span[0] < self._chunk_tokens
            if span[1] > from_token and not reader.has(span, must_end=is_short):
                tokens = tokens[: span[0]]
                break
        staging, source = self._staging, reader.tensors
        if staging is None:
            return self.store_chunks(tokens, source, from_token, extra, reader.about)
        staged: Source = lambda span: staging.to_host(source(span))  # noqa: E731
        with staging.lock:
            return self.store_chunks(tokens, staged, from_token, extra, reader.about)

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
        """Generate as the model does, from the longest stored prefix; store new chunks.

        *input_ids*: (prompts, tokens), as a tensor, as lists or as the tokenizer returned them;
        prompts of different lengths are padded on the left, with *attention_mask* 0 there.
        *config* is the model's own when None; *settings* are those of ``model.generate``
        (``max_new_tokens=8``, ``streamer=...``). Raises InvalidRequestError unless they keep one
        sequence per prompt in a dynamic or static cache. The prompt and all generated tokens but
        the last are stored, in whole chunks for models with windows or states. *accuracy* and
        *deadline_ms* apply to this call only: see ``TransformersConnector``.
        """
        began_s = time.monotonic()
        if not isinstance(self._model, GenerationMixin):
            name = type(self._model).__name__
            raise InvalidRequestError("model", name, "give a model that generates")
        given_ms = self._deadline_ms if deadline_ms is None else deadline_ms
        within = generation.checked_deadline(given_ms)
        allowed = self.allowed(self._least(accuracy))
        passed = {name: settings.pop(name) for name in generation.PASSED if name in settings}
        stated = generation.settings_of(self._model, config, settings)
        ids, mask = generation.inputs_of(input_ids, attention_mask, self._model.device)
        mask = generation.mask_of(ids, stated) if mask is None else mask
        prompts = generation.prompts_of(ids, mask)
        # Padding common to all rows is cut off, but these include it, as in the model's generate.
        padding = ids.shape[1] - max(map(len, prompts))
        for name in ("max_length", "min_length"):
            if getattr(stated, name):
                setattr(stated, name, max(1, getattr(stated, name) - padding))
        if stated.output_attentions and self._shape.is_probed:
            extra = [b"output_attentions", *extra]  # some models attend otherwise then
        weights = self._watch.current()
        call = Call(weights.named(extra), weights, allowed, stated, passed, within, began_s)
        if not self._fits(weights):
            seen = None if mask is None else mask[:, padding:]
            output = self._run(ids[:, padding:], call, None, seen)
            done = Generation(output, 0, (0,) * len(prompts))
        elif len(prompts) == 1:
            done = self._generate_one(prompts[0], ids[:, padding:], call)
        else:
            done = self._generate_batch(ids, mask, prompts, call)
        # As the model returns it: with the padding that was cut off above.
        padded: Any = torch.cat([ids[:, :padding], done.output.sequences], dim=1)
        done.output.sequences = padded
        return done

    def _generate_one(self, tokens: Sequence[int], ids: Tensor, call: Call) -> Generation:
        shape = self._shape
        cache = caches.new_cache(self._model.config, call.settings, shape, len(tokens))
        prompt = PrefixLoad(self._link, call, tokens, cache)
        # A restarted forward would send the prompt to a streamer twice.
        prompt.in_layers = call.passed.get("streamer") is None
        self._begin(prompt)
        watch = generation.Watch(cache, shape, self._chunk_tokens)
        weighed = len(tokens) if self.client.weighs else 0

        def run() -> GenerateDecoderOnlyOutput:
            left = len(tokens) - length(cache, shape)
            with generation.noting_attention(self._model, cache, shape, weighed) as seen:
                began_s = time.perf_counter()

                def on_first() -> None:
                    seen()
                    self.learned.observe(left, time.perf_counter() - began_s - prompt.waited_s)

                watch.on_first = on_first
                return self._run(ids, call, cache, None, [watch])

        output = prompt.run(run)
        if self._is_still(call.weights, cache):
            self._compare(prompt)
            sequence = output.sequences[0].tolist()[: length(cache, shape)]
            self._save_new(prompt, sequence, self._reader(cache, [*prompt.ends, *watch.ends]))
        return Generation(output, prompt.prefix.hit_tokens, (prompt.prefix.hit_tokens,))

    def _begin(self, prompt: PrefixLoad) -> None:
        """Load a prompt's prefix; with windows or states compute to the last pause."""
        prompt.load()
        prefix, shape = prompt.prefix, self._shape
        if len(prefix.codecs) == 1:  # an error of several could not be attributed
            number = next(self._compared)
            if number < ALWAYS_COMPARED or number % COMPARED_EVERY == 0:
                prompt.to_compare = copy.deepcopy(prompt.cache)
        if shape.has_ends:
            span = (prefix.hit_tokens, len(prompt.tokens))
            places = generation.pauses(shape, span, prefix.shared_tokens, self._chunk_tokens)
            prompt.ends = self._extend(prompt, places)

    def _extend(self, prompt: PrefixLoad, places: Sequence[int]) -> list[Held]:
        """Extend a prompt's cache to each of *places*; return its windows and states at each."""
        ends, cache, model = list[Held](), prompt.cache, self._model
        for place in places:
            some = prompt.tokens[length(cache, self._shape) : place]
            caches.forward(model, torch.tensor([some], device=model.device), cache)
            ends.append(Held.of_end(cache, self._shape))
        return ends

    def _run(
        self,
        ids: Tensor,
        call: Call,
        cache: Cache | None,
        mask: Tensor | None,
        watches: Sequence[StoppingCriteria] = (),
    ) -> GenerateDecoderOnlyOutput:
        model: Any = self._model
        given = {**call.passed, **caches.as_argument(cache), "generation_config": call.settings}
        given["stopping_criteria"] = [*watches, *(call.passed.get("stopping_criteria") or ())]
        given["attention_mask"] = torch.ones_like(ids) if mask is None else mask
        output: GenerateDecoderOnlyOutput = model.generate(ids, **given)
        return output

    def _generate_batch(
        self, ids: Tensor, mask: Tensor | None, prompts: Sequence[Sequence[int]], call: Call
    ) -> Generation:
        """Prefill each prompt alone, but for its last token, then generate from all together."""
        settings = call.settings
        if settings.cache_implementation == "static":
            fix = "rows of different prefixes are joined in a dynamic cache"
            raise InvalidRequestError("cache_implementation", "static", fix)
        settings.cache_implementation = caches.NO_KIND
        model, shape, width = self._model, self._shape, max(map(len, prompts))
        if min(map(len, prompts)) < width and not self._is_padding_checked:
            identity.check_padding(model)
            self._is_padding_checked = True
        loaded = [self._computed(tokens, call) for tokens in prompts]
        cache = caches.join_rows([one.cache for one in loaded], shape, model)
        if any(one.prefix.lossy_tokens for one in loaded):
            caches.notes_of(cache).exact_tokens = 0
        seen = None if mask is None else mask[:, -width:].ne(0).long()
        output = self._run(ids[:, -width:], call, cache, seen)
        if not shape.has_ends and self._is_still(call.weights, cache):
            held = length(cache, shape)
            for row, one in enumerate(loaded):
                first = width - len(one.tokens)
                generated = output.sequences[row, first:held].tolist()
                tokens = generation.until_end(generated, len(one.tokens), settings)
                self._save_new(one, tokens, self._reader(cache, (), row, first))
                self._compare(one)
        hits = tuple(one.prefix.hit_tokens for one in loaded)
        return Generation(output, sum(hits), hits)

    def _computed(self, tokens: Sequence[int], call: Call) -> PrefixLoad:
        """Return a prompt computed but for its last token; store its new windows and states."""
        prompt = PrefixLoad(self._link, call, tokens, DynamicCache(config=self._model.config))
        self._begin(prompt)
        held, last = length(prompt.cache, self._shape), len(tokens) - 1
        if held < last:
            began_s = time.monotonic()
            self._extend(prompt, [last])
            if self._staging is None:  # a device computes asynchronously
                self.learned.observe(last - held, time.monotonic() - began_s)
        if last and self._shape.has_ends and self._is_still(call.weights, prompt.cache):
            reader = self._reader(prompt.cache, prompt.ends)
            self._save(tokens[:last], reader, prompt.prefix.stored_tokens, call.extra)
        return prompt
