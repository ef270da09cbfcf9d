"""Who calls: API keys, tokens, certificates and lists of those that were taken back."""

from __future__ import annotations

import base64
import hmac
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from helpers.credentials import Authority, KeyRing
from structlog.testing import capture_logs

from kvstore.cli.doctor import check_revocations
from kvstore.proto.errors import InvalidRequestError, UnauthenticatedError
from kvstore.server.security.authenticator import Authenticator, JwtVerifier
from kvstore.server.security.certificates import (
    parse_revocations,
    principal_of_certificate,
    proof_of_certificate,
    server_credentials,
)
from kvstore.server.security.key_files import ApiKeys, WatchedFile, parse_keys
from kvstore.server.security.sessions import ANYBODY
from kvstore.server.settings.settings import load_config

KEY = ed25519.Ed25519PrivateKey.generate()


def pem_of(key: ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey) -> bytes:
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


PEM = pem_of(KEY)
TERMS: dict[str, Any] = {"algorithm": "EdDSA", "audience": "kvstore", "issuer": "https://issuer"}
YEAR_S = 365 * 86_400
ENGINE = frozenset({"read", "write"})


def bearer(token: str) -> list[tuple[str, str | bytes]]:
    return [("user-agent", "x"), ("authorization", f"Bearer {token}")]


def authenticator(path: Path | None = None) -> Authenticator:
    keys = WatchedFile((path,), parse_keys, lambda: ApiKeys(())) if path else None
    return Authenticator(keys, None, takes_certificates=False)


def claims(**changes: Any) -> dict[str, Any]:
    found = {"sub": "engine-7", "tenant": "acme", "roles": "read write"} | {
        "exp": int(time.time()) + 60, "aud": "kvstore", "iss": "https://issuer",
    } | changes  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}


def authenticator_of_tokens(
    folder: Path, key: bytes = PEM, clock: Callable[[], float] = time.time, **terms: Any
) -> Authenticator:
    path = folder / "jwt.pem"
    path.write_bytes(key)
    file = WatchedFile((path,), partial(JwtVerifier, **TERMS | terms))
    return Authenticator(None, file, takes_certificates=True, wall_clock=clock)


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
    ring.path.write_text("{")  # cannot be read: the keys that were there stay
    assert not asked.refresh()
    assert asked.principal_of(bearer(second), {}).tenant == "zeta"
    assert authenticator().principal_of([], {}) is ANYBODY, "nobody is asked who calls"


def test_a_file_of_keys_that_is_deleted_revokes_them_all_and_says_so(tmp_path: Path) -> None:
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
    assert logs[0]["event"] == "key file deleted: all of its keys are revoked"
    assert not asked.holds(principal)
    with pytest.raises(UnauthenticatedError, match="revoked"):
        asked.principal_of(bearer(key), {})
    assert not asked.refresh()
    ring.path.write_bytes(rows)
    ring.path.chmod(0o600)
    assert asked.refresh()
    assert asked.holds(principal)


def test_a_file_with_a_line_that_is_no_key_or_that_others_could_change_is_refused(
    tmp_path: Path,
) -> None:
    ring = KeyRing(tmp_path / "keys")
    ring.make("acme")
    wrong: dict[str, tuple[Any, ...]] = {
        "id": ("x",), "hash": ("md5:0", 5), "roles": (["root"], [], "read"),
        "tenant": ("a b", "pool:library"), "made": ("now",), "more": (1,),
    }  # fmt: skip
    for name, value in ((name, value) for name, values in wrong.items() for value in values):
        line = json.dumps(json.loads(ring.path.read_text()) | {name: value})
        with pytest.raises(InvalidRequestError, match="line 1"):
            parse_keys(line.encode())
    ring.path.chmod(0o622)
    with pytest.raises(InvalidRequestError, match="chmod"):
        authenticator(ring.path)


def signed_by_hand(algorithm: str, secret: bytes | None) -> str:
    """Return a token that jwt refuses to make: unsigned, or an HMAC under a public key."""
    parts = [json.dumps(one).encode() for one in ({"alg": algorithm, "typ": "JWT"}, claims())]
    text = ".".join(base64.urlsafe_b64encode(p).rstrip(b"=").decode() for p in parts)
    tag = b"" if secret is None else hmac.digest(secret, text.encode(), "sha256")
    return f"{text}.{base64.urlsafe_b64encode(tag).rstrip(b'=').decode()}"


NOW_S = int(time.time())
BAD_CLAIMS: dict[str, tuple[Any, ...]] = {
    "exp": (NOW_S - 60, float("inf"), 10**400, None, NOW_S + 100 * YEAR_S, 1e308),
    "aud": ("other", None),
    "iss": ("https://other",),
    "sub": (None, "a\x1b[31mb", "a\nroot", "a" * 257),
    "tenant": (None, "pool:library"),
    "roles": (["root"],),
    "nbf": (NOW_S + 60,),
}
BAD_TOKENS = [
    *(
        jwt.encode(claims(**{name: value}), KEY, "EdDSA")
        for name, values in BAD_CLAIMS.items()
        for value in values
    ),
    signed_by_hand("none", None),
    signed_by_hand("HS256", PEM),
    signed_by_hand("EdDSA", PEM),
    jwt.encode(claims(), ed25519.Ed25519PrivateKey.generate(), "EdDSA"),
    jwt.encode(claims(), rsa.generate_private_key(65537, 2048), "RS256"),
    *("abc.def", "a" * 10_000),
]


def test_a_token_that_is_not_exactly_what_is_asked_for_is_refused(tmp_path: Path) -> None:
    asked = authenticator_of_tokens(tmp_path)
    near = jwt.encode(claims(exp=NOW_S + YEAR_S), KEY, "EdDSA")
    assert asked.principal_of(bearer(near), {}).tenant == "acme"
    for token in BAD_TOKENS * 2:  # also one that is known
        with pytest.raises(UnauthenticatedError) as caught:
            asked.principal_of(bearer(token), {})
        assert token not in str(caught.value)


def test_a_token_that_was_verified_ends_all_the_same(tmp_path: Path) -> None:
    clock = [time.time()]
    asked = authenticator_of_tokens(tmp_path, clock=lambda: clock[0])
    metadata = bearer(jwt.encode(claims(), KEY, "EdDSA"))
    known = asked.principal_of(metadata, {})
    assert asked.principal_of(metadata, {}) is known
    clock[0] += 3600
    assert not asked.holds(known)
    with pytest.raises(UnauthenticatedError, match="expired"):
        asked.principal_of(metadata, {})


def test_a_key_that_does_not_go_with_the_algorithm_is_refused() -> None:
    other = pem_of(rsa.generate_private_key(65537, 2048))
    JwtVerifier(bytes(32), "HS256", "kvstore")
    for key, algorithm in ((bytes(31), "HS256"), (b"no PEM", "EdDSA"), (other, "ES256")):
        with pytest.raises(InvalidRequestError, match="jwt_key"):
            JwtVerifier(key, algorithm, "kvstore")


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
    asked = authenticator_of_tokens(tmp_path)
    pem = Authority(tmp_path).issue("ops", tenant="acme", roles=["admin"])[0].read_bytes()
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


def test_a_certificate_whose_key_no_client_of_grpc_accepts_is_refused_at_the_start(
    tmp_path: Path,
) -> None:
    ca = Authority(tmp_path)
    for key in (KEY, ec.generate_private_key(ec.SECP521R1())):
        with pytest.raises(InvalidRequestError, match="RSA, P-256 or P-384"):
            server_credentials(*ca.issue("server", key=key), None)
    server_credentials(*ca.issue("server", key=ec.generate_private_key(ec.SECP384R1())), None)


def test_what_is_remembered_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.server.security.authenticator.REMEMBERED", 3)
    secret = os.urandom(32)
    path = tmp_path / "secret"
    path.write_bytes(secret)
    file = WatchedFile((path,), partial(JwtVerifier, **TERMS | {"algorithm": "HS256"}))
    asked = Authenticator(None, file, takes_certificates=False)
    for number in range(8):
        asked.principal_of(bearer(jwt.encode(claims(sub=str(number)), secret, "HS256")), {})
    assert file.value.principal_of.cache_info().currsize == 3  # type: ignore[attr-defined]


def test_a_list_takes_back_its_own_authority_s_certificates_and_no_other_s(tmp_path: Path) -> None:
    ca, other = Authority(tmp_path), Authority(tmp_path, "other")
    bad, good = (ca.issue(name, tenant="acme")[0] for name in ("bad", "good"))
    listed = parse_revocations(ca.revoke(bad).read_bytes(), ca.path.read_bytes())
    assert len(listed.proofs) == 1
    assert proof_of_certificate(bad.read_bytes()) in listed.proofs
    assert principal_of_certificate(bad.read_bytes()).certificate in listed.proofs
    assert proof_of_certificate(good.read_bytes()) not in listed.proofs
    same_number = parse_revocations(other.revoke(bad).read_bytes(), other.path.read_bytes())
    assert proof_of_certificate(bad.read_bytes()) not in same_number.proofs
    both = ca.revoke(bad).read_bytes() + other.revoke(good).read_bytes()
    signers = ca.path.read_bytes() + other.path.read_bytes()
    assert len(parse_revocations(both, signers).proofs) == 2


def test_a_list_that_proves_nothing_is_refused(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    cert, _ = ca.issue("bad", tenant="acme")
    right = ca.revoke(cert).read_bytes()
    forged = Authority(tmp_path, "ca2")
    forged._name = ca._name
    refused = {
        "signed": forged.revoke(cert).read_bytes(),
        "out of date": ca.revoke(cert, hours=-1).read_bytes(),
        "understood": ca.revoke(cert, critical=True).read_bytes(),
        "PEM": b"-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n",
        "1 to": b"",
        "nothing else": right + b"more",
    }
    for why, data in refused.items():
        with pytest.raises(InvalidRequestError, match=why):
            parse_revocations(data, ca.path.read_bytes())
    assert len(parse_revocations(right, ca.path.read_bytes()).proofs) == 1


def test_whoever_shows_a_revoked_certificate_is_refused_with_a_token_or_without(
    tmp_path: Path,
) -> None:
    ca = Authority(tmp_path)
    cert, _ = ca.issue("engine", tenant="acme")
    files = (ca.revoke(), ca.path)
    revocations = WatchedFile(files, parse_revocations)
    asked = Authenticator(None, None, revocations, takes_certificates=True)
    proofs = {"x509_pem_cert": [cert.read_bytes()]}
    known = asked.principal_of([], proofs)
    assert asked.holds(known)
    ca.revoke(cert)
    assert asked.refresh()
    assert not asked.holds(known)
    for metadata in ([], [("authorization", "Bearer x")]):
        with pytest.raises(UnauthenticatedError, match="revoked"):
            asked.principal_of(metadata, proofs)
    ca.revoke(hours=-1)  # cannot be used: what was there before is kept
    assert not asked.refresh()
    assert not asked.holds(known)
    renewed = {"x509_pem_cert": [ca.issue("engine", tenant="acme")[0].read_bytes()]}
    assert asked.holds(asked.principal_of([], renewed))


def test_a_caller_with_a_token_ends_with_the_certificate_beside_it(tmp_path: Path) -> None:
    ca, now = Authority(tmp_path), [time.time()]
    cert, _ = ca.issue("engine")
    revocations = WatchedFile((ca.revoke(), ca.path), parse_revocations)
    ring = KeyRing(tmp_path / "keys")
    keys = WatchedFile((ring.path,), parse_keys)
    token = bearer(ring.make("acme"))
    keys.refresh()
    asked = Authenticator(keys, None, revocations, lambda: now[0], takes_certificates=True)
    known, plain = (asked.principal_of(token, one) for one in (proofs(cert), {}))
    assert (known.name, known.tenant, known.roles) == (plain.name, "acme", ENGINE)
    assert asked.holds(known)
    now[0] += 2 * 86_400
    assert (asked.holds(known), asked.holds(plain)) == (False, True)
    with pytest.raises(UnauthenticatedError, match="expired"):
        asked.principal_of(token, proofs(cert))
    now[0] -= 2 * 86_400
    ca.revoke(cert)
    asked.refresh()
    assert (asked.holds(known), asked.holds(plain)) == (False, True)


def proofs(cert: Path) -> dict[str, list[bytes]]:
    return {"x509_pem_cert": [cert.read_bytes()]}


def test_a_signing_key_that_is_taken_out_ends_what_it_signed_and_the_next_one_goes_on(
    tmp_path: Path,
) -> None:
    keys = [ed25519.Ed25519PrivateKey.generate() for _ in range(2)]
    pems = [pem_of(key) for key in keys]
    asked = authenticator_of_tokens(tmp_path, b"\n".join(pems))
    metadata = [bearer(jwt.encode(claims(), key, "EdDSA")) for key in keys]
    first, second = (asked.principal_of(one, {}) for one in metadata)
    assert asked.holds(first)
    assert asked.holds(second)
    (tmp_path / "jwt.pem").write_bytes(pems[1])
    assert asked.refresh()
    assert not asked.holds(first)
    assert asked.holds(second)
    with pytest.raises(UnauthenticatedError):
        asked.principal_of(metadata[0], {})
    with pytest.raises(InvalidRequestError, match="at most"):
        JwtVerifier(pems[0] * 9, **TERMS)


def test_the_doctor_says_when_a_list_cannot_be_used_and_when_it_soon_cannot(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    cert, key = ca.issue("server")
    flags = ["--tls-cert", str(cert), "--tls-key", str(key), "--tls-client-ca", str(ca.path)]
    config = load_config([*flags, "--tls-crl", str(ca.revoke(cert, hours=100))])
    (found,) = check_revocations(config)
    assert (found.state, found.saw) == ("ok", "1 certificates, the list is valid for 4 days")
    ca.revoke(hours=2)
    (found,) = check_revocations(config)
    assert found.state == "warn"
    ca.revoke(hours=-1)
    (found,) = check_revocations(config)
    assert found.state == "fail"
    assert "out of date" in found.saw
    assert list(check_revocations(load_config(flags))) == []


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
