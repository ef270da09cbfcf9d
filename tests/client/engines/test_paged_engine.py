"""The vLLM connector in an engine that runs a real model out of pages on a device.

The device is late: what is queued runs when somebody waits for it. The last tests take one wait
after the other out of the connector, and the same comparisons see it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_twin import use_device
from local_server import LocalServer
from paged_engine import BLOCKS, TOKEN_IDS, PagedEngine, drop_wait, small_model
from slow_device import SlowDevice, SlowStream
from typing_extensions import override

from kvstore.client import Client
from kvstore.client.cuda import CudaClient
from kvstore.proto.device import Stream

Start = Callable[..., PagedEngine]
NEW = 50
LENGTHS = {"a": 150, "b": 90, "c": 200, "d": 130}
HITS = {"a": 192, "b": 128, "c": 192, "d": 128}
"""Of these prompts and their new tokens, some of which decode steps computed."""
ORDERS = pytest.mark.parametrize("zeroes_first", [False, True], ids=["v1", "v2"])
LATEST = pytest.mark.parametrize("stores_last", [False, True], ids=["stores-first", "stores-last"])


def prompt(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(1, TOKEN_IDS, (count,), generator=generator).tolist()
    return ids


PROMPTS = {name: prompt(at, count) for at, (name, count) in enumerate(LENGTHS.items())}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products are faster so."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def right() -> list[dict[str, list[int]]]:
    """What the model says to the prompts, and to those with what it said: without a store."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    first = PagedEngine(None).generate(PROMPTS, NEW)
    second = PagedEngine(None).generate(longer(first), NEW)
    torch.set_num_threads(before)
    return [first, second]


def longer(told: dict[str, list[int]]) -> dict[str, list[int]]:
    return {name: [*PROMPTS[name], *told[name]] for name in PROMPTS}


@pytest.fixture
def start(make_server: Callable[..., LocalServer], request: pytest.FixtureRequest) -> Start:
    """Start engines, closed before their servers."""

    def make(address: str | None, client: type[Client] = Client, **more: Any) -> PagedEngine:
        engine = PagedEngine(address, client, **more)
        request.addfinalizer(engine.close)
        return engine

    return make


@pytest.fixture
def near(
    make_server: Callable[..., LocalServer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> LocalServer:
    """A server whose gpu tier is on the engines' device."""
    use_device(monkeypatch, tmp_path, SlowDevice())
    return make_server("--tiers", "gpu,cpu", "--gpu", "8MiB")


def are_equal(reader: PagedEngine, writer: PagedEngine) -> bool:
    """Whether all that was loaded is bit for bit what was computed."""
    return all(
        torch.equal(one[:hit], other[:hit])
        for name, hit in reader.hits.items()
        for one, other in zip(reader.kept[name], writer.kept[name], strict=True)
    )


def test_the_engine_alone_says_what_the_model_says_by_itself(
    right: list[dict[str, list[int]]],
) -> None:
    model: Any = small_model()
    model.set_attn_implementation("sdpa")
    try:
        for name, ids in PROMPTS.items():
            whole = torch.tensor([ids])
            out = model.generate(
                whole, attention_mask=torch.ones_like(whole), max_new_tokens=NEW, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            assert out[0, len(ids) :].tolist() == right[0][name]
    finally:
        model.set_attn_implementation("pages_of_a_test")


# --- with the store as without


def through_the_store(
    start: Start, address: str, client: type[Client], **more: Any
) -> tuple[PagedEngine, PagedEngine]:
    """Compute all prompts in one engine and go on with them in another; return both."""
    writer = start(address, client, **more)
    told = writer.generate(PROMPTS, NEW)
    writer.release()
    reader = start(address, client, **more)
    reader.generate(longer(told), NEW)
    reader.release()
    return writer, reader


def check(writer: PagedEngine, reader: PagedEngine, right: list[dict[str, list[int]]]) -> None:
    assert [writer.outputs, reader.outputs] == right
    assert reader.hits == HITS
    assert are_equal(reader, writer)
    assert min(writer.given, reader.given) > BLOCKS, "blocks were used again"


@LATEST
@ORDERS
@pytest.mark.parametrize("client", [Client, CudaClient], ids=["host", "straight"])
def test_tokens_and_pages_are_those_of_an_engine_without_a_store(
    start: Start, server: LocalServer, client: type[Client], zeroes_first: bool,
    stores_last: bool, right: list[dict[str, list[int]]],
) -> None:  # fmt: skip
    more = {"zeroes_first": zeroes_first, "stores_last": stores_last}
    writer, reader = through_the_store(start, server.address, client, **more)
    check(writer, reader, right)


@ORDERS
def test_so_they_are_where_the_servers_gpu_tier_is_on_the_engines_device(
    start: Start, near: LocalServer, zeroes_first: bool, right: list[dict[str, list[int]]]
) -> None:
    more = {"zeroes_first": zeroes_first, "stores_last": zeroes_first}
    check(*through_the_store(start, near.address, CudaClient, **more), right)
    gpu = near.node.manager.transfers.gpu_tier
    assert gpu is not None
    assert gpu.stats().chunks


@pytest.mark.parametrize("layout", ["LHBNC", "BLNHC"])
def test_so_they_are_in_every_order_that_pages_lie_in(
    start: Start, server: LocalServer, layout: str, right: list[dict[str, list[int]]]
) -> None:
    check(*through_the_store(start, server.address, CudaClient, layout=layout), right)


@ORDERS
def test_a_request_that_begins_with_copies_of_anothers_blocks_is_stored_right(
    start: Start, server: LocalServer, zeroes_first: bool
) -> None:
    first, tail = prompt(7, 160), prompt(8, 80)
    second = [*first[:100], *tail]

    def both(engine: PagedEngine) -> None:
        engine.add("first", first, 40)
        for _ in range(4):
            engine.step()
        engine.add("second", second, 20, copies="first")
        engine.finish()
        engine.release()

    alone = start(None, zeroes_first=zeroes_first)
    writer = start(server.address, zeroes_first=zeroes_first, stores_last=True)
    for engine in (alone, writer):
        both(engine)
    assert writer.outputs == alone.outputs
    reader = start(server.address)
    reader.generate({"second": [*second, *writer.outputs["second"]]}, 1)
    assert reader.hits == {"second": 192}
    assert are_equal(reader, writer)


# --- a wait that is missing


def is_seen(writer: PagedEngine, reader: PagedEngine, right: list[dict[str, list[int]]]) -> bool:
    """Whether what is compared above shows wrong KV, that the connector took for right."""
    assert writer.outputs == right[0]
    assert reader.hits == HITS, "nothing was noticed"
    return not are_equal(reader, writer) and reader.outputs != right[1]


def without_a_wait(
    start: Start, address: str, taken: Callable[[PagedEngine], None], *, of_store: bool
) -> tuple[PagedEngine, PagedEngine]:
    writer = start(address)
    if of_store:
        taken(writer)
    told = writer.generate(PROMPTS, NEW)
    writer.release()
    reader = start(address)
    if not of_store:
        taken(reader)
    reader.generate(longer(told), NEW)
    return writer, reader


def test_a_store_that_does_not_wait_for_its_gather_would_be_seen(
    start: Start, server: LocalServer, right: list[dict[str, list[int]]]
) -> None:
    def take(engine: PagedEngine) -> None:
        drop_wait(engine.side._down, engine.device.compute)

    assert is_seen(*without_a_wait(start, server.address, take, of_store=True), right)


@ORDERS
def test_a_gather_on_a_stream_of_its_own_would_be_seen(
    start: Start, server: LocalServer, zeroes_first: bool, right: list[dict[str, list[int]]]
) -> None:
    class Aside(SlowDevice):
        """Gathers behind the forward pass, and so that nothing waits for them."""

        @override
        def current_stream(self) -> Stream:
            aside = SlowStream(self)
            aside.wait(self.compute.record())
            return aside

    more = {"zeroes_first": zeroes_first, "stores_last": True}
    writer = start(server.address, device=Aside(), **more)
    told = writer.generate(PROMPTS, NEW)
    writer.release()
    reader = start(server.address)
    reader.generate(longer(told), NEW)
    assert is_seen(writer, reader, right)


def test_a_load_that_does_not_wait_for_the_engines_stream_would_be_seen(
    start: Start, server: LocalServer, right: list[dict[str, list[int]]]
) -> None:
    def take(engine: PagedEngine) -> None:
        drop_wait(engine.side.reader.work, engine.device.compute)

    assert is_seen(*without_a_wait(start, server.address, take, of_store=False), right)


def test_a_load_that_does_not_wait_for_what_goes_up_would_be_seen(
    start: Start, server: LocalServer, right: list[dict[str, list[int]]]
) -> None:
    def take(engine: PagedEngine) -> None:
        drop_wait(engine.side.reader.work, engine.side.reader.copies)

    assert is_seen(*without_a_wait(start, server.address, take, of_store=False), right)


def test_a_load_that_is_told_before_it_is_over_would_be_seen(
    start: Start, server: LocalServer, right: list[dict[str, list[int]]]
) -> None:
    def take(engine: PagedEngine) -> None:
        engine.side.reader.work.run = lambda position=None: None  # type: ignore[attr-defined]

    assert is_seen(*without_a_wait(start, server.address, take, of_store=False), right)
