"""Whether a server hangs, or only takes its time: of one on this host the kernel says it.

A deadline has to leave time for a slow disk and a busy machine, so one that hangs would cost all
of it. It is known much sooner by this: nobody answers a hello, and none of its threads runs.
Of a server elsewhere: it does not even refuse a call that it does not know.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from kvstore.client.connection import Connection
from kvstore.client.session import Session, SessionTerms
from kvstore.proto import unix_socket

PROBE_S = 0.015
"""What a server takes at most to answer a hello, if it runs at all."""
GRACE_S = 0.005
"""Once more, as it may have begun to run when it was looked at."""

PULSE_S = 0.010
"""What a server that may be elsewhere takes at most, or _PACES times what it took lately."""
_PACES = 3
_ONCE_MORE = 2 / 3
"""Of that, when it is asked again: the first answer may have come while nobody here ran."""

_PROC = Path("/proc")
_RUNNING = ("R", "D")
"""States of a thread that has, or waits for, a core or a disk (proc(5))."""


def peer_pid(link: socket.socket) -> int:
    """Return the process at the other end of a Unix socket; 0 if it cannot be looked at."""
    try:
        pid, _ = unix_socket.peer_ids(link)
    except OSError:
        return 0
    return pid if pid > 0 and os.access(_PROC / str(pid) / "task", os.R_OK | os.X_OK) else 0


def is_runnable(pid: int) -> bool:
    """Whether any thread of a process has or waits for a core or a disk."""
    try:
        threads = list((_PROC / str(pid) / "task").iterdir())
    except OSError:
        return False
    return any(_state(thread) in _RUNNING for thread in threads)


def _state(thread: Path) -> str:
    try:
        # The name comes first, in parentheses, and may have spaces.
        return (thread / "stat").read_text().rpartition(") ")[2][:1]
    except OSError:  # it ended
        return ""


def hangs(terms: SessionTerms, pid: int) -> bool:
    """Whether the server of *terms*, process *pid*, neither answers nor runs. Takes 20 ms at most.

    That this process itself waits for a core only gives the server more time.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.settimeout(PROBE_S)
        try:
            link.connect(terms.socket_path)
            link.send(unix_socket.Request(unix_socket.Op.hello, terms.session_id).pack())
            link.recv(unix_socket.GREETING_BYTES)
            return False
        except TimeoutError:
            pass
        except BlockingIOError:
            return not is_runnable(pid)  # so many wait to be let in that there is no room for more
        except OSError:
            return False  # it is gone, which its sockets say themselves
        if is_runnable(pid):
            return False
        link.settimeout(GRACE_S)
        try:
            link.recv(unix_socket.GREETING_BYTES)
        except TimeoutError:
            return True
        except OSError:
            return False
        return False


def is_silent(session: Session) -> bool:
    """Whether the server of *session*, which may be anywhere, does not answer, asked twice.

    Takes 20 ms at most where answers take 3 ms or less: one far away, or that is slow to answer
    all the time, is given time accordingly.
    """
    return stays_silent(session.connection, session.pace_s)


def stays_silent(connection: Connection, pace_s: float) -> bool:
    """Do the same without a session, for a server that is thought to answer in *pace_s*."""
    patience_s = max(PULSE_S, _PACES * pace_s)
    return not any(map(connection.answers, (patience_s, _ONCE_MORE * patience_s)))
