"""The client library: ``Client``, ``AsyncClient`` and what they take and give."""

from kvstore.client.aio import AsyncClient as AsyncClient
from kvstore.client.chunk import Chunk as Chunk
from kvstore.client.chunk import PlannedChunk as PlannedChunk
from kvstore.client.chunk import Shard as Shard
from kvstore.client.client import Client as Client
from kvstore.client.kv import Hit as Hit
from kvstore.client.lookups import Lease as Lease
from kvstore.client.options import Access as Access
from kvstore.client.options import ClientOptions as ClientOptions
from kvstore.client.paged_cache import PagedCache as PagedCache
