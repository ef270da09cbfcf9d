"""The client library: ``Client``, ``AsyncClient`` and what they take and give."""

from kvstore.client.access import Access as Access
from kvstore.client.aio import AsyncClient as AsyncClient
from kvstore.client.chunk import Chunk as Chunk
from kvstore.client.chunk import PlannedChunk as PlannedChunk
from kvstore.client.client import Client as Client
from kvstore.client.options import ClientOptions as ClientOptions
from kvstore.client.pages import PageAxes as PageAxes
from kvstore.client.pages import PagedKV as PagedKV
from kvstore.client.rectangle import Rectangle as Rectangle
