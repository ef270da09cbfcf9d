"""A router that sends each prompt to the engine whose node has the longest prefix of it.

It follows the events of each node's kvstore-server, tracks the location of chunks, and proxies HTTP
requests with token ids (``POST /v1/completions`` of vLLM, ``"prompt": [1, 2, ...]``):

    python examples/prefix_router/router.py --model model.json --listen 127.0.0.1:8000 \\
        --node 10.0.0.1:7420=10.0.0.1:8001 --node 10.0.0.2:7420=10.0.0.2:8001

Locations are hints: a request sent to the wrong node is computed there, nothing worse.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import json_format

from kvstore.client import AsyncClient, ClientOptions
from kvstore.client.server_state import EventPage, Place
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import KVStoreError
from kvstore.proto.keys import chain_digests
from kvstore.proto.messages import representation_from_message
from kvstore.proto.types import DIGEST_BYTES, Accuracy, Model

MAX_CHUNKS = 1 << 20
"""Limit of tracked chunks; those with the oldest events are evicted."""
LOAD_TOKENS = 512
"""A running request of an engine outweighs this many tokens of prefix."""
RETRY_S = 1.0
CONNECT_S = 2.0
MAX_HEAD_BYTES = 1 << 16
MAX_BODY_BYTES = 1 << 24


@dataclass(eq=False)
class Node:
    """A store and its engine, with ``running`` requests."""

    store: str
    engine: str
    running: int = 0
    is_followed: bool = False
    """Whether the store's events arrive; if not, its chunks do not count."""


class Places:
    """Which nodes have which chunks, by digest: the same prompt has the same digests everywhere."""

    def __init__(self, limit: int = MAX_CHUNKS) -> None:
        self._limit = limit
        self._held: OrderedDict[bytes, set[tuple[Node, str]]] = OrderedDict()

    def apply(self, node: Node, page: EventPage) -> None:
        """Apply a page of a node's events."""
        if page.cleared:
            self.clear(node)
        for event in page.events:
            digest = event.key[DIGEST_BYTES:]
            copies = self._held.setdefault(digest, set())
            if event.accuracy is Accuracy.exact:
                copies.add((node, event.tier))
                self._held.move_to_end(digest)
            else:  # removed, or not accurate enough for a lookup
                copies.discard((node, event.tier))
            if not copies:
                del self._held[digest]
        while len(self._held) > self._limit:
            self._held.popitem(last=False)

    def clear(self, node: Node) -> None:
        """Remove all chunks of a node."""
        for digest, copies in list(self._held.items()):
            copies -= {copy for copy in copies if copy[0] is node}
            if not copies:
                del self._held[digest]

    def prefix(self, digests: Sequence[bytes], node: Node) -> int:
        """Return how many chunks of a prompt, from the first on, a node has."""
        for count, digest in enumerate(digests):
            if not any(copy[0] is node for copy in self._held.get(digest, ())):
                return count
        return len(digests)

    def __len__(self) -> int:
        return len(self._held)


class Router:
    """Follows the nodes, ranks them and forwards requests."""

    def __init__(
        self, nodes: Sequence[Node], representation: Model, options: ClientOptions
    ) -> None:
        self.nodes = list(nodes)
        self.places = Places()
        self._representation = representation
        self._options = options
        self._round = 0
        self._server: asyncio.Server | None = None
        self._followers: list[asyncio.Task[None]] = []

    async def start(self, host: str, port: int) -> int:
        """Start to follow the nodes and to listen; return the port."""
        self._followers = [asyncio.create_task(self._follow(node)) for node in self.nodes]
        self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_HEAD_BYTES)
        return int(self._server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Stop listening and following."""
        if self._server is not None:
            self._server.close()
        for task in self._followers:
            task.cancel()
        await asyncio.gather(*self._followers, return_exceptions=True)

    async def _follow(self, node: Node) -> None:
        since: Place | None = None
        async with AsyncClient(node.store, self._representation, self._options) as client:
            while True:
                with suppress(KVStoreError):  # resumes, or a ``cleared`` page starts over
                    async with aclosing(client.events(since)) as pages:
                        async for page in pages:
                            self.places.apply(node, page)
                            since, node.is_followed = page.place, True
                node.is_followed = False
                await asyncio.sleep(RETRY_S)

    # --- ranking

    def ranked(self, tokens: Sequence[int]) -> list[Node]:
        """Return the nodes, the best for a prompt first; ties are broken round-robin."""
        size = self._options.chunk_tokens
        digests = chain_digests(tokens, size)
        self._round += 1

        def score(node: Node) -> int:
            known = self.places.prefix(digests, node) if node.is_followed else 0
            return size * known - LOAD_TOKENS * node.running

        start = self._round % len(self.nodes)
        return sorted(self.nodes[start:] + self.nodes[:start], key=score, reverse=True)

    # --- forwarding

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            body = await reader.readexactly(_body_bytes(head))
            await self._forward(head, body, writer)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            writer.write(_answer("400 Bad Request"))
        except OSError:
            pass  # client or engine hung up
        finally:
            with suppress(OSError):
                await writer.drain()
            writer.close()

    async def _forward(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        for node in self.ranked(_prompt(body)):
            host, _, port = node.engine.rpartition(":")
            try:
                opening = asyncio.open_connection(host, int(port))
                engine, request = await asyncio.wait_for(opening, CONNECT_S)
            except (OSError, TimeoutError):
                continue  # the next best
            node.running += 1
            try:
                request.write(_closing(head) + body)
                while data := await engine.read(1 << 16):
                    writer.write(data)
                    await writer.drain()
            finally:
                node.running -= 1
                request.close()
            return
        writer.write(_answer("503 Service Unavailable"))


def _body_bytes(head: bytes) -> int:
    for line in head.lower().split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name == b"content-length":
            if not 0 <= int(value) <= MAX_BODY_BYTES:
                raise ValueError("too long")
            return int(value)
    return 0


def _closing(head: bytes) -> bytes:
    """Return *head* with the header that makes the engine close the connection."""
    lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    kept = [line for line in lines if not line.lower().startswith(b"connection:")]
    return b"\r\n".join([*kept, b"Connection: close", b"", b""])


def _answer(status: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()


def _prompt(body: bytes) -> list[int]:
    """Return the token ids of a request, or [], which goes to the least busy node."""
    try:
        prompt = json.loads(body)["prompt"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    is_tokens = isinstance(prompt, list) and all(
        type(one) is int and 0 <= one < 1 << 32 for one in prompt
    )
    return prompt if is_tokens else []


async def _main(arguments: argparse.Namespace) -> None:
    message = json_format.Parse(arguments.model.read_text(), pb.Representation())
    options = ClientOptions("grpc", chunk_tokens=arguments.chunk_tokens, name="prefix-router")
    nodes = [Node(*text.split("=", 1)) for text in arguments.node]
    router = Router(nodes, representation_from_message(message), options)
    host, _, port = arguments.listen.rpartition(":")
    print("listening on port", await router.start(host, int(port)), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Route prompts to the node with their prefix.")
    parser.add_argument("--listen", default="127.0.0.1:8000", metavar="HOST:PORT")
    parser.add_argument("--model", type=Path, required=True, metavar="FILE")
    parser.add_argument("--chunk-tokens", type=int, default=256, metavar="N")
    parser.add_argument("--node", action="append", required=True, metavar="STORE=ENGINE")
    asyncio.run(_main(parser.parse_args()))
