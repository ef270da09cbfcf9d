"""`kvstore put`: chunks from files that `kvstore get` wrote, under the names they had."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from kvstore.cli.chunk_files import ChunkFile, read_chunk
from kvstore.cli.spaces import Where, client_of, representations
from kvstore.client.chunk import Chunk
from kvstore.client.transport import Put
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.keys import chunk_key, representation_digest
from kvstore.proto.messages import representation_from_message
from kvstore.proto.types import Accuracy, ChainDigest, ChunkKey


def put_files(
    where: Where, paths: Iterable[Path], *, durable: bool
) -> Iterator[tuple[ChunkKey, Put]]:
    """Put the chunk of each file; yield its key there and what became of it.

    Raises InvalidRequestError for a file that is no chunk, or is not as exact as what was put,
    and KVStoreErrors.
    """
    for path in paths:
        chunk = read_chunk(path)
        if chunk.accuracy is not Accuracy.exact:
            fix = "was restored from a lossy copy, and would pass for what was computed"
            raise InvalidRequestError("file", str(path), fix)
        with client_of(where, _kind_of(where, chunk, path)) as client:
            key = chunk_key(client.namespace, ChainDigest(chunk.digest))
            parent = ChainDigest(chunk.parent)
            named = Chunk(
                key, chunk.tensors, parent, chunk.position, chunk.prefill_flops, chunk.content,
                chunk.layout,
            )  # fmt: skip
            yield key, client.put_chunks([named], durable=durable)[0]


def _kind_of(where: Where, chunk: ChunkFile, path: Path) -> pb.Representation:
    """Return the Model of *chunk*: its file's, or one known there with its digest."""
    if chunk.representation is not None:
        return chunk.representation
    for kind in representations(where):
        if representation_digest(representation_from_message(kind)) == chunk.model_digest:
            return kind
    fix = "is of a model that is not known there; give --model-representation"
    raise InvalidRequestError("file", str(path), fix)
