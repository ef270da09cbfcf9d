"""Shedding: when more is asked than can be answered, what waits stays short and reads go first.

A server that takes all that comes answers everything too late. Here each kind of call waits in a
queue of its own with a limit; beyond it calls are refused at once (RESOURCE_EXHAUSTED), writes by a
thread that does nothing else, so that reads find room. No call is taken while reads wait too long,
few or many: a limit in calls is seconds of long ones. What waited past its deadline is not begun.
What callers say they will send is waited for with Patience.
After M. Welsh and D. Culler, "Adaptive Overload Control for Busy Internet Servers", USITS 2003.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc
from typing_extensions import override

from kvstore.proto.errors import DeadlineError, QuotaExceededError
from kvstore.server.api.bounded_executor import Lane
from kvstore.server.api.event_calls import EVENT_READERS
from kvstore.server.api.interceptors import (
    Behavior,
    ServerInterceptor,
    answered_by,
    behavior_of,
    fed_by_stream,
    guarded,
)
from kvstore.server.telemetry.metrics import Counters

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]

WRITES = frozenset(
    {"Put", "Reserve", "Commit", "PutDevice", "Clear", "Drain", "ReportReuse", "Trace"}
)
"""What waits behind the rest: nobody's prompt stands still for them, or they are long."""
CALLS_PER_WORKER = 4
"""Calls at once, waiting or at work, for each thread. gRPC refuses what is more, which costs a
tenth of an answer."""
WRITES_PER_WORKER = 2
"""Writes that may wait for each thread that answers writes; the rest is left to reads."""
LEAST_LEFT_S = 0.001
"""A call with less time left when its turn comes is not begun."""


class _Answers(NamedTuple):
    """What answers the calls of one method, what does while ``lane`` is held, and full."""

    lane: Lane
    usual: Handler
    watched: Handler
    refusal: Handler


class Room(int):
    """How many calls there may be at once; none more while those of *reads* wait too long.

    gRPC compares the calls that it has with this number before each: what it refuses itself costs
    less than what we refuse.
    """

    _reads: Lane

    def __new__(cls, calls: int, reads: Lane) -> Room:
        """Return room for *calls*."""
        room = super().__new__(cls, calls)
        room._reads = reads
        return room

    @override
    def __le__(self, calls: int) -> bool:
        """Whether *calls* are all that may be: Python asks this for ``calls >= room``."""
        return int(self) <= calls or self._reads.is_late


class Overload(ServerInterceptor):
    """Says which threads answer a call, and refuses it when too many wait for them.

    Belongs before all other interceptors, whom it asks once about each method. ``reads`` are the
    threads of everything else too. Somebody calls ``tick`` now and then.
    """

    def __init__(
        self, workers: int, counters: Counters, clock: Callable[[], float] = time.monotonic
    ) -> None:
        writers = max(1, workers // 2)
        readers = max(1, workers - writers)
        waiting = CALLS_PER_WORKER * workers
        self.reads = Lane("rpc", readers, waiting, clock)
        self.most_calls = Room(waiting + EVENT_READERS, self.reads)
        self._writes = Lane("rpc-write", writers, WRITES_PER_WORKER * writers, clock)
        # Who reads events stays; a thread more tells the next that there is no room.
        self._events = Lane("rpc-events", EVENT_READERS + 1, EVENT_READERS, clock)
        self._lanes = (self.reads, self._writes, self._events)
        self._refusals = futures.ThreadPoolExecutor(1, thread_name_prefix="rpc-refuse")
        self._counters = counters
        self._answers: dict[str, _Answers] = {}
        """By method, of those that there are."""

    def close(self) -> None:
        """Take no more calls; those at work are not waited for."""
        for pool in (*self._lanes, self._refusals):
            pool.shutdown(wait=False)

    def tick(self) -> None:
        """End the calls whose messages do not come."""
        for lane in self._lanes:
            self._counters.add("stalled_calls", lane.patience.tick())

    @override
    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Handler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        method = handler_call_details.method
        answers = self._answers.get(method)
        if answers is None:
            handler = continuation(handler_call_details)
            if handler is None:
                return None
            answers = self._answers[method] = self._answered(handler, method)
        if answers.lane.is_full:
            return answers.refusal
        return answers.watched if answers.lane.is_held else answers.usual

    def _answered(self, handler: Handler, method: str) -> _Answers:
        lane, inner = self._lane(method.rpartition("/")[2]), behavior_of(handler)
        streams = handler.response_streaming
        refuse = guarded(self._refuse, method, streams=streams)
        expire = guarded(self._expire, method, streams=streams)
        receive: Behavior = lane.patience.each
        if not handler.request_streaming:
            receive = guarded(lane.patience.only, method, streams=False)

        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            lane.heard()
            left_s = context.time_remaining()
            if left_s is not None and left_s < LEAST_LEFT_S:
                return expire(request, context)
            return inner(request, context)

        def watched(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
            lane.heard()
            return answer(receive(requests, context), context)

        is_watched = fed_by_stream(handler, _on(lane, watched))
        usual = answered_by(handler, _on(lane, answer))
        return _Answers(
            lane,
            is_watched if handler.request_streaming else usual,
            is_watched,
            fed_by_stream(handler, _on(self._refusals, refuse)),
        )

    def _lane(self, name: str) -> Lane:
        if name in WRITES:
            return self._writes
        return self._events if name == "Events" else self.reads

    def _refuse(self, requests: Any, context: grpc.ServicerContext) -> Any:
        self._counters.add("shed_calls")
        raise QuotaExceededError("waiting calls", 0, "this server; it is overloaded, wait a little")

    def _expire(self, requests: Any, context: grpc.ServicerContext) -> Any:
        self._counters.add("expired_calls")
        raise DeadlineError("the call waited past its deadline")


def _on(pool: futures.ThreadPoolExecutor, behavior: Behavior) -> Behavior:
    """Have gRPC run *behavior* in *pool*."""
    behavior.experimental_thread_pool = pool  # type: ignore[attr-defined]
    return behavior
