"""A guest's token: by it one server lets a client of its own read chunks of another's.

Who has the secret of a session at the other server makes one without asking it, and it can tell
without having heard of it before.
"""

from __future__ import annotations

import hashlib
import hmac
import struct

from kvstore.proto.bulk import TOKEN_BYTES, Guest

GUEST_S = 300
"""What a guest is let in for: who has lost that server's trust is out by then."""

_TERMS = struct.Struct("<Q16sI")
_PURPOSE = b"kvstore guest"


def guest_token(secret: bytes, session_id: int, namespace: bytes, until_s: int) -> bytes:
    """Return HMAC-SHA256 (RFC 2104), cut to 16 bytes, of what a guest may do under *secret*."""
    terms = _PURPOSE + _TERMS.pack(session_id, namespace, until_s)
    return hmac.new(secret, terms, hashlib.sha256).digest()[:TOKEN_BYTES]


def is_genuine(guest: Guest, secret: bytes) -> bool:
    """Whether who has *secret* let *guest* in on these terms."""
    token = guest_token(secret, guest.session_id, guest.namespace, guest.until_s)
    return hmac.compare_digest(token, guest.token)
