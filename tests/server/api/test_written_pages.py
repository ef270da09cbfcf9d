"""What of a client's memory was written is looked up once."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.proto import unix_socket
from kvstore.proto.errors import InvalidRequestError
from kvstore.server.api.unix_server import Staging

PAGE = mmap.PAGESIZE
PAGES = 4096


class Memory:
    """A memfd of PAGES pages, none of them written."""

    def __init__(self, pages: int = PAGES) -> None:
        self.descriptor = unix_socket.create_memfd("test-written", pages * PAGE)
        self.memory = mmap.mmap(self.descriptor, pages * PAGE)
        mapped = mmap.mmap(self.descriptor, pages * PAGE, prot=mmap.PROT_READ)
        self.staging = Staging(mapped, self.descriptor)

    def write(self, page: int, pages: int = 1) -> None:
        for one in range(page, page + pages):
            self.memory[one * PAGE] = 1

    def has(self, page: int, pages: int = 1) -> bool:
        return self.has_bytes(page * PAGE, pages * PAGE)

    def has_bytes(self, offset: int, size_bytes: int) -> bool:
        try:
            return len(self.staging.part(offset, size_bytes)) == size_bytes
        except InvalidRequestError:
            return False

    def close(self) -> None:
        self.staging.close()
        self.memory.close()
        os.close(self.descriptor)


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory()
    yield memory
    memory.close()


def test_room_that_was_only_set_aside_is_no_written_memory(memory: Memory) -> None:
    os.posix_fallocate(memory.descriptor, 0, PAGES * PAGE)
    assert not memory.has(0)
    memory.write(0)
    assert memory.has(0)
    assert not memory.has(0, 2)


def test_nothing_is_learned_once_it_is_closed() -> None:
    memory = Memory(2)
    memory.write(0, 2)
    memory.staging.close()
    assert not memory.has(0)
    with suppress(OSError):
        memory.memory.close()
    os.close(memory.descriptor)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.booleans(), st.integers(0, 40 * PAGE - 1), st.integers(0, 12 * PAGE)),
        max_size=60,
    )
)
def test_a_part_is_written_just_when_each_of_its_pages_is(
    steps: list[tuple[bool, int, int]],
) -> None:
    memory, wrote = Memory(40), set[int]()
    for is_write, offset, size_bytes in steps:
        size_bytes = min(size_bytes, 40 * PAGE - offset)
        pages = (
            set(range(offset // PAGE, -(-(offset + size_bytes) // PAGE))) if size_bytes else set()
        )
        if is_write:
            for page in pages:
                memory.write(page)
            wrote |= pages
        else:
            assert memory.has_bytes(offset, size_bytes) is (pages <= wrote)
    memory.close()
