"""What must never be seen: secrets in logs, code that comes as data."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import jwt
from conftest import ProcessMaker
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from helpers.credentials import KeyRing
from helpers.prompts import SMALL, chunks_of, keys_of, tokens

from kvstore.client import Access, Client, ClientOptions
from kvstore.proto.errors import PermissionDeniedError, UnauthenticatedError
from kvstore.proto.types import DIGEST_BYTES
from kvstore.server.node import tenant_salts
from kvstore.server.security.key_files import next_key, write_keys
from kvstore.server.settings.settings import Settings

TESTS = Path(__file__).resolve().parents[1]


def test_nothing_that_engines_send_runs_as_code(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(TESTS / "helpers" / "audited_process.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": f"{TESTS.parent / 'src'}:{TESTS}"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["control 1"]


def test_no_log_has_a_token_a_prompt_or_a_salt(
    tmp_path: Path, server_process: ProcessMaker
) -> None:
    ring, secret_file = KeyRing(tmp_path / "api-keys"), tmp_path / "secret"
    secret_file.write_bytes(b"canary-in-the-salt" * 2)
    signer = ed25519.Ed25519PrivateKey.generate()
    public = signer.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "jwt.pem").write_bytes(public)
    log = tmp_path / "audit"
    claims = {
        "sub": "engine", "tenant": "acme", "roles": ["read"], "aud": "kv", "exp": time.time() + 99
    }  # fmt: skip
    token, bad_token = (jwt.encode(claims | {"aud": aud}, signer, "EdDSA") for aud in ("kv", "no"))
    key = ring.make("acme")
    at_rest = next_key([], os.urandom, time.time())
    write_keys(tmp_path / "at-rest", [at_rest])
    server = server_process(
        *("--auth-keys", str(ring.path), "--secret-file", str(secret_file)),
        *("--encryption-keys", str(tmp_path / "at-rest")),
        *("--jwt-key", str(tmp_path / "jwt.pem"), "--jwt-audience", "kv", "--bulk", "127.0.0.1:0"),
        *("--audit-log", str(log), "--audit-reads", "--log-level", "debug", "--cpu", "16MiB"),
        *("--disk", f"32MiB:{tmp_path / 'disk'}"),
    )
    server.start()
    proofs = [key, key[:-1] + "A", token, bad_token, "kvs_canary", "canary-token"]
    keys, attach_tokens, told = [], [], []
    for proof in proofs:
        for transport in ("shm", "tcp", "grpc"):
            options = ClientOptions(
                transport,
                chunk_tokens=16,
                deadline_ms=20_000,
                access=Access(token=proof),
            )
            with Client(server.address, SMALL, options) as client:
                try:
                    keys = keys_of(client, 7, 3)
                    attach_tokens.append(client._link.connected().session.terms.attach_token)
                    client.put_chunks(chunks_of(client, keys))
                    client.get_chunks(keys)
                    client.drain()
                except (UnauthenticatedError, PermissionDeniedError) as error:
                    told.append(str(error))
    assert server.terminate() == 0
    written = server.errors + server.output + log.read_text() + "".join(told)
    assert "PermissionDenied" in written
    assert "UnauthenticatedError" in written
    assert '"Lookup"' not in written or "acme" in written
    salt = tenant_salts(Settings(secret_file=secret_file))("acme")
    prompt = tokens(7, 48)
    hidden = [
        *proofs,
        key[17:],
        "canary-in-the-salt",
        *(form for secret in (salt, at_rest.key) for form in (secret.hex(), repr(secret)[2:-1])),
        ", ".join(map(str, prompt[:4])),
        " ".join(map(str, prompt[:4])),
        *(one[DIGEST_BYTES:].hex() for one in keys),
        *(one.hex() for one in attach_tokens),
    ]
    assert [one for one in hidden if one in written] == []
