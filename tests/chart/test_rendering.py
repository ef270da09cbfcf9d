"""What either helm makes of the chart with every set of values; its schema and its rules."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from chart.rendered import (
    CHART,
    MONITORING,
    ROOT,
    VALUES,
    Helm,
    Manifest,
    container,
    of_kind,
    only,
    run,
    settings,
    workload,
)

from kvstore import __version__
from kvstore.server.settings.values import parse_size
from kvstore.server.telemetry.metrics import Counters
from kvstore.server.web.gauges import MetricsText

CERTIFICATES = "cert-manager.io/v1"
PLAIN = ("--set", "insecure=true")
MI = 1 << 20


def each_set(values: Path) -> str:
    return values.name.removesuffix("-values.yaml")


every_set = pytest.mark.parametrize("values", VALUES, ids=each_set)


def memory_bytes(text: str) -> int:
    assert text.endswith("Mi")
    return int(text.removesuffix("Mi")) * MI


@every_set
def test_lint_finds_nothing(helm: Helm, values: Path) -> None:
    done = run(helm.path, "lint", "--strict", "--quiet", CHART, "-f", values)
    assert done.status == 0, done.out + done.err


@every_set
def test_all_is_named_labelled_and_in_the_namespace(helm: Helm, values: Path) -> None:
    manifests = helm.of_values(values)
    names = [(one["kind"], one["metadata"]["name"]) for one in manifests]
    assert len(set(names)) == len(names)
    for one in manifests:
        meta = one["metadata"]
        assert meta["namespace"] == "kv"
        assert len(meta["name"]) <= 63
        assert meta["labels"]["app.kubernetes.io/instance"] == "x"


@pytest.mark.parametrize("version", ["1.25", "1.28", "1.31", "1.34"])
def test_kubernetes_takes_it(
    helm4: Helm, version: str, tmp_path: Path, tool: Callable[[str], Path]
) -> None:
    paths = []
    for values in VALUES:
        paths.append(tmp_path / values.name)
        paths[-1].write_text(yaml.safe_dump_all(_known(helm4.of_values(values))))
    done = run(tool("venv/bin/kubernetes-validate"), "--strict", "-k", version, *paths)
    assert done.status == 0, done.out + done.err


def _known(manifests: list[Manifest]) -> list[Manifest]:
    """Return those that the validator has schemas of: not other projects' kinds."""
    return [one for one in manifests if one["apiVersion"] not in (MONITORING, CERTIFICATES)]


def test_what_is_rendered_is_tidy_yaml(
    helm4: Helm, tmp_path: Path, tool: Callable[[str], Path]
) -> None:
    rules = (
        "{extends: relaxed, rules: {line-length: disable, key-duplicates: enable,"
        " indentation: {indent-sequences: whatever}}}"  # toYaml has its own way
    )
    for values in VALUES:
        text = helm4.template("-f", values, "--api-versions", MONITORING).out
        (tmp_path / values.name).write_text(text)
    done = run(tool("venv/bin/yamllint"), "-s", "-d", rules, tmp_path)
    assert done.status == 0, done.out


def test_nobody_gets_an_open_server_by_default(helm: Helm) -> None:
    done = helm.template()
    assert done.status != 0
    assert "tls.existingSecret" in done.err
    done = helm.template("--set", "tls.existingSecret=a")
    assert done.status != 0
    assert "auth.existingSecret" in done.err


REFUSED = [
    ("tiers.redis.enabled=true", "redis.existingSecret.name"),
    ("tiers.redis.enabled=true,redis.mode=bundled", "redis.bundled"),
    ("tiers.disk.kind=claim", "tiers.disk.kind"),
    ("mode=statefulset,hostSocket.enabled=true", "hostSocket.enabled"),
    ("tls.certManager.enabled=true", "issuerRef.name"),
    ("tls.crl.existingSecret.name=a", "tls.clientCA"),
    ("tls.existingSecret=,insecure=true,metrics.tls=true", "metrics.tls"),
    ("resources.headroom=128MiB", "resources.headroom"),
    ("config.node_id=one", "config.node_id"),
    ("config.advertise=kv", "config.advertise"),
    ("config.directory=true", "config.directory"),
    ("config.peers=directory", "bulk.enabled"),
    ("config.bulk=0.0.0.0:7500", "ports.bulk"),
    ("config.peers=a:1,auth.existingSecret.name=k", "peers.existingSecret.name"),
    ("config.peers=a:1,tls.existingSecret=t,tls.hasCA=false", "tls.hasCA"),
    ("peers.existingSecret.name=p", "config.peers"),
    ("tiers.redis.enabled=true,redis.existingSecret.name=r,redis.auth.username=u",
     "redis.auth.existingSecret.name"),
    *((wrong, wrong.partition("=")[0].rpartition(".")[2]) for wrong in (
        "mode=deployment", "tiers.cpu.size=8Gigs", "tiers.cpu.sice=8GiB", "replicas=0",
        "ports.grpc=80", "config.disk_wirte=through", "config.workers=0", "config.log_level=loud",
        "terminationGracePeriodSeconds=3", "image.digest=latest", "hostSocket.path=run",
    )),
]  # fmt: skip


def test_what_could_not_start_or_breaks_the_schema_is_refused_by_name(helm: Helm) -> None:
    for given, named in REFUSED:
        done = helm.template(*PLAIN, "--set", given)
        assert done.status != 0, given
        assert named in done.err


def test_the_configuration_is_one_that_the_server_takes(helm4: Helm) -> None:
    """Names and values; the files that it names are not here."""
    from kvstore.server.settings.settings import Settings

    for values in VALUES:
        given = settings(helm4.of_values(values))
        assert set(given) <= set(Settings.model_fields)
        assert (given["listen"], given["health"]) == ("0.0.0.0:7420", "0.0.0.0:7422")


def test_memory_is_computed_from_the_cpu_tier(helm: Helm) -> None:
    for size in ("64GiB", "512MiB", "10GB"):
        rendered = helm.render(*PLAIN, "--set", f"tiers.cpu.size={size}")
        asked = container(rendered)["resources"]
        assert asked["requests"]["memory"] == asked["limits"]["memory"]
        size_bytes = parse_size(size)
        needed_bytes = size_bytes + size_bytes // 20 + (1 << 30)
        assert 0 <= memory_bytes(asked["limits"]["memory"]) - needed_bytes < MI
        assert settings(rendered)["cpu_size"] == size


def test_no_secret_is_in_a_config_map_or_a_flag(helm4: Helm) -> None:
    values = CHART / "ci" / "bundled-redis-values.yaml"
    rendered = helm4.of_values(values)
    shown = settings(rendered)
    assert shown["redis_url"] == "redis://x-kvstore-redis:6379/0"
    assert shown["redis_password_file"] == "/etc/kvstore/redis-auth/password"
    env = container(rendered)["env"]
    assert {one["name"] for one in env} == {"KVSTORE_NODE_ID", "KVSTORE_ADVERTISE"}
    for one in of_kind(rendered, "StatefulSet"):
        spec = one["spec"]["template"]["spec"]
        (volume,) = [one for one in spec["volumes"] if one["name"] == "redis-auth"]
        assert volume["secret"]["secretName"] == "redis-password"
        (mount,) = [m for m in spec["containers"][0]["volumeMounts"] if m["name"] == "redis-auth"]
        assert mount["readOnly"]
    assert container(rendered)["args"] == ["--config", "/etc/kvstore/config/kvstore.yaml"]
    rendered = helm4.of_values(values, "--set", "redis.directory=false")
    assert "env" not in container(rendered)


RESTRICTED = ["daemonset", "statefulset", "insecure", "mtls", "jwt", "bundled-redis", "monitoring"]


@pytest.mark.parametrize("name", RESTRICTED)
def test_pods_are_what_pod_security_calls_restricted(helm4: Helm, name: str) -> None:
    rendered = helm4.of_values(CHART / "ci" / f"{name}-values.yaml")
    templates = [
        one["spec"]["template"]["spec"] for one in rendered if "template" in one.get("spec", {})
    ]
    for spec in [*templates, *(one["spec"] for one in of_kind(rendered, "Pod"))]:
        assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & set(spec)
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault"
        assert not any("hostPath" in volume for volume in spec["volumes"])
        for one in spec["containers"]:
            assert one["securityContext"]["allowPrivilegeEscalation"] is False
            assert one["securityContext"]["readOnlyRootFilesystem"] is True
            assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_monitoring_comes_where_its_kinds_are(helm4: Helm) -> None:
    values = CHART / "ci" / "monitoring-values.yaml"
    there = {one["kind"] for one in helm4.of_values(values)}
    absent = {one["kind"] for one in helm4.render("-f", values)}
    assert there - absent == {"ServiceMonitor", "PrometheusRule"}
    monitor = only(helm4.of_values(values), "ServiceMonitor")["spec"]
    services = [
        one
        for one in of_kind(helm4.of_values(values), "Service")
        if monitor["selector"]["matchLabels"].items() <= one["metadata"]["labels"].items()
    ]
    (one,) = services  # not two, or everything would be counted twice
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] in {port["name"] for port in one["spec"]["ports"]}
    assert settings(helm4.of_values(values))["http_tls"] is True
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"] == {
        "serverName": "kv.kv.svc",
        "ca": {"secret": {"name": "kvstore-tls", "key": "ca.crt"}},
    }


def test_a_network_policy_lets_in_who_has_the_label(helm4: Helm) -> None:
    rendered = helm4.of_values(CHART / "ci" / "daemonset-values.yaml")
    policy = only(rendered, "NetworkPolicy")["spec"]
    rule, scrapes = policy["ingress"]
    assert scrapes["from"] == [
        {
            "namespaceSelector": {},
            "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}},
        }
    ]
    assert [port["port"] for port in scrapes["ports"]] == ["http"]
    assert rule["from"] == [{"podSelector": {"matchLabels": {"kvstore.io/client": "true"}}}]
    assert {port["port"] for port in rule["ports"]} == {"grpc"}
    assert policy["podSelector"]["matchLabels"].items() <= (
        workload(rendered)["spec"]["template"]["metadata"]["labels"].items()
    )


def test_pods_that_read_each_other_reach_every_port_of_that(helm4: Helm) -> None:
    rendered = helm4.of_values(CHART / "ci" / "peers-values.yaml", "--set", "ports.bulk=7500")
    ports = {port["name"]: port["containerPort"] for port in container(rendered)["ports"]}
    told = settings(rendered)
    assert (ports["bulk"], told["bulk"]) == (7500, "0.0.0.0:7500")
    policy = only(rendered, "NetworkPolicy")["spec"]
    pods = [{"podSelector": policy["podSelector"]}]
    (into,) = [rule for rule in policy["ingress"] if rule["from"] == pods]
    assert {port["port"] for port in into["ports"]} == {"grpc", "bulk"}
    (out,) = [rule for rule in policy["egress"] if rule.get("to") == pods]
    wanted = {ports[name] for name in ("grpc", "bulk")}
    assert {port["port"] for port in out["ports"]} == wanted
    clients = [{"podSelector": {"matchLabels": {"kvstore.io/client": "true"}}}]
    others = [rule for rule in policy["ingress"] if rule is not into]
    (engines,) = [rule for rule in others if rule["from"] == clients]
    assert {port["port"] for port in engines["ports"]} == {"grpc", "bulk"}
    others.remove(engines)
    assert "bulk" not in {port["port"] for rule in others for port in rule["ports"]}
    (by_pod,) = [one for one in of_kind(rendered, "Service") if one["spec"].get("clusterIP")]
    assert "bulk" in {port["targetPort"] for port in by_pod["spec"]["ports"]}


def test_what_engines_are_told_is_what_connectors_take(helm4: Helm) -> None:
    from kvstore.client.engines.vllm.messages import VllmSettings
    from kvstore.client.options import Access

    rendered = helm4.of_values(CHART / "ci" / "daemonset-values.yaml")
    (told,) = [one["data"] for one in of_kind(rendered, "ConfigMap") if "vllm.json" in one["data"]]
    vllm = json.loads(told["vllm.json"])
    made = VllmSettings.of(vllm["kv_connector_extra_config"])
    assert made.address == told["address"] == "x-kvstore.kv.svc:7420"
    assert vllm["kv_load_failure_policy"] == "recompute"
    client = json.loads(told["client.json"])
    assert client.pop("address") == told["address"]
    named: dict[str, Any] = {name: Path(path) for name, path in client.items()}
    assert Access(**named).tls


def test_checkov_finds_nothing_but_what_is_accounted_for(
    helm4: Helm, tmp_path: Path, tool: Callable[[str], Path]
) -> None:
    """The reasons are in checkov.yaml; a check that fails nowhere has to leave it."""
    for values in VALUES:
        text = helm4.template("-f", values, "--api-versions", MONITORING).out
        (tmp_path / values.name).write_text(text)
    allowed = yaml.safe_load((Path(__file__).parent / "checkov.yaml").read_text())
    argv = ("--framework", "kubernetes", "-d", tmp_path, "--compact", "-o", "json", "--soft-fail")
    done = run(tool("venv/bin/checkov"), *argv)
    report = json.loads(done.out)
    assert report["summary"]["passed"] > 100
    found: dict[str, set[str]] = {}
    for one in report["results"]["failed_checks"]:
        name = Path(one["file_path"]).name.removesuffix("-values.yaml")
        kind = one["resource"].partition(".")[0]
        found.setdefault(one["check_id"], set()).add(f"{name}/{kind}")
    expected = {check: set(entry["where"]) for check, entry in allowed.items()}
    for check, where in found.items():
        assert where <= expected.get(check, set()) or expected.get(check) == {"all"}, (check, where)
    assert set(found) == set(expected)


def test_the_image_runs_as_the_user_that_the_chart_names() -> None:
    text = (CHART.parents[1] / "Dockerfile").read_text()
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert re.search(rf"^USER {values['user']['id']}:{values['user']['group']}$", text, re.M)


def test_engines_mount_the_socket_s_folder_read_only_and_without_it_there_is_no_socket(
    helm: Helm,
) -> None:
    def lines_of(manifests: list[Manifest]) -> dict[str, str]:
        maps = of_kind(manifests, "ConfigMap")
        (one,) = [one["data"] for one in maps if one["metadata"]["name"].endswith("-connection")]
        return dict(one)

    shared = helm.render("-f", CHART / "ci" / "shared-memory-values.yaml")
    assert settings(shared)["socket_path"] == "/run/kvstore/kvstore.sock"
    lines = yaml.safe_load(lines_of(shared)["socket.yaml"])
    (mount,) = lines["containers"][0]["volumeMounts"]
    assert (mount["mountPath"], mount["readOnly"]) == ("/run/kvstore", True)
    alone = helm.render(*PLAIN)
    assert settings(alone)["socket_path"] == "off"
    assert "socket.yaml" not in lines_of(alone)
    for manifests, is_mounted in ((shared, True), (alone, False)):
        spec = workload(manifests)["spec"]["template"]["spec"]
        assert ("run" in [one["name"] for one in spec["volumes"]]) is is_mounted
        mounts = [one["name"] for one in container(manifests)["volumeMounts"]]
        assert ("run" in mounts) is is_mounted


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
