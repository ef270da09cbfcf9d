"""The chart as helm renders it, and where its tools are."""

from __future__ import annotations

import copy
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "kvstore"
TOOLS = ROOT / "build" / "chart"
VALUES = sorted((CHART / "ci").glob("*-values.yaml"))
MONITORING = "monitoring.coreos.com/v1"
HELMS = ("helm3", "helm4")

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Ran:
    """What one command did."""

    status: int
    out: str
    err: str


def run(*argv: object) -> Ran:
    done = subprocess.run(
        [str(word) for word in argv], capture_output=True, text=True, timeout=240, check=False
    )
    return Ran(done.returncode, done.stdout, done.stderr)


@lru_cache(maxsize=256)
def _template(helm: Path, argv: tuple[str, ...]) -> Ran:
    return run(helm, "template", "x", CHART, "--namespace", "kv", *argv)


@lru_cache(maxsize=256)
def _parsed(text: str) -> list[Manifest]:
    return [one for one in yaml.safe_load_all(text) if one]


@dataclass(frozen=True)
class Helm:
    """One helm binary, and the chart."""

    path: Path

    def render(self, *argv: object) -> list[Manifest]:
        """Return what ``helm template`` makes, which must succeed."""
        done = self.template(*argv)
        assert done.status == 0, done.err
        return copy.deepcopy(_parsed(done.out))

    def template(self, *argv: object) -> Ran:
        """Run ``helm template``, or return what the same command did before."""
        return _template(self.path, tuple(map(str, argv)))

    def of_values(self, values: Path, *argv: object) -> list[Manifest]:
        return self.render("-f", values, "--api-versions", MONITORING, *argv)


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [one for one in manifests if one["kind"] == kind]


def only(manifests: list[Manifest], *kinds: str) -> Manifest:
    (one,) = [one for one in manifests if one["kind"] in kinds]
    return one


def workload(manifests: list[Manifest]) -> Manifest:
    """Return the server's DaemonSet or StatefulSet."""
    found = [
        one
        for one in manifests
        if one["kind"] in ("DaemonSet", "StatefulSet")
        and one["metadata"]["labels"].get("app.kubernetes.io/component") == "server"
    ]
    (one,) = found
    return one


def container(manifests: list[Manifest]) -> Manifest:
    (one,) = workload(manifests)["spec"]["template"]["spec"]["containers"]
    return dict(one)


def settings(manifests: list[Manifest]) -> dict[str, Any]:
    """Return the server's settings, as its ConfigMap has them."""
    maps = [one for one in of_kind(manifests, "ConfigMap") if "kvstore.yaml" in one["data"]]
    loaded = yaml.safe_load(maps[0]["data"]["kvstore.yaml"])
    assert isinstance(loaded, dict)
    return loaded
