"""Writes kvstore/values.schema.json from values.yaml and the server's own settings.

Run it after a change of either: ``.venv/bin/python helm/make_schema.py``; ``--print`` only prints.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from kvstore.server.settings.loading import settings_schema
from kvstore.server.settings.settings import Settings

CHART = Path(__file__).parent / "kvstore"
_SIZE = {"type": "string", "pattern": "^[0-9]{1,15} *([KkMmGgTt][Ii]?[Bb]|[Bb])$"}
_PORT = {"type": "integer", "minimum": 1024, "maximum": 65535}
_OPEN = {"type": "object"}
"""What Kubernetes defines, and this chart only passes on."""
_COUNT = {"type": "integer", "minimum": 0}

SPECIAL: dict[str, dict[str, Any]] = {
    "mode": {"enum": ["daemonset", "statefulset"]},
    "replicas": {"type": "integer", "minimum": 1},
    "image.digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "image.pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "tiers.disk.kind": {"enum": ["emptyDir", "ephemeral", "claim", "hostPath"]},
    "tiers.disk.hostPath": {"type": "string", "pattern": "^/."},
    "hostSocket.path": {"type": "string", "pattern": "^/."},
    "tiers.gpu.device": {"type": "integer", "minimum": 0, "maximum": 63},
    "redis.mode": {"enum": ["external", "bundled"]},
    "redis.prefix": {"type": "string", "pattern": "^[A-Za-z0-9:_.-]{1,64}$"},
    "redis.bundled.memory": {"type": "string", "pattern": "^[0-9]+[KMGT]i$"},
    "tls.certManager.issuerRef.kind": {"enum": ["Issuer", "ClusterIssuer"]},
    "auth.jwt.algorithm": {"enum": ["EdDSA", "ES256", "RS256", "HS256"]},
    "resources.headroom": _SIZE,
    "resources.cpu": {"type": "string", "pattern": "^[0-9]+(\\.[0-9]+|m)?$"},
    "podDisruptionBudget.maxUnavailable": {"type": ["integer", "string"]},
    "endpointsDelaySeconds": _COUNT,
    "terminationGracePeriodSeconds": {"type": "integer", "minimum": 25},
    "imagePullSecrets": {"type": "array", "items": _OPEN},
    "tolerations": {"type": "array", "items": _OPEN},
    "networkPolicy.from": {"type": "array", "items": _OPEN},
    "networkPolicy.metricsFrom": {"type": "array", "items": _OPEN},
    "networkPolicy.egress": {"type": "array", "items": _OPEN},
    "affinity": _OPEN,
}
_MAPS = ("labels", "annotations", "nodeSelector", "clientLabels")


def values_schema() -> dict[str, Any]:
    """Return the schema: every value has the kind of its default, and no other name is taken."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    settings = settings_schema(Settings)
    head = {"$schema": settings.pop("$schema"), "title": "Values of the chart kvstore"}
    schema = head | _of(values, "")
    schema["properties"]["config"] = settings
    schema["properties"]["global"] = _OPEN  # helm gives it to every chart
    return schema


def _of(value: Any, path: str) -> dict[str, Any]:
    name = path.rpartition(".")[2]
    if path in SPECIAL:
        return SPECIAL[path]
    if name.lower().endswith(_MAPS) or name in _MAPS:
        return {"type": "object", "additionalProperties": {"type": "string"}}
    if name == "size":
        return _SIZE
    if path.startswith("ports."):
        return _PORT
    if isinstance(value, dict):
        properties = {key: _of(one, f"{path}.{key}".strip(".")) for key, one in value.items()}
        return {"type": "object", "additionalProperties": False, "properties": properties}
    return {"type": {bool: "boolean", int: "integer", str: "string"}[type(value)]}


def as_text(schema: dict[str, Any]) -> str:
    """Return the file's text."""
    return json.dumps(schema, indent=2) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        print(as_text(values_schema()), end="")
    else:
        (CHART / "values.schema.json").write_text(as_text(values_schema()))
