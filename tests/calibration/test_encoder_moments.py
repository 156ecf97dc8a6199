"""Second moments of text encoders: what they read, what is left alone, and packing with them."""

import json

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from quantkit.calibration.moments.collect_hessians import collect_hessians, moment_layers
from quantkit.calibration.moments.moment_files import load_hessians
from quantkit.calibration.moments.token_rows import token_rows
from quantkit.calibration.observing.collect import layers_to_pack
from quantkit.calibration.observing.layer_modules import find_modules
from quantkit.cli.hessian_command import hessian as command
from quantkit.errors import ArtefactError, RecipeError
from quantkit.models import component_kinds
from quantkit.models.source import open_model, open_others
from quantkit.models.treated import others_of
from quantkit.pipelines.running import load_pipeline, run_prompts
from quantkit.progress import silent
from quantkit.recipe.component_recipes import EncoderRecipe
from quantkit.recipe.schema import Recipe
from quantkit.workflow.build import build
from quantkit.workflow.pack import Forecast, pack
from quantkit.workflow.verify import verify
from tests.support.encoders import ENCODERS, encoder_class, make_encoder
from tests.support.pipelines import tiny_flux_pipeline, tiny_pipeline

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = ("a red square", "a blue disc", "two rings", "a green cross", "dots", "a line", "stars")
CALIBRATION = {"prompts": 7, "steps": 1, "buckets": 1, "batch": 2, "row_share": 0.1}


#: Tokens of a prompt in the pipelines: what T5 reads depends on how much filling there is.
LENGTHS = {"CLIPTextModel": 16, "T5EncoderModel": 512}


def recipe_with(encoders="int4-gptq", **values):
    return Recipe.model_validate(
        {"name": "t", "text_encoders": encoders, "calibration": CALIBRATION, **values}
    )


def take(model, recipe, output):
    return collect_hessians(
        model, recipe, PROMPTS, output, memory=2**30, device="cpu", progress=silent
    )


@pytest.fixture(scope="module", params=[tiny_pipeline, tiny_flux_pipeline])
def model(request, tmp_path_factory):
    return open_model(request.param(tmp_path_factory.mktemp("encoders") / "model"))


@pytest.fixture(scope="module")
def taken(model, tmp_path_factory):
    """Moments of the text encoders, and how often a denoiser ran while they were taken."""
    calls = []

    def count(module, *_):
        calls.extend([1] if type(module).__name__ in names else [])

    names = {component.class_name for component in model.components}
    handle = nn.modules.module.register_module_forward_hook(count)
    try:
        found = take(model, recipe_with(), tmp_path_factory.mktemp("taken") / "h")
    finally:
        handle.remove()
    return found, len(calls)


def test_prompts_are_encoded_and_not_denoised(model, taken):
    found, denoised = taken
    encoders = {encoder.name for encoder in open_others(model, [component_kinds.ENCODERS])}
    assert set(found.index.digests) == encoders
    assert denoised == 0


def test_stored_moments_are_those_of_the_rows_that_the_pipeline_has_encoded(model, taken):
    found, _ = taken
    pipe = load_pipeline(model, torch.device("cpu"))
    for encoder, own in others_of(model, recipe_with()):
        layers = layers_to_pack(encoder, own)
        seen = raw_inputs(pipe, encoder.name, layers)
        for layer in layers:
            x = torch.cat(seen[layer.name])
            moments = found.read(encoder, layer)
            assert moments.rows == len(x)
            assert moments.held is None
            torch.testing.assert_close(moments.second, x.T @ x / len(x), rtol=1e-4, atol=1e-5)


def raw_inputs(pipe, name, layers):
    """Rows that each layer reads, of tokens that repeat none before them, and as many others."""
    encoder, seen, rows = getattr(pipe, name), {layer.name: [] for layer in layers}, []

    def tokens(_, args, kwargs):
        ids = args[0] if args else kwargs["input_ids"]
        rows[:] = []
        for number, prompt in enumerate(ids.tolist()):
            own = [i for i, token in enumerate(prompt) if i == 0 or prompt[i - 1] != token]
            filled = [i for i in range(len(prompt)) if i not in own]
            # All filling of a tiny tokenizer, or as much as there is text, first and last included.
            count = min(len(own), len(filled))
            steps = torch.linspace(0, max(len(filled) - 1, 0), count).round().long().tolist()
            rows.extend((number, i) for i in [*own, *(filled[step] for step in steps)])

    encoder.register_forward_pre_hook(tokens, with_kwargs=True)
    for layer, module in find_modules(encoder, layers, name).items():

        def listen(_, args, layer=layer):
            seen[layer].append(torch.stack([args[0][place] for place in rows]))

        module.register_forward_pre_hook(listen)
    run_prompts(pipe, PROMPTS, recipe_with().calibration)
    return seen


@pytest.mark.parametrize(
    ("ids", "rows"),
    [
        ([[1, 5, 6, 2, 2, 2, 2, 2, 2, 2]], [0, 1, 2, 3, 4, 6, 7, 9]),
        ([[0, 0, 0, 0, 0, 7]], [0, 5, 1, 4]),
        ([[1, 2, 3], [1, 1, 1]], [0, 1, 2, 3, 4]),
        ([[4]], [0]),
        ([[]], []),
    ],
)
def test_filling_counts_as_much_as_the_text(ids, rows):
    found = token_rows(torch.tensor(ids, dtype=torch.long))
    assert found.chosen.tolist() == rows
    count = torch.Size(found.shape).numel()
    values = torch.arange(2.0 * count).reshape(*found.shape, 2)
    assert found.of(values).tolist() == [values.reshape(count, 2)[rows].tolist()]
    # A vision tower's, say.
    assert torch.equal(found.of(torch.ones(99, 2)), torch.ones(99, 2))


def test_denoisers_are_observed_where_anything_of_theirs_needs_it(model):
    encoders = {encoder.name for encoder in open_others(model, [component_kinds.ENCODERS])}
    denoisers = {component.name for component in model.components}
    gptq = {"format": "int8", "rounding": "gptq"}
    wanted = {
        "int4-gptq": encoders,
        "int4": denoisers,
    }
    assert {name: set(moment_layers(model, recipe_with(name))) for name in wanted} == wanted
    assert set(moment_layers(model, recipe_with(weight=gptq))) == denoisers | encoders


def test_layers_that_are_rounded_otherwise_are_not_observed(model):
    section = {
        "weight": {"format": "int4", "rounding": "gptq"},
        "overrides": [{"encoders": ["text_encoder"], "weight": {"format": "int8"}}],
        "keep": ["*.SelfAttention.q"],
    }
    found = moment_layers(model, recipe_with(section))
    kept = {encoder.name for encoder in open_others(model, [component_kinds.ENCODERS])} - {
        "text_encoder"
    }
    # Where nothing is rounded by GPTQ, moments are for the masks of denoisers.
    assert set(found) == (kept or {component.name for component in model.components})
    assert not any(".q" in layer.name for name in kept for layer in found[name])


@pytest.mark.parametrize("fmt", ["int8", "int4"])
def test_embeddings_lose_less_than_without_moments(model, taken, tmp_path, fmt):
    found, _ = taken
    for name, hessians in ((fmt, None), (f"{fmt}-gptq", found)):
        summary = pack(model, output=tmp_path / name, recipe=recipe_with(name), hessians=hessians)
        assert {c.name for c in summary.components} > set(found.index.digests)
    pipe = load_pipeline(model, torch.device("cpu"))
    for encoder in open_others(model, [component_kinds.ENCODERS]):
        cls = encoder_class(encoder.class_name)
        ids = getattr(pipe, encoder.name.replace("text_encoder", "tokenizer"))(
            list(PROMPTS), padding="max_length", max_length=LENGTHS[encoder.class_name],
            truncation=True, return_tensors="pt",
        ).input_ids  # fmt: skip

        def embed(path, cls=cls, ids=ids):
            with torch.no_grad():
                return cls.from_pretrained(path, dtype=torch.float32)(ids)[0]

        wanted = embed(encoder.path)
        lost = [
            float((embed(tmp_path / name / encoder.name) - wanted).norm() / wanted.norm())
            for name in (f"{fmt}-gptq", fmt)
        ]
        assert 0 < lost[0] < 0.6 * lost[1]


def test_moments_of_encoders_alone_leave_denoisers_as_they_are(model, taken, tmp_path):
    found, _ = taken
    recipe = recipe_with(sparsity={"method": "magnitude"})
    pack(model, output=tmp_path / "with", recipe=recipe, hessians=found)
    pack(model, output=tmp_path / "without", recipe=recipe_with(None, sparsity=recipe.sparsity))
    for component in model.components:
        (one,) = (tmp_path / "with" / component.name).glob("*.safetensors")
        (other,) = (tmp_path / "without" / component.name).glob("*.safetensors")
        assert tensors(one) == tensors(other)


def tensors(path):
    from safetensors.torch import load_file

    return {name: tensor.view(torch.uint8).tolist() for name, tensor in load_file(path).items()}


def test_an_encoder_alone_takes_the_moments_of_its_pipeline(tmp_path):
    model = open_model(tiny_pipeline(tmp_path / "model"))
    found = take(model, recipe_with(), tmp_path / "h")
    (encoder,) = open_others(model, [component_kinds.ENCODERS])
    alone = pack(encoder.path, output=tmp_path / "alone", recipe=recipe_with(), hessians=found)
    pack(model, output=tmp_path / "whole", recipe=recipe_with(), hessians=found)
    assert sum(alone.by_scheme().values()) > 0
    first, second = (
        tmp_path / where / "model.safetensors" for where in ("alone", "whole/text_encoder")
    )
    assert tensors(first) == tensors(second)


def test_missing_moments_are_named(tmp_path):
    model = open_model(tiny_pipeline(tmp_path / "model"))
    planned = pack(model, output=tmp_path / "o", recipe=recipe_with(), dry_run=True)
    assert isinstance(planned, Forecast)
    assert planned.missing == ("hessians",)
    with pytest.raises(RecipeError, match="rounding gptq needs second moments"):
        pack(model, output=tmp_path / "o", recipe=recipe_with())
    denoiser = take(model, recipe_with("int4"), tmp_path / "h")
    with pytest.raises(ArtefactError, match="no component 'text_encoder', found 'unet'"):
        pack(model, output=tmp_path / "o", recipe=recipe_with(), hessians=denoiser)
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("class_name", ENCODERS)
def test_layers_are_found_under_the_names_of_transformers(class_name, tmp_path):
    make_encoder(class_name).half().save_pretrained(tmp_path)
    component = open_model(tmp_path).components[0]
    loaded = encoder_class(class_name).from_pretrained(tmp_path)
    layers = layers_to_pack(component, recipe_with("int4").for_component(EncoderRecipe, ""))
    found = find_modules(loaded, layers, "text_encoder")
    assert len(found) == len(set(map(id, found.values()))) == len(layers) > 0
    weights = {name: tuple(module.get_parameter("weight").shape) for name, module in found.items()}
    assert weights == {layer.name: layer.shape for layer in layers}


def test_the_command_says_what_it_would_observe(tmp_path):
    source = tiny_pipeline(tmp_path / "model")
    arguments = [str(source), "-r", "fp8", "-o", str(tmp_path / "h"), "-n", "--json"]
    done = CliRunner().invoke(command, [*arguments, "--set", "text_encoders=int4-gptq"])
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.stdout)["components"].items()
    assert found[0] == "text_encoder"
    assert found[1]["groups"] == 1


def test_a_run_takes_moments_of_encoders_and_chooses_masks_without(tmp_path):
    model = open_model(tiny_pipeline(tmp_path / "model"))
    recipe = recipe_with(
        sparsity={"method": "magnitude"},
        calibration={**CALIBRATION, "prompts": 2},
    )
    build(
        model, recipe, tmp_path / "run", prompts=PROMPTS, device="cpu", threads=1, force=False,
        resume=False, progress=silent,
    )  # fmt: skip
    assert set(load_hessians(tmp_path / "run" / "hessians").index.digests) == {"text_encoder"}
    assert not verify(tmp_path / "run" / "packed").breaches
