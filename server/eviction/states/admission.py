"""Which positions of a request are worth a state: where sequences part, and where they end."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.server.eviction.states.tree import CheckpointTree, Match, Node, Tokens


@dataclass(frozen=True)
class Checkpoints:
    """The positions of one request whose states are to be kept: two at most."""

    leaves: Node
    """Where the request leaves what was known; the root if it shares nothing."""
    last: Node
    """Where it ends."""
    branch: Node | None
    """The first of these, if it is a position the request computes and has no state yet."""
    end: Node | None
    """The second, after the last decoded token; None if that was reused itself."""

    @property
    def nodes(self) -> list[Node]:
        """Those that there are, the deeper one last."""
        return [node for node in (self.branch, self.end) if node is not None]


def insert_speculatively(
    tree: CheckpointTree, match: Match, tokens: Tokens, reused: int
) -> Checkpoints:
    """Make *tokens*, input and output, known, and say which states the request should leave.

    The judicious admission of Marconi (Pan et al., MLSys 2025, section 4.2): input that many
    requests share is found where a sequence leaves another, so the state there is kept; a
    conversation goes on after the last decoded token, so that state is kept; no other is.
    Sequences whose states went are in the tree as well, which finds a shared part at its second
    sight even if nothing of the first is resident. A state can be had only where the request
    computes: deeper than the *reused* tokens it did not.
    """
    leaves, end = tree.extend(match, tokens)
    parts = leaves != end and leaves.children > 1
    computed = leaves.depth > reused and leaves != tree.root
    branch = leaves if parts and computed and not leaves.held else None
    return Checkpoints(leaves, end, branch, end if end.depth > reused else None)
