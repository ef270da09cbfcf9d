"""The tier below vLLM's own offloading, on vLLM's real classes and a real server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.local_server import LocalServer, eventually
from helpers.redis_process import free_port
from vllm.v1.kv_offload.base import LookupResult, make_offload_key
from vllm.v1.kv_offload.tiering import base
from vllm.v1.kv_offload.tiering.base import JobResult
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kvstore.client.engines.vllm_tier import REPORTS_PARTIAL_JOBS, KVStoreTier
from kvstore.proto.errors import InvalidRequestError, ModelError
from kvstore.proto.types import Accuracy

TransferJob: Any = getattr(base, "TransferJob", None) or base.JobMetadata
CHUNKS, CHUNK_BYTES = 8, 4096
CONFIG = SimpleNamespace(
    model=SimpleNamespace(name="tiny", dtype="float32"),
    kv_cache_layout="LBHNC",
    canonical_layout=False,
    groups=(SimpleNamespace(tokens_per_block=32, layer_names=("a",), group_id=0),),
    cache=SimpleNamespace(tokens_per_hash=32, blocks_per_chunk=1),
    parallel=SimpleNamespace(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1),
)
REQUEST = SimpleNamespace(req_id="r", kv_transfer_params=None)
KEYS = [make_offload_key(bytes([number]) * 32, 0) for number in range(CHUNKS)]


class Tier:
    """A tier and the primary memory it works on."""

    def __init__(self, address: str, fill: int = 0, **settings: Any) -> None:
        self.memory = np.full((CHUNKS, CHUNK_BYTES), fill, np.int8)
        spec = SimpleNamespace(config=CONFIG)
        stated = {"deadline_ms": 5000, "lookup_deadline_ms": 5000, "model_revision": "8f2c1d4"}
        self.tier = KVStoreTier(
            spec, self.memory.data, "KVStoreTier",
            **{"address": address, **stated, **settings},
        )  # fmt: skip

    def run(self, rows: list[int], *, is_promotion: bool) -> JobResult:
        """Submit a job for the keys and the places numbered *rows*; return how it ended."""
        keys = [KEYS[row] for row in rows]
        job = TransferJob(7, keys, np.asarray(rows), is_promotion, REQUEST)
        (self.tier.submit_load if is_promotion else self.tier.submit_store)(job)
        results: list[JobResult] = []

        def is_over() -> bool:
            results.extend(self.tier.get_finished_jobs())
            return bool(results)

        assert eventually(is_over)
        (result,) = results
        return result

    def asked(self, *rows: int) -> dict[int, LookupResult]:
        """Ask for *rows* in one step after another until every answer is known."""
        found: dict[int, LookupResult] = {}

        def are_known() -> bool:
            for row in rows:
                found[row] = self.tier.lookup(KEYS[row], REQUEST)
            self.tier.on_schedule_end(SimpleNamespace())
            return LookupResult.RETRY not in found.values()

        assert eventually(are_known)
        return found

    def found(self, row: int) -> LookupResult:
        return self.asked(row)[row]


Start = Callable[..., Tier]


@pytest.fixture
def start(server: LocalServer, request: pytest.FixtureRequest) -> Start:
    def make(address: str = server.address, **settings: Any) -> Tier:
        tier = Tier(address, **settings)
        request.addfinalizer(tier.tier.shutdown)
        return tier

    return make


def test_what_one_tier_stores_another_promotes(start: Start) -> None:
    one, other = start(), start()
    one.memory[:] = np.arange(CHUNKS, dtype=np.int8)[:, None] + 1
    assert other.found(2) is LookupResult.MISS
    assert one.run([1, 2, 3], is_promotion=False).success
    third = start()
    assert third.tier.lookup(KEYS[2], REQUEST) is LookupResult.RETRY
    assert third.found(2) is LookupResult.HIT
    assert third.run([1, 2, 3], is_promotion=True).success
    assert third.memory[:5, 0].tolist() == [0, 2, 3, 4, 0]
    assert (third.memory[1:4] == one.memory[1:4]).all()


@pytest.mark.skipif(not REPORTS_PARTIAL_JOBS, reason="it takes no part of a promotion")
def test_a_promotion_that_fails_in_part_says_which_keys_came_and_is_not_tried_again(
    start: Start,
) -> None:
    one = start()
    one.run([1, 2], is_promotion=False)
    other = start()
    assert other.found(1) is LookupResult.HIT
    result = other.run([1, 2, 3], is_promotion=True)
    assert (result.success, result.successful_keys) == (False, (KEYS[1], KEYS[2]))
    result = other.run([3], is_promotion=True)
    assert (result.success, result.successful_keys) == (False, None)
    assert other.found(1) is LookupResult.HIT


def test_a_promotion_that_failed_is_not_tried_again_for_who_asked(start: Start) -> None:
    one, other = start(), start()
    one.run([1], is_promotion=False)
    assert other.found(1) is LookupResult.HIT
    other.tier._connector.read = lambda digests, out: 0  # type: ignore[method-assign]
    assert not other.run([1], is_promotion=True).success
    assert other.found(1) is LookupResult.MISS


@pytest.mark.parametrize("accuracy", ["bounded", "approximate", "lossy"])
def test_an_accuracy_other_than_exact_is_refused_by_name(accuracy: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"accuracy=.*exact"):
        Tier("127.0.0.1:1", accuracy=accuracy)


def test_a_chunk_with_lossy_copies_only_is_missing_and_so_it_is_stored(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    start().run([1, 3], is_promotion=False)
    client = type(start().tier._looking.client)
    stat = client.stat

    def lossy(*asked: Any, **more: Any) -> Any:
        def spoilt(one: Any) -> Any:
            copies = tuple(replace(copy, accuracy=Accuracy.bounded) for copy in one.copies)
            return replace(one, copies=copies)

        return list(map(spoilt, stat(*asked, **more)))

    monkeypatch.setattr(client, "stat", lossy)
    assert set(start().asked(7, 3, 1).values()) == {LookupResult.MISS}


def test_vllm_knows_the_tier_by_its_name_once_its_module_is_loaded() -> None:
    assert SecondaryTierFactory.get_tier_class({"type": "KVStoreTier"}) is KVStoreTier


def test_what_is_stored_is_found_whatever_else_is_asked_of_the_same_step(start: Start) -> None:
    """Of windows vLLM asks from the end of a prompt on, where nothing may be stored."""
    start().run([1, 3], is_promotion=False)
    hit, miss = LookupResult.HIT, LookupResult.MISS
    assert start().asked(7, 3, 2, 1) == {7: miss, 3: hit, 2: miss, 1: hit}


def test_a_dead_server_is_misses_and_failed_jobs_and_nothing_worse(start: Start) -> None:
    tier = start(f"127.0.0.1:{free_port()}")
    assert tier.found(1) is LookupResult.MISS
    assert not tier.run([1], is_promotion=False).success
    assert not tier.run([1], is_promotion=True).success
    tier.tier.drain_jobs()
    assert not tier.tier.has_pending_work()


def test_stores_beyond_the_queue_fail_at_once_while_others_wait(start: Start) -> None:
    tier = start(queue_bytes=2 * CHUNK_BYTES)
    write, may_write = tier.tier._connector.write_each, threading.Event()

    def slowly(*given: Any) -> Any:
        may_write.wait(20.0)
        return write(*given)

    tier.tier._connector.write_each = slowly  # type: ignore[method-assign, assignment]
    tier.tier.submit_store(TransferJob(8, [KEYS[1]], np.array([1]), False, REQUEST))
    assert not tier.run([2, 3], is_promotion=False).success
    may_write.set()
    assert eventually(lambda: [one.success for one in tier.tier.get_finished_jobs()] == [True])


def test_a_job_larger_than_the_queue_is_stored_where_no_other_waits(start: Start) -> None:
    assert start(queue_bytes=2 * CHUNK_BYTES).run([1, 2, 3], is_promotion=False).success
    assert start().found(3) is LookupResult.HIT


def test_engines_of_other_layouts_or_weights_do_not_share(start: Start) -> None:
    start().run([1], is_promotion=False)
    assert start(model_revision="8f2c1d5").found(1) is LookupResult.MISS
    assert start().found(1) is LookupResult.HIT


def test_a_tier_that_is_not_told_the_weights_is_refused(start: Start) -> None:
    for revision in ("", "main"):
        with pytest.raises(ModelError, match="model_revision"):
            start(model_revision=revision)


def test_after_vllm_reset_its_caches_nothing_older_is_promoted(start: Start) -> None:
    """A reset, which an update of the weights brings, tells a tier to drain its jobs alone."""
    tier = start()
    assert tier.run([1], is_promotion=False).success
    tier.tier.drain_jobs()
    assert tier.found(1) is LookupResult.MISS
    assert not tier.run([1], is_promotion=True).success
    assert tier.run([2], is_promotion=False).success
    assert tier.run([2], is_promotion=True).success
    assert start().found(1) is LookupResult.HIT, "of an engine that begins with the old weights"
    assert start().found(2) is LookupResult.MISS


def test_after_shutdown_a_job_fails_and_nothing_waits_for_it(server: LocalServer) -> None:
    tier = Tier(server.address)
    tier.tier.shutdown()
    assert not tier.run([1], is_promotion=False).success
    assert not tier.run([1], is_promotion=True).success
    tier.tier.drain_jobs()
