"""Bad input to pack, inspect and verify: one line that names it, exit code 2, nothing written."""

import errno
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit import cli
from quantkit.checkpoint.reader import open_packed
from quantkit.models.quantizers import CONFIG_KEY
from quantkit.models.source import open_model
from quantkit.progress import silent
from quantkit.recipe.schema import Recipe
from quantkit.sparsity.choose import choose_masks
from quantkit.sparsity.maskfile import save_masks
from quantkit.storage import system
from quantkit.storage.digest import sha256_of
from quantkit.storage.tensorfile import read_header
from tests.support.headers import write_header

pytestmark = pytest.mark.usefixtures("any_model")

WEIGHTS = "diffusion_pytorch_model.safetensors"


class Result:
    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def quantkit(capsys):
    """Run the command line in this process; return exit code, stdout and stderr."""

    def run(*arguments):
        with pytest.raises(SystemExit) as caught:
            cli.main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(caught.value.code, captured.out, captured.err)

    return run


@pytest.fixture
def refused(quantkit, tmp_path):
    """Run a command that must fail with one line, and leave every file as it was."""

    def run(*arguments, match):
        before = snapshot(tmp_path)
        result = quantkit(*arguments, "--quiet")
        assert result.code == 2, result.out + result.err
        assert result.out == ""
        lines = result.err.splitlines()
        assert len(lines) == 1, result.err
        assert lines[0].startswith("quantkit: error: ")
        assert re.search(match, lines[0]), lines[0]
        assert snapshot(tmp_path) == before

    return run


def snapshot(folder):
    return {
        path.relative_to(folder): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def tensors():
    torch.manual_seed(11)
    return {
        "a.conv.weight": torch.randn(16, 32, 3, 3).half(),
        "a.fc.weight": torch.randn(32, 64).half(),
        "a.fc.bias": torch.randn(32).half(),
        "a.norm.weight": torch.randn(32).half(),
    }


def component(folder, values):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"_class_name": "UNet2DConditionModel"}))
    save_file(values, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


@pytest.fixture
def source(tmp_path):
    return component(tmp_path / "source", tensors())


@pytest.fixture
def packed(source, tmp_path, quantkit):
    recipe = tmp_path / "sparse.yaml"
    recipe.write_text("name: sparse\nsparsity: {}\n")
    result = quantkit("pack", source, "-r", recipe, "-o", tmp_path / "packed", "--quiet")
    assert result.code == 0, result.err
    return tmp_path / "packed"


# What must work, so that what follows fails for its own reason.


def test_the_three_commands_agree(source, packed, tmp_path, quantkit):
    again = ("pack", source, "-r", tmp_path / "sparse.yaml", "-o", packed, "--force")
    summary = json.loads(quantkit(*again, "--json", "--quiet").out)
    shown = json.loads(quantkit("inspect", packed, "--json").out)
    checked = json.loads(quantkit("verify", packed, "--json", "--quiet").out)
    assert summary["written"] is True
    assert checked["ok"] is True
    assert checked["layers"] == shown["totals"]["layers"] == 2
    sizes = {layer["name"]: layer["bytes_after"] for layer in shown["layers"]}
    assert sizes == {layer["name"]: layer["bytes_after"] for layer in summary["layers"]}
    assert shown["components"][0]["recipe"]["name"] == "sparse"
    # 16 x 288: half the codes, a byte of metadata for 8 weights, a scale per channel.
    assert sizes["a.conv"] == 16 * 288 // 2 + 16 * 288 // 8 + 16 * 4


def test_tables_show_every_layer(packed, quantkit, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    table = quantkit("inspect", packed).out
    row = next(line for line in table.splitlines() if "a.conv" in line)
    for cell in ("conv2d", "16x32x3x3", "e4m3fn", "channel", "2:4", "token", "9216", "2944"):
        assert cell in row
    assert "2 layers: " in quantkit("inspect", packed, "--quiet").out
    assert "ok: 1 component, 2 packed layers, 8 tensors" in quantkit("verify", packed, "-q").out


def test_pack_says_what_it_did(source, tmp_path, quantkit, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    recipe = tmp_path / "r.yaml"
    recipe.write_text("name: r\nsparsity: {}\noverrides: [{layers: [a.fc], keep: true}]\n")
    (source / "other.bin").write_text("x")
    (source / "NOTES.md").write_text("hello")
    command = ("pack", source, "-r", recipe, "-o", tmp_path / "packed")
    planned = quantkit(*command, "-n").out
    assert not (tmp_path / "packed").exists()
    done = quantkit(*command).out
    assert planned.replace("nothing written", f"written to {tmp_path / 'packed'}") == done
    assert re.search(r"kept by the recipe +│ +1 │ a\.fc", done)
    assert "Left out (other weights): other.bin" in done
    assert "copied: 1 files, 5 bytes" in done
    assert re.search(r"UNet2DConditionModel: [\d.]+ \wB -> [\d.]+ \wB \(\d+\.\d%\)", done)


# MODEL


def test_no_such_directory(refused, tmp_path):
    refused("pack", tmp_path / "nowhere", "-o", tmp_path / "o", match="nowhere: no such directory")


def test_not_a_diffusers_directory(refused, tmp_path):
    (tmp_path / "photos").mkdir()
    match = "photos: not a diffusers directory: found neither model_index.json"
    refused("pack", tmp_path / "photos", "-o", tmp_path / "o", match=match)
    refused("inspect", tmp_path / "photos", match=match)
    refused("verify", tmp_path / "photos", match=match)


def test_component_without_weights(refused, source, tmp_path):
    (source / WEIGHTS).unlink()
    refused("pack", source, "-o", tmp_path / "o", match=f"source: no weights: {WEIGHTS} is missing")


def test_text_encoder(refused, pipeline_dir, tmp_path):
    folder = pipeline_dir / "text_encoder"
    match = "says nothing of text encoders; add text_encoders"
    refused("pack", folder, "-o", tmp_path / "o", match=match)


def test_packed_already(refused, packed, tmp_path):
    refused("pack", packed, "-o", tmp_path / "o", match="packed: packed already")


def test_truncated_source(refused, source, tmp_path):
    data = (source / WEIGHTS).read_bytes()
    (source / WEIGHTS).write_bytes(data[:-1])
    refused("pack", source, "-o", tmp_path / "o", match=f"{WEIGHTS}: truncated")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["a.conv.weight", "a.norm.weight"])
def test_no_number_in_a_tensor(refused, tmp_path, name, value):
    values = tensors()
    values[name].view(-1)[40 % values[name].numel()] = value
    folder = component(tmp_path / "source", values)
    index = r"\[0, 4, 1, 1\]" if name == "a.conv.weight" else r"\[8\]"
    match = rf"{WEIGHTS}: {re.escape(name)}{index}: found {value}, expected a finite number"
    refused("pack", folder, "-o", tmp_path / "o", match=match)


def test_fnuz_weight(refused, source, tmp_path):
    write_header(source / WEIGHTS, {"a.fc.weight": [32, 64]}, dtype="F8_E4M3FNUZ")
    match = r"a\.fc\.weight: found F8_E4M3FNUZ, the FP8 of MI300"
    refused("pack", source, "-o", tmp_path / "o", match=match)


def test_k_that_does_not_divide(refused, source, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("name: r\nweight: {granularity: 'group:24'}\n")
    match = r"a\.\w+: . \d+ is not a multiple of group size 24; use granularity channel"
    refused("pack", source, "-r", recipe, "-o", tmp_path / "o", match=match)


def test_missing_shard_of_the_source(refused, source, tmp_path):
    names = dict.fromkeys(tensors(), "diffusion_pytorch_model-00001-of-00002.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": names}
    (source / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    refused("pack", source, "-o", tmp_path / "o", match="00001-of-00002.*: missing shard")


# Recipe, masks, calibration


def test_unknown_recipe_key(refused, source, tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text("name: r\nweight: {granularty: channel}\n")
    match = r"r\.yaml: unknown key 'weight\.granularty'; did you mean 'granularity'\?"
    refused("pack", source, "-r", recipe, "-o", tmp_path / "o", match=match)


def test_static_recipe_without_calibration(refused, source, tmp_path):
    command = ("pack", source, "-r", "fp8-static", "-o", tmp_path / "o")
    refused(*command, match=r"static needs statistics; give a calibration, .* \(--calibration\)")


def test_masks_for_another_model(refused, source, tmp_path):
    other = tensors()
    other["a.fc.weight"][0, 0] += 1
    stranger = component(tmp_path / "stranger", other)
    recipe = Recipe.model_validate({"name": "t", "sparsity": {}})
    masks = choose_masks(open_model(str(stranger)), recipe, None, progress=silent)
    save_masks(masks, tmp_path / "masks.safetensors", force=False)
    theirs, ours = (
        sha256_of(f / WEIGHTS, read_header(f / WEIGHTS).tensors["a.fc.weight"])
        for f in (stranger, source)
    )
    command = ("pack", source, "--masks", tmp_path / "masks.safetensors", "-o", tmp_path / "o")
    match = (
        rf"masks: layer a\.fc: made from a weight with SHA-256 {theirs}, but the model's has {ours}"
    )
    refused(*command, match=match)


@pytest.mark.parametrize("option", ["--masks", "--calibration"])
def test_an_artefact_that_is_none(refused, source, tmp_path, option):
    file = tmp_path / "file.safetensors"
    command = ("pack", source, option, file, "-o", tmp_path / "o")
    refused(*command, match=r"file\.safetensors: missing")
    save_file({"x": torch.zeros(1)}, file)
    refused(*command, match=r"file\.safetensors: not a quantkit_\w+ file")
    file.write_bytes(b"garbage!")
    refused(*command, match=r"file\.safetensors: (damaged|truncated)")


# Output


def test_output_exists(refused, source, tmp_path):
    (tmp_path / "o").mkdir()
    refused("pack", source, "-o", tmp_path / "o", match=r"o: exists already; .* \(--force\)")


def test_output_over_the_model(refused, source):
    refused("pack", source, "-o", source, "--force", match="overlaps the input")


def test_no_space_left(refused, source, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(system, "_write_some", full)
    refused("pack", source, "-o", tmp_path / "o", match="o: no space left on the device")


def test_output_under_a_file(refused, source, tmp_path):
    (tmp_path / "file").write_text("")
    refused("pack", source, "-o", tmp_path / "file" / "o", match="cannot be written")


# PACKED


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_not_packed(refused, source, command):
    refused(command, source, match="source: nothing in it is packed by quantkit")


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_truncated(refused, packed, command):
    data = (packed / WEIGHTS).read_bytes()
    (packed / WEIGHTS).write_bytes(data[:-5])
    refused(command, packed, match=f"{WEIGHTS}: truncated")


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_newer_version(refused, packed, command):
    config = json.loads((packed / "config.json").read_text())
    config[CONFIG_KEY]["format_version"] = 9
    (packed / "config.json").write_text(json.dumps(config))
    match = r"config\.json: .*format_version 9, expected 1: .*pack the model again, or upgrade"
    refused(command, packed, match=match)


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_missing_weights(refused, packed, command):
    (packed / WEIGHTS).unlink()
    refused(command, packed, match="packed: found 0 weight files")


@pytest.mark.parametrize("name", ["a.conv.weight", "a.conv.weight_meta", "a.fc.bias"])
@pytest.mark.parametrize("bit", [0, 3, 7])
def test_a_flipped_bit(refused, packed, name, bit):
    flip(packed, name, bit)
    match = rf"{re.escape(name)}: damaged: SHA-256 [0-9a-f]{{64}}, expected [0-9a-f]{{64}}"
    refused("verify", packed, match=match)


def flip(packed, name, bit):
    info = read_header(packed / WEIGHTS).tensors[name]
    data = bytearray((packed / WEIGHTS).read_bytes())
    data[info.start + info.nbytes // 2] ^= 1 << bit
    (packed / WEIGHTS).write_bytes(data)


@pytest.mark.parametrize("seed", range(40))
def test_no_flipped_bit_changes_what_is_loaded(quantkit, packed, seed):
    loaded = contents(packed)
    data = bytearray((packed / WEIGHTS).read_bytes())
    place = int(torch.randint(8 * len(data), (), generator=torch.Generator().manual_seed(seed)))
    data[place // 8] ^= 1 << place % 8
    (packed / WEIGHTS).write_bytes(data)
    result = quantkit("verify", packed, "--quiet")
    if result.code == 0:
        # A letter of the recipe or of a source's digest, which no loader reads.
        assert contents(packed) == loaded
    else:
        assert result.code == 2
        assert len(result.err.splitlines()) == 1


def contents(packed):
    component = open_packed(packed).components[0]
    tensors = {name: t.reshape(-1).tolist() for name, t in load_file(packed / WEIGHTS).items()}
    return tensors, {name: record.shape for name, record in component.records.items()}


def test_verify_lists_all(packed, quantkit):
    for name in ("a.conv.weight", "a.fc.bias"):
        flip(packed, name, 0)
    result = quantkit("verify", packed, "--all", "-q")
    assert result.code == 2
    assert len([line for line in result.out.splitlines() if "damaged: SHA-256" in line]) == 2
    assert result.err == f"quantkit: error: {packed}: 2 rules are broken\n"
    report = json.loads(quantkit("verify", packed, "--all", "-q", "--json").out)
    assert report["ok"] is False
    assert len(report["breaches"]) == 2


def test_a_scale_that_was_rounded_to_half_precision(refused, packed):
    values = load_file(packed / WEIGHTS)
    metadata = read_header(packed / WEIGHTS).metadata
    values["a.fc.weight_scale"] = values["a.fc.weight_scale"].half()
    save_file(values, packed / WEIGHTS, metadata=metadata)
    refused("inspect", packed, match=r"a\.fc\.weight_scale: found F16 \[32\], expected F32 \[32\]")


def test_a_component_of_a_pipeline_is_named(refused, pipeline_dir, tmp_path, quantkit):
    assert quantkit("pack", pipeline_dir, "-o", tmp_path / "packed", "-q").code == 0
    shutil.rmtree(tmp_path / "packed" / "vae")
    (tmp_path / "packed" / "unet" / WEIGHTS).write_bytes(b"")
    refused("verify", tmp_path / "packed", match=rf"unet/{WEIGHTS}: truncated")
