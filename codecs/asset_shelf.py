"""The assets that this process has, by the names that frames give them."""

from __future__ import annotations

import threading
from pathlib import Path

from kvstore.codecs.assets import SUFFIX, Asset, AssetKind, read_asset
from kvstore.proto.errors import InvalidRequestError, ModelError, UnknownCodecError

MAX_ASSETS = 256


class AssetShelf:
    """Assets by digest, and by kind and model. Any thread may call.

    The lock guards the two dictionaries; assets themselves never change.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_digest: dict[bytes, Asset] = {}
        self._newest: dict[tuple[AssetKind, bytes], Asset] = {}

    def add(self, asset: Asset) -> None:
        """Take *asset*; one that is there already is kept.

        Raises InvalidRequestError for another asset of the same edition, or one too many.
        """
        use = (asset.kind, asset.representation)
        with self._lock:
            if asset.digest in self._by_digest:
                return
            if len(self._by_digest) >= MAX_ASSETS:
                raise InvalidRequestError("assets", len(self._by_digest), f"at most {MAX_ASSETS}")
            newest = self._newest.get(use)
            if newest is not None and newest.edition == asset.edition:
                what = f"{asset.kind.name} edition {asset.edition}"
                raise InvalidRequestError("asset", what, "two of the same edition: remove one")
            self._by_digest[asset.digest] = asset
            if newest is None or newest.edition < asset.edition:
                self._newest[use] = asset

    def load_folder(self, folder: Path) -> int:
        """Add every asset in *folder*, files named ``*.kvasset``; return how many there are.

        Raises InvalidRequestError that names the file that is damaged or of a later version.
        """
        if not folder.is_dir():
            raise InvalidRequestError("assets", str(folder), "give a folder that exists")
        paths = sorted(folder.glob(f"*{SUFFIX}"))
        for path in paths:
            self.add(read_asset(path))
        return len(paths)

    def for_model(self, kind: AssetKind, representation: bytes) -> Asset:
        """Return what *kind* encodes the model of *representation* with.

        Raises UnknownCodecError when there is none: that codec does not exist for that model.
        """
        with self._lock:
            found = self._newest.get((kind, representation))
            others = sum(known is kind for known, _ in self._newest)
        if found is None:
            wanted = f"{kind.name} for model {representation.hex()}"
            known = f"assets of {others} other models, and kvstore calibrate makes one"
            raise UnknownCodecError(wanted, known)
        return found

    def any_named(self, kind: AssetKind, digest: bytes) -> Asset:
        """Return the asset of *digest*, whosever it is. Raises UnknownCodecError."""
        with self._lock:
            found = self._by_digest.get(digest)
            count = len(self._by_digest)
        if found is None or found.kind is not kind:
            raise UnknownCodecError(f"{kind.name} with asset {digest.hex()}", f"{count} others")
        return found

    def named(self, kind: AssetKind, digest: bytes, representation: bytes) -> Asset:
        """Return the asset that a frame names.

        Raises UnknownCodecError when it is not here or of another kind, ModelError
        when it belongs to another model than the frame.
        """
        found = self.any_named(kind, digest)
        if found.representation != representation:
            fix = f"the frame's model is {representation.hex()}"
            raise ModelError("asset.representation", found.representation.hex(), fix)
        return found


ASSETS = AssetShelf()
"""Those of this process; filled at start, from the folder that its configuration names."""
