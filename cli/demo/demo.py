"""`kvstore demo`: stores and loads a prompt on this machine, with real processes, timed."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from kvstore.cli.app import EXIT_NOT_HELD, Grid, Shown, command, fail, number, path, progress, show
from kvstore.cli.calibrate import check_extras
from kvstore.proto.errors import InvalidRequestError, KVStoreError

MODEL = Path(__file__).with_name("tinylm")
ENGINE_S = 300.0
MAX_NEW_TOKENS = 64
DISK_SIZE = "512MiB"
START_S = 60.0
_GREETING = "kvstore-server listening on "
_WEIGHTS = ("*.safetensors", "*.bin")
_MODULE = (sys.executable, "-P", "-m")  # -P: imports nothing from the working directory
_say = partial(print, flush=True)
_STEPS = {
    "first": "2. one engine process computes the prompt and stores it ...",
    "second": "3. another loads it, and times its first token both ways ...",
    "restarted": "5. a third engine process loads it from disk ...",
}
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@command("demo", exits="0 1 2 3", example="--json demo.json", section="Measure")
def demo(
    json_file: Annotated[Path | None, path("Write the figures to FILE.", "--json")] = None,
    model: Annotated[Path, path("Folder of a transformers model.", metavar="DIR")] = MODEL,
    tokens: Annotated[int, number("Length of the prompt.", 64)] = 900,
) -> None:
    """Compute a prompt once, then load it: in another process, and after a kill -9.

    Starts its own server in a temporary folder. Exits with 1 unless the tokens are the same with
    and without the store and loading was faster than computing.
    """
    import tempfile

    started = time.monotonic()
    check_model(model, tokens)
    _say(f"model: {model}")
    with _signals_exit(), tempfile.TemporaryDirectory(prefix="kvstore-demo-") as scratch:
        reports = _play(Path(scratch), [str(model), str(tokens)])
    figures = judge(reports, time.monotonic() - started)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(figures, indent=2) + "\n")
    show(Shown(figures, _text(figures), held=not figures["problems"]), as_json=False)


def check_model(folder: Path, prompt_tokens: int) -> None:
    """Raise InvalidRequestError unless *folder* has a model that accepts *prompt_tokens*."""
    check_extras(folder)
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        config = None
    parts = {
        "config.json": isinstance(config, dict),
        "weights (*.safetensors or *.bin)": any(map(any, map(folder.glob, _WEIGHTS))),
        "tokenizer (tokenizer*)": any(folder.glob("tokenizer*")),
    }
    absent = [what for what, is_there in parts.items() if not is_there]
    if absent:
        fix = (
            f"no {', no '.join(absent)} there: give a transformers model's folder, such as"
            " build/real-model of a checkout after make real-model, or none"
        )
        raise InvalidRequestError("model", str(folder), fix)
    longest = config.get("max_position_embeddings", sys.maxsize) - MAX_NEW_TOKENS
    if prompt_tokens > longest:
        raise InvalidRequestError("tokens", prompt_tokens, f"the model accepts at most {longest}")


class ServerChild:
    """A server process on a free loopback port; *folder* has its disk tier, for a restart, too."""

    def __init__(self, folder: Path, flags: Sequence[str] = ()) -> None:
        self.log_file = folder / "server.log"
        self._command = [
            *_MODULE, "kvstore.server",
            "--listen", "127.0.0.1:0",
            "--disk", f"{DISK_SIZE}:{folder / 'disk'}",
            "--socket-path", str(folder / "{port}.sock"),
            *flags,
        ]  # fmt: skip
        self._process: subprocess.Popen[str] | None = None
        self.address = ""
        self.greeting = ""

    def start(self) -> None:
        """Start it and wait until it listens. Raises KVStoreError with its last log line."""
        with self.log_file.open("a") as log:
            self._process = process = subprocess.Popen(  # noqa: S603 - our own interpreter
                self._command, stdout=subprocess.PIPE, stderr=log, text=True
            )
        try:
            assert process.stdout is not None
            is_ready = select.select([process.stdout], [], [], START_S)[0]
            self.greeting = process.stdout.readline().strip() if is_ready else ""
            if not self.greeting.startswith(_GREETING):
                words = _last_words(self.log_file.read_text())
                raise KVStoreError(f"kvstore-server did not start: {words}")
        except BaseException:
            self.kill()
            raise
        self.address = self.greeting.removeprefix(_GREETING).split()[0]

    def kill(self) -> None:
        """End it by SIGKILL: data only in its memory is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def __enter__(self) -> ServerChild:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _last_words(text: str) -> str:
    return (text.strip().splitlines() or ["it printed nothing"])[-1]


def judge(reports: Mapping[str, Mapping[str, Any]], duration_s: float) -> dict[str, Any]:
    """Return the figures of the three engine processes; ``problems`` is empty if all checks passed.

    Times to the first token are medians in milliseconds, including the client's connection;
    ``ttft_ratio`` is with over without the store.
    """
    first, second, restarted = (reports[name] for name in ("first", "second", "restarted"))
    identical = all(one["tokens"] == first["plain_tokens"] for one in reports.values())
    disk_hit_tokens = restarted["hit_tokens_by_tier"].get("disk", 0)
    ratio = second["ttft_with_ms"] / second["ttft_without_ms"]
    checks = {
        "the first process hit in an empty store": not first["hit_tokens"],
        "the tokens differ with and without the store": identical,
        "the second process loaded nothing": second["hit_tokens"] > 0,
        "nothing was loaded from disk after the kill": disk_hit_tokens > 0,
        "loading was not faster than computing": ratio < 1,
    }
    for name, report in reports.items():
        checks[f"errors in the {name} process: {report['errors']}"] = not report["errors"]
    names = (
        "hit_tokens", "hit_tokens_by_tier", "ttft_without_ms", "ttft_with_ms", "load_ms",
        "samples_without_ms", "samples_with_ms",
    )  # fmt: skip
    return {name: second[name] for name in names} | {
        "tokens_identical": identical,
        "disk_hit_tokens_after_kill": disk_hit_tokens,
        "ttft_ratio": ratio,
        "problems": [sentence for sentence, held in checks.items() if not held],
        "prompt_tokens": first["prompt_tokens"],
        "new_tokens": len(first["tokens"]),
        "hit_tokens_by_tier_after_kill": restarted["hit_tokens_by_tier"],
        "ttft_from_disk_ms": restarted["ttft_with_ms"],
        "duration_s": duration_s,
    }


@contextmanager
def _signals_exit() -> Iterator[None]:
    """Raise SystemExit on the first terminating signal, and ignore further ones."""

    def leave(number: int, _: object) -> None:
        for one in _SIGNALS:
            signal.signal(one, signal.SIG_IGN)
        raise SystemExit(128 + number)

    before = {one: signal.signal(one, leave) for one in _SIGNALS}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _play(scratch: Path, arguments: Sequence[str]) -> dict[str, dict[str, Any]]:
    reports = {}
    with ServerChild(scratch) as server:
        _say(f"1. {server.greeting}")
        for role, step in _STEPS.items():
            if role == "restarted":
                server.kill()
                server.start()
                _say(f"4. kill -9, started again: {server.greeting}")
            _say(step)
            # torch leaves temporary files
            command = ["env", f"TMPDIR={scratch}", *_MODULE, "kvstore.cli.demo.engine", role]
            try:
                with progress(f"engine process: {role}"):
                    done = subprocess.run(  # noqa: S603 - our own interpreter and module
                        [*command, server.address, *arguments],
                        capture_output=True, text=True, timeout=ENGINE_S, check=False,
                    )  # fmt: skip
            except subprocess.TimeoutExpired:
                fail(f"the {role} engine process took over {ENGINE_S:.0f} s", EXIT_NOT_HELD)
            if done.returncode:
                words = _last_words(done.stderr)
                fail(f"the {role} engine process failed: {words}", EXIT_NOT_HELD)
            reports[role] = json.loads(done.stdout.splitlines()[-1])
    return reports


def _text(figures: Mapping[str, Any]) -> Iterator[str | Grid]:
    times = [figures[f"ttft_{way}_ms"] for way in ("without", "with", "from_disk")]
    tiers = [figures[f"hit_tokens_by_tier{when}"] for when in ("", "_after_kill")]
    hits = [", ".join(f"{n} from {tier}" for tier, n in one.items()) or "0" for one in tiers]
    same = "the same" if figures["tokens_identical"] else "DIFFERENT"
    rows = [
        ("time to first token (ms)", *(f"{ms:.1f}" for ms in times)),
        (f"tokens not computed, of {figures['prompt_tokens']}", "0", *hits),
        (f"{figures['new_tokens']} generated tokens", "the reference", same, same),
    ]
    yield Grid(("", "without the store", "with it", "from disk after kill -9"), rows)
    yield (
        f"with the store the first token takes {figures['ttft_ratio']:.2f} of the time (load"
        f" {figures['load_ms']:.1f} ms; {len(figures['samples_with_ms'])} times each, medians);"
        f" the demo took {figures['duration_s']:.0f} s"
    )
    yield from (f"FAILED: {problem}" for problem in figures["problems"])
