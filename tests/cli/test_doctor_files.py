"""What the doctor says of secrets that anybody may read, and of trust that anybody may change."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from kvstore.cli.doctor_checks import CHECKS
from kvstore.cli.doctor_files import BELIEVED, SECRET, check_files
from kvstore.cli.finding import Finding
from kvstore.server.settings.settings import ReadableFile, Settings


def findings(setting: str, path: Path, mode: int, **others: object) -> list[Finding]:
    path.write_bytes(b"x")
    path.chmod(mode)
    # What a file holds is looked at elsewhere: only its mode counts here.
    return list(check_files(Settings().model_copy(update={setting: path, **others})))


@pytest.mark.parametrize("setting", SECRET)
def test_a_secret_that_anybody_may_read_is_named_with_what_to_do(
    tmp_path: Path, setting: str
) -> None:
    path = tmp_path / "secret"
    (found,) = findings(setting, path, 0o644)
    assert (found.check, found.state) == (setting.replace("_", " "), "warn")
    assert found.saw == f"anybody here may read {path}"
    assert found.fix == f"chmod o-rwx {path}"
    assert findings(setting, path, 0o640) == []


@pytest.mark.parametrize("setting", BELIEVED)
def test_whom_the_server_believes_may_be_read_by_anybody_and_changed_by_nobody(
    tmp_path: Path, setting: str
) -> None:
    path = tmp_path / "believed"
    assert findings(setting, path, 0o644) == []
    (found,) = findings(setting, path, 0o646)
    assert found.saw == f"anybody here may change {path}"


def test_the_secret_that_tokens_are_signed_with_is_no_public_key(tmp_path: Path) -> None:
    (found,) = findings("jwt_key", tmp_path / "key", 0o646, jwt_algorithm="HS256")
    assert "read and change" in found.saw


def test_every_setting_that_names_a_file_of_trust_is_looked_at() -> None:
    is_readable = get_args(ReadableFile)[1]
    public = {"tls_cert", "tls_crl", "redis_tls_cert"}  # shown to whoever connects, or signed
    kinds = {name: get_args(field.annotation) for name, field in Settings.model_fields.items()}
    named = {
        name
        for name, parts in kinds.items()
        if any(is_readable in getattr(part, "__metadata__", ()) for part in parts)
    }
    assert {*SECRET, *BELIEVED} == named - public


def test_the_doctor_looks_at_the_files() -> None:
    assert check_files in CHECKS
