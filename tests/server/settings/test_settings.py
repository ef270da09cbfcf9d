"""The server's configuration: where values come from, what is derived, shown and refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from structlog.testing import capture_logs

from kvstore.proto.errors import InvalidRequestError
from kvstore.server.eviction.quotas import MAX_PARTITIONS
from kvstore.server.settings import process_limits
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


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Settings of a test come from the test alone."""
    for name in list(os.environ):
        if name.upper().startswith("KVSTORE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)


def write(path: Path, text: str) -> str:
    """Write *text* to *path* and return it as an argument."""
    path.write_text(text)
    return str(path)


def refused(*argv: str) -> str:
    """Return why a server with these arguments does not start."""
    with pytest.raises(InvalidRequestError) as caught:
        load_config(argv)
    return str(caught.value)


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
    from_where = {"workers": "--workers", "max_sessions": "KVSTORE_MAX_SESSIONS", "limits": path}
    assert origins == from_where


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
    injected = ("PORT", "SERVICE_HOST", "SERVICE_PORT_GRPC", "PORT_7420_TCP_ADDR",
                "NODE_SERVICE_PORT", "NODE_PORT_7420_TCP")  # fmt: skip
    for name in (*injected, "ADDRESS", "TOKEN_FILE", "CA"):
        monkeypatch.setenv(f"KVSTORE_{name}", "tcp://10.0.0.1:7420")
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
        assert f"is also given as {name}; give one of them" in message
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
        ("100MiB", 4_366_336, 24),
        ("1500MiB", 71_491_584, 22),
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
    quotas = "tenant_quotas: ['acme=2GiB:512MiB', 'zeta/disk=1GiB']"
    text = f"{quotas}\npolicy: {{gpu: lru}}\nshared_pools:\n"
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


BAD_VALUES = [
    (["--tiers", "cpu,tape"], ["tiers='cpu,tape'", "cpu, disk, redis, gpu", "--tiers"]),
    (["--tiers", ""], ["tiers=''", "cpu, disk, redis, gpu"]),
    (["--tiers", "cpu,cpu"], ["tiers", "once"]),
    (["--tiers", "disk"], ["tiers='disk'", "add cpu", "served from CPU memory"]),
    (["--tiers", "cpu,redis"], ["redis_url=None", "--redis redis://host:6379/0"]),
    (["--redis", "http://h"], ["redis_url", "redis://host:6379/0"]),
    (["--directory"], ["redis_url=None", "--redis redis://host:6379/0"]),
    (["--peers", "directory"], ["peers='directory'", "directory needs --directory and --redis"]),
    (["--limits", "blend_ratio=nan"], ["limits.blend_ratio='nan'", "finite"]),
    (["--blend-divergence", "nan"], ["blend_divergence='nan'", "finite"]),
    (["--directory", "--redis", "redis://h", "--listen", "0.0.0.0:1", "--insecure"],
     ["listen='0.0.0.0:1'", "--advertise HOST"]),
    (["--node-id", "a b"], ["node_id='a b'"]),
    (["--redis-prefix", "a b"], ["redis_prefix='a b'"]),
    (["--redis-prefix", ""], ["give 1 to 64 of the characters A-Za-z0-9:_.-"]),
    (["--default-deadline-ms", "600001"], ["less than or equal to 600000"]),
    (["--disk", "1GiB:/a,1GiB:/a/extents"], ["a folder is inside another"]),
    (["--redis-tls-cert", __file__], ["redis_tls_key", "both --redis-tls-cert and"]),
    (["--redis-password-file", __file__], ["redis_password_file", "one line of text"]),
    (["--redis", "redis://h", "--redis-username", "me"], ["needs --redis-password-file"]),
    (["--redis", "redis://h", "--redis-tls-ca", __file__], ["write rediss:// for redis://"]),
    (["--redis", "rediss://h?ssl_ca_certs=/ca", "--redis-tls-ca", __file__], ["leave one out"]),
    (["--cpu", "8 gigs"], ["cpu_size='8 gigs'", "8GiB", "1048576"]),
    (["--cpu", "1MiB"], ["cpu_size='1MiB'", "at least 4MiB"]),
    (["--cpu", "9999999TiB"], ["cpu_size", "at most 1024TiB"]),
    (["--cpu", "9" * 5000], ["cpu_size", "8GiB"]),
    (["--cpu", "8MiB", "--limits", "cpu_slab_bytes=16MiB"], ["limits='cpu_slab_", "of 8MiB"]),
    (["--limits", "cpu_slab_bytes=5000000"], ["cpu_slab_bytes", "multiple of 4KiB"]),
    (["--limits", "mover_qeue=9"], ["limits.mover_qeue='***'", "did you mean mover_queue?"]),
    (["--limits", "mover_queue"], ["limits='mover_queue'", "give NAME=VALUE"]),
    (["--limits", "blend_ratio=0.8"], ["limits.blend_ratio='0.8'", "0.75"]),
    (["--limits", "peer_bytes=1MiB"], ["limits.peer_bytes='1MiB'", "16777216"]),
    (["--gpu", "8GiB:-1"], ["gpu='8GiB:-1'", "8GiB:1"]),
    (["--gpu", "8GiB:64"], ["gpu.device='64'", "less than 64"]),
    (["--gpu", ":1"], ["gpu=':1'", "SIZE:DEVICE"]),
    (["--disk", "tenGiB:/x"], ["disk.capacity_bytes='tenGiB'", "8GiB"]),
    (["--disk", "10GiB:"], ["disk='10GiB:'", "100GiB:/var/lib/kvstore"]),
    (["--redis-size", "0"], ["redis_size='0'", "at least 4MiB"]),
    (["--codec", "cpu=lossless"], ["codec='cpu=lossless'", "name tiers out of disk, redis"]),
    (["--codec", "disk=raw,disk=lossless"], ["codec=", "name each tier once"]),
    (["--write", "through,evict"], ["write='through,evict'", "RULE,TIER=RULE"]),
    (["--write-budget", "disk=1KiB"], ["write_budget='disk=1KiB'", "at least 1MiB a day"]),
    (["--codec", "disk=gzip"],
     ["codec='disk=gzip'", "unknown codec", "auto or one of", "lossless"]),
    (["--codec", "disk=lossless:9"],
     ["codec='disk=lossless:9'", "lossless does not know '9'; use lossless"]),
    (["--codec", "disk=mixed:1"],
     ["codec='disk=mixed:1'", "mixed was removed; use kvq:N,importance"]),
    (["--codec", "disk=kvq:1,sinks=5"], ["'1,sinks=5'", ",sinks=0 to ,sinks=4"]),
    (["--codec", "redis=auto:most"],
     ["codec='redis=auto:most'", "auto:bounded", "auto:approximate"]),
    (["--tenant-codecs", "acme/disk"], ["tenant_codecs='acme/disk'", "TENANT/TIER=CODEC"]),
    (["--tenant-codecs", "acme/cpu=lossless"], ["tenant_codecs", "disk, redis", "raw frames"]),
    (["--tenant-codecs", "a b/disk=lossless"], ["tenant_codecs", "letters, digits"]),
    (["--tenant-codecs", "a/disk=gzip"], ["tenant_codecs", "unknown codec"]),
    (["--tenant-codecs", "a/disk=auto"], ["tenant_codecs", "whole tiers"]),
    (["--tenant-codecs", "a/disk=raw,a/disk=lossless"], ["tenant_codecs", "once for each tier"]),
    (["--policy", "best"], ["policy", "use one of lru", "hit_density"]),
    (["--policy", "lru,marconi"], ["policy='lru,marconi'", "NAME,TIER=NAME"]),
    (["--policy", "lru,ssd=marconi"], ["policy", "gpu, cpu, disk, redis"]),
    (["--policy", "lru,cpu=marconi,cpu=lru"], ["policy", "each tier once"]),
    (["--tenant-quotas", "acme=1GiB:"], ["tenant"]),
    (["--tenant-quotas", "acme"], ["tenant_quotas='acme'", "TENANT=SIZE:GUARANTEED"]),
    (["--tenant-quotas", "acme=1GiB:2GiB"], ["tenant_quotas", "guarantee no more"]),
    (["--tenant-quotas", "acme=1GiB,acme=2GiB"], ["tenant_quotas", "once for each tier"]),
    (["--tenant-quotas", "acme/ssd=1GiB"], ["tenant_quotas", "gpu, cpu, disk, redis"]),
    (["--tenant-quotas", "a b=1GiB"], ["tenant_quotas", "letters, digits"]),
    (
        ["--shared-pools", "a=*", "--tenant-quotas", "pool:a=1GiB,pool:b/disk=1GiB"],
        ["tenant_quotas", "a pool that is not in --shared-pools"],
    ),
    (["--category-terms", "batch"], ["category_terms='batch'", "CATEGORY=TTL:SIZE"]),
    (["--category-terms", "batch=soon"], ["category_terms", "90s, 10min, 2h or 7d"]),
    (["--category-terms", "batch=31d"], ["category_terms", "30d at most"]),
    (["--category-terms", "a=1s,a=2s"], ["category_terms", "each category once"]),
    (["--category-terms", "x" * 65 + "=1s"], ["category_terms", "64 printable"]),
    (["--assets", "/nowhere"], ["assets='/nowhere'", "a folder that exists"]),
    (["--write", "sometimes"], ["write='sometimes'", "selective, auto"]),
    (["--listen", "7420"], ["listen='7420'", "127.0.0.1:7420"]),
    (["--listen", "127.0.0.1:70000"], ["listen", "at most 65535"]),
    (["--listen", "::1:7420"], ["listen='::1:7420'", "[::1]:7420"]),
    (["--listen", "0.0.0.0:7420"], ["listen='0.0.0.0:7420'", "TLS", "--auth-keys", "--insecure"]),
    (["--listen", "192.0.2.7:7420"], ["listen", "--insecure"]),
    (["--listen", "[::]:7420", "--auth-keys", __file__], ["listen", "--insecure"]),
    (["--listen", "0.0.0.0:0", "--tls-cert", __file__, "--tls-key", __file__], ["--insecure"]),
    (["--listen", "node7.invalid:7420"], ["listen", "does not resolve"]),
    (["--http", "0.0.0.0:80"], ["http='0.0.0.0:80'", "--open-pages"]),
    (["--http-tls"], ["--tls-cert"]),
    (["--health", "0.0.0.0:80"], ["health='0.0.0.0:80'", "--open-pages"]),
    (["--tls-cert", __file__], ["tls_key", "both"]),
    (["--tls-client-ca", __file__], ["tls_client_ca", "--tls-cert"]),
    (["--tls-crl", __file__], ["tls_crl", "--tls-client-ca"]),
    (["--jwt-key", __file__], ["jwt_audience", "give the audience"]),
    (["--auth-keys", "/nowhere"], ["auth_keys", "read"]),
    (["--shared-pools", "library"], ["shared_pools", "POOL="]),
    (["--shared-pools", "a=*,a=b"], ["shared_pools", "once"]),
    (["--tenant-limits", "acme=1"], ["tenant_limits", "TENANT="]),
    (["--tenant-limits", "*=1:0:0"], ["tenant_limits", "named"]),
    (["--socket-path", "here.sock"], ["socket_path='here.sock'", "absolute path"]),
    (["--socket-path", "/" + "x" * 110], ["socket_path", "107 bytes", "shorten"]),
    (["--secret-file", "/no/such/file"], ["secret_file", "/no/such/file", "can read"]),
    (["--max-frame-bytes", "2GiB"], ["max_frame_bytes='2GiB'", "less than or equal to 1073741824"]),
    (["--workers", "1025"], ["less than or equal to 1024"]),
    (["--limits", "load_headroom_percent=50"], ["less than 50"]),
    (["--limits", "directory_ttl_ms=499"], ["equal to 500"]),
    (["--limits", "cpu_slab_bytes=1KiB"], ["equal to 65536"]),
    (["--workers", "many"], ["workers='many'", "whole number"]),
    (["--log-format", "xml"], ["log_format='xml'", "'console' or 'json'"]),
    (["--disk", "5GiB:/a,5GiB:/a/../a"], ["name each folder once"]),
    (["--disk", "5GiB:/a,6GiB"], ["give each further disk as SIZE:PATH"]),
    (["--disk", "5GiB:/a,"], ["give SIZE:PATH, SIZE or PATH"]),
    (["--disk", ",".join(f"5GiB:/d{n}" for n in range(65))], ["at most 64 folders"]),
    (["--redis", "redis://[::1"], ["give --redis"]),
    (["--redis", "redis://h:99999"], ["give --redis"]),
    (["--bulk", "tcp://a:1"], ["give host:port"]),
    (["--bulk", "a:65536"], ["a port is at most 65535"]),
    (["--events", "ipc:run/b"], ["give ipc: and an absolute path"]),
    (["--events", "ipc:/" + "b" * 107], ["of 107 bytes at most"]),
    (["--cpu-sise", "8GiB"], ["flags=", "--cpu-sise", "kvstore-server --help"]),
    (["serve"], ["flags=", "serve"]),
]  # fmt: skip


def test_a_bad_value_is_refused_with_its_name_and_what_to_give() -> None:
    for argv, words in BAD_VALUES:
        message = refused(*argv)
        assert [word for word in words if word not in message] == [], (argv, message)
        assert "\n" not in message


def test_what_is_given_for_a_tier_that_is_not_used_is_named() -> None:
    redis = ("--redis", "redis://h:6379")
    both = list(load_config([*redis, "--tiers", "cpu", "--disk", "1GiB"]).unused)
    assert both == [("disk", "disk"), ("redis_url", "redis")]
    for used in (["--tiers", "cpu"], [*redis, "--directory"], [*redis, "--tiers", "cpu,redis"]):
        assert list(load_config(used).unused) == []


def test_other_hosts_reach_who_has_tls_and_asks_who_calls_or_is_said_to_be_open() -> None:
    tls = ("--tls-cert", __file__, "--tls-key", __file__)
    for flags in ((*tls, "--auth-keys", __file__), ("--insecure",)):
        assert load_config(["--listen", "0.0.0.0:0", *flags]).listen == "0.0.0.0:0"


def test_every_wrong_setting_is_named_at_once_with_its_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "c.yaml", "log_level: loud\n")
    monkeypatch.setenv("KVSTORE_WORKERS", "many")
    lines = refused("--config", path, "--cpu", "8gigs").splitlines()
    assert [line.partition("=")[0] for line in lines] == ["cpu_size", "workers", "log_level"]
    origins = [line.rpartition("(from ")[2] for line in lines]
    assert origins == ["--cpu)", "KVSTORE_WORKERS)", f"{path})"]


def test_a_name_that_there_was_is_refused_and_its_successor_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = {
        "zmq": "give bulk",
        "peer_port": "that of bulk",
        "zmq_keys": "give events_keys",
        "disk_codec": "give --codec disk=CODEC",
        "redis_write": "give --write redis=RULE",
        "adapt_tenants": "was removed; use --policy hit_density",
        **{name: f"give --limits {name}=VALUE" for name in Limits.model_fields},
    }
    for name, successor in gone.items():
        assert successor in refused(f"--{name.replace('_', '-')}", "127.0.0.1:7421")
        assert successor in refused(f"--{name.replace('_', '-')}=127.0.0.1:7421")
        assert successor in refused("--config", write(tmp_path / "c.yaml", f"{name}: off\n"))
        if name != "peer_port":  # as Kubernetes names what it puts into pods
            with monkeypatch.context() as patch:
                patch.setenv(f"KVSTORE_{name.upper()}", "off")
                assert successor in refused()


def test_an_error_in_one_of_several_sources_shows_what_each_gave(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", "codec: disk=bogus\n")
    message = refused("--config", path, "--codec", "redis=raw")
    assert "codec=['disk=bogus', 'redis=raw']" in message
    assert f"(from {path} and --codec)" in message


PASSWORD = "SeKrEt7pw"


def test_no_mistake_repeats_a_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in [
        "redis_uri: redis://u:{}@h:1/0",
        "redis_url: redis://u:{}@h: 1",
        "redis_url: redis://u:{}@h\n  x: [",
        "redis_url: 'redis://u:{}@h\n",
        "redis_url: *{}",
        "redis_url: !{} x",
        "redis_url: %{}",
        "redis_url: [redis://u:{}@h]",
        "redis_url:\n  uri: redis://u:{}@h",
        "redis://u:{}@h: 1",
        "- redis://u:{}@h",
        "\0{}",
    ]:
        path = write(tmp_path / "c.yaml", text.format(PASSWORD))
        assert PASSWORD not in refused("--config", path)
    for flags in [
        ["--redis-uri", f"redis://u:{PASSWORD}@h"],
        [f"--redis-uri=redis://u:{PASSWORD}@h"],
        ["--redis", "redis://u:x", PASSWORD],
        ["--redis-password", PASSWORD],
    ]:
        assert PASSWORD not in refused(*flags)
    for url in ["redis://:{}@", "{}@host", "redis://host:{}", "redis//u:{}@h:1"]:
        message = refused("--redis", url := url.format(PASSWORD), "--workers", "many")
        assert "redis_url='***'" in message
        assert PASSWORD not in message
        with pytest.raises(ValidationError) as caught:
            Settings(redis_url=url)
        assert PASSWORD not in str(caught.value)
    monkeypatch.setenv("KVSTORE_REDIS_URI", f"redis://u:{PASSWORD}@h")
    message = refused()
    assert PASSWORD not in message
    assert "did you mean redis_url?" in message


def test_a_file_that_is_not_there_or_no_yaml_mapping_is_refused_and_an_empty_one_changes_nothing(
    tmp_path: Path,
) -> None:
    for text, words in [
        ("- workers", "`name: value`"),
        ("1: 2", "`name: value`"),
        ("workers: [", "line 1"),
        ("tiers: !!python/object/apply:os.getcwd []", "give YAML"),
        ("a\0b", "give YAML"),
    ]:
        path = write(tmp_path / "c.yaml", text)
        message = refused("--config", path)
        assert message.startswith(f"config={path!r}"[:60])
        assert words in message
    assert "No such file" in refused("--config", str(tmp_path / "none.yaml"))
    assert "Is a directory" in refused("--config", str(tmp_path))
    assert load_config(["--config", write(tmp_path / "c.yaml", "# later\n")]) == load_config([])


def test_a_secret_that_is_too_short_is_refused_and_a_long_one_is_read(tmp_path: Path) -> None:
    short, long = write(tmp_path / "s", "x" * 15), write(tmp_path / "l", "x" * 16)
    assert "at least 16 random bytes" in refused("--secret-file", short)
    assert load_config(["--secret-file", long]).secret_file == Path(long)


def test_a_tier_larger_than_the_machine_is_warned_of_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_limits, "cgroup_limit_bytes", lambda: None)
    with capture_logs() as logs:
        process_limits.check_memory(Settings(cpu_size=64 << 20))
        assert not logs
        process_limits.check_memory(Settings(cpu_size=1 << 50))
    assert logs[0]["cpu"] == "1024TiB"
    assert logs[0]["fix"].startswith("give --cpu ")
