"""The constants of hybrid models, by hand."""

from __future__ import annotations

from kvstore.server.eviction.states.tree import HYBRID_7B


def test_a_state_of_the_7_b_hybrid_is_as_large_as_the_kv_of_409_tokens() -> None:
    assert HYBRID_7B.state_bytes == 26_787_840
    assert HYBRID_7B.kv_bytes_per_token == 65_536
    assert HYBRID_7B.state_bytes // HYBRID_7B.kv_bytes_per_token == 408


def test_flops_are_the_sum_over_layers_of_the_published_formulas() -> None:
    tokens, wide, states = 1000, 4096, 128
    attention = 8 * tokens * wide**2 + 4 * tokens**2 * wide
    mlp = 16 * tokens * wide**2
    mamba = 12 * tokens * wide**2 + 16 * tokens * wide * states + 10 * tokens * wide

    assert HYBRID_7B.flops(tokens) == 4 * attention + 28 * mlp + 24 * mamba


def test_no_tokens_cost_nothing() -> None:
    assert HYBRID_7B.flops(0) == 0
