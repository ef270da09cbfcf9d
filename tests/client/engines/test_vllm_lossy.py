"""What a vLLM engine computes behind a lossy copy is never stored, whoever computes it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence

import pytest
from helpers.coarse_codec import CoarseCodec, coarse_codec
from helpers.local_server import LocalServer, eventually
from helpers.lossy_copies import exact_on_redis, leave_on_disk
from helpers.prompts import tokens as prompt_tokens
from helpers.redis_process import RedisProcess
from helpers.slow_device import SlowDevice
from helpers.vllm_pages import BLOCK_TOKENS, representation
from helpers.vllm_stand_ins import FakeRequest
from helpers.vllm_steps import Engine, positions

from kvstore.client.chunk import Shard
from kvstore.client.engines.vllm import lookup as vllm_lossy
from kvstore.client.engines.vllm.blocks import side_by_side
from kvstore.client.engines.vllm.messages import Role
from kvstore.proto.blend import ReuseReport, ShadowResult, accuracy_tag
from kvstore.proto.types import Accuracy, ChunkKey
from kvstore.server.blending import gates

Start = Callable[..., Engine]

PROMPT = prompt_tokens(1, 330)
"""Five chunks of 64 tokens, each two blocks; the first two are stored."""


@pytest.fixture
def server(make_server: Callable[..., LocalServer]) -> Iterator[LocalServer]:
    with coarse_codec():
        yield make_server("--codec", "disk=coarse")


@pytest.fixture
def start(start: Start) -> Start:
    """Start engines that read copies with a bound, unless they state something else."""
    return lambda accuracy="bounded", **settings: start(accuracy=accuracy, **settings)


@pytest.fixture
def lossy(server: LocalServer, start: Start) -> None:
    """Have two chunks of PROMPT stored, of which the second is left as a lossy copy only."""
    engine = start("exact")
    engine.run("writer", PROMPT[:128])
    leave_on_disk(server, keys(engine)[1:2])


def keys(engine: Engine) -> list[ChunkKey]:
    return engine.client.keys(PROMPT)[:5]


def request_of(name: str, tokens: Sequence[int]) -> FakeRequest:
    """Return a request with hashes of its blocks, each of all tokens up to its end, as vLLM's."""
    stops = range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)
    hashes = [hashlib.sha256(repr(tokens[:stop]).encode()).digest() for stop in stops]
    return FakeRequest(name, list(tokens), block_hashes=hashes)


def matched(engine: Engine, request: FakeRequest, cached: int = 0) -> int:
    """Ask what can be loaded; return once the names of the prompt's chunks are there, too."""
    hit = engine.matched(request, cached)
    lookup = engine.scheduler._tracked[request.request_id].lookup
    assert eventually(lambda: lookup.result is not None)
    return hit


def begin(
    engine: Engine, name: str, cached: int = 0, tokens: Sequence[int] = PROMPT, failed: int = 0
) -> tuple[int, list[int]]:
    """Take a prompt of which vLLM has *cached* tokens to its last chunk, *failed* chunks of whose
    load do not come; return how many tokens were loaded, and where the chunks begin that are
    stored then.
    """
    request = request_of(name, list(tokens))
    engine.scheduler.on_new_request(request)
    hit = matched(engine, request, cached)
    engine._next_block = 1
    blocks = engine.blocks(len(tokens))
    if hit:
        lost = blocks[(cached + hit) // BLOCK_TOKENS - 2 * failed : (cached + hit) // BLOCK_TOKENS]
        assert engine.load(request, blocks, hit) == set(lost)
        hit -= 64 * failed
    request.num_computed_tokens = cached + hit
    plan = engine.step(request, blocks, len(tokens) - cached - hit)
    engine.drain()
    assert engine.workers[0].settled(20.0)
    engine.scheduler.finished(request)
    return hit, positions(plan)


@pytest.mark.usefixtures("lossy")
def test_an_engine_that_states_nothing_reads_exact_copies_only(start: Start) -> None:
    assert begin(start("exact"), "a") == (64, [64, 128, 192, 256])


@pytest.mark.usefixtures("lossy")
def test_what_is_computed_behind_a_lossy_load_is_not_stored(start: Start) -> None:
    engine = start()
    assert begin(engine, "a") == (128, [])
    counted = engine.scheduler.counted
    assert (counted["lossy_hit_tokens"], counted["lossy_unstored_chunks"]) == (64, 3)
    assert engine.scheduler._lookups.client.counts()["lossy_unstored_chunks"] == 3
    strict = start("exact")
    assert strict.matched(request_of("b", PROMPT)) == 64, "chunks 2 to 4 were stored as exact"


@pytest.mark.usefixtures("lossy")
@pytest.mark.parametrize("cached", [96, 320])
def test_nothing_is_stored_behind_a_lossy_block_of_the_engines_own_cache(
    start: Start, cached: int
) -> None:
    engine = start()
    begin(engine, "a")
    assert begin(engine, "b", cached)[1] == []


@pytest.mark.usefixtures("lossy")
def test_what_a_request_computes_or_finds_exact_is_stored_as_ever(start: Start) -> None:
    engine = start()
    begin(engine, "a")
    other = prompt_tokens(3, 200)
    assert begin(engine, "b", tokens=other)[1] == [0, 64, 128]
    assert begin(engine, "c", cached=64, tokens=[*PROMPT[:64], *other])[1] == [64, 128, 192]


@pytest.mark.usefixtures("lossy")
def test_once_the_table_has_overflowed_only_what_a_request_computed_or_loaded_exactly_is_exact(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_lossy, "MAX_LOSSY_BLOCKS", 1)
    engine = start()
    begin(engine, "a")
    assert begin(engine, "b", cached=320)[1] == []
    other = prompt_tokens(3, 200)
    assert begin(engine, "c", cached=128, tokens=other)[1] == []
    computed = prompt_tokens(4, 200)
    assert begin(engine, "d", tokens=computed)[1] == [0, 64, 128]
    engine.scheduler._recent.clear()
    assert begin(engine, "e", tokens=[*computed[:192], *other]) == (192, [192, 256, 320])


@pytest.mark.usefixtures("lossy")
@pytest.mark.parametrize("hashes", [2, 330])
def test_blocks_whose_hashes_are_not_known_count_as_lossy(start: Start, hashes: int) -> None:
    """Too few, or hashes of other blocks than the engine's."""
    engine = start()
    request = request_of("a", PROMPT)
    request.block_hashes = [bytes([number % 251]) for number in range(hashes)]
    engine.scheduler.on_new_request(request)
    hit = engine.matched(request)
    assert engine.load(request, engine.blocks(330), hit) == set()
    assert begin(engine, "b", cached=64, tokens=prompt_tokens(5, 200))[1] == []


@pytest.mark.usefixtures("lossy")
def test_a_request_that_was_preempted_is_not_stored_behind_blocks_it_finds_again(
    start: Start,
) -> None:
    engine = start()
    request, blocks = request_of("b", PROMPT), list(range(24, 35))
    engine.scheduler.on_new_request(request)
    matched(engine, request)  # and vLLM had no room to load into
    engine.step(request, blocks, 10)
    begin(engine, "a")
    request.num_preemptions += 1
    assert matched(engine, request, 320) == 0
    request.num_computed_tokens = 320
    request.all_token_ids += PROMPT
    assert engine.step(request, [*blocks, *range(12, 24)], 200).stores == ()
    assert engine.scheduler.counted["lossy_unstored_chunks"] == 3 + 6, "of a, and of b"


@pytest.mark.usefixtures("lossy")
def test_nobody_waits_for_promised_chunks_that_turn_out_to_be_behind_a_lossy_one(
    start: Start,
) -> None:
    engine = start(role=Role(handover_ms=600_000))
    assert begin(engine, "a") == (128, [])
    client = engine.client
    assert eventually(lambda: client.lookup(keys=keys(engine)[2:]).pending == 0)


def tell(engine: Engine, agreement: float, codec: str = "coarse") -> bool:
    """Tell a codec's gate of a comparison, of which four are enough; return whether it is open."""
    shadow = ShadowResult(1 - agreement, agreement, 64)
    report = ReuseReport(accuracy_tag(codec), shadow=shadow)
    return engine.client.report_reuse(report).is_open


@pytest.fixture
def boundless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have copies state no bound."""
    monkeypatch.setattr(CoarseCodec, "accuracy", Accuracy.approximate)
    monkeypatch.setattr(gates, "TRIALS", 4)


@pytest.mark.usefixtures("boundless", "lossy")
def test_a_gate_that_closes_between_lookup_and_load_leaves_its_chunks_to_be_computed(
    start: Start,
) -> None:
    engine = start("approximate")
    assert engine.matched(request_of("0", PROMPT)) == 64
    assert [tell(engine, 1.0) for _ in range(4)][-1]
    assert start("bounded").matched(request_of("1", PROMPT)) == 64
    request, blocks = request_of("a", PROMPT), engine.blocks(330)
    engine.scheduler.on_new_request(request)
    assert engine.matched(request) == 128
    assert not [tell(engine, 0.0) for _ in range(8)][-1]
    assert engine.load(request, blocks, 128) == set(blocks[2:4])
    assert engine.matched(request_of("b", PROMPT)) == 64, "the next read does not use it"
    request.num_computed_tokens = 64
    assert positions(engine.step(request, blocks, 330 - 64)) == [64, 128, 192, 256]


@pytest.mark.usefixtures("boundless")
@pytest.mark.parametrize("deadline_ms", [0, 20_000])
def test_an_engine_reads_a_chunk_whose_near_copy_a_gate_keeps_out_from_a_farther_tier(
    make_server: Callable[..., LocalServer], own_redis: RedisProcess,
    request: pytest.FixtureRequest, deadline_ms: int,
) -> None:  # fmt: skip
    own_redis.start()
    with coarse_codec():
        server = make_server(*exact_on_redis(own_redis.url))
        role = Role(first_token_ms=deadline_ms)
        engine = Engine(server.address, accuracy="approximate", role=role)
        request.addfinalizer(engine.close)
        engine.run("writer", PROMPT[:128])
        leave_on_disk(server, keys(engine)[1:2], exact_on="redis")
        assert [tell(engine, 1.0, "rough") for _ in range(4)][-1]
        assert engine.run("a", PROMPT[:140]) == 128
        assert engine.workers[0]._connector.stats().gated_chunks == 0


@pytest.mark.usefixtures("boundless", "lossy")
@pytest.mark.parametrize("deadline_ms", [0, 20_000])
def test_a_chunk_that_a_gate_keeps_out_is_computed_and_stored_whatever_the_deadline(
    start: Start, deadline_ms: int
) -> None:
    engine = start("approximate", role=Role(first_token_ms=deadline_ms))
    assert [tell(engine, 1.0, "rough") for _ in range(4)][-1]
    assert begin(engine, "a", failed=1) == (64, [64, 128, 192, 256])
    counted = engine.workers[0].counted
    assert (counted["lost_chunks"], counted["slow_chunks"]) == (0, 0)
    assert engine.workers[0]._connector.stats().gated_chunks == 1
    assert begin(start(), "b") == (320, [])


@pytest.mark.usefixtures("lossy")
def test_ranks_read_their_heads_of_lossy_copies_and_store_nothing_behind_them(start: Start) -> None:
    ranks = [Shard.of_rank(representation(), rank, 2, None) for rank in range(2)]
    assert begin(start(ranks=ranks), "a") == (128, [])


@pytest.mark.usefixtures("lossy")
def test_pages_on_a_device_are_filled_from_exact_copies_only(start: Start) -> None:
    """Even where an engine's configuration does not say that they are on one."""
    engine = start(device=SlowDevice(), packing=side_by_side)
    request, blocks = request_of("a", PROMPT), engine.blocks(330)
    engine.scheduler.on_new_request(request)
    assert engine.matched(request) == 128
    assert engine.load(request, blocks, 128) == set(blocks[2:4])
