"""HTML that is safe by how it is made: all text is escaped but what was made here."""

from __future__ import annotations

import html
from collections.abc import Sequence


class Html(str):
    """Text that is HTML already. Made in this file, and where a drawing is."""

    __slots__ = ()


def text(value: object) -> Html:
    """Return *value* as it stands if it is Html, else as text of a page."""
    return value if isinstance(value, Html) else Html(html.escape(str(value), quote=True))


def joined(parts: Sequence[object]) -> Html:
    """Return *parts* one after the other."""
    return Html("".join(text(part) for part in parts))


def tag(name: str, content: object = "", **attributes: object) -> Html:
    """Return an element; ``class_`` stands for class, underscores for hyphens."""
    told = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value), quote=True)}"'
        for key, value in attributes.items()
    )
    return Html(f"<{name}{told}>{text(content)}</{name}>")


def table(
    caption: str, heads: Sequence[str], rows: Sequence[Sequence[object]], words: int = 1
) -> Html:
    """Return a table whose first *words* columns are words and the others numbers."""

    def cells(row: Sequence[object]) -> Html:
        made = [tag("th", row[0], scope="row")] if row else []
        for at, cell in enumerate(row[1:], 1):
            made.append(tag("td", cell, **({"class_": "n"} if at >= words else {})))
        return tag("tr", joined(made))

    head = [
        tag("th", name, scope="col", **({"class_": "n"} if at >= words else {}))
        for at, name in enumerate(heads)
    ]
    body = joined([cells(row) for row in rows])
    if not rows:
        body = tag("tr", tag("td", "none yet", colspan=len(heads)))
    parts = [tag("caption", caption), tag("thead", tag("tr", joined(head))), tag("tbody", body)]
    inner = tag("table", joined(parts))
    return tag("div", inner, class_="t", role="region", tabindex=0, aria_label=caption)


def bar(share: float | None, label: object) -> Html:
    """Return a bar of *share* of its width, from 0 to 1, with *label* behind it."""
    if share is None:
        return text(label)
    percent = round(100 * min(1.0, max(0.0, share)), 1)
    drawn = (
        f'<svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="rail" width="100" height="8"/>'
        f'<rect class="full" width="{percent}" height="8"/></svg>'
    )
    return joined([Html(drawn), " ", label])


def section(name: str, title: str, parts: Sequence[object]) -> Html:
    """Return a part of a page under a heading; ``name`` is its id."""
    heading = tag("h2", title, id=f"{name}-title")
    return tag("section", joined([heading, *parts]), id=name, aria_labelledby=f"{name}-title")
