"""File systems of a test's own: small ones in memory, and ones whose power can be cut."""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_EXT4_SHUTDOWN = 0x8004587D
"""EXT4_IOC_SHUTDOWN of Linux 4.10: the file system is off from here on."""
_WITHOUT_THE_JOURNAL = 2
"""EXT4_GOING_FLAGS_NOLOGFLUSH: nothing more reaches the medium, the journal included."""


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise OSError(f"{words[0]}: {done.stderr.strip() or done.returncode}")


@contextmanager
def small_memory_disk(folder: Path, size_bytes: int) -> Iterator[Path]:
    """Mount a file system in memory of *size_bytes* at *folder*; skip where nobody may."""
    folder.mkdir()
    try:
        _run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder))
    except OSError as error:
        pytest.skip(f"mounting needs root: {error}")
    try:
        yield folder
    finally:
        _run("umount", "--lazy", str(folder))


class PowerSwitch:
    """An ext4 file system in a file, on a loop device, whose power can be cut.

    A cut is the kernel's own: EXT4_IOC_SHUTDOWN without a flush of the journal. What was not
    synced is lost as with a real one, and the next mount replays the journal.
    """

    def __init__(self, folder: Path, size_bytes: int) -> None:
        if shutil.which("mkfs.ext4") is None:
            pytest.skip("a power cut needs mkfs.ext4: install Debian's e2fsprogs")
        self.path = folder / "mounted"
        self.path.mkdir()
        self._image = folder / "image"
        with self._image.open("wb") as image:
            image.truncate(size_bytes)
        _run("mkfs.ext4", "-q", "-F", str(self._image))
        self._is_mounted = False
        self.turn_on()

    def turn_on(self) -> None:
        """Mount what is there; skip the test where loop devices are missing."""
        try:
            _run("mount", "-o", "loop", str(self._image), str(self.path))
        except OSError as error:
            pytest.skip(f"a power cut needs root and loop devices: {error}")
        self._is_mounted = True

    def cut(self) -> None:
        """Cut the power: every call fails with EIO from now on."""
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(descriptor, _EXT4_SHUTDOWN, struct.pack("I", _WITHOUT_THE_JOURNAL))
        finally:
            os.close(descriptor)

    def turn_off(self) -> None:
        if self._is_mounted:
            _run("umount", str(self.path))
            self._is_mounted = False

    def close(self) -> None:
        if self._is_mounted:
            with suppress(OSError):
                _run("umount", "--lazy", str(self.path))
        self._image.unlink(missing_ok=True)
