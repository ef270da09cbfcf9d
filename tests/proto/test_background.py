"""Answers that get better while nobody waits."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from kvstore.proto import background
from kvstore.proto.background import Improving, improving


@pytest.fixture(autouse=True)
def nobody_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(background, "_at_once", threading.Event())
    yield
    for thread in threading.enumerate():
        if thread.name == "kvstore-compile":
            thread.join(60)


def test_the_reference_answers_until_the_better_is_made() -> None:
    go_on, is_made = threading.Event(), threading.Event()

    def make(name: str) -> str:
        assert go_on.wait(60)
        is_made.set()
        return f"fast {name}"

    answer = Improving(make, lambda name: f"slow {name}")
    assert [answer("a"), answer("a")] == ["slow a", "slow a"]
    go_on.set()
    assert is_made.wait(60)
    assert answer.wait("a") == "fast a"
    assert answer("a") == "fast a"


def test_one_answer_is_made_once_whoever_asks() -> None:
    made: list[int] = []
    gate = threading.Barrier(8)

    @improving(lambda key: -key)
    def answer(key: int) -> int:
        made.append(key)
        return key

    def ask() -> None:
        gate.wait(60)
        assert answer(3) in (3, -3)
        assert answer.wait(3) == 3

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert made == [3]
    assert answer(3) == 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_cannot_be_made_stays_the_reference_s() -> None:
    @improving(lambda: "slow")
    def answer() -> str:
        raise RuntimeError("no compiler")

    assert answer.wait() == "slow"
    assert answer() == "slow"


def test_who_is_paid_to_wait_waits() -> None:
    @improving(lambda: "slow")
    def answer() -> str:
        return "fast"

    background.make_at_once()
    assert answer() == "fast"


def test_a_child_forked_beside_a_compiler_has_the_reference_and_ends() -> None:
    go_on, is_made = threading.Event(), threading.Event()

    def make(name: str) -> str:
        is_made.set()
        assert go_on.wait(60)
        return f"fast {name}"

    answer = Improving(make, lambda name: f"slow {name}")
    assert answer("a") == "slow a"
    assert is_made.wait(60)
    child = os.fork()
    if not child:
        signal.alarm(20)  # ends it with a status that is not 0 should it wait for ever
        is_right = [answer("a"), answer("b"), answer.wait("b")] == ["slow a", "slow b", "slow b"]
        background.settle()
        os._exit(0 if is_right and threading.active_count() == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
    go_on.set()
    assert answer.wait("b") == "fast b"
