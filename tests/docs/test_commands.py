"""Every command of the documentation is run here, or could be: page by page, as they are written.

A page's commands run one after another in a folder of their own. Its paths below /etc, /run and
/var lie in that folder, its ports are free ones, its sizes small and its times short.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from docs.blocks import LANGUAGES, PAGES, ROOT, Block, blocks, commands
from docs.flags import check, is_run, program_of, verb_of
from helpers.credentials import Authority
from helpers.redis_process import RedisProcess, free_port

BIN = Path(sys.executable).parent
SMALL = ((r"\b\d+GiB\b", "64MiB"), (r"--seconds \d+", "--seconds 1"))
PROMPTS = "data/traces/mooncake_conversation_trace.jsonl"
LIMITED = ("timeout", "--kill-after=10", "150")  # ends the servers too, as one group
PORTS = (7420, 7421, 9420)
OURS = r"(kvstore|make|helm|kubectl|pip|python[\d.]*|docker) \S|kvstore-server --"
COMMAND = re.compile(rf"^\s*(\$ |sudo |\.venv/bin/|{OURS})", re.M)

SERVER = r"""
set -euo pipefail
pid=
stop() { if [ -n "$pid" ]; then kill "$pid"; wait "$pid" || true; pid=; fi; }
trap stop EXIT
kvstore-server() {
    stop
    : > server.out  # what the one before it said is not this one's
    PATH_TO_SERVER "$@" --listen 127.0.0.1:PORT --socket "$PWD/$RANDOM.sock" > server.out &
    pid=$!
    until grep -q "listening on" server.out; do
        kill -0 "$pid" || { wait "$pid"; return 1; }
        sleep 0.05
    done
}
"""
"""Starts servers in the background, each in the place of the one before it."""


def runnable(page: str) -> list[Block]:
    """Return the blocks of *page* in which something is run."""
    return [
        block
        for block in blocks(page)
        if block.language == "bash"
        and not block.why_not
        and any(is_run(words) for line in block.lines() for words in commands(line))
    ]


def script_lines(block: Block) -> Iterator[str]:
    """Yield the lines of a block that are run, each command of ours told where the server is."""
    for line in block.lines():
        found = commands(line)
        if not all(is_run(words) for words in found):
            continue
        after = []
        for words in found:
            if program_of(words) == "kvstore":
                command, path, _ = verb_of(words[1:])
                takes = {name for option in command.params for name in option.opts}
                if "--address" in takes and "7420" not in line:
                    last = rf"(\b{path[-1]}\b)"
                    line = re.sub(last, r"\1 --address 127.0.0.1:7420", line, count=1)
                if path == ("trace", "record"):  # nobody asks for anything meanwhile
                    after.append(f"head -n 3 {PROMPTS} > {words[3]}")
        yield line
        yield from after


def script(page: str, folder: Path, redis: RedisProcess) -> str:
    """Return what bash runs for *page*."""
    lines = [line for block in runnable(page) for line in script_lines(block)]
    ports = {port: free_port() for port in PORTS}
    if not any(
        line.lstrip().startswith(("kvstore-server", ".venv/bin/kvstore-server"))
        for line in lines[:1]
    ):
        lines.insert(0, "kvstore-server --cpu 64MiB --disk 64MiB:cache")
    body = "\n".join(lines) + "\n"
    for old, new in SMALL:
        body = re.sub(old, new, body)
    body = re.sub(r"(?<![\w.])/(etc|run|var)/", rf"{folder}/\1/", body)
    body = body.replace(".venv/bin/", "")
    for port, free in ports.items():
        body = re.sub(rf"(?<=:){port}\b", str(free), body)
    body = body.replace("redis.example:6379", f"127.0.0.1:{redis.port}")
    head = SERVER.replace("PATH_TO_SERVER", str(BIN / "kvstore-server"))
    return head.replace("PORT", str(ports[7420])) + body


@pytest.mark.parametrize("page", [page for page in PAGES if runnable(page)])
def test_the_commands_of_a_page_run(page: str, tmp_path: Path) -> None:
    cert, key = Authority(tmp_path, "ca").issue("server")
    for made, name in ((cert, "server.crt"), (key, "server.key"), (tmp_path / "ca.pem", "ca.crt")):
        (tmp_path / name).write_bytes(made.read_bytes())
    for folder in ("etc/kvstore", "run/kvstore", "var/lib/kvstore"):
        (tmp_path / folder).mkdir(parents=True, mode=0o700)
    (tmp_path / "data").symlink_to(ROOT / "data")
    redis = RedisProcess(tmp_path, "--requirepass", "password")
    redis.client = type(redis.client)(port=redis.port, password="password")
    redis.start()
    try:
        done = subprocess.run(
            [*LIMITED, "bash", "-c", script(page, tmp_path, redis)],
            cwd=tmp_path,
            env={
                "PATH": f"{BIN}:{os.environ['PATH']}",
                "HOME": str(tmp_path),
                "LC_ALL": "C.UTF-8",
                "PYTHONPATH": str(ROOT / "src"),
            },
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )
    finally:
        redis.stop()
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_block_is_what_its_fence_says() -> None:
    for block in (block for page in PAGES for block in blocks(page)):
        where = f"{block.page}:{block.line}"
        assert block.language in LANGUAGES, where
        if block.why_not:
            assert (block.language, len(block.why_not.split()) >= 3) == ("bash", True), where
        if block.language == "":
            assert not COMMAND.search(block.text), f"{where} hides a command"
        elif block.language == "bash":
            for line in block.lines():
                for words in commands(line):
                    check(words)
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "yaml":
            assert list(yaml.safe_load_all(block.text)), where
