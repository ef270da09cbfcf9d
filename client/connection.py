"""A Connection: the gRPC channel to one server, with deadlines, a circuit breaker and the store's
errors. A Pool: connections of other kinds.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import grpc

from kvstore.client.forks import FORKS, WAITED_FOR_MS, EndedByForkError
from kvstore.client.options import OPEN, Access, Bearer
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import kvstore_pb2_grpc
from kvstore.proto.errors import (
    DeadlineError,
    InvalidRequestError,
    KVStoreError,
    QuotaExceededError,
    TierUnavailableError,
    revive,
)
from kvstore.proto.messages import ERROR_NAME, MESSAGE_BYTES

SLACK_S = 0.05
"""How long a call may take beyond the deadline sent to the server."""
_LEAST_S = 0.001
_RETRIES_IN_CHILD = 2
"""In 1 of 200 children gRPC's restart closed the first connection (grpcio 1.76)."""
_RETRY_S = 10.0
_FORKED = "a fork of the process ended the call: retry it"
_NO_METHOD = "/kvstore.v1.KVStore/NoMethod"
"""The thread that reads calls refuses it: it waits in no queue and costs next to nothing."""
_TRACE_API = "opentelemetry.trace"

C = TypeVar("C", bound="_Pooled")
T = TypeVar("T")
Metadata: TypeAlias = "tuple[tuple[str, str], ...] | None"


class Connection:
    """Calls to one server. Thread-safe.

    Every method raises KVStoreErrors only: those of the server, TierUnavailableError when it
    cannot be reached, DeadlineError when it does not answer in time, LeaseExpiredError in a child
    of the process that opened it.
    """

    def __init__(
        self,
        address: str,
        retry_after_ms: int,
        clock: Callable[[], float] = time.monotonic,
        access: Access = OPEN,
        usual_ms: int = 0,
    ) -> None:
        """Connects later. *usual_ms*: see CircuitBreaker. Raises as ``Access.open``."""
        self.address = address
        self.clock = clock
        self._process = FORKS.process
        self._bearer = Bearer(access)
        self._access = access
        limit = 2 * MESSAGE_BYTES
        self._open = partial(
            access.open,
            address,
            [
                ("grpc.max_receive_message_length", limit),
                ("grpc.max_send_message_length", limit),
                # A connection that died without a sign, as NAT leaves it, is replaced after both.
                # Servers accept pings that are five seconds apart.
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.ping_timeout_ms", 10_000),  # or its default, a minute, would count
                ("grpc.initial_reconnect_backoff_ms", 100),
                # Also the connect timeout: long enough for a busy server.
                ("grpc.min_reconnect_backoff_ms", 2_000),
                ("grpc.max_reconnect_backoff_ms", 2_000),
                # Channels with equal options share a connection: a child needs its own.
                ("kvstore.process", os.getpid()),
            ],
        )
        self._seen = access.seen()
        self._channel = self._open()
        self._stub = kvstore_pb2_grpc.KVStoreStub(self._channel)
        self._is_closed = False
        self.breaker = CircuitBreaker(retry_after_ms, clock, usual_ms)
        self._reconnecting: Any = None
        self._streams: dict[Any, Until] = {}
        self._retries = _RETRIES_IN_CHILD if FORKS.is_child else 0
        self._lock = threading.Lock()  # guards _reconnecting, _streams and the channel

    def call(self, method: str, request: Any, deadline_ms: int, reply: type[T]) -> T:
        """Call *method* and return its reply."""
        until = Until(deadline_ms, self.clock(), self.clock)
        metadata = traced(self._bearer.metadata())

        def work() -> Any:
            verb = getattr(self._stub, method)
            if deadline_ms > WAITED_FOR_MS:  # a fork may end it
                return self._ended_call(verb, request, until, metadata)
            with FORKS.calling(until.left_s()):
                return verb(request, timeout=until.left_s(), metadata=metadata)

        while True:
            try:
                return self._tried(lambda: self._again(work), reply, until)
            except EndedByForkError:
                continue  # the parent retries within the remaining time

    def _again(self, work: Callable[[], Any]) -> Any:
        """Do *work*; retry it where gRPC may have lost the connection by itself."""
        try:
            return work()
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE or self._retries <= 0:
                raise
            self._retries -= 1
        return self._again(work)

    def _ended_call(self, verb: Any, request: Any, until: Until, metadata: Metadata) -> Any:
        """Return the reply to a call of *verb* that a fork may end."""
        call = FORKS.begin(
            lambda: verb.future(request, timeout=until.left_s(), metadata=metadata), until.left_s()
        )
        try:
            return call.result()
        except grpc.FutureCancelledError:
            if FORKS.has_ended(call):
                raise EndedByForkError(_FORKED) from None
            raise call from None
        finally:
            FORKS.end(call)

    def upload(self, method: str, requests: Iterator[Any], deadline_ms: int, reply: type[T]) -> T:
        """Stream *requests* to *method* and return its reply."""
        metadata = traced(self._bearer.metadata())
        until, verb = Until(deadline_ms, self.clock(), self.clock), getattr(self._stub, method)
        return self._tried(lambda: self._ended_call(verb, requests, until, metadata), reply, until)

    def stream(self, method: str, request: Any, deadline_ms: int) -> Generator[Any, None, None]:
        """Yield the replies of *method*. Closing the iterator cancels the call."""
        call = self.begin_stream(method, request, deadline_ms)
        try:
            while (message := self.next_of(call)) is not None:
                yield message
        finally:
            self.end_stream(call)

    def begin_stream(
        self, method: str, request: Any, deadline_ms: int, *, is_idle: bool = False
    ) -> Any:
        """Call *method*; ``next_of`` returns its replies. Pair with ``end_stream``. *is_idle* as
        for ``Forks.begin``.
        """
        FORKS.check(self._process, "the connection")
        self.breaker.check()
        metadata = traced(self._bearer.metadata())
        until, verb = Until(deadline_ms, self.clock(), self.clock), getattr(self._stub, method)
        try:
            call = FORKS.begin(
                lambda: verb(request, timeout=until.left_s(), metadata=metadata),
                until.left_s(),
                is_idle=is_idle,
            )
        except ValueError as error:  # the channel is closed
            raise KVStoreError(f"the client is closed: {error}") from None
        with self._lock:
            self._streams[call] = until
        return call

    def next_of(self, call: Any) -> Any:
        """Wait for the next reply of a stream; None at its end."""

        def work() -> Any:
            try:
                return next(call, None)
            except grpc.RpcError as error:
                if FORKS.has_ended(call):
                    raise EndedByForkError(_FORKED) from None
                if call in self._streams:
                    raise
                raise translate(error) from None  # ended here: no news of the server

        return self._tried(work, object, self._streams.get(call))

    def end_stream(self, call: Any) -> None:
        """Cancel a stream; its ``next_of`` raises. Any thread may."""
        if self._process is not FORKS.process:
            return
        with self._lock:
            self._streams.pop(call, None)
        FORKS.end(call)

    def answers(self, within_s: float) -> bool:
        """Return whether the server replies, if only by a refusal, within *within_s*, at most
        WAITED_FOR_MS. True for an unreachable one, whose calls fail by themselves, and in a fork.
        """
        FORKS.check(self._process, "the connection")
        within_s = min(within_s, WAITED_FOR_MS / 1000)
        try:
            with FORKS.calling(within_s):
                self._channel.unary_unary(_NO_METHOD, None, None)(b"", timeout=within_s)
        except grpc.RpcError as error:
            return error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED
        except (ValueError, DeadlineError):  # closed, or this process forks
            return True
        return True

    def hang_up(self) -> None:
        """Open the breaker and end the streams that wait, as if the server had been late."""
        self.breaker.record(DeadlineError("the server hangs"))
        with self._lock:
            streams = list(self._streams)
        for call in streams:
            call.cancel()

    def _tried(self, work: Callable[[], Any], reply: type[T], until: Until | None) -> T:
        FORKS.check(self._process, "the connection")
        self.breaker.check()
        try:
            result: T = work()
        except grpc.RpcError as error:
            translated = translate(error)
            self._renew()
            if self.breaker.record(translated, until):
                self._reconnect()
            raise translated from None
        except ValueError as error:  # grpc's answer to a closed channel
            raise KVStoreError(f"the client is closed: {error}") from None
        self.breaker.record(None)
        return result

    def _renew(self) -> None:
        """Use the client certificate that has replaced ours, if any: ours may have expired.

        Calls on the channel before go on; it closes after them.
        """
        with suppress(InvalidRequestError):  # half replaced: at the next error
            seen = self._access.seen()
            if seen == self._seen:
                return
            channel = self._open()
            with self._lock:
                if not self._is_closed:
                    self._channel, self._seen = channel, seen
                    self._stub = kvstore_pb2_grpc.KVStoreStub(channel)

    def _reconnect(self) -> None:
        """Make gRPC reconnect the channel in the background.

        gRPC connects only while a call waits. Calls on a broken channel fail too soon for that:
        without this it found a restarted server after 5 to 20 s (grpcio 1.76).
        """
        metadata = self._bearer.metadata()
        with self._lock:
            if self._reconnecting is not None and not self._reconnecting.done():
                return
            try:
                self._reconnecting = call = FORKS.begin(
                    lambda: self._stub.Status.future(
                        pb.StatusRequest(), timeout=_RETRY_S, wait_for_ready=True, metadata=metadata
                    ),
                    within_s=0.0,  # during a fork it is left to the next failed call
                    is_idle=True,
                )
            except (ValueError, KVStoreError):  # closed meanwhile, in a child, or during a fork
                return
        call.add_done_callback(FORKS.end)

    def close(self) -> None:
        """Close the channel. Idempotent."""
        with self._lock:
            self._is_closed = True
        self._channel.close()


@dataclass(frozen=True, slots=True)
class Until:
    """The end of a call that began at *since_s* of *clock*: *deadline_ms* later, plus SLACK_S for
    the answer.
    """

    deadline_ms: int
    since_s: float = field(default_factory=time.monotonic)
    clock: Callable[[], float] = time.monotonic

    @property
    def at_s(self) -> float:
        """The end, in seconds of *clock*."""
        return self.since_s + self.deadline_ms / 1000 + SLACK_S

    def left_s(self, least_s: float = _LEAST_S) -> float:
        """Return how long to wait for an answer, at least *least_s*."""
        left_s = self.since_s + self.deadline_ms / 1000 + SLACK_S - self.clock()
        return left_s if left_s > least_s else least_s

    def left_ms(self, least_ms: int = 0) -> int:
        """Return the deadline of the next of several calls, or of a retry.

        With no time left it returns *least_ms*, or raises DeadlineError if that is 0.
        """
        left = self.deadline_ms - round(1000 * (self.clock() - self.since_s))
        if left < 1 and not least_ms:
            raise DeadlineError(f"deadline_ms={self.deadline_ms} passed before the next request")
        return max(left, least_ms)


class CircuitBreaker:
    """Open for *retry_after_ms* after the server did not answer, so that a dead one costs once; of
    late calls, once they have waited for half of *usual_ms* since the last answer, as a short
    timeout is weak evidence. Thread-safe. *clock* returns monotonic seconds.
    """

    def __init__(self, retry_after_ms: int, clock: Callable[[], float], usual_ms: int = 0) -> None:
        self._retry_after_s = retry_after_ms / 1000
        self._clock = clock
        self._opens_after_s = usual_ms / 2000
        self._until = 0.0
        self._late_s = 0.0
        """How long late calls have waited since the last answer; concurrent ones count once."""
        self._late_at_s = -math.inf
        """When the last of them ended."""
        # A weak reference: an error holds its traceback, and so its client.
        self._opened_by: weakref.ref[KVStoreError] | None = None

    @property
    def is_open(self) -> bool:
        """Whether calls fail at once."""
        return self._until > 0 and self._until > self._clock()

    def check(self) -> None:
        """Raise TierUnavailableError while the breaker is open."""
        until = self._until
        if until and (left_s := until - self._clock()) > 0:
            raise TierUnavailableError("server", f"did not answer; retried in {left_s:.1f} s")

    def record(self, error: KVStoreError | None, until: Until | None = None) -> bool:
        """Record the error of a call, or None. Return whether that opened the breaker."""
        is_late = isinstance(error, DeadlineError)
        if is_late and until is not None:
            now_s = self._clock()
            self._late_s += min(until.deadline_ms / 1000, now_s - self._late_at_s)
            self._late_at_s = now_s
            if self._late_s < self._opens_after_s:
                return False
        is_silent = is_late or (error is not None and is_gone(error))
        self._until = self._clock() + self._retry_after_s if is_silent else 0.0
        if is_silent and error is not None:
            self._opened_by = weakref.ref(error)
        else:
            self._late_s, self._opened_by = 0.0, None
        return is_silent

    def record_call(self, error: DeadlineError, granted_ms: int) -> None:
        """Record a call that failed in *granted_ms*: they count if no answer came since."""
        if self._late_s and granted_ms / 1000 >= self._opens_after_s:
            self.record(error)

    def retract(self, error: DeadlineError) -> None:
        """Close it if *error* opened it: the server was not at fault."""
        if self._opened_by is not None and self._opened_by() is error:
            self.record(None)


class _Pooled(Protocol):
    def is_broken(self) -> bool: ...  # while it was idle
    def wake(self, error: KVStoreError) -> None: ...  # fail its call; any thread may
    def close(self) -> None: ...


class Pool(Generic[C]):
    """Up to *limit* connections of one session, for one call at a time each. Thread-safe.

    *dial* connects one within the seconds it is given, *dial_s* at most, and first passes it to its
    callback, so that ``hang_up`` can end the wait. After a failure a thread dials, not calls, at
    most once per *rest_s*.
    """

    def __init__(
        self,
        limit: int,
        dial: Callable[[float, Callable[[C], None]], C],
        dial_s: float,
        rest_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._dial = dial
        self._dial_s = dial_s
        self._rest_s = rest_s
        self._clock = clock
        self.idle: list[C] = []
        self.busy: set[C] = set()
        """Those in use by a call, or connecting."""
        self._is_closed = False
        self._dialling = 0
        """How many dials have begun that are not yet in ``busy``."""
        self._has_failed = self._is_in_thread = False
        """Whether the last dial failed, and whether a thread dials."""
        self._rests_until_s = -math.inf
        self._lock = threading.Lock()  # guards the seven above

    def take(self, within_s: float) -> C | None:
        """Return a connection for one call, dialled within *within_s* if none is idle; None at the
        limit, without time, or after a failed dial. Raises the errors of ``dial``.
        """
        while self.idle:
            with self._lock:
                if not self.idle:
                    break
                self.busy.add(one := self.idle.pop())
            if not one.is_broken():
                return one
            self.give_back(one, is_clean=False)
        with self._lock:
            in_thread = within_s <= 0 or self._has_failed
            is_full = len(self.busy) + self._dialling >= self._limit
            is_resting = in_thread and (self._is_in_thread or self._clock() < self._rests_until_s)
            if is_full or self._is_closed or is_resting:
                return None
            self._dialling += 1
            self._is_in_thread = self._is_in_thread or in_thread
        if not in_thread:
            return self._dialled(min(within_s, self._dial_s))
        try:
            threading.Thread(target=self._dial_in_thread, name="kvstore-dial", daemon=True).start()
        except RuntimeError:  # the system gives no more threads
            with self._lock:
                self._dialling, self._is_in_thread = self._dialling - 1, False
        return None

    def _dial_in_thread(self) -> None:
        one: C | None = None
        try:
            with suppress(KVStoreError):
                one = self._dialled(self._dial_s)
        finally:
            with self._lock:
                self._is_in_thread = False
                if one is None:
                    self._rests_until_s = self._clock() + self._rest_s
        if one is not None:
            self.give_back(one, is_clean=True)

    def _dialled(self, within_s: float) -> C:
        begun: list[C] = []

        def begin(one: C) -> None:
            with self._lock:
                self._dialling -= 1
                self.busy.add(one)
                begun.append(one)
                if self._is_closed:
                    one.wake(KVStoreError("the client is closed"))

        try:
            made = self._dial(within_s, begin)
        except BaseException:
            with self._lock:
                self._has_failed = True
                if not begun:
                    self._dialling -= 1
                self.busy.difference_update(begun)
            raise
        with self._lock:
            self._has_failed = False
        return made

    def is_ready(self) -> bool:
        """Whether a call would get one now; if not, a thread dials one."""
        one = self.take(0.0)
        if one is not None:
            self.give_back(one, is_clean=True)
        return one is not None

    def give_back(self, one: C, *, is_clean: bool) -> None:
        """Take back a connection; close it if its call did not end cleanly."""
        with self._lock:
            self.busy.discard(one)
            if is_clean and not self._is_closed:
                self.idle.append(one)
                return
        one.close()

    def hang_up(self, error: KVStoreError) -> None:
        """Fail each call that waits on one of them with *error*."""
        with self._lock:
            for one in self.busy:
                one.wake(error)

    def leave(self) -> None:
        """In a child: close its descriptors, and send nothing over the parent's connections."""
        self._lock = threading.Lock()  # another thread may have held it
        self._is_closed = True
        for one in (*self.idle, *self.busy):
            one.close()
        self.idle = []

    def close_idle(self) -> None:
        """Close the idle ones: what broke one without a sign may have broken all."""
        with self._lock:
            idle, self.idle = self.idle, []
        for one in idle:
            one.close()

    def close(self) -> None:
        """Close the idle ones and fail the calls in progress. Idempotent."""
        with self._lock:
            self._is_closed = True
        self.close_idle()
        self.hang_up(KVStoreError("the client is closed"))


def is_gone(error: BaseException) -> bool:
    """Whether *error* means that the server itself, not one of its tiers, cannot be reached."""
    return isinstance(error, TierUnavailableError) and str(error).startswith("tier 'server'")


def translate(error: grpc.RpcError) -> KVStoreError:
    """Return the store's error for a failed call."""
    code, details = error.code(), error.details() or ""
    metadata: Any = error.trailing_metadata() or ()
    names = [value for name, value in metadata if name == ERROR_NAME]
    if names:
        return revive(str(names[0]), details)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(f"the server did not answer in time: {details}")
    if code is grpc.StatusCode.CANCELLED:  # by ``Connection.hang_up``, or a server that stops
        return DeadlineError(f"the call was ended: {details}")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return revive(QuotaExceededError.__name__, details)
    if code is grpc.StatusCode.UNAVAILABLE:
        return TierUnavailableError("server", details)
    return KVStoreError(f"{code.name}: {details}")


def traced(metadata: Metadata) -> Metadata:
    """Return *metadata* with the current span as W3C ``traceparent``, if there is one.

    It does not import OpenTelemetry: without it in the program there is no span.
    """
    current = getattr(sys.modules.get(_TRACE_API), "get_current_span", None)
    if current is None:  # or another thread is importing it
        return metadata
    span = current().get_span_context()
    if not span.is_valid:
        return metadata
    parent = f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"
    return (*(metadata or ()), ("traceparent", parent))
