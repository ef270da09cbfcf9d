"""The LookupDesk: what is stored of a prompt, asked in a thread while the engine goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from kvstore.client.engines.vllm_names import ChunkChain, Identity
from kvstore.proto.errors import RepresentationError
from kvstore.proto.types import ChainDigest

MAX_WAITING_LOOKUPS = 1024
"""Prompts that wait to be looked up; a further one is a miss."""

CLOSE_S = 2.0

WAITERS = 8
"""Prompts of which a desk that waits for other engines asks at the same time."""


class Ticket:
    """A prompt that is being looked up.

    ``ready`` is None until there is an answer: how many of its first chunks are stored.
    ``chain`` names its chunks once it is there; ``refusal`` says why they have no names.
    Written by the desk's thread, ``ready`` last.
    """

    __slots__ = ("asked_s", "chain", "identify", "ready", "refusal", "tokens")

    def __init__(
        self, tokens: Sequence[int], identify: Callable[[], Identity], asked_s: float
    ) -> None:
        self.tokens = tokens
        self.identify = identify
        self.asked_s = asked_s
        self.chain: ChunkChain | None = None
        self.refusal = ""
        self.ready: int | None = None

    @classmethod
    def spent(cls) -> Ticket:
        """Return one of a prompt that has no names, and so is neither loaded nor stored."""
        ticket = cls((), Identity, 0.0)
        ticket.ready = 0
        return ticket


class LookupDesk:
    """Answers tickets, *threads* at a time. ``ask`` and ``wait`` are for the engine's thread.

    *find* returns how many of the digests it is given are stored, or None when the store failed;
    it may take its time. After a failure the next tickets are answered by 0 at once, and after
    *retry_s* one of them, already answered, is what the store is asked about again. The first
    question is about no digests at all: it opens a session before a request needs one.
    """

    def __init__(
        self,
        find: Callable[[Sequence[ChainDigest]], int | None],
        chunk_tokens: int,
        retry_s: float,
        clock: Callable[[], float] = time.monotonic,
        threads: int = 1,
    ) -> None:
        self._find = find
        self._chunk_tokens = chunk_tokens
        self._retry_s = retry_s
        self._clock = clock
        self._failed_s: float | None = None
        self._tickets: SimpleQueue[Ticket | None] = SimpleQueue()
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
        with self._answers:
            is_full = self._waiting >= MAX_WAITING_LOOKUPS
            self._waiting += not is_full
        if is_full:
            ticket.refusal, ticket.ready = "queue", 0
        else:
            self._tickets.put(ticket)
        return ticket

    def wait(self, within_s: float) -> None:
        """Wait until some ticket is answered, if one is waiting. For who has nothing to do."""
        with self._answers:
            if self._waiting:
                self._answers.wait(within_s)

    def _run(self, is_first: bool) -> None:
        if is_first:
            self._look(())
        while (ticket := self._tickets.get()) is not None:
            self._answer(ticket)
            with self._answers:
                self._waiting -= 1
                self._answers.notify_all()

    def _answer(self, ticket: Ticket) -> None:
        digests = self._name(ticket)
        if not digests:
            ticket.ready = 0
            return
        if self._failed_s is not None:
            ticket.ready = 0
            if self._clock() - self._failed_s < self._retry_s:
                return
        ready = self._look(digests)
        if ticket.ready is None:
            ticket.ready = ready or 0

    def _look(self, digests: Sequence[ChainDigest]) -> int | None:
        ready = self._find(digests)
        self._failed_s = self._clock() if ready is None else None
        return ready

    def _name(self, ticket: Ticket) -> list[ChainDigest]:
        try:
            chain = ChunkChain(ticket.identify(), self._chunk_tokens)
        except RepresentationError as error:
            ticket.refusal = error.field
            return []
        except OSError:  # the files of an adapter
            ticket.refusal = "lora_path"
            return []
        chain.extend(ticket.tokens, len(ticket.tokens) // self._chunk_tokens)
        ticket.chain, ticket.tokens = chain, ()
        return chain.digests

    def close(self) -> None:
        """End the threads. Idempotent."""
        for _ in self._threads:
            self._tickets.put(None)
        until_s = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
