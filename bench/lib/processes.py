"""Installs and runs peers, the compared systems: a virtual environment each, ended by pid.

A peer that cannot be installed or started raises PeerSkippedError, whose text is one line.
"""

from __future__ import annotations

import ctypes
import json
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any

from bench.lib import ROOT

PINS = Path(__file__).parents[1] / "peers" / "pins"
INSTALL_TIMEOUT_S, START_TIMEOUT_S, ANSWER_TIMEOUT_S, GRACE_S = 1200, 60, 120, 10.0
Command = Sequence[str | Path]


class PeerSkippedError(Exception):
    """A peer is skipped, for the reason in the text."""


def last_line(text: str) -> str:
    """Return the last line that is not blank, as a reason."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"


def last_log_line(log: Path) -> str:
    return last_line(log.read_text(errors="replace"))


def make_venv(venvs: Path, name: str, with_requirements: Sequence[str] = ()) -> Path:
    """Return the interpreter of the peer's virtual environment, made unless its pins are installed.

    ``peers/pins/NAME.txt`` pins each package, installed without dependencies: LMCache's include
    gigabytes of CUDA. *with_requirements* are installed first, with dependencies.
    """
    folder, pins = venvs / name, PINS / f"{name}.txt"
    wanted = pins.read_text() + "\n".join(with_requirements)
    stamp, python = folder / "installed.txt", folder / "bin" / "python"
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    print(f"installing {name} into {folder}", file=sys.stderr)
    run([sys.executable, "-m", "venv", "--clear", folder], INSTALL_TIMEOUT_S)
    pip: Command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    if with_requirements:
        run([*pip, *with_requirements], INSTALL_TIMEOUT_S)
    run([*pip, "--no-deps", "-r", pins], INSTALL_TIMEOUT_S)
    stamp.write_text(wanted)
    return python


def shared_libraries(venvs: Path, packages: Mapping[str, str]) -> str:
    """Return where *packages* (library to Debian package) were unpacked; empty if installed.

    Needs no root: the packages are downloaded and unpacked below *venvs*, for the peer only.
    """
    with suppress(OSError):
        for library in packages:
            ctypes.CDLL(library)
        return ""
    folder = venvs / "libraries"
    places = [folder / part / f"{platform.machine()}-linux-gnu" for part in ("usr/lib", "lib")]
    names = sorted(packages.values())
    if not all(any((place / library).exists() for place in places) for library in packages):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            run(["apt-get", "download", *names], INSTALL_TIMEOUT_S, cwd=folder)
            for package in folder.glob("*.deb"):
                run(["dpkg", "-x", package, folder], INSTALL_TIMEOUT_S)
        except PeerSkippedError as error:
            raise PeerSkippedError(f"install {' '.join(names)}: {error}") from None
    return ":".join(map(str, places))


def run(command: Command, timeout_s: float, cwd: Path | None = None) -> str:
    """Run *command* to its end and return its output. Raises PeerSkippedError."""
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerSkippedError(f"{Path(command[0]).name}: {error}") from None
    if done.returncode:
        raise PeerSkippedError(f"{Path(command[0]).name}: {last_line(done.stderr or done.stdout)}")
    return done.stdout


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def child(*command: str | Path) -> Iterator[tuple[int, str]]:
    """Run a program in the checkout until the block ends; yield its pid and first output line."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        try:
            yield process.pid, process.stdout.readline()
        finally:
            end(process)


@contextmanager
def serving_peer(command: Command, ports: Sequence[int], log: Path) -> Iterator[None]:
    """Run a server until the block ends; enter once it accepts on all *ports*."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        for port in ports:
            _await_port(process, port, log)
        yield
    finally:
        end(process)


def _await_port(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise PeerSkippedError(f"did not start: {last_log_line(log)}")
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise PeerSkippedError(f"did not listen within {START_TIMEOUT_S} s")


def end(process: subprocess.Popen[Any], grace_s: float = GRACE_S) -> None:
    """End *process*, by its pid; return once it is gone."""
    process.terminate()
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@dataclass(frozen=True, slots=True)
class LineProcess:
    """A program that answers each line on its input with a line of JSON."""

    process: subprocess.Popen[bytes]
    log: Path

    def send(self, line: str) -> None:
        """Send *line*. Raises PeerSkippedError when the program has ended."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise PeerSkippedError(f"its client exited: {last_log_line(self.log)}") from None

    def answer(self) -> dict[str, float]:
        """Return its next line of JSON, skipping other output.

        A program without one for ANSWER_TIMEOUT_S is killed. Raises PeerSkippedError.
        """
        assert self.process.stdout is not None
        watch = Timer(ANSWER_TIMEOUT_S, self.process.kill)
        watch.start()
        try:
            for line in self.process.stdout:
                if line.startswith(b"{"):
                    found: dict[str, float] = json.loads(line)
                    return found
        finally:
            watch.cancel()
        raise PeerSkippedError(f"its client exited: {last_log_line(self.log)}")

    def request(self, line: str) -> dict[str, float]:
        self.send(line)
        return self.answer()


@contextmanager
def line_process(command: Command, log: Path) -> Iterator[LineProcess]:
    """Run a program that answers; its first answer means that it is ready.

    At the end of its input it cleans up and exits: LMCache's would else leave its shared memory
    behind.
    """
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        ) as process,
    ):
        try:
            program = LineProcess(process, log)
            program.answer()
            yield program
        finally:
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            end(process)
