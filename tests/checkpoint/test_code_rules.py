"""Rules 9 to 11 of FORMAT.md in every format and granularity, by the core and by PyTorch."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from quantkit.checkpoint import code_rules
from quantkit.checkpoint.verification import find_breaches
from quantkit.models.source import open_model
from quantkit.packing.pack_model import pack
from quantkit.progress import silent
from quantkit.recipe.schema import Recipe
from quantkit.storage.system import read_into
from tests.support.packed_edit import Edit

pytestmark = pytest.mark.usefixtures("any_model", "either_core")

#: What is no number, or no weight, and the largest that is one (OCP 8-bit Floating Point, 5.1).
BROKEN = {"e4m3fn": [0x7F, 0xFF], "e5m2": [0x7C, 0x7D, 0x7F, 0xFC, 0xFF], "int8": [0x80]}
LARGEST = {"e4m3fn": [0x7E, 0xFE], "e5m2": [0x7B, 0xFB], "int8": [0x7F, 0x81]}
GRANULARITY = {"tensor": "tensor", "channel": "channel", "group": "group:32"}
LAYERS = sorted(
    f"{fmt}.{granularity}.{kind}"
    for fmt in (*BROKEN, "int4")
    for granularity in GRANULARITY
    for kind in ("dense", "sparse")
    if fmt != "int4" or granularity == "channel"
)
ROWS, K = 6, 64
#: Whether both nibbles of a byte name two ascending positions.
LEGAL = {0x4, 0x8, 0xC, 0x9, 0xD, 0xE}


def pack_tensors(folder, tensors, recipe):
    source = folder / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"_class_name": "UNet2DConditionModel"}))
    save_file(tensors, source / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    pack(
        open_model(str(source)),
        Recipe.model_validate({"name": "t", "data_free": True, **recipe}),
        folder / "packed",
        calibration=None,
        masks=None,
        threads=1,
        force=False,
        progress=silent,
    )
    return folder / "packed"


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    generator = torch.Generator().manual_seed(4)
    tensors = {f"{name}.weight": torch.randn(ROWS, K, generator=generator) for name in LAYERS}
    overrides = []
    for name in LAYERS:
        fmt, granularity, _ = name.split(".")
        weight = {"format": fmt, "granularity": GRANULARITY[granularity]}
        overrides.append({"layers": [name], "weight": weight})
    recipe = {"overrides": overrides, "sparsity": {"layers": ["*.sparse"]}}
    return pack_tensors(tmp_path_factory.mktemp("codes"), tensors, recipe)


@pytest.fixture
def edit(packed, tmp_path):
    shutil.copytree(packed, tmp_path / "packed")
    return Edit(tmp_path / "packed")


def part(edit, layer, name):
    """Return bytes (R, any) of a tensor, that may be written to."""
    tensor = edit.tensor(f"{layer}.{name}")
    return tensor.reshape(len(tensor) if tensor.ndim else 1, -1).view(torch.uint8)


def lines_of(edit):
    """Return what verifying says: layer and part, and why."""
    edit.save()
    found = find_breaches(edit.folder, progress=silent).breaches
    return sorted(line.partition(".safetensors: ")[2] for line in found)


def test_every_layer_has_its_scheme(edit):
    kinds = {(s["weight"], s["granularity"], s["sparsity"]) for s in edit.schemes}
    assert len(kinds) == len(LAYERS) == 20
    assert lines_of(edit) == []


@pytest.mark.parametrize("place", [(0, 0), (ROWS - 1, -1)], ids=str)
@pytest.mark.parametrize("turn", range(5))
def test_codes_that_are_no_weights_are_found(edit, place, turn):
    wanted = []
    for layer in LAYERS:
        fmt = layer.partition(".")[0]
        if fmt != "int4":
            part(edit, layer, "weight")[place] = BROKEN[fmt][turn % len(BROKEN[fmt])]
            what = "-128, which no weight has" if fmt == "int8" else "NaN or infinite"
            wanted.append(f"{layer}.weight: a code is {what}; pack the model again")
    assert lines_of(edit) == wanted


def test_the_largest_codes_are_weights(edit):
    for layer in LAYERS:
        codes, fmt = part(edit, layer, "weight"), layer.partition(".")[0]
        # Every byte is two nibbles of int4.
        codes[2, :2] = torch.tensor(LARGEST.get(fmt, [0x00, 0xFF]))
    assert lines_of(edit) == []


#: Scales of two rows whose last group's codes are zero, or all but the last code; the one named.
ZEROS = {
    "both scales": (0x00, [0.5, 0.25], 0.5),
    "the second": (0x00, [1.0, 0.5], 0.5),
    "a scale above one": (0x00, [1.0, 2.0], 2.0),
    "neither": (0x00, [1.0, 1.0], None),
    "one code is not zero": (0x01, [0.5, 0.25], None),
}


@pytest.mark.parametrize("name", ZEROS)
@pytest.mark.parametrize("chunk", [1, 150, 1 << 20], ids=["row", "rows", "whole"])
def test_groups_of_zeros_have_scale_one(edit, monkeypatch, chunk, name):
    last, scales, named = ZEROS[name]
    monkeypatch.setattr(code_rules, "_CHUNK_BYTES", chunk)
    wanted = []
    for layer in LAYERS:
        fmt, granularity, _ = layer.split(".")
        codes, scale = part(edit, layer, "weight"), edit.tensor(f"{layer}.weight_scale")
        rows = slice(None) if granularity == "tensor" else slice(2, 4)
        half = codes.shape[1] // 2 if granularity == "group" else 0
        # Zeros of both signs, and pairs of nibbles.
        zeros = {"int8": (0, 0), "int4": (0x88, 0x88)}.get(fmt, (0x00, 0x80))
        codes[rows, half::2], codes[rows, half + 1 :: 2] = zeros
        codes[rows, -1] += last
        if granularity == "tensor":
            scale.fill_(scales[0] if named == scales[0] else scales[1])
        else:
            scale[(slice(2, 4), -1) if granularity == "group" else slice(2, 4)] = torch.tensor(
                scales
            )
        if named is not None:
            wanted.append(f"{layer}.weight_scale: found {named} for an all-zero group, expected 1")
    assert lines_of(edit) == wanted


def test_a_read_that_gives_less_goes_on_where_it_ended(edit, monkeypatch):
    monkeypatch.setattr(
        code_rules, "read_into", lambda file, view, at: read_into(file, view[:50], at)
    )
    layer = "int8.channel.dense"
    part(edit, layer, "weight")[ROWS - 1, -1] = 0x80
    assert lines_of(edit) == [
        f"{layer}.weight: a code is -128, which no weight has; pack the model again"
    ]


@pytest.mark.parametrize("factor", [0, 16, -16, 127, -128])
@pytest.mark.parametrize("place", [(0, 0), (ROWS - 1, -1)], ids=str)
def test_factors_that_make_no_int8_are_found(edit, factor, place):
    wanted = []
    for layer in ("int4.channel.dense", "int4.channel.sparse"):
        edit.tensor(f"{layer}.weight_group")[place] = factor
        line = "a factor is 0 or beyond 15; pack the model again"
        wanted.append(f"{layer}.weight_group: {line}")
    assert lines_of(edit) == wanted


def test_every_factor_to_fifteen_is_one(edit):
    factors = edit.tensor("int4.channel.dense.weight_group")
    # Whatever the codes are: a group of zeros has any.
    edit.tensor("int4.channel.dense.weight")[1, :16] = 0x88
    for start in (1, 7, 13):
        sizes = torch.arange(start, start + 6).clamp(max=15)
        factors.copy_(torch.stack((sizes, -sizes), dim=1))
        assert lines_of(edit) == []


@pytest.mark.parametrize("place", [0, -1])
def test_both_nibbles_of_every_byte_are_judged(tmp_path, place):
    names = [f"b{byte:03}" for byte in range(256)]
    tensors = {f"{name}.weight": torch.randn(2, 64) for name in names}
    edit = Edit(pack_tensors(tmp_path, tensors, {"sparsity": {}}))
    wanted = []
    for byte, name in enumerate(names):
        edit.tensor(f"{name}.weight_meta")[place, 0] = byte
        if not {byte & 15, byte >> 4} <= LEGAL:
            line = "a nibble names no two ascending positions; pack the model again"
            wanted.append(f"{name}.weight_meta: {line}")
    assert lines_of(edit) == wanted
    assert len(wanted) == 256 - 36
