"""Layers of several blocks of rows: what belongs to a row stays with it, against the whole weight.

A weight is packed block by block, so what is computed, cut or kept for each row can go wrong from
the second block on, where no layer of one block shows it. Rows differ in size by decades and every
row has a mask of its own: a row that is given another's scale, mask or sum is far off.
"""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from quantkit.calibration.moments.moments import Moments
from quantkit.calibration.statistics.layer_statistics import per_column
from quantkit.checkpoint import weight_reader as rows_module
from quantkit.checkpoint.reader import open_packed
from quantkit.checkpoint.tensor_layout import Sink
from quantkit.checkpoint.verification import verify
from quantkit.models.component_layers import list_layers
from quantkit.models.source import open_model
from quantkit.numerics.formats import E4M3FN
from quantkit.numerics.granularity import PerChannel, PerGroup
from quantkit.numerics.least_error import choose_scale
from quantkit.numerics.masks import TWO_OF_FOUR, choose_mask
from quantkit.numerics.packed_2to4 import pack_two_of_four, to_rows, unpack_positions
from quantkit.numerics.scales import amax_scale, dequantize, quantize
from quantkit.numerics.scheme import Activation, Scheme
from quantkit.packing.encode import encode_weight
from quantkit.packing.gptq import Rounding
from quantkit.packing.mask_source import stored_mask
from quantkit.packing.weight_plan import WeightPlan
from quantkit.progress import silent
from quantkit.sparsity.maskfile import LayerMask, MaskSet, pack_mask
from quantkit.storage.digest import sha256_of
from tests.support.packing import (
    WEIGHTS,
    bits,
    calibration_of,
    expected,
    finish,
    run,
    with_samples,
)
from tests.support.packing import component as make_component

pytestmark = pytest.mark.usefixtures("any_model")

#: More than 131,072 weights, which is a block; and the last block is not a whole one.
SHAPES = {"fc": (600, 512), "conv": (300, 128, 3, 3)}


def seeded(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tensors():
    """Weights whose rows differ in size from 1e-3 to 1e3, shuffled."""
    found = {}
    for seed, (name, shape) in enumerate(SHAPES.items()):
        size = torch.logspace(-3, 3, shape[0])[torch.randperm(shape[0])]
        weight = seeded(*shape, seed=seed) * size.reshape(-1, *[1] * (len(shape) - 1))
        found |= {f"{name}.weight": weight, f"{name}.bias": seeded(shape[0], seed=seed + 9)}
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    torch.manual_seed(0)
    return make_component(tmp_path_factory.mktemp("blocks") / "source", tensors())


@pytest.fixture(scope="module")
def dense(source):
    return load_file(source / WEIGHTS)


@pytest.fixture(scope="module")
def calibration(source):
    return with_samples(calibration_of(source), source)


@pytest.fixture(scope="module")
def own_masks(source):
    """A random 2:4 mask for each layer, another in every row."""
    masks = {}
    for seed, layer in enumerate(list_layers(open_model(str(source)).components[0])):
        mask = choose_mask(seeded(layer.n, layer.k, seed=seed + 20), TWO_OF_FOUR)
        digest = sha256_of(layer.shard, layer.weight)
        masks[layer.name] = LayerMask(pack_mask(mask), TWO_OF_FOUR, digest, 0.3)
    return MaskSet({"": masks}, "magnitude", TWO_OF_FOUR)


@pytest.fixture
def packed(source, calibration, own_masks, tmp_path):
    """Return what packs the layers and gives their directory."""

    def pack(recipe, *, calibrated=True, masked=True, threads=1):
        given = calibration if calibrated else None
        run(source, tmp_path / "p", recipe, calibration=given, masks=own_masks if masked else None,
            threads=threads)  # fmt: skip
        verify(tmp_path / "p", progress=silent)
        return tmp_path / "p"

    return pack


def mask_in(parts):
    """Return the mask (N, K) that packed metadata says."""
    positions = unpack_positions(parts["weight_meta"])
    mask = torch.zeros(*positions.shape[:2], 4, dtype=torch.bool).scatter_(2, positions, value=True)
    return mask.reshape(len(mask), -1)


def parts_of(folder, name):
    found = load_file(folder / WEIGHTS)
    return {key[len(name) + 1 :]: value for key, value in found.items() if key.startswith(name)}


def test_the_layers_have_several_blocks(dense):
    for name, shape in SHAPES.items():
        per_block = rows_module.BLOCK_ELEMENTS // dense[f"{name}.weight"][0].numel()
        assert shape[0] > 2 * per_block
        assert shape[0] % per_block


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("granularity", ["channel", "group:64", "tensor"])
def test_stored_masks_codes_and_scales_are_those_of_the_row(
    packed, dense, own_masks, granularity, threads
):
    folder = packed({"weight": {"granularity": granularity}}, calibrated=False, threads=threads)
    for name in SHAPES:
        rows = to_rows(dense[f"{name}.weight"]).contiguous()
        mask = own_masks.layers[""][name].dense(*rows.shape)
        wanted = expected(rows * mask, E4M3FN, granularity)
        codes = wanted.pop("weight").view(torch.uint8)
        wanted["weight"], wanted["weight_meta"] = pack_two_of_four(codes, mask)
        found = parts_of(folder, name)
        assert torch.equal(mask_in(found), mask)
        for part, tensor in wanted.items():
            assert torch.equal(bits(found[part]), bits(tensor)), (name, part)


@pytest.mark.parametrize("method", ["magnitude", "wanda"])
def test_masks_that_are_chosen_are_those_of_the_row(packed, dense, calibration, method):
    folder = packed({"sparsity": {"method": method}}, calibrated=method == "wanda", masked=False)
    for name in SHAPES:
        rows = to_rows(dense[f"{name}.weight"]).contiguous()
        power = torch.ones(rows.shape[1])
        if method == "wanda":
            moment = calibration.layers[""][name].pooled().second_moment[0]
            power = per_column(moment, rows.shape[1] // len(moment)).sqrt()
        wanted = choose_mask(rows.abs() * power, TWO_OF_FOUR)
        assert torch.equal(mask_in(parts_of(folder, name)), wanted)


@pytest.mark.parametrize(
    "case", product([False, True], [PerChannel(), PerGroup(64)], ["amax", "mse"]), ids=str
)
def test_smoothed_rows_have_their_own_codes_and_scales(packed, dense, case, own_masks):
    masked, granularity, observer = case
    weight = {"granularity": str(granularity), "observer": observer}
    folder = packed({"smooth": 0.5, "weight": weight}, masked=masked)
    for name in SHAPES:
        found = parts_of(folder, name)
        rows = to_rows(dense[f"{name}.weight"]).contiguous()
        factor = found["input_smooth"]
        rows = rows / per_column(factor, rows.shape[1] // len(factor))
        mask = own_masks.layers[""][name].dense(*rows.shape)
        rows = rows * mask if masked else rows
        scale = choose_scale(rows, E4M3FN, granularity, observer)
        assert torch.equal(found["weight_scale"], scale)
        codes = quantize(rows, scale, E4M3FN, granularity).view(torch.uint8)
        codes = pack_two_of_four(codes, mask)[0] if masked else codes
        assert torch.equal(bits(found["weight"]), bits(codes))


@pytest.mark.parametrize("recipe", [{}, {"smooth": 0.5}], ids=["as it is", "smoothed"])
def test_every_bias_gains_what_its_own_row_lost(packed, dense, calibration, recipe):
    folder = packed({"bias_correction": True, **recipe})
    component = open_packed(folder).components[0]
    for name in SHAPES:
        mean = calibration.layers[""][name].pooled().mean[0].double()
        lost = dense[f"{name}.weight"].double() - component.dequantized(name).double()
        gain = torch.einsum("nc...,c->n", lost, mean)
        found = parts_of(folder, name)["bias"].double()
        # Rows differ by six decades: each is compared at its own size.
        size = lost.flatten(1).abs().sum(dim=1) * mean.abs().max() + 1
        error = (found - dense[f"{name}.bias"].double() - gain).abs() / size
        assert float(error.max()) < 1e-6


class _Bytes(Sink):
    """A sink that keeps what it is given."""

    def __init__(self):
        self.data = b""

    def append(self, data):
        self.data += bytes(data)


class _Ready:
    """A rounder whose moments are at hand."""

    def __init__(self, moments):
        self._moments = moments

    def prepare(self, factor):
        assert factor is None
        return Rounding(self._moments, centred=False)


@pytest.mark.parametrize("masked", [False, True], ids=["dense", "sparse"])
def test_rounding_in_blocks_is_rounding_of_the_whole(tmp_path, monkeypatch, masked):
    # Blocks for gptq have as many weights as the matrix of moments: 32 rows of 32 columns.
    monkeypatch.setattr(rows_module, "BLOCK_ELEMENTS", 8)
    n, k = 150, 32
    weight = seeded(n, k, seed=1) * torch.logspace(-3, 3, n).unsqueeze(1)
    folder = make_component(tmp_path / "source", {"fc.weight": weight})
    (layer,) = list_layers(open_model(str(folder)).components[0])
    x = seeded(400, k, seed=2) @ seeded(k, k, seed=3) + 0.2
    moments = Moments(x.T @ x / 400, x.mean(dim=0), 400)
    mask = choose_mask(seeded(n, k, seed=4), TWO_OF_FOUR)
    stored = LayerMask(pack_mask(mask), TWO_OF_FOUR, "", 0.0)
    scheme = Scheme(E4M3FN, PerChannel(), TWO_OF_FOUR if masked else None, Activation.NONE)
    rounder: Any = _Ready(moments)
    plan = WeightPlan(
        "fc",
        scheme,
        "amax",
        mask=partial(stored_mask, stored) if masked else None,
        rounder=rounder,
    )
    sinks = {part: _Bytes() for part in ("weight", "weight_scale", "weight_meta")}
    with layer.shard.open("rb") as file:
        source = rows_module.SourceTensor(layer.shard, file.fileno(), layer.weight)
        finish(encode_weight(plan, source, sinks))
    rounding = Rounding(moments, centred=False)
    rows = rounding.update(weight, mask) if masked else weight
    scale = amax_scale(rows, E4M3FN, PerChannel())
    found = torch.frombuffer(bytearray(sinks["weight_scale"].data), dtype=torch.float32)
    torch.testing.assert_close(found, scale, rtol=1e-4, atol=0)
    values = rounding.round(rows, mask if masked else None, scale.unsqueeze(1), E4M3FN)
    codes = torch.frombuffer(bytearray(sinks["weight"].data), dtype=torch.uint8)
    wanted = quantize(values, scale, E4M3FN, PerChannel()).view(torch.uint8)
    if masked:
        wanted, meta = pack_two_of_four(wanted, mask)
        found_meta = torch.frombuffer(bytearray(sinks["weight_meta"].data), dtype=torch.uint8)
        assert torch.equal(found_meta.reshape(meta.shape), meta)
    codes = codes.reshape(wanted.shape).view(E4M3FN.torch_dtype)
    found = dequantize(codes, scale, PerChannel())
    wanted = dequantize(wanted.view(E4M3FN.torch_dtype), scale, PerChannel())
    # Sums over blocks of another size round otherwise, and a value between two codes may turn.
    rows_apart = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert float(rows_apart.max()) < 0.02
    assert float(rows_apart.median()) < 1e-3


def test_a_mask_is_cut_at_the_rows_of_its_block():
    mask = choose_mask(seeded(40, 16), TWO_OF_FOUR)
    stored = LayerMask(pack_mask(mask), TWO_OF_FOUR, "", 0.0)
    for first in (0, 1, 13, 39):
        for count in (1, 7):
            rows = torch.zeros(min(count, 40 - first), 16)
            found = stored_mask(stored, rows, first)
            assert torch.equal(found, mask[first : first + count])
    assert torch.equal(replace(stored).dense(40, 16), mask)
