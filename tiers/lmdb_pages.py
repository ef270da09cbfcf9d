"""Reading an LMDB file that may be damaged.

LMDB trusts its pages: a zeroed one aborts the process, a missing one is a SIGBUS, and a bad
free list makes it overwrite live pages. This reader maps nothing and believes nothing. It
knows LMDB's data version 1 (every 0.9 release) as far as one unnamed database needs it.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from kvstore.proto.errors import InvalidFrameError

DATA_VERSION = 1
_MAGIC = 0xBEEFC0DE
_NO_PAGE = (1 << 64) - 1
_MAX_DEPTH = 32
_HEADER = struct.Struct("<QHHHH")
_META = struct.Struct("<IIQQ IHHQQQQQ IHHQQQQQ QQ".replace(" ", ""))
_NODE = struct.Struct("<HHHH")
_U64 = struct.Struct("<Q")
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE = 1, 2, 4, 8
_INTEGER_KEYS = 8
_BIG_DATA = 1


class _Tree(NamedTuple):
    flags: int
    depth: int
    entries: int
    root: int


class _Meta(NamedTuple):
    version: int
    page_bytes: int
    free: _Tree
    main: _Tree
    last_page: int
    transaction: int


class _Node(NamedTuple):
    key: bytes
    child: int
    data: bytes


class _Damage(Exception):
    """This page or what hangs below it cannot be used."""


class LmdbReader:
    """Yield the rows of the LMDB file at *path* and count what is wrong with it.

    After ``rows`` is exhausted ``damage`` is 0 only if LMDB can safely open the file; each
    unusable page with what hangs below it counts as one. Not thread-safe.
    """

    def __init__(self, path: Path) -> None:
        self.damage = 0
        self._path = path
        self._fd = -1
        self._page_bytes = mmap.PAGESIZE
        self._last_page = 0
        self._used: set[int] = set()

    def rows(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield (key, value) in order of keys, as the last transaction left them.

        Raises OSError, and InvalidFrameError when the file is of an unknown LMDB version.
        """
        self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            meta = self._newest_meta()
            if meta is not None:
                yield from self._walk(meta.main, integer_keys=False)
                self._account_pages(meta)
        finally:
            os.close(self._fd)

    def _newest_meta(self) -> _Meta | None:
        first = self._meta(0)
        if first is not None:
            self._page_bytes = first.page_bytes
        found = [meta for meta in (first, self._meta(self._page_bytes)) if meta is not None]
        versions = {meta.version for meta in found}
        if len(found) == 2 and len(versions) == 1 and DATA_VERSION not in versions:
            raise InvalidFrameError("index", versions, f"this reader knows LMDB {DATA_VERSION}")
        known = [meta for meta in found if meta.version == DATA_VERSION]
        self.damage += 2 - len(known)
        newest = max(known, key=lambda meta: meta.transaction, default=None)
        if newest is not None:
            self._page_bytes, self._last_page = newest.page_bytes, newest.last_page
        return newest

    def _meta(self, offset: int) -> _Meta | None:
        raw = os.pread(self._fd, _HEADER.size + _META.size, offset)
        if len(raw) < _HEADER.size + _META.size:
            return None
        words = _META.unpack_from(raw, _HEADER.size)
        page_bytes = words[4]
        sane = 512 <= page_bytes <= 65536 and page_bytes & (page_bytes - 1) == 0
        if _HEADER.unpack_from(raw)[2] != _META_PAGE or words[0] != _MAGIC or not sane:
            return None
        free, main = (
            _Tree(words[at + 1], words[at + 2], words[at + 6], words[at + 7]) for at in (4, 12)
        )
        return _Meta(words[1], page_bytes, free, main, *words[20:])

    def _walk(self, tree: _Tree, *, integer_keys: bool) -> Iterator[tuple[bytes, bytes]]:
        if tree.flags != (_INTEGER_KEYS if integer_keys else 0) or tree.depth > _MAX_DEPTH:
            self.damage += 1
            return
        count, before = 0, self.damage
        if tree.root != _NO_PAGE:
            for node in self._below(tree.root, tree.depth, (b"", None), integer_keys):
                count += 1
                yield node.key, node.data
        if self.damage == before and count != tree.entries:
            self.damage += 1

    def _below(
        self, page: int, depth: int, bounds: tuple[bytes, bytes | None], integer_keys: bool
    ) -> Iterator[_Node]:
        try:
            nodes = self._nodes(page, _LEAF if depth == 1 else _BRANCH)
            _check_order(nodes, bounds, leaf=depth == 1, integer_keys=integer_keys)
        except _Damage:
            self.damage += 1
            return
        if depth == 1:
            yield from self._resolve(nodes)
            return
        starts = [bounds[0], *(_rank(node.key, integer_keys) for node in nodes[1:])]
        stops = [*starts[1:], bounds[1]]
        for node, low, high in zip(nodes, starts, stops, strict=True):
            yield from self._below(node.child, depth - 1, (low, high), integer_keys)

    def _resolve(self, nodes: list[_Node]) -> Iterator[_Node]:
        for node in nodes:
            if not node.child:
                yield node
                continue
            try:
                (page,) = _U64.unpack(node.data)
                yield node._replace(data=self._overflow(page, node.child))
            except _Damage:
                self.damage += 1

    def _page(self, page: int, kind: int) -> bytes:
        if not 2 <= page <= self._last_page or page in self._used:
            raise _Damage
        raw = os.pread(self._fd, self._page_bytes, page * self._page_bytes)
        if len(raw) < self._page_bytes:
            raise _Damage
        number, _, flags, _, _ = _HEADER.unpack_from(raw)
        if number != page or flags != kind:
            raise _Damage
        self._used.add(page)
        return raw

    def _nodes(self, page: int, kind: int) -> list[_Node]:
        """Return the nodes of a page whose contents tile its upper part without a gap."""
        raw = self._page(page, kind)
        _, _, _, lower, upper = _HEADER.unpack_from(raw)
        if not _HEADER.size < lower <= upper <= len(raw) or lower % 2:
            raise _Damage
        places = struct.unpack_from(f"<{(lower - _HEADER.size) // 2}H", raw, _HEADER.size)
        sizes: list[tuple[int, int]] = []
        nodes: list[_Node] = []
        for at in places:
            if not upper <= at <= len(raw) - _NODE.size:
                raise _Damage
            low, high, flags, key_bytes = _NODE.unpack_from(raw, at)
            data_at = at + _NODE.size + key_bytes
            child = low | high << 16
            data_bytes = 0
            if kind == _BRANCH:
                child |= flags << 32
            elif flags & ~_BIG_DATA:
                raise _Damage
            else:
                data_bytes = _U64.size if flags else child
            stop = data_at + data_bytes
            if stop > len(raw):
                raise _Damage
            in_place = kind == _LEAF and not flags
            key = raw[at + _NODE.size : data_at]
            nodes.append(_Node(key, 0 if in_place else child, raw[data_at:stop]))
            sizes.append((at, stop + stop % 2))
        sizes.sort()
        ends = [upper, *(stop for _, stop in sizes)]
        if [at for at, _ in sizes] != ends[:-1] or ends[-1] != len(raw):
            raise _Damage
        return nodes

    def _overflow(self, page: int, data_bytes: int) -> bytes:
        raw = self._page(page, _OVERFLOW)
        _, _, _, low, high = _HEADER.unpack_from(raw)
        pages = -(-(_HEADER.size + data_bytes) // self._page_bytes)
        span = range(page + 1, page + pages)
        if low | high << 16 != pages or page + pages - 1 > self._last_page:
            raise _Damage
        if not self._used.isdisjoint(span):
            raise _Damage
        self._used.update(span)
        data = os.pread(self._fd, data_bytes, page * self._page_bytes + _HEADER.size)
        if len(data) < data_bytes:
            raise _Damage
        return data

    def _account_pages(self, meta: _Meta) -> None:
        """Every page is in a tree or in the free list, and none is in both."""
        free: list[int] = []
        for _, data in self._walk(meta.free, integer_keys=True):
            count = _U64.unpack_from(data)[0] if len(data) >= _U64.size else _NO_PAGE
            if _U64.size * (count + 1) > len(data):
                self.damage += 1
                return
            free += struct.unpack_from(f"<{count}Q", data, _U64.size)
        pages = self._used.union(free)
        whole = len(self._used) + len(free) == len(pages) == max(0, meta.last_page - 1)
        if not whole or (pages and (min(pages) < 2 or max(pages) > meta.last_page)):
            self.damage += 1


def _rank(key: bytes, integer_keys: bool) -> bytes:
    """Return *key* so that byte order is the tree's order."""
    return key[::-1] if integer_keys else key


def _check_order(
    nodes: list[_Node], bounds: tuple[bytes, bytes | None], *, leaf: bool, integer_keys: bool
) -> None:
    """A branch's first key is never read, so LMDB leaves anything in it."""
    ranks = [_rank(node.key, integer_keys) for node in (nodes if leaf else nodes[1:])]
    low, high = bounds
    if any(first >= second for first, second in pairwise(ranks)):
        raise _Damage
    if ranks and (ranks[0] < low or (high is not None and ranks[-1] >= high)):
        raise _Damage
