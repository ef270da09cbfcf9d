"""The client's Session: opened with a Model and kept alive; and checks whether its server hangs.

A hung server would cost a whole deadline. Checks detect one much sooner: on this host it neither
answers a hello nor has a runnable thread; elsewhere it does not even refuse an unknown call.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue

from kvstore.client.connection import Connection
from kvstore.client.forks import FORKS
from kvstore.client.options import ClientOptions
from kvstore.proto import kvstore_pb2 as pb
from kvstore.proto import unix_socket
from kvstore.proto.errors import InvalidRequestError, KVStoreError
from kvstore.proto.frame import MAX_FRAME_BYTES
from kvstore.proto.keys import representation_digest
from kvstore.proto.messages import as_message
from kvstore.proto.types import Model, Namespace

_BEATS_PER_LIFETIME = 3
FIRST_PACE_S = 0.05
"""Assumed answer time of the server until it is measured."""
_FIRST_ANSWERS = 3
_FADES = 0.5
"""Decay of the slowest answer time at each heartbeat."""
PROBE_S = 0.015
"""Longest wait for the answer to a hello, from a running server."""
GRACE_S = 0.005
"""A second wait, as it may have started to run when its threads were checked."""
PULSE_S = 0.010
"""Least time given to a remote server; _PACES times its recent answer time if that is longer."""
_PACES = 3
_ONCE_MORE = 2 / 3
"""Share of that for a second call: this process may not have run when the first answer arrived."""
_PROC = Path("/proc")
_FAULTS = (AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What counting may raise, and protobuf for what are no counts by names."""
_RUNNING = ("R", "D")
"""States of a thread that has, or waits for, a core or a disk (proc(5))."""


class Session:
    """One open session. A daemon thread sends its heartbeats until ``close``.

    *counts* returns the engine's counters since its start, which each heartbeat reports.
    """

    def __init__(
        self,
        connection: Connection,
        representation: Model,
        options: ClientOptions,
        counts: Callable[[], Mapping[str, int]] = dict,
        deadline_ms: int = 0,
    ) -> None:
        """Open it within *deadline_ms*; 0: that of the options. Raises KVStoreErrors."""
        self._counts = counts
        self.connection = connection
        self.representation = representation
        self.representation_digest = representation_digest(representation)
        self.options = options
        self.terms = terms = connection.call(
            "OpenSession",
            pb.OpenSessionRequest(
                representation=as_message(pb.Representation, representation),
                client=options.name,
                tenant=options.tenant,
                process=int.from_bytes(FORKS.process, "little"),
            ),
            deadline_ms or options.deadline_ms,
            pb.OpenSessionResponse,
        )
        self.namespace = Namespace(terms.key_namespace)
        self.peers: Sequence[int] = list(terms.peers)
        """Other servers that this one would grant access to, as last known."""
        # The server's may exceed any memory.
        terms.max_frame_bytes = min(terms.max_frame_bytes, MAX_FRAME_BYTES)
        if not (terms.max_message_bytes and terms.heartbeat_ms and terms.max_batch_chunks):
            raise InvalidRequestError("server", connection.address, "it sent invalid session terms")
        self.pace_s = FIRST_PACE_S
        """The time of the slowest recent answer, decaying."""
        self._is_closed = False
        # The only queue that is safe to put to during garbage collection.
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread = threading.Thread(target=self._beat, name="kvstore-heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        period_s = self.terms.heartbeat_ms / 1000 / _BEATS_PER_LIFETIME
        for number in range(_FIRST_ANSWERS):
            if not self._is_closed:
                self.measure_pace(kept=1.0 if number else 0.0)
        while not self._is_closed:
            try:
                self._queue.get(timeout=period_s)()
            except Empty:
                self.measure_pace()
                if not self._is_closed:
                    with suppress(KVStoreError):  # the next call fails and opens another session
                        self.heartbeat()

    def run_last(self, last: Callable[[], None]) -> None:
        """Run *last*, which closes the session, in the heartbeat thread. Takes no lock."""
        self._queue.put(last)

    def heartbeat(self, deadline_ms: int = 0) -> bool:
        """Send a heartbeat; return whether the server drains. *deadline_ms* as in ``__init__``.

        Raises LeaseExpiredError when the server no longer has the session.
        """
        request = pb.HeartbeatRequest(session_id=self.terms.session_id)
        with suppress(*_FAULTS):  # an engine whose counts fail keeps its session and its leases
            request.counts.update({n: count for n, count in self._counts().items() if count > 0})
        within_ms = deadline_ms or self.options.deadline_ms
        reply = self.connection.call("Heartbeat", request, within_ms, pb.HeartbeatResponse)
        self.peers = list(reply.peers)
        return reply.draining

    def measure_pace(self, kept: float = _FADES) -> None:
        """Measure how soon the server answers the call of ``is_silent``; unlike a heartbeat, it
        waits for no thread. *kept* is the decay of the earlier pace. A hang is ignored.
        """
        connection = self.connection
        began = connection.clock()
        if connection.answers(self.options.deadline_ms / 1000) and not connection.breaker.is_open:
            self.pace_s = max(connection.clock() - began, kept * self.pace_s)

    def close(self, *, notify_server: bool = True) -> None:
        """Stop the heartbeats and end the session. Idempotent; ignores an unreachable server."""
        if self._is_closed:
            return
        self._is_closed = True
        if threading.current_thread() is not self._thread:
            self._queue.put(lambda: None)
            self._thread.join()
        if notify_server:
            request = pb.CloseSessionRequest(session_id=self.terms.session_id)
            within_ms = self.options.deadline_ms
            with suppress(KVStoreError):
                self.connection.call("CloseSession", request, within_ms, pb.CloseSessionResponse)


def peer_pid(link: socket.socket) -> int:
    """Return the process at the other end of a Unix socket; 0 if /proc does not show it."""
    try:
        pid, _ = unix_socket.peer_ids(link)
    except OSError:
        return 0
    return pid if pid > 0 and os.access(_PROC / str(pid) / "task", os.R_OK | os.X_OK) else 0


def is_runnable(pid: int) -> bool:
    """Whether any thread of a process has, or waits for, a core or a disk."""
    with suppress(OSError):  # the process ended
        for thread in (_PROC / str(pid) / "task").iterdir():
            with suppress(OSError):  # the thread ended
                # Its name comes first, in parentheses, and may have spaces.
                if (thread / "stat").read_text().rpartition(") ")[2].startswith(_RUNNING):
                    return True
    return False


def hangs(terms: pb.OpenSessionResponse, pid: int) -> bool:
    """Whether the server of *terms*, process *pid*, neither answers nor runs. Takes 20 ms at most;
    delays of this process only give the server more time.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.settimeout(PROBE_S)
        try:
            link.connect(terms.socket_path)
            link.send(unix_socket.Request(unix_socket.Op.hello, terms.session_id).pack())
            for _ in range(2):
                with suppress(TimeoutError):
                    link.recv(unix_socket.GREETING_BYTES)
                    return False
                if is_runnable(pid):
                    return False
                link.settimeout(GRACE_S)
        except BlockingIOError:
            return not is_runnable(pid)  # its listen backlog is full
        except OSError:
            return False  # it is gone: its sockets report that
    return True


def is_silent(connection: Connection, pace_s: float = FIRST_PACE_S) -> bool:
    """Whether a server on any host, which usually answers in *pace_s*, fails to answer two calls.
    Takes 20 ms at most if answers take 3 ms or less.
    """
    within_s = max(PULSE_S, _PACES * pace_s)
    return not any(map(connection.answers, (within_s, _ONCE_MORE * within_s)))
