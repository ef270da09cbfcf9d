"""The asyncio client: calls of the blocking client, run in threads.

A call has ended once its await returns, cancelled or not, since it may use the caller's memory or
hold something on the server. That takes at most the call's own deadline.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Generator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)
from contextvars import copy_context
from functools import partial, update_wrapper
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from kvstore.client.chunk_reads import STOPPED
from kvstore.client.client import MAX_WAIT_S, Client, Keys, Tokens
from kvstore.client.options import ClientOptions, milliseconds
from kvstore.client.server_state import EventPage, Place, followed
from kvstore.proto.plans import EngineTerms
from kvstore.proto.types import Accuracy, Match, Model

MAX_WAITING = 2
"""Lookups of one client that block on the server, one thread each; the others poll."""
WAIT_S = 0.5
"""How long each blocks before it checks for cancellation."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.005, 0.1
"""Between two polls; the pause doubles each time."""
T = TypeVar("T")
P = ParamSpec("P")
C = TypeVar("C", bound=AbstractContextManager[Any])


async def settled(
    work: Callable[[], T], *, undo: Callable[[T], object] | None = None, always: bool = False
) -> T:
    """Run *work* in a thread. When cancelled, return once *work* has ended or can never start.

    Cancelling ends reads early; *undo* is then called in a thread with the result of *work*, which
    is otherwise lost. With *always*, *work* runs in any case.
    """
    stopped, context = threading.Event(), copy_context()
    context.run(STOPPED.set, stopped)
    claim = threading.Lock()  # taken once: by the thread that starts, or the canceller

    def run() -> Any:
        return work() if claim.acquire(blocking=False) else None

    loop = asyncio.get_running_loop()
    running: asyncio.Future[T] = loop.run_in_executor(None, context.run, run)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stopped.set()
        if not always and claim.acquire(blocking=False):  # it never starts
            raise
        while not running.done():
            with suppress(asyncio.CancelledError):  # once is enough
                await asyncio.wait([running])
        if running.exception() is None and undo is not None:
            await settled(partial(undo, running.result()), always=True)
        raise


def awaited(
    call: Callable[Concatenate[Client, P], T],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """Return *call* of the blocking client as a coroutine function."""

    async def run(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await settled(partial(call, self.sync, *args, **kwargs))

    update_wrapper(run, call)
    return run


def iterated(
    call: Callable[Concatenate[Client, P], Generator[T, None, None]],
) -> Callable[Concatenate[AsyncClient, P], AsyncGenerator[T, None]]:
    """Return *call* as an async generator. Use with ``contextlib.aclosing``."""

    async def run(
        self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs
    ) -> AsyncGenerator[T, None]:
        begin = partial(call, self.sync, *args, **kwargs)
        items = await settled(begin, undo=lambda begun: begun.close())
        try:
            while (item := await settled(partial(next, items, None))) is not None:
                yield item
        finally:
            await settled(items.close, always=True)

    update_wrapper(run, call)
    return run


def entered(
    call: Callable[Concatenate[Client, P], C],
) -> Callable[Concatenate[AsyncClient, P], AbstractAsyncContextManager[C]]:
    """Return *call*, for ``async with`` over what it returns, whose own methods block."""

    async def run(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> AsyncIterator[C]:
        def undo(one: C) -> None:
            one.__exit__(asyncio.CancelledError, asyncio.CancelledError(), None)

        one = await settled(partial(call, self.sync, *args, **kwargs), undo=undo)
        async with AsyncExitStack() as stack:
            stack.push_async_exit(lambda *why: settled(partial(one.__exit__, *why), always=True))
            yield one

    update_wrapper(run, call)
    return asynccontextmanager(run)


class AsyncClient:
    """``Client`` for asyncio: the same calls, awaited; ``Client`` documents them.

    Use ``async with`` for leases, segments and layered puts, ``async for`` for layers and events.
    Pass the layers of a put by ``await asyncio.to_thread(put.layer, ...)``.
    """

    def __init__(self, address: str, model: Model, options: ClientOptions | None = None) -> None:
        self.sync = Client(address, model, options)
        self._waiting = threading.BoundedSemaphore(MAX_WAITING)

    def __reduce__(self) -> tuple[Any, ...]:
        """Reach another process as a new client of the same server."""
        return type(self), self.sync.__reduce__()[1]

    keys = awaited(Client.keys)
    get = awaited(Client.get)
    put = awaited(Client.put)
    get_layers = iterated(Client.get_layers)
    put_layers = entered(Client.put_layers)
    lease = entered(Client.lease)
    get_chunks = awaited(Client.get_chunks)
    put_chunks = awaited(Client.put_chunks)
    get_chunk_layers = iterated(Client.get_chunk_layers)
    put_chunk_layers = entered(Client.put_chunk_layers)
    get_levelled = awaited(Client.get_levelled)
    name_segments = awaited(Client.name_segments)
    find_segments = entered(Client.find_segments)
    report_reuse = awaited(Client.report_reuse)
    pin = awaited(Client.pin)
    unpin = awaited(Client.unpin)
    announce_puts = awaited(Client.announce_puts)
    delete = awaited(Client.delete)
    clear = awaited(Client.clear)
    stat = awaited(Client.stat)
    list = awaited(Client.list)
    frame = awaited(Client.frame)
    status = awaited(Client.status)
    drain = awaited(Client.drain)
    end_if_hung = awaited(Client.end_if_hung)
    send_counts = awaited(Client.send_counts)

    def events(self, since: Place | None = None) -> AsyncGenerator[EventPage, None]:
        """Yield the chunks that the node gains and loses. Use with ``aclosing``."""
        return followed(self.sync.events(since))

    async def lookup(
        self,
        tokens: Tokens = None,
        *,
        keys: Keys = None,
        accuracy: Accuracy = Accuracy.exact,
        engine: EngineTerms | None = None,
        wait: float = 0.0,
        timeout: float | None = None,
    ) -> Match:
        """Find the longest prefix that can be read now. At most MAX_WAITING waits hold a thread."""
        look = partial(
            self.sync.lookup, tokens, keys=keys, accuracy=accuracy, engine=engine, timeout=timeout
        )
        clock, pause_s = asyncio.get_running_loop().time, FIRST_PAUSE_S
        until = clock() + milliseconds("wait", wait, MAX_WAIT_S) / 1000
        while True:
            left_s = until - clock()
            match = await self._look(look, left_s)
            if not match.pending or left_s <= 0:
                return match
            await asyncio.sleep(max(0.0, min(pause_s, until - clock())))
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    async def _look(self, look: Callable[..., Match], wait_s: float) -> Match:
        """Look up once. At most MAX_WAITING block, for up to WAIT_S: puts need the threads.

        A lookup holds no resource, so a cancelled one runs to its end in the background.
        """
        waits = wait_s > 0 and self._waiting.acquire(blocking=False)
        looking = asyncio.ensure_future(
            asyncio.to_thread(look, wait=min(wait_s, WAIT_S) if waits else 0.0)
        )

        def end(looked: asyncio.Future[Match]) -> None:
            if waits:
                self._waiting.release()
            if not looked.cancelled():
                looked.exception()  # retrieved, or asyncio would log it

        looking.add_done_callback(end)
        return await asyncio.shield(looking)

    async def close(self) -> None:
        """End the session and close the connection."""
        await settled(self.sync.close, always=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
