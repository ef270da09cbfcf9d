"""The LayerFeed: the frames of one get on their way, layer by layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from typing_extensions import override

from kvstore.proto.buffers import Bytes, Sliced
from kvstore.proto.errors import DeadlineError, TierUnavailableError

if TYPE_CHECKING:
    from kvstore.client.transport import Arrival


@dataclass(frozen=True, slots=True)
class Opened:
    """A frame whose header has arrived; ``header`` has it at its start, not verified yet.

    ``confirm`` is to be called after each reading of its bytes, as ``Arrival.confirm``.
    """

    index: int
    tier: str
    header: Sliced
    frame_bytes: int
    confirm: Callable[[], None]


class Range(NamedTuple):
    """Bytes *start* to *stop* of the frame of chunk number *chunk*: one segment."""

    chunk: int
    start: int
    stop: int


class LayerFeed(ABC):
    """Segments as they arrive. Thread-safe but for ``headers`` and ``expect``, called first.

    ``is_cut``: raw segments come without the rows that the get was asked to leave out.
    """

    is_cut = False

    @abstractmethod
    def headers(self) -> list[Opened]:
        """Wait for the headers of all frames that are there: those of the longest prefix."""

    @abstractmethod
    def expect(self, plan: Sequence[Range]) -> None:
        """Say which ranges will be taken, in the order of their arrival: layer by layer."""

    @abstractmethod
    def take(self, number: int) -> Bytes | None:
        """Wait for the bytes of range *number* of the plan; None when they will not come.

        Each range is taken once. Raises DeadlineError, TierUnavailableError.
        """

    @abstractmethod
    def drop(self, chunk: int) -> None:
        """Say that frames from that of *chunk* on are not wanted any more."""

    def end(self) -> None:  # noqa: B027 - what is in reach is not waited for
        """Say that nothing more is wanted. Who waits in ``take`` gets an error, if that is soon."""


class WholeFrames(LayerFeed):
    """Frames that only come whole: what a transport offers that does no better."""

    def __init__(self, arriving: Iterator[Arrival]) -> None:
        self._arriving = arriving
        self._frames: list[Arrival] = []
        self._plan: Sequence[Range] = ()

    @override
    def headers(self) -> list[Opened]:
        self._frames = list(in_time(self._arriving))
        return [
            Opened(one.index, one.tier, one.data, one.frame_bytes, one.confirm)
            for one in self._frames
        ]

    @override
    def expect(self, plan: Sequence[Range]) -> None:
        self._plan = plan

    @override
    def take(self, number: int) -> Bytes | None:
        chunk, start, stop = self._plan[number]
        try:
            return self._frames[chunk].data[start:stop]
        except TierUnavailableError:  # a file that cannot be read
            return None

    @override
    def drop(self, chunk: int) -> None:
        """They are all here."""


class Numbered(Protocol):
    """What arrives for chunk number ``index`` of a get."""

    @property
    def index(self) -> int:
        """The number."""


N = TypeVar("N", bound=Numbered)


def in_time(arriving: Iterable[N], frames: Callable[[N], int] = lambda one: 1) -> Iterator[N]:
    """Yield what follows without a gap and arrives in time; raise only if nothing does.

    *frames* says how many chunks one is of.
    """
    count = 0
    try:
        for arrived in arriving:
            if arrived.index != count:
                return
            count += frames(arrived)
            yield arrived
    except (DeadlineError, TierUnavailableError):
        if not count:
            raise
