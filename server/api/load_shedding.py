"""Load shedding: under overload queues stay short and reads have priority.

A server that accepts every call answers all of them too late. Here each kind of call has its own
bounded queue; beyond its limit calls are refused at once (RESOURCE_EXHAUSTED) by threads that do
nothing else, so that reads get through. No call is accepted while reads wait too long, however many
they are: a limit in calls is seconds of long ones. A call past its deadline is not begun. A
StallGuard ends calls whose messages do not arrive, or whose answers are not read: gRPC would wait
without limit.
After M. Welsh and D. Culler, "Adaptive Overload Control for Busy Internet Servers", USITS 2003.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from typing_extensions import override

from kvstore.proto.errors import DeadlineError, InvalidRequestError, QuotaExceededError
from kvstore.server.api.interceptors import (
    AuthenticatedContext,
    Behavior,
    CallWrapper,
    guarded,
    principal_of,
)
from kvstore.server.security.sessions import ANYBODY
from kvstore.server.telemetry.events import EVENT_READERS
from kvstore.server.telemetry.metrics import Counters

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]
    ServerInterceptor = grpc.ServerInterceptor[Any, Any]
else:  # grpc's classes are generic in its stubs only
    ServerInterceptor = grpc.ServerInterceptor

WRITES = frozenset(
    {"Put", "Reserve", "Commit", "PutDevice", "Clear", "Drain", "ReportReuse", "Trace"}
)
"""Calls of low priority: no prompt waits for them, or they are long."""
CALLS_PER_WORKER = 4
"""Calls per thread, waiting or running. gRPC refuses further ones, at a tenth of the cost of an
answer."""
WRITES_PER_WORKER = 2
"""Writes that may wait per thread for writes."""
LEAST_LEFT_S = 0.001
"""A call with less time left is not begun."""
STALL_S = 15.0
"""Longest wait for any message to arrive, or to be read."""
GRACE_S = 3.0
"""A call that has waited less is never ended: its message may be on the way."""
SLOW_S = 1.0
SLOW_FOR_S = 60.0
"""A tenant counts as slow for so long after a quarter of the threads waited for it for SLOW_S."""
LATE_S = 0.2
"""If calls wait longer to begin, an executor accepts only one more per thread."""

T = TypeVar("T")


class StallGuard:
    """Waits for messages in the thread of their call, and for readers of its answer; at most *most*
    wait beyond ``GRACE_S``.

    Who ends or begins its calls anew holds threads all the same. So a tenant with more than *most*
    waits beyond ``SLOW_S`` gets no more of them for ``SLOW_FOR_S``, while three times *most* wait.
    ``tick`` is called a few times a second. Thread-safe; *clock* returns monotonic seconds.
    """

    def __init__(self, most: int, clock: Callable[[], float]) -> None:
        self._most = most
        self._clock = clock
        self._waiting: dict[AuthenticatedContext, float] = {}
        """Start of each wait, the earliest first."""
        self._slow: dict[str, float] = {}
        """End of the time for which a tenant counts as slow."""
        self._lock = threading.Lock()  # guards the two above

    def each(self, messages: Iterator[T], context: AuthenticatedContext) -> Iterator[T]:
        """Yield the messages of a call."""
        while True:
            with self._wait(context):
                message = next(messages, None)
            if message is None:
                return
            yield message

    def taken(self, answers: Iterator[T], context: AuthenticatedContext) -> Iterator[T]:
        """Yield the answers of a call; each must be read before the next is made."""
        for answer in answers:
            with self._wait(context):
                yield answer

    @contextmanager
    def _wait(self, context: AuthenticatedContext) -> Iterator[None]:
        with self._lock:
            if self._slow:
                self._check_share(principal_of(context).tenant)
            self._waiting[context] = self._clock()
        try:
            yield
        finally:
            with self._lock:
                self._waiting.pop(context, None)

    def _check_share(self, tenant: str) -> None:
        if tenant not in self._slow or len(self._waiting) < 3 * self._most:
            return
        if sum(principal_of(one).tenant == tenant for one in self._waiting) >= self._most:
            fix = f"tenant {tenant!r}; its calls wait too long for messages"
            raise QuotaExceededError("waiting calls", self._most, fix)

    def _note_slow(self, now: float) -> None:
        callers = (principal_of(one) for one, at in self._waiting.items() if now - at >= SLOW_S)
        slow = Counter(caller.tenant for caller in callers if caller is not ANYBODY)
        self._slow = {tenant: until for tenant, until in self._slow.items() if now < until}
        self._slow |= {one: now + SLOW_FOR_S for one, count in slow.items() if count > self._most}

    def tick(self) -> int:
        """End the calls that have waited too long; return how many."""
        now = self._clock()
        ended: list[Any] = []
        with self._lock:
            self._note_slow(now)
            for context, since in self._waiting.items():
                are_many = len(self._waiting) - len(ended) > self._most
                if now - since < (GRACE_S if are_many else STALL_S):
                    break
                ended.append(context)
            for context in ended:
                del self._waiting[context]
        for context in ended:
            context.cancel()
        return len(ended)


class BoundedExecutor(futures.ThreadPoolExecutor):
    """Threads that answer one kind of call, and the calls that wait for them.

    At most a quarter of them wait long in ``stall_guard`` for messages to arrive or to be read.
    *clock* returns monotonic seconds.
    """

    def __init__(
        self, name: str, workers: int, limit: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(workers, thread_name_prefix=name)
        self.limit = limit
        self.stall_guard = StallGuard(workers // 4, clock)
        self._workers = workers
        self._clock = clock
        self._queued_at: deque[float] = deque()
        """Times at which the waiting calls were queued, the oldest first."""
        self._waited_s = 0.0
        self._count_lock = threading.Lock()  # guards the two above

    @property
    def is_late(self) -> bool:
        """Whether calls wait longer than LATE_S, and more than one per thread is queued.

        It uses the wait of the call begun last, after K. Nichols and V. Jacobson, "Controlling
        Queue Delay", ACM Queue 2012. If no thread begins a call, ``limit`` applies.
        """
        return self._waited_s > LATE_S and len(self._queued_at) > self._workers

    @property
    def is_full(self) -> bool:
        """Whether the next call would wait too long."""
        return len(self._queued_at) >= self.limit

    @override
    def submit(self, fn: Callable[..., Any], /, *words: Any, **named: Any) -> futures.Future[Any]:
        with self._count_lock:
            self._queued_at.append(self._clock())

        def begun(*words: Any, **named: Any) -> Any:
            with self._count_lock:
                self._waited_s = self._clock() - self._queued_at.popleft()
            return fn(*words, **named)

        try:
            return super().submit(begun, *words, **named)
        except RuntimeError:  # shut down
            with self._count_lock:
                self._queued_at.pop()
            raise


class ConcurrencyLimit(int):
    """Limit of concurrent calls; no more are accepted while those of ``reads`` wait too long.

    gRPC compares its number of calls with this before each: a refusal by gRPC costs less than ours.
    """

    reads: BoundedExecutor

    @override
    def __le__(self, calls: int) -> bool:
        """Whether *calls* reach the limit: Python calls this for ``calls >= limit``."""
        return int(self) <= calls or self.reads.is_late


class LoadShedder(ServerInterceptor):
    """Chooses the threads that answer a call, and refuses it when too many wait for them.

    *calls* wraps each method once. ``reads`` answers all calls but writes and events. ``tick`` is
    called a few times a second.
    """

    def __init__(
        self,
        workers: int,
        counters: Counters,
        calls: CallWrapper,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        writers = max(1, workers // 2)
        readers = max(1, workers - writers)
        waiting = CALLS_PER_WORKER * workers
        self.reads = BoundedExecutor("rpc", readers, waiting, clock)
        self.most_calls = ConcurrencyLimit(waiting + EVENT_READERS)
        self.most_calls.reads = self.reads
        self._writes = BoundedExecutor("rpc-write", writers, WRITES_PER_WORKER * writers, clock)
        # A reader of events occupies its thread; one more thread refuses further readers.
        self._events = BoundedExecutor("rpc-events", EVENT_READERS + 1, EVENT_READERS, clock)
        self._executors = (self.reads, self._writes, self._events)
        self.refusals = futures.ThreadPoolExecutor(2, thread_name_prefix="rpc-refuse")
        self._counters = counters
        self._calls = calls
        self._answers: dict[str, tuple[BoundedExecutor, Handler, Handler]] = {}
        """By known method: the executor, the handler that answers, and the one that refuses."""

    def close(self) -> None:
        """Accept no more calls; do not wait for running ones."""
        for pool in (*self._executors, self.refusals):
            pool.shutdown(wait=False)

    def tick(self) -> None:
        """End the calls whose messages do not arrive, or are not read."""
        for executor in self._executors:
            self._counters.add("stalled_calls", executor.stall_guard.tick())

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
        executor, usual, refusal = answers
        return refusal if executor.is_full else usual

    def _answered(self, handler: Handler, method: str) -> tuple[BoundedExecutor, Handler, Handler]:
        name = method.rpartition("/")[2]
        executor = self._writes if name in WRITES else self.reads
        if name == "Events":
            executor = self._events
        guard = executor.stall_guard

        def receive(requests: Iterator[Any], context: Any) -> Any:
            left_s = context.time_remaining()
            if left_s is not None and left_s < LEAST_LEFT_S:
                self._counters.add("expired_calls")
                raise DeadlineError("the call waited past its deadline")
            messages = guard.each(requests, context)
            message = messages if handler.request_streaming else next(messages, None)
            if message is None:
                raise InvalidRequestError("message", None, "send one with the call")
            return message

        answers = self._calls.around(handler, method, receive, guard.taken)

        def answer(requests: Any, context: grpc.ServicerContext) -> Any:
            found = answers(requests, context)
            if handler.response_streaming:
                return found
            (only,) = found
            return only

        refusal = _handler(handler, guarded(self._refuse, method), self.refusals)
        return executor, _handler(handler, answer, executor), refusal

    def _refuse(self, requests: Any, context: grpc.ServicerContext) -> Any:
        self._counters.add("shed_calls")
        raise QuotaExceededError("waiting calls", 0, "this server; it is overloaded, retry later")


def _handler(handler: Handler, behavior: Behavior, pool: futures.ThreadPoolExecutor) -> Handler:
    """Return *handler* with *behavior*, which takes messages from an iterator, run in *pool*."""
    behavior.experimental_thread_pool = pool  # type: ignore[attr-defined]
    gives = "stream" if handler.response_streaming else "unary"
    make = getattr(grpc, f"stream_{gives}_rpc_method_handler")
    made: Handler = make(behavior, handler.request_deserializer, handler.response_serializer)
    return made
