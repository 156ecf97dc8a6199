"""Directories that SDNQ wrote, compared with what SDNQ itself makes of their codes."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.checkpoint.reader import open_packed
from quantkit.cli import quantkit as command
from quantkit.errors import ModelError, NonFiniteError
from quantkit.interchange.sdnq_codes import unpack
from quantkit.workflow.export import export
from quantkit.workflow.pack import pack

WEIGHTS = "diffusion_pytorch_model.safetensors"
LAYER = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"


# What SDNQ wrote


@pytest.fixture(scope="module")
def written(pipeline_dir, tmp_path_factory):
    """Directories of SDNQ, written in one process of its own: importing it takes 10 s."""
    folder = tmp_path_factory.mktemp("sdnq")
    line = [sys.executable, "-m", "tests.support.write_sdnq", str(pipeline_dir), str(folder)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("case", ["svd/", "products/", "tensor/", "mixed/", "pipeline/unet"])
def test_a_component_has_the_weights_that_sdnq_computes(case, written, tmp_path):
    name, _, component = case.partition("/")
    result = quantkit.import_file(written / case, output=tmp_path / "out")
    found = load_file(tmp_path / "out" / WEIGHTS)
    with safe_open(written / f"{name}.{component}.safetensors", framework="pt") as file:
        coded = file.metadata()["layers"].split()
        assert found.keys() == set(file.keys())
        wrong = [n for n, v in found.items() if not torch.equal(v, file.get_tensor(n).bfloat16())]
    assert not wrong
    assert len(coded) > 50
    assert f"{len(coded)} weights were quantized before (SDNQ's " in result.notes[0]
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


@pytest.mark.slow
def test_a_pipeline_is_dequantized_with_its_encoder(written, tmp_path):
    output = tmp_path / "out"
    result = CliRunner().invoke(command, ["import", str(written / "pipeline"), "-o", str(output)])
    assert result.exit_code == 0, result.exception
    assert "From the file besides: text_encoder" in result.output
    found = load_file(output / "text_encoder/model.safetensors")
    with safe_open(written / "pipeline.text_encoder.safetensors", framework="pt") as file:
        coded = file.metadata()["layers"].split()
        assert len(coded) > 10
        assert any("token_embedding" in layer for layer in coded), coded
        assert found.keys() == set(file.keys())
        assert all(torch.equal(v, file.get_tensor(n).half()) for n, v in found.items())
    vae = f"vae/{WEIGHTS}"
    assert (output / vae).read_bytes() == (written / "pipeline" / vae).read_bytes()
    assert quantkit.open_model(output).components[0].name == "unet"


#: Codes and bytes of one run. Source: sdnq 0.2.8, sdnq.packed_int.pack_int.
RUNS = {
    2: ([1, 1, 3, 3], [245]),
    3: ([5, 5, 3, 7, 1, 1, 7, 3], [253, 205, 75]),
    4: ([5, 5], [85]),
    5: ([5, 21, 27, 23, 9, 17, 15, 3], [37, 245, 123, 87, 41]),
    6: ([5, 53, 59, 23], [69, 117, 251]),
    7: ([5, 53, 123, 87, 73, 81, 111, 35], [5, 181, 123, 87, 73, 209, 239]),
}


@pytest.mark.parametrize("bits", RUNS)
def test_codes_in_bytes_are_those_of_sdnq(bits):
    codes, packed = RUNS[bits]
    assert unpack(torch.tensor(packed * 2, dtype=torch.uint8), bits).tolist() == codes * 2


# What quantkit wrote for SDNQ


@pytest.fixture(scope="module")
def exported(saved, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported")
    pack(saved("sd15"), output=folder / "packed")
    export(folder / "packed", to="sdnq", output=folder / "sdnq")
    return folder


def test_exports_come_back(exported, tmp_path):
    result = quantkit.import_file(exported / "sdnq", output=tmp_path / "out")
    component = open_packed(exported / "packed").components[0]
    found, given = load_file(tmp_path / "out" / WEIGHTS), load_file(exported / "sdnq" / WEIGHTS)
    coded = {f"{layer}.weight" for layer in component.config.layers}
    assert coded
    for name, value in found.items():
        wanted = given[name]
        if name in coded:
            wanted = component.dequantized(name.removesuffix(".weight")).bfloat16()
        assert torch.equal(value, wanted), name
    assert result.format == "SDNQ's float8_e4m3fn"


def test_a_dry_run_writes_nothing(exported, tmp_path):
    quantkit.import_file(exported / "sdnq", output=tmp_path / "out", dry_run=True)
    assert not list(tmp_path.iterdir())


# What is refused


@pytest.fixture
def damaged(exported, tmp_path):
    """Return a function that writes the export with changes of its config and one layer."""

    def write(settings=None, tensors=None):
        folder = shutil.copytree(exported / "sdnq", tmp_path / "damaged")
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"].update(settings or {})
        (folder / "config.json").write_text(json.dumps(config))
        state = load_file(folder / WEIGHTS)
        for part, value in (tensors or {}).items():
            state[f"{LAYER}.{part}"] = value
            if value is None:
                del state[f"{LAYER}.{part}"]
        save_file(state, folder / WEIGHTS)
        return folder

    return write


def refused(folder, match, error=ModelError):
    output = folder.parent / "refused"
    with pytest.raises(error, match=match) as caught:
        quantkit.import_file(folder, output=output)
    assert "\n" not in str(caught.value)
    assert not output.exists()


SETTINGS = {
    "codebook": ({"use_codebook": True}, "all layers: use_codebook True, expected none of it"),
    "rotation": ({"use_hadamard": True}, "all layers: use_hadamard True"),
    "coded scales": ({"scale_dtype": "uint8"}, "all layers: scale_dtype uint8"),
    "one layer": (
        {"modules_quant_config": {LAYER: {"use_hadamard": True}}},
        rf"{LAYER}: use_hadamard True, .*; start from the 16-bit model that it came from, or let",
    ),
    "format": ({"weights_dtype": "uint1"}, "all layers: weights_dtype uint1, expected int2 to"),
    "no format": ({"weights_dtype": 8.5}, "weights_dtype 8.5, expected int2"),
    "format of a layer": (
        {"modules_dtype_dict": {"float6_e3m2fn": [LAYER]}},
        rf"{LAYER}: weights_dtype float6_e3m2fn, expected int2",
    ),
    "unknown key": ({"use_flip": True}, "all layers: 'use_flip', which may change what the codes"),
    "both": ({"use_svd": True, "use_quantized_matmul": True}, "use_svd with use_quantized_matmul"),
    "no object": ({"modules_quant_config": [1]}, "modules_quant_config is a list, expected an obj"),
    "no settings": ({"modules_quant_config": {LAYER: 5}}, f"{LAYER} is a int, expected an object"),
    "other tool": ({"quant_method": "torchao"}, "quantized by torchao, expected SDNQ; start from"),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_that_are_not_undone_are_refused(case, damaged):
    settings, match = SETTINGS[case]
    refused(damaged(settings), match)


def test_a_key_that_is_off_is_no_matter(damaged, tmp_path):
    folder = damaged({"use_flip": False, "modules_dtype_dict": {"minimum_6bit": [LAYER]}})
    assert quantkit.import_file(folder, output=tmp_path / "out", dry_run=True).nbytes


FLOATS, BYTES = torch.ones(32, 1), torch.zeros(512, dtype=torch.uint8)
TENSORS = {
    "no scale": ({"scale": None}, r"F8_E4M3 without a scale, expected .*to_q\.scale"),
    "other dtype": ({"weight": torch.zeros(32, 32, dtype=torch.int16)}, "codes in I16, expected"),
    "16-bit weight": ({"weight": torch.zeros(32, 32)}, "codes in F32, expected I8, U8 or F8_E4M3"),
    "scale of codes": ({"scale": FLOATS.to(torch.int8)}, "its scale is in I8, expected F32"),
    "short scale": ({"scale": FLOATS[:16]}, r"shape \[32, 32\], its scale \[16, 1\], expected one"),
    "groups": ({"scale": torch.ones(32, 5, 1)}, r"its scale \[32, 5, 1\], expected one for rows"),
    "rank": ({"scale": torch.ones(32, 1, 1, 1)}, r"its scale \[32, 1, 1, 1\]"),
    "no group": ({"scale": torch.ones(32, 0, 1)}, r"its scale \[32, 0, 1\]"),
    "sign": ({"zero_point": FLOATS}, "F8_E4M3 with a zero_point, expected U8"),
    "no sign": ({"weight": BYTES.repeat(2)}, "U8 without a zero_point, expected both"),
    "offset": ({"weight": BYTES, "zero_point": FLOATS[:1]}, r"zero_point has shape \[1, 1\], its"),
    "bits": ({"weight": BYTES[:100]}, r"0.78125 bits a number in U8, expected 2, 3, 4, 5, 6, 7, 8"),
    "size": ({"weight": torch.zeros(32, 16, dtype=torch.int8)}, "4 bits a number in I8, expected"),
    "half": ({"svd_up": torch.ones(32, 4)}, r"shapes \[32, 4\] and \[\], expected \[32, rank\]"),
    "ranks": (
        {"svd_up": torch.ones(32, 4), "svd_down": torch.ones(3, 32)},
        r"shapes \[32, 4\] and \[3, 32\]",
    ),
    "coded scale": ({"scale_2": FLOATS}, r"has besides mid_block.*to_q\.scale_2 for a UNet2D"),
    "no weight": ({"weight": None, "scale": None}, r"lacks mid_block.*to_q\.weight for a UNet2D"),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit_are_refused_by_layer(case, damaged):
    tensors, match = TENSORS[case]
    folder = damaged(tensors=tensors)
    refused(folder, rf"(?s){folder}: .*{match}.*; start from the 16-bit model")


def test_numbers_that_are_none_are_refused(damaged):
    scale = FLOATS.clone()
    scale[3] = torch.nan
    refused(damaged(tensors={"scale": scale}), f"{LAYER}.weight: NaN or infinity", NonFiniteError)


def test_what_is_no_directory_of_sdnq_is_refused(exported, saved, tmp_path):
    with pytest.raises(ModelError, match="no component that SDNQ quantized, expected one or a sin"):
        quantkit.import_file(saved("sd15"), output=tmp_path / "out")
    with pytest.raises(ModelError, match="config goes with one; drop it for a directory"):
        quantkit.import_file(exported / "sdnq", config=saved("sd15"), output=tmp_path / "out")
    with pytest.raises(ModelError, match="a single file has no config; give the directory"):
        quantkit.import_file(exported / "sdnq" / WEIGHTS, output=tmp_path / "out")
    with pytest.raises(ModelError, match="owner/name: a hub id, expected a file or a directory"):
        quantkit.import_file("owner/name", output=tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"empty/config\.json"):
        quantkit.import_file(tmp_path / "empty", output=tmp_path / "out")
    assert not (tmp_path / "out").exists()
