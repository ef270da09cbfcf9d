"""What a model of attention and recurrent layers keeps of a prefix, and what computing it costs."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kvstore.proto.errors import InvalidRequestError


@dataclass(frozen=True)
class HybridModel:
    """A stack of recurrent (Mamba2), attention and MLP layers, without grouped heads.

    The formulas are those of Marconi (Pan et al., MLSys 2025, section 5 and appendix): KV grows
    with the tokens, a recurrent state is of one size and stands for exactly one position.
    """

    name: str
    state_layers: int
    attention_layers: int
    mlp_layers: int
    width: int
    """Hidden size, D."""
    state_width: int
    """States a channel has, N."""
    element_bytes: int = 2
    conv_kernel: int = 4
    expand: int = 2

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "name" and value < 1:
                raise InvalidRequestError(field.name, value, "at least 1")

    @property
    def state_bytes(self) -> int:
        """Bytes of one checkpoint: the states and convolution windows of all recurrent layers."""
        window = self.expand * (self.width + self.state_width) * self.conv_kernel
        return self.state_layers * (self.width * self.state_width + window) * self.element_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token, over all attention layers."""
        return self.attention_layers * 2 * self.width * self.element_bytes

    @property
    def flops_per_token(self) -> int:
        """FLOPs of a prefill that grow with its tokens."""
        wide = self.width * self.width
        recurrent = 12 * wide + 16 * self.width * self.state_width + 10 * self.width
        return (
            self.state_layers * recurrent
            + self.attention_layers * 8 * wide
            + self.mlp_layers * 16 * wide
        )

    @property
    def flops_per_token_squared(self) -> int:
        """FLOPs of a prefill that grow with the square of its tokens: attention's."""
        return self.attention_layers * 4 * self.width

    def flops(self, tokens: int) -> int:
        """FLOPs of a prefill of *tokens* tokens; exact, so that sums are in any order."""
        return (self.flops_per_token + self.flops_per_token_squared * tokens) * tokens


HYBRID_7B = HybridModel("hybrid-7b", 24, 4, 28, 4096, 128)
"""NVIDIA's attention-Mamba2 hybrid of 7 B, as in Marconi's evaluation."""

HYBRID_MODELS = {model.name: model for model in (HYBRID_7B,)}
"""Models that have constants here, by name."""


def hybrid_model(name: str) -> HybridModel:
    """Return the constants of a model; raises InvalidRequestError for one that has none."""
    model = HYBRID_MODELS.get(name)
    if model is None:
        raise InvalidRequestError("model", name, f"one of {', '.join(HYBRID_MODELS)}")
    return model
