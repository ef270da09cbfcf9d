"""What the tests of one codec must not leave to those of another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from golden.samples import FOLDER

from kvstore.codecs.assets import ASSETS, read_asset


@pytest.fixture(autouse=True, scope="module")
def assets_of_its_own() -> Iterator[None]:
    """Give each file the process's registry empty."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ASSETS, "_by_digest", {})
        patch.setattr(ASSETS, "_newest", {})
        yield


@pytest.fixture(scope="module")
def golden_assets(assets_of_its_own: None) -> None:
    """Those that the golden frames name, on that registry."""
    for path in FOLDER.glob("*.kvasset"):
        ASSETS.add(read_asset(path))
