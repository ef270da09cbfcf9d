"""What asking costs: a prompt resolved at a real server and its plan made, nothing loaded."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from bench.workload import connect, serving
from kvstore.client import Client
from kvstore.client.blend.engine import Blender
from kvstore.client.blend.layer_pass import EngineAdapter
from kvstore.client.blend.plan import Segment, SegmentRange
from kvstore.client.blend.store import StoreSource, store_prefill
from kvstore.client.segments import SegmentQuery
from kvstore.proto.types import DType, LayerGroup, LayerKind, Model

if TYPE_CHECKING:
    from bench.blend_speed import Stage

_TRIAL = SegmentQuery(is_trial=True)
"""Let through a gate that nobody has opened."""


@dataclass(frozen=True, slots=True)
class Asking:
    """A prompt whose documents a server has from another order of them."""

    client: Client
    tokens: tuple[int, ...]
    ranges: tuple[SegmentRange, ...]

    def ask(self) -> None:
        """Resolve the prompt, make its plan, and give back what was leased.

        Raises RuntimeError unless all documents are found.
        """
        with (
            self.client.find_segments(self.tokens, self.ranges, _TRIAL) as resolved,
            StoreSource(resolved, self.tokens, self.client.model) as source,
        ):
            if not source.plan.count("approx"):
                raise RuntimeError("nothing was found of a prompt whose documents were stored")


@contextmanager
def asking(stage: Stage) -> Iterator[Asking]:
    """Serve *stage*'s documents; yield what asks for its prompt."""
    ranges = _ranges(stage.segments)
    documents = [stage.tokens[one.start : one.stop] for one in ranges]
    rng = random.Random(1)
    rng.shuffle(documents)
    head = tuple(rng.randrange(1, 1024) for _ in range(ranges[0].start))
    tokens = [*head, *(token for one in documents for token in one), 1]
    ends = accumulate(map(len, documents), initial=len(head))
    stored = [SegmentRange(*span) for span in pairwise(ends)]
    with (
        TemporaryDirectory() as folder,
        serving("--cpu", "256MiB", disk=Path(folder) / "disk") as (address, _),
        connect(address, representation(stage.adapter)) as client,
    ):
        store_prefill(client, Blender(stage.adapter).prefill(tokens), tokens, stored)
        yield Asking(client, stage.tokens, tuple(ranges))


def representation(adapter: EngineAdapter) -> Model:
    """Return the identity of the random model behind *adapter*."""
    group = LayerGroup(
        LayerKind.attention, DType.float32, tuple(range(adapter.n_layers)),
        adapter.kv_heads, adapter.head_dim,
    )  # fmt: skip
    return Model("bench/blend", "r1", "none", "none", (group,), adapter.origin.rope, "none")


def _ranges(segments: Sequence[Segment]) -> list[SegmentRange]:
    return [SegmentRange(one.start, one.end) for one in segments if one.kind == "approx"]
