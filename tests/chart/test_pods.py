"""The rendered pods started for real: their arguments in a sandbox like theirs, and its probes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from chart.rendered import CHART, ROOT, Helm, Manifest, container, of_kind, settings, workload
from grpc_health.v1 import health_pb2, health_pb2_grpc
from helpers.credentials import Authority, KeyRing
from helpers.redis_process import free_port

HOST = "x-kvstore.kv.svc"
USER = 10001
START_S = 60.0
SMALL = ("--set", "tiers.cpu.size=64MiB,tiers.disk.size=64MiB")


class Sandbox:
    """What a pod has of a machine: the image read-only, its volumes, one user, no rights."""

    def __init__(self, bwrap: Path, folder: Path) -> None:
        self._bwrap = bwrap
        self._folder = folder
        hosts = folder / "hosts"
        hosts.write_text(f"127.0.0.1 localhost {HOST}\n")
        self._image = [
            *("--ro-bind", "/usr", "/usr", "--ro-bind", sys.base_prefix, sys.base_prefix),
            *("--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"),
            *("--symlink", "usr/bin", "/bin", "--proc", "/proc"),
            *("--dir", "/etc", "--ro-bind", str(hosts), "/etc/hosts"),
            *("--dev", "/dev", "--setenv", "HOME", "/nonexistent"),
            *("--setenv", "PATH", f"{ROOT}/.venv/bin:/usr/bin"),
        ]
        self._rights = [
            *("--unshare-user", "--uid", str(USER), "--gid", str(USER), "--unshare-pid"),
            *("--unshare-ipc", "--cap-drop", "ALL", "--new-session", "--die-with-parent"),
            "--clearenv",
        ]

    def command(self, spec: Manifest, volumes: dict[str, Path]) -> list[str]:
        """Return the command line of a pod's container; *volumes* are what is mounted."""
        mounts: list[str] = []
        for mount in spec["volumeMounts"]:
            kind = "--ro-bind" if mount.get("readOnly") else "--bind"
            mounts += [kind, str(volumes[mount["name"]]), mount["mountPath"]]
        words = [*spec["command"], *spec["args"]]
        return [
            *map(str, (self._bwrap, *self._rights, *self._image, *mounts)),
            # Behind the mounts: the checkout may be below /tmp, which is one of them.
            *("--ro-bind", str(ROOT), str(ROOT), "--remount-ro", "/", *words),
        ]

    def folder(self, name: str) -> Path:
        """Return an empty volume."""
        path = self._folder / name
        path.mkdir(mode=0o700)
        return path


@pytest.fixture
def sandbox(tool: Callable[[str], Path], tmp_path: Path) -> Sandbox:
    bwrap = tool("bwrap")
    works = subprocess.run(
        [bwrap, "--unshare-user", "--ro-bind", "/", "/", "true"], capture_output=True, check=False
    )
    if works.returncode:
        pytest.skip(f"this machine lets nobody make a user namespace: {works.stderr!r}")
    return Sandbox(bwrap, tmp_path)


class Release:
    """A rendered release, with the secrets that its values name."""

    def __init__(self, helm: Helm, sandbox: Sandbox, folder: Path) -> None:
        self.ports = {name: free_port() for name in ("grpc", "bulk", "health", "http")}
        ports = ",".join(f"ports.{name}={port}" for name, port in self.ports.items())
        values = CHART / "ci" / "monitoring-values.yaml"
        names = ("--set", "fullnameOverride=x-kvstore")
        self.manifests = helm.of_values(values, *SMALL, *names, "--set", ports)
        authority = Authority(folder)
        cert, key = authority.issue("server", hosts=(HOST,))
        ring = KeyRing(folder / "keys.jsonl")
        token = ring.make("acme", "read", "write")
        tls, auth = sandbox.folder("tls"), sandbox.folder("auth")
        for path, target in ((cert, "tls.crt"), (key, "tls.key"), (authority.path, "ca.crt")):
            (tls / target).write_bytes(path.read_bytes())
        (auth / "keys").write_bytes(ring.path.read_bytes())
        config, ca, given = (sandbox.folder(name) for name in ("config", "ca", "token"))
        (config / "kvstore.yaml").write_text(yaml.safe_dump(settings(self.manifests)))
        (ca / "ca.crt").write_bytes(authority.path.read_bytes())
        (given / "token").write_text(token)
        empty = {name: sandbox.folder(name) for name in ("own", "tmp", "data")}
        self.server_volumes = {"config": config, "tls": tls, "auth": auth, **empty}
        self.test_volumes = {"ca": ca, "token": given, "tmp": sandbox.folder("tmp-test")}

    def probe(self, name: str) -> str:
        """Return what a probe of the server's container answers: its state, or the error."""
        asked = container(self.manifests)[f"{name}Probe"]["grpc"]
        with grpc.insecure_channel(f"127.0.0.1:{asked['port']}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service=asked["service"])
            try:
                status = stub.Check(request, timeout=2).status
            except grpc.RpcError as error:
                return str(error.code().name)
            return str(health_pb2.HealthCheckResponse.ServingStatus.Name(status))


@contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until_ready(release: Release, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + START_S
    while release.probe("startup") != "SERVING":
        if process.poll() is not None:
            _, err = process.communicate()
            pytest.fail(f"it ended with {process.returncode}: {err}")
        assert time.monotonic() < deadline, "no answer to its startup probe"
        time.sleep(0.1)


def server_pid(process: subprocess.Popen[str]) -> int:
    """Return the server itself, below the sandbox that waits for it."""
    below = process.pid
    while True:
        text = Path(f"/proc/{below}/task/{below}/children").read_text().split()
        if not text:
            return below
        below = int(text[0])


def test_the_pod_starts_answers_its_probes_and_passes_helm_test(
    helm4: Helm, sandbox: Sandbox, tmp_path: Path
) -> None:
    release = Release(helm4, sandbox, tmp_path)
    server = container(release.manifests)
    with started(sandbox.command(server, release.server_volumes)) as process:
        until_ready(release, process)
        assert [release.probe(name) for name in ("liveness", "readiness")] == ["SERVING"] * 2
        (pod,) = of_kind(release.manifests, "Pod")
        (bench,) = pod["spec"]["containers"]
        done = subprocess.run(
            sandbox.command(bench, release.test_volumes),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "8 stored, 8 verified" in done.stdout
        (release.test_volumes["token"] / "token").write_text("kvs_000000000000_wrong")
        wrong = subprocess.run(
            sandbox.command(bench, release.test_volumes),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert wrong.returncode == 3
        os.kill(server_pid(process), signal.SIGTERM)
        out, err = process.communicate(timeout=server_grace_s(release))
        assert process.returncode == 0, err
        assert "stopped clean=true" in out


def server_grace_s(release: Release) -> float:
    spec: dict[str, Any] = workload(release.manifests)["spec"]["template"]["spec"]
    return float(spec["terminationGracePeriodSeconds"])
