"""The server's CURVE keys: made once, kept from others, refused when they are not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.web.event_keys import SECRET_NAME, load_keys


def test_keys_are_made_at_the_first_start_and_found_at_the_next(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "keys"
    keys = load_keys(folder)
    assert len(keys.public) == len(keys.secret) == 40
    assert load_keys(folder) == keys
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / SECRET_NAME).stat().st_mode & 0o777 == 0o600
    assert [path.name for path in folder.iterdir()] == [SECRET_NAME]
    assert keys.secret.decode() not in repr(keys)


def test_servers_that_start_together_agree_on_one_key(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        keys = list(pool.map(load_keys, [tmp_path / "keys"] * 8))
    assert len(set(keys)) == 1


@pytest.mark.parametrize("name", ["", SECRET_NAME])
@pytest.mark.parametrize("mode", [0o740, 0o704, 0o777])
def test_a_key_that_others_could_read_is_refused(tmp_path: Path, name: str, mode: int) -> None:
    folder = tmp_path / "keys"
    load_keys(folder)
    (folder / name).chmod(mode)
    with pytest.raises(InvalidRequestError, match="others could read the key"):
        load_keys(folder)


@pytest.mark.parametrize("content", [b"", b"x" * 39, b"\xff" * 40, b"x" * 41, b"\0" * 40])
def test_a_file_that_holds_no_key_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "keys"
    load_keys(folder)
    (folder / SECRET_NAME).write_bytes(content)
    with pytest.raises(InvalidRequestError, match="delete it to have another made"):
        load_keys(folder)


def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InvalidRequestError, match=r"events_keys=.*name a folder"):
        load_keys(tmp_path / "file" / "keys")
