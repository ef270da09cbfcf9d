"""The commands' man pages: what each exits with, and an example of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typer.core import TyperGroup
from typing_extensions import override

from kvstore.cli.exits import CODES

_DONE = "0 2"
_ASKS = "0 2 3"
_JUDGES = "0 1 2 3"

PAGES: Mapping[str, tuple[str, str]] = {
    "status": (_ASKS, "kvstore status --json"),
    "top": (_ASKS, "kvstore top --once"),
    "ls": (_ASKS, "kvstore ls --limit 20"),
    "stat": (_JUDGES, "kvstore stat 3fa95c --json"),
    "get": (_JUDGES, "kvstore get 3fa95c --out chunk.safetensors"),
    "put": (_JUDGES, "kvstore put chunk.safetensors"),
    "pin": (_JUDGES, "kvstore pin 3fa95c --for 2h"),
    "unpin": (_JUDGES, "kvstore unpin --prefix 3fa9"),
    "clear": (_JUDGES, "kvstore clear --tier disk --dry-run"),
    "explain": (_ASKS, "kvstore explain --recent 20"),
    "doctor": (_JUDGES, "kvstore doctor --tiers cpu,disk"),
    "scrub": (_JUDGES, "kvstore scrub --tiers disk --rate 100MiB"),
    "drain": (_JUDGES, "kvstore drain --within 20"),
    "bench": (_JUDGES, "kvstore bench --chunks 16 --json"),
    "codecs": (_DONE, "kvstore codecs raw kvq:2"),
    "calibrate": (_DONE, "kvstore calibrate kvt ./my-model --text corpus.txt --out assets"),
    "simulate": (_DONE, "kvstore simulate trace.jsonl --policy all --capacity 5%,10%"),
    "demo": (_JUDGES, "kvstore demo --json demo.json"),
    "config show": (_DONE, "kvstore config show --cpu 8GiB"),
    "config validate": (_DONE, "kvstore config validate --config kvstore.yaml"),
    "config schema": (_DONE, "kvstore config schema"),
    "trace record": (_JUDGES, "kvstore trace record trace.jsonl --seconds 60"),
    "trace replay": (_JUDGES, "kvstore trace replay trace.jsonl"),
    "blend status": (_ASKS, "kvstore blend status"),
    "blend calibrate": (_JUDGES, "kvstore blend calibrate ./my-model --text corpus.txt"),
    "token make": (_DONE, "kvstore token make api-keys --tenant acme --roles read,write"),
    "token list": (_DONE, "kvstore token list api-keys"),
    "token revoke": (_DONE, "kvstore token revoke api-keys 0123456789ab"),
    "keys new": (_DONE, "kvstore keys new encryption-keys"),
    "keys list": (_DONE, "kvstore keys list encryption-keys"),
    "keys retire": (_DONE, "kvstore keys retire encryption-keys 1"),
    "quota show": (_ASKS, "kvstore quota show '*' --json"),
    "quota set": (_ASKS, "kvstore quota set acme --rate 500"),
    "audit verify": (_JUDGES, "kvstore audit verify audit.log"),
}
"""By command: the exit codes it has, and a line to type."""


class Manual(TyperGroup):
    """A group whose commands' help ends with their exit codes and an example.

    Contexts and commands are click's, of which some releases of typer bring their own.
    """

    @override
    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        page = PAGES.get(" ".join([*_path(ctx), cmd_name]))
        if command is not None and page is not None:
            command.epilog = _epilog(*page)
        return command


def _path(ctx: Any) -> list[str]:
    """Return the names of the groups above, the program's own left out."""
    names: list[str] = []
    while ctx.parent is not None:
        names.insert(0, ctx.info_name or "")
        ctx = ctx.parent
    return names


def _epilog(codes: str, example: str) -> str:
    told = "\n".join(f"  {code}  {CODES[int(code)]}" for code in codes.split())
    return f"\b\nExit codes:\n{told}\n\n\b\nExample:\n  {example}"
