"""Second pools without SGLang: which are understood, whose pages they are, where prefixes end."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from hashlib import sha256
from itertools import combinations
from typing import Any

import pytest
import torch
from helpers.local_server import DEADLINE_MS, LocalServer
from hypothesis import given
from hypothesis import strategies as st

from kvstore.client.engines.sglang.pages import (
    BATCH,
    AuxPoolStore,
    PageSettings,
    RankInfo,
    aux_model,
    prefix_ends,
)
from kvstore.proto.errors import ModelError

EXTRA = {"model_revision": "c" * 40, "deadline_ms": DEADLINE_MS}
SETTINGS = PageSettings.parse(EXTRA, "org/tiny")
PAGE_BYTES = 96


@dataclass
class States:
    """A pool of states, one to a slot."""

    bytes_: int = PAGE_BYTES
    layout: str = "page_first"
    page_size: int = 1
    pages: dict[int, torch.Tensor] = field(default_factory=dict)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.pages[index]

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(self.bytes_, dtype=torch.uint8)

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        self.pages[index] = data_page.clone()


def terms(**changes: Any) -> RankInfo:
    return RankInfo(**{"is_mla": False, **changes})


def identity(name: str = "swa", pool: Any = None, **changes: Any) -> Any:
    return aux_model(pool or States(), name, terms(**changes), SETTINGS)


def test_pages_are_named_by_pool_form_and_rank() -> None:
    plain = identity()
    assert plain == identity()
    others = [
        identity("mamba"), identity(pool=States(layout="layer_first")),
        identity(pool=States(112)), identity(pool=States(page_size=16)),
        identity(tp_rank=1, tp_size=2), identity(tp_rank=0, tp_size=2), identity(pp_size=2),
    ]  # fmt: skip
    assert all(one != other for one, other in combinations([plain, *others], 2))


def test_what_ranks_of_a_latent_share_they_share_but_for_states() -> None:
    ranks = [{"is_mla": True, "tp_rank": rank, "tp_size": 2} for rank in (0, 1)]
    assert identity("indexer", **ranks[0]) == identity("indexer", **ranks[1])
    assert identity("mamba", **ranks[0]) != identity("mamba", **ranks[1])


@pytest.mark.parametrize("bytes_", [0, 100])
def test_pages_that_fill_no_rows_are_refused(bytes_: int) -> None:
    with pytest.raises(ModelError, match="host pool='swa'"):
        identity(pool=States(bytes_))


def test_more_pages_than_are_copied_at_a_time_come_back_up_to_one_that_is_missing(
    server: LocalServer,
) -> None:
    settings = replace(SETTINGS, address=server.address)
    pool = States()
    store = AuxPoolStore(pool, "mamba", terms(), settings)
    count = 2 * BATCH + 5
    hashes = [sha256(bytes([number])).hexdigest() for number in range(count)]
    seed = torch.Generator().manual_seed(5)
    kept = [
        torch.randint(0, 256, (PAGE_BYTES,), dtype=torch.uint8, generator=seed)
        for _ in range(count)
    ]
    pool.pages = dict(enumerate(kept))
    assert store.store(hashes, range(count)) == [True] * count
    missing = "f" * 64
    assert store.present([hashes[-1], missing, hashes[0]]) == [True, False, True]
    pool.pages = {}
    asked = [*hashes[: BATCH + 3], missing, *hashes[BATCH + 3 :]]
    found = store.load(asked, range(len(asked)))
    assert found == [True] * (BATCH + 3) + [False] * (len(asked) - BATCH - 3)
    assert sorted(pool.pages) == list(range(BATCH + 3))
    assert all(torch.equal(pool.pages[at], kept[at]) for at in pool.pages)
    store.client.close()


def test_a_store_that_fails_holds_no_pages_and_takes_none() -> None:
    pool = States(pages={0: torch.zeros(PAGE_BYTES, dtype=torch.uint8)})
    store = AuxPoolStore(pool, "mamba", terms(), replace(SETTINGS, address="127.0.0.1:1"))
    assert store.store(["1" * 64], [0]) == [False]
    assert store.present(["1" * 64]) == [False]
    assert store.load(["1" * 64], [0]) == [False]
    assert store.store(["no hash"], [0]) == [False]
    store.client.close()


@given(st.lists(st.booleans(), max_size=12), st.integers(0, 5))
def test_a_prefix_may_end_where_its_last_pages_are(present: list[bool], trailing: int) -> None:
    expected = [
        count
        for count in range(1, len(present) + 1)
        if all(present[max(0, count - trailing) if trailing else 0 : count])
    ]
    assert prefix_ends(present, trailing) == expected
