"""What is told of a blend, on numbers done by hand, and a source that gives up by itself."""

from __future__ import annotations

import math

import pytest
import torch

from kvstore.client.blend.feedback import compare, deviations, ranks
from kvstore.client.blend.loader import LayerLoader
from kvstore.client.blend.source import MemorySource
from kvstore.proto.errors import DeadlineError, InvalidRequestError


def test_a_comparison_is_divergence_and_agreement_of_the_likeliest_token() -> None:
    full = torch.tensor([[0.0, 0.0], [3.0, 0.0]])
    blended = torch.tensor([[math.log(3.0), 0.0], [3.0, 0.0]])
    found = compare(full, blended)
    one = 0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25)
    assert found.divergence == pytest.approx(one / 2)
    assert (found.agreement, found.tokens) == (1.0, 2)
    assert compare(full, torch.tensor([[0.0, 1.0], [3.0, 0.0]])).agreement == 0.5
    assert compare(full, full).divergence == 0


@pytest.mark.parametrize(("rows", "width"), [(0, 3), (2, 4)])
def test_logits_of_other_rows_are_refused(rows: int, width: int) -> None:
    with pytest.raises(InvalidRequestError, match="the same rows"):
        compare(torch.zeros(rows, 3), torch.zeros(rows, width))


def test_deviations_add_up_over_layers_each_in_its_own_size() -> None:
    small = torch.tensor([[[1.0], [1.0]]])
    wrong = torch.tensor([[[1.0], [0.0]]])
    layers = [(small, small), (small, 10 * small)]
    stored = [(small, wrong), (small, 10 * wrong)]
    assert deviations(layers, stored).tolist() == [0.0, 2.0]


def test_ranks_are_places() -> None:
    assert ranks(torch.tensor([5.0, -1.0, 7.0, 6.0])).tolist() == [0.25, 0.0, 0.75, 0.5]


def test_a_sources_own_deadline_is_told_as_it_said_it() -> None:
    class Late(MemorySource):
        def layer(self, i: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
            raise DeadlineError("redis took too long")

    with LayerLoader(Late({}), [0], 30.0) as loader, pytest.raises(DeadlineError, match="redis"):
        loader.take()


def test_no_layer_is_taken_that_was_not_asked_for() -> None:
    with LayerLoader(MemorySource({}), [], 1.0) as loader, pytest.raises(DeadlineError):
        loader.take()
