"""LoRA on packed layers, through peft and diffusers: the side branch is added, and nothing else."""

import copy
import os
import shutil
from typing import Any

import pytest
import torch
from torch import nn

from quantkit.errors import InputError
from quantkit.inference.layers.codes import Codes
from quantkit.inference.layers.layer_summary import iterate_packed
from quantkit.inference.layers.packed_layer import PackedLayer
from quantkit.inference.loading.dequantizing import as_dense
from quantkit.numerics.formats import INT4
from quantkit.numerics.granularity import PerChannel
from quantkit.numerics.masks import TWO_OF_FOUR
from quantkit.numerics.scheme import Activation, Scheme
from tests.inference.test_inference import SCHEMES
from tests.support.adapters import RANK, ByHand, branches
from tests.support.answers import step
from tests.support.loading import plain, unet_class, weight_files
from tests.support.packed import pack_component, packed_module
from tests.support.sampling import one_of_each, turned
from tests.support.tiny_denoisers import compile_a_block

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore")  # peft's and diffusers', of versions to come


def prefixed(state):
    """Return a file's tensors; copies, for peft keeps them and writes later adapters into them."""
    return {f"unet.{name}": tensor.clone() for name, tensor in state.items()}


@pytest.mark.parametrize("case", turned(SCHEMES, ("linear", "conv")))
def test_peft_adds_its_branch_to_every_scheme(case):
    scheme, kind = SCHEMES[case[0]], case[1]
    torch.manual_seed(0)
    dtype = torch.bfloat16  # neither the codes' nor peft's own
    dense = nn.Linear(64, 24) if kind == "linear" else nn.Conv2d(32, 24, 3, 2, 1)
    x = torch.randn(2, 5, 64) if kind == "linear" else torch.randn(2, 32, 9, 7)
    x = x.to(dtype)
    layer = packed_module(dense, scheme).to(dtype)
    model = nn.ModuleDict({"it": layer})
    before = layer(x)
    config = peft.LoraConfig(r=RANK, target_modules=["it"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    adapted: Any = model["it"]
    down, up = (table["default"] for table in (adapted.lora_A, adapted.lora_B))
    assert down.weight.dtype == up.weight.dtype == dtype
    assert isinstance(adapted.base_layer, PackedLayer)
    wanted = before + up(down(x)) * adapted.scaling["default"]
    assert torch.equal(adapted(x), wanted)
    assert not torch.equal(wanted, before)
    adapted.enable_adapters(False)
    assert torch.equal(adapted(x), before)


@pytest.fixture
def unet(packed_dir):
    return unet_class().from_pretrained(packed_dir / "unet")


@pytest.fixture(scope="module")
def lora(packed_dir):
    """Three adapters of one packed UNet: files of another rank, too."""
    model = unet_class().from_pretrained(packed_dir / "unet")
    return [branches(model, 1), branches(model, 2), branches(model, 3, rank=2)]


def near(a, b):
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def distance(a, b):
    return torch.linalg.vector_norm(a - b)


def test_a_pipeline_loads_scales_mixes_and_unloads(packed_dir, lora, tmp_path):
    from safetensors.torch import save_file

    pipe = plain(packed_dir)
    first, second, _ = lora
    alone = step(pipe.unet)
    with ByHand(pipe.unet, (first, 1.0)) as model:
        whole = step(model)
    with ByHand(pipe.unet, (first, 0.5)) as model:
        half = step(model)
    with ByHand(pipe.unet, (first, 0.25), (second, 0.75)) as model:
        mixed = step(model)
    assert not near(whole, alone)
    save_file(prefixed(first), tmp_path / "first.safetensors")
    pipe.load_lora_weights(tmp_path / "first.safetensors", adapter_name="first")
    pipe.load_lora_weights(prefixed(second), adapter_name="second")
    pipe.set_adapters("first")
    assert near(step(pipe.unet), whole)
    pipe.set_adapters("first", 0.5)
    assert near(step(pipe.unet), half)
    pipe.set_adapters(["first", "second"], [0.25, 0.75])
    assert near(step(pipe.unet), mixed)
    assert pipe.get_active_adapters() == ["first", "second"]
    pipe.disable_lora()
    assert torch.equal(step(pipe.unet), alone)
    pipe.enable_lora()
    assert near(step(pipe.unet), mixed)
    pipe.delete_adapters("second")
    pipe.set_adapters("first")
    assert near(step(pipe.unet), whole)
    with pytest.raises(Exception, match="unload adapters before saving"):
        pipe.unet.save_pretrained(tmp_path / "copy")
    pipe.unload_lora_weights()
    assert torch.equal(step(pipe.unet), alone)
    pipe.unet.save_pretrained(tmp_path / "copy")
    assert weight_files(tmp_path / "copy") == weight_files(packed_dir / "unet")


def test_adapters_follow_the_models_dtype_and_device(packed_dir, lora):
    pipe = plain(packed_dir, torch_dtype=torch.float16)
    pipe.load_lora_weights(prefixed(lora[0]))
    found = {p.dtype for n, p in pipe.unet.named_parameters() if "lora_" in n}
    assert found == {torch.float16}
    pipe.to(torch.bfloat16)
    assert {p.dtype for n, p in pipe.unet.named_parameters() if "lora_" in n} == {torch.bfloat16}
    assert pipe.unet.dtype == torch.bfloat16
    pipe.unload_lora_weights()
    pipe.load_lora_weights(prefixed(lora[0]))
    assert {p.dtype for n, p in pipe.unet.named_parameters() if "lora_" in n} == {torch.bfloat16}


def test_a_call_may_scale_them(packed_dir, lora):
    pipe = plain(packed_dir)
    pipe.load_lora_weights(prefixed(lora[0]))
    x, text = torch.randn(1, 4, 8, 8), torch.randn(1, 16, 32)
    with torch.no_grad():
        none = pipe.unet(x, torch.tensor(9), text, cross_attention_kwargs={"scale": 0.0}).sample
        pipe.disable_lora()
        assert near(none, pipe.unet(x, torch.tensor(9), text).sample)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_adapters_are_swapped_while_loaded(packed_dir, lora, compiled):
    pipe = plain(packed_dir)
    model, wanted = pipe.unet, []
    for state in (lora[0], lora[2]):
        with ByHand(model, (state, 1.0)):
            wanted.append(step(model))
    pipe.enable_lora_hotswap(target_rank=RANK)
    pipe.load_lora_weights(prefixed(lora[0]), adapter_name="it")
    if compiled:
        compile_a_block(model)
    # peft pads to the target's rank: the longer sums round to other codes of the next layer's
    # input on some CPUs, which moves the output by .04 of what the adapters differ by.
    bound = 0.1 * distance(*wanted)
    assert distance(step(model), wanted[0]) < bound
    with torch._dynamo.config.patch(error_on_recompile=True):
        pipe.load_lora_weights(prefixed(lora[2]), adapter_name="it", hotswap=True)
        assert distance(step(model), wanted[1]) < bound


@torch.no_grad()
@pytest.mark.slow
@pytest.mark.parametrize("kind", one_of_each(("linear", "conv"), type))
def test_adapted_layers_compile_without_a_graph_break(kind):
    """As aot_eager traces them, through their operators' fake implementations."""
    dense = nn.Linear(32, 32) if kind == "linear" else nn.Conv2d(32, 32, 3, 1, 1)
    x = torch.randn(2, 5, 32) if kind == "linear" else torch.randn(2, 32, 5, 5)
    model = nn.Sequential(*(packed_module(dense, scheme) for scheme in SCHEMES.values()))
    names = [str(i) for i in range(len(model))]
    config = peft.LoraConfig(r=RANK, target_modules=names, init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x), model(x), rtol=1e-3, atol=1e-4)


def test_fusing_is_refused_in_one_line(packed_dir, lora):
    pipe = plain(packed_dir)
    pipe.load_lora_weights(prefixed(lora[0]))
    before = step(pipe.unet)
    with pytest.raises(InputError, match=r"^fuse_lora: UNet2DConditionModel is packed.*16-bit"):
        pipe.fuse_lora()
    assert torch.equal(step(pipe.unet), before)


@torch.no_grad()
@pytest.mark.parametrize("name", ["token-smooth", "token-sparse", "int4-none"])
def test_weights_decomposed_by_dora_are_those_of_the_codes(name):
    layer, x = packed_module(nn.Linear(64, 24), SCHEMES[name]), torch.randn(3, 64)
    model = nn.ModuleDict({"it": layer})
    config = peft.LoraConfig(r=2, target_modules=["it"], use_dora=True, init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    adapted: Any = model["it"]
    weight = layer.dense_weight()
    branch = adapted.lora_B["default"].weight @ adapted.lora_A["default"].weight
    whole = weight + adapted.scaling["default"] * branch
    # At first the rows keep the lengths that the branch gives them.
    adapted.lora_magnitude_vector["default"].weight.data = weight.norm(dim=1)
    kept = weight.norm(dim=1) / whole.norm(dim=1)
    wanted = nn.functional.linear(x, whole * kept[:, None], layer.bias)
    # Inputs of the packed product are rounded to 8 bits; codes for weights would be far off.
    assert (adapted(x) - wanted).norm() < 0.1 * wanted.norm()


class Both(nn.Module):
    """A Linear and a convolution, packed."""

    def __init__(self, scheme):
        super().__init__()
        torch.manual_seed(0)
        self.linear = packed_module(nn.Linear(64, 64), scheme, name="linear")
        self.conv = packed_module(nn.Conv2d(32, 32, 3, padding=1), scheme, name="conv")

    def forward(self, x, picture):
        return torch.cat([self.linear(x).flatten(), self.conv(picture).flatten()])


BOTH, LINEAR = ["linear", "conv"], ["linear"]
RANDOM = {"r": RANK, "init_weights": False}
#: Of peft, what takes some layer's weight into its own hands, or adds to its product.
TUNERS: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "dora": (peft.LoraConfig, {"r": RANK, "init_lora_weights": False, "use_dora": True}, BOTH),
    "loha": (peft.LoHaConfig, RANDOM, BOTH),
    "lokr": (peft.LoKrConfig, RANDOM, BOTH),
    "oft": (peft.OFTConfig, {"r": 0, "oft_block_size": 8, "init_weights": False}, BOTH),
    "boft": (peft.BOFTConfig, {"boft_block_size": 8, "init_weights": False}, BOTH),
    "ia3": (peft.IA3Config, {"feedforward_modules": ["conv"], "init_ia3_weights": False}, BOTH),
    "hra": (peft.HRAConfig, RANDOM, BOTH),
    "shira": (peft.ShiraConfig, RANDOM, LINEAR),
    "miss": (peft.MissConfig, RANDOM, LINEAR),
    "randlora": (peft.RandLoraConfig, RANDOM, LINEAR),
    "road": (peft.RoadConfig, {"group_size": 8, "init_weights": False}, LINEAR),
    "c3a": (peft.C3AConfig, {"block_size": 8, "init_weights": False}, LINEAR),
}


def adapted(model, tuner):
    config, options, names = TUNERS[tuner]
    torch.manual_seed(1)
    return peft.inject_adapter_in_model(config(target_modules=names, **options), model).eval()


@pytest.fixture
def _environment():
    """What the test began with: peft's BOFT leaves CC and CXX set where it cannot compile."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@torch.no_grad()
@pytest.mark.usefixtures("_environment")
@pytest.mark.parametrize("case", turned(TUNERS, ("token-smooth", "token-sparse", "int4-none")))
def test_a_tuner_does_to_packed_layers_what_it_does_to_dense_ones(case):
    tuner, scheme = case
    packed: Any = Both(SCHEMES[scheme])
    dense = copy.deepcopy(packed)
    dense.linear, dense.conv = as_dense(packed.linear), as_dense(packed.conv)
    x, picture = torch.randn(3, 64), torch.randn(1, 32, 6, 6)
    unadapted = dense(x, picture)
    packed, dense = adapted(packed, tuner), adapted(dense, tuner)
    there = dict(dense.named_parameters())
    for name, parameter in packed.named_parameters():
        if type(parameter) is not Codes:
            parameter.copy_(there[name])
    before, wanted = packed(x, picture), dense(x, picture)
    # Inputs of the packed products are rounded to 8 bits; codes for weights would be far off.
    assert (before - wanted).norm() < 0.06 * wanted.norm()
    assert not torch.allclose(wanted, unadapted, rtol=1e-3)
    for layer in (packed.linear, packed.conv):
        if hasattr(layer, "base_layer"):
            with pytest.raises(InputError, match=r"^(linear|conv)\.weight: is packed"):
                layer.merge()
    assert torch.equal(packed(x, picture), before)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"init_lora_weights": "pissa"}, r"^linear\.weight: is packed"),
        ({"modules_to_save": ["conv"]}, "^requires_grad: .*modules_to_save"),
    ],
    ids=["pissa", "modules_to_save"],
)
def test_what_changes_the_weights_that_it_adapts_is_refused(options, line):
    config = peft.LoraConfig(r=2, target_modules=["linear"], **options)
    with pytest.raises(InputError, match=line):
        peft.inject_adapter_in_model(config, Both(SCHEMES["token"]))


@pytest.mark.parametrize("order", one_of_each(("adapted-first", "fused-first"), type))
def test_fused_projections_step_aside_for_adapters(pipeline_dir, tmp_path, order):
    folder = tmp_path / "unet"
    shutil.copytree(pipeline_dir / "unet", folder)
    dense = unet_class().from_pretrained(folder)
    ends = ("to_q", "to_k", "to_v")
    layers = [n for n, _ in dense.named_modules() if n.rpartition(".")[2] in ends]
    pack_component(folder, dict.fromkeys(layers, SCHEMES["int4-token"]))
    model = unet_class().from_pretrained(folder)
    alone = step(model)
    state = branches(model, 7)
    with ByHand(model, (state, 1.0)):
        wanted = step(model)
    assert not near(wanted, alone)
    if order == "fused-first":
        model.fuse_qkv_projections()
        assert near(step(model), alone)
    model.load_lora_adapter(state, prefix=None, adapter_name="it")
    if order == "adapted-first":
        model.fuse_qkv_projections()
    assert near(step(model), wanted)
    if order == "fused-first":
        torch._dynamo.reset()
        assert near(step(torch.compile(model, fullgraph=True, backend="eager")), wanted)
    model.unload_lora()
    called: list[int] = []
    joined = [m for n, m in model.named_modules() if n.endswith(("to_qkv", "to_kv"))]
    for module in joined:
        module.register_forward_hook(lambda *_: called.append(1))
    assert near(step(model), alone)
    assert len(called) == len(joined) > 0


@pytest.mark.parametrize("scheme", [
    SCHEMES["int4-token"], SCHEMES["token-sparse"], SCHEMES["int4-none"],
    Scheme(INT4, PerChannel(), TWO_OF_FOUR, Activation.TOKEN),
], ids=["int4", "2:4", "int4-w16", "int4-2:4"])  # fmt: skip
def test_flux_adapters_do_not_widen_rows_of_codes(scheme, tmp_path):
    import diffusers

    from tests.support.pipelines import tiny_flux_pipeline

    folder = tiny_flux_pipeline(tmp_path / "flux")
    dense = diffusers.FluxTransformer2DModel.from_pretrained(folder / "transformer")
    names = [n for n, m in dense.named_modules()
             if isinstance(m, nn.Linear) and "blocks." in n and "norm" not in n]  # fmt: skip
    pack_component(folder / "transformer", dict.fromkeys(names, scheme))
    pipe = plain(folder)
    before = {name for _, name, _ in iterate_packed(pipe.transformer)}
    state = branches(pipe.transformer, 1, names=set(names[:6]))
    for adapter in ("one", "two"):
        pipe.load_lora_weights(
            {f"transformer.{k}": v for k, v in state.items()}, adapter_name=adapter
        )
    pipe.set_adapters(["one", "two"])
    packed = [name.replace(".base_layer", "") for _, name, _ in iterate_packed(pipe.transformer)]
    assert set(packed) == before
    pipe.unload_lora_weights()
    assert {name for _, name, _ in iterate_packed(pipe.transformer)} == before


@pytest.mark.parametrize("width", [16, 48], ids=["narrower-than-codes", "wider-than-codes"])
@pytest.mark.parametrize("scheme", [
    SCHEMES["int4-token"], SCHEMES["token-sparse"], SCHEMES["int4-none"],
    Scheme(INT4, PerChannel(), TWO_OF_FOUR, Activation.TOKEN),
], ids=["int4", "2:4", "int4-w16", "int4-2:4"])  # fmt: skip
def test_an_adapter_of_a_narrower_flux_is_padded_to_the_layer(scheme, width, tmp_path):
    import diffusers

    from tests.support.pipelines import tiny_flux_pipeline

    folder = tiny_flux_pipeline(tmp_path / "flux")
    wide = diffusers.FluxTransformer2DModel.from_pretrained(folder / "transformer")
    config = {**wide.config, "in_channels": 64, "out_channels": 16}
    wide = diffusers.FluxTransformer2DModel.from_config(config)
    wide.save_pretrained(folder / "transformer")
    pack_component(folder / "transformer", {"x_embedder": scheme})
    pipe = plain(folder)
    generator = torch.Generator().manual_seed(5)
    x, down, up = (torch.randn(s, generator=generator) for s in ((3, 64), (RANK, width), (64, 4)))
    before = pipe.transformer.x_embedder(x)
    pipe.load_lora_weights({
        "transformer.x_embedder.lora_A.weight": down, "transformer.x_embedder.lora_B.weight": up,
    })  # fmt: skip
    assert near(pipe.transformer.x_embedder(x), before + x[:, :width] @ down.T @ up.T)
    pipe.unload_lora_weights()
    assert torch.equal(pipe.transformer.x_embedder(x), before)
