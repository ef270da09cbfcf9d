"""Rows at absolute positions as runs without a gap.

Varlen attention kernels align a causal mask to the bottom right: with m scattered rows of n
keys as one sequence, row i reads keys up to n - m + i, which lie in its future. A run [a, b) as
a sequence of its own, with b - a queries and b keys, is exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvstore.client.blend.adapter import Run


def runs_of(positions: Tensor) -> list[Run]:
    """Return the runs of *positions*, which rise: (rows,)."""
    if not positions.numel():
        return []
    cuts = (torch.nonzero(positions[1:] != positions[:-1] + 1).flatten() + 1).tolist()
    starts, ends = [0, *cuts], [*cuts, positions.numel()]
    values = positions.tolist()
    return [(values[a], values[b - 1] + 1) for a, b in zip(starts, ends, strict=True)]


def positions_of(runs: Sequence[Run], device: torch.device | None = None) -> Tensor:
    """Return the positions of *runs*: (rows,)."""
    return torch.cat([torch.arange(a, b, device=device) for a, b in runs])


def reads(positions: Tensor, first_key: int, last_key: int, window: int | None) -> Tensor:
    """Return which keys of [first_key, last_key) each row reads: bool (rows, keys).

    Those up to its own position, and after its position less *window*.
    """
    keys = torch.arange(first_key, last_key, device=positions.device)
    mask = keys <= positions[:, None]
    if window is not None:
        mask &= keys > positions[:, None] - window
    return mask
