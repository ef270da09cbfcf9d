"""Looks up a prompt's stored chunks in a thread beside the engine, and names its chunks by its
tokens and everything else its KV depends on.
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
"""Lossy blocks tracked by vLLM's hashes; beyond the limit any block counts as lossy."""
MAX_LOOKUP_CHUNKS = 4096
"""Chunks looked up per prompt: the most that a server accepts in one request."""
MAX_WAITING_LOOKUPS = 1024
"""Queued lookups; beyond the limit a prompt is a miss."""
WAITERS = 8
"""Concurrent lookups, if lookups wait for other engines."""
MAX_ADAPTERS = 4096
"""LoRA adapters of one engine whose requests are stored."""


class LookupResult(NamedTuple):
    """How many leading chunks of a prompt to load, and how many are stored: computing the others
    may be faster."""

    ready: int = 0
    found: int = 0


NOTHING = LookupResult()


@dataclass(frozen=True, slots=True)
class CacheIdentity:
    """What identifies the KV of a request beside its tokens.

    ``first`` enters the first chunk and with it the whole chain. ``features``: multimodal inputs,
    each its hash, its first token and the one after its last; one enters the chunks that it
    overlaps. ``is_sglangs``: there is neither, and chunks are named as SGLang names pages.
    """

    first: tuple[bytes, ...] = ()
    features: tuple[tuple[bytes, int, int], ...] = ()
    is_sglangs: bool = False

    def within(self, start: int, stop: int) -> list[bytes]:
        """Return the extra keys of the chunk of tokens *start* to *stop*."""
        named = [
            b"mm:%d:%d:%b" % (begin, end, name)
            for name, begin, end in self.features
            if begin < stop and end > start
        ]
        return [*(self.first if start == 0 else ()), *named]


class RequestHasher:
    """Computes identities of one engine's requests. For one thread, which may wait for files.
    Without *has_hashes* vLLM numbers images and other inputs instead of hashing them."""

    def __init__(self, *, sglang_names: bool = False, has_hashes: bool = True) -> None:
        self._sglang_names = sglang_names
        self._has_hashes = has_hashes
        # Each adapter's path, file marks and digest when first seen, by its id.
        self._adapters: dict[int, tuple[str, list[tuple[str, int, int]], bytes]] = {}

    def identity(self, request: Any, epoch: bytes) -> CacheIdentity:
        """Return the identity of vLLM's *request*; *epoch* separates KV computed before the
        engine's caches were reset. Raises ModelError if it has none."""
        if getattr(request, "prompt_embeds", None) is not None:
            raise ModelError("prompt_embeds", "given", "such prompts are not stored")
        if getattr(request, "resumable", False):
            raise ModelError("resumable", True, "a stream may retract tokens")
        first = [b"epoch:" + epoch] if epoch else []
        salt = getattr(request, "cache_salt", None)
        if salt:
            first.append(b"salt:" + salt.encode())
        lora = getattr(request, "lora_request", None)
        if lora is not None:
            first.append(b"lora:" + self._adapter(lora))
        features = []
        for one in getattr(request, "mm_features", None) or ():
            if not (one.identifier and self._has_hashes):
                raise ModelError("mm_features", one.identifier, "an input without a hash")
            start = one.mm_position.offset
            features.append((one.identifier.encode(), start, start + one.mm_position.length))
        is_plain = not first and not features
        return CacheIdentity(tuple(first), tuple(features), is_plain and self._sglang_names)

    def _adapter(self, lora: Any) -> bytes:
        """Return the digest of an adapter, which the engine may have loaded earlier."""
        if lora.load_inplace:
            raise ModelError("load_inplace", True, "use another lora_int_id")
        files = adapter_files(lora.lora_path)
        marks = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        number = lora.lora_int_id
        if number not in self._adapters:
            if len(self._adapters) >= MAX_ADAPTERS:
                raise ModelError("lora_int_id", number, "too many adapters")
            self._adapters[number] = (lora.lora_path, marks, files_digest(files))
        first_path, first_marks, digest = self._adapters[number]
        if lora.lora_path != first_path:
            # The engine looks for an adapter by its id only, and keeps the first one.
            raise ModelError("lora_int_id", number, "it was another adapter's: use another one")
        if marks != first_marks:
            # The engine may have the old weights or the new ones.
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
        """Name the first *count* chunks of *tokens*, which extend the tokens named before."""
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
    """The lookup of one prompt.

    ``result`` is None until the lookup ends. ``chain`` names the chunks once set; ``refusal`` is
    why they have no names. The lookup thread writes them, ``result`` last. The engine's thread
    sets ``is_over`` when the result is no longer needed.
    """

    began_s: float
    result: LookupResult | None = None
    chain: ChunkChain | None = None
    refusal: str = ""
    is_over: bool = False

    @property
    def found(self) -> int:
        """How many leading chunks are known to be stored."""
        return (self.result or NOTHING).found

    @property
    def digests(self) -> list[ChainDigest]:
        """The digests of the chunks named so far."""
        return [] if self.chain is None else self.chain.digests


class LookupWorker:
    """Looks up prompts' stored chunks, and announces missing ones. For the engine's thread.

    After a failure lookups miss at once; after ``retry_after_ms`` one of them, already answered,
    tries the store again. The first lookup has no digests: it opens a session before a request
    needs one. Announcements of lookups that are over are withdrawn.
    """

    def __init__(
        self,
        connector: Connector,
        role: Role,
        *,
        has_ends: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connector = connector
        self._role = role
        self._has_ends = has_ends
        self._chunk_tokens = connector.client.options.chunk_tokens
        self._retry_s = connector.client.options.retry_after_ms / 1000
        self._clock = clock
        self._failed_s: float | None = None
        self._waiting = 0
        self._changed = threading.Condition()  # guards _waiting
        threads = WAITERS if role.wait_ms else int(role.loads or role.stores)
        self._threads = DaemonThreads("kvstore-lookup", threads)
        if threads:
            self._do(partial(self._look, ()))

    @property
    def is_down(self) -> bool:
        """Whether the last attempt to reach the store failed."""
        return self._failed_s is not None

    def record_failure(self) -> None:
        """Record a failure of the store detected elsewhere."""
        self._failed_s = self._clock()

    def submit(self, tokens: Sequence[int], identify: Callable[[], CacheIdentity]) -> PendingLookup:
        """Queue a lookup of *tokens*; *identify* returns their identity, and may read files."""
        lookup = PendingLookup(self._clock())
        if not self._do(partial(self._run, lookup, tokens, identify), lookup):
            lookup.refusal, lookup.result = "queue", NOTHING
        return lookup

    def withdraw(self, digests: Sequence[ChainDigest]) -> None:
        """Withdraw announcements of *digests*; if the queue is full they expire."""
        if self._role.handover_ms and digests and not self.is_down:
            self._do(partial(self._announce, digests, 0.0))

    def _do(self, work: Callable[[], object], lookup: PendingLookup | None = None) -> bool:
        with self._changed:
            if self._waiting >= MAX_WAITING_LOOKUPS:
                return False
            self._waiting += 1
        self._threads.submit(work).add_done_callback(partial(self._end, lookup))
        return True

    def _end(self, lookup: PendingLookup | None, _: Future[object]) -> None:
        """Count down finished or cancelled work; a lookup without a result is a miss."""
        with self._changed:
            if lookup is not None:
                lookup.result = lookup.result or NOTHING
            self._waiting -= 1
            self._changed.notify_all()

    def wait(self, lookup: PendingLookup, within_s: float) -> None:
        """Wait until *lookup* has a result, at most *within_s*. For an idle engine."""
        with self._changed:
            self._changed.wait_for(lambda: lookup.result is not None, within_s)

    def _run(
        self, lookup: PendingLookup, tokens: Sequence[int], identify: Callable[[], CacheIdentity]
    ) -> None:
        # A failed store is retried even with a lookup that is over.
        if lookup.is_over and not self.is_down:
            return
        try:
            chain = ChunkChain(identify(), self._chunk_tokens)
            chain.extend(tokens, len(tokens) // self._chunk_tokens)
        except ModelError as error:
            lookup.refusal = error.field
        except OSError:  # the files of an adapter
            lookup.refusal = "lora_path"
        except (*INCOMPATIBLE, KVStoreError):  # user input must not end the thread
            lookup.refusal = "error"
        else:
            lookup.chain = chain
        if not lookup.digests:
            return
        if self._failed_s is not None:
            lookup.result = NOTHING  # no request waits for the retry
            if self._clock() - self._failed_s < self._retry_s:
                return
        result = self._look(lookup.digests)
        lookup.result = lookup.result or result
        if lookup.is_over:
            self._announce(lookup.digests, 0.0)

    def _look(self, digests: Sequence[ChainDigest]) -> LookupResult | None:
        digests = digests[:MAX_LOOKUP_CHUNKS]
        result = self._connector.guard(lambda: self._find(digests), None)
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
        # With windows a prefix can be continued only from its end.
        is_useless = self._has_ends and worth < match.ready
        return LookupResult(0 if is_useless else worth, match.ready)

    def _announce(self, digests: Sequence[ChainDigest], within_s: float) -> None:
        """Announce chunks to other lookups for *within_s*; 0: withdraw the announcement."""
        if self._role.handover_ms:
            link = self._connector
            link.guard(lambda: link.client.announce_puts(link.keys_of(digests), within=within_s), 0)

    def close(self) -> None:
        """Stop the threads; the client's deadline bounds lookups in progress."""
        self._threads.close()


class LossyBlocks:
    """The hashes of blocks that were loaded lossy. For the scheduler's thread.

    None is removed: vLLM does not report a block's eviction. Once one cannot be recorded, because
    there are too many or it has no hash, ``is_over`` is true: from then on every block that a
    request finds in vLLM's own cache counts as lossy.
    """

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._hashes: set[Any] = set()
        self.is_over = False

    def note(self, request: Any, start: int, stop: int) -> None:
        """Record that tokens *start* to *stop* of *request* were loaded lossy."""
        first, last = start // self._block_tokens, -(-stop // self._block_tokens)
        found = self._hashes_of(request)[first:last]
        more = self._hashes.union(found)
        self.is_over |= len(more) > MAX_LOSSY_BLOCKS or len(found) < last - first
        if not self.is_over:
            self._hashes = more

    def exact_tokens(self, request: Any, tokens: int) -> int:
        """Return how many of the leading *tokens*, found in vLLM's own cache, are exact."""
        if self.is_over:
            return 0
        if not self._hashes:
            return tokens
        found = self._hashes_of(request)[: -(-tokens // self._block_tokens)]
        lossy = (number for number, one in enumerate(found) if one in self._hashes)
        return min(tokens, next(lossy, len(found)) * self._block_tokens)

    def _hashes_of(self, request: Any) -> Sequence[Any]:
        """Return the hashes of *request*'s whole blocks; () if they are of smaller blocks."""
        hashes: Sequence[Any] = getattr(request, "block_hashes", ())
        is_of_blocks = len(hashes) <= request.num_tokens // self._block_tokens
        return hashes if is_of_blocks else ()
