"""State dicts of packed components in ComfyUI's names, against exports of the same models."""

import pytest
import torch
from safetensors.torch import load_file

from quantkit.checkpoint.joined_parts import join_parts, swap_row_halves
from quantkit.checkpoint.reader import open_packed
from quantkit.errors import ModelError
from quantkit.numerics.formats import E4M3FN, INT8
from quantkit.numerics.granularity import PerChannel, PerTensor
from quantkit.numerics.scheme import Activation, Scheme
from quantkit.workflow.export import export
from tests.comfyui.conftest import INT8_TOKEN, PACKED, pack_here
from tests.inference.test_inference import SCHEMES
from tests.support import pipelines
from tests.support.packed import packed_tensors

pytest.importorskip("comfy_kitchen")

from quantkit.comfyui.layout import is_packed
from quantkit.comfyui.weights import denoiser_state, encoder_state


def component_of(pipeline):
    return open_packed(pipeline).components[0]


def as_dense(state):
    return {
        name: tensor.to(torch.float32).dequantize() if is_packed(tensor) else tensor.float()
        for name, tensor in state.items()
    }


@pytest.mark.parametrize("name", ["sd15", "sd3", "flux"])
def test_it_is_the_single_file_with_codes(name, packed, tmp_path):
    """The single file is what diffusers' converters of such files read; see tests/interchange."""
    file = tmp_path / "single.safetensors"
    export(packed(name), to="single-file", output=file)
    expected = {
        key.removeprefix("model.diffusion_model."): tensor
        for key, tensor in load_file(file).items()
    }
    state = denoiser_state(component_of(packed(name)))
    assert state.keys() == expected.keys()
    coded = [key for key, tensor in state.items() if is_packed(tensor)]
    assert len(coded) > 8
    for key, tensor in as_dense(state).items():
        assert tensor.shape == expected[key].shape
        assert torch.equal(tensor.half(), expected[key].half()), key


def test_projections_of_one_input_are_one_weight(packed):
    state = denoiser_state(component_of(packed("sd3")))
    joined = state["joint_blocks.0.x_block.attn.qkv.weight"]
    assert is_packed(joined)
    assert joined.params.scheme == Scheme(E4M3FN, PerChannel(), None, Activation.TOKEN)
    assert joined.params.scale.shape == (len(joined),)


def test_what_is_packed_in_two_ways_is_joined_dense(tmp_path):
    pipeline = pipelines.tiny_transformer_pipeline(tmp_path / "sd3")
    other = Scheme(INT8, PerTensor(), None, Activation.TOKEN)
    pack_here(pipeline, lambda layer: other if layer.endswith("to_k") else INT8_TOKEN)
    state = denoiser_state(component_of(pipeline))
    joined = state["joint_blocks.0.x_block.attn.qkv.weight"]
    assert not is_packed(joined)
    assert joined.dtype == torch.float16
    assert is_packed(state["joint_blocks.0.x_block.mlp.fc1.weight"])


def test_halves_change_places_in_codes():
    dense = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    for scheme in (SCHEMES["static-smooth-sparse"], SCHEMES["int4-token"], SCHEMES["group"]):
        parts = packed_tensors(dense, scheme)
        swapped = swap_row_halves(scheme, parts)
        whole = join_parts(scheme, [parts])
        assert parts.keys() == swapped.keys()
        for part, rows in whole.items():
            back = rows if part.startswith("input") else torch.cat(_bytes(rows).chunk(2)[::-1])
            assert torch.equal(_bytes(swapped[part]), _bytes(back))


def _bytes(tensor):
    return tensor.contiguous().view(torch.uint8) if tensor.itemsize == 1 else tensor


def test_a_text_encoder_keeps_its_names(tmp_path):
    from quantkit.workflow.pack import pack

    pipeline = pipelines.tiny_transformer_pipeline(tmp_path / "sd3")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "name: r\nweight: {format: e4m3fn}\nactivation: {mode: token}\n"
        "text_encoders: {weight: {format: e4m3fn}, activation: {mode: token}}\n"
    )
    pack(pipeline, output=tmp_path / "packed", recipe=recipe)
    components = {c.name: c for c in open_packed(tmp_path / "packed").components}
    component = components["text_encoder_3"]
    state = encoder_state(component)
    assert set(state) >= {"shared.weight", "encoder.block.0.layer.0.SelfAttention.q.weight"}
    assert sum(map(is_packed, state.values())) == len(component.config.layers)


def test_a_class_without_a_known_layout_is_refused(tmp_path):
    from tests.support.denoiser_classes import ROWS
    from tests.support.packed import pack_component
    from tests.support.tiny_denoisers import tiny_model

    row = next(row for row in ROWS if row.class_name == "SanaTransformer2DModel")
    model = tiny_model(row)
    model.save_pretrained(tmp_path / "sana")
    layers = [n for n, m in model.named_modules() if n.endswith("attn1.to_q")]
    pack_component(tmp_path / "sana", dict.fromkeys(layers, SCHEMES["token"]))
    with pytest.raises(ModelError, match="its original layout is not known"):
        denoiser_state(open_packed(tmp_path / "sana").components[0])


def test_the_table_of_pipelines_is_of_packed_ones(packed):
    """A table whose schemes pack nothing would let the tests above pass."""
    for name in PACKED:
        assert len(component_of(packed(name)).config.layers) > 8
