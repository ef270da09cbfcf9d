"""A Portion: the rectangle of each component that one frame covers of its chunk.

Ranks of a parallel engine hold some layers (pipeline) or some KV heads (tensor parallelism) of
each chunk. What a rank writes says where it belongs in the whole, so that chunks written by any
ranks are read by any others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvstore.proto.errors import LayoutMismatchError
from kvstore.proto.types import Component, KVLayout


@dataclass(frozen=True, slots=True)
class Extent:
    """Layers and KV heads of one component; each stop is the number after the last one."""

    first_layer: int
    layer_stop: int
    first_head: int
    head_stop: int

    @classmethod
    def whole(cls, component: Component) -> Extent:
        """Return all of *component*."""
        return cls(0, component.layers, 0, component.kv_heads)

    def is_within(self, component: Component) -> bool:
        """Whether there is something of *component* in it, and nothing else."""
        return (
            0 <= self.first_layer < self.layer_stop <= component.layers
            and 0 <= self.first_head < self.head_stop <= component.kv_heads
        )

    @property
    def layers(self) -> int:
        """How many layers."""
        return self.layer_stop - self.first_layer

    @property
    def heads(self) -> int:
        """How many KV heads."""
        return self.head_stop - self.first_head


@dataclass(frozen=True, slots=True)
class Portion:
    """The extents that a frame covers of the chunk of layout ``whole``, one for each component.

    None: nothing of that component, as for a pipeline stage without layers of a group. Raises
    LayoutMismatchError when an extent is empty or reaches outside its component, or all are None.
    """

    whole: KVLayout
    extents: tuple[Extent | None, ...]

    def __post_init__(self) -> None:
        if len(self.extents) != len(self.whole.components):
            raise LayoutMismatchError(
                "rectangle", len(self.extents), f"give {len(self.whole.components)}, or None"
            )
        for extent, component in zip(self.extents, self.whole.components, strict=True):
            if extent is not None and not extent.is_within(component):
                fix = f"within {component.layers} layers x {component.kv_heads} kv_heads, not empty"
                raise LayoutMismatchError("rectangle", extent, fix)
        if not any(self.extents):
            raise LayoutMismatchError("rectangle", self.extents, "cover some of the chunk")

    @property
    def is_whole(self) -> bool:
        """Whether it covers everything."""
        return self.extents == tuple(map(Extent.whole, self.whole.components))

    @property
    def layout(self) -> KVLayout:
        """What is covered, as a layout of its own: components that are left out are not there."""
        pairs = zip(self.whole.components, self.extents, strict=True)
        return KVLayout(
            tuple(
                replace(component, layers=extent.layers, kv_heads=extent.heads)
                for component, extent in pairs
                if extent is not None
            )
        )

    @property
    def numbered(self) -> list[tuple[int, Extent]]:
        """The extents that are there, each with the number of its component."""
        return [(at, extent) for at, extent in enumerate(self.extents) if extent is not None]
