"""Published events: what vLLM's readers read, replays, who may connect, and how many."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import zmq
from conftest import ServerMaker
from golden.samples import FOLDER
from helpers.local_server import DEADLINE_MS, LocalServer, eventually
from helpers.prompts import store

from kvstore.client import ClientOptions
from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import DIGEST_BYTES, ROOT, Accuracy, ChainDigest, ChunkKey
from kvstore.server.settings.settings import load_config
from kvstore.server.telemetry.events import PAGE_EVENTS, Event, Page
from kvstore.server.telemetry.metrics import Counters
from kvstore.server.web import event_publisher as module
from kvstore.server.web import event_sockets
from kvstore.server.web.event_publisher import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventPublisher,
    block_events,
    encode,
)
from kvstore.server.web.event_sockets import (
    SECRET_NAME,
    EventSockets,
    load_key,
    parse_readers,
)

OPTIONS = ClientOptions("grpc", chunk_tokens=16, deadline_ms=DEADLINE_MS)
SPACE = bytes(range(DIGEST_BYTES))
GOLDEN = FOLDER / "events-v1.msgpack"


def key(number: int) -> ChunkKey:
    return ChunkKey(SPACE + bytes([number]) * DIGEST_BYTES)


def stored(number: int, tier: str = "cpu", accuracy: Accuracy = Accuracy.exact) -> Event:
    parent = ChainDigest(key(number - 1)[DIGEST_BYTES:]) if number > 1 else ROOT
    return Event(key(number), tier, 256, parent, accuracy)


def test_chunks_of_a_chain_come_in_one_word_and_others_in_their_own() -> None:
    events = [stored(1), stored(2), stored(4), stored(5, "disk")]
    events += [Event(key(n), "gpu") for n in (1, 2)]
    first, second, third, gone = block_events(Page(events, 0))
    assert isinstance(first, BlockStored)
    assert first.block_hashes == [key(1), key(2)]
    assert (first.parent_block_hash, first.block_size, first.token_ids) == (None, 256, [])
    assert isinstance(second, BlockStored)
    assert (second.block_hashes, second.parent_block_hash) == ([key(4)], key(3))
    assert isinstance(third, BlockStored)
    assert (third.medium, third.locality, third.ownership) == ("STORAGE", "LOCAL", "kvstore")
    assert gone == BlockRemoved([key(1), key(2)], "GPU", "LOCAL", "kvstore")
    # A lossy copy counts as gone for who asks for exact ones.
    (gone,) = block_events(Page([stored(1, "disk", Accuracy.bounded)], 0))
    assert gone == BlockRemoved([key(1)], "STORAGE", "LOCAL", "kvstore")


def test_a_batch_is_written_as_it_always_was() -> None:
    """The file is what vLLM's own decoder reads in tests/real_vllm."""
    events = [stored(1), stored(2), Event(key(3), "disk")]
    words = block_events(Page(events, 0, cleared=True))
    assert words[0] == AllBlocksCleared()
    assert encode(1_700_000_000.5, words) == GOLDEN.read_bytes()
    decoder = msgspec.msgpack.Decoder(EventBatch)
    assert decoder.decode(GOLDEN.read_bytes()) == EventBatch(1_700_000_000.5, words)


class Sockets:
    """Of one test, closed in the end."""

    def __init__(self) -> None:
        self._context: Any = zmq.Context()
        self._made: list[Any] = []

    def socket(self, kind: int) -> Any:
        self._made.append(self._context.socket(kind))
        return self._made[-1]

    def close(self) -> None:
        for one in self._made:
            one.close(0)
        self._context.term()


def publisher_of(server: LocalServer) -> EventPublisher:
    assert server.node.publisher is not None
    return server.node.publisher


class Subscriber:
    """A reader as vLLM's examples are: it looks at numbers, and asks again for what it missed."""

    def __init__(self, context: Sockets, server: LocalServer, **curve: bytes) -> None:
        publish, replay = publisher_of(server).addresses
        self.heard: dict[int, list[Any]] = {}
        self._came: set[int] = set()
        self.topics: set[bytes] = set()
        self._decoder = msgspec.msgpack.Decoder(EventBatch)
        self.sub, self.replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        for one, address in ((self.sub, publish), (self.replay, replay)):
            for name, value in curve.items():
                setattr(one, f"curve_{name}", value)
            one.linger = 0
            one.connect(address)
        self.sub.subscribe(b"kvstore@")

    def missed(self, number: int, within_ms: int = DEADLINE_MS) -> list[tuple[int, list[Any]]]:
        """Ask for the batches from *number* on; none when nobody answers."""
        self.replay.send_multipart((b"", number.to_bytes(8, "big")))
        found: list[tuple[int, list[Any]]] = []
        while self.replay.poll(within_ms):
            empty, topic, at, batch = self.replay.recv_multipart()
            assert empty == b""
            if at == module.END:
                assert (topic, batch) == (b"", b"")
                return found
            self.topics.add(topic)
            found.append((int.from_bytes(at, "big"), self._decoder.decode(batch).events))
        return found

    def hear(self, within_ms: int = DEADLINE_MS) -> bool:
        """Take in one batch; False when none comes."""
        if not self.sub.poll(within_ms):
            return False
        topic, at, batch = self.sub.recv_multipart()
        self.topics.add(topic)
        number = int.from_bytes(at, "big")
        assert number not in self._came
        self._came.add(number)
        words = self._decoder.decode(batch).events
        assert self.heard.setdefault(number, words) == words  # it may have been asked for already
        return True

    def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            assert self.hear(), self.heard

    def hears(self, keys: list[ChunkKey]) -> None:
        self.until(lambda: self.known() >= set(keys))

    def known(self) -> set[bytes]:
        """Return what one knows who took in all that was heard."""
        return known_of(list(self.heard.items()))


def known_of(batches: list[tuple[int, list[Any]]]) -> set[bytes]:
    """Return the chunks that are in memory after these batches."""
    known: set[bytes] = set()
    for _, words in sorted(batches, key=lambda batch: batch[0]):
        for word in words:
            if isinstance(word, AllBlocksCleared):
                known.clear()
            elif word.medium == "CPU":
                is_stored = isinstance(word, BlockStored)
                (known.update if is_stored else known.difference_update)(word.block_hashes)
    return known


@pytest.fixture
def context() -> Iterator[Sockets]:
    made = Sockets()
    yield made
    made.close()


def published(folder: Path) -> tuple[str, ...]:
    """Return the flags of a server that publishes to this user's processes."""
    folder.mkdir(exist_ok=True)
    folder.chmod(0o700)
    return "--events", f"ipc:{folder / 'e'}", "--events-replay", f"ipc:{folder / 'r'}"


def connected(context: Sockets, server: LocalServer, **curve: bytes) -> Subscriber:
    """Return a subscriber that hears what is published from now on, and knows what was."""
    subscriber = Subscriber(context, server, **curve)
    client = server.connect("grpc")
    while not subscriber.hear(50):
        store(client, 1000 + len(subscriber.missed(0)), 1)
    for number, words in subscriber.missed(0):
        subscriber.heard.setdefault(number, words)
    return subscriber


def test_a_subscriber_hears_what_comes_and_goes_and_asks_again_for_what_it_missed(
    make_server: ServerMaker, context: Sockets, tmp_path: Path
) -> None:
    server = make_server(*published(tmp_path / "p"), "--tiers", "cpu")
    client, subscriber = server.connect("grpc"), connected(context, server)
    keys = store(client, 1, 3)
    subscriber.hears(keys)
    client.delete(keys=keys[2:])
    subscriber.until(lambda: keys[2] not in subscriber.known())
    assert subscriber.known() >= set(keys[:2])
    assert subscriber.heard[0][0] == AllBlocksCleared()
    assert sorted(subscriber.heard) == list(range(len(subscriber.heard)))
    assert subscriber.topics == {b"kvstore@%016x" % client.boot_id}
    assert server.counter("event_batches") == len(subscriber.heard)
    lost = sorted(subscriber.heard)[1:]
    assert subscriber.missed(lost[0]) == [(number, subscriber.heard[number]) for number in lost]
    assert subscriber.missed(max(lost) + 1) == subscriber.missed(1 << 60) == []


def test_who_asks_for_what_is_not_kept_any_more_begins_anew(
    make_server: ServerMaker, context: Sockets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_BATCHES", 2)
    server = make_server(*published(tmp_path / "p"), "--tiers", "cpu")
    client, subscriber = server.connect("grpc"), connected(context, server)
    keys = []
    for seed in range(5):
        keys += store(client, seed, 2)
        subscriber.hears(keys)
    client.delete(keys=keys[:2])
    subscriber.until(lambda: not subscriber.known() & set(keys[:2]))
    again = subscriber.missed(1)
    assert again[0][1][0] == AllBlocksCleared()
    assert [number for number, _ in again][-2:] == sorted(subscriber.heard)[-2:]
    assert all(1 <= number <= max(subscriber.heard) for number, _ in again)
    assert known_of(again) == subscriber.known()


def test_requests_that_are_none_are_counted(
    make_server: ServerMaker, context: Sockets, tmp_path: Path
) -> None:
    server = make_server(*published(tmp_path / "p"), "--tiers", "cpu")
    subscriber = Subscriber(context, server)
    wrong = [(b"",), (b"", b"123"), (b"x", bytes(8)), (b"", bytes(8), b"")]
    for count, frames in enumerate(wrong, 1):
        subscriber.replay.send_multipart(frames)
        assert subscriber.missed(0)
        assert server.counter("event_invalid_requests") == count


PAGES = 150


class ManyPages:
    """Stands in for a reader of the log: there is more to tell than any queue on the way holds."""

    def __init__(self) -> None:
        self._pages = iter(Page([stored(1)] * PAGE_EVENTS, 0) for _ in range(PAGES))

    def poll(self) -> Page | None:
        return next(self._pages, None)


@contextmanager
def publisher_of_many(folder: Path) -> Iterator[tuple[EventPublisher, Counters]]:
    folder.mkdir(mode=0o700)
    counters = Counters()
    sockets = EventSockets("off", f"ipc:{folder / 'r'}")
    log: Any = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "EventReader", lambda _: ManyPages())
        publisher = EventPublisher(sockets, log, 1, counters, lambda: 0.0, time.monotonic)
    with closing(publisher) as one:
        assert eventually(lambda: counters["event_batches"] == PAGES)
        yield one, counters


def asking(context: Sockets, folder: Path, number: int) -> Any:
    """Return a socket whose queue holds one batch, and that has asked for all from *number* on."""
    reader = context.socket(zmq.DEALER)
    reader.rcvhwm = 1
    reader.connect(f"ipc://{folder / 'r'}")
    reader.send_multipart((b"", number.to_bytes(8, "big")))
    return reader


def answer_of(reader: Any) -> tuple[list[int], bytes]:
    """Return the numbers of an answer's batches, and how it ends."""
    numbers: list[int] = []
    while reader.poll(DEADLINE_MS):
        _, _, at, _ = reader.recv_multipart()
        if at in (module.END, module.CUT):
            return numbers, at
        numbers.append(int.from_bytes(at, "big"))
    raise AssertionError(f"no end behind {numbers[-1:]}")


def test_an_answer_waits_for_who_reads_it_slowly_and_holds_up_nobody(
    context: Sockets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_REPLAY_WAIT_S", 300.0)  # the machine is slow too
    with publisher_of_many(tmp_path / "p"):
        slow = asking(context, tmp_path / "p", 0)
        assert slow.poll(DEADLINE_MS)  # its answer has begun, and reads nothing of it
        every = (list(range(PAGES)), module.END)
        assert answer_of(asking(context, tmp_path / "p", 0)) == every
        assert answer_of(slow) == every


def test_who_stops_reading_is_told_that_its_answer_was_cut_short(
    context: Sockets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_REPLAY_WAIT_S", 0.0)
    with publisher_of_many(tmp_path / "p") as (_, counters):
        slow = asking(context, tmp_path / "p", 0)
        gone = asking(context, tmp_path / "p", 0)
        assert eventually(lambda: counters["event_cut_replays"] == 2)
        gone.close(0)
        numbers, end = answer_of(slow)
        assert end == module.CUT
        assert numbers == list(range(len(numbers)))
        assert 0 < len(numbers) < PAGES
        monkeypatch.setattr(module, "MAX_REPLAY_WAIT_S", 60.0)
        slow.send_multipart((b"", len(numbers).to_bytes(8, "big")))
        assert answer_of(slow) == (list(range(len(numbers), PAGES)), module.END)


def write_keys(path: Path, *keys: bytes) -> None:
    path.write_bytes(b"; routers\n" + b"".join(key + b" ; one\n" for key in keys))
    path.chmod(0o600)


@pytest.fixture
def guarded(make_server: ServerMaker, tmp_path: Path) -> tuple[LocalServer, dict[str, bytes]]:
    """A server that publishes to other hosts, and what its one reader proves itself with."""
    known, secret = zmq.curve_keypair()
    write_keys(tmp_path / "readers", known)
    server = make_server(
        *("--events", "127.0.0.1:0", "--events-replay", "127.0.0.1:0", "--tiers", "cpu"),
        *("--events-readers", str(tmp_path / "readers"), "--events-keys", str(tmp_path / "keys")),
    )
    server_key = zmq.curve_public((tmp_path / "keys" / "server.secret").read_bytes().strip())
    return server, {"serverkey": server_key, "publickey": known, "secretkey": secret}


def test_beyond_this_user_only_known_keys_hear_anything(
    guarded: tuple[LocalServer, dict[str, bytes]], context: Sockets, tmp_path: Path
) -> None:
    server, ours = guarded
    other, other_secret = zmq.curve_keypair()
    assert connected(context, server, **ours).heard
    stranger = ours | {"publickey": other, "secretkey": other_secret}
    impostor = ours | {"serverkey": other}
    refused = [Subscriber(context, server, **proof) for proof in (stranger, impostor, {})]
    answers = zmq.Poller()
    for one in refused:
        one.replay.send_multipart((b"", bytes(8)))
        answers.register(one.replay, zmq.POLLIN)
    assert answers.poll(300) == []
    write_keys(tmp_path / "readers", ours["publickey"], other)
    assert Subscriber(context, server, **stranger).missed(0)


def test_a_deleted_file_of_readers_lets_nobody_in_a_second_later(
    guarded: tuple[LocalServer, dict[str, bytes]], context: Sockets, tmp_path: Path
) -> None:
    server, ours = guarded
    store(server.connect(), 1, 1)
    assert eventually(lambda: bool(Subscriber(context, server, **ours).missed(0)))
    (tmp_path / "readers").unlink()
    time.sleep(1.0)  # what operations.md promises
    revoked = context.socket(zmq.DEALER)
    for name, value in ours.items():
        setattr(revoked, f"curve_{name}", value)
    revoked.connect(publisher_of(server).addresses[1])
    with suppress(zmq.Again):  # it was refused already
        revoked.send_multipart((b"", bytes(8)), zmq.NOBLOCK)
    assert not revoked.poll(500), "the first to connect after the deletion"
    write_keys(tmp_path / "readers", ours["publickey"])
    assert Subscriber(context, server, **ours).missed(0)


def test_what_would_let_others_read_is_refused(tmp_path: Path) -> None:
    for flags, said in [
        (["--events", "0.0.0.0:0"], "other hosts could read"),
        (["--events-replay", "[::]:0"], "other hosts could read"),
        (["--events", "127.0.0.1:0", "--auth-keys", "{keys}"], "every process of this host"),
        (["--events", "ipc:relative"], "an absolute path"),
        (["--events", "nonsense"], "host:port"),
        (["--events", "127.0.0.1:0", "--limits", "events_kept=0"], "nothing to publish"),
        (["--events-readers", "{missing}"], "can read"),
    ]:
        (tmp_path / "keys").write_text("")
        names = {"keys": tmp_path / "keys", "missing": tmp_path / "missing"}
        with pytest.raises(InvalidRequestError, match=said):
            load_config([flag.format(**names) for flag in flags])
    assert load_config(["--events", "0.0.0.0:0", "--insecure"]).events == "0.0.0.0:0"
    for line in [b"short", b"x" * 41, b"\xff" * 40, b"a" * 39 + b","]:
        with pytest.raises(InvalidRequestError, match="40 characters"):
            parse_readers(b"; fine\n" + line)


def test_a_folder_that_others_may_enter_and_a_taken_address_are_refused(tmp_path: Path) -> None:
    def bind(endpoint: str) -> EventSockets:
        return EventSockets(endpoint, "off")

    folder = tmp_path / "p"
    folder.mkdir()
    folder.chmod(0o750)
    with pytest.raises(InvalidRequestError, match=r"events=.*chmod 700"):
        bind(f"ipc:{folder / 'e'}")
    with closing(bind(f"ipc:{tmp_path / 'new' / 'deep' / 'e'}")):
        assert stat.S_IMODE((tmp_path / "new" / "deep").stat().st_mode) == 0o700
    with closing(bind("127.0.0.1:0")) as taken:
        (address,) = taken.addresses
        with pytest.raises(InvalidRequestError, match=r"events=.*choose another"):
            bind(address.removeprefix("tcp://"))


MOST = 6


def silent_link(address: str, stack: ExitStack) -> socket.socket:
    """Return a connection that has nothing to say."""
    url = urlsplit(address)
    family = socket.AF_UNIX if url.scheme == "ipc" else socket.AF_INET
    link = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
    link.settimeout(20)
    link.connect(url.path if url.scheme == "ipc" else (url.hostname, url.port))
    link.setblocking(False)
    return link


def is_hung_up_on(link: socket.socket) -> bool:
    """Whether the server has ended it, behind its greeting or without one."""
    try:
        while link.recv(64):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


@pytest.fixture(params=["tcp", "ipc"])
def limited(
    make_server: ServerMaker, request: pytest.FixtureRequest, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> LocalServer:  # fmt: skip
    """A server that has ``MOST`` readers at each of its two addresses."""
    monkeypatch.setattr(event_sockets, "MAX_CONNECTIONS", MOST)
    monkeypatch.setattr(event_sockets, "_HANDSHAKE_MS", 100_000)
    tcp = ("--events", "127.0.0.1:0", "--events-replay", "127.0.0.1:0")
    return make_server(*(tcp if request.param == "tcp" else published(tmp_path / "p")))


def test_who_comes_beyond_the_limit_is_hung_up_on_and_room_comes_back(
    limited: LocalServer, context: Sockets
) -> None:
    addresses = publisher_of(limited).addresses
    with ExitStack() as stack:
        links = [silent_link(one, stack) for one in addresses for _ in range(MOST)]
        more = [silent_link(one, stack) for one in addresses for _ in range(3)]
        assert eventually(lambda: limited.counter("zmq_refused_connections") == len(more))
        assert eventually(lambda: all(map(is_hung_up_on, more)))
        assert not any(map(is_hung_up_on, links))
        late = Subscriber(context, limited)
        assert late.missed(0, within_ms=300) == []
    assert eventually(lambda: bool(late.missed(0, within_ms=100)))


def test_a_number_that_is_another_file_by_now_is_left_alone(
    limited: LocalServer, tmp_path: Path
) -> None:
    cap = publisher_of(limited)._sockets._caps[0]
    left, right = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    far = socket.create_connection(listener.getsockname())
    near, _ = listener.accept()
    with left, right, listener, far, near, (tmp_path / "file").open("wb") as file:
        files = len(os.listdir("/proc/self/fd"))
        for one in (left, near, file):
            cap._hang_up(one.fileno())
        spare = os.dup(file.fileno())
        os.close(spare)
        cap._hang_up(spare)
        assert len(os.listdir("/proc/self/fd")) == files
        left.sendall(b"a")
        near.sendall(b"b")
        assert (right.recv(1), far.recv(1)) == (b"a", b"b")


def test_keys_are_made_at_the_first_start_and_found_at_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "keys"
    with ThreadPoolExecutor(8) as pool:  # servers that start together
        (secret,) = set(pool.map(load_key, [folder] * 8))
    assert len(secret) == 40
    assert load_key(folder) == secret
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / SECRET_NAME).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in folder.iterdir()] == [SECRET_NAME]
    with pytest.raises(InvalidRequestError, match=r"events_keys=.*name a folder"):
        load_key(folder / SECRET_NAME / "keys")


def test_a_key_that_others_could_read_and_a_file_that_holds_none_are_refused(
    tmp_path: Path,
) -> None:
    for name in ["", SECRET_NAME]:
        for mode in [0o740, 0o704, 0o777]:
            folder = tmp_path / f"keys {name} {mode}"
            load_key(folder)
            (folder / name).chmod(mode)
            with pytest.raises(InvalidRequestError, match="others could read the key"):
                load_key(folder)
    for number, content in enumerate([b"", b"x" * 39, b"\xff" * 40, b"x" * 41, b"\0" * 40]):
        folder = tmp_path / str(number)
        load_key(folder)
        (folder / SECRET_NAME).write_bytes(content)
        with pytest.raises(InvalidRequestError, match="delete it to generate another"):
            load_key(folder)


def test_who_asks_to_be_let_in_over_and_over_leaves_events_their_turn() -> None:
    sockets: Any = EventSockets("off", "off")
    ask = (b"1.0", b"1", b"events", b"", b"", b"CURVE", bytes(32))
    answers: list[tuple[bytes, ...]] = []
    sockets.readers = SimpleNamespace(refresh=lambda: None, value=frozenset())
    sockets._admission = SimpleNamespace(
        recv_multipart=lambda _: ask, send_multipart=answers.append
    )
    sockets.admit()
    assert 0 < len(answers) <= event_sockets.MAX_CONNECTIONS
    assert {answer[2] for answer in answers} == {b"400"}
    sockets.close()
