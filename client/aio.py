"""The asyncio client: the blocking one, called in threads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import TracebackType

from kvstore.client.chunk import Chunk
from kvstore.client.client import Client
from kvstore.client.lease import ChunkLease
from kvstore.client.options import ClientOptions
from kvstore.client.tensors import LayerTensors
from kvstore.client.transport import Put
from kvstore.codecs.base import ChunkTensors
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.types import ChunkKey, Fidelity, Match, Representation


class AsyncClient:
    """``Client`` for asyncio: the same calls, awaited. See there for what each does."""

    def __init__(
        self,
        address: str,
        representation: Representation,
        options: ClientOptions | None = None,
    ) -> None:
        self.sync = Client(address, representation, options)

    async def keys(self, tokens: Sequence[int], extra: Sequence[bytes] = ()) -> list[ChunkKey]:
        """Name the chunks of a prompt."""
        return await asyncio.to_thread(self.sync.keys, tokens, extra)

    async def put(self, chunks: Sequence[Chunk], *, durable: bool = False) -> list[Put]:
        """Store chunks."""
        return await asyncio.to_thread(self.sync.put, chunks, durable=durable)

    async def lookup(
        self, keys: Sequence[ChunkKey], *, min_fidelity: Fidelity = Fidelity.exact
    ) -> Match:
        """Find the longest prefix of *keys* that can be read now."""
        return await asyncio.to_thread(self.sync.lookup, keys, min_fidelity=min_fidelity)

    async def get(
        self, keys: Sequence[ChunkKey], out: Sequence[LayerTensors] | None = None
    ) -> list[ChunkTensors]:
        """Read the longest prefix of *keys* that is there in time, verified."""
        return await asyncio.to_thread(self.sync.get, keys, out)

    @asynccontextmanager
    async def lease(self, keys: Sequence[ChunkKey]) -> AsyncIterator[ChunkLease]:
        """Keep what is ready of *keys* from eviction inside ``async with``."""
        lease = await asyncio.to_thread(self.sync.lease, keys)
        try:
            yield lease
        finally:
            await asyncio.to_thread(lease.release)

    async def pin(self, keys: Sequence[ChunkKey], ttl_ms: int) -> int:
        """Keep chunks from eviction for *ttl_ms*."""
        return await asyncio.to_thread(self.sync.pin, keys, ttl_ms)

    async def unpin(self, keys: Sequence[ChunkKey]) -> int:
        """End pins."""
        return await asyncio.to_thread(self.sync.unpin, keys)

    async def delete(self, keys: Sequence[ChunkKey]) -> int:
        """Forget chunks on every tier."""
        return await asyncio.to_thread(self.sync.delete, keys)

    async def clear(self) -> int:
        """Forget every chunk of this client's namespace."""
        return await asyncio.to_thread(self.sync.clear)

    async def stat(self, keys: Sequence[ChunkKey]) -> list[pb.ChunkStat]:
        """Return what the server knows of those chunks that exist."""
        return await asyncio.to_thread(self.sync.stat, keys)

    async def list(self, limit: int = 0) -> Sequence[pb.ChunkStat]:
        """Return the chunks of this client's namespace."""
        return await asyncio.to_thread(self.sync.list, limit)

    async def status(self) -> pb.StatusResponse:
        """Return the server's state."""
        return await asyncio.to_thread(self.sync.status)

    async def drain(self) -> bool:
        """Have the server refuse new work and save what it holds."""
        return await asyncio.to_thread(self.sync.drain)

    async def close(self) -> None:
        """End the session and close the connection."""
        await asyncio.to_thread(self.sync.close)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
