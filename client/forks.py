"""Forks: they hold back gRPC calls, and make a child release what the parent has open.

gRPC restarts in a child only if no thread was inside it at the fork; else the child cannot use it,
and parent or child may crash. So calls are held back while a process forks.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakMethod

from kvstore.proto.errors import DeadlineError, LeaseExpiredError, TierUnavailableError

GRACE_S = 0.25
"""How long a fork waits for calls to end by themselves before it ends those that it can."""
WAITED_FOR_MS = 2000
"""Calls with a longer deadline are made so that a fork can end them."""
_ENDED_WITHIN_S = WAITED_FOR_MS / 1000 + 0.2
_LEAVING_S = 0.02
"""How long gRPC's own threads stay inside after a call was ended early."""
_HELD_S = 5.0
PROCESS_BYTES = 8


class EndedByForkError(DeadlineError):
    """A call was ended, as the process was about to fork."""


class Forks:
    """The forks of this process. Thread-safe."""

    def __init__(self) -> None:
        self.process = os.urandom(PROCESS_BYTES)
        """Identifies this process; a child gets a new one."""
        self.is_child = False
        self._hooks: set[WeakMethod[Callable[[], None]]] = set()
        self._is_grpc_lost = False
        self._was_quiet = True
        """Whether no call ran at the current fork."""
        self._reset()

    def _reset(self) -> None:
        self._changed = threading.Condition()
        self._forking = 0
        self._running = 0
        self._endable: set[Any] = set()
        self._idle: set[Any] = set()
        self._ended: set[Any] = set()
        self._left_at = 0.0
        """When a call was last ended early, in monotonic seconds."""

    def watch(self, after_fork: Callable[[], None]) -> None:
        """Call a method in each child, while its object lives, before another thread runs: to
        release what is the parent's without sending anything.
        """
        self._hooks.add(WeakMethod(after_fork, self._hooks.discard))

    def check(self, process: bytes, what: str) -> None:
        """Raise LeaseExpiredError unless *what* was opened in this *process*."""
        if process is not self.process:
            raise LeaseExpiredError(f"{what} belongs to the parent process; open another")

    # --- calls of gRPC

    @contextmanager
    def calling(self, within_s: float) -> Iterator[None]:
        """Enter to make a call that ends within WAITED_FOR_MS. Waits while the process forks, so
        compute the remaining deadline inside. Raises DeadlineError after *within_s*.
        """
        with self._changed:
            if self._is_grpc_lost:
                why = "a call was running at the fork; start processes by spawn or forkserver"
                raise TierUnavailableError("server", f"gRPC is unusable in this child: {why}")
            if not self._changed.wait_for(lambda: not self._forking, min(within_s, _HELD_S)):
                raise DeadlineError("the process was forking until the deadline")
            self._running += 1
            changed = self._changed
        try:
            yield
        finally:
            with changed:
                self._running -= 1
                changed.notify_all()

    def begin(self, make: Callable[[], Any], within_s: float, *, is_idle: bool = False) -> Any:
        """Return the call that *make* begins; a fork ends it, an idle one, which may wait for ever,
        at once. Waits as ``calling`` does. Pair with ``end``.
        """
        with self.calling(within_s):
            call = make()
            with self._changed:
                (self._idle if is_idle else self._endable).add(call)
        return call

    def end(self, call: Any) -> None:
        """Cancel a call, if it is running. Any thread may."""
        is_early: bool = call.is_active()
        call.cancel()
        with self._changed:
            self._endable.discard(call)
            self._idle.discard(call)
            self._ended.discard(call)
            if is_early:
                self._left_at = time.monotonic()
            self._changed.notify_all()

    def has_ended(self, call: Any) -> bool:
        """Whether a fork ended *call*."""
        return call in self._ended

    # --- around a fork

    def before(self) -> None:
        """Hold back new calls, and wait for or end those in progress."""
        with self._changed:
            self._forking += 1
        self._cancel(self._idle)
        with self._changed:
            self._changed.wait_for(lambda: not self._running and not self._endable, GRACE_S)
        self._cancel(self._endable)
        with self._changed:
            is_quiet = self._changed.wait_for(lambda: not self._running, _ENDED_WITHIN_S)
        self._was_quiet = is_quiet
        time.sleep(max(0.0, self._left_at + _LEAVING_S - time.monotonic()))

    def _cancel(self, calls: set[Any]) -> None:
        with self._changed:
            some = list(calls)
            self._ended.update(some)
        for call in some:
            if call.is_active():
                call.cancel()
                self._left_at = time.monotonic()

    def after_in_parent(self) -> None:
        """Admit calls again."""
        with self._changed:
            self._forking -= 1
            self._changed.notify_all()

    def after_in_child(self) -> None:
        """Call the watched methods, which release what is the parent's."""
        keep(self.__dict__.copy())
        self._is_grpc_lost = self._is_grpc_lost or not self._was_quiet
        self._reset()
        self.process = os.urandom(PROCESS_BYTES)
        self.is_child = True
        for found in list(self._hooks):
            if (hook := found()) is not None:
                hook()


def keep(what: object) -> None:
    """Never free *what* in a child: freeing the parent's calls and sockets could end them."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))


FORKS = Forks()
# The last registered hook runs first. The lock that concurrent.futures takes at a fork, which
# threads need to submit work, must be free while ``before`` waits: so that module registers first.
importlib.import_module("concurrent.futures.thread")
os.register_at_fork(
    before=FORKS.before, after_in_parent=FORKS.after_in_parent, after_in_child=FORKS.after_in_child
)
