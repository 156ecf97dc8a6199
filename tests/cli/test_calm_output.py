"""Calm output: sizes in GB, equal rows as one, a sentence for a GPU that is not there."""

import json

import pytest
from click.testing import CliRunner

import quantkit as package
from quantkit.cli import quantkit
from quantkit.errors import ModelError
from quantkit.storage.sizes import tell_bytes, tell_sizes


def invoke(*words):
    return CliRunner().invoke(quantkit, [str(word) for word in words])


@pytest.mark.parametrize(
    ("nbytes", "told"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.00 kB"),
        (999_499, "999 kB"),
        (999_500, "1.00 MB"),
        (9_994_999, "9.99 MB"),
        (9_995_000, "10.0 MB"),
        (99_950_000, "100 MB"),
        (889_297_912, "889 MB"),
        (23_802_816_640, "23.8 GB"),
        (5 * 10**15, "5000 TB"),
    ],
)
def test_sizes_have_three_digits(nbytes, told):
    assert tell_bytes(nbytes) == told


def test_a_share_of_nothing_is_not_told():
    assert tell_sizes(1_719_125_304, 889_297_912) == "1.72 GB -> 889 MB (51.7%)"
    assert tell_sizes(0, 0) == "0 bytes -> 0 bytes"


def test_doctor_says_once_what_holds_for_many_operations():
    found = invoke("doctor", "--device", "cpu")
    assert found.exit_code == 0, found.output
    operations = json.loads(invoke("doctor", "--json").stdout)["operations"]
    alike = {(o["device"], o["backend"], o["reason"]) for o in operations}
    lines = found.output.splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip() == "Operations")
    rows = [line.split("│") for line in lines[start + 3 :] if "│" in line]
    assert len(rows) == len(alike) < len(operations)
    assert sum(int(row[0]) for row in rows) == len(operations)


@pytest.mark.parametrize("device", ["cuda:97", "tpu"])
def test_doctor_refuses_a_device_that_is_not_there(device):
    found = invoke("doctor", "--device", device)
    assert isinstance(found.exception, ModelError)
    assert found.stdout == ""


def test_a_pipeline_is_not_loaded_to_a_gpu_that_is_not_there(tmp_path):
    with pytest.raises(ModelError, match=r"device 'cuda:97': torch sees \w+ GPUs?; choose cpu"):
        package.load_pipeline(tmp_path, device="cuda:97")


def test_sparsify_ends_with_what_the_masks_save(pipeline_dir, tmp_path):
    how = ("-r", "fp8-sparse", "--set", "sparsity.method=magnitude", "-o")
    found = invoke("sparsify", pipeline_dir, *how, tmp_path / "masks", "-q")
    assert found.exit_code == 0, found.output
    last = found.stdout.splitlines()[-1]
    assert last.startswith("packed by the recipe: ")
    told = json.loads(invoke("sparsify", pipeline_dir, *how, tmp_path / "b", "--json").stdout)
    recipe = package.load_recipe("fp8-sparse", {"sparsity.method": "magnitude"})
    packed = package.pack(
        pipeline_dir, recipe=recipe, masks=tmp_path / "masks", output=tmp_path / "packed"
    )
    assert told["bytes_sparse"] == packed.bytes_after < told["bytes_dense"]
    assert tell_sizes(told["bytes_dense"], told["bytes_sparse"]) in last


def test_sparsify_tells_next_budgets_as_they_come(pipeline_dir, tmp_path):
    from quantkit.workflow.sparsify import sparsify

    def found(budget):
        changes = {"sparsity.method": "magnitude", "sparsity.error_budget": budget}
        return sparsify(pipeline_dir, recipe=package.load_recipe("fp8-sparse", changes))

    errors = sorted(d.error for d in found(1.0).masks.decisions if d.error is not None)
    first = found(errors[0])
    assert first.budgets, errors
    assert "with sparsity.error_budget " in str(first)
    for told in first.budgets:
        then = found(told.error_budget)
        assert (told.layers, told.nbytes) == (
            sum(d.chosen for d in then.masks.decisions), then.sizes[1]
        )  # fmt: skip
    assert found(1.0).budgets == ()


def test_sparsify_says_when_next_to_nothing_is_saved(pipeline_dir, tmp_path):
    how = ("--set", "sparsity.method=magnitude", "--set", "sparsity.error_budget=1e-9")
    found = invoke("sparsify", pipeline_dir, "-r", "fp8-sparse", *how, "-o", tmp_path / "m", "-q")
    assert found.exit_code == 0, found.output
    assert found.stdout.splitlines()[-1].startswith("under 1 % is saved: raise sparsity")


def test_verify_names_the_components(pipeline_dir, tmp_path):
    package.pack(pipeline_dir, output=tmp_path / "packed")
    assert "packed: ok: unet, " in invoke("verify", tmp_path / "packed").output
    assert "unet: ok: 1 component, " in invoke("verify", tmp_path / "packed" / "unet").output


@pytest.mark.parametrize("kind", ["model", "hessian"])
def test_calibration_refuses_more_prompts_than_there_are(pipeline_dir, tmp_path, kind):
    (tmp_path / "two.txt").write_text("a\nb\n")
    how = ("--prompts", tmp_path / "two.txt", "--count", 500, "-o", tmp_path / "out")
    recipe = {"model": "fp8-static", "hessian": "fp8-token-gptq"}[kind]
    found = invoke("calibrate", kind, pipeline_dir, "-r", recipe, *how)
    message = r"two.txt: 2 prompts, expected 500; lower the count or give more prompts"
    assert str(found.exception).endswith(message)
    assert found.exception.fields == ("count", "prompts")
    assert not (tmp_path / "out").exists()
