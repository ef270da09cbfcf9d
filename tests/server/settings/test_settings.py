"""The server's configuration: where values come from, what is refused and in which words."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ProcessMaker
from pydantic import ValidationError

from kvstore.proto.errors import InvalidRequestError
from kvstore.proto.types import Accuracy
from kvstore.server.eviction.quotas import MAX_PARTITIONS
from kvstore.server.settings import settings as config_module
from kvstore.server.settings.loading import load, show
from kvstore.server.settings.rules import MAX_QUOTAS, DiskFolder, auto_accuracy, is_auto
from kvstore.server.settings.settings import (
    Settings,
    load_config,
)
from kvstore.server.settings.values import GIB, KIB, MIB, Limits, text_by_tier

SECRET_URL = "redis://reader:hunter2@cache.example:6379/3"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.upper().startswith("KVSTORE_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def refused(*argv: str) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        load_config(argv)
    return str(caught.value)


# --- where values come from


def test_nothing_given_is_a_loopback_server_with_cpu_and_disk(tmp_path: Path) -> None:
    config = load_config([])
    assert config.tiers == ("cpu", "disk")
    assert config.listen == "127.0.0.1:7420"
    assert config.http == "off"
    folder = DiskFolder(capacity_bytes=4 * GIB, path=tmp_path / "cache" / "kvstore" / "disk")
    assert config.disk == (folder,)
    assert config.secret_file is None
    assert not config.insecure


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


def test_settings_that_go_together_have_the_same_names_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "a.pem", "...")
    values = dict.fromkeys(TOGETHER, file)
    flags = [word for name in values for word in ("--" + name.replace("_", "-"), file)]
    from_flags = load_config(flags)
    assert from_flags.tls_client_ca == from_flags.jwt_key == tmp_path / "a.pem"
    path = write(tmp_path / "c.yaml", "".join(f"{name}: {file}\n" for name in values))
    assert load_config(["--config", path]) == from_flags
    for name in values:
        monkeypatch.setenv(f"KVSTORE_{name.upper()}", file)
    assert load_config([]) == from_flags


def test_the_file_takes_lists_mappings_numbers_and_a_bare_off(tmp_path: Path) -> None:
    text = f"""
tiers: [disk, cpu]
cpu_size: {64 * MIB}
disk: {{capacity_bytes: 1GiB, path: {tmp_path}}}
socket_path: off
http: off
insecure: yes
"""
    config = load_config(["--config", write(tmp_path / "c.yaml", text)])
    assert config.tiers == ("cpu", "disk")
    assert config.cpu_size == 64 * MIB
    assert config.disk == (DiskFolder(capacity_bytes=GIB, path=tmp_path),)
    assert config.socket_path_for(1) is None
    assert config.http == "off"
    assert config.insecure


def test_names_in_the_environment_may_be_in_small_letters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("kvstore_config", write(tmp_path / "a.yaml", "workers: 5\n"))
    monkeypatch.setenv("kvstore_cpu", "64MiB")
    monkeypatch.setenv("Kvstore_Max_Sessions", "7")
    monkeypatch.setenv("kvstore_service_port", "7420")
    config, origins = load(Settings, [])
    assert (config.workers, config.cpu_size, config.max_sessions) == (5, 64 * MIB, 7)
    assert (origins["cpu_size"], origins["max_sessions"]) == ("kvstore_cpu", "Kvstore_Max_Sessions")
    monkeypatch.setenv("kvstore_cpu_sise", "8GiB")
    assert "did you mean cpu_size? (from kvstore_cpu_sise)" in refused()


def test_a_setting_that_two_variables_give_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_REDIS", SECRET_URL)
    monkeypatch.setenv("kvstore_redis", SECRET_URL)
    message = refused()
    assert re.search("kvstore_redis='...': is kvstore_redis too; give one of", message, re.I)
    assert "hunter2" not in message


def test_what_kubernetes_injects_for_a_service_called_kvstore_is_not_a_setting(
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
    ):
        monkeypatch.setenv(name, "tcp://10.0.0.1:7420")
    assert load_config([]) == expected


def test_what_the_command_line_reads_from_the_environment_is_not_a_setting(
    monkeypatch: pytest.MonkeyPatch, server_process: ProcessMaker
) -> None:
    expected = load_config([])
    for name in ("KVSTORE_ADDRESS", "KVSTORE_TOKEN_FILE", "KVSTORE_CA"):
        monkeypatch.setenv(name, "/nowhere")
    assert load_config([]) == expected
    server_process("--tiers", "cpu", "--cpu", "8MiB").start()


# --- what is refused

BAD_VALUES = [
    (["--tiers", "cpu,tape"], ["tiers='cpu,tape'", "cpu, disk, redis, gpu", "--tiers"]),
    (["--tiers", ""], ["tiers=''", "cpu, disk, redis, gpu"]),
    (["--tiers", "cpu,cpu"], ["tiers", "once"]),
    (["--tiers", "disk"], ["tiers='disk'", "add cpu", "served from CPU memory"]),
    (["--tiers", "cpu,redis"], ["redis_url=None", "--redis redis://host:6379/0"]),
    (["--redis", "http://h"], ["redis_url", "redis://host:6379/0"]),
    (["--redis", "redis://"], ["redis_url", "redis://host:6379/0"]),
    (["--redis", "redis://h:port"], ["redis_url", "redis://host:6379/0"]),
    (["--directory"], ["redis_url=None", "--redis redis://host:6379/0"]),
    (["--peers", "directory"], ["peers='directory'", "add --directory and --redis"]),
    (["--limits", "blend_ratio=nan"], ["limits.blend_ratio='nan'", "finite"]),
    (["--blend-divergence", "nan"], ["blend_divergence='nan'", "finite"]),
    (
        ["--directory", "--redis", "redis://h", "--listen", "0.0.0.0:1", "--insecure"],
        ["listen='0.0.0.0:1'", "--advertise HOST"],
    ),
    (["--node-id", "a b"], ["node_id='a b'"]),
    (["--redis-prefix", "a b"], ["redis_prefix='a b'"]),
    (["--redis-tls-cert", __file__], ["redis_tls_key", "both --redis-tls-cert and"]),
    (["--redis-password-file", __file__], ["redis_password_file", "one line of text"]),
    (["--redis", "redis://h", "--redis-username", "me"], ["needs --redis-password-file"]),
    (["--redis", "redis://h", "--redis-tls-ca", __file__], ["write rediss:// for redis://"]),
    (["--redis", "rediss://h?ssl_ca_certs=/ca", "--redis-tls-ca", __file__], ["leave one out"]),
    (["--cpu", "8 gigs"], ["cpu_size='8 gigs'", "8GiB", "1048576"]),
    (["--cpu", "-1"], ["cpu_size='-1'", "8GiB"]),
    (["--cpu", "1.5GiB"], ["cpu_size='1.5GiB'", "8GiB"]),
    (["--cpu", "1MiB"], ["cpu_size='1MiB'", "at least 4MiB"]),
    (["--cpu", "9999999TiB"], ["cpu_size", "at most 1024TiB"]),
    (["--cpu", "9" * 5000], ["cpu_size", "8GiB"]),
    (["--cpu", "8MiB", "--limits", "cpu_slab_bytes=16MiB"], ["limits='cpu_slab_", "of 8MiB"]),
    (["--limits", "cpu_slab_bytes=5000000"], ["cpu_slab_bytes", "multiple of 4KiB"]),
    (
        ["--limits", "cpu_slab_bytes=1KiB"],
        ["cpu_slab_bytes='1KiB'", "greater than or equal to 65536"],
    ),
    (["--limits", "mover_queue=0"], ["limits.mover_queue='0'", "greater than or equal to 1"]),
    (["--limits", "mover_qeue=9"], ["limits.mover_qeue='***'", "did you mean mover_queue?"]),
    (["--limits", "mover_queue"], ["limits='mover_queue'", "give NAME=VALUE"]),
    (["--limits", "blend_ratio=0.8"], ["limits.blend_ratio='0.8'", "0.75"]),
    (["--limits", "peer_bytes=1MiB"], ["limits.peer_bytes='1MiB'", "16777216"]),
    (["--limits", "directory_ttl_ms=499"], ["limits.directory_ttl_ms='499'", "equal to 500"]),
    (["--gpu", "1MiB"], ["gpu.capacity_bytes='1MiB'", "at least 4MiB"]),
    (["--gpu", "8GiB:x"], ["gpu='8GiB:x'", "8GiB:1"]),
    (["--gpu", "8GiB:-1"], ["gpu='8GiB:-1'", "8GiB:1"]),
    (["--gpu", "8GiB:64"], ["gpu.device='64'", "less than 64"]),
    (["--gpu", ":1"], ["gpu=':1'", "SIZE:DEVICE"]),
    (["--disk", "1MiB:/x"], ["disk.capacity_bytes='1MiB'", "at least 4MiB"]),
    (["--disk", "tenGiB:/x"], ["disk.capacity_bytes='tenGiB'", "8GiB"]),
    (["--disk", "10GiB:"], ["disk='10GiB:'", "100GiB:/var/lib/kvstore"]),
    (["--disk", ""], ["disk=''", "SIZE:PATH"]),
    (["--redis-size", "0"], ["redis_size='0'", "at least 4MiB"]),
    (["--codec", "cpu=lossless"], ["codec='cpu=lossless'", "name tiers out of disk, redis"]),
    (["--codec", "disk=raw,disk=lossless"], ["codec=", "name each tier once"]),
    (["--write", "through,evict"], ["write='through,evict'", "RULE,TIER=RULE"]),
    (["--write-budget", "disk=1KiB"], ["write_budget='disk=1KiB'", "at least 1MiB a day"]),
    (
        ["--codec", "disk=gzip"],
        ["codec='disk=gzip'", "unknown codec", "auto or one of", "lossless"],
    ),
    (["--codec", "redis="], ["codec='redis='", "unknown codec", "raw"]),
    (
        ["--codec", "disk=lossless:9"],
        ["codec='disk=lossless:9'", "lossless does not know '9'; use lossless"],
    ),
    (
        ["--codec", "disk=lossless:"],
        ["codec='disk=lossless:'", "lossless does not know ''; use lossless"],
    ),
    (["--codec", "disk=zplane"], ["codec='disk=zplane'", "zplane is gone; use lossless"]),
    (["--codec", "disk=mixed:1"], ["codec='disk=mixed:1'", "mixed is gone; use kvq:N,importance"]),
    (["--codec", "disk=kvq:1,sinks=5"], ["'1,sinks=5'", ",sinks=0 to ,sinks=4"]),
    (
        ["--codec", "redis=auto:most"],
        ["codec='redis=auto:most'", "auto:bounded", "auto:approximate"],
    ),
    (["--tenant-codecs", "acme"], ["tenant_codecs='acme'", "acme/redis=kvq:2"]),
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
    (["--tenant-quotas", "acme"], ["tenant_quotas='acme'", "TENANT=SIZE:GUARANTEED"]),
    (["--tenant-quotas", "acme=1GiB:2GiB"], ["tenant_quotas", "guarantee no more"]),
    (["--tenant-quotas", "acme=1GiB,acme=2GiB"], ["tenant_quotas", "once for each tier"]),
    (["--tenant-quotas", "acme/ssd=1GiB"], ["tenant_quotas", "gpu, cpu, disk, redis"]),
    (["--tenant-quotas", "a b=1GiB"], ["tenant_quotas", "letters, digits"]),
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
    (["--listen", "off"], ["listen='off'", "host:port"]),
    (["--listen", "0.0.0.0:7420"], ["listen='0.0.0.0:7420'", "TLS", "--auth-keys", "--insecure"]),
    (["--listen", "[::]:7420"], ["listen", "--insecure"]),
    (["--listen", "192.0.2.7:7420"], ["listen", "--insecure"]),
    (["--listen", "node7.invalid:7420"], ["listen", "does not resolve"]),
    (["--http", "0.0.0.0:80"], ["http='0.0.0.0:80'", "--open-pages"]),
    (["--health", "0.0.0.0:80"], ["health='0.0.0.0:80'", "--open-pages"]),
    (["--tls-cert", __file__], ["tls_key", "both"]),
    (["--tls-client-ca", __file__], ["tls_client_ca", "--tls-cert"]),
    (["--tls-crl", __file__], ["tls_crl", "--tls-client-ca"]),
    (["--jwt-key", __file__], ["jwt_audience", "whom"]),
    (["--auth-keys", "/nowhere"], ["auth_keys", "read"]),
    (["--shared-pools", "library"], ["shared_pools", "POOL="]),
    (["--shared-pools", "a=*,a=b"], ["shared_pools", "once"]),
    (["--tenant-limits", "acme=1"], ["tenant_limits", "TENANT="]),
    (["--tenant-limits", "*=1:0:0"], ["tenant_limits", "named"]),
    (["--tenant-limits", "acme=-1:0:0"], ["tenant_limits"]),
    (["--http", "on"], ["http='on'", "host:port"]),
    (["--socket-path", "here.sock"], ["socket_path='here.sock'", "absolute path"]),
    (["--socket-path", "/" + "x" * 110], ["socket_path", "107 bytes", "shorten"]),
    (["--secret-file", "/no/such/file"], ["secret_file", "/no/such/file", "can read"]),
    (["--max-frame-bytes", "2GiB"], ["max_frame_bytes='2GiB'", "less than or equal to 1073741824"]),
    (["--max-sessions", "0"], ["max_sessions='0'", "greater than or equal to 1"]),
    (["--workers", "many"], ["workers='many'", "whole number"]),
    (["--workers", "1025"], ["workers='1025'", "less than or equal to 1024"]),
    (
        ["--limits", "load_headroom_percent=50"],
        ["limits.load_headroom_percent='50'", "less than 50"],
    ),
    (["--limits", "session_ttl_ms=1.5"], ["limits.session_ttl_ms='1.5'", "whole number"]),
    (["--log-format", "xml"], ["log_format='xml'", "'console' or 'json'"]),
    (["--log-level", "loud"], ["log_level='loud'", "'debug'"]),
    (["--cpu-sise", "8GiB"], ["flags=", "--cpu-sise", "kvstore-server --help"]),
    (["--work", "8"], ["flags=", "--work"]),
    (["serve"], ["flags=", "serve"]),
]


def test_a_bad_value_is_refused_with_its_name_and_what_to_give() -> None:
    for argv, words in BAD_VALUES:
        message = refused(*argv)
        assert [word for word in words if word not in message] == [], (argv, message)
        assert "\n" not in message


def test_every_wrong_setting_is_named_at_once_with_its_origin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "c.yaml", "log_level: loud\n")
    monkeypatch.setenv("KVSTORE_WORKERS", "many")
    lines = refused("--config", path, "--cpu", "8gigs").splitlines()
    assert [line.partition("=")[0] for line in lines] == ["cpu_size", "workers", "log_level"]
    assert [line.rpartition("(from ")[2] for line in lines] == [
        "--cpu)",
        "KVSTORE_WORKERS)",
        f"{path})",
    ]


def test_a_name_that_there_was_is_refused_and_its_successor_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = {
        "zmq": "give bulk",
        "peer_port": "that of bulk",
        "zmq_keys": "give events_keys",
        "disk_codec": "give --codec disk=CODEC",
        "redis_write": "give --write redis=RULE",
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


@pytest.mark.parametrize(
    ("short", "name", "value"),
    [
        ("cpu", "cpu_size", "64MiB"),
        ("redis", "redis_url", "redis://host:1/0"),
        ("socket", "socket_path", "/run/s.sock"),
    ],
)
def test_the_short_names_of_flags_are_names_in_the_file_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short: str, name: str, value: str
) -> None:
    path = write(tmp_path / "c.yaml", f"{short}: {value}\n")
    flag = getattr(load_config([f"--{short}", value]), name)
    assert getattr(load_config(["--config", path]), name) == flag
    monkeypatch.setenv(f"KVSTORE_{short.upper()}", value)
    config, origins = load(
        Settings, ["--config", write(tmp_path / "d.yaml", f"{name}: nonsense\n")]
    )
    assert getattr(config, name) == flag
    assert origins[name] == f"KVSTORE_{short.upper()}"
    both = write(tmp_path / "e.yaml", f"{name}: {value}\n{short}: {value}\n")
    message = refused("--config", both)
    assert f"is {name} too; give one of the two" in message
    assert "redis://" not in message


def test_a_setting_that_is_gone_is_refused_with_what_replaces_it_wherever_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fix = "any more; use --policy hit_density"
    assert f"flags='--adapt-tenants': there is no such flag {fix}" in refused(
        "--adapt-tenants=acme"
    )
    path = write(tmp_path / "g.yaml", "adapt_tenants: acme\n")
    assert f"adapt_tenants='***': there is no such setting {fix} (from {path})" in refused(
        "--config", path
    )
    monkeypatch.setenv("KVSTORE_ADAPT_TENANTS", "acme")
    assert f"{fix} (from KVSTORE_ADAPT_TENANTS)" in refused()


PASSWORD = "SeKrEt7pw"


def test_no_mistake_in_the_file_repeats_a_password(tmp_path: Path) -> None:
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
        assert PASSWORD not in refused(
            "--config", write(tmp_path / "c.yaml", text.format(PASSWORD))
        )


def test_no_mistake_in_the_flags_repeats_a_password() -> None:
    for flags in [
        ["--redis-uri", f"redis://u:{PASSWORD}@h"],
        [f"--redis-uri=redis://u:{PASSWORD}@h"],
        ["--redis", "redis://u:x", PASSWORD],
        ["--redis-password", PASSWORD],
    ]:
        assert PASSWORD not in refused(*flags)


def test_no_mistake_in_the_environment_repeats_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_REDIS_URI", f"redis://u:{PASSWORD}@h")
    message = refused()
    assert PASSWORD not in message
    assert "did you mean redis_url?" in message


def test_a_file_that_is_not_a_yaml_mapping_is_refused(tmp_path: Path) -> None:
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


def test_a_file_that_is_empty_changes_nothing_and_one_that_is_not_there_is_refused(
    tmp_path: Path,
) -> None:
    assert load_config(["--config", write(tmp_path / "c.yaml", "# later\n")]) == load_config([])
    assert "No such file" in refused("--config", str(tmp_path / "none.yaml"))
    assert "Is a directory" in refused("--config", str(tmp_path))


def test_a_secret_that_is_too_short_is_refused_and_a_long_one_is_read(tmp_path: Path) -> None:
    short, long = write(tmp_path / "s", "x" * 15), write(tmp_path / "l", "x" * 16)
    assert "at least 16 random bytes" in refused("--secret-file", short)
    assert load_config(["--secret-file", long]).secret_file == Path(long)


def test_gpu_without_a_device_stops_with_the_sentence_that_names_the_fix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(config_module, "_CUDA_CONTROL", tmp_path / "absent")
    assert refused("--tiers", "gpu,cpu") == (
        "tiers='gpu,cpu': 'gpu' needs a CUDA device and this machine shows none;"
        " start with --tiers cpu,disk (from --tiers)"
    )


def test_gpu_with_a_device_is_taken_and_comes_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(config_module, "_CUDA_CONTROL", Path(write(tmp_path / "ctl", "")))
    config = load_config(["--tiers", "disk,cpu,gpu", "--gpu", "8GiB:1"])
    assert config.tiers == ("gpu", "cpu", "disk")
    assert (config.gpu.capacity_bytes, config.gpu.device) == (8 * GIB, 1)
    assert load_config(["--gpu", "8GiB"]).gpu.device == 0
    assert "gpu: 8GiB:1" in show(config)


def test_a_built_config_is_checked_and_cannot_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_WORKERS", "7")
    config = Settings(tiers=("disk", "cpu"), cpu_size=16 * MIB)
    assert config.tiers == ("cpu", "disk")
    assert config.workers == 32, "only load_config reads the environment"
    with pytest.raises(ValidationError, match="frozen"):
        config.workers = 8
    with pytest.raises(ValidationError, match="at least 4MiB"):
        Settings(cpu_size=1)


# --- what is derived


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


def test_disk_takes_a_size_a_path_or_both(tmp_path: Path) -> None:
    both = load_config(["--disk", "10GiB:/data/a:b"]).disk[0]
    assert (both.capacity_bytes, both.path) == (10 * GIB, Path("/data/a:b"))
    path_only = load_config(["--disk", "~/kv"]).disk[0]
    assert (path_only.capacity_bytes, path_only.path) == (4 * GIB, Path.home() / "kv")
    size_only = load_config(["--disk", "10GiB"]).disk[0]
    assert size_only.capacity_bytes == 10 * GIB
    assert size_only.path == tmp_path / "cache" / "kvstore" / "disk"
    assert load_config(["--disk", "./kv"]).disk[0].path == Path.cwd() / "kv"


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


def test_a_runtime_folder_too_deep_for_a_socket_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/" + "d" * 100)
    assert "107 bytes" in refused()


def test_insecure_lets_the_server_listen_to_other_hosts() -> None:
    config = load_config(["--listen", "0.0.0.0:0", "--http", "[::]:9000", "--insecure"])
    assert config.listen == "0.0.0.0:0"
    assert config.http == "[::]:9000"


# --- what is shown


def test_show_masks_the_password_wherever_it_stands() -> None:
    config = load_config(["--redis", SECRET_URL + "?sentinel_password=hunter2"])
    assert "redis_url: redis://***@cache.example:6379/3?***" in show(config)
    assert "hunter2" not in show(config)
    assert "hunter2" not in repr(config)


def test_a_malformed_redis_url_is_refused_without_repeating_it() -> None:
    for url in [
        "redis://:hunter2@",
        "hunter2@host",
        "redis://host:hunter2",
        "redis//u:hunter2@h:1",
    ]:
        message = refused("--redis", url, "--workers", "many")
        assert "redis_url='***'" in message
        assert "hunter2" not in message
        with pytest.raises(ValidationError) as caught:
            Settings(redis_url=url)
        assert "hunter2" not in str(caught.value)


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


def test_show_with_origins_says_where_each_value_came_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVSTORE_LOG_LEVEL", "debug")
    lines = show(*load(Settings, ["--cpu", "1GiB"])).splitlines()
    assert "cpu_size: 1GiB  # --cpu" in lines
    assert "log_level: debug  # KVSTORE_LOG_LEVEL" in lines
    assert "workers: 32  # default" in lines


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


def test_importing_the_configuration_loads_nothing_heavy() -> None:
    probe = (
        "import sys, kvstore.server.settings.settings\n"
        "heavy = {'torch', 'cupy', 'transformers', 'grpc', 'redis', 'lmdb'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- several disks


def test_several_disks_are_given_with_commas_and_repeat_the_size_before(tmp_path: Path) -> None:
    a, b, c = (tmp_path / name for name in "abc")
    disk = load_config(["--disk", f"5GiB:{a}, 6GiB:{b},{c}"]).disk
    assert [(folder.capacity_bytes, folder.path) for folder in disk] == [
        (5 * GIB, a),
        (6 * GIB, b),
        (6 * GIB, c),
    ]
    assert load_config(["--disk", ",".join(map(str, disk))]).disk == disk
    by_name = f"disk: [{{path: {a}, capacity_bytes: 5GiB}}, {{path: {b}}}]\n"
    named = load_config(["--config", write(tmp_path / "c.yaml", by_name)]).disk
    assert ",".join(map(str, named)) == f"5GiB:{a},4GiB:{b}"


def test_disks_that_cannot_be_are_refused() -> None:
    for value, why in [
        ("5GiB:/a,5GiB:/a", "name each folder once"),
        ("5GiB:/a,5GiB:/a/../a", "name each folder once"),
        ("5GiB:/a,6GiB", "give each further disk as SIZE:PATH"),
        ("5GiB:/a,", "give SIZE:PATH, SIZE or PATH"),
        (",".join(f"5GiB:/d{n}" for n in range(65)), "at most 64 folders"),
        ("5GiB:/a,1KiB:/b", "a tier has at least 4MiB"),
    ]:
        assert why in refused("--disk", value)


def test_the_codecs_of_tenants_are_read_by_tier_and_shown_as_they_were_written() -> None:
    text = "acme/redis=kvq:2,sinks=4,importance,acme/disk=raw,b.c-d_1/disk=lossless"
    rules = load_config(["--tenant-codecs", text]).tenant_codecs
    assert ",".join(map(str, rules)) == text
    assert [(rule.tenant, rule.tier, rule.codec) for rule in rules] == [
        ("acme", "redis", "kvq:2,sinks=4,importance"),
        ("acme", "disk", "raw"),
        ("b.c-d_1", "disk", "lossless"),
    ]


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


def test_auto_says_how_much_may_be_lost() -> None:
    for name, least in [
        ("auto", Accuracy.exact),
        ("auto:exact", Accuracy.exact),
        ("auto:bounded", Accuracy.bounded),
        ("auto:approximate", Accuracy.approximate),
    ]:
        assert load_config(["--codec", f"disk={name}"]).codec["disk"] == name
        assert is_auto(name)
        assert auto_accuracy(name) is least


# --- limits, and values by tier


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


def test_a_part_of_a_rule_that_is_begun_and_empty_is_refused() -> None:
    for rule in ("acme=1GiB:", "acme/=1GiB", "=1GiB"):
        with pytest.raises(InvalidRequestError, match="tenant"):
            load_config(["--tenant-quotas", rule])


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


def test_the_ten_flags_that_matter_first_are_first_in_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        load_config(["--help"])
    text = capsys.readouterr().out
    assert "--help-all lists every setting" in " ".join(text.split())
    _, _, text = text.partition("the ten that matter first:")
    assert re.findall(r"^  (--[a-z-]+)", text, re.M) == [
        "--tiers", "--cpu", "--disk", "--redis", "--listen", "--bulk", "--http", "--tls-cert",
        "--tls-key", "--auth-keys",
    ]  # fmt: skip
