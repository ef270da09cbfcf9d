"""What of a client's memory was written is found out once, in whatever order it is written."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.proto import unix_socket
from kvstore.server.api.written_pages import MAX_HOLES, WrittenPages

PAGE = mmap.PAGESIZE
PAGES = 4096


class Memory:
    """A memfd of PAGES pages, none of them written, and what was looked up of it."""

    def __init__(self, pages: int = PAGES) -> None:
        self.descriptor = unix_socket.create_memfd("test-written", pages * PAGE)
        self.memory = mmap.mmap(self.descriptor, pages * PAGE)
        self.calls = self.walked = 0
        """Looks, and the pages that the kernel went through in all of them."""
        self.written = WrittenPages(os.dup(self.descriptor), pages * PAGE, self.lseek)

    def lseek(self, descriptor: int, offset: int, whence: int) -> int:
        self.calls += 1
        try:
            found = os.lseek(descriptor, offset, whence)
        finally:
            self.walked += 1
        self.walked += (found - offset) // PAGE
        return found

    def write(self, page: int, pages: int = 1) -> None:
        for one in range(page, page + pages):
            self.memory[one * PAGE] = 1

    def has(self, page: int, pages: int = 1) -> bool:
        return self.written.has(page * PAGE, pages * PAGE)

    def close(self) -> None:
        self.written.close()
        self.memory.close()
        os.close(self.descriptor)


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory()
    yield memory
    memory.close()


def test_memory_that_is_all_written_is_looked_at_once(memory: Memory) -> None:
    memory.write(0, PAGES)
    for _ in range(2):
        assert all(memory.has(page) for page in range(PAGES))
        assert memory.has(0, PAGES)
    assert memory.calls == 1


ORDERS: dict[str, Callable[[], Iterator[int]]] = {
    "up": lambda: iter(range(PAGES)),
    "down": lambda: reversed(range(PAGES)),
    "two at a time, down": lambda: iter(
        [page + one for page in range(PAGES - 2, -1, -2) for one in (1, 0)]
    ),
    "from both ends": lambda: (
        page for low in range(PAGES // 2) for page in (PAGES - 1 - low, low)
    ),
    "every other page first": lambda: iter([*range(1, PAGES, 2), *range(0, PAGES, 2)]),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("ahead", [1, 2, PAGES])
def test_looks_take_time_by_the_memory_s_size_in_whatever_order_it_is_written(
    memory: Memory, order: str, ahead: int
) -> None:
    pages = list(ORDERS[order]())
    for start in range(0, PAGES, ahead):
        part = pages[start : start + ahead]
        for page in part:
            memory.write(page)
        assert all(map(memory.has, reversed(part)))
    assert memory.calls <= PAGES
    assert memory.walked <= 18 * PAGES


def test_a_caller_that_names_holes_again_and_again_is_looked_after_no_more(
    memory: Memory,
) -> None:
    memory.write(0, PAGES - 1)
    assert memory.has(0, PAGES - 1)
    for _ in range(4 * MAX_HOLES):
        assert not memory.has(0, PAGES)
    assert memory.calls <= 1 + MAX_HOLES
    assert memory.has(0, PAGES - 1), "what is known stays so"


def test_room_that_was_only_set_aside_is_no_written_memory(memory: Memory) -> None:
    os.posix_fallocate(memory.descriptor, 0, PAGES * PAGE)
    assert not memory.has(0)
    memory.write(0)
    assert memory.has(0)
    assert not memory.has(0, 2)


def test_nothing_is_learned_once_it_is_closed() -> None:
    memory = Memory(2)
    memory.write(0, 2)
    memory.written.close()
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
            assert memory.written.has(offset, size_bytes) is (pages <= wrote)
    memory.close()
