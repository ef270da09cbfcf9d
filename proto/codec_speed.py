"""What a codec does on this machine, and up to which link that pays."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import Fidelity


@dataclass(frozen=True, slots=True)
class CodecSpeed:
    """A codec, measured on one thread. Speeds count decoded bytes.

    ``ratio`` is decoded over stored bytes, headers included. Raises InvalidRequestError at
    birth for figures that are not positive.
    """

    name: str
    backend: str
    fidelity: Fidelity
    ratio: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float

    def __post_init__(self) -> None:
        for field in ("ratio", "encode_bytes_per_s", "decode_bytes_per_s"):
            value = getattr(self, field)
            if not 0 < value < math.inf:
                raise InvalidRequestError(field, value, "measure a positive number")

    @property
    def break_even_bytes_per_s(self) -> float:
        """The link from which on raw frames are faster when load and decode take turns.

        Loading S bytes takes S / B raw and S / (B ratio) + S / decode coded.
        """
        return max(0.0, self.decode_bytes_per_s * (1 - 1 / self.ratio))

    @property
    def full_gain_bytes_per_s(self) -> float:
        """The link up to which decoding keeps up, when it runs beside the next load."""
        return self.decode_bytes_per_s / self.ratio

    def load_bytes_per_s(self, link_bytes_per_s: float) -> float:
        """Decoded bytes a second over such a link, decoding beside the next load."""
        return min(link_bytes_per_s * self.ratio, self.decode_bytes_per_s)
