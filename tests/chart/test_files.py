"""What of the chart needs no tools: its schema, its rules, its dashboard."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from chart.rendered import CHART, ROOT, run

from kvstore import __version__
from kvstore.server.telemetry.metrics import Counters
from kvstore.server.web.gauges import MetricsText


def gauge_names() -> set[str]:
    """Return the names of all levels, which are written out where they are made."""
    text = (ROOT / "server" / "web" / "gauges.py").read_text()
    return {f"kvstore_{name}" for name in re.findall(r'\(\s*"([a-z_]+)",\s*"', text)}


def expressions() -> Iterator[str]:
    """Yield every query of the alerts and the dashboard."""
    for group in yaml.safe_load((CHART / "rules.yaml").read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])
    dashboard: dict[str, Any] = json.loads((CHART / "dashboards" / "kvstore.json").read_text())
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    for variable in dashboard["templating"]["list"]:
        yield variable["query"]


def test_the_schema_is_that_of_the_values_and_the_settings() -> None:
    done = run(sys.executable, ROOT / "helm" / "make_schema.py", "--print")
    assert done.status == 0, done.err
    made = (CHART / "values.schema.json").read_text()
    assert made == done.out, "run python helm/make_schema.py"


def test_every_query_names_metrics_that_the_server_has() -> None:
    served = MetricsText(Counters(), list, ["cpu", "disk"]).text().decode()
    known = set(re.findall(r"^kvstore_\w+", served, re.M)) | gauge_names()
    named = {name for query in expressions() for name in re.findall(r"kvstore_\w+", query)}
    assert len(named) > 15
    assert named <= known, named - known


def test_the_dashboard_shows_what_the_built_in_page_does() -> None:
    named = " ".join(expressions())
    for word in (
        *("tier_used_bytes", "tier_found_chunks", "tenant_ready_chunks", "flow_bytes"),
        *("call_seconds_bucket", "what_if_hit_ratio", "tier_policy", "tier_up", "corrupt_chunks"),
    ):
        assert f"kvstore_{word}" in named


def test_prometheus_takes_the_alerts(tool: Callable[[str], Path]) -> None:
    done = run(tool("promtool"), "check", "rules", CHART / "rules.yaml")
    assert done.status == 0, done.out + done.err


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == __version__
