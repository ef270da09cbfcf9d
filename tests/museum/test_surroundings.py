"""What surrounds a process: proxies in its environment, addresses, standard streams, signals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from conftest import ProcessMaker

WAIT_S = 60
SOURCES = Path(__file__).resolve().parents[2] / "src"
STATUS = "import sys; from kvstore.cli.main import main; main(['status', '--address', sys.argv[1]])"


def test_grpc_9989_a_proxy_in_the_environment_does_not_cut_anybody_off(
    server_process: ProcessMaker,
) -> None:
    """grpc#9989, #11896, #15942, #29718: gRPC sent even calls to the loopback to the proxy that
    ``http_proxy`` names, for the browsers of the host, and nothing answered any more.

    Here no call goes through a proxy: a store is on the same host or in the same cluster.
    """
    server = server_process("--cpu", "16MiB", "--tiers", "cpu")
    server.start()
    nowhere = dict.fromkeys(
        ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY"), "http://127.0.0.1:9"
    )
    named = subprocess.run(
        [sys.executable, "-c", STATUS, server.address],
        env={**os.environ, "PYTHONPATH": str(SOURCES), **nowhere, "no_proxy": ""},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert (named.returncode, named.stderr) == (0, "")
    assert "serving" in named.stdout
