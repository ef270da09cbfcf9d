"""What takes seconds to make, and what does its work until it is there.

Compiled loops and their references write the same bytes, so nobody has to wait for a compiler:
the first call starts it beside the work, and later calls find what it made. A child of a process
that compiled when it was forked compiles nothing: the compiler's state is not its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_COMPILER = threading.Lock()
"""One compiles at a time: it holds the interpreter for most of its time anyway."""

_NAME = "kvstore-compile"

_at_once = threading.Event()
_never = threading.Event()

_LOCK = threading.Lock()
"""Guards what all functions have made and are making; held for dictionary operations only."""


def settle() -> None:
    """Wait for all that is being made, and so for the best answers to what was asked so far."""
    for thread in threading.enumerate():
        if thread.name == _NAME:
            thread.join()


def make_at_once() -> None:
    """From now on have first calls wait: for benchmarks and commands, whose work it is."""
    _at_once.set()


class Improving(Generic[P, T]):
    """A function of hashable arguments whose answer is *meanwhile*'s until *make*'s is there.

    An answer is made once. One that cannot be made stays *meanwhile*'s. Thread-safe.
    """

    def __init__(self, make: Callable[P, T], meanwhile: Callable[P, T]) -> None:
        self.__wrapped__ = make
        self._meanwhile = meanwhile
        self._made: dict[Hashable, T] = {}
        self._makers: dict[Hashable, threading.Thread] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what there is, at once."""
        if _at_once.is_set():
            return self.wait(*args, **kwargs)
        key = (args, tuple(kwargs.items()))
        with _LOCK:
            if key in self._made:
                return self._made[key]
            if not _never.is_set():
                self._start(key, *args, **kwargs)
        return self._meanwhile(*args, **kwargs)

    def wait(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the best there will be, when it is there."""
        key = (args, tuple(kwargs.items()))
        with _LOCK:
            if key in self._made:
                return self._made[key]
            maker = None if _never.is_set() else self._start(key, *args, **kwargs)
        if maker is not None:
            maker.join()
        return self._made.get(key, self._meanwhile(*args, **kwargs))

    def _start(self, key: Hashable, *args: P.args, **kwargs: P.kwargs) -> threading.Thread:
        maker = self._makers.get(key)
        if maker is None:

            def work() -> None:
                with _COMPILER:
                    # A process that ends waits for the one that compiles, not for the others.
                    if threading.main_thread().is_alive():
                        made = self.__wrapped__(*args, **kwargs)
                        with _LOCK:
                            self._made[key] = made

            maker = self._makers[key] = threading.Thread(target=work, name=_NAME)
            maker.start()
        return maker


def improving(meanwhile: Callable[P, T]) -> Callable[[Callable[P, T]], Improving[P, T]]:
    """Return a decorator that has a function made in the background, *meanwhile* in its place."""

    def decorate(make: Callable[P, T]) -> Improving[P, T]:
        return Improving(make, meanwhile)

    return decorate


def _in_child() -> None:
    _LOCK.release()
    if _COMPILER.locked():
        _never.set()


# Nobody is at the dictionaries while the process forks.
os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_in_child)
