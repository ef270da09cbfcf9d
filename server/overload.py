"""Shedding: when more is asked than can be answered, what waits stays short and reads go first.

A server that takes all that comes answers everything too late. Here each kind of call waits in a
queue of its own with a limit; beyond it calls are refused at once (RESOURCE_EXHAUSTED), writes by a
thread that does nothing else, so that reads find room. What waited past its deadline is not begun.
After M. Welsh and D. Culler, "Adaptive Overload Control for Busy Internet Servers", USITS 2003.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent import futures
from typing import TYPE_CHECKING, Any

import grpc
from typing_extensions import override

from kvstore.proto.errors import DeadlineError, QuotaExceededError
from kvstore.server.interceptors import (
    Behavior,
    ServerInterceptor,
    answered_by,
    behavior_of,
    guarded,
)
from kvstore.server.metrics import Counters

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]

WRITES = frozenset({"Put", "Reserve", "Commit", "Clear", "Drain", "ReportReuse", "Trace"})
"""What waits behind the rest: nobody's prompt stands still for them, or they are long."""
CALLS_PER_WORKER = 4
"""Calls at once, waiting or at work, for each thread. gRPC refuses what is more, which costs a
tenth of an answer."""
WRITES_PER_WORKER = 2
"""Writes that may wait for each thread that answers writes; the rest is left to reads."""
LEAST_LEFT_S = 0.001
"""A call with less time left when its turn comes is not begun."""


class Lane(futures.ThreadPoolExecutor):
    """Threads that answer one kind of call; ``waiting`` counts what no thread has begun."""

    def __init__(self, name: str, workers: int, limit: int) -> None:
        super().__init__(workers, thread_name_prefix=name)
        self.limit = limit
        self._waiting = 0
        self._count_lock = threading.Lock()

    @property
    def is_full(self) -> bool:
        """Whether the next call would wait too long."""
        return self._waiting >= self.limit

    @override
    def submit(self, fn: Callable[..., Any], /, *words: Any, **named: Any) -> futures.Future[Any]:
        with self._count_lock:
            self._waiting += 1

        def begun(*words: Any, **named: Any) -> Any:
            with self._count_lock:
                self._waiting -= 1
            return fn(*words, **named)

        try:
            return super().submit(begun, *words, **named)
        except RuntimeError:  # it is shut down
            with self._count_lock:
                self._waiting -= 1
            raise


class Overload(ServerInterceptor):
    """Says which threads answer a call, and refuses it when too many wait for them.

    Belongs before all other interceptors. ``reads`` are the threads of everything else too.
    """

    def __init__(self, workers: int, counters: Counters) -> None:
        writers = max(1, workers // 2)
        readers = max(1, workers - writers)
        self.most_calls = CALLS_PER_WORKER * workers
        self.reads = Lane("rpc", readers, self.most_calls)
        self._writes = Lane("rpc-write", writers, WRITES_PER_WORKER * writers)
        self._refusals = futures.ThreadPoolExecutor(1, thread_name_prefix="rpc-refuse")
        self._counters = counters

    def close(self) -> None:
        """Take no more calls; those at work are not waited for."""
        for pool in (self.reads, self._writes, self._refusals):
            pool.shutdown(wait=False)

    @override
    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        lane = self._writes if method.rpartition("/")[2] in WRITES else self.reads
        streams = handler.response_streaming
        if lane.is_full:
            behavior = _on(self._refusals, guarded(self._refuse, method, streams=streams))
        else:
            expired = guarded(self._expire, method, streams=streams)
            behavior = _on(lane, _in_time(behavior_of(handler), expired))
        return answered_by(handler, behavior)

    def _refuse(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._counters.add("shed_calls")
        raise QuotaExceededError("waiting calls", 0, "this server; it is overloaded, wait a little")

    def _expire(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._counters.add("expired_calls")
        raise DeadlineError("the call waited past its deadline")


def _in_time(inner: Behavior, expired: Behavior) -> Behavior:
    """Return *inner*, or *expired* for a call whose deadline has passed when its turn comes."""

    def begun(request: Any, context: grpc.ServicerContext) -> Any:
        left_s = context.time_remaining()
        is_late = left_s is not None and left_s < LEAST_LEFT_S
        return (expired if is_late else inner)(request, context)

    return begun


def _on(pool: futures.ThreadPoolExecutor, behavior: Behavior) -> Behavior:
    """Have gRPC run *behavior* in *pool*."""
    behavior.experimental_thread_pool = pool  # type: ignore[attr-defined]
    return behavior
