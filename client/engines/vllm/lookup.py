"""What is stored of a prompt, found out in a thread while the engine goes on, and how its chunks
are named: by its tokens, and everything else its KV depends on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from kvstore.client.engines.base import Connector, DaemonThreads
from kvstore.client.engines.identity import adapter_files, files_digest
from kvstore.client.engines.vllm.messages import INCOMPATIBLE, ChunkName, Role
from kvstore.proto.errors import KVStoreError, ModelError
from kvstore.proto.keys import chain_digest, content_digest, page_hash, tokens_le32
from kvstore.proto.types import DIGEST_BYTES, ROOT, ChainDigest

MAX_LOSSY_BLOCKS = 131_072
"""Blocks that are known by vLLM's hashes of them; once there were more, any may be lossy."""
MAX_LOOKUP_CHUNKS = 4096
"""What is looked up of one prompt: as many as a server takes in one question."""
MAX_WAITING_LOOKUPS = 1024
"""Prompts that wait to be looked up; a further one is a miss."""
WAITERS = 8
"""Prompts that are looked up at the same time where a lookup waits for other engines."""
MAX_ADAPTERS = 4096
"""LoRA adapters of one engine whose requests are stored."""


class LookupResult(NamedTuple):
    """How many of a prompt's first chunks to load, and how many are stored: computing the others
    may be sooner."""

    ready: int = 0
    found: int = 0


NOTHING = LookupResult()


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """What names the KV of a request beside its tokens.

    ``first`` enters the first chunk and with it the whole chain. ``features``: images and the like,
    each its hash and its first token and the one after its last; one enters the chunks that it
    reaches into. ``is_sglangs``: there is neither, and chunks are named as SGLang names pages.
    """

    first: tuple[bytes, ...] = ()
    features: tuple[tuple[bytes, int, int], ...] = ()
    is_sglangs: bool = False

    def within(self, start: int, stop: int) -> list[bytes]:
        """Return what enters the chunk of tokens *start* to *stop*."""
        named = [
            b"mm:%d:%d:%b" % (begin, end, name)
            for name, begin, end in self.features
            if begin < stop and end > start
        ]
        return [*(self.first if start == 0 else ()), *named]


class RequestHasher:
    """Identities of the requests of one engine. For one thread, which may wait for files."""

    def __init__(self, *, sglang_names: bool = False) -> None:
        self._sglang_names = sglang_names
        # What each adapter was when it was first seen: its files' marks, and its digest.
        self._adapters: dict[tuple[int, str], tuple[list[tuple[str, int, int]], bytes]] = {}

    def identity(self, request: Any, epoch: bytes) -> CacheIdentity:
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
        features = []
        for one in getattr(request, "mm_features", None) or ():
            if not one.identifier:
                raise ModelError("mm_features", one.identifier, "an input without a hash")
            start = one.mm_position.offset
            features.append((one.identifier.encode(), start, start + one.mm_position.length))
        is_plain = not first and not features
        return CacheIdentity(tuple(first), tuple(features), is_plain and self._sglang_names)

    def _adapter(self, lora: Any) -> bytes:
        """Return the digest of an adapter, which the engine may have loaded long ago."""
        if lora.load_inplace:
            raise ModelError("load_inplace", True, "use another lora_int_id")
        files = adapter_files(lora.lora_path)
        marks = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
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


class ChunkChain:
    """The names of a request's whole chunks, extended as its tokens grow. Not thread-safe."""

    def __init__(self, identity: CacheIdentity, chunk_tokens: int) -> None:
        self.chunks: list[ChunkName] = []
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
            self.chunks.append(ChunkName(digest, parent, content_digest(data, extra), start))

    @property
    def digests(self) -> list[ChainDigest]:
        """The digest of each chunk."""
        return [chunk.digest for chunk in self.chunks]


@dataclass(slots=True, eq=False)
class PendingLookup:
    """A prompt that is being looked up.

    ``result`` is None until there is one. ``chain`` names its chunks once it is there; ``refusal``
    says why they have no names. Written by the worker's thread, ``result`` last. ``is_over`` is
    written by the engine's: nobody wants to know any more.
    """

    began_s: float
    result: LookupResult | None = None
    chain: ChunkChain | None = None
    refusal: str = ""
    is_over: bool = False

    @property
    def found(self) -> int:
        """How many of its first chunks are stored, as far as is known."""
        return (self.result or NOTHING).found

    @property
    def digests(self) -> list[ChainDigest]:
        """The digests of its chunks, as far as they are named."""
        return [] if self.chain is None else self.chain.digests


class LookupWorker:
    """Looks up what is stored of prompts, and announces what is not. For the engine's thread.

    After a failure the next lookups find nothing at once, and after ``retry_after_ms`` one of them,
    already over, is what the store is tried with again. The first is of no digests at all: it opens
    a session before a request needs one. What is announced of lookups that are over is taken back.
    """

    def __init__(
        self,
        connector: Connector,
        role: Role,
        *,
        has_ends: bool = False,
        clock: Callable[[], float] = time.monotonic,
        threads: int | None = None,
    ) -> None:
        """Without *threads* nothing is looked up; None: as many as the *role* needs."""
        self._connector = connector
        self._role = role
        self._has_ends = has_ends
        self._chunk_tokens = connector.client.options.chunk_tokens
        self._retry_s = connector.client.options.retry_after_ms / 1000
        self._clock = clock
        self._failed_s: float | None = None
        self._waiting = 0
        self._answers = threading.Condition()  # guards _waiting
        threads = (WAITERS if role.wait_ms else 1) if threads is None else threads
        self._threads = DaemonThreads("kvstore-lookup", threads)
        if threads:
            self._do(partial(self._look, ()))

    @property
    def is_down(self) -> bool:
        """Whether the store failed when it was last tried."""
        return self._failed_s is not None

    def note_down(self) -> None:
        """Take note that the store failed, as somebody else found out."""
        self._failed_s = self._clock()

    def submit(self, tokens: Sequence[int], identify: Callable[[], CacheIdentity]) -> PendingLookup:
        """Have *tokens* looked up; *identify* says what else names them, and may wait for files."""
        lookup = PendingLookup(self._clock())
        if not self._do(partial(self._answer, lookup, tokens, identify), lookup):
            lookup.refusal, lookup.result = "queue", NOTHING
        return lookup

    def take_back(self, digests: Sequence[ChainDigest]) -> None:
        """Have what was announced of *digests* taken back; where too much waits, time does it."""
        if self._role.handover_ms and digests and not self.is_down:
            self._do(partial(self._announce, digests, 0.0))

    def _do(self, work: Callable[[], object], lookup: PendingLookup | None = None) -> bool:
        with self._answers:
            if self._waiting >= MAX_WAITING_LOOKUPS:
                return False
            self._waiting += 1
        self._threads.submit(work).add_done_callback(partial(self._end, lookup))
        return True

    def _end(self, lookup: PendingLookup | None, _: Future[object]) -> None:
        """Count off what was done, or was cancelled; a lookup that has no result is a miss."""
        with self._answers:
            if lookup is not None:
                lookup.result = lookup.result or NOTHING
            self._waiting -= 1
            self._answers.notify_all()

    def wait(self, lookup: PendingLookup, within_s: float) -> None:
        """Wait until *lookup* is over. For who has nothing to do."""
        with self._answers:
            self._answers.wait_for(lambda: lookup.result is not None, within_s)

    def _answer(
        self, lookup: PendingLookup, tokens: Sequence[int], identify: Callable[[], CacheIdentity]
    ) -> None:
        # A store that failed is tried again, with whatever there is.
        if lookup.is_over and not self.is_down:
            return
        try:
            chain = ChunkChain(identify(), self._chunk_tokens)
            chain.extend(tokens, len(tokens) // self._chunk_tokens)
        except ModelError as error:
            lookup.refusal = error.field
        except OSError:  # the files of an adapter
            lookup.refusal = "lora_path"
        except (*INCOMPATIBLE, KVStoreError):  # what a user sent may not end the thread
            lookup.refusal = "error"
        else:
            lookup.chain = chain
        if not lookup.digests:
            return
        if self._failed_s is not None:
            lookup.result = NOTHING  # nobody waits for what the store is tried with
            if self._clock() - self._failed_s < self._retry_s:
                return
        result = self._look(lookup.digests)
        lookup.result = lookup.result or result
        if lookup.is_over:
            self._announce(lookup.digests, 0.0)

    def _look(self, digests: Sequence[ChainDigest]) -> LookupResult | None:
        digests = digests[:MAX_LOOKUP_CHUNKS]
        result = self._connector.ask(lambda: self._find(digests), None)
        if result is not None and result.found < len(digests):
            self._announce(digests[result.found :], self._role.handover_ms / 1000)
        self._failed_s = self._clock() if result is None else None
        return result

    def _find(self, digests: Sequence[ChainDigest]) -> LookupResult:
        keys = self._connector.keys_of(digests)
        if not keys:
            return NOTHING
        least = self._connector.allowed(self._connector.least).least
        wait_s = self._role.wait_ms / 1000
        match = self._connector.client.lookup(keys=keys, accuracy=least, wait=wait_s)
        worth = self._connector.worth_loading(match, len(keys) * self._chunk_tokens)
        # A prefix of windows can be gone on from at its end only.
        is_useless = self._has_ends and worth < match.ready
        return LookupResult(0 if is_useless else worth, match.ready)

    def _announce(self, digests: Sequence[ChainDigest], within_s: float) -> None:
        """Announce chunks to who looks them up, for so long; for no time: take that back."""
        if self._role.handover_ms:
            ask, client = self._connector.ask, self._connector.client
            ask(lambda: client.announce_puts(self._connector.keys_of(digests), within=within_s), 0)

    def close(self) -> None:
        """Do nothing any more; what is under way is bounded by the client's deadline."""
        self._threads.close()


class LossyBlocks:
    """The hashes of blocks that were loaded lossy. For the scheduler's thread.

    None is forgotten: vLLM does not report that it gave a block up. Once one was not remembered,
    as there are too many or it has no hash, ``is_over`` is true: from then on every block that a
    request finds in vLLM's own cache counts as lossy.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._hashes: set[Any] = set()
        self.is_over = False

    def note(self, request: Any, start: int, stop: int) -> None:
        """Take note that tokens *start* to *stop* of *request* were loaded lossy."""
        first, last = start // self._block_tokens, -(-stop // self._block_tokens)
        found = self._hashes_of(request)[first:last]
        more = self._hashes.union(found)
        self.is_over |= len(more) > MAX_LOSSY_BLOCKS or len(found) < last - first
        if not self.is_over:
            self._hashes = more

    def exact_tokens(self, request: Any, tokens: int) -> int:
        """Return how many of the first *tokens*, found in vLLM's own cache, are exact."""
        if self.is_over:
            return 0
        if not self._hashes:
            return tokens
        found = self._hashes_of(request)[: -(-tokens // self._block_tokens)]
        lossy = (number for number, one in enumerate(found) if one in self._hashes)
        return min(tokens, next(lossy, len(found)) * self._block_tokens)

    def _hashes_of(self, request: Any) -> Sequence[Any]:
        """Return the hashes of the whole blocks of *request*; nothing where they are of others."""
        hashes: Sequence[Any] = getattr(request, "block_hashes", ())
        is_of_blocks = len(hashes) <= request.num_tokens // self._block_tokens
        return hashes if is_of_blocks else ()
