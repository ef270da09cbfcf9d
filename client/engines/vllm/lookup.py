"""The LookupDesk: what is stored of a prompt, asked in a thread while the engine goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias

from kvstore.client.engines.identity import adapter_files, files_digest
from kvstore.client.engines.vllm.messages import MISFITS, LoadOrder, NamedChunk
from kvstore.client.page_names import page_hash
from kvstore.client.prefill import Deadline
from kvstore.proto.errors import KVStoreError, ModelError
from kvstore.proto.keys import chain_digest, content_digest, tokens_le32
from kvstore.proto.plans import NO_HINTS, Hints
from kvstore.proto.types import DIGEST_BYTES, ROOT, ChainDigest

MAX_WAITING_LOOKUPS = 1024
"""Prompts that wait to be looked up; a further one is a miss."""

CLOSE_S = 2.0

NO_LIMIT = 1 << 62
"""More tokens than any request has."""

WAITERS = 8
"""Prompts of which a desk that waits for other engines asks at the same time."""


class Ticket:
    """A prompt that is being looked up.

    ``ready`` is None until there is an answer: how many of its first chunks are stored.
    ``chain`` names its chunks once it is there; ``refusal`` says why they have no names.
    Written by the desk's thread, ``ready`` last. ``is_over`` is written by who asked: nobody
    wants to know any more.
    """

    __slots__ = ("asked_s", "chain", "identify", "is_over", "ready", "refusal", "tokens")

    def __init__(
        self, tokens: Sequence[int], identify: Callable[[], Identity], asked_s: float
    ) -> None:
        self.tokens = tokens
        self.identify = identify
        self.asked_s = asked_s
        self.chain: ChunkChain | None = None
        self.refusal = ""
        self.ready: int | None = None
        self.is_over = False

    @property
    def found(self) -> int:
        """How many of its first chunks are stored, as far as is known."""
        return found_of(self.ready)

    @classmethod
    def spent(cls) -> Ticket:
        """Return one of a prompt that has no names, and so is neither loaded nor stored."""
        ticket = cls((), Identity, 0.0)
        ticket.ready = 0
        return ticket


class Fewer(int):
    """How many chunks are worth loading, where ``found`` are there and computing is sooner."""

    found: int

    def __new__(cls, worth: int, found: int) -> Fewer:
        """Return *worth*, of *found*."""
        fewer = super().__new__(cls, worth)
        fewer.found = found
        return fewer


def found_of(ready: int | None) -> int:
    """Return how many chunks are there, where so many are *ready* to be loaded."""
    return ready.found if isinstance(ready, Fewer) else ready or 0


@dataclass(slots=True)
class Tracked:
    """A request: its lookup, and how far it is stored. ``stored`` is in chunks."""

    request: Any
    ticket: Ticket
    preemptions: int
    computed_tokens: int = 0
    """What the engine had of it in its own cache when it last asked."""
    is_counted: bool = False
    is_loaded: bool = False
    stored: int | None = None
    loaded_from: int = 0
    """The first chunk of its last load."""
    loaded_stop: int = 0
    """The token behind its last load."""
    hints: Hints = NO_HINTS
    within: Deadline | None = None
    """Its deadline."""
    load: LoadOrder | None = None
    """Goes with the next orders."""
    exact_tokens: int = NO_LIMIT
    """Its first tokens that no lossy copy is among, as far as is known."""
    is_looked_at: bool = False
    """Whether those that it found in the engine's own cache were looked at."""


class LookupDesk:
    """Answers tickets, *threads* at a time. ``ask`` and ``wait`` are for the engine's thread.

    *find* returns how many of the digests it is given are stored, or None when the store failed;
    it may take its time. After a failure the next tickets are answered by 0 at once, and after
    *retry_s* one of them, already answered, is what the store is asked about again. The first
    question is about no digests at all: it opens a session before a request needs one.
    *withdraw* takes back what *find* announced of digests; of tickets that are over nothing stays.
    """

    def __init__(
        self,
        find: Callable[[Sequence[ChainDigest]], int | None],
        chunk_tokens: int,
        retry_s: float,
        clock: Callable[[], float] = time.monotonic,
        threads: int = 1,
        withdraw: Callable[[Sequence[ChainDigest]], object] | None = None,
    ) -> None:
        self._find = find
        self._withdraw = withdraw
        self._chunk_tokens = chunk_tokens
        self._retry_s = retry_s
        self._clock = clock
        self._failed_s: float | None = None
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._waiting = 0
        self._answers = threading.Condition()  # guards _waiting
        self._threads = [
            threading.Thread(target=self._run, args=(n == 0,), name="kvstore-lookup", daemon=True)
            for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_down(self) -> bool:
        """Whether the store failed when it was last asked."""
        return self._failed_s is not None

    def note_down(self) -> None:
        """Take note that the store failed, as somebody else found out."""
        self._failed_s = self._clock()

    def ask(self, tokens: Sequence[int], identify: Callable[[], Identity]) -> Ticket:
        """Have *tokens* looked up; *identify* says what else names them, and may wait for files."""
        ticket = Ticket(tokens, identify, self._clock())
        if not self._do(partial(self._answer, ticket)):
            ticket.refusal, ticket.ready = "queue", 0
        return ticket

    def give_up(self, ticket: Ticket, digests: Sequence[ChainDigest]) -> None:
        """Have what was announced of *digests* taken back, and nothing more asked of *ticket*."""
        ticket.is_over = True
        self.take_back(digests)

    def take_back(self, digests: Sequence[ChainDigest]) -> None:
        """Have what was announced of *digests* taken back; where too much waits, time does it."""
        if self._withdraw is not None and digests and not self.is_down:
            self._do(partial(self._withdraw_all, digests))

    def _withdraw_all(self, digests: Sequence[ChainDigest]) -> None:
        if self._withdraw is not None:
            self._withdraw(digests)

    def _do(self, work: Callable[[], None]) -> bool:
        with self._answers:
            is_full = self._waiting >= MAX_WAITING_LOOKUPS
            self._waiting += not is_full
        if not is_full:
            self._work.put(work)
        return not is_full

    def wait(self, within_s: float, ticket: Ticket | None = None) -> None:
        """Wait until *ticket* is answered, or some one, if any waits. For who has nothing to do."""
        with self._answers:
            if ticket is not None:
                self._answers.wait_for(lambda: ticket.ready is not None, within_s)
            elif self._waiting:
                self._answers.wait(within_s)

    def _run(self, is_first: bool) -> None:
        if is_first:
            self._look(())
        while (work := self._work.get()) is not None:
            work()
            with self._answers:
                self._waiting -= 1
                self._answers.notify_all()

    def _answer(self, ticket: Ticket) -> None:
        # A store that failed is asked again, by whatever there is to ask.
        digests = [] if ticket.is_over and not self.is_down else self._name(ticket)
        if not digests:
            ticket.ready = 0
            return
        if self._failed_s is not None:
            ticket.ready = 0
            if self._clock() - self._failed_s < self._retry_s:
                return
        ready = self._look(digests)
        if ticket.ready is None:
            ticket.ready = 0 if ready is None else ready
        if ticket.is_over:
            self._withdraw_all(digests)

    def _look(self, digests: Sequence[ChainDigest]) -> int | None:
        ready = self._find(digests)
        self._failed_s = self._clock() if ready is None else None
        return ready

    def _name(self, ticket: Ticket) -> list[ChainDigest]:
        try:
            chain = ChunkChain(ticket.identify(), self._chunk_tokens)
            chain.extend(ticket.tokens, len(ticket.tokens) // self._chunk_tokens)
        except ModelError as error:
            ticket.refusal = error.field
            return []
        except OSError:  # the files of an adapter
            ticket.refusal = "lora_path"
            return []
        except (*MISFITS, KVStoreError):  # what a user sent may not end the thread: all wait for it
            ticket.refusal = "error"
            return []
        ticket.chain, ticket.tokens = chain, ()
        return chain.digests

    def close(self) -> None:
        """End the threads. Idempotent."""
        for _ in self._threads:
            self._work.put(None)
        until_s = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))


MAX_ADAPTERS = 4096
"""LoRA adapters of one engine whose requests are stored."""

_Marks: TypeAlias = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class Feature:
    """An image or the like in a prompt: its hash, and the tokens whose embeddings it is."""

    name: bytes
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Identity:
    """What names the KV of a request beside its tokens.

    ``first`` enters the first chunk and with it the whole chain; a feature enters the chunks
    that it reaches into, so that what is before it is shared. ``is_sglangs``: there is neither,
    and chunks are named as SGLang names pages.
    """

    first: tuple[bytes, ...] = ()
    features: tuple[Feature, ...] = ()
    is_sglangs: bool = False

    def within(self, start: int, stop: int) -> list[bytes]:
        """Return what enters the chunk of tokens *start* to *stop*."""
        reaching = [one for one in self.features if one.start < stop and one.stop > start]
        named = [b"mm:%d:%d:" % (one.start, one.stop) + one.name for one in reaching]
        return [*(self.first if start == 0 else ()), *named]


class RequestNames:
    """Identities of the requests of one engine. For one thread, which may wait for files.

    *sglang_names*: as in ClientOptions.
    """

    def __init__(self, *, sglang_names: bool = False) -> None:
        self._sglang_names = sglang_names
        # What each adapter was when it was first seen: its files' marks, and its digest.
        self._adapters: dict[tuple[int, str], tuple[_Marks, bytes]] = {}

    def identity(self, request: Any, epoch: bytes) -> Identity:
        """Return the identity of vLLM's *request*. Raises ModelError if it has none.

        *epoch* separates what was computed before the engine's caches were reset.
        """
        if getattr(request, "prompt_embeds", None) is not None:
            raise ModelError("prompt_embeds", "given", "such prompts are not stored")
        if getattr(request, "resumable", False):
            raise ModelError("resumable", True, "a stream takes tokens back")
        first = [b"epoch:" + epoch] if epoch else []
        salt = getattr(request, "cache_salt", None)
        if salt:
            first.append(b"salt:" + salt.encode())
        lora = getattr(request, "lora_request", None)
        if lora is not None:
            first.append(b"lora:" + self._adapter(lora))
        features = tuple(map(_feature, getattr(request, "mm_features", None) or ()))
        is_plain = not first and not features
        return Identity(tuple(first), features, is_plain and self._sglang_names)

    def _adapter(self, lora: Any) -> bytes:
        """Return the digest of an adapter, which the engine may have loaded long ago."""
        if lora.load_inplace:
            raise ModelError("load_inplace", True, "use another lora_int_id")
        files = adapter_files(lora.lora_path)
        marks = tuple((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)
        named = (lora.lora_int_id, lora.lora_path)
        if named not in self._adapters:
            if len(self._adapters) >= MAX_ADAPTERS:
                raise ModelError("lora_int_id", lora.lora_int_id, "too many adapters")
            self._adapters[named] = (marks, files_digest(files))
        first_marks, digest = self._adapters[named]
        if marks != first_marks:
            # Nobody can tell whether the engine has the old weights or the new ones.
            raise ModelError("lora_path", lora.lora_path, "its files have changed")
        return digest


def _feature(feature: Any) -> Feature:
    if not feature.identifier:
        raise ModelError("mm_features", feature.identifier, "an input without a hash")
    place = feature.mm_position
    return Feature(feature.identifier.encode(), place.offset, place.offset + place.length)


class ChunkChain:
    """The names of a request's whole chunks, extended as its tokens grow. Not thread-safe."""

    def __init__(self, identity: Identity, chunk_tokens: int) -> None:
        self.chunks: list[NamedChunk] = []
        self._identity = identity
        self._chunk_tokens = chunk_tokens
        self._page = b""

    def extend(self, tokens: Sequence[int], count: int) -> None:
        """Name the first *count* chunks of *tokens*, which begin with those named before."""
        size = self._chunk_tokens
        for number in range(len(self.chunks), count):
            start = number * size
            data = tokens_le32(tokens[start : start + size])
            extra = self._identity.within(start, start + size)
            parent = self.chunks[-1].digest if self.chunks else ROOT
            if self._identity.is_sglangs:
                self._page = page_hash(self._page, data)
                digest = ChainDigest(self._page[:DIGEST_BYTES])
            else:
                digest = chain_digest(parent, data, extra)
            self.chunks.append(NamedChunk(digest, parent, content_digest(data, extra), start))

    @property
    def digests(self) -> list[ChainDigest]:
        """The digest of each chunk."""
        return [chunk.digest for chunk in self.chunks]
