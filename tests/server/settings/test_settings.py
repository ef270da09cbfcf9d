"""The server's configuration: where values come from, what is derived and what is shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from helpers.settings import refused, write
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvstore.server.eviction.quotas import MAX_PARTITIONS
from kvstore.server.settings.loading import load, show
from kvstore.server.settings.rules import MAX_QUOTAS
from kvstore.server.settings.settings import Settings, load_config
from kvstore.server.settings.values import (
    GIB,
    KIB,
    MIB,
    Limits,
    format_size,
    is_loopback,
    parse_endpoint,
    parse_size,
    text_by_tier,
)


def test_sizes_are_read_as_written_and_what_is_none_is_refused() -> None:
    for text, size_bytes in [
        ("8GiB", 8 * GIB),
        ("512MiB", 512 * MIB),
        ("1GB", 10**9),
        ("1048576", MIB),
        (" 64 kib ", 64 * KIB),
        ("7b", 7),
        ("8G", 8 * 10**9),
        ("8Gi", 8 * GIB),
        ("64k", 64_000),
        (5, 5),
    ]:
        assert parse_size(text) == size_bytes

    for value in ["", "GiB", "1 G B", "8Gx", "1e9", "0x10", "٣MiB", True, 1.5, None]:
        with pytest.raises(ValueError, match="8GiB, 512MiB, 1GB or 1048576"):
            parse_size(value)


@given(st.integers(0, 1 << 50))
def test_a_formatted_size_reads_back(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes


@given(st.text(max_size=20))
def test_an_endpoint_is_split_or_refused_never_garbled(text: str) -> None:
    try:
        host, port = parse_endpoint(text)
    except ValueError:
        return
    assert 0 <= port <= 65535
    shown = f"[{host}]" if ":" in host else host
    assert text.rpartition(":")[0] in (shown, f"[{host}]")


def test_addresses_of_this_machine_are_loopback_and_no_others() -> None:
    for host in ["127.0.0.1", "127.9.9.9", "::1", "localhost"]:
        assert is_loopback(host)
    for host in ["0.0.0.0", "::", "10.0.0.1", "localhost.example", "node7"]:
        assert not is_loopback(host)


def test_a_flag_wins_over_the_environment_which_wins_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "c.yaml", "workers: 3\nmax_sessions: 3\nlimits: {mover_queue: 3}\n")
    monkeypatch.setenv("KVSTORE_WORKERS", "2")
    monkeypatch.setenv("KVSTORE_MAX_SESSIONS", "2")
    config, origins = load(Settings, ["--config", path, "--workers", "1"])
    assert (config.workers, config.max_sessions, config.limits.mover_queue) == (1, 2, 3)
    assert config.limits.breaker_failures == 3
    assert origins == {
        "workers": "--workers",
        "max_sessions": "KVSTORE_MAX_SESSIONS",
        "limits": path,
    }


TOGETHER = {"tls_cert", "tls_key", "tls_client_ca", "tls_crl", "jwt_key", "jwt_audience",
            "redis_tls_cert", "redis_tls_key"}  # fmt: skip
"""Settings that make no sense alone."""


def test_every_setting_has_the_same_name_as_flag_variable_and_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(f"{'=' * 16}\n" for _ in range(4))
    values = {
        "tiers": "cpu", "disk": f"5GiB:{tmp_path}/elsewhere", "redis_url": "redis://h:1/0",
        "insecure": "true", "listen": "localhost:1", "http": "127.0.0.1:0", "socket_path": "off",
        "secret_file": write(tmp_path / "secret", text), "write": "evict,redis=auto",
        "write_budget": "disk=1GiB", "codec": "disk=auto",
        "limits": "mover_queue=7,peer_bytes=64MiB",
        "log_format": "json", "log_level": "debug",
        "gpu": "9GiB:1",
        "disk_direct": "true", "bulk": "127.0.0.1:7421", "events_keys": f"{tmp_path}/keys",
        "tenant_codecs": "acme/redis=raw",
        "assets": str(tmp_path), "policy": "lru,disk=marconi", "tenant_quotas": "acme=1GiB:1MiB",
        "category_terms": "batch=10min:1GiB", "disk_copies": "exclusive",
        "blend_agreement": "0.9", "blend_divergence": "0.1",
        "state_admission": "judicious",
        "auth_keys": write(tmp_path / "api-keys", ""),
        "jwt_algorithm": "RS256", "jwt_issuer": "https://issuer",
        "open_pages": "true", "http_tls": "true",
        "shared_pools": "library=*:curator", "tenant_limits": "acme=5:6:7,*=0:8:0",
        "audit_log": f"{tmp_path}/audit", "audit_reads": "true", "health": "127.0.0.1:0",
        "encryption_keys": write(tmp_path / "keys.json", ""), "scrub_tiers": "disk,cpu",
        "events": "127.0.0.1:7422", "events_replay": f"ipc:{tmp_path}/replay",
        "events_readers": write(tmp_path / "readers", ""),
        "tracing_endpoint": "http://127.0.0.1:4317", "tracing_share": "0.5",
        "peers": "127.0.0.1:7420,directory", "peer_key": write(tmp_path / "peer-key", "kvs_"),
        "peer_ca": write(tmp_path / "peer-ca", "..."),
        "peer_name": "kv.svc",
        "directory": "true", "node_id": "node-a",
        "advertise": "a.example", "redis_prefix": "team:a", "redis_username": "me",
        "redis_password_file": write(tmp_path / "password", "secret\n"),
        "redis_tls_ca": write(tmp_path / "ca.pem", "..."),
    }  # fmt: skip
    for name in sorted(set(Settings.model_fields) - TOGETHER):
        with monkeypatch.context() as patch:
            value = values.get(
                name, "8MiB" if "SIZE" in Settings.model_fields[name].metadata else "77"
            )
            flag = "--" + name.replace("_", "-")
            if name in ("directory", "peers"):
                patch.setenv("KVSTORE_REDIS_URL", "redis://h:1/0")
            if name == "peers":
                patch.setenv("KVSTORE_DIRECTORY", "true")
            if name == "http_tls":
                for other in ("CERT", "KEY"):
                    patch.setenv(f"KVSTORE_TLS_{other}", write(tmp_path / "tls.pem", "..."))
            from_flag = load_config([flag] if value == "true" else [flag, value])
            assert getattr(from_flag, name) != getattr(load_config([]), name)
            path = write(tmp_path / "c.yaml", f"{name}: {value}\n")
            assert getattr(load_config(["--config", path]), name) == getattr(from_flag, name)
            patch.setenv(f"KVSTORE_{name.upper()}", value)
            assert load_config([]) == from_flag


def test_what_kubernetes_injects_and_the_command_line_reads_is_not_a_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = load_config([])
    for name in (
        "KVSTORE_PORT",
        "KVSTORE_SERVICE_HOST",
        "KVSTORE_SERVICE_PORT_GRPC",
        "KVSTORE_PORT_7420_TCP_ADDR",
        "KVSTORE_NODE_SERVICE_PORT",
        "KVSTORE_NODE_PORT_7420_TCP",
        *("KVSTORE_ADDRESS", "KVSTORE_TOKEN_FILE", "KVSTORE_CA"),  # of the command line
    ):
        monkeypatch.setenv(name, "tcp://10.0.0.1:7420")
    assert load_config([]) == expected


def test_the_short_names_of_flags_are_names_in_the_file_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for short, name, value in [
        ("cpu", "cpu_size", "64MiB"),
        ("redis", "redis_url", "redis://host:1/0"),
        ("socket", "socket_path", "/run/s.sock"),
    ]:
        path = write(tmp_path / "c.yaml", f"{short}: {value}\n")
        flag = getattr(load_config([f"--{short}", value]), name)
        assert getattr(load_config(["--config", path]), name) == flag
        both = write(tmp_path / "e.yaml", f"{name}: {value}\n{short}: {value}\n")
        message = refused("--config", both)
        assert f"is {name} too; give one of the two" in message
        assert "redis://" not in message
        monkeypatch.setenv(f"KVSTORE_{short.upper()}", value)
        wrong = write(tmp_path / "d.yaml", f"{name}: nonsense\n")
        config, origins = load(Settings, ["--config", wrong])
        assert getattr(config, name) == flag
        assert origins[name] == f"KVSTORE_{short.upper()}"


def test_a_built_config_is_checked_and_cannot_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_WORKERS", "7")
    config = Settings(tiers=("disk", "cpu"), cpu_size=16 * MIB)
    assert config.tiers == ("cpu", "disk")
    assert config.workers == 32, "only load_config reads the environment"
    with pytest.raises(ValidationError, match="frozen"):
        config.workers = 8
    with pytest.raises(ValidationError, match="at least 4MiB"):
        Settings(cpu_size=1)


def test_slabs_fill_the_cpu_tier_and_leave_room_for_headers() -> None:
    for cpu, slab_bytes, slabs in [
        ("4MiB", 4 * MIB, 1),
        ("64MiB", 4_472_832, 15),
        ("100MiB", 4_366_336, 24),
        ("1GiB", 71_581_696, 15),
        ("1500MiB", 71_491_584, 22),
        ("4GiB", 286_330_880, 15),
        ("1TiB", 276_881_408, 3971),
    ]:
        config = load_config(["--cpu", cpu])
        assert config.cpu_slab_bytes == slab_bytes
        assert config.cpu_size // slab_bytes == slabs
        assert config.cpu_size - slabs * slab_bytes < slabs * 4 * KIB


def test_disks_are_a_size_a_path_or_both_each_and_repeat_the_size_before(tmp_path: Path) -> None:
    def disks(text: str) -> list[tuple[int, Path]]:
        found = load_config(["--disk", text]).disk
        assert load_config(["--disk", ",".join(map(str, found))]).disk == found
        return [(folder.capacity_bytes, folder.path) for folder in found]

    assert disks("10GiB:/data/a:b") == [(10 * GIB, Path("/data/a:b"))]
    assert disks("~/kv") == [(4 * GIB, Path.home() / "kv")]
    assert disks("./kv") == [(4 * GIB, Path.cwd() / "kv")]
    assert disks("10GiB") == [(10 * GIB, tmp_path / "cache" / "kvstore" / "disk")]
    a, b, c = (tmp_path / name for name in "abc")
    assert disks(f"5GiB:{a}, 6GiB:{b},{c}") == [(5 * GIB, a), (6 * GIB, b), (6 * GIB, c)]
    by_name = f"disk: [{{path: {a}, capacity_bytes: 5GiB}}, {{path: {b}}}]\n"
    named = load_config(["--config", write(tmp_path / "c.yaml", by_name)]).disk
    assert ",".join(map(str, named)) == f"5GiB:{a},4GiB:{b}"


def test_the_socket_carries_the_bound_port_in_the_users_runtime_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"kvstore-{os.getuid()}"
    assert load_config([]).socket_path_for(81) == Path("/tmp") / name / "81.sock"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert load_config([]).socket_path_for(82) == Path("/run/user/7") / name / "82.sock"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert load_config([]).socket_path_for(83) == Path("/tmp") / name / "83.sock"
    assert load_config(["--socket-path", "/a/b"]).socket_path_for(84) == Path("/a/b")


def test_show_masks_the_password_wherever_it_stands() -> None:
    url = "redis://reader:hunter2@cache.example:6379/3?sentinel_password=hunter2"
    config = load_config(["--redis", url])
    assert "redis_url: redis://***@cache.example:6379/3?***" in show(config)
    assert "hunter2" not in show(config)
    assert "hunter2" not in repr(config)


def test_show_reads_back_as_the_same_config(tmp_path: Path) -> None:
    secret = write(tmp_path / "secret", "s" * 32)
    config, origins = load(
        Settings,
        ["--tiers", "cpu,redis", "--redis", "redis://h:1/0", "--cpu", "5000000", "--insecure",
         "--socket-path", "off", "--secret-file", secret, "--disk", f"1GiB:{tmp_path}/a: b"]
    )  # fmt: skip
    for text in (show(config), show(config, origins)):
        assert load_config(["--config", write(tmp_path / "c.yaml", text)]) == config
    assert set(yaml.safe_load(show(config))) == set(Settings.model_fields)


def test_help_names_every_setting_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        load_config(["--help-all"])
    assert caught.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for name, field in Settings.model_fields.items():
        assert "--" + name.replace("_", "-") in text
        assert field.description
        assert " ".join(field.description.split()) in text
    assert "--cpu SIZE" in text
    assert "(default 16GiB)" in text
    assert "typing" not in text


def test_the_terms_of_policy_are_read_by_tier_and_shown_as_they_were_written() -> None:
    policies = load_config(["--policy", "marconi,gpu=lru"]).policy
    others = dict.fromkeys(("cpu", "disk", "redis"), "marconi")
    assert (text_by_tier(policies), policies) == ("marconi,gpu=lru", {"gpu": "lru"} | others)
    text = "acme=2GiB:512MiB,acme/disk=10GiB,zeta/disk=1GiB"
    quotas = load_config(["--tenant-quotas", text]).tenant_quotas
    assert ",".join(map(str, quotas)) == text
    assert [(rule.tenant, rule.tier, rule.quota, rule.guaranteed) for rule in quotas] == [
        ("acme", "", 2 * GIB, 512 * MIB),
        ("acme", "disk", 10 * GIB, 0),
        ("zeta", "disk", GIB, 0),
    ]
    text = "batch=10min:1GiB,scratch=90s,rest=0s:1MiB"
    terms = load_config(["--category-terms", text]).category_terms
    assert ",".join(map(str, terms)) == text
    assert [(rule.ttl_s, rule.quota) for rule in terms] == [(600, GIB), (90, 0), (0, MIB)]
    (rest,) = load_config(["--category-terms", "rest=:1MiB"]).category_terms
    assert (rest.ttl_s, rest.quota) == (0, MIB)


def test_rules_may_be_a_list_of_texts_in_the_file(tmp_path: Path) -> None:
    text = """
tenant_quotas: ["acme=2GiB:512MiB", "zeta/disk=1GiB"]
policy: {gpu: lru}
shared_pools:
"""
    config = load_config(["--config", write(tmp_path / "c.yaml", text)])
    assert ",".join(map(str, config.tenant_quotas)) == "acme=2GiB:512MiB,zeta/disk=1GiB"
    assert (config.policy["gpu"], config.policy["cpu"]) == ("lru", "hit_density")
    assert config.shared_pools == ()


def test_as_many_tenants_and_categories_have_quotas_as_policies_have_columns_for() -> None:
    assert 2 * MAX_QUOTAS <= MAX_PARTITIONS
    quotas = ",".join(f"t{n}=1GiB,t{n}/disk=2GiB" for n in range(MAX_QUOTAS))
    assert len(load_config(["--tenant-quotas", quotas]).tenant_quotas) == 2 * MAX_QUOTAS
    assert "at most 7 tenants" in refused("--tenant-quotas", quotas + ",more=1GiB")
    terms = ",".join(f"c{n}=1s:1GiB" for n in range(MAX_QUOTAS))
    assert "at most 7 with quotas" in refused("--category-terms", terms + ",more=:1GiB")
    assert len(load_config(["--category-terms", terms + ",more=1s"]).category_terms) == 8


def test_what_a_setting_names_is_joined_over_file_environment_and_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(
        tmp_path / "c.yaml",
        "limits: {mover_queue: 77, events_kept: 5}\nwrite: disk=evict\ncodec: redis=raw\n",
    )
    monkeypatch.setenv("KVSTORE_LIMITS", "events_kept=6,peer_requests=3")
    flags = ["--limits", "peer_requests=4", "--write", "redis=auto", "--codec", "kvq:2"]
    config = load_config(["--config", path, *flags])
    limits = config.limits
    assert (limits.mover_queue, limits.events_kept, limits.peer_requests) == (77, 6, 4)
    assert config.write == {"disk": "evict", "redis": "auto"}
    assert config.codec == {"disk": "kvq:2", "redis": "kvq:2"}  # one for all wins over all below


def test_each_limit_takes_a_value_and_is_shown(tmp_path: Path) -> None:
    for name, field in Limits.model_fields.items():
        text = "16MiB" if "SIZE" in field.metadata else "0.5" if field.annotation is float else "9"
        text = "777" if name.endswith("ttl_ms") else text
        config = load_config(["--limits", f"{name}={text}"])
        assert getattr(config.limits, name) != getattr(Limits(), name)
        assert f"{name}={text}" in show(config)
        path = write(tmp_path / "c.yaml", show(config))
        assert load_config(["--config", path]) == config


def test_what_is_given_for_no_tier_is_for_all_of_them() -> None:
    rules = load_config(["--write", "evict", "--write", "redis=auto"]).write
    assert rules == {"disk": "evict", "redis": "auto"}
    assert load_config(["--write", "redis=auto"]).write == {"disk": "through", "redis": "auto"}
    config = load_config(["--codec", "disk=kvq:2,sinks=4,importance,redis=auto"])
    assert config.codec == {"disk": "kvq:2,sinks=4,importance", "redis": "auto"}
    assert config.codecs["cpu"] == config.codecs["peer"] == "raw"
    assert load_config(["--codec", "kvq:2,sinks=4"]).codec["redis"] == "kvq:2,sinks=4"
    budget = load_config(["--write-budget", "disk=1TiB,redis=500G"])
    assert budget.write_budget == {"disk": 1 << 40, "redis": 500 * 10**9}
    assert load_config([]).write_budget == {"disk": 0, "redis": 0}
