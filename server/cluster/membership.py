"""The Membership: which nodes are alive and their addresses, through the shared Redis.

Each node periodically writes itself into a few hashes on different masters of a Cluster; one script
per hash does that, drops nodes past their TTL and returns all others. Times are on the clock of the
Redis server: the clocks of the nodes do not matter.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice

from redis.exceptions import OutOfMemoryError

from kvstore.proto.errors import InvalidRequestError, TierUnavailableError
from kvstore.tiers.redis_client import Call, RedisClient

MAX_NODES = 1024
MAX_ADDRESS_CHARS = 128
MAX_ANSWER_BYTES = 1 << 20
"""Reply limit of one hash: a row of each of MAX_NODES nodes has at most 400 bytes."""

_TAGS = (b"0", b"1", b"3")
"""Hash tags of the hashes with node addresses: slots 13907, 9842 and 1584, one in each third. A
node is known while half of the hashes that answer contain it."""

_BEAT = b"""
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local function row(stamp, rest) return string.format('%.0f', stamp) .. ' ' .. rest end
local rows = redis.call('HGETALL', KEYS[1])
local living, count, mine = {}, 0, false
for at = 1, #rows, 2 do
  local id, stamp, rest = rows[at], string.match(rows[at + 1], '^(%d+) (.*)$')
  local ttl = rest and tonumber(string.match(rest, '^(%d+) '))
  stamp = ttl and tonumber(stamp)
  if not stamp or now - stamp > ttl then
    redis.call('HDEL', KEYS[1], id)
  else
    if stamp > now then redis.call('HSET', KEYS[1], id, row(now, rest)) end
    if id == ARGV[1] then mine = rest else
      count = count + 1
      living[#living + 1] = id
      living[#living + 1] = rest
    end
  end
end
local state = 'old'
if mine and string.match(mine, '^%d+ (%d+) ') ~= ARGV[3] then state = 'taken'
elseif not mine and count >= tonumber(ARGV[5]) then state = 'full'
else
  if not mine then state = 'new' end
  redis.call('HSET', KEYS[1], ARGV[1], row(now, ARGV[2] .. ' ' .. ARGV[3] .. ' ' .. ARGV[4]))
  redis.call('EXPIRE', KEYS[1], 86400)
end
return {state, mine or '', living}
"""
"""KEYS: the hash. ARGV: node id, its TTL in ms, incarnation, addresses, most nodes. A row is
``stamp ttl incarnation addresses``; a stamp in the future, from another master, is set to now."""

_LEAVE = b"""
local row = redis.call('HGET', KEYS[1], ARGV[1])
if row and string.match(row, '^%d+ %d+ (%d+) ') == ARGV[2] then
  redis.call('HDEL', KEYS[1], ARGV[1])
end
return 1
"""

_NODE_ID = re.compile(r"[A-Za-z0-9_.:\[\]-]{1,128}")


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """A node of the fleet. ``incarnation`` changes with every start.

    ``grpc_address`` is host:port, ``bulk_address`` tcp://host:port, or empty without that channel.
    """

    node_id: str
    incarnation: int
    bulk_address: str
    grpc_address: str

    def __post_init__(self) -> None:
        if not _NODE_ID.fullmatch(self.node_id):
            fix = "use 1 to 128 of A-Z a-z 0-9 _ . : [ ] -"
            raise InvalidRequestError("node_id", self.node_id, fix)
        if not 0 < self.incarnation < 1 << 64:
            raise InvalidRequestError("incarnation", self.incarnation, "give 1 to 2^64-1")
        for name, least in (("bulk_address", 0), ("grpc_address", 1)):
            if not re.fullmatch(f"[!-~]{{{least},{MAX_ADDRESS_CHARS}}}", getattr(self, name)):
                fix = "give host:port without spaces"
                raise InvalidRequestError(name, getattr(self, name), fix)

    @classmethod
    def parse(cls, node_id: bytes, row: bytes) -> NodeAddress | None:
        """Return the node of a *row* of the hash; None for an invalid row."""
        try:
            _, incarnation, grpc, bulk = row.decode().split(" ")
            return cls(node_id.decode(), int(incarnation), "" if bulk == "-" else bulk, grpc)
        except (InvalidRequestError, ValueError):
            return None


class MembershipState(Enum):
    """State of this node in the directory."""

    unknown = "not in the directory yet"
    known = "in the directory"
    taken = "another node has this node's id"
    full = "the directory is full"


class Membership:
    """This node's membership, and the other nodes that have sent a beat within their TTL."""

    def __init__(self, link: RedisClient, prefix: str, me: NodeAddress, ttl_ms: int) -> None:
        self._link = link
        self._incarnation = me.incarnation
        self._names = [b"%b{%b}:nodes" % (prefix.encode(), tag) for tag in _TAGS]
        places = f"{me.grpc_address} {me.bulk_address or '-'}"
        self._leave = node_id, incarnation = me.node_id.encode(), b"%d" % me.incarnation
        self._row = (node_id, b"%d" % ttl_ms, incarnation, places.encode(), b"%d" % MAX_NODES)
        self.state = MembershipState.unknown
        self.rival: NodeAddress | None = None
        """The node with this node's id, if known."""
        self.living: Sequence[NodeAddress] = ()
        """The other nodes; replaced as a whole."""

    def beat(self) -> bool:
        """Renew this node and read the other living ones. Raises TierUnavailableError.

        Return whether a server had lost this node, and so may have lost entries.
        """
        calls: list[Call] = [(name, (b"EVAL", _BEAT, 1, name, *self._row)) for name in self._names]
        try:
            replies = self._link.execute(calls, reply_bytes=MAX_ANSWER_BYTES)
        except OutOfMemoryError:
            raise is_full(self._link) from None
        answers = [reply for reply in replies if not isinstance(reply, TierUnavailableError)]
        if not answers:
            raise next(reply for reply in replies if isinstance(reply, TierUnavailableError))
        states: list[bytes] = []
        rivals: list[NodeAddress | None] = []
        living: dict[NodeAddress | None, None] = {}
        for answer in answers:
            match answer:
                case [bytes(found), bytes(mine), [*cells]] if all(
                    isinstance(cell, bytes) for cell in cells
                ):
                    pairs = islice(zip(cells[::2], cells[1::2], strict=False), MAX_NODES)
                    living |= dict.fromkeys(NodeAddress.parse(*pair) for pair in pairs)
                    states.append(found)
                    if found == b"taken":
                        rivals.append(NodeAddress.parse(self._row[0], mine))
                case _:
                    fix = "unexpected reply; check what is stored at its hashes"
                    raise TierUnavailableError("redis", f"{self._link.url}: {fix}")
        self.living = [one for one in living if one and one.incarnation != self._incarnation]
        # The majority decides: a hash that lost its rows accepts any node.
        was_known = self.state is MembershipState.known
        for state in (MembershipState.taken, MembershipState.full):
            if 2 * states.count(state.name.encode()) > len(states) - (not was_known):
                self.state, self.rival = state, next(filter(None, rivals), None)
                if len(set(states)) > 1:
                    self.leave()
                return False
        self.state, self.rival = MembershipState.known, None
        return b"new" in states

    def leave(self) -> None:
        """Remove this node, so that others know at once. Raises TierUnavailableError."""
        calls = [(name, (b"EVAL", _LEAVE, 1, name, *self._leave)) for name in self._names]
        self._link.execute(calls)


def is_full(link: RedisClient) -> TierUnavailableError:
    """Return the error of a Redis that is out of memory."""
    fix = "raise its maxmemory, or let it evict (maxmemory-policy allkeys-lru)"
    return TierUnavailableError("redis", f"{link.url}: Redis is full; {fix}")
