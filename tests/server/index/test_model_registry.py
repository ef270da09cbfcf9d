"""Namespaces and what they stand for: bounded, told apart by tenant, compared field by field."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.prompts import SMALL

from kvstore.proto.keys import namespace, representation_digest
from kvstore.proto.types import DType, LayerGroup, LayerKind, Model, RopeParameters
from kvstore.server.index import known_models
from kvstore.server.index.known_models import ModelNamespace, ModelRegistry, differences, nearest
from kvstore.server.security.sessions import Session

(GROUP,) = SMALL.layer_groups


def session(kind: Model = SMALL, tenant: str = "default", number: int = 1) -> Session:
    space = namespace(tenant.encode(), kind)
    digest = representation_digest(kind)
    return Session(number, tenant, f"engine {number}", kind, space, digest, b"", 0.0)


def revision(number: int) -> Model:
    return replace(SMALL, model_revision=f"{number:040x}")


def of(spaces: ModelRegistry, one: Session) -> ModelNamespace:
    found = spaces.of(one.namespace)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (replace(SMALL, adapter_digest="sha256:5f"), [("adapter_digest", "none", "sha256:5f")]),
        (
            replace(SMALL, layer_groups=(replace(GROUP, dtype=DType.float16),)),
            [("layer_groups[0].dtype", "bfloat16", "float16")],
        ),
        (
            replace(SMALL, layer_groups=(replace(GROUP, layer_ids=tuple(range(32))),)),
            [("layer_groups[0].layer_ids", "0 to 1", "0 to 31")],
        ),
        (
            replace(SMALL, rope=RopeParameters(10_000.0, 8, "linear", (("factor", 4.0),))),
            [("rope.scaling", "default", "linear"), ("rope.factors", "none", "(('factor', 4.0),)")],
        ),
        (SMALL, []),
    ],
    ids=["adapter", "dtype", "layers", "rope", "same"],
)
def test_what_differs_is_named_with_both_values(
    other: Model, found: list[tuple[str, str, str]]
) -> None:
    assert differences(SMALL, other) == found


def test_a_group_that_one_of_them_lacks_differs_in_every_field() -> None:
    more = LayerGroup(LayerKind.attention, DType.float16, (2, 3), 2, 8)
    found = differences(SMALL, replace(SMALL, layer_groups=(GROUP, more)))
    assert {one.field.partition(".")[0] for one in found} == {"layer_groups[1]"}
    assert {one.stored for one in found} == {"none"}


def test_the_nearest_come_first_and_other_tenants_not_at_all() -> None:
    spaces = ModelRegistry()
    asked = session()
    far = replace(revision(2), adapter_digest="sha256:5f")
    for one in (session(far), session(revision(1)), session(revision(3), "acme"), asked):
        spaces.note(one)
    near = nearest(of(spaces, asked), spaces.others(of(spaces, asked)))
    assert [space.representation for space, _ in near] == [revision(1), far]
    assert [len(differing) for _, differing in near] == [1, 2]


def test_the_space_whose_last_session_opened_longest_ago_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_models, "MAX_SPACES", 3)
    spaces = ModelRegistry()
    for number in (1, 2, 3, 1, 4):
        spaces.note(session(revision(number), number=number))
    kept = [space.representation for space in spaces.all()]
    assert kept == [revision(4), revision(1), revision(3)]
    assert spaces.of(session(revision(2)).namespace) is None


def test_models_of_one_tenant_do_not_push_out_those_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(known_models, "MAX_SPACES", 6)
    spaces = ModelRegistry()
    for number in range(2):
        spaces.note(session(revision(number), "acme"))
    for number in range(3_000):
        spaces.note(session(revision(number), "zeta"))
    kept = spaces.all()
    assert [space.representation for space in kept if space.tenant == "acme"] == [
        revision(1), revision(0),
    ]  # fmt: skip
    assert [space.representation for space in kept if space.tenant == "zeta"] == [
        revision(number) for number in range(2_999, 2_995, -1)
    ]
