"""The rows of tables of tensors: what all kinds of statistics do with them."""

import pytest
import torch

from quantkit.calibration.moments.moment_fields import FIELDS
from quantkit.calibration.statistics.attention_statistics import AttentionStatistics
from quantkit.calibration.statistics.fields import check_fields, fields_of, sums_of
from quantkit.calibration.statistics.layer_statistics import LayerStatistics
from tests.support.artefacts import attention_sums, sums

KINDS = {"layer": (LayerStatistics, sums), "attention": (AttentionStatistics, attention_sums)}


@pytest.mark.parametrize(("kind", "taken"), KINDS.values(), ids=KINDS)
def test_sums_have_the_rows_that_are_not_derived_and_means_as_totals(kind, taken):
    kind.check_sums("a", taken(), 2)
    rows, found = fields_of(kind), sums_of(kind)
    optional = {name for name, row in rows.items() if row.optional}
    assert set(taken()) == set(found) - optional
    wider = {name for name, row in found.items() if row.dtype != rows[name].dtype}
    assert wider == {name for name in found if name.endswith("mean") or name == "second_moment"}


@pytest.mark.parametrize(("kind", "taken"), KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("targets", [[0, 0], [1, 0], [0, 1]])
def test_runs_merge_before_or_after_their_buckets(kind, taken, targets):
    first, second = (kind.of_sums(taken()) for _ in range(2))
    one = first.followed_by(second).regrouped(targets)
    two = first.regrouped(targets).followed_by(second.regrouped(targets))
    for name, tensor in one.tensors().items():
        # The average of pooled buckets forgets their order.
        if name != "moving_amax" or targets != [0, 0]:
            assert torch.equal(tensor, getattr(two, name)), name


def test_optional_fields_are_all_there_or_none():
    good = {
        "mean": torch.zeros(3),
        "second": torch.eye(3),
        "held_rows": torch.ones(5, 3, dtype=torch.bfloat16),
        "held_weights": torch.ones(5),
    }
    check_fields("a", good, FIELDS, {"K": 3})
    check_fields("a", {name: good[name] for name in ("mean", "second")}, FIELDS, {"K": 3})
    for name in good:
        with pytest.raises(ValueError, match=f"a/{name}: missing"):
            check_fields("a", {n: t for n, t in good.items() if n != name}, FIELDS, {"K": 3})
    with pytest.raises(ValueError, match="a/other: unknown"):
        check_fields("a", {**good, "other": good["mean"]}, FIELDS, {"K": 3})
