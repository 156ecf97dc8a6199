"""Statistics of layers: pooled over buckets, and their file, whole and damaged."""

import json
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.calibration.statistics.layer_statistics import (
    LayerStatistics,
    load_calibration,
    per_column,
    save_calibration,
)
from quantkit.calibration.statistics.sampling import SAMPLE_ROWS
from quantkit.errors import ArtefactError
from quantkit.numerics.packed_2to4 import to_rows
from quantkit.storage.artefact import read_artefact, write_artefact
from tests.support.observed import sample, statistics_of


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
    full = statistics_of(x)
    parts = {field.name: getattr(full, field.name) for field in fields(full)}
    both = LayerStatistics(**{n: torch.cat((torch.zeros_like(t), t)) for n, t in parts.items()})
    for name, tensor in parts.items():
        assert torch.equal(getattr(both.pooled(), name), tensor), name


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
    "newer": (lambda p: rewrite_entry(p, format_version=2), "format_version 2, expected 1: made"),
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
    tensors, about = read_artefact(path, "quantkit_calibration")
    for missing in ("updates", "mean", "samples", "sample_priority"):
        half = {n: t for n, t in tensors.items() if not n.endswith(f"/{missing}")}
        write_artefact(path, "quantkit_calibration", half, about, force=True)
        with pytest.raises(ArtefactError, match=rf"damaged \(.*{missing}"):
            load_calibration(path)
    name = "unet/mid_block.attentions.0.proj_in/amax"
    tensors[name] = tensors[name][:1]
    write_artefact(path, "quantkit_calibration", tensors, about, force=True)
    with pytest.raises(ArtefactError, match=r"proj_in/amax: shape \(1,\), expected \(2,\)"):
        load_calibration(path)
    del tensors[name]
    write_artefact(path, "quantkit_calibration", tensors, about, force=True)
    with pytest.raises(ArtefactError, match=r"damaged .*amax"):
        load_calibration(path)
