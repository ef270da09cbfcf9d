"""What this machine's codecs do, measured: as a table or JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence

from kvstore.cli.progress import followed
from kvstore.cli.tables import Grid, open_console
from kvstore.codecs.base import CODECS, codec_by_name
from kvstore.codecs.speed import CodecSpeed, make_sample, measure
from kvstore.proto.errors import KVStoreError

BUDGET_S = 0.2
"""Of measuring each codec; its first use, which may compile, comes on top."""
_GB = 1e9


def every_name() -> list[str]:
    """Return all codecs, those that write the raw bytes first."""
    return sorted(CODECS, key=lambda name: (CODECS.load(name).codec_id, name))


def measure_all(names: Sequence[str]) -> tuple[list[CodecSpeed], dict[str, str]]:
    """Measure codecs on one thread; return the figures, and why some have none.

    Raises UnknownCodecError for a name that is none.
    """
    found = [(name, codec_by_name(name)) for name in names]
    sample = make_sample()
    speeds, missing = [], {}
    for name, codec in followed(found, "measuring"):
        try:
            speeds.append(measure(name, codec, sample, time.perf_counter, BUDGET_S))
        except KVStoreError as error:
            missing[name] = str(error)
    return speeds, missing


def speeds_as_json(speeds: Sequence[CodecSpeed], missing: Mapping[str, str]) -> str:
    """Return the figures as JSON: speeds in decoded bytes a second."""
    rows = [
        {
            "codec": one.name,
            "backend": one.backend,
            "accuracy": one.accuracy.name,
            "ratio": round(one.ratio, 4),
            "encode_bytes_per_s": round(one.encode_bytes_per_s),
            "decode_bytes_per_s": round(one.decode_bytes_per_s),
            "break_even_bytes_per_s": round(one.break_even_bytes_per_s),
            "full_gain_bytes_per_s": round(one.full_gain_bytes_per_s),
        }
        for one in speeds
    ]
    return json.dumps({"codecs": rows, "not_measured": dict(missing)}, indent=2)


def print_speeds(speeds: Sequence[CodecSpeed], missing: Mapping[str, str]) -> None:
    """Print the figures as a table."""
    console = open_console()
    table = Grid(
        "codec", "backend", "accuracy", "ratio", "enc GB/s", "dec GB/s", "even GB/s", "full GB/s"
    )
    for one in speeds:
        figures = (
            one.encode_bytes_per_s, one.decode_bytes_per_s, one.break_even_bytes_per_s,
            one.full_gain_bytes_per_s,
        )  # fmt: skip
        table.add_row(
            one.name, one.backend, one.accuracy.name, f"{one.ratio:.2f}",
            *(f"{figure / _GB:.2f}" for figure in figures),
        )  # fmt: skip
    console.print(table)
    for name, reason in missing.items():
        console.print(f"{name}: not measured: {reason}")
    console.print(
        "One thread, 2 MiB of synthetic bfloat16 KV. A codec breaks even on a link of so many GB/s"
        " (slower ones gain), and gains in full where decoding runs beside the next load.",
    )
