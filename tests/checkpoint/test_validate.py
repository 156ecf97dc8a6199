"""One packed component, whole in one shard and cut in two, and every rule broken."""

import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

import quantkit
from quantkit.checkpoint.metadata import METADATA_KEY, parse_metadata
from quantkit.checkpoint.reader import open_packed
from quantkit.checkpoint.spec import FORMAT_VERSION
from quantkit.checkpoint.verification import find_breaches, verify
from quantkit.errors import CheckpointError
from quantkit.models.quantizers import CONFIG_KEY
from quantkit.models.source import open_model
from quantkit.packing.pack_model import pack
from quantkit.progress import silent
from quantkit.recipe.schema import Recipe
from quantkit.storage.tensorfile import read_header
from tests.support.headers import write_header
from tests.support.packed_edit import Edit

pytestmark = pytest.mark.usefixtures("any_model")


def source_tensors():
    torch.manual_seed(7)
    return {
        "conv.weight": torch.randn(16, 32, 3, 3).half(),
        "conv.bias": torch.randn(16).half(),
        "fc.weight": torch.randn(32, 64).half(),
        "fc.bias": torch.randn(32).half(),
        "norm.weight": torch.ones(32).half(),
        "zero.weight": torch.zeros(16, 64).half(),
    }


@pytest.fixture(scope="module", params=[1, 2], ids=["one-file", "two-shards"])
def packed(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rules")
    source = folder / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps({"_class_name": "UNet2DConditionModel"}))
    write_shards(source, source_tensors(), request.param, {"format": "pt"})
    recipe = Recipe.model_validate(
        {"name": "t", "sparsity": {"layers": ["conv"]}, "weight": {"granularity": "group:16"}}
    )
    pack(
        open_model(str(source)),
        recipe,
        folder / "packed",
        calibration=None,
        masks=None,
        threads=1,
        force=False,
        progress=silent,
    )
    return folder / "packed"


def write_shards(folder, tensors, count, metadata):
    names = sorted(tensors)
    if count == 1:
        save_file(tensors, folder / "diffusion_pytorch_model.safetensors", metadata=metadata)
        return
    weight_map = {}
    for i in range(2):
        mine = {n: tensors[n] for n in names if (n.startswith("conv.w")) == (i == 0)}
        file = f"diffusion_pytorch_model-0000{i + 1}-of-00002.safetensors"
        save_file(mine, folder / file, metadata=metadata)
        weight_map |= dict.fromkeys(mine, file)
    size = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))


def of_config(change):
    return lambda edit: change(edit.config[CONFIG_KEY])


def of_metadata(change):
    return lambda edit: change(edit.metadata[edit.files[0]])


def drop(name):
    return lambda edit: edit.tensors[edit.home(name)].pop(name)


def swap(name, change):
    return lambda edit: edit.replace(name, change(edit.tensor(name).clone()))


def add(name, tensor):
    return lambda edit: edit.tensors[edit.files[0]].update({name: tensor})


def put(index, value):
    def change(tensor):
        tensor.view(torch.uint8).view(-1)[index] = value
        return tensor

    return change


def first_scheme(key, value):
    return of_config(lambda c: c["schemes"][0].update({key: value}))


def undigest(change):
    def apply(edit):
        edit.redigest = False
        change(edit)

    return apply


ZERO = "0" * 64


#: name -> (how to break the rule, what the reader says); found without reading all bytes
CHEAP = {
    "config-newer": (of_config(lambda c: c.update(format_version=8)), "format_version 8, exp"),
    "config-version": (of_config(lambda c: c.update(format_version="1")), "format_version '1'"),
    "config-unknown-key": (of_config(lambda c: c.update(zero_point=1)), "unknown key 'zero_point'"),
    "config-missing-key": (of_config(lambda c: c.pop("quantkit_version")), "is missing"),
    "config-version-text": (of_config(lambda c: c.update(quantkit_version=1)), "as text"),
    "config-no-schemes": (of_config(lambda c: c.update(schemes=[])), "at least one"),
    "scheme-type": (of_config(lambda c: c.update(schemes=["x"])), "found str"),
    "scheme-unknown-key": (first_scheme("bits", 8), "scheme 0: unknown key 'bits'"),
    "scheme-missing-key": (of_config(lambda c: c["schemes"][0].pop("smooth")), "'smooth' is miss"),
    "scheme-weight": (first_scheme("weight", "e3m4"), "format 'e3m4': unknown"),
    "scheme-weight-type": (first_scheme("weight", 8), "found 8, expected text"),
    "scheme-fnuz": (first_scheme("weight", "e4m3fnuz"), "FNUZ is the FP8 of MI300"),
    "scheme-reserved": (first_scheme("weight", "int2"), "format 'int2': unknown"),
    "scheme-granularity": (first_scheme("granularity", "row"), "granularity 'row'"),
    "scheme-sparsity": (first_scheme("sparsity", "1:4"), "sparsity '1:4', expected null or '2:4'"),
    "scheme-activation": (first_scheme("activation", "dynamic"), "'dynamic'"),
    "scheme-buckets": (first_scheme("buckets", [5.0]), "buckets with activation 'token'"),
    "scheme-buckets-type": (first_scheme("buckets", []), r"buckets \[\], expected null"),
    "scheme-buckets-order": (first_scheme("buckets", [5.0, 1.0]), "expected ascending"),
    "scheme-smooth": (first_scheme("smooth", 1), "smooth 1, expected true or false"),
    "scheme-layers": (first_scheme("layers", "conv"), "not a list of module paths"),
    "scheme-no-layers": (first_scheme("layers", []), "no layers"),
    "layer-twice": (
        of_config(lambda c: c["schemes"][1]["layers"].append(c["schemes"][0]["layers"][0])),
        "is listed 2 times",
    ),
    "metadata-newer": (of_metadata(lambda m: m.update(format_version=8)), "format_version 8, exp"),
    "metadata-unknown-key": (of_metadata(lambda m: m.update(note="")), "unknown key 'note'"),
    "metadata-missing-key": (of_metadata(lambda m: m.pop("recipe")), "'recipe' is missing"),
    "metadata-damaged": (of_metadata(lambda m: m.update(layers=[1])), "header metadata: damaged"),
    "record-unknown-key": (lambda e: e.record("fc")["fc"].update(n=1), "unknown key 'n'"),
    "record-shape": (lambda e: e.record("fc")["fc"].update(shape=[3]), r"layer fc: shape \[3\]"),
    "record-digest": (
        lambda e: e.record("fc")["fc"].update(source_sha256="0"), "'0' is no SHA-256"
    ),
    "record-shape-differs": (
        lambda e: e.record("fc")["fc"].update(shape=[64, 32]), r"fc\.weight: found .*expected F8"
    ),
    "record-does-not-divide": (
        lambda e: e.record("conv")["conv"].update(shape=[16, 6, 3, 3]), "conv: C 6 is not a mult"
    ),
    "record-missing": (lambda e: e.record("fc").pop("fc"), "layer fc: has a scheme, but no desc"),
    "record-without-scheme": (
        lambda e: e.record("fc").update(other=e.record("fc")["fc"]), "layer other: described"
    ),
    "scheme-of-no-layer": (
        of_config(lambda c: c["schemes"][0]["layers"].append("ghost")), "layer ghost: has a scheme"
    ),
    "tensor-missing-weight": (drop("fc.weight"), r"fc\.weight: missing, expected F8_E4M3"),
    "tensor-missing-scale": (drop("fc.weight_scale"), r"fc\.weight_scale: missing"),
    "tensor-missing-meta": (drop("conv.weight_meta"), r"conv\.weight_meta: missing"),
    "tensor-shape": (swap("fc.weight", lambda t: t[:16]), r"fc\.weight: found F8_E4M3 \[16, 64\]"),
    "tensor-dtype": (
        swap("fc.weight", lambda t: t.float().to(torch.float8_e5m2)), "found F8_E5M2 .*expected F8"
    ),
    "scale-dtype": (swap("fc.weight_scale", torch.Tensor.half), "found F16 .*expected F32"),
    "scale-shape": (swap("fc.weight_scale", torch.Tensor.flatten), r"found F32 \[128\]"),
    "bias-shape": (swap("fc.bias", lambda t: t[:3]), r"fc\.bias: found F16 \[3\]"),
    "bias-dtype": (swap("fc.bias", torch.Tensor.long), r"fc\.bias: I64, expected one of F16"),
    "extra-part": (
        lambda e: e.tensors[e.home("fc.weight")].update({"fc.input_scale": torch.ones(())}),
        r"fc\.input_scale: not asked for",
    ),
    "orphan-part": (add("norm.weight_scale", torch.ones(3)), r"no scheme has layer 'norm'"),
    "orphan-fp8": (
        add("x.weight", torch.ones(8).to(torch.float8_e4m3fn)), r"x\.weight: packed, but no scheme"
    ),
    "checksum-missing": (
        undigest(of_metadata(lambda m: m["tensors"].popitem())), "has no checksum"
    ),
    "checksum-extra": (
        undigest(of_metadata(lambda m: m["tensors"].update(ghost=ZERO))), "a checksum, but no data"
    ),
    "scale-zero": (swap("fc.weight_scale", lambda t: t * 0), r"_scale: found 0\.0, expected f"),
    "scale-negative": (swap("fc.weight_scale", torch.neg), "expected finite and positive"),
    "scale-nan": (swap("fc.weight_scale", lambda t: t * torch.nan), "found nan, expected finite"),
    "scale-infinite": (swap("fc.weight_scale", lambda t: t / 0), "found inf, expected finite"),
    "scale-minus-infinite": (swap("fc.weight_scale", lambda t: -t / 0), "found -inf, expected fin"),
}  # fmt: skip


#: name -> (how to break the rule, what verify says); found only by reading all bytes
DEEP = {
    "checksum": (undigest(swap("norm.weight", put(3, 1))), r"norm\.weight: damaged: SHA-256"),
    "code-nan": (swap("fc.weight", put(5, 0xFF)), r"fc\.weight: a code is NaN"),
    "nibble": (swap("conv.weight_meta", put(7, 0x45)), "names no two ascending positions"),
    "zero-group-scale": (
        swap("zero.weight_scale", lambda t: t + 1 + torch.arange(t.numel()).view_as(t)),
        r"found 2\.0 for an all-zero group, expected 1"
    ),
    "sparse-zero-group": (
        swap("conv.weight", torch.Tensor.zero_), r"conv\.weight_scale: found .* all-zero group"
    ),
}  # fmt: skip


@pytest.fixture
def edit(packed, tmp_path):
    shutil.copytree(packed, tmp_path / "packed")
    return Edit(tmp_path / "packed")


def test_what_pack_writes_keeps_every_rule(packed):
    result = verify(packed, progress=silent)
    assert result.breaches == ()
    assert (result.components, result.layers) == (("",), 3)


def test_the_class_of_a_component_is_that_of_its_own_config(pipeline_dir, tmp_path):
    """Loaders of a component alone read no index of a pipeline."""
    recipe = quantkit.load_recipe("fp8", {"text_encoders": "int8"})
    quantkit.pack(pipeline_dir, recipe=recipe, output=tmp_path / "packed")
    index = tmp_path / "packed" / "model_index.json"
    values = json.loads(index.read_text())
    index.write_text(json.dumps({**values, "unet": ["diffusers", "SD3Transformer2DModel"]}))
    found = {c.name: c.class_name for c in open_packed(tmp_path / "packed").components}
    # A config of transformers does not say which of its classes loads it.
    assert found == {"unet": "UNet2DConditionModel", "text_encoder": "CLIPTextModel"}


def test_taking_apart_and_putting_together_breaks_nothing(edit):
    edit.save()
    assert find_breaches(edit.folder, progress=silent).breaches == ()


@pytest.mark.parametrize("name", CHEAP)
def test_opening_refuses_a_broken_rule(edit, name):
    change, match = CHEAP[name]
    change(edit)
    edit.save()
    with pytest.raises(CheckpointError, match=match):
        open_packed(edit.folder)
    with pytest.raises(CheckpointError, match=match):
        verify(edit.folder, progress=silent)


@pytest.mark.usefixtures("either_core")
@pytest.mark.parametrize("name", DEEP)
def test_verify_refuses_a_broken_rule(edit, name):
    change, match = DEEP[name]
    change(edit)
    edit.save()
    open_packed(edit.folder)
    with pytest.raises(CheckpointError, match=match):
        verify(edit.folder, progress=silent)


def write_source(folder, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"_class_name": "UNet2DConditionModel"}))
    write_shards(folder, tensors, 1, {"format": "pt"})


@pytest.mark.usefixtures("either_core")
@pytest.mark.parametrize(
    ("redigest", "match"), [(True, ["code is NaN", "a nibble"]), (False, ["damaged", "damaged"])]
)
def test_find_breaches_lists_all_of_them(edit, redigest, match):
    swap("fc.weight", put(5, 0x7F))(edit)
    swap("conv.weight_meta", put(7, 0))(edit)
    edit.redigest = redigest
    edit.save()
    breaches = find_breaches(edit.folder, progress=silent).breaches
    assert len(breaches) == 2
    assert all(any(text in line for line in breaches) for text in match)
    assert len(find_breaches(edit.folder, progress=silent, stop_at_first=True).breaches) == 1


def test_tensors_out_of_order_are_refused(packed, tmp_path):
    folder = shutil.copytree(packed, tmp_path / "packed")
    file = max(folder.glob("*.safetensors"))
    header = read_header(file)
    names = list(header.tensors)
    a, b = header.tensors[names[-1]], header.tensors[names[-2]]
    data = file.read_bytes()
    table = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    base = 8 + int.from_bytes(data[:8], "little")
    start = min(a.start, b.start) - base
    table[a.name]["data_offsets"] = [start, start + a.nbytes]
    table[b.name]["data_offsets"] = [start + a.nbytes, start + a.nbytes + b.nbytes]
    text = json.dumps(table, separators=(",", ":")).encode()
    swapped = data[a.start : a.stop] + data[b.start : b.stop]
    body = data[base : base + start] + swapped
    file.write_bytes(len(text).to_bytes(8, "little") + text + body)
    with pytest.raises(CheckpointError, match="belongs; tensors are ordered by dtype"):
        open_packed(folder)


def test_a_shard_without_our_metadata_is_refused(edit):
    file = edit.files[-1]
    save_file(edit.tensors[file], file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="not written by quantkit"):
        open_packed(edit.folder)


def test_metadata_that_is_not_json_is_refused(edit):
    file = edit.files[-1]
    save_file(edit.tensors[file], file, metadata={METADATA_KEY: "{"})
    with pytest.raises(CheckpointError, match="header metadata: not JSON"):
        open_packed(edit.folder)
    with pytest.raises(CheckpointError, match="found list, expected a JSON object"):
        parse_metadata("[]")


@pytest.mark.parametrize("cut", [0, 7, 100, -1])
def test_a_truncated_shard_is_refused(edit, cut):
    data = edit.files[0].read_bytes()
    edit.files[0].write_bytes(data[:cut])
    with pytest.raises(CheckpointError, match=r"safetensors: (truncated|damaged)"):
        open_packed(edit.folder)


def test_an_index_that_disagrees_is_refused(edit):
    if edit.index is None:
        pytest.skip("one file has no index")
    table = json.loads(edit.index.read_text())
    moved = {**table["weight_map"], "norm.weight": edit.files[0].name}
    edit.index.write_text(json.dumps({**table, "weight_map": moved}))
    with pytest.raises(CheckpointError, match=r"norm\.weight: index says .*00001"):
        open_packed(edit.folder)
    edit.index.write_text(json.dumps({**table, "metadata": {"total_size": 5}}))
    with pytest.raises(CheckpointError, match="total_size 5, found"):
        open_packed(edit.folder)
    edit.index.write_text(json.dumps({"weight_map": {}}))
    with pytest.raises(CheckpointError, match="no weight_map"):
        open_packed(edit.folder)


def test_shards_and_index_name_the_same_files(edit):
    if edit.index is None:
        shutil.copy(edit.files[0], edit.folder / "diffusion_pytorch_model.fp16.safetensors")
        match = "found 2 weight files"
    else:
        shutil.copy(edit.files[0], edit.folder / "diffusion_pytorch_model-3.safetensors")
        match = r"model-3\.safetensors: not in"
    with pytest.raises(CheckpointError, match=match):
        open_packed(edit.folder)


def test_a_missing_shard_is_named(edit):
    edit.files[0].unlink()
    match = "found 0 weight files" if edit.index is None else r"00001-of-00002.* missing shard"
    with pytest.raises(CheckpointError, match=match):
        open_packed(edit.folder)


def test_a_tensor_in_two_shards_is_refused(edit):
    if edit.index is None:
        pytest.skip("one file holds no name twice")
    edit.tensors[edit.files[0]]["norm.weight"] = edit.tensor("norm.weight")
    edit.save()
    with pytest.raises(CheckpointError, match=r"norm\.weight: stands in .* too"):
        open_packed(edit.folder)


def test_an_unpacked_directory_opens_empty_and_does_not_verify(tmp_path):
    write_source(tmp_path / "source", {"fc.weight": torch.randn(16, 32)})
    assert open_packed(tmp_path / "source").components == ()
    with pytest.raises(CheckpointError, match="nothing in it is packed"):
        verify(tmp_path / "source", progress=silent)
    with pytest.raises(CheckpointError, match="not a diffusers directory"):
        open_packed(tmp_path)


def test_dequantized_is_near_the_source(packed):
    component = open_packed(packed).components[0]
    source = source_tensors()
    for layer in ("conv", "fc", "zero"):
        weight = source[f"{layer}.weight"].float()
        found = component.dequantized(layer)
        assert found.shape == weight.shape
        kept = found != 0
        # e4m3 has 3 mantissa bits: half a step is 1/16 of the value.
        assert torch.allclose(found[kept], weight[kept], rtol=1 / 16, atol=1e-2)
        before, after = component.layer_bytes(layer)
        assert before == 2 * weight.numel()
        assert after == sum(
            i.nbytes for n, (_, i) in component.tensors.items()
            if n.startswith(f"{layer}.weight")
        )  # fmt: skip
    share = (component.dequantized("conv") != 0).float().mean()
    assert 0.45 < float(share) <= 0.5


def test_version_is_in_both_places(packed):
    edit = Edit(packed)
    assert edit.config[CONFIG_KEY]["format_version"] == FORMAT_VERSION
    assert all(m["format_version"] == FORMAT_VERSION for m in edit.metadata.values())


def test_an_unknown_dtype_is_refused(edit):
    file = edit.files[-1]
    write_header(file, {"norm.weight": [3]}, dtype="F4")
    with pytest.raises(CheckpointError, match=r"'norm\.weight': damaged header entry"):
        open_packed(edit.folder)
