"""Lists of certificates that their authority took back, and keys that are taken out of a file."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from helpers.credentials import Authority

from kvstore.cli.doctor import check_revocations
from kvstore.proto.errors import InvalidRequestError, UnauthenticatedError
from kvstore.server.security.authenticator import Authenticator, JwtVerifier
from kvstore.server.security.certificates import (
    Revocations,
    parse_revocations,
    principal_of_certificate,
    proof_of_certificate,
)
from kvstore.server.security.key_files import WatchedFile
from kvstore.server.settings.settings import load_config

TERMS: dict[str, Any] = {"algorithm": "EdDSA", "audience": "kvstore"}


def parsed(data: bytes, ca: Authority) -> Revocations:
    return parse_revocations(data, ca.path.read_bytes())


def test_a_list_takes_back_its_own_authority_s_certificates_and_no_other_s(tmp_path: Path) -> None:
    ca, other = Authority(tmp_path), Authority(tmp_path, "other")
    bad, good = (ca.issue(name, tenant="acme")[0] for name in ("bad", "good"))
    listed = parsed(ca.revoke(bad).read_bytes(), ca)
    assert len(listed.proofs) == 1
    assert proof_of_certificate(bad.read_bytes()) in listed.proofs
    assert principal_of_certificate(bad.read_bytes()).proof in listed.proofs
    assert proof_of_certificate(good.read_bytes()) not in listed.proofs
    same_number = parsed(other.revoke(bad).read_bytes(), other)
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
            parsed(data, ca)
    assert len(parsed(right, ca).proofs) == 1


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


def test_a_signing_key_that_is_taken_out_ends_what_it_signed_and_the_next_one_goes_on(
    tmp_path: Path,
) -> None:
    old, new = (ed25519.Ed25519PrivateKey.generate() for _ in range(2))
    pems = [
        key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        for key in (old, new)
    ]
    path = tmp_path / "jwt.pem"
    path.write_bytes(b"\n".join(pems))
    verifier = WatchedFile((path,), partial(JwtVerifier, **TERMS))
    asked = Authenticator(None, verifier, takes_certificates=False)
    claims = {"sub": "e", "tenant": "acme", "roles": ["read"], "aud": "kvstore"} | {
        "exp": int(time.time()) + 60
    }
    metadata = [
        [("authorization", "Bearer " + jwt.encode(claims, key, "EdDSA"))] for key in (old, new)
    ]
    first, second = (asked.principal_of(one, {}) for one in metadata)
    assert asked.holds(first)
    assert asked.holds(second)
    path.write_bytes(pems[1])
    assert asked.refresh()
    assert not asked.holds(first)
    assert asked.holds(second)
    with pytest.raises(UnauthenticatedError):
        asked.principal_of(metadata[0], {})
    with pytest.raises(InvalidRequestError, match="at most"):
        JwtVerifier(pems[0] * 9, **TERMS)


def test_the_doctor_says_when_a_list_cannot_be_used_and_when_it_soon_cannot(
    tmp_path: Path,
) -> None:
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
