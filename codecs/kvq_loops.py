"""What the compiled loops of kvq share: turning a head, and counting escapes."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvstore.codecs.jit import inner
from kvstore.codecs.kvq_models import ESCAPE

ONE = np.float32(1)


@inner
def turn(row: Any, cosine: Any, sine: Any, sign: Any) -> None:
    """Turn one token's head by *sign* times its angles, in place."""
    pairs = len(cosine)
    for i in range(pairs):
        first, second = row[i], row[i + pairs]
        signed = sine[i] * sign
        row[i] = first * cosine[i] - second * signed
        row[i + pairs] = second * cosine[i] + first * signed


@inner
def escapes_in(symbols: Any) -> Any:
    """Count the escapes in a row of symbols."""
    count = np.uint8(0)  # of 128 at the most: eight bits keep the vectors full
    for c in range(len(symbols)):
        count = np.uint8(count + np.uint8(symbols[c] == ESCAPE))
    return np.int64(count)
