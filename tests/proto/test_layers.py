"""The order of layers is the model's, wherever their segments lie."""

from __future__ import annotations

from dataclasses import replace

from contracts.chunks import make_representation

from kvstore.proto.types import DType, LayerGroup, LayerKind, layer_order


def test_layers_of_one_group_lie_in_their_order() -> None:
    assert layer_order(make_representation(layers=3)) == ((0, 0), (1, 1), (2, 2))


def test_layers_of_groups_that_alternate_are_found_by_their_number() -> None:
    groups = (
        LayerGroup(LayerKind.attention, DType.bfloat16, (0, 4, 9), 2, 8),
        LayerGroup(LayerKind.mla, DType.float16, (3, 5), 1, 24),
    )
    model = replace(make_representation(), layer_groups=groups)
    assert layer_order(model) == ((0, 0), (3, 3), (4, 1), (5, 4), (9, 2))
