"""`kvstore simulate`: a trace replayed on policies and capacities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from kvstore.cli.app import AsJson, command, completes, number, path
from kvstore.cli.output import Grid, followed, show
from kvstore.proto.errors import InvalidRequestError

if TYPE_CHECKING:  # help is to load none of the product
    from kvstore.cli.simulate.blocks import Outcome, Terms
    from kvstore.cli.trace_format import BlockTrace, SegmentLine, TraceLines

_GIB = float(1 << 30)


def _complete_policies(incomplete: str) -> list[str]:
    from kvstore.proto.types import POLICIES

    return completes("all", *POLICIES)(incomplete)


@command(
    "simulate",
    exits="0 2",
    example="kvstore simulate trace.jsonl --policy all --capacity 5%,10%",
    section="Measure",
)
def simulate(  # noqa: PLR0913 - each is an option
    trace: Annotated[Path, Argument(help="JSONL: Mooncake's blocks or token segments.")],
    policy: Annotated[
        str,
        Option(metavar="P[,P]", help="Policies, or all.", autocompletion=_complete_policies),
    ] = "hit_density",
    capacity: Annotated[
        str, Option("--capacity", "--size", metavar="C[,C]", help="10GiB, or 5% of the trace.")
    ] = "5%",
    model: Annotated[
        Literal["attention", "hybrid-7b"], Option(help="Model of the prompts.")
    ] = "attention",
    kv_bytes_per_token: Annotated[
        int, number("KV bytes a token of the model attention.", 1)
    ] = 131_072,
    block_tokens: Annotated[int, number("Tokens of a block, where the trace has none.", 1)] = 256,
    count_from: Annotated[
        Literal["start", "half"], Option("--from", help="Where hits begin to count.")
    ] = "start",
    as_json: AsJson = False,
    plot: Annotated[Path | None, path("Draw hits by capacity: .svg.")] = None,
) -> None:
    """Replay a trace on policies and capacities, and print what each would have hit."""
    from kvstore.cli.simulate.blocks import Terms

    if plot is not None:
        _check_plot(plot)
    terms = [
        Terms(name, size, model, kv_bytes_per_token, block_tokens, count_from == "half")
        for size in capacity.split(",")
        for name in names_of(policy, model)
    ]
    simulator = Simulator(trace)
    outcomes = [simulator.run(one) for one in followed(terms, "replaying")]
    rows = [
        {name: value for name, value in asdict(one).items() if value is not None}
        for one in outcomes
    ]
    show(rows[0] if len(rows) == 1 else rows, _text(outcomes), as_json)
    if plot is not None:
        _plot(plot, trace.name, outcomes)


def names_of(policies: str, model: str) -> list[str]:
    """Return the policies in a list with commas; all there are for ``all``.

    Raises InvalidRequestError for one that the model's simulator does not have.
    """
    from kvstore.cli.simulate.states import HYBRID_POLICIES
    from kvstore.proto.types import POLICIES, policy_instead_of

    known = HYBRID_POLICIES if model == "hybrid-7b" else POLICIES
    names = list(known) if policies == "all" else policies.split(",")
    for name in names:
        if name not in known:
            raise InvalidRequestError("policy", name, policy_instead_of(name, (*known, "or all")))
    return names


class Simulator:
    """A trace that was read once, and replayed as often as there are policies and capacities."""

    def __init__(self, path: Path) -> None:
        """Read the trace. Raises InvalidRequestError and OSError, as ``read_trace``."""
        from kvstore.cli.trace_format import read_trace

        self._name = path.name
        self._lines: TraceLines = read_trace(path)
        self._blocks: dict[int, BlockTrace] = {}

    def run(self, terms: Terms) -> Outcome:
        """Replay the trace. Raises InvalidRequestError when it cannot be, saying why."""
        from kvstore.cli.simulate.blocks import HYBRID, replay_blocks
        from kvstore.cli.simulate.states import replay_states
        from kvstore.cli.trace_format import make_blocks

        if terms.model == HYBRID:
            footprint = self._states_bytes if "%" in terms.capacity else 0
            return replay_states(self._segments, terms, footprint)
        trace = self._blocks.get(terms.block_tokens)
        if trace is None:
            trace = self._blocks[terms.block_tokens] = make_blocks(self._lines, terms.block_tokens)
        return replay_blocks(trace, terms)

    @cached_property
    def _segments(self) -> list[SegmentLine]:
        from kvstore.cli.trace_format import SegmentLine

        lines = [line for line in self._lines if isinstance(line, SegmentLine)]
        if not lines:
            fix = "a state is of one token's position, and blocks do not say which: use attention"
            raise InvalidRequestError(f"model for {self._name}", "hybrid-7b", fix)
        return lines

    @cached_property
    def _states_bytes(self) -> int:
        from kvstore.cli.simulate.states import footprint_bytes

        return footprint_bytes(self._segments)


def _text(outcomes: Sequence[Outcome]) -> Iterator[Grid]:
    table = Grid(
        *("policy", "GiB", "tokens hit", "blocks hit", "PFLOPs saved", "evictions", "requests/s")
    )
    for one in outcomes:
        table.add_row(
            one.policy,
            f"{one.capacity_bytes / _GIB:.2f}",
            f"{one.token_hit_rate:.2%}",
            "-" if one.block_hit_rate is None else f"{one.block_hit_rate:.2%}",
            f"{one.flops_saved / 1e15:.1f}",
            "-" if one.evictions is None else one.evictions,
            f"{one.requests_per_s:.0f}",
        )
    yield table


def _check_plot(path: Path) -> None:
    if path.suffix.lower() != ".svg":
        raise InvalidRequestError("plot", path.name, "end it in .svg")
    if not path.parent.is_dir():
        raise InvalidRequestError("plot", str(path), "name a file in a folder that exists")


def _plot(path: Path, title: str, outcomes: Sequence[Outcome]) -> None:
    """Draw the tokens hit against the capacity, a line a policy."""
    from kvstore.cli.plot import line_chart

    lines: dict[str, list[tuple[float, float]]] = {}
    for one in outcomes:
        point = (max(one.capacity_bytes, 1) / _GIB, 100 * one.token_hit_rate)
        lines.setdefault(one.policy, []).append(point)
    ticks = sorted({round(x, 2) for line in lines.values() for x, _ in line} - {0.0})
    line_chart(path, title, ("GiB (log)", "% of the prompts' tokens hit"), lines, ticks)
