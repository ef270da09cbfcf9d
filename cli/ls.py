"""`kvstore ls`: the namespaces of a server and the chunks in them, a page at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.cli.spaces import Place, Where, ask_spaces, digests_from, hex_prefix, places
from kvstore.cli.status import readable_size
from kvstore.cli.tables import Grid, open_console
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import DIGEST_BYTES

MAX_LISTED = 10_000
"""Chunks of one page."""


@dataclass(frozen=True, slots=True)
class Page:
    """Chunks of a namespace, and whether there are more behind them."""

    space: str
    model: str
    chunks: Sequence[pb.ChunkStat]
    is_more: bool


def list_chunks(where: Where, prefix: str, after: str, limit: int) -> list[Page]:
    """Return a page of chunks by namespace. Raises InvalidRequestError, KVStoreErrors."""
    if not 1 <= limit <= MAX_LISTED:
        raise InvalidRequestError("limit", limit, f"use 1 to {MAX_LISTED}")
    start = hex_prefix("prefix", prefix) if prefix else ""
    last = hex_prefix("after", after) if after else ""
    with places(where) as opened:
        if last and len(opened) != 1:
            fix = "say of which --namespace the page is"
            raise InvalidRequestError("after", after, fix)
        behind = _digest_of(opened[0], last) if last else b""
        pages: list[Page] = []
        left = limit
        for place in opened:
            found = _listed(place, start, behind, left + 1)
            space = place.client.namespace.hex()
            pages.append(Page(space, place.model, found[:left], len(found) > left))
            left -= min(left, len(found))
            if not left:
                break
        return pages


def _digest_of(place: Place, digits: str) -> bytes:
    if len(digits) == 2 * DIGEST_BYTES:  # its chunk may be gone by now
        return bytes.fromhex(digits)
    found = digests_from(place, digits, 2)
    if len(found) != 1:
        fix = "give the digest at the end of the page before, or digits that begin it alone"
        raise InvalidRequestError("after", digits, fix)
    return found[0]


def _listed(place: Place, start: str, after: bytes, limit: int) -> list[pb.ChunkStat]:
    """Return chunks of *place* whose digests begin with *start*, an odd number of digits or not."""
    found: list[pb.ChunkStat] = []
    for digit in "0123456789abcdef" if len(start) % 2 else ("",):
        if len(found) < limit:
            prefix = bytes.fromhex(start + digit)
            found += place.client.list(limit - len(found), after=after, prefix=prefix)
    return found


def list_as_json(address: str, pages: Sequence[Page]) -> str:
    """Return a page as JSON; ``after`` begins the next one, null when there is none."""
    spaces = [
        {
            "namespace": page.space,
            "model": page.model,
            "chunks": [chunk_as_dict(chunk) for chunk in page.chunks],
            "after": page.chunks[-1].digest.hex() if page.is_more else None,
        }
        for page in pages
    ]
    return json.dumps({"address": address, "spaces": spaces}, indent=2)


def chunk_as_dict(chunk: pb.ChunkStat) -> dict[str, object]:
    """Return what is known of a chunk, for JSON: digests as digits, all else as numbers."""
    return {
        "digest": chunk.digest.hex(),
        "parent": chunk.parent.hex(),
        "tokens": chunk.tokens,
        "context_tokens": chunk.context_tokens,
        "raw_bytes": chunk.raw_bytes,
        "copies": [_copy_as_dict(copy) for copy in chunk.copies],
        "hits": chunk.hits,
        "idle_s": None if chunk.idle_s < 0 else round(chunk.idle_s, 3),
        "leases": chunk.leases,
        "pinned_s": round(chunk.pinned_s, 3),
        "expires_s": round(chunk.expires_s, 3) or None,
        "priority": chunk.priority,
    }


def _copy_as_dict(copy: pb.Copy) -> dict[str, object]:
    found: dict[str, object] = {
        "tier": copy.tier,
        "codec": copy.codec,
        "size_bytes": copy.size_bytes,
        "accuracy": ACCURACIES.get(copy.accuracy, "unknown"),
    }
    if copy.policy:
        found |= {"policy": copy.policy, "before": copy.before, "at_least": copy.at_least}
    return found


ACCURACIES = {0: "approximate", 1: "bounded", 2: "exact"}


def print_chunks(pages: Sequence[Page]) -> None:
    """Print a page as tables, one a namespace."""
    console = open_console()
    pages = [page for page in pages if page.chunks]
    if not pages:
        console.print("no chunks")
    for page in pages:
        console.print(f"namespace {page.space}: {page.model}")
        table = Grid("digest", "tiers", "size", "idle", "hits", "kept")
        for one in page.chunks:
            table.add_row(
                one.digest.hex(),
                ",".join(copy.tier for copy in one.copies),
                readable_size(sum(copy.size_bytes for copy in one.copies)),
                "-" if one.idle_s < 0 else readable_time(one.idle_s),
                str(one.hits),
                kept(one),
            )
        console.print(table)
        if page.is_more:
            last = page.chunks[-1].digest.hex()
            text = f"more: --namespace {page.space} --after {last}"
            console.print(text)


def kept(chunk: pb.ChunkStat) -> str:
    """Say what keeps a chunk from being evicted."""
    why = [f"{chunk.leases} leases"] if chunk.leases else []
    if chunk.pinned:
        why.append(f"pinned {readable_time(chunk.pinned_s)}")
    return ", ".join(why) or "-"


def readable_time(seconds: float) -> str:
    """Return *seconds* in the unit that suits them."""
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


# --- namespaces


def list_spaces(address: str, tenant: str) -> list[pb.KnownSpace]:
    """Return the namespaces of a tenant; of every one for *."""
    return ask_spaces(address, tenant)


def spaces_as_json(address: str, spaces: Sequence[pb.KnownSpace]) -> str:
    """Return namespaces as JSON."""
    rows = [
        {
            "namespace": one.key_namespace.hex(),
            "tenant": one.tenant,
            "model": one.representation.model_id,
            "revision": one.representation.model_revision,
            "client": one.client,
            "chunks": one.chunks,
        }
        for one in spaces
    ]
    return json.dumps({"address": address, "spaces": rows}, indent=2)


def print_spaces(spaces: Sequence[pb.KnownSpace]) -> None:
    """Print namespaces as a table."""
    table = Grid("namespace", "chunks", "tenant", "client", "model and revision", wraps=2)
    for one in spaces:
        kind = one.representation
        table.add_row(
            one.key_namespace.hex(), str(one.chunks), one.tenant, one.client,
            f"{kind.model_id} {kind.model_revision}",
        )  # fmt: skip
    open_console().print(table)
