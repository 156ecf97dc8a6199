"""Pipelines that other tools quantized, against their original."""

import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from quantkit.eval.judging.evaluation import Pair, common_dtype, open_pair
from quantkit.eval.judging.quantized_pipeline import computing
from safetensors.torch import load_file, save_file

from quantkit.cli.evaluate_command import evaluate
from quantkit.cli.pack_command import pack as pack_command
from quantkit.errors import ModelError, QuantkitError
from quantkit.models import quantizers
from quantkit.models.quantizers import QUANTIZERS, settings_of
from quantkit.workflow.export import export
from quantkit.workflow.pack import pack
from tests.support.judge_sdnq import PROMPTS

QUICK = ("--lpips-weights", "none", "--clip", "none", "--quiet", "--count", "1", "--steps", "1")
GUIDE = Path(__file__).parents[2] / "docs/guides/evaluate.md"


def run(command, *arguments):
    return CliRunner().invoke(evaluate, [command, *map(str, arguments), *QUICK])


def refused(command, *arguments, match):
    """Run a command that writes nothing and answers in one line."""
    result = run(command, *arguments, "-o", arguments[0].parent / "nothing")
    assert isinstance(result.exception, QuantkitError), result.output
    assert result.exception.exit_code == 2
    text = str(result.exception)
    assert re.search(match, text), text
    assert "\n" not in text
    assert not (arguments[0].parent / "nothing").exists()


@pytest.fixture(scope="module")
def gguf_file(pipeline_dir, tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "unet.gguf"
    export(pipeline_dir, to="gguf:Q8_0", output=path)
    return path


# What SDNQ, diffusers' GGUF reader and quantkit made, in one table


@pytest.fixture(scope="module")
def judged(pipeline_dir, gguf_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("judged")
    pack(pipeline_dir, recipe="fp8", output=folder / "fp8")
    command = [sys.executable, "-m", "tests.support.judge_sdnq", pipeline_dir, folder,
               folder / "fp8", gguf_file]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    reports = {
        name: json.loads((folder / "out" / name / "report.json").read_text())
        for name in ("sdnq", "fp8", "unet.gguf")
    }
    return folder, reports


@pytest.mark.slow
def test_the_pictures_are_those_of_the_tool_itself(judged):
    folder, _ = judged
    expected = (np.load(folder / "plain.npy") * 255).round().astype(np.uint8)
    for index in range(len(PROMPTS)):
        file = folder / "out" / "sdnq" / "images" / "packed" / f"{index:03d}.png"
        assert np.array_equal(np.asarray(Image.open(file)), expected[index])
    original = folder / "out" / "sdnq" / "images" / "original" / "000.png"
    assert not np.array_equal(np.asarray(Image.open(original)), expected[0])


@pytest.mark.slow
def test_the_report_says_which_tool_and_which_settings(judged):
    folder, reports = judged
    encoder, unet = reports["sdnq"]["quantized_by"]
    assert (encoder["component"], unet["component"]) == ("text_encoder", "unet")
    assert {by["tool"] for by in (encoder, unet)} == {"SDNQ"}
    assert dict(unet["settings"])["weights_dtype"] == "int8"
    assert dict(encoder["settings"]) == {"weights_dtype": "uint4", "group_size": "32"}
    assert unet["config"]["quant_method"] == "sdnq"
    assert ["sdnq", unet["version"]] in reports["sdnq"]["environment"]
    for page in ("report.html", "report.md"):
        text = (folder / "out" / "sdnq" / page).read_text(encoding="utf-8").replace("\\", "")
        assert f"unet by SDNQ {unet['version']} (weights_dtype int8, group_size 0" in text
        assert "no kernel of quantkit ran" in text
        assert "kernel calls" not in text
        assert "computed the packed layers" not in text


@pytest.mark.slow
def test_nothing_is_claimed_of_kernels_that_are_not_quantkits(judged):
    _, reports = judged
    for name in ("sdnq", "unet.gguf"):
        report = reports[name]
        assert report["kernels"]["total_calls"] == 0
        assert report["kernels"]["worst_deviation"] is None
        assert {row["deviation"] for row in report["layers"]} <= {None}
        assert report["timesteps"]["local"]["mean"][0] > 0
    assert reports["fp8"]["kernels"]["total_calls"] > 0
    assert reports["fp8"]["quantized_by"] == []


@pytest.mark.slow
def test_bytes_are_those_of_the_files(judged, pipeline_dir, gguf_file):
    folder, reports = judged
    sizes = {
        path: sum(f.stat().st_size for f in path.glob("*.safetensors"))
        for root in (pipeline_dir, folder / "sdnq")
        for path in (root / "unet", root / "text_encoder")
    }
    before, after = (
        sum(size for path, size in sizes.items() if path.is_relative_to(root))
        for root in (pipeline_dir, folder / "sdnq")
    )
    sdnq, gguf = reports["sdnq"], reports["unet.gguf"]
    assert (sdnq["original"]["nbytes"], sdnq["packed"]["nbytes"]) == (before, after)
    assert gguf["original"]["nbytes"] == sizes[pipeline_dir / "unet"]
    assert gguf["packed"]["nbytes"] == gguf_file.stat().st_size


@pytest.mark.slow
def test_layers_are_those_that_the_tool_quantized(judged):
    folder, reports = judged
    rows = reports["sdnq"]["layers"]
    stored = {row["name"]: row for row in rows if row["component"] == "unet"}
    quantized = {name for name, row in stored.items() if row["format"] not in {"F16", "F32"}}
    assert quantized == set(json.loads((folder / "layers.json").read_text()))
    tensors = load_file(folder / "sdnq" / "unet" / "diffusion_pytorch_model.safetensors")
    name = "mid_block.resnets.0.conv1"
    assert name in quantized
    assert stored[name]["bytes_after"] == sum(
        tensors[f"{name}.{part}"].nbytes for part in ("weight", "scale")
    )
    count = sum(row["format"] not in {"F16", "F32"} for row in rows)
    assert reports["sdnq"]["packing"]["packed"] == count
    assert reports["unet.gguf"]["layers"] == []


@pytest.mark.slow
def test_the_table_of_methods_has_tools_beside_packed_ones(judged):
    text = (judged[0] / "out" / "methods.md").read_text(encoding="utf-8")
    lines = text.partition("## Table of methods")[2].splitlines()
    rows = {
        cells[1].partition("]")[0].strip(" ["): [cell.strip().replace("\\", "") for cell in cells]
        for line in lines
        if line.startswith("|") and (cells := re.split(r"(?<!\\)\|", line))
    }
    assert rows["sdnq"][2].startswith("SDNQ uint4 32, SDNQ int8 0")
    assert rows["sdnq"][-2] == "SDNQ"
    assert rows["unet.gguf"][2] == "GGUF F32 125, F16 43, Q8_0 40"
    assert rows["unet.gguf"][-2] == "GGUF"
    assert rows["fp8"][2] == "fp8"
    assert rows["fp8"][-2] not in {"SDNQ", "GGUF", "torch"}


# What is missing or odd is said before the original runs


@pytest.fixture
def installed(monkeypatch):
    """Tell which versions of packages are installed; all others are missing."""
    found = {}

    def version(package):
        if package not in found:
            raise PackageNotFoundError(package)
        return found[package]

    monkeypatch.setattr(quantizers, "version", version)
    return found


@pytest.fixture
def forged(pipeline_dir, tmp_path):
    """Return a function that writes a pipeline whose UNet says that a tool quantized it."""

    def write(entry, component="unet"):
        folder = shutil.copytree(pipeline_dir, tmp_path / "other")
        file = folder / component / "config.json"
        config = json.loads(file.read_text()) | {"quantization_config": entry}
        file.write_text(json.dumps(config))
        return folder

    return write


@pytest.mark.parametrize("method", QUANTIZERS)
@pytest.mark.parametrize("command", ["report", "compare"])
def test_a_missing_package_is_named_with_its_cure(method, command, forged, pipeline_dir, installed):
    tool = QUANTIZERS[method]
    other = forged({"quant_method": method})
    line = (
        rf"other/unet: quantized by {tool.name}, whose package {tool.package} is not installed; "
        rf"pip install '{tool.requirement}'$"
    )
    refused(command, pipeline_dir, other, match=line)
    refused(command, pipeline_dir, other, "-n", match=line)


def test_a_package_that_is_too_old_is_named_with_its_cure(forged, pipeline_dir, installed):
    installed["torchao"] = "0.12.0"
    refused(
        "report", pipeline_dir, forged({"quant_method": "torchao"}),
        match=r"found torchao 0\.12\.0, expected torchao>=0\.16; pip install -U 'torchao>=0\.16'",
    )  # fmt: skip


def test_a_version_between_releases_counts(forged, pipeline_dir, installed):
    installed["torchao"] = "0.19.0.dev20261101+cu130"
    pair = open_pair(str(pipeline_dir), forged({"quant_method": "torchao"}))
    assert pair.quantized is not None


@pytest.mark.parametrize(
    "entry",
    [
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {"load_in_8bit": True},
        {"quant_method": "nunchaku_lite"},
    ],
    ids=["4-bit", "without a method", "nunchaku"],
)
def test_what_needs_a_gpu_is_refused_on_a_cpu(entry, forged, pipeline_dir, installed):
    installed.update(bitsandbytes="0.48.0", kernels="0.10.0")
    other = forged(entry)
    for command in ("report", "compare"):
        refused(
            command, pipeline_dir, other, "--device", "cpu",
            match=r"other/unet: quantized by .*, which runs on a GPU alone, found device cpu",
        )  # fmt: skip


def test_text_encoders_are_left_to_transformers_on_a_cpu(forged, pipeline_dir, installed):
    installed["bitsandbytes"] = "0.50.2"
    other = forged({"quant_method": "bitsandbytes", "load_in_4bit": True}, "text_encoder")
    result = run("report", pipeline_dir, other, "-o", other.parent / "out", "-n", "--device", "cpu")
    assert result.exit_code == 0, result.exception
    assert "would run 1 prompts of 1 steps through both pipelines" in result.output


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        (
            {"quant_method": "gptq5"},
            r"quant_method 'gptq5', expected one of sdnq, torchao, bitsandb",
        ),
        ({"quant_method": 5}, "quant_method 5, expected one of sdnq"),
        ({"quant_method": ["sdnq"]}, r"quant_method \['sdnq'\], expected one of sdnq"),
        ({"quant_method": "x\ny" * 400}, "quant_method 'x"),
        ({}, "no quant_method, expected one of sdnq"),
        ({"load_in_8bit": False}, "no quant_method"),
        ([], "quantization_config is a list, expected an object"),
        ("sdnq", "quantization_config is a str, expected an object"),
        (8, "quantization_config is a int, expected an object"),
        (False, "quantization_config is a bool, expected an object"),
    ],
    ids=lambda value: json.dumps(value)[:30],
)
def test_odd_configs_are_refused_by_file(entry, match, forged, pipeline_dir):
    refused("report", pipeline_dir, forged(entry), match=rf"other/unet/config\.json: .*{match}")


def test_null_is_a_model_that_nobody_quantized(forged, pipeline_dir):
    pair = open_pair(str(pipeline_dir), forged(None))
    assert pair.quantized is None
    assert pair.plain is not None


@pytest.mark.parametrize("entry", [{"quant_method": "sdnq"}, [], {}, {"quant_method": [1]}, 0])
def test_other_commands_refuse_it_with_the_cure(entry, forged, tmp_path):
    result = CliRunner().invoke(
        pack_command, [str(forged(entry)), "-r", "fp8", "-o", str(tmp_path / "packed")]
    )
    assert isinstance(result.exception, ModelError)
    name = "SDNQ" if isinstance(entry, dict) and entry.get("quant_method") == "sdnq" else ".*"
    assert re.search(
        rf"other/unet: packed already \(by {name}\); start from the 16-bit model that it came from "
        r"\('quantkit import' takes its single file, or SDNQ's directory\); 'quantkit eval report' "
        "compares the two",
        str(result.exception),
    )


# What does not belong together


def test_another_pipeline_is_refused(forged, pipeline_dir, installed):
    installed["sdnq"] = "0.2.8"
    other = forged({"quant_method": "sdnq"})
    index = json.loads((other / "model_index.json").read_text())
    index["unet"] = ["diffusers", "SD3Transformer2DModel"]
    (other / "model_index.json").write_text(json.dumps(index))
    refused(
        "report", pipeline_dir, other,
        match="its unet is SD3Transformer2DModel, expected UNet2DConditionModel as in",
    )  # fmt: skip


def test_a_denoiser_without_all_layers_is_refused(forged, pipeline_dir, installed):
    installed["sdnq"] = "0.2.8"
    other = forged({"quant_method": "sdnq"})
    file = other / "unet" / "diffusion_pytorch_model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if "mid_block.resnets.1" not in k}, file)
    refused(
        "report", pipeline_dir, other,
        match=r"other/unet: no weights of 3 layers of .*, as mid_block\.resnets\.1\.conv1; ",
    )  # fmt: skip


def test_pickles_are_refused(forged, pipeline_dir, installed):
    installed["torchao"] = "0.18.0"
    other = forged({"quant_method": "torchao"})
    file = other / "unet" / "diffusion_pytorch_model.safetensors"
    file.rename(file.with_suffix(".bin"))
    refused(
        "report",
        pipeline_dir,
        other,
        match=r"only pickled weights \(diffusion_pytorch_model\.bin\)",
    )


def test_a_component_alone_takes_the_place_of_its_class(forged, pipeline_dir, installed):
    installed["sdnq"] = "0.2.8"
    other = forged({"quant_method": "sdnq"})
    found = open_pair(str(pipeline_dir), other / "unet").quantized
    assert found is not None
    assert not found.is_pipeline
    assert [component.name for component in found.components] == ["unet"]
    file = other / "unet" / "config.json"
    file.write_text(file.read_text().replace("UNet2DConditionModel", "UNet2DModel"))
    refused(
        "report", pipeline_dir, other / "unet",
        match=r"a component alone, UNet2DModel, expected a class that .* has once, found none",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        (
            "unet.safetensors",
            b"",
            "a single file, expected a directory or .gguf file; 'quantkit i",
        ),
        ("unet.gguf", b"PK", "not a GGUF file"),
        ("unet.gguf", b"GGUF" + b"\xff" * 40, "GGUF"),
    ],
)
def test_other_files_are_refused(name, content, match, pipeline_dir, tmp_path):
    (tmp_path / name).write_bytes(content)
    refused("report", pipeline_dir, tmp_path / name, match=match)


@pytest.mark.parametrize("command", ["report", "compare"])
def test_what_cannot_be_loaded_is_refused_before_the_original_runs(
    command, pipeline_dir, tmp_path, monkeypatch
):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "sd1")
    writer.add_tensor("time_embed.0.weight", np.zeros((7, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr(
        "quantkit.workflow.evaluate.measure_baseline", lambda *_, **__: pytest.fail("it ran")
    )
    refused(
        command, pipeline_dir, tmp_path / "other.gguf",
        match=r"other\.gguf: it cannot be loaded here: .*; try it in diffusers alone, or pip insta",
    )  # fmt: skip


def test_a_gguf_file_of_a_class_that_diffusers_reads_none_of(gguf_file, pipeline_dir, monkeypatch):
    import diffusers

    monkeypatch.delattr(diffusers.loaders.FromOriginalModelMixin, "from_single_file")
    refused("report", pipeline_dir, gguf_file, match="diffusers reads none of UNet2DConditionModel")


# Dtypes, words, and what a tool raises


def torchao_of(forged, dtype):
    """Return a pipeline as torchao writes it: what it left alone decides the dtype."""
    other = forged({"quant_method": "torchao"})
    file = other / "unet" / "diffusion_pytorch_model.safetensors"
    tensors = {name: value.to(dtype) for name, value in load_file(file).items()}
    name = "mid_block.resnets.0.time_emb_proj"
    weight = tensors.pop(f"{name}.weight")
    tensors[f"{name}._weight_qdata"] = weight.to(torch.int8)
    # Scales in float32, as many as there are other tensors: they say nothing of the dtype.
    for index in range(len(tensors) + 1):
        tensors[f"{name}._weight_scale{index}"] = torch.ones(len(weight), 1)
    save_file(tensors, file)
    return other


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_all_run_in_the_dtype_that_a_tool_is_bound_to(dtype, forged, pipeline_dir, installed):
    installed["torchao"] = "0.18.0"
    pair = open_pair(str(pipeline_dir), torchao_of(forged, dtype))
    assert pair.dtype == dtype
    assert common_dtype([pair]) == dtype
    assert common_dtype([Pair(pair.name, pair.model, pair.packed), pair]) == dtype
    assert common_dtype([Pair(pair.name, pair.model, pair.packed)]) is None


def test_tools_of_two_dtypes_are_not_compared(forged, pipeline_dir, installed, tmp_path):
    installed["torchao"] = "0.18.0"
    half = torchao_of(forged, torch.float16).rename(tmp_path / "half")
    refused(
        "compare", pipeline_dir, half, torchao_of(forged, torch.bfloat16),
        match=r"its own dtype alone \(.*half float16, .*other bfloat16\); report on them one by",
    )  # fmt: skip


#: As the tools wrote them: SDNQ 0.2.8, torchao 0.18.0, optimum-quanto 0.2.7, bitsandbytes'
#: documented keys.
CONFIGS = [
    ("sdnq", {"weights_dtype": "uint4", "group_size": 0, "use_svd": True, "svd_rank": 32,
              "use_hadamard": False, "hadamard_group_size": 256, "quantized_matmul_dtype": None,
              "use_quantized_matmul": False, "quant_conv": False},
     {"weights_dtype": "uint4", "group_size": "0", "svd_rank": "32"}),
    ("torchao", {"quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2,
                                            "_data": {"group_size": None}}}},
     {"quant_type": "Int8WeightOnlyConfig"}),
    ("quanto", {"weights_dtype": "float8", "modules_to_not_convert": None},
     {"weights_dtype": "float8"}),
    ("bitsandbytes", {"load_in_8bit": True, "load_in_4bit": False, "bnb_4bit_quant_type": "fp4"},
     {"load_in_8bit": "True"}),
    ("bitsandbytes", {"load_in_8bit": False, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
                      "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_use_double_quant": False},
     {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}),
    ("sdnq", {"weights_dtype": ["a"] * 99, "group_size": {"x": [1]}, "use_svd": "?"},
     {"weights_dtype": str(["a"] * 99)[:80], "group_size": "x [1]"}),
    ("torchao", {}, {}),
    ("torchao", {"quant_type": {"default": {"_type": "a\nb"}, "k": None}},
     {"quant_type": "'a\\nb', k None"}),
]  # fmt: skip


@pytest.mark.parametrize(("method", "config", "expected"), CONFIGS)
def test_settings_are_said_in_words(method, config, expected):
    assert dict(settings_of(QUANTIZERS[method], config)) == expected


def test_what_a_tool_raises_is_one_line_with_its_name(forged, pipeline_dir, installed):
    installed["sdnq"] = "0.2.8"
    found = open_pair(str(pipeline_dir), forged({"quant_method": "sdnq"})).quantized
    line = r"other: it cannot .*: no kernel for cpu; .* -U sdnq$"
    with pytest.raises(ModelError, match=line), computing(found):
        raise NotImplementedError("no kernel\nfor cpu")
    with pytest.raises(NotImplementedError), computing(None):
        raise NotImplementedError


def test_the_guide_has_every_tool():
    guide = GUIDE.read_text(encoding="utf-8")
    for method, tool in QUANTIZERS.items():
        assert f"\n| `{method}` | {tool.name} | `{tool.requirement}` | " in guide
