"""Settings of trust: who may call, from where, what is written down, what is encrypted."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationInfo, field_validator

from kvstore.server.security.pools import SharedPools
from kvstore.server.settings.disk_settings import absolute
from kvstore.server.settings.limit_rules import TenantLimitRules
from kvstore.server.settings.values import (
    KIB,
    MIB,
    Endpoint,
    Size,
    is_loopback,
    parse_endpoint,
    unresolved,
)

MIN_SECRET_BYTES = 16


def _readable(path: Path | None) -> Path | None:
    if path is None:
        return None
    path = absolute(path)
    if not (path.is_file() and os.access(path, os.R_OK)):
        raise ValueError("name a file that this user can read")
    return path


OwnFile = Annotated[Path | None, AfterValidator(_readable), "PATH"]


class TrustSettings(BaseModel):
    """The part of a server's configuration that is about trust."""

    tls_cert: OwnFile = Field(
        default=None,
        description="certificate chain of the gRPC service, in PEM; read again when replaced",
    )
    tls_key: OwnFile = Field(
        default=None, validate_default=True, description="its private key, in PEM"
    )
    tls_client_ca: OwnFile = Field(
        default=None,
        description="who signs callers' certificates, in PEM; with it callers need one",
    )
    tls_crl: OwnFile = Field(
        default=None,
        description="certificates of callers that are taken back, in PEM; read again when replaced",
    )
    auth_keys: OwnFile = Field(
        default=None,
        description="file of API keys, as kvstore token writes it; read again when replaced",
    )
    jwt_key: OwnFile = Field(
        default=None,
        description="public keys, or secret of HS256, that tokens are verified with",
    )
    jwt_algorithm: Literal["EdDSA", "ES256", "RS256", "HS256"] = Field(
        default="EdDSA", description="the one algorithm of tokens that is taken"
    )
    jwt_audience: Annotated[str | None, "TEXT"] = Field(
        default=None, validate_default=True, description="whom tokens must be for"
    )
    jwt_issuer: Annotated[str | None, "TEXT"] = Field(
        default=None, description="who tokens must be from; default: whoever has the key"
    )
    shared_pools: Annotated[SharedPools | None, "POOL=READERS:WRITERS"] = Field(
        default=None,
        description="chunks that several tenants share, with commas between pools",
    )
    tenant_limits: Annotated[TenantLimitRules | None, "TENANT=CHUNKS:RATE:LEASES"] = Field(
        default=None,
        description="chunks on each tier, requests a second and leases of tenants; *: all others",
    )
    audit_log: Annotated[Path | None, AfterValidator(lambda p: p and absolute(p)), "PATH"] = Field(
        default=None, description="file that says who did what; default: none"
    )
    audit_bytes: Size = Field(
        default=64 * MIB,
        ge=64 * KIB,
        description="a file of it is set aside at this size; 8 are kept",
    )
    audit_reads: bool = Field(
        default=False, description="write down lookups and gets that went well, too"
    )
    encryption_keys: OwnFile = Field(
        default=None,
        description="file of keys to encrypt disk and Redis with, as kvstore keys writes it",
    )
    secret_file: OwnFile = Field(
        default=None,
        description="file whose bytes salt the namespaces; default: none, so that whoever knows"
        " a model and a prompt can name their chunks",
    )
    insecure: bool = Field(
        default=False, description="allow other hosts to connect without TLS and authentication"
    )
    open_pages: bool = Field(
        default=False, description="allow other hosts to read --http and --health, in plain text"
    )
    http_tls: bool = Field(
        default=False,
        validate_default=True,
        description="serve --http over TLS, to admins alone where it is open to other hosts",
    )
    health: Endpoint = Field(
        default="off",
        validate_default=True,
        description="address of a second health service, in plain text, or off",
    )

    @field_validator("tls_key")
    @classmethod
    def _check_pair(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        if "tls_cert" in info.data and (path is None) != (info.data["tls_cert"] is None):
            raise ValueError("give both --tls-cert and --tls-key, or neither")
        return path

    @field_validator("tls_client_ca")
    @classmethod
    def _check_client_ca(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        if path is not None and info.data.get("tls_cert") is None:
            raise ValueError("callers show certificates over TLS only: give --tls-cert, too")
        return path

    @field_validator("tls_crl")
    @classmethod
    def _check_crl(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        if path is not None and info.data.get("tls_client_ca") is None:
            raise ValueError("it is about callers' certificates: give --tls-client-ca, too")
        return path

    @field_validator("jwt_audience")
    @classmethod
    def _check_audience(cls, audience: str | None, info: ValidationInfo) -> str | None:
        if not audience and info.data.get("jwt_key") is not None:
            raise ValueError("say whom tokens are for, or those for others are taken too")
        return audience

    @field_validator("secret_file")
    @classmethod
    def _check_secret_file(cls, path: Path | None) -> Path | None:
        if path is not None and path.stat().st_size < MIN_SECRET_BYTES:
            raise ValueError(f"put at least {MIN_SECRET_BYTES} random bytes into it")
        return path

    @field_validator("http_tls")
    @classmethod
    def _check_http_tls(cls, wanted: bool, info: ValidationInfo) -> bool:
        if wanted and not info.data.get("tls_cert"):
            raise ValueError("TLS needs a certificate: give --tls-cert and --tls-key")
        return wanted

    @field_validator("health")
    @classmethod
    def _check_health(cls, value: str, info: ValidationInfo) -> str:
        return check_endpoint(value, "health", info.data)

    @property
    def health_address(self) -> tuple[str, int] | None:
        """Host and port of the second health service; None when it is off."""
        return None if self.health == "off" else parse_endpoint(self.health)

    @property
    def asks_who_calls(self) -> bool:
        """Whether callers have to say who they are."""
        return asks_who_calls(self.__dict__)

    def read_secret(self) -> bytes:
        """Return the secret that salts the namespaces; empty when no file is named."""
        return self.secret_file.read_bytes() if self.secret_file is not None else b""


def asks_who_calls(settings: Mapping[str, Any]) -> bool:
    """Whether *settings* name a way to tell who calls."""
    return any(settings.get(name) for name in ("auth_keys", "jwt_key", "tls_client_ca"))


def check_endpoint(value: str, name: str, others: Mapping[str, Any]) -> str:
    """Return an address that may be listened on, *others* being the settings. Raises ValueError."""
    if value == "off" and name != "listen":
        return value
    host, _ = parse_endpoint(value)
    if others.get("insecure") or is_loopback(host):
        return value
    if fix := _fix_for_others(name, others):
        raise ValueError(unresolved(host) or fix)
    return value


def _fix_for_others(name: str, others: Mapping[str, Any]) -> str:
    """Return what to do before an address may be open to other hosts; empty when it may be."""
    if name != "listen":
        is_guarded = name == "http" and others.get("http_tls") and asks_who_calls(others)
        if others.get("open_pages") or is_guarded:
            return ""
        more = ", or --http-tls with a way to tell who calls" if name == "http" else ""
        return f"other hosts could read it in plain text; use 127.0.0.1, or add --open-pages{more}"
    if others.get("tls_cert") and asks_who_calls(others):
        return ""
    return (
        "other hosts could connect without TLS, or without saying who they are; give --tls-cert"
        " and one of --auth-keys, --jwt-key and --tls-client-ca, listen on 127.0.0.1, or add"
        " --insecure on a network you trust"
    )
