"""Artefacts that are whole and say nonsense: each entry and tensor in turn, checksums redone."""

import copy
import json

import pytest
import torch
from safetensors.torch import save_file

from quantkit.calibration.moments.moment_files import HessianIndex, create_hessians, load_hessians
from quantkit.calibration.observing.calibration_resume import PartialFile, PartialSums
from quantkit.calibration.statistics.layer_statistics import (
    Calibration,
    CalibrationProvenance,
    LayerStatistics,
    load_calibration,
    save_calibration,
)
from quantkit.calibration.statistics.sampling import SAMPLE_ROWS
from quantkit.device.aot.manifest import Manifest, read_manifest, write_manifest
from quantkit.errors import ArtefactError, InputError
from quantkit.numerics.histogram import BINS
from quantkit.numerics.masks import TWO_OF_FOUR
from quantkit.pipelines.processes import ALONE
from quantkit.recipe.load import load_recipe
from quantkit.sensitivity import sensitivity_file
from quantkit.sparsity.maskfile import Decision, LayerMask, MaskSet, load_masks, save_masks
from quantkit.storage.artefact import read_artefact, write_artefact
from tests.support.artefacts import attention_statistics, attention_sums, sums

ODD = (None, True, -1, 1.5, 10**30, 1e308, "", "x", "../x", [], {}, [[]], {"": {}}, ["\n"])


def places(value, path=()):
    """Yield the path of every entry of a JSON value, but of lists the first and the last."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for index in sorted({0, len(value) - 1}):
            if value:
                yield from places(value[index], (*path, index))


def variants(value):
    """Yield a JSON value with each entry in turn absent, renamed or something odd."""
    for path in places(value):
        for odd in (*ODD, "absent", "renamed"):
            changed = copy.deepcopy(value)
            *outer, last = path
            inner = changed
            for part in outer:
                inner = inner[part]
            if odd == "absent":
                del inner[last]
            elif odd == "renamed":
                if isinstance(last, int):
                    continue
                inner["a/../b"] = inner.pop(last)
            else:
                inner[last] = odd
            yield f"{path} {odd!r}", changed


def read_or_refuse(read, what):
    """Read, or get an error of ours in one line; return whether it was read."""
    try:
        read()
    except InputError as error:
        text = str(error)
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    else:
        return True
    assert text.isprintable(), what
    assert len(text) < 700, what
    return False


def statistics():
    return LayerStatistics(
        amax=torch.ones(2),
        histogram=torch.ones(2, BINS, dtype=torch.float64),
        second_moment=torch.ones(2, 4),
        channel_amax=torch.ones(2, 4),
        count=torch.tensor([4, 4]),
        moving_amax=torch.ones(2, dtype=torch.float64),
        updates=torch.tensor([2, 2]),
        mean=torch.zeros(2, 4),
        samples=torch.ones(2, SAMPLE_ROWS, 8, dtype=torch.bfloat16),
        sample_priority=torch.ones(2, SAMPLE_ROWS, dtype=torch.float64),
        sample_count=torch.tensor([SAMPLE_ROWS] * 2),
    )


def calibration(path):
    about = CalibrationProvenance(
        {"unet": {"a": "0"}}, "r", 1, "0", 2, None, 0, {"unet": [1, 1]}, {"t": "1"}
    )
    attention = {"unet": {"b": attention_statistics()}}
    found = Calibration({"unet": {"a": statistics()}}, (500.0,), about, attention)
    save_calibration(found, path, force=True)
    return lambda: load_calibration(path)


def masks(path):
    mask = LayerMask(torch.full((4, 1), 0x33, dtype=torch.uint8), TWO_OF_FOUR, "0", 0.5)
    decisions = (Decision("unet", "a", 0.5, chosen=True, reason=""),)
    found = MaskSet({"unet": {"a": mask}}, "wanda", TWO_OF_FOUR, decisions)
    save_masks(found, path, force=True)
    return lambda: load_masks(path)


def kept(path):
    found = PartialFile(path.with_name("c"), ALONE, {"steps": 2, "model": "0" * 64})
    found.write(
        PartialSums(
            {"unet": {"a": sums()}},
            {"unet": {"b": attention_sums()}},
            (500.0,),
            {"unet": [1, 1]},
            1,
        )
    )
    found.path.replace(path)
    found.path.symlink_to(path)
    return found.read


KINDS = {
    "calibration": (calibration, "quantkit_calibration"),
    "masks": (masks, "quantkit_masks"),
    "partial": (kept, "quantkit_partial_sums"),
}

EACH_KIND = pytest.mark.parametrize(("make", "kind"), KINDS.values(), ids=KINDS)


@EACH_KIND
def test_every_entry_in_turn(tmp_path, make, kind):
    path = tmp_path / "x.safetensors"
    read = make(path)
    read()
    tensors, about = read_artefact(path, kind)
    for what, changed in variants(about):
        write_artefact(path, kind, tensors, changed, force=True)
        read_or_refuse(read, what)


@EACH_KIND
@pytest.mark.parametrize(
    "text", ["", "[]", "null", "3", "[" * 50_000, '"\\ud800"', "9" * 5000, '{"format_version": []}']
)
def test_every_text_in_the_header(tmp_path, make, kind, text):
    path = tmp_path / "x.safetensors"
    read = make(path)
    tensors, _ = read_artefact(path, kind)
    save_file(tensors, path, metadata={kind: text})
    with pytest.raises(ArtefactError, match=r"damaged|expected|expected"):
        read()


CHANGES = {
    "scalar": lambda t: t.reshape(-1)[0].clone(),
    "empty": lambda t: t[:0],
    "half": lambda t: t[:1],
    "narrow": lambda t: t[..., :1].clone(),
    "one-more-axis": lambda t: t.unsqueeze(0),
    "float16": lambda t: t.to(torch.float16),
    "bool": lambda t: t.bool(),
    "complex": lambda t: t.to(torch.complex64),
    "float8": lambda t: t.float().to(torch.float8_e4m3fn),
    "nan": lambda t: torch.full_like(t, torch.nan) if t.is_floating_point() else t.float(),
    "inf": lambda t: torch.full_like(t, torch.inf) if t.is_floating_point() else t.double(),
    "negative": lambda t: torch.full_like(t, -1) if t.dtype != torch.uint8 else t.to(torch.int8),
}


#: Fields in which a value below 0, or fewer samples, is nothing odd; or none at all.
LEGAL = {
    ("mean", "negative"), ("samples", "negative"),
    ("attention.k_low", "negative"), ("attention.v_low", "negative"),
    ("attention.q_mean", "negative"),
}  # fmt: skip


@EACH_KIND
@pytest.mark.parametrize("change", CHANGES)
def test_every_tensor_in_turn(tmp_path, make, kind, change):
    path = tmp_path / "x.safetensors"
    read = make(path)
    tensors, about = read_artefact(path, kind)
    for name in tensors:
        field = name.rpartition("/")[2]
        changed = {**tensors, name: CHANGES[change](tensors[name]).contiguous()}
        if all(torch.equal(changed[n].double(), tensors[n].double()) and
               changed[n].dtype == tensors[n].dtype for n in tensors if
               changed[n].dtype != torch.complex64):  # fmt: skip
            continue
        write_artefact(path, kind, changed, about, force=True)
        accepted = read_or_refuse(read, f"{name} {change}")
        # The shape of a mask is known where the layer is.
        mask = kind == "quantkit_masks" and change in {"empty", "half", "narrow"}
        assert not accepted or mask or (field, change) in LEGAL, f"{name}: {change} was accepted"


@EACH_KIND
@pytest.mark.parametrize("name", ["", "a", "//", "unet/a", "unet/a/b/amax", "x/a/amax", "unet/b/x"])
def test_names_that_are_none(tmp_path, make, kind, name):
    path = tmp_path / "x.safetensors"
    read = make(path)
    tensors, about = read_artefact(path, kind)
    write_artefact(path, kind, {**tensors, name: torch.ones(1)}, about, force=True)
    with pytest.raises(ArtefactError, match="damaged"):
        read()


def sensitivity(path):
    provenance = sensitivity_file.SensitivityProvenance(
        "m", "0", "0", 0, "0", 20, None, 0, "card", {"quantkit": "0"}
    )
    outcomes = {name: sensitivity_file.Outcome(0.1, 8, 0.1) for name in ("16-bit", "e4m3fn-token")}
    layer = sensitivity_file.LayerSensitivity(
        "a", "linear", (16, 16), "0", 2.0, outcomes, sensitivity_file.Measured("e4m3fn-token", 0.1)
    )
    recipe = load_recipe("fp8")
    found = sensitivity_file.Sensitivity(
        "unet", "unet", (layer,), (1.0,), 9, recipe, provenance, ("n",)
    )
    sensitivity_file.save_sensitivity(found, path, force=True)
    return lambda: sensitivity_file.load_sensitivity(path)


def hessians(path):
    folder = path.parent / "h"
    index = HessianIndex(
        {"unet": {"a": "0"}}, "r", 1, 0, "0", 2, None, 0, 1, "uniform", 1.0, {"torch": "1"}
    )
    create_hessians(folder, index)
    (folder / "unet").mkdir()
    (folder / "unet" / "a.safetensors").touch()
    (folder / "index.json").replace(path)
    (folder / "index.json").symlink_to(path)
    return lambda: load_hessians(folder)


def manifest(path):
    folder = path.parent / "m"
    folder.mkdir()
    write_manifest(Manifest("gfx1201", "clang", ("-O3",), ()), folder)
    (folder / "manifest.json").replace(path)
    (folder / "manifest.json").symlink_to(path)
    return lambda: read_manifest(folder)


@pytest.mark.parametrize("make", [sensitivity, hessians, manifest])
def test_every_entry_of_a_json_file_in_turn(tmp_path, make):
    path = tmp_path / "x.json"
    read = make(path)
    read()
    values = json.loads(path.read_text())
    for what, changed in variants(values):
        path.write_text(json.dumps(changed))
        read_or_refuse(read, what)


@pytest.mark.parametrize("name", ["../a", "a/b", "..", "/etc/passwd"])
def test_an_index_of_hessians_leads_nowhere_else(tmp_path, name):
    path = tmp_path / "x.json"
    read = hessians(path)
    values = json.loads(path.read_text())
    for digests in ({name: {"a": "0"}}, {"unet": {name: "0"}}):
        path.write_text(json.dumps({**values, "digests": digests}))
        with pytest.raises(ArtefactError, match="which is a path"):
            read()
