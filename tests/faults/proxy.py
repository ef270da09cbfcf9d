"""A TCP proxy that does to a connection what networks do: delay, silence, cuts, flipped bytes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

_PIECE_BYTES = 1 << 16
_START_S = 10.0


@dataclass(slots=True)
class Trouble:
    """What happens to the bytes of one direction; the default is nothing.

    ``cut_at`` and ``flip_at`` count the bytes of that direction over all connections since the
    trouble was set; each happens once.
    """

    delay_s: float = 0.0
    is_silent: bool = False
    """Nothing gets through, and no connection is closed."""
    cut_at: int | None = None
    flip_at: int | None = None
    bytes_per_s: float = 0.0
    seen_bytes: int = 0

    def changed(self, data: bytes) -> tuple[bytes, bool]:
        """Return what becomes of *data*, and whether the connection is cut behind it."""
        start, self.seen_bytes = self.seen_bytes, self.seen_bytes + len(data)
        if self.flip_at is not None and start <= self.flip_at < self.seen_bytes:
            turned = bytearray(data)
            turned[self.flip_at - start] ^= 0x10
            data, self.flip_at = bytes(turned), None
        if self.cut_at is not None and start <= self.cut_at < self.seen_bytes:
            data, self.cut_at = data[: self.cut_at - start], None
            return data, True
        return data, False


class FaultProxy:
    """Listens on a free port of *host* and passes on to a target, with a thread of its own.

    ``to_server`` and ``to_client`` may be replaced at any time.
    """

    def __init__(self, target: tuple[str, int], host: str = "127.0.0.1") -> None:
        self.to_server = Trouble()
        self.to_client = Trouble()
        self.port = 0
        self.connections = 0
        """How many were opened since the start."""
        self._target = target
        self._host = host
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy")
        self._thread.start()
        self._server = self._run(self._listen()).result(_START_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def address(self) -> str:
        """Where to connect to instead of the target."""
        return f"{self._host}:{self.port}"

    def go_silent(self) -> None:
        """From now on nothing gets through in either direction."""
        self.to_server, self.to_client = Trouble(is_silent=True), Trouble(is_silent=True)

    def heal(self) -> None:
        """From now on nothing happens to new bytes; what was held back is cut off."""
        was_silent = self.to_server.is_silent or self.to_client.is_silent
        self.to_server, self.to_client = Trouble(), Trouble()
        if was_silent:
            self.cut()

    def cut(self) -> None:
        """End every connection now."""
        self._run(self._end_all()).result(_START_S)

    def close(self) -> None:
        """End every connection and the thread."""
        self._run(self._stop()).result(_START_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _listen(self) -> asyncio.Server:
        server = await asyncio.start_server(self._accept, self._host, 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _stop(self) -> None:
        self._server.close()
        await self._end_all()

    async def _end_all(self) -> None:
        me = asyncio.current_task()
        for writer in list(self._writers):
            writer.transport.abort()
        waiting = [task for task in self._tasks if task is not me]
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        other: asyncio.StreamWriter | None = None
        try:
            from_server, other = await asyncio.open_connection(*self._target)
            self._writers.add(other)
            both = (
                self._pass(reader, other, is_up=True),
                self._pass(from_server, writer, is_up=False),
            )
            halves = [asyncio.ensure_future(half) for half in both]
            try:
                await asyncio.wait(halves, return_when=asyncio.FIRST_EXCEPTION)
            finally:
                for half in halves:
                    half.cancel()
                await asyncio.gather(*halves, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            for one in (writer, other):
                if one is not None:
                    self._writers.discard(one)
                    one.transport.abort()
            self._tasks.discard(task)

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_up: bool
    ) -> None:
        while data := await reader.read(_PIECE_BYTES):
            trouble = self.to_server if is_up else self.to_client
            while trouble.is_silent:
                await asyncio.sleep(0.01)
                trouble = self.to_server if is_up else self.to_client
            wait_s = trouble.delay_s
            if trouble.bytes_per_s:
                wait_s += len(data) / trouble.bytes_per_s
            if wait_s:
                await asyncio.sleep(wait_s)
            data, is_cut = trouble.changed(data)
            writer.write(data)
            await writer.drain()
            if is_cut:
                raise _CutError
        with suppress(OSError):
            writer.write_eof()


class _CutError(Exception):
    """The connection is to be cut here."""
