"""Settings of blending: what is found by content, and when KV of other prompts is given out."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from kvstore.server.blending.gate_table import MAX_RATIO, GateTerms

_TERMS = GateTerms()


class BlendSettings(BaseModel):
    """The part of a server's configuration that is about blending."""

    blend_contents: Annotated[int, "N"] = Field(
        default=1 << 18, ge=0, description="contents that blending finds chunks by; 0: none"
    )
    blend_ratio: Annotated[float, "SHARE"] = Field(
        default=_TERMS.ratio,
        ge=0.0,
        le=MAX_RATIO,
        description="share of tokens to recompute that a gate of blending begins with",
    )
    blend_agreement: Annotated[float, "SHARE"] = Field(
        default=_TERMS.min_agreement,
        ge=0.0,
        le=1.0,
        description="share of tokens that full prefill would choose too, where its choice is "
        "clear, for a gate to be open",
    )
    blend_divergence: Annotated[float, "NATS"] = Field(
        default=_TERMS.max_divergence,
        gt=0.0,
        lt=100.0,
        description="KL a token from full prefill, at most, for a gate to be open",
    )
    blend_shadows: Annotated[float, "SHARE"] = Field(
        default=_TERMS.shadow_share,
        ge=0.0,
        le=1.0,
        description="share of blended requests that are compared with a full prefill",
    )

    @property
    def blend_terms(self) -> GateTerms:
        """What gates are held to."""
        return GateTerms(
            self.blend_ratio, self.blend_agreement, self.blend_divergence, self.blend_shadows
        )
