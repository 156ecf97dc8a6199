"""What a model asks of its files: which modules can be packed, which shapes, how many modules."""

from pathlib import Path

import pytest
from torch import nn

from quantkit.models.skeleton import Contents, Skeleton, misfits, some, why_not_packed


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.Linear(4, 4), ""),
        (nn.Conv2d(4, 4, 3), ""),
        (nn.Conv2d(4, 4, 3, groups=2), "Conv2d with padding_mode 'zeros' and groups 2"),
        (
            nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
            "Conv2d with padding_mode 'reflect' and groups 1",
        ),
        (nn.LayerNorm(4), "the model has a LayerNorm here, expected Linear or Conv2d"),
        (nn.Conv1d(4, 4, 3), "the model has a Conv1d here, expected Linear or Conv2d"),
    ],
    ids=["linear", "conv", "groups", "reflect", "norm", "conv1d"],
)
def test_which_modules_can_be_packed(module, reason):
    found = why_not_packed(module)
    assert found.startswith(reason)
    assert bool(found) == bool(reason)


@pytest.mark.parametrize(
    ("found", "line"),
    [
        ((4, 4), None),
        ((2, 4), "a: packed from [2, 4], the model has [4, 4]"),
        ((8, 4), "a: packed from [8, 4], the model has [4, 4]"),
        ((4, 4, 1, 1), "a: packed from [4, 4, 1, 1], the model has [4, 4]"),
    ],
)
def test_packed_layers_have_the_shape_of_the_model(found, line):
    model = Skeleton("M", {"a": ""}, {"a.weight": (4, 4)}, ("sample",))
    lines = list(misfits(Contents(Path("f"), {"a": False}, {"a.weight": found}), model))
    assert len(lines) == (line is not None)
    assert all(line in found for found in lines)


@pytest.mark.parametrize(
    ("count", "tail"),
    [(1, "00"), (8, ", 07"), (9, ", 07 and 1 more"), (10, ", 07 and 2 more"), (30, " and 22 more")],
)
def test_some_names_stand_for_many(count, tail):
    text = some(f"{i:02d}" for i in reversed(range(count)))
    assert text.endswith(tail)
    assert text.count(",") == min(count, 8) - 1
