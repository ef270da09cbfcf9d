"""`kvstore stat`: everything that is known of one chunk, its frame read and verified."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from google.protobuf import json_format

from kvstore.cli.ls import chunk_as_dict, kept, readable_time
from kvstore.cli.spaces import Where, find, hex_prefix, places
from kvstore.cli.status import readable_size
from kvstore.cli.tables import Grid, open_console
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import ChunkCorruptError, InvalidFrameError
from kvstore.proto.frame import FrameHeader
from kvstore.proto.messages import as_message
from kvstore.proto.types import Accuracy, ChunkKey, DType, LayerKind


@dataclass(frozen=True, slots=True)
class ChunkFacts:
    """What is known of a chunk. ``header`` is of its frame, None when that could not be read."""

    key: ChunkKey
    chunk: pb.ChunkStat
    representation: pb.Representation
    header: FrameHeader | None
    damage: str = ""

    @property
    def verified(self) -> bool:
        """Whether every byte of the frame was read and is right."""
        return self.header is not None


def stat_chunk(where: Where, name: str) -> ChunkFacts | None:
    """Return what is known of the chunk called *name*; None when it is not there.

    Raises InvalidRequestError, KVStoreErrors.
    """
    hex_prefix("key", name)
    with places(where) as opened:
        found = find(opened, name)
        if found is None:
            return None
        place, key = found
        known = place.client.stat(keys=[key], ranks=True)
        if not known:
            return None
        header, damage = None, ""
        try:
            frame = place.client.frame(key, accuracy=Accuracy.approximate)
            header = frame[0] if frame is not None else None
        except (ChunkCorruptError, InvalidFrameError) as error:
            damage = str(error)
        kind = as_message(pb.Representation, place.client.model)
        return ChunkFacts(key, known[0], kind, header, damage)


def stat_as_json(facts: ChunkFacts) -> str:
    """Return it as JSON."""
    found: dict[str, Any] = {"key": facts.key.hex(), **chunk_as_dict(facts.chunk)}
    found["components"] = [_component(one) for one in facts.chunk.components]
    found["verified"] = facts.verified
    found["damage"] = facts.damage or None
    if facts.header is not None:
        found["position"] = facts.header.position
        found["prefill_flops"] = facts.header.prefill_flops
        found["content"] = facts.header.content.hex()
    found["representation"] = json_format.MessageToDict(
        facts.representation, preserving_proto_field_name=True
    )
    return json.dumps(found, indent=2)


def _component(one: pb.Component) -> dict[str, object]:
    return {
        "kind": LayerKind(one.kind).name,
        "dtype": DType(one.dtype).name,
        "layers": one.layers,
        "kv_heads": one.kv_heads,
        "head_dim": one.head_dim,
        "tokens": one.tokens,
    }


def print_stat(facts: ChunkFacts) -> None:
    """Print it as tables."""
    chunk, kind, console = facts.chunk, facts.representation, open_console()
    rows = [
        ("key", facts.key.hex()),
        ("parent", chunk.parent.hex() if any(chunk.parent) else "none: it begins a prompt"),
        ("model", f"{kind.model_id}, revision {kind.model_revision}"),
        ("adapter, quantization", f"{kind.adapter_digest}, {kind.quantization}"),
        ("tokens", f"{chunk.tokens}, behind {chunk.context_tokens} that are here"),
        ("raw size", readable_size(chunk.raw_bytes)),
        ("frame", "verified" if facts.verified else facts.damage or "not read in time"),
        ("last use", "unknown" if chunk.idle_s < 0 else f"{readable_time(chunk.idle_s)} ago"),
        ("hits", str(chunk.hits)),
        ("kept by", kept(chunk)),
        ("lives for", readable_time(chunk.expires_s) if chunk.expires_s else "as long as it stays"),
        ("priority", str(chunk.priority)),
    ]
    if facts.header is not None:
        rows.insert(5, ("position", f"token {facts.header.position} of its prompt"))
    for name, value in rows:
        console.print(f"{name + ':':<23}{value}")
    copies = Grid("tier", "codec", "accuracy", "size", "evicted after", "policy")
    for one in chunk.copies:
        copies.add_row(
            one.tier, one.codec, Accuracy(one.accuracy).name, readable_size(one.size_bytes),
            f"{'at least ' if one.at_least else ''}{one.before} others", one.policy,
        )  # fmt: skip
    console.print(copies)
    parts = Grid("layers", "kind", "dtype", "KV heads", "head dim", "tokens")
    for part in map(_component, chunk.components):
        names = ("layers", "kind", "dtype", "kv_heads", "head_dim", "tokens")
        parts.add_row(*(str(part[name]) for name in names))
    console.print(parts)
