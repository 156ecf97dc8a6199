"""What ``doctor`` and ``inspect`` say of attention: of this machine, and of a packed directory."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

import quantkit
from quantkit.checkpoint.packed_attention import HeadShape, PackedAttention
from quantkit.cli.doctor_command import doctor
from quantkit.cli.inspect_command import inspect
from quantkit.device import choosing, compilers
from quantkit.device.archs import ARCHS, OneLaunch
from quantkit.device.backends import Backend, use
from quantkit.device.choosing import Choice
from quantkit.device.survey import OpChoice
from quantkit.inference.attention.attention_choices import attention_choices
from quantkit.recipe.load import parse_recipe
from quantkit.workflow.inspect import require_packed
from tests.support.denoiser_classes import ROWS
from tests.support.kernel_cases import need
from tests.support.tiny_denoisers import tiny_model

CPU = torch.device("cpu")
ROW = {row.class_name: row for row in ROWS}


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Sana, whose self-attention is linear; int8 but in one block."""
    folder = tmp_path_factory.mktemp("told")
    row = ROW["SanaTransformer2DModel"]
    row = replace(row, config={**row.config, "num_layers": 2})
    tiny_model(row).half().save_pretrained(folder / "transformer")
    section = {"qk": "int8", "min_keys": 77, "exclude": ["transformer_blocks.1.*"]}
    for name, attention in (("packed", section), ("plain", None)):
        recipe = parse_recipe(json.dumps({"name": "a"}), where="recipe")
        if attention:
            text = json.dumps({"name": "a", "attention": attention})
            recipe = parse_recipe(text, where="recipe")
        quantkit.pack(folder / "transformer", recipe=recipe, output=folder / name)
    return folder


def told(command, *arguments):
    done = CliRunner().invoke(command, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_doctor_names_the_modules_and_why_others_keep_theirs(packed):
    need(compilers.host_compiler)
    found = json.loads(told(doctor, packed / "packed", "--device", "cpu", "--json"))["attention"]
    modules = {row.pop("module"): row for row in found}
    assert modules["transformer_blocks.0.attn2"] == {
        "component": "", "format": "int8", "backend": "host",
        "reason": "torch's with fewer than 77 keys",
    }  # fmt: skip
    linear = modules["transformer_blocks.0.attn1"]
    assert (linear["format"], linear["backend"]) == ("", "torch")
    assert linear["reason"] == "SanaLinearAttnProcessor2_0 calls no attention of torch's"
    assert modules["transformer_blocks.1.attn2"]["reason"] == "excluded"
    text = told(doctor, packed / "packed", "--device", "cpu")
    kernels = sum(row["backend"] == "host" for row in modules.values())
    assert f"{kernels} of {len(modules)} attention modules run on a kernel" in text


def test_doctor_names_what_the_loaded_model_has(packed):
    from diffusers import SanaTransformer2DModel

    model = SanaTransformer2DModel.from_pretrained(packed / "packed")
    layers = quantkit.attention(model, qk="int8", exclude=["transformer_blocks.1.*"])
    found = attention_choices(require_packed(packed / "packed"), CPU)
    assert {c.module for c in found if c.format} == set(layers.quantized)
    assert {c.module: c.reason for c in found if not c.format} == layers.kept


def test_doctor_says_that_nothing_was_asked_for(packed):
    text = told(doctor, packed / "plain", "--device", "cpu")
    assert "attention is torch's, in 16 bit: the checkpoint asks for no codes" in text


def test_without_a_kernel_attention_is_torchs(packed, monkeypatch):
    why = ARCHS["gfx1100"].why_without("attention")
    assert "torch's attention is as fast" in why
    monkeypatch.setattr(choosing, "_why_not_here", lambda device, op: why)
    modules = attention_choices(require_packed(packed / "packed"), CPU)
    assert {m.backend for m in modules} == {"torch"}
    assert {m.reason for m in modules if m.format} == {why}


def test_where_kernels_run_on_request_attention_is_torchs(packed, monkeypatch):
    cuda = torch.device("cuda")
    hopper = SimpleNamespace(device=SimpleNamespace(arch=ARCHS["sm_90a"]))
    monkeypatch.setattr(choosing, "_state", lambda device: hopper)
    why = choosing.why_on_request("attention_fp8", cuda)
    assert "making codes takes longer than the kernel saves" in why
    assert not choosing.why_on_request("gemm_fp8", cuda)
    assert not choosing.why_on_request("attention_fp8", CPU)
    with use(Backend.GPU):
        assert not choosing.why_on_request("attention_fp8", cuda)
    monkeypatch.setattr(
        "quantkit.inference.attention.attention_choices.why_on_request", lambda op, device: why
    )
    modules = attention_choices(require_packed(packed / "packed"), CPU)
    assert {(m.backend, m.reason) for m in modules if m.format} == {("torch", why)}


@pytest.mark.parametrize(
    ("launch", "columns", "keys", "pays"),
    [
        (OneLaunch.STREAMS, 128, 4608, True),
        (OneLaunch.STREAMS, 64, 4429, True),
        (OneLaunch.PROJECTIONS, 64, 1024, True),
        (OneLaunch.STREAMS, 128, 1, False),
        (OneLaunch.PROJECTIONS, 64, 64, False),
        (OneLaunch.STREAMS, 136, 4608, False),
        (None, 128, 4608, False),
    ],
)
def test_on_hopper_attention_pays_where_codes_are_of_one_launch(launch, columns, keys, pays):
    hopper = ARCHS["sm_90a"]
    made = None if launch is None else (launch, columns, keys)
    assert (not hopper.why_on_request("attention", made)) == pays
    if launch is not None:
        least = hopper.least_keys(launch, columns)
        assert (least is not None and keys >= least) == pays
    assert ARCHS["sm_89"].why_on_request("attention", made)
    assert not ARCHS["gfx1201"].why_on_request("attention", made)


@pytest.mark.parametrize(
    ("class_name", "backend"),
    [("FluxTransformer2DModel", "host"), ("SD3Transformer2DModel", "host"),
     ("QwenImageTransformer2DModel", "torch")],
)  # fmt: skip
def test_doctor_says_from_how_many_keys_streams_are_on_codes(
    class_name, backend, tmp_path, monkeypatch
):
    need(compilers.host_compiler)
    tiny_model(ROW[class_name]).half().save_pretrained(tmp_path / "transformer")
    recipe = parse_recipe(json.dumps({"name": "a", "attention": {}}), where="recipe")
    quantkit.pack(tmp_path / "transformer", recipe=recipe, output=tmp_path / "packed")
    packed = require_packed(tmp_path / "packed")
    (component,) = packed.components
    modules = [c.module for c in attention_choices(packed, CPU) if c.format]
    where = "quantkit.inference.attention.attention_choices"
    monkeypatch.setattr(f"{where}.why_on_request", lambda op, device: "slower")
    monkeypatch.setattr(
        f"{where}.least_keys",
        lambda _, launch, columns: {OneLaunch.STREAMS: 1000 + columns}[launch],
    )

    def ask(**changes):
        static = dict.fromkeys(modules, HeadShape(2, 16))
        asked = replace(PackedAttention("e4m3fn", 512, (), static), **changes)
        changed = replace(component, config=replace(component.config, attention=asked))
        found = attention_choices(replace(packed, components=(changed,)), CPU)
        return {(c.backend, c.reason) for c in found}

    few = "torch's with fewer than 1016 keys" if backend == "host" else "slower"
    assert ask() == {(backend, few)}
    assert ask(static={}) == {("torch", "slower")}
    assert ask(qk="int8") == {("torch", "slower")}


def test_operations_say_torch_where_attention_has_no_kernel():
    refused = Choice(Backend.REFERENCE, "no compiler")
    assert OpChoice("attention_int8", "cpu", refused).backend == "torch"
    assert OpChoice("gemm_int8", "cpu", refused).backend == "reference"
    assert OpChoice("attention_int8", "cpu", Choice(Backend.HOST, "")).backend == "host"
    with use(Backend.REFERENCE):
        assert OpChoice("attention_int8", "cpu", refused).backend == "reference"


def test_inspect_shows_the_entry(packed):
    line = "attention: queries and keys in int8 from 77 keys on; in 16 bit: transformer_blocks.1.*"
    assert line in told(inspect, packed / "packed").splitlines()
    assert "attention:" not in told(inspect, packed / "plain")
    (component,) = json.loads(told(inspect, packed / "packed", "--json"))["components"]
    assert component["quantization_config"]["attention"]["qk"] == "int8"


def test_static_scales_are_told():
    static = {"a.attn1": HeadShape(2, 8), "a.attn2": HeadShape(2, 8)}
    told = str(PackedAttention("e4m3fn", 512, (), static))
    assert told == "queries and keys in e4m3fn from 512 keys on, static scales in 2 modules"


def test_values_in_16_bit_are_told(packed, monkeypatch):
    need(compilers.host_compiler)
    wide = PackedAttention("int8", 512, ("a.*",), pv=None)
    line = "queries and keys in int8 from 512 keys on; probabilities and values in 16 bit"
    assert str(wide) == f"{line}; in 16 bit: a.*"
    read = require_packed(packed / "packed")
    (component,) = read.components
    component = replace(component, config=replace(component.config, attention=wide))
    read = replace(read, components=(component,))
    found = attention_choices(read, CPU)
    assert {(m.format, m.backend) for m in found if m.format} == {
        ("int8, values in 16 bit", "host")
    }
    why = ARCHS["sm_90a"].why_without("attention_f16")
    assert why == "probabilities and values in 16 bit have kernels on RDNA4 and CPUs alone"
    monkeypatch.setattr(choosing, "_why_not_here", lambda _, op: why if op.endswith("_f16") else "")
    found = attention_choices(read, CPU)
    assert {(m.backend, m.reason) for m in found if m.format} == {("torch", why)}
    assert OpChoice("attention_int8_f16", "cpu", Choice(Backend.REFERENCE, why)).backend == "torch"
