"""Merging calibrations that were taken in parts."""

import hashlib
import json
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner

from quantkit.calibration.observing.collect import calibrate
from quantkit.calibration.statistics.layer_statistics import load_calibration, save_calibration
from quantkit.calibration.statistics.merge import merge
from quantkit.cli.calibrate_command import calibrate as calibrate_command
from quantkit.errors import ArtefactError, OutputError
from quantkit.progress import silent
from quantkit.recipe.load import change_recipe
from tests.support.observed import (
    FIELDS,
    PROMPTS,
    RECIPE,
    SAMPLES,
    filtered,
    sample,
    statistics_of,
)


@pytest.fixture(scope="module")
def halves(sd):
    """Calibrations of the first two prompts and of the last, as the run over all three has them."""
    later = change_recipe(RECIPE, {"calibration.seed": 9})
    return {
        "a": calibrate(sd, RECIPE, PROMPTS[:2], device="cpu", progress=silent),
        "b": calibrate(sd, later, PROMPTS[2:], device="cpu", progress=silent),
    }


def test_merged_halves_are_the_whole_run(sd_calibration, halves):
    merged = merge(halves)
    assert merged.edges == sd_calibration.edges
    about, wanted = merged.metadata, sd_calibration.metadata
    told = hashlib.sha256(
        "\n".join(part.metadata.prompts_digest for part in halves.values()).encode()
    ).hexdigest()
    assert about == replace(wanted, prompts_digest=told)
    assert set(merged.layers["unet"]) == set(sd_calibration.layers["unet"])
    for name, whole in sd_calibration.layers["unet"].items():
        found = merged.layers["unet"][name]
        exact = ("amax", "histogram", "channel_amax", "count", "updates")
        for field in (*exact, "samples", "sample_priority", "sample_count"):
            assert torch.equal(getattr(found, field), getattr(whole, field)), (name, field)
        torch.testing.assert_close(found.second_moment, whole.second_moment, rtol=1e-6, atol=0)
        torch.testing.assert_close(found.mean, whole.mean, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found.moving_amax, whole.moving_amax, rtol=1e-12, atol=0)


def test_order_matters_to_the_average_alone(halves):
    name = "mid_block.attentions.0.proj_in"
    one, two = (
        merge(dict(p)).layers["unet"][name] for p in (halves.items(), [*halves.items()][::-1])
    )
    assert torch.equal(one.histogram, two.histogram)
    torch.testing.assert_close(one.second_moment, two.second_moment, rtol=1e-6, atol=0)
    assert not torch.equal(one.moving_amax, two.moving_amax)


def test_three_parts_merge_as_two_and_one():
    parts = [statistics_of(sample(name, rows=50 * i)) for i, name in enumerate(SAMPLES[:3], 1)]
    found = parts[0].followed_by(parts[1]).followed_by(parts[2])
    other = parts[0].followed_by(parts[1].followed_by(parts[2]))
    wanted = statistics_of(
        torch.cat([sample(n, rows=50 * i) for i, n in enumerate(SAMPLES[:3], 1)])
    )
    for field in FIELDS:
        torch.testing.assert_close(getattr(found, field), getattr(other, field), rtol=1e-6, atol=0)
        if "sample" not in field and field not in {"moving_amax", "updates"}:
            torch.testing.assert_close(getattr(found, field), getattr(wanted, field))
    assert float(found.moving_amax) == pytest.approx(filtered([float(p.amax) for p in parts]))


def renamed(part):
    return replace(
        part,
        layers={"transformer": part.layers["unet"]},
        metadata=replace(part.metadata, digests={"transformer": part.metadata.digests["unet"]}),
    )


def with_digest(part, layer, digest):
    digests = {"unet": {**part.metadata.digests["unet"], layer: digest}}
    return replace(part, metadata=replace(part.metadata, digests=digests))


def with_layers(part, names):
    """Return the part as of a run that listened to these layers, and saw all of them."""
    table, digests = part.layers["unet"], part.metadata.digests["unet"]
    known = {"unet": {name: digests.get(name, digests[FIRST]) for name in names}}
    return replace(
        part,
        layers={"unet": {name: table.get(name, table[FIRST]) for name in names}},
        metadata=replace(part.metadata, digests=known),
    )


FIRST = "mid_block.attentions.0.proj_in"

OTHERS = {
    "components": (renamed, "b: components transformer, expected unet as in a;"),
    "edges": (
        lambda p: replace(p, edges=(500.5,)),
        r"b: bucket edges 500\.5, expected .* as in a;",
    ),
    "steps": (
        lambda p: replace(p, metadata=replace(p.metadata, steps=5)),
        "b: steps 5, expected 4 as in a;",
    ),
    "guidance": (
        lambda p: replace(p, metadata=replace(p.metadata, guidance=1.0)),
        "b: guidance 1.0, expected None as in a;",
    ),
    "model": (
        lambda p: with_digest(p, FIRST, "0" * 64),
        rf"b: the weight of unet/{FIRST} is not that of a; merge calibrations of one model",
    ),
    "missing layer": (
        lambda p: with_layers(p, set(p.layers["unet"]) - {FIRST}),
        rf"b: no layer unet/{FIRST}, which a has; run 'quantkit calibrate model' again",
    ),
    "more layers": (
        lambda p: with_layers(p, (*p.layers["unet"], "zz")),
        "a: no layer unet/zz, which b has;",
    ),
}


@pytest.mark.parametrize(("change", "message"), OTHERS.values(), ids=OTHERS)
def test_parts_that_do_not_belong_together_are_refused(halves, change, message):
    with pytest.raises(ArtefactError, match=message) as caught:
        merge({"a": halves["a"], "b": change(halves["b"])})
    assert "\n" not in str(caught.value)


def test_same_run_does_not_count_twice(halves):
    with pytest.raises(
        ArtefactError, match="c: the same prompts and seed as a; give each run once"
    ):
        merge({**halves, "c": halves["a"]})


def test_command_merges_files(halves, sd_calibration, tmp_path):
    paths = [tmp_path / f"{name}.safetensors" for name in halves]
    for path, part in zip(paths, halves.values(), strict=True):
        save_calibration(part, path, force=False)
    output = tmp_path / "c.safetensors"

    def invoke(*arguments):
        return CliRunner().invoke(calibrate_command, ["merge", *map(str, arguments)])

    result = invoke(*paths, "-o", output, "--json")
    assert result.exit_code == 0, result.output
    said, stored = json.loads(result.stdout), load_calibration(output)
    assert said["prompts"] == stored.metadata.prompts == 3
    assert said["components"]["unet"]["calls"] == sd_calibration.metadata.calls["unet"]
    assert isinstance(invoke(*paths, "-o", output).exception, OutputError)
    assert str(output) in invoke(*paths, "-o", output, "--force").stdout
    for few in (paths[:1], [paths[0], paths[0]]):
        error = invoke(*few, "-o", tmp_path / "d").exception
        assert "expected two or more different ones" in str(error)
    assert not (tmp_path / "d").exists()
