"""Rounding by second moments, in the inputs that a smoothed layer reads."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quantkit.calibration.moments.held_out_rows import HeldRows
from quantkit.calibration.moments.moments import Moments
from quantkit.errors import NonFiniteError
from quantkit.numerics.formats import E4M3FN, INT4, INT8
from quantkit.numerics.obs import Grid, expected_error, factorize, falling_power, settle_rows
from quantkit.numerics.scales import cast
from quantkit.packing.gptq import Rounder, Rounding

K = 48
LAYER: Any = SimpleNamespace(name="fc")


def inputs():
    """Return correlated rows with a mean, (400, K)."""
    g = torch.Generator().manual_seed(0)
    return torch.randn(400, K, generator=g) @ torch.randn(K, K, generator=g) / K**0.5 + 0.3


def rounder(x, *, centred):
    moments = Moments(x.T @ x / len(x), x.mean(dim=0), len(x))
    hessians: Any = SimpleNamespace(read=lambda component, layer: moments)
    return Rounder(hessians, None, LAYER, centred=centred)


def lost(x, change, *, centred):
    """Return the power of an error's output; of one that a bias takes the mean of, the variance."""
    output = x.double() @ change.double().T
    return float((output - output.mean(dim=0) if centred else output).square().sum())


@pytest.mark.parametrize("centred", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("fmt", [INT4, INT8], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("most", [1, 3, 10, 30, 100])
def test_smoothed_layers_are_rounded_for_the_inputs_that_they_read(most, fmt, centred):
    g = torch.Generator().manual_seed(most)
    x, weight = inputs(), torch.randn(32, K, generator=g)
    factor = torch.logspace(0, torch.tensor(float(most)).log10(), K)[torch.randperm(K, generator=g)]
    rows, read = weight / factor, x * factor
    scale = rows.abs().amax(dim=1, keepdim=True) / fmt.max
    alone = nearest(rows, scale, fmt) - rows
    found = rounder(x, centred=centred).prepare(factor).round(rows, None, scale, fmt) - rows
    # .19 to .498 of it is left; with the moments of other inputs .6 to 5.7, but for factors of 1.
    assert lost(read, found, centred=centred) < 0.55 * lost(read, alone, centred=centred)


def test_smoothing_that_overflows_the_moments_is_refused():
    with pytest.raises(NonFiniteError, match="fc: smoothing overflows its second moments"):
        rounder(inputs(), centred=False).prepare(torch.full((K,), 1e25))


def nearest(rows, scale, fmt=INT8):
    """Return the nearest values of a grid."""
    return cast(rows / scale, fmt).float() * scale


def held_out(x, of):
    """Return moments of rows ``of``, with rows ``x`` of other prompts held out."""
    held = HeldRows(x.bfloat16(), torch.ones(len(x)))
    return Moments(of.T @ of / len(of), of.mean(dim=0), len(of), held)


@pytest.mark.parametrize("masked", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("centred", [False, True], ids=["no bias", "bias"])
def test_moments_of_few_rows_are_damped_as_held_out_rows_say(centred, masked):
    # 30 rows say nothing of 18 directions, in which all damping below theirs lets errors grow.
    g = torch.Generator().manual_seed(7)
    x, weight = inputs(), torch.randn(300, K, generator=g)
    mask = torch.rand(300, K, generator=g) < 0.5 if masked else None
    weight = weight if mask is None else weight * mask
    scale = weight.abs().amax(dim=1, keepdim=True) / INT4.max
    moments = held_out(x[30:], x[:30])
    found = Rounding(moments, centred=centred).round(weight, mask, scale, INT4)
    plain = replace(moments, held=None)
    by_default = Rounding(plain, centred=centred).round(weight, mask, scale, INT4)
    ours, theirs = (lost(x[30:], v - weight, centred=centred) for v in (found, by_default))
    assert ours < 0.7 * theirs
    assert mask is None or not found[~mask].any()


@pytest.mark.parametrize("damping", [1e-3, 1e-2, 1e-1, 1.0])
@pytest.mark.parametrize("seen", [30, 400])
def test_the_expected_error_is_that_of_rounding(damping, seen):
    x = inputs()
    weight = torch.randn(512, K, generator=torch.Generator().manual_seed(8))
    # Steps of half the weights are four times those of the others.
    scale = weight.abs().amax(dim=1, keepdim=True) / INT8.max * torch.tensor([1.0, 4.0] * 24)
    moment = x[:seen].T @ x[:seen] / seen
    factor = factorize(moment, damping=damping, order=falling_power(moment))
    values, _ = settle_rows(weight, factor, grid=Grid(INT8, scale))
    found = float((x @ (values - weight).T).square().sum())
    errors = (nearest(weight, scale) - weight).square().sum(dim=0)
    assert expected_error(factor, x, errors) == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize("centred", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("fmt", [INT4, INT8, E4M3FN], ids=lambda fmt: fmt.name)
def test_columns_that_saturate_are_damped_more(fmt, centred):
    # What an embedding of timesteps reads: 25 rows of waves, always the same ones.
    waves = torch.exp(-9.2 * torch.arange(128) / 128) * torch.linspace(1000, 1, 25).unsqueeze(1)
    x = torch.cat([waves.cos(), waves.sin()], dim=1)
    weight = torch.randn(100, 256, generator=torch.Generator().manual_seed(9))
    scale = weight.abs().amax(dim=1, keepdim=True) / fmt.max
    rounding = Rounding(held_out(x, x), centred=centred)
    found = rounding.round(weight, None, scale, fmt) - weight
    alone = nearest(weight, scale, fmt) - weight
    # .03 to .08; 40 to 71 in int4 and with a bias in float8 where the expected error chooses.
    assert lost(x, found, centred=centred) < 0.1 * lost(x, alone, centred=centred)
