"""Thousands of schedules, and one by its seed.

Each defect of test_mutations.py shows in the two thousand that run with every change, most of them
in the first hundred; a hundred thousand run at night.
"""

from __future__ import annotations

from collections import Counter

import pytest
from simulation.schedule import Report, Schedule

BLOCKS = 10


def run(seed: int) -> Report:
    try:
        return Schedule(seed).run()
    except BaseException as error:
        error.add_note(f"replay it: pytest tests/simulation -k replay --seed {seed}")
        raise


ELSEWHERE = {
    "zmq_refused_connections", "dropped_rows",
    "lossy_victims", "replaced_copies", "lossless_instead",
    "unworthy_copies", "left_copies",
    "prefetched_chunks", "prefetch_used_chunks", "unusable_histories", "evicted_for_quota_chunks",
    "expired_chunks", "ignored_pins", "unreadable_chunks",
    "put_shards", "dropped_unfinished_chunks", "announced_puts", "waited_lookups",
    "refused_waits", "blend_resolves", "blend_exact_chunks", "blend_variant_chunks",
    "blend_missing_chunks", "blend_reports", "blend_refused_reports", "blend_shadows",
    "blend_gate_changes", "blend_gates_closed", "blend_let_through", "blend_kept_out",
    "put_states_left_out", "over_budget_copies", "shed_calls", "expired_calls", "revoked_sessions",
    "stalled_calls",
    "scrubbed_chunks", "scrubbed_bytes", "scrub_passes",
    "event_batches", "event_restarts", "event_invalid_requests", "event_cut_replays",
    "peer_finds", "peer_found_chunks", "peer_read_chunks", "peer_read_bytes", "peer_failures",
    "peer_lent_chunks",
    "peer_passed_chunks",
    "peer_refusals", "peer_lost_sessions", "peer_invalid_answers", "peer_corrupt_chunks",
    "peer_asked_chunks", "peer_served_chunks", "peer_served_bytes", "peer_refused_requests",
    "directory_questions", "directory_unanswered", "directory_words", "directory_dropped_words",
}  # fmt: skip
"""What the bulk channel, a tier's start, lossy codecs, admissions, budgets, plans, prefetches,
quotas, lifetimes, the history file, codecs that only others have, shards, announcements, blending,
overload, trust, peers and the directory count: none is in a schedule. Lossy codecs have schedules
of their own in tests/server/store/test_accuracy.py, scrub and shards in test_network.py."""


@pytest.mark.slow
@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_schedule_breaks_a_promise(block: int, pytestconfig: pytest.Config) -> None:
    for seed in range(block, int(pytestconfig.getoption("--sim-seeds")), BLOCKS):
        run(seed)


def test_replay_of_one_seed(request: pytest.FixtureRequest) -> None:
    run(request.config.getoption("--seed", default=None) or 0)


def test_a_seed_always_gives_the_same_schedule() -> None:
    for seed in range(20):
        assert run(seed) == run(seed)


def test_the_schedules_go_everywhere() -> None:
    """What no schedule does, no schedule can find wrong."""
    seen: Counter[str] = Counter()
    for seed in range(300):
        seen.update(run(seed).counters)
    assert [name for name, count in seen.items() if not count and name not in ELSEWHERE] == []
