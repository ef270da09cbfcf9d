"""The pace of a server: how soon it answers, as a session sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from helpers.local_server import LocalServer, eventually
from helpers.prompts import SMALL

from kvstore.client import ClientOptions
from kvstore.client.connection import Connection
from kvstore.client.session import Session

ServerMaker = Callable[..., LocalServer]
HUNG_S = 0.5
"""An answer that takes so long came from a server found to hang meanwhile."""


@pytest.fixture
def paced(make_server: ServerMaker) -> Iterator[tuple[Session, list[float]]]:
    """A session, and what its server takes, in seconds, to answer each time it is asked."""
    now_s, answers_s = [0.0], [0.02, 0.03, 0.04]
    server = make_server("--limits", "session_ttl_ms=600000")  # no heartbeat meanwhile
    connection = Connection(server.address, 1_000, lambda: now_s[0])

    def answers(within_s: float) -> bool:
        now_s[0] += answers_s[0]
        if answers_s.pop(0) >= HUNG_S:
            connection.hang_up()
        return True

    connection.answers = answers  # type: ignore[method-assign]
    session = Session(connection, SMALL, ClientOptions())
    assert eventually(lambda: session.pace_s == pytest.approx(0.04))
    yield session, answers_s
    session.close()
    connection.close()


def test_the_pace_of_a_server_is_that_of_its_slowest_answers_fading(
    paced: tuple[Session, list[float]],
) -> None:
    session, answers_s = paced
    answers_s.extend([0.2, 0.001, 0.001, 0.06])
    seen_s = []
    while answers_s:
        session.measure_pace()
        seen_s.append(session.pace_s)
    assert seen_s == pytest.approx([0.2, 0.1, 0.05, 0.06])


def test_a_server_that_hung_when_it_was_asked_is_not_thought_slow(
    paced: tuple[Session, list[float]],
) -> None:
    session, answers_s = paced
    answers_s.append(0.1)
    session.measure_pace()
    answers_s.append(HUNG_S)
    session.measure_pace()
    assert session.pace_s == pytest.approx(0.1)
