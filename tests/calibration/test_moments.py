"""Moments, statistics and masks of a file that is whole and yet wrong: refused in one line."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from quantkit.calibration.moments.held_out_rows import HeldRows
from quantkit.calibration.moments.moment_fields import FIELDS
from quantkit.calibration.moments.moment_files import HessianIndex, create_hessians
from quantkit.calibration.moments.moments import Moments
from quantkit.calibration.statistics.fields import check_fields
from quantkit.calibration.statistics.layer_statistics import (
    Calibration,
    load_calibration,
    save_calibration,
)
from quantkit.calibration.statistics.sampling import SAMPLE_ROWS
from quantkit.errors import ArtefactError, NonFiniteError
from quantkit.models.component_layers import list_layers
from quantkit.models.source import open_model
from quantkit.numerics.formats import E4M3FN
from quantkit.numerics.masks import TWO_OF_FOUR, Pattern
from quantkit.numerics.obs import factorize, falling_power, refit_rows, settle_rows
from quantkit.packing.gptq import Rounding
from quantkit.sparsity.maskfile import LayerMask, MaskSet, load_masks, pack_mask, save_masks
from quantkit.sparsity.sparsegpt import prune_layer
from quantkit.storage.artefact import read_artefact, write_artefact
from tests.support.artefacts import ABOUT, statistics
from tests.support.pipelines import tiny_transformer

NAN, INF = torch.nan, torch.inf


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def moments_of(x, held=None):
    """Return the moments of inputs (rows, K), float32."""
    return Moments((x.T @ x) / len(x), x.mean(dim=0), len(x), held)


# Second moments


@pytest.fixture(scope="module")
def layer(tmp_path_factory):
    model = open_model(str(tiny_transformer(tmp_path_factory.mktemp("m") / "pixart")))
    (component,) = model.components
    return component, next(x for x in list_layers(component) if x.k == 64)


@pytest.fixture
def stored(layer, tmp_path):
    """Return what reads moments back, after (field, change) was applied to their whole file."""
    component, one = layer
    held = HeldRows(seeded(5, one.k, seed=2).bfloat16(), torch.ones(5))
    moments = moments_of(seeded(300, one.k) + 0.5, held)
    digests = {component.name: {one.name: "a" * 64}}
    about: dict[str, Any] = dict.fromkeys(("recipe", "prompts_digest", "weighting"), "")
    about |= dict.fromkeys(("prompts", "held_out", "steps", "seed", "batch"), 1)
    index = HessianIndex(digests, guidance=None, row_share=1.0, versions={}, **about)
    hessians = create_hessians(tmp_path / "h", index)
    hessians.write(component.name, one.name, moments)
    file = hessians.file_of(component.name, one.name)

    def read(field=None, change=None):
        tensors, entry = read_artefact(file, "quantkit_hessian")
        if field in tensors:
            tensors[field] = change(tensors[field])
        elif field is not None:
            entry[field] = change
        # The checksum is redone: only what it says can tell.
        write_artefact(file, "quantkit_hessian", tensors, entry, force=True)
        return hessians.read(component, one)

    return read


def changed(place, value):
    def change(tensor):
        tensor = tensor.clone()
        tensor[place] = value
        return tensor

    return change


WRONG_MOMENTS = {
    "nan on the diagonal": ("second", changed((3, 3), NAN), "second: NaN or Inf"),
    "nan beside it": ("second", changed((60, 3), NAN), "second: NaN or Inf"),
    "inf": ("second", changed((0, 0), INF), "second: NaN or Inf"),
    "minus inf": ("second", changed((0, 0), -INF), "second: NaN or Inf"),
    "negative power": (
        "second",
        changed((63, 63), -0.5),
        "mean: the power .* is -0.5, below 0",
    ),
    "not symmetric": ("second", changed((0, 63), 0.4), "second: not symmetric"),
    "not symmetric below": ("second", changed((63, 0), 0.4), "second: not symmetric"),
    "beyond the powers": ("second", changed((5, 6), 9.0), "second: an entry larger"),
    "beyond the powers, negative": ("second", changed((5, 6), -9.0), "second: an entry larger"),
    "float64": ("second", torch.Tensor.double, "second: torch.float64, expected torch.float32"),
    "other shape": ("second", lambda t: t[:-1], r"second: shape \(63, 64\), expected \(64, 64\)"),
    "nan mean": ("mean", changed(7, NAN), "mean: NaN or Inf"),
    "mean beyond its power": ("mean", changed(7, 5.0), "mean: larger than the root mean square"),
    "mean below it": ("mean", changed(7, -5.0), "mean: larger than the root mean square"),
    "held nan": ("held_rows", changed((4, 63), NAN), "held_rows: NaN or Inf"),
    "held in float32": (
        "held_rows",
        torch.Tensor.float,
        "held_rows: torch.float32, expected",
    ),
    "held rows missing": (
        "held_rows",
        lambda t: t[:2],
        r"held_weights: shape \(5,\), exp",
    ),
    "negative weight": ("held_weights", changed(0, -1.0), "held_weights: below 0"),
    "zero weights": ("held_weights", torch.zeros_like, "held_weights: all zero"),
    "nan weight": ("held_weights", changed(0, NAN), "held_weights: NaN or Inf"),
    "no rows": ("rows", 0, "rows 0, expected the number of rows seen"),
    "negative rows": ("rows", -4, "rows -4"),
    "rows in words": ("rows", "300", "rows '300'"),
    "half a row": ("rows", 0.5, "rows 0.5"),
    "digest of a list": ("source_digest", [1], "collect the hessians of this model"),
}


def test_moments_of_inputs_are_read_to_the_bit(stored, layer):
    found = stored()
    assert torch.equal(found.second, moments_of(seeded(300, layer[1].k) + 0.5).second)
    assert found.rows == 300
    assert len(found.held.weights) == 5


@pytest.mark.parametrize(("field", "change", "words"), WRONG_MOMENTS.values(), ids=WRONG_MOMENTS)
def test_moments_that_no_input_has_are_refused(stored, field, change, words):
    with pytest.raises(ArtefactError, match=words) as caught:
        stored(field, change)
    assert "\n" not in str(caught.value)


ODD_INPUTS = {
    "constant": torch.full((50, 8), 3.7),
    "nearly constant": 1000 + 1e-3 * seeded(5000, 8),
    "dead columns": seeded(100, 8) * torch.tensor([1.0, 0, 1, 0, 0, 1, 1, 0]),
    "all dead": torch.zeros(10, 8),
    "one row": seeded(1, 8),
    "squares underflow": seeded(100, 8) * torch.tensor([1e-30, 1e-22, 1e-19, 1, 1, 1e3, 1e-45, 1]),
    "large": seeded(100, 8) * 1e15,
    "opposite signs": seeded(100, 1) @ torch.tensor([[1.0, -1, 1, -1, 2, -2, 3, -3]]),
    "no columns": torch.zeros(4, 0),
}


@pytest.mark.parametrize("x", ODD_INPUTS.values(), ids=ODD_INPUTS)
def test_moments_of_odd_inputs_pass(x):
    moments = moments_of(x)
    check_fields("a", moments.tensors(), FIELDS, {})


@pytest.mark.parametrize(
    ("product", "is_moment"), [(1.001, True), (1.0011, False), (1.5, False), (-1.5, False)]
)
def test_products_are_no_larger_than_their_powers_but_for_rounding(product, is_moment):
    second = torch.eye(3)
    second[0, 2] = second[2, 0] = torch.tensor(1.0) * product
    tensors = {"second": second, "mean": torch.zeros(3)}
    if is_moment:
        check_fields("a", tensors, FIELDS, {})
        return
    with pytest.raises(ValueError, match="an entry larger"):
        check_fields("a", tensors, FIELDS, {})


def test_scaled_inputs_have_the_scaled_moments():
    x, factor = seeded(300, 8) + 0.5, torch.tensor([0.25, 0.5, 1, 2, 4, 3, 0.1, 7])
    found, wanted = moments_of(x).smoothed(factor), moments_of(x * factor)
    torch.testing.assert_close(found.second, wanted.second)
    torch.testing.assert_close(found.mean, wanted.mean)


def test_large_matrices_are_checked_to_their_last_row(monkeypatch):
    monkeypatch.setattr("quantkit.calibration.moments.moment_fields._ELEMENTS", 3 * 20)
    moments = moments_of(seeded(100, 20))
    check_fields("a", moments.tensors(), FIELDS, {})
    for i in range(20):
        for words, wrong in (("symmetric", 0.5), ("an entry larger", 50.0)):
            second = moments.second.clone()
            second[i, (i + 7) % 20] += wrong
            if words != "symmetric":
                second[(i + 7) % 20, i] += wrong
            with pytest.raises(ValueError, match=words):
                check_fields("a", {**moments.tensors(), "second": second}, FIELDS, {})


# The loop that damps them


NOT_FINITE = {
    "nan": torch.full((6, 6), NAN),
    "inf": torch.eye(6) * INF,
    "nan beside the diagonal": changed((2, 4), NAN)(torch.eye(6)),
    "inf beside the diagonal": changed((2, 4), INF)(torch.eye(6)),
    "one nan on the diagonal": changed((3, 3), NAN)(torch.eye(6)),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("damping", [1e-9, 1e-3, 10.0])
@pytest.mark.parametrize("moment", NOT_FINITE.values(), ids=NOT_FINITE)
def test_factoring_what_is_not_finite_ends(moment, damping):
    with pytest.raises(NonFiniteError, match="second moments: NaN, Inf or all zero"):
        factorize(moment, damping=damping)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("damping", [1e-9, 1e-3])
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e30])
@pytest.mark.parametrize("k", [2, 5, 40])
def test_the_worst_of_symmetric_matrices_is_damped_away(k, size, damping):
    # All inputs opposite to all others: eigenvalue 2 - K, as far below zero as entries allow.
    moment = size * (2 * torch.eye(k) - torch.ones(k, k))
    factor = factorize(moment, damping=damping)
    assert bool((factor.pivots > 0).all())
    values, mask = settle_rows(seeded(3, k), factor)
    assert bool(values.isfinite().all())
    assert bool(mask.all())


SINGULAR = {
    "one input": torch.ones(16, 16),
    "two inputs": seeded(2, 16).T @ seeded(2, 16),
    "copies": torch.kron(torch.eye(4), torch.ones(4, 4)),
    "nearly singular": torch.ones(16, 16) + 1e-7 * torch.eye(16),
    "mean a thousand times the spread": moments_of(1000 + seeded(400, 16)).covariance,
    "ranges of 12 decades": torch.diag(torch.logspace(-6, 6, 16)),
    "dead but for one": torch.diag(torch.tensor([0.0] * 15 + [1.0])),
}


@pytest.mark.parametrize("damping", [1e-9, 1e-2])
@pytest.mark.parametrize("moment", SINGULAR.values(), ids=SINGULAR)
def test_nearly_singular_moments_leave_weights_of_their_size(moment, damping):
    rows = seeded(4, 16, seed=3)
    for order in (None, falling_power(moment, 4)):
        factor = factorize(moment, damping=damping, order=order)
        values, mask = settle_rows(rows, factor, mask=TWO_OF_FOUR)
        refitted = refit_rows(rows, values, mask, moment, damping=1e-2, steps=30)
        for found in (values, refitted):
            assert bool(found.isfinite().all())
            # One weight may stand for all sixteen.
            assert float(found.abs().max()) <= 16 * float(rows.abs().max())
        assert torch.equal(mask.reshape(-1, 4).sum(dim=1), torch.full((16,), 2))


def test_weights_that_are_not_finite_are_refused_wherever_they_come_up():
    x = seeded(100, 8)
    rounding = Rounding(moments_of(x), centred=False)
    broken = Rounding(replace(moments_of(x), second=moments_of(x).second * NAN), centred=False)
    mask = torch.tensor([[True, True, False, False] * 2])
    with pytest.raises(NonFiniteError, match="collect the hessians again"):
        broken.update(seeded(1, 8), mask)
    with pytest.raises(NonFiniteError, match="collect the hessians again"):
        rounding.round(torch.full((1, 8), NAN), None, torch.ones(1, 1), E4M3FN)
    with pytest.raises(NonFiniteError, match="collect the hessians again"):
        prune_layer(torch.full((1, 8), INF), moments_of(x), TWO_OF_FOUR, bias=False)


REAL = ("amax", "second_moment", "channel_amax", "mean", "samples")

WIDE = ("histogram", "moving_amax", "sample_priority")

COUNTS = ("count", "updates", "sample_count")


@pytest.fixture
def reload(tmp_path):
    path = tmp_path / "c.safetensors"

    def reload(field=None, change=None, **about):
        calibration = Calibration({"unet": {"a": statistics()}}, (500.0,), ABOUT)
        save_calibration(calibration, path, force=True)
        tensors, entry = read_artefact(path, "quantkit_calibration")
        if field is not None:
            tensors[f"unet/a/{field}"] = change(tensors[f"unet/a/{field}"])
        entry |= about
        write_artefact(path, "quantkit_calibration", tensors, entry, force=True)
        return load_calibration(path)

    return reload


def refused(call, words):
    with pytest.raises(ArtefactError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_statistics_are_read_to_the_bit(reload):
    found, wanted = reload().layers["unet"]["a"], statistics()
    for field in (*REAL, *WIDE, *COUNTS):
        assert torch.equal(getattr(found, field), getattr(wanted, field))


@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("field", [*REAL, *WIDE])
def test_statistics_that_are_not_finite_are_refused(reload, field, value):
    refused(lambda: reload(field, changed(-1, value)), rf"unet/a/{field}: NaN or Inf")


@pytest.mark.parametrize("field", [*REAL[:3], *WIDE, *COUNTS])
def test_sizes_and_counts_below_zero_are_refused(reload, field):
    refused(lambda: reload(field, changed(-1, -1)), rf"unet/a/{field}: below 0")


@pytest.mark.parametrize("field", [*REAL, *WIDE, *COUNTS])
def test_statistics_of_another_dtype_or_shape_are_refused(reload, field):
    refused(lambda: reload(field, torch.Tensor.half), rf"unet/a/{field}: torch.float16, expected")
    refused(lambda: reload(field, lambda t: t[:1]), r"unet/a/.*: shape \(1,.*\), expected \(2,")
    refused(lambda: reload(field, lambda t: t[0, ..., 0] if t.ndim > 1 else t[0]), "damaged")


def test_samples_that_do_not_go_with_the_rest_are_refused(reload):
    refused(lambda: reload("samples", lambda t: t[..., :-1].contiguous()), "do not fit 4 channels")
    refused(lambda: reload("sample_count", changed(1, SAMPLE_ROWS + 1)), "sample_count: above")


WRONG_EDGES = {
    "equal": [500.0, 500.0],
    "falling": [500.0, 400.0],
    "nan": [NAN],
    "inf": [INF],
    "minus inf": [-INF],
    "missing": [None],
    "no list": 5,
}


@pytest.mark.parametrize("edges", WRONG_EDGES.values(), ids=WRONG_EDGES)
def test_edges_that_leave_a_bucket_empty_are_refused(reload, edges):
    refused(lambda: reload(edges=edges), "damaged")


# Masks


def rewritten(path, mask, pattern=TWO_OF_FOUR, error=0.1, **about):
    bits = mask if mask.dtype != torch.bool else pack_mask(mask)
    masks = MaskSet({"unet": {"a": LayerMask(bits, pattern, "0" * 64, 0.1)}}, "magnitude", pattern)
    save_masks(masks, path, force=True)
    tensors, entry = read_artefact(path, "quantkit_masks")
    entry["layers"]["unet"]["a"]["error"] = error
    write_artefact(path, "quantkit_masks", tensors, entry | about, force=True)
    return load_masks(path)


@pytest.mark.parametrize("pattern", [(2, 4), (1, 4), (4, 8), (1, 2), (3, 16), (2, 3)], ids=str)
def test_masks_of_every_width_are_read(tmp_path, pattern):
    n, m = pattern
    for groups in (1, 2, 3, 5):
        mask = torch.tensor([[True] * n + [False] * (m - n)] * 6).reshape(2, -1).repeat(1, groups)
        found = rewritten(tmp_path / "m", mask, Pattern(n, m)).layers["unet"]["a"]
        assert torch.equal(found.dense(*mask.shape), mask)


@pytest.mark.parametrize("place", range(32))
@pytest.mark.parametrize("m", [2, 4, 8])
def test_no_bit_of_a_mask_may_be_wrong(tmp_path, place, m):
    mask = torch.tensor([True, False] * 16).reshape(2, 16)
    mask.view(-1)[place] ^= True
    if (
        m == 2 and place % 16 == 14
    ):  # an empty last group: it could lie beyond K, which packing sees
        mask.view(-1)[place + 1 - 14] ^= True
    refused(lambda: rewritten(tmp_path / "m", mask, Pattern(m // 2, m)), "does not keep")


def test_masks_of_another_kind_are_refused(tmp_path):
    good = torch.tensor([[True, True, False, False] * 2])
    refused(lambda: rewritten(tmp_path / "m", pack_mask(good).int()), "expected uint8 of 2")
    refused(lambda: rewritten(tmp_path / "m", pack_mask(good)[0]), "of 1 axes, expected")
    for error in (NAN, INF, -0.5, "0.1", None):
        refused(
            lambda error=error: rewritten(tmp_path / "m", good, error=error), "expected a share"
        )
    refused(lambda: rewritten(tmp_path / "m", good, pattern=TWO_OF_FOUR, decisions=5), "damaged")
    refused(lambda: rewritten(tmp_path / "m", good, layers=[]), "damaged")
