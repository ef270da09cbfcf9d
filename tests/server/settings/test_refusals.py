"""What a server's configuration refuses, and in which words."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.settings import refused, write
from pydantic import ValidationError

from kvstore.server.settings import settings as config_module
from kvstore.server.settings.settings import Settings, load_config
from kvstore.server.settings.values import Limits

BAD_VALUES = [
    (["--tiers", "cpu,tape"], ["tiers='cpu,tape'", "cpu, disk, redis, gpu", "--tiers"]),
    (["--tiers", "cpu,cpu"], ["tiers", "once"]),
    (["--tiers", "disk"], ["tiers='disk'", "add cpu", "served from CPU memory"]),
    (["--tiers", "cpu,redis"], ["redis_url=None", "--redis redis://host:6379/0"]),
    (["--redis", "http://h"], ["redis_url", "redis://host:6379/0"]),
    (["--directory"], ["redis_url=None", "--redis redis://host:6379/0"]),
    (["--peers", "directory"], ["peers='directory'", "add --directory and --redis"]),
    (["--limits", "blend_ratio=nan"], ["limits.blend_ratio='nan'", "finite"]),
    (["--directory", "--redis", "redis://h", "--listen", "0.0.0.0:1", "--insecure"],
     ["listen='0.0.0.0:1'", "--advertise HOST"]),
    (["--node-id", "a b"], ["node_id='a b'"]),
    (["--redis-prefix", "a b"], ["redis_prefix='a b'"]),
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
    (["--codec", "disk=mixed:1"], ["codec='disk=mixed:1'", "mixed is gone; use kvq:N,importance"]),
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
    (["--jwt-key", __file__], ["jwt_audience", "whom"]),
    (["--auth-keys", "/nowhere"], ["auth_keys", "read"]),
    (["--shared-pools", "library"], ["shared_pools", "POOL="]),
    (["--shared-pools", "a=*,a=b"], ["shared_pools", "once"]),
    (["--tenant-limits", "acme=1"], ["tenant_limits", "TENANT="]),
    (["--tenant-limits", "*=1:0:0"], ["tenant_limits", "named"]),
    (["--socket-path", "here.sock"], ["socket_path='here.sock'", "absolute path"]),
    (["--socket-path", "/" + "x" * 110], ["socket_path", "107 bytes", "shorten"]),
    (["--secret-file", "/no/such/file"], ["secret_file", "/no/such/file", "can read"]),
    (["--max-frame-bytes", "2GiB"], ["max_frame_bytes='2GiB'", "less than or equal to 1073741824"]),
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
        "adapt_tenants": "any more; use --policy hit_density",
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
