"""The asyncio client: the blocking one, called in threads.

A call is over once its await has ended, cancelled or not, as it may use the caller's memory or hold
something on the server. That takes the call's own deadline at most.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import AbstractContextManager, suppress
from contextvars import copy_context
from functools import partial, update_wrapper
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from kvstore.client.chunk_reads import STOPPED
from kvstore.client.client import MAX_WAIT_S, Client, Keys, Tokens
from kvstore.client.options import ClientOptions, milliseconds
from kvstore.client.server_state import EventPage, Place, followed
from kvstore.proto.plans import EngineTerms
from kvstore.proto.types import Accuracy, Match, Model

MAX_WAITING = 2
"""Lookups of one client that wait on the server, a thread each; the rest look again and again."""
WAIT_S = 0.5
"""What one of them waits for before it looks whether somebody still wants to know."""
FIRST_PAUSE_S, LAST_PAUSE_S = 0.005, 0.1
"""Between two looks: twice as long each time."""
T = TypeVar("T")
P = ParamSpec("P")
C = TypeVar("C", bound=AbstractContextManager[Any])


async def settled(
    work: Callable[[], T], *, undo: Callable[[T], object] | None = None, always: bool = False
) -> T:
    """Run *work* in a thread. Cancelled, it returns once *work* has ended, or will never begin.

    Reads then end sooner, and *undo* is called in a thread with what *work* returned, which
    nobody else gets. With *always* it does begin.
    """
    stopped, context = threading.Event(), copy_context()
    context.run(STOPPED.set, stopped)
    turn = threading.Lock()  # for who comes first: the thread, or who cancels

    def run() -> Any:
        return work() if turn.acquire(blocking=False) else None

    loop = asyncio.get_running_loop()
    running: asyncio.Future[T] = loop.run_in_executor(None, context.run, run)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        stopped.set()
        if not always and turn.acquire(blocking=False):  # it never begins
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
    """Return *call* of the blocking client, awaited."""

    async def run(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await settled(partial(call, self.sync, *args, **kwargs))

    update_wrapper(run, call)
    return run


def iterated(
    call: Callable[Concatenate[Client, P], Generator[T, None, None]],
) -> Callable[Concatenate[AsyncClient, P], AsyncGenerator[T, None]]:
    """Return *call*, each of whose items is awaited. Use with ``contextlib.aclosing``."""

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


class Entered(Generic[C]):
    """What a call returned, for as long as ``async with`` lasts; it blocks where it calls."""

    def __init__(self, call: Callable[[], C]) -> None:
        self._call = call
        self._entered: C

    async def __aenter__(self) -> C:
        def undo(one: C) -> None:
            one.__exit__(asyncio.CancelledError, asyncio.CancelledError(), None)

        self._entered = await settled(self._call, undo=undo)
        return self._entered

    async def __aexit__(self, *error: Any) -> None:
        await settled(partial(self._entered.__exit__, *error), always=True)


def entered(
    call: Callable[Concatenate[Client, P], C],
) -> Callable[Concatenate[AsyncClient, P], Entered[C]]:
    """Return *call*, for ``async with``."""

    def run(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> Entered[C]:
        return Entered(partial(call, self.sync, *args, **kwargs))

    update_wrapper(run, call)
    return run


class AsyncClient:
    """``Client`` for asyncio: the same calls, awaited. See there for what each does.

    ``async with`` takes leases, segments and layered puts, ``async for`` layers and events. The
    layers of a put are given by ``await asyncio.to_thread(put.layer, ...)``.
    """

    def __init__(self, address: str, model: Model, options: ClientOptions | None = None) -> None:
        self.sync = Client(address, model, options)
        self._waiting = threading.BoundedSemaphore(MAX_WAITING)

    def __reduce__(self) -> tuple[Any, ...]:
        """Have another process make a client of the same server."""
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
        """Yield what the node gains and loses, read by a thread. Use with ``aclosing``."""
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
        """Find the longest prefix that can be read now. Lookups that wait hold few threads."""
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
        """Look once, and wait for a while where few others do: threads are for those who put.

        A lookup holds nothing, so a cancelled one goes on unseen.
        """
        waits = wait_s > 0 and self._waiting.acquire(blocking=False)
        looking = asyncio.ensure_future(
            asyncio.to_thread(look, wait=min(wait_s, WAIT_S) if waits else 0.0)
        )

        def end(looked: asyncio.Future[Match]) -> None:
            if waits:
                self._waiting.release()
            if not looked.cancelled():
                looked.exception()  # seen, whether or not somebody still wants to know

        looking.add_done_callback(end)
        return await asyncio.shield(looking)

    async def close(self) -> None:
        """End the session and close the connection."""
        await settled(self.sync.close, always=True)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
