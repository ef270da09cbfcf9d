"""What takes seconds to make, and what does its work until it is there.

Compiled loops and their references write the same bytes, so nobody has to wait for a compiler:
the first call starts it beside the work, and later calls find what it made.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_COMPILER = threading.Lock()
"""One compiles at a time: it holds the interpreter for most of its time anyway."""

_NAME = "kvstore-compile"

_at_once = threading.Event()


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
        self._lock = threading.Lock()  # guards the two above

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what there is, at once."""
        if _at_once.is_set():
            return self.wait(*args, **kwargs)
        key = (args, tuple(kwargs.items()))
        with self._lock:
            if key in self._made:
                return self._made[key]
            self._start(key, *args, **kwargs)
        return self._meanwhile(*args, **kwargs)

    def wait(self, *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the best there will be, when it is there."""
        key = (args, tuple(kwargs.items()))
        with self._lock:
            if key in self._made:
                return self._made[key]
            maker = self._start(key, *args, **kwargs)
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
                        with self._lock:
                            self._made[key] = made

            maker = self._makers[key] = threading.Thread(target=work, name=_NAME)
            maker.start()
        return maker


def improving(meanwhile: Callable[P, T]) -> Callable[[Callable[P, T]], Improving[P, T]]:
    """Return a decorator that has a function made in the background, *meanwhile* in its place."""

    def decorate(make: Callable[P, T]) -> Improving[P, T]:
        return Improving(make, meanwhile)

    return decorate
