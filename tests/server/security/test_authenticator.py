from __future__ import annotations

import base64
import hmac
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from helpers.credentials import Authority, KeyRing
from structlog.testing import capture_logs

from kvstore.proto.errors import InvalidRequestError, KVStoreError, UnauthenticatedError
from kvstore.server.security.authenticator import Authenticator, JwtVerifier
from kvstore.server.security.certificates import principal_of_certificate, server_credentials
from kvstore.server.security.key_files import ApiKeys, WatchedFile, parse_keys
from kvstore.server.security.sessions import ANYBODY, Principal

KEY = ed25519.Ed25519PrivateKey.generate()
PEM = KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
TERMS: dict[str, Any] = {"algorithm": "EdDSA", "audience": "kvstore", "issuer": "https://issuer"}
YEAR_S = 365 * 86_400
ENGINE = frozenset({"read", "write"})


def bearer(token: str) -> list[tuple[str, str | bytes]]:
    return [("user-agent", "x"), ("authorization", f"Bearer {token}")]


def authenticator(path: Path | None = None, now: float | None = None) -> Authenticator:
    keys = None
    if path is not None:
        keys = WatchedFile((path,), parse_keys, lambda: ApiKeys(()))
    clock = time.time if now is None else (lambda: now)
    return Authenticator(keys, None, takes_certificates=False, wall_clock=clock)


def claims(**changes: Any) -> dict[str, Any]:
    found = {
        "sub": "engine-7",
        "tenant": "acme",
        "roles": "read write",
        "exp": int(time.time()) + 60,
        "aud": "kvstore",
        "iss": "https://issuer",
    } | changes
    return {name: value for name, value in found.items() if value is not None}


# --- API keys


def test_a_key_stands_for_its_tenant_and_roles_and_its_file_does_not_hold_it(
    tmp_path: Path,
) -> None:
    ring = KeyRing(tmp_path / "keys")
    key = ring.make("acme", "read")
    found = authenticator(ring.path).principal_of(bearer(key), {})
    assert (found.tenant, found.roles) == ("acme", frozenset({"read"}))
    assert found.name == f"key:{key[4:16]}"
    text = ring.path.read_text()
    assert key not in text
    assert key[17:] not in text


def test_any_change_of_a_key_is_unknown_and_is_not_repeated(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path / "keys")
    key = ring.make("acme")
    asked = authenticator(ring.path)
    for at in (4, 15, 17, len(key) - 2):
        other = key[:at] + ("0" if key[at] != "0" else "1") + key[at + 1 :]
        with pytest.raises(UnauthenticatedError) as caught:
            asked.principal_of(bearer(other), {})
        assert other not in str(caught.value)
    for metadata in ([], bearer(""), [("authorization", key)], bearer(key) + bearer(key)):
        with pytest.raises(UnauthenticatedError):
            asked.principal_of(metadata, {})


def test_keys_that_are_added_or_revoked_count_from_the_next_look_on(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path / "keys")
    first = ring.make("acme")
    asked = authenticator(ring.path)
    known = asked.principal_of(bearer(first), {})
    second = ring.make("zeta")
    ring.revoke(first)
    assert asked.refresh()
    assert not asked.refresh()
    assert asked.principal_of(bearer(second), {}).tenant == "zeta"
    assert not asked.holds(known)
    with pytest.raises(UnauthenticatedError, match="revoked"):
        asked.principal_of(bearer(first), {})


def test_a_file_that_became_unreadable_leaves_the_keys_that_were_there(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path / "keys")
    key = ring.make("acme")
    asked = authenticator(ring.path)
    ring.path.write_text("{")
    assert not asked.refresh()
    assert asked.principal_of(bearer(key), {}).tenant == "acme"


def test_a_file_of_keys_that_is_deleted_revokes_them_all_and_says_so(
    tmp_path: Path,
) -> None:
    ring = KeyRing(tmp_path / "keys")
    key = ring.make("acme")
    asked = authenticator(ring.path)
    principal = asked.principal_of(bearer(key), {})
    rows = ring.path.read_bytes()
    ring.path.unlink()
    assert not asked.refresh()  # an editor may put another in its place at once
    assert asked.holds(principal)
    with capture_logs() as logs:
        assert asked.refresh()
    assert [one["log_level"] for one in logs] == ["error"]
    assert logs[0]["event"] == "a file of keys was deleted: all of its keys are revoked"
    assert not asked.holds(principal)
    with pytest.raises(UnauthenticatedError, match="revoked"):
        asked.principal_of(bearer(key), {})
    assert not asked.refresh()
    ring.path.write_bytes(rows)
    ring.path.chmod(0o600)
    assert asked.refresh()
    assert asked.holds(principal)


def test_without_a_key_no_token_is_good() -> None:
    none = JwtVerifier(None, **TERMS)
    token = jwt.encode(claims(), KEY, "EdDSA")
    known = JwtVerifier(PEM, **TERMS).principal_of(token)
    assert known.proof not in none.keys
    with pytest.raises(UnauthenticatedError):
        none.principal_of(token)


def test_a_file_of_keys_that_is_replaced_by_an_editor_revokes_nobody_else(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path / "keys")
    key = ring.make("acme")
    asked = authenticator(ring.path)
    rows = ring.path.read_bytes()
    for _ in range(3):
        ring.path.unlink()
        assert not asked.refresh()
        ring.path.write_bytes(rows)
        ring.path.chmod(0o600)
        asked.refresh()
        assert asked.principal_of(bearer(key), {}).tenant == "acme"


NO_KEYS: tuple[dict[str, Any], ...] = (
    {"id": "x"},
    {"hash": "md5:0"},
    {"hash": 5},
    {"roles": ["root"]},
    {"roles": []},
    {"roles": "read"},
    {"tenant": "a b"},
    {"tenant": "pool:library"},
    {"made": "now"},
    {"more": 1},
)


def test_a_file_with_a_line_that_is_no_key_is_refused_by_its_number(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path / "keys")
    ring.make("acme")
    for change in NO_KEYS:
        line = json.dumps(json.loads(ring.path.read_text()) | change)
        with pytest.raises(InvalidRequestError, match="line 1"):
            parse_keys(line.encode())


def test_a_file_that_others_could_change_is_refused(tmp_path: Path) -> None:
    ring = KeyRing(tmp_path / "keys")
    ring.path.chmod(0o622)
    with pytest.raises(InvalidRequestError, match="chmod"):
        authenticator(ring.path)


def test_without_any_way_to_tell_whoever_calls_is_anybody() -> None:
    assert authenticator().principal_of([], {}) is ANYBODY


# --- tokens


def test_a_token_says_who_it_is_for_as_long_as_it_lasts() -> None:
    token = jwt.encode(claims(), KEY, "EdDSA")
    found = JwtVerifier(PEM, **TERMS).principal_of(token)
    assert (found.name, found.tenant, found.roles) == ("jwt:engine-7", "acme", ENGINE)
    assert found.expires_at >= time.time() + 50


def none_signed() -> str:
    parts = [json.dumps(one).encode() for one in ({"alg": "none", "typ": "JWT"}, claims())]
    return ".".join([base64.urlsafe_b64encode(p).rstrip(b"=").decode() for p in parts] + [""])


def signed_by_hand(algorithm: str, secret: bytes) -> str:
    """Return a token that jwt refuses to make: an HMAC under bytes that are a public key."""
    parts = [json.dumps(one).encode() for one in ({"alg": algorithm, "typ": "JWT"}, claims())]
    text = ".".join(base64.urlsafe_b64encode(p).rstrip(b"=").decode() for p in parts)
    tag = hmac.digest(secret, text.encode(), "sha256")
    return f"{text}.{base64.urlsafe_b64encode(tag).rstrip(b'=').decode()}"


BAD_TOKENS = {
    "alg none": none_signed(),
    "an HMAC under the public key": signed_by_hand("HS256", PEM),
    "an HMAC that says it is a signature": signed_by_hand("EdDSA", PEM),
    "another key": jwt.encode(claims(), ed25519.Ed25519PrivateKey.generate(), "EdDSA"),
    "another algorithm": jwt.encode(claims(), rsa.generate_private_key(65537, 2048), "RS256"),
    "expired": jwt.encode(claims(exp=int(time.time()) - 60), KEY, "EdDSA"),
    "an end that is no number": jwt.encode(claims(exp=float("inf")), KEY, "EdDSA"),
    "an end past all numbers": jwt.encode(claims(exp=10**400), KEY, "EdDSA"),
    "no end": jwt.encode(claims(exp=None), KEY, "EdDSA"),
    "another audience": jwt.encode(claims(aud="other"), KEY, "EdDSA"),
    "no audience": jwt.encode(claims(aud=None), KEY, "EdDSA"),
    "another issuer": jwt.encode(claims(iss="https://other"), KEY, "EdDSA"),
    "no subject": jwt.encode(claims(sub=None), KEY, "EdDSA"),
    "no tenant": jwt.encode(claims(tenant=None), KEY, "EdDSA"),
    "a pool for a tenant": jwt.encode(claims(tenant="pool:library"), KEY, "EdDSA"),
    "an unknown role": jwt.encode(claims(roles=["root"]), KEY, "EdDSA"),
    "not before later": jwt.encode(claims(nbf=int(time.time()) + 60), KEY, "EdDSA"),
    "a subject with an escape": jwt.encode(claims(sub="a\x1b[31mb"), KEY, "EdDSA"),
    "a subject of two lines": jwt.encode(claims(sub="a\nroot"), KEY, "EdDSA"),
    "a subject that is too long": jwt.encode(claims(sub="a" * 257), KEY, "EdDSA"),
    "no token": "abc.def",
    "too long": "a" * 10_000,
}


def test_a_token_that_is_not_exactly_what_is_asked_for_is_refused() -> None:
    for what in BAD_TOKENS:
        with pytest.raises(UnauthenticatedError) as caught:
            JwtVerifier(PEM, **TERMS).principal_of(BAD_TOKENS[what])
        assert BAD_TOKENS[what] not in str(caught.value)


def test_a_token_for_a_century_is_refused(tmp_path: Path) -> None:
    for end in [int(time.time()) + 100 * YEAR_S, 1e308]:
        path = tmp_path / "jwt.pem"
        path.write_bytes(PEM)
        verifier = WatchedFile((path,), partial(JwtVerifier, **TERMS))
        asked = Authenticator(None, verifier, takes_certificates=False)
        near = jwt.encode(claims(exp=int(time.time()) + YEAR_S), KEY, "EdDSA")
        assert asked.principal_of(bearer(near), {}).tenant == "acme"
        for _ in range(2):  # also of a token that is known
            with pytest.raises(UnauthenticatedError, match="over a year"):
                asked.principal_of(bearer(jwt.encode(claims(exp=end), KEY, "EdDSA")), {})


def test_a_token_that_was_verified_ends_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "jwt.pem"
    path.write_bytes(PEM)
    now = time.time()
    clock = [now]
    asked = Authenticator(
        None,
        WatchedFile((path,), partial(JwtVerifier, **TERMS)),
        takes_certificates=False,
        wall_clock=lambda: clock[0],
    )
    metadata = bearer(jwt.encode(claims(), KEY, "EdDSA"))
    known = asked.principal_of(metadata, {})
    assert asked.principal_of(metadata, {}) is known
    clock[0] += 3600
    assert not asked.holds(known)
    with pytest.raises(UnauthenticatedError, match="expired"):
        asked.principal_of(metadata, {})


def test_a_key_that_does_not_go_with_the_algorithm_is_refused() -> None:
    private = rsa.generate_private_key(65537, 2048).public_key()
    other = private.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    for key, algorithm in ((b"short", "HS256"), (b"no PEM", "EdDSA"), (other, "ES256")):
        with pytest.raises(InvalidRequestError, match="jwt_key"):
            JwtVerifier(key, algorithm, "kvstore")


# --- certificates


def test_a_certificate_names_tenant_and_roles_and_admin_only_in_so_many_words(
    tmp_path: Path,
) -> None:
    ca = Authority(tmp_path)
    plain, _ = ca.issue("engine", tenant="acme")
    found = principal_of_certificate(plain.read_bytes())
    assert (found.name, found.tenant, found.roles) == ("cert:engine", "acme", ENGINE)
    admin, _ = ca.issue("ops", tenant="acme", roles=["admin"])
    assert principal_of_certificate(admin.read_bytes()).roles == frozenset({"admin"})
    for cert, _ in (ca.issue("nobody"), ca.issue("odd", tenant="acme", roles=["root"])):
        with pytest.raises(UnauthenticatedError):
            principal_of_certificate(cert.read_bytes())


def test_a_certificate_that_is_known_is_no_token(tmp_path: Path) -> None:
    path = tmp_path / "jwt.pem"
    path.write_bytes(PEM)
    verifier = WatchedFile((path,), partial(JwtVerifier, **TERMS))
    asked = Authenticator(None, verifier, takes_certificates=True)
    cert, _ = Authority(tmp_path).issue("ops", tenant="acme", roles=["admin"])
    pem = cert.read_bytes()
    assert "admin" in asked.principal_of([], {"x509_pem_cert": [pem]}).roles
    with pytest.raises(UnauthenticatedError):
        asked.principal_of(bearer(pem.decode()), {})


def test_a_certificate_and_another_key_are_refused_at_the_start(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    cert, _ = ca.issue("a")
    _, key = ca.issue("b")
    with pytest.raises(InvalidRequestError, match="is not the key"):
        server_credentials(cert, key, None)
    with pytest.raises(InvalidRequestError, match="tls_client_ca"):
        server_credentials(cert, cert.with_suffix(".key"), key)


def test_nobody_is_without_a_role_that_there_is() -> None:
    for roles in [frozenset(), frozenset({"root"})]:
        with pytest.raises(KVStoreError):
            Principal("key:1", "acme", roles)


def test_what_is_remembered_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.server.security.authenticator.REMEMBERED", 3)
    path = tmp_path / "secret"
    secret = os.urandom(32)
    path.write_bytes(secret)
    terms = TERMS | {"algorithm": "HS256"}
    file = WatchedFile((path,), partial(JwtVerifier, **terms))
    asked = Authenticator(None, file, takes_certificates=False)
    for number in range(8):
        asked.principal_of(bearer(jwt.encode(claims(sub=str(number)), secret, "HS256")), {})
    assert file.value.principal_of.cache_info().currsize == 3  # type: ignore[attr-defined]


def test_who_looks_at_a_file_while_another_reads_it_has_the_new_value(tmp_path: Path) -> None:
    path, begun, go_on = tmp_path / "file", threading.Event(), threading.Event()
    path.write_bytes(b"old")

    def parse(data: bytes) -> bytes:
        if data == b"newer":
            begun.set()
            assert go_on.wait(20)
        return data

    file = WatchedFile((path,), parse)
    path.write_bytes(b"newer")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(file.refresh)
        assert begun.wait(20)
        second = pool.submit(lambda: (file.refresh(), file.value)[1])
        time.sleep(0.1)
        go_on.set()
        assert (first.result(20), second.result(20)) == (True, b"newer")
    assert not file.refresh()
