"""Statistics of layers: pooled over buckets, and their file, whole, damaged and older."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.calibration.observers import OBSERVERS, static_scale
from quantkit.calibration.sampling import SAMPLE_ROWS
from quantkit.calibration.statistics import (
    LayerStatistics,
    load_calibration,
    per_column,
    save_calibration,
)
from quantkit.errors import ArtefactError
from quantkit.numerics.formats import FORMATS
from quantkit.numerics.histogram import BINS
from quantkit.numerics.packing import to_rows
from quantkit.recipe.layer_recipes import ActivationRecipe
from quantkit.storage.artefact import read_artefact, write_artefact
from tests.support.observed import OLDER, sample, statistics_of


def test_pooling_is_exact():
    first, second, third = sample("gaussian"), sample("heavy", rows=1000), sample("relu", rows=10)
    buckets = statistics_of(first, second, third)
    pooled, wanted = buckets.pooled(), statistics_of(torch.cat((first, second, third)))
    assert torch.equal(pooled.amax, wanted.amax)
    assert torch.equal(pooled.histogram, wanted.histogram)
    assert torch.equal(pooled.channel_amax, wanted.channel_amax)
    assert torch.equal(pooled.count, wanted.count)
    torch.testing.assert_close(pooled.second_moment, wanted.second_moment, rtol=1e-6, atol=0)
    torch.testing.assert_close(pooled.mean, wanted.mean, rtol=1e-5, atol=1e-7)
    halves = buckets.rebucketed((10.0, 20.0), (20.0,))
    assert halves.amax.tolist() == [float(torch.cat((first, second)).abs().amax()), third.amax()]
    assert torch.equal(buckets.rebucketed((10.0, 20.0), (10.0, 20.0)).histogram, buckets.histogram)


def test_bucket_without_values_does_not_weigh():
    x = sample("gaussian")
    full, empty = statistics_of(x), torch.zeros(1)
    both = LayerStatistics(
        amax=torch.cat((empty, full.amax)),
        histogram=torch.cat((torch.zeros(1, BINS), full.histogram)),
        second_moment=torch.cat((torch.zeros(1, 8), full.second_moment)),
        channel_amax=torch.cat((torch.zeros(1, 8), full.channel_amax)),
        count=torch.tensor([0, len(x)]),
    )
    assert torch.equal(both.pooled().second_moment, full.second_moment)
    assert both.pooled().samples is None


def test_pooled_sample_is_that_of_the_largest_priorities():
    buckets = statistics_of(sample("gaussian"), sample("relu", rows=5), sample("tiny"))
    pooled = buckets.regrouped([0, 0, 1])
    priority = buckets.sample_priority[:2].flatten()
    order = priority.argsort(descending=True)[:SAMPLE_ROWS]
    assert pooled.sample_priority[0].tolist() == priority[order].tolist()
    assert torch.equal(pooled.samples[0], buckets.samples[:2].flatten(0, 1)[order])
    assert torch.equal(pooled.samples[1], buckets.samples[2])
    assert pooled.sample_count.tolist() == [SAMPLE_ROWS, SAMPLE_ROWS]
    few = statistics_of(sample("gaussian", rows=3), sample("relu", rows=5)).pooled()
    assert few.sample_count.tolist() == [8]
    assert bool((few.sample_priority[0, 8:] == 0).all())
    assert not few.samples[0, 8:].any()


def test_columns_are_in_the_order_the_kernels_read():
    values = torch.arange(5.0)
    weight = values.reshape(1, 5, 1, 1).expand(2, 5, 3, 2)
    assert torch.equal(per_column(values, 6), to_rows(weight)[0])
    assert per_column(torch.ones(4, 5), 9).shape == (4, 45)
    assert torch.equal(per_column(values, 1), values)


# The file


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def rewrite_entry(path, **changes):
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        entry = json.loads(file.metadata()["quantkit_calibration"])
    text = json.dumps({**entry, **changes})
    save_file(load_file(path), path, metadata={"quantkit_calibration": text})


DAMAGE = {
    "missing": (Path.unlink, "missing"),
    "truncated": (lambda p: p.write_bytes(p.read_bytes()[:-1]), ": truncated"),
    "empty": (lambda p: p.write_bytes(b""), ": truncated"),
    "not safetensors": (lambda p: p.write_text("x" * 100), "not safetensors"),
    "bit in a tensor": (lambda p: flip(p, -9), "its checksum does not agree"),
    "newer": (lambda p: rewrite_entry(p, format_version=7), "format_version 7, wanted 1 to 6; u"),
    "other numbers": (lambda p: rewrite_entry(p, about="{}"), "its checksum does not agree"),
    "other file": (lambda p: save_file({}, p), "not a quantkit_calibration file"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_file_is_refused(sd_calibration, tmp_path, damage, message):
    path = tmp_path / "c.safetensors"
    save_calibration(sd_calibration, path, force=False)
    damage(path)
    with pytest.raises(ArtefactError, match=message) as caught:
        load_calibration(path)
    assert "\n" not in str(caught.value)


def test_tensor_of_a_wrong_shape_is_refused(sd_calibration, tmp_path):
    path = tmp_path / "c.safetensors"
    save_calibration(sd_calibration, path, force=False)
    tensors, about = read_artefact(path, "quantkit_calibration", newest=4)
    for missing in ("updates", "mean", "samples", "sample_priority"):
        half = {n: t for n, t in tensors.items() if not n.endswith(f"/{missing}")}
        write_artefact(path, "quantkit_calibration", half, about, force=True, version=4)
        with pytest.raises(ArtefactError, match=rf"damaged \(.*{missing}"):
            load_calibration(path)
    name = "unet/mid_block.attentions.0.proj_in/amax"
    tensors[name] = tensors[name][:1]
    write_artefact(path, "quantkit_calibration", tensors, about, force=True)
    with pytest.raises(ArtefactError, match=r"proj_in/amax: shape \(1,\), wanted \(2,\)"):
        load_calibration(path)
    del tensors[name]
    write_artefact(path, "quantkit_calibration", tensors, about, force=True)
    with pytest.raises(ArtefactError, match=r"damaged .*amax"):
        load_calibration(path)


@pytest.mark.parametrize("version", OLDER)
def test_older_file_serves_all_that_it_holds(sd_calibration, tmp_path, version):
    path = tmp_path / "c.safetensors"
    save_calibration(sd_calibration, path, force=False)
    tensors, about = read_artefact(path, "quantkit_calibration", newest=4)
    with pytest.raises(ArtefactError, match="format_version 4, wanted 1; update"):
        read_artefact(path, "quantkit_calibration")
    layers = {n: t for n, t in tensors.items() if "/attention." not in n}
    older = {n: t for n, t in layers.items() if n.rpartition("/")[2] not in OLDER[version]}
    write_artefact(path, "quantkit_calibration", older, about, force=True, version=version)
    loaded, name = load_calibration(path), "mid_block.attentions.0.proj_in"
    statistics = loaded.layers["unet"][name]
    assert torch.equal(statistics.histogram, sd_calibration.layers["unet"][name].histogram)
    assert statistics.samples is None
    for observer in OBSERVERS:
        recipe = ActivationRecipe.model_validate(
            {"mode": "static", "observer": observer, "buckets": 2}
        )
        if observer == "moving_average" and version == 1:
            with pytest.raises(ArtefactError, match=r"has no moving average \(format_version 1\)"):
                static_scale(statistics, recipe, FORMATS["e4m3fn"], edges=loaded.edges)
        else:
            scale = static_scale(statistics, recipe, FORMATS["e4m3fn"], edges=loaded.edges)
            assert bool((scale > 0).all())
    # Written again it is what it was: nothing that an older program could not read.
    save_calibration(loaded, path, force=True)
    assert read_artefact(path, "quantkit_calibration", newest=version)[1] == about
