"""Models whose queries and keys have another basis: they answer what they did."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.calibration.attention_statistics import AttentionStatistics, merge_attention
from quantkit.calibration.column_errors import ColumnErrors, errors_of_module
from quantkit.calibration.rotation import held_out_prompts, plan_rotation
from quantkit.calibration.statistics import load_calibration, save_calibration
from quantkit.cli.rotate import rotate as command
from quantkit.errors import ArtefactError, ModelError, NonFiniteError, OutputError, PromptError
from quantkit.models.attention import Heads
from quantkit.models.source import open_model
from quantkit.storage.artefact import read_artefact, write_artefact
from tests.support.artefacts import attention_statistics
from tests.support.observed import RECIPE
from tests.support.pipelines import small_pictures, tiny_flux_pipeline

pytestmark = pytest.mark.usefixtures("one_thread")

OTHERS = tuple(f"thing {i}" for i in range(33))
SEEN = ("a red circle", "two blue squares", "a tree")
FEW = RECIPE.with_calibration({"prompts": 3, "steps": 2, "buckets": 2, "batch": 3, "seed": 7})
#: pipeline -> the attention modules that get a basis
DENOISERS = {"unet": "attn1", "transformer": "attn"}


@pytest.fixture(scope="module")
def sources(pipeline_dir, transformer_pipeline_dir):
    return {"unet": pipeline_dir, "transformer": transformer_pipeline_dir}


@pytest.fixture(scope="module")
def rotated(sources, tmp_path_factory):
    """Return what each pipeline became, and the calibration before."""
    found = {}
    for name, source in sources.items():
        folder = tmp_path_factory.mktemp(name)
        quantkit.calibrate(source, recipe=FEW, output=folder / "before.safetensors", prompts=SEEN)
        found[name] = quantkit.rotate(
            source,
            calibration=folder / "before.safetensors",
            output=folder / "rotated",
            prompts=(*SEEN, *OTHERS),
            batch=16,
        )
    return found


def draw(folder, module):
    """Return latents of two prompts in float64, and the queries of an attention module."""
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    seen = []
    denoiser = getattr(pipe, module)
    for name, child in denoiser.named_modules():
        if name.endswith("to_q"):
            child.register_forward_hook(lambda *args: seen.append(args[2]))
    generator = [torch.Generator().manual_seed(i) for i in range(2)]
    latents = pipe(
        ["a cat", "a dog"], num_inference_steps=3, generator=generator, output_type="latent",
        height=16, width=16,
    ).images  # fmt: skip
    return latents, seen[0]


@pytest.mark.parametrize("name", DENOISERS)
def test_the_model_answers_what_it_did(sources, rotated, name):
    before, q_before = draw(sources[name], name)
    after, q_after = draw(rotated[name].outputs.pipeline, name)
    # Weights are rounded to float16 once more.
    assert float((after - before).norm() / before.norm()) < 3e-3
    assert float((q_after - q_before).norm() / q_before.norm()) > 0.1


@pytest.mark.parametrize("name", DENOISERS)
def test_only_projections_of_queries_and_keys_change(sources, rotated, name):
    files = [next((path / name).glob("*.safetensors")) for path in
             (sources[name], rotated[name].outputs.pipeline)]  # fmt: skip
    before, after = map(load_file, files)
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    wanted = {
        f"{module}.{projection}"
        for module in rotated[name].rotation.bases
        for projection in ("to_q", "to_k", "add_q_proj", "add_k_proj")
    }
    assert {key.rpartition(".")[0] for key in changed} == {
        path for path in wanted if f"{path}.weight" in before
    }
    assert all(module.endswith(DENOISERS[name]) for module in rotated[name].rotation.bases)


@pytest.mark.parametrize("name", DENOISERS)
def test_the_calibration_fits_the_written_model(rotated, name, tmp_path):
    """Its digests are those of the new weights, and its ranges those in the basis."""
    found = load_calibration(rotated[name].outputs.calibration)
    again = quantkit.calibrate(
        rotated[name].outputs.pipeline, recipe=FEW, prompts=OTHERS[:32], output=None
    )
    assert again.calibration.metadata.digests == found.metadata.digests
    for module in rotated[name].rotation.bases:
        one, two = (c.attention[name][module] for c in (again.calibration, found))
        # Other seeds, so other pictures.
        torch.testing.assert_close(one.q_second, two.q_second, rtol=0.2, atol=0.02)
        power = two.q_second.diagonal(dim1=1, dim2=2)
        assert (power[:, :8].sum(1) > power[:, 8:].sum(1)).all()
        assert int(two.held_out) == 32
    quantkit.pack(
        rotated[name].outputs.pipeline, recipe="fp8", calibration=found, output=tmp_path / "packed"
    )


def test_errors_are_those_of_torch_with_fewer_columns():
    """Drawn so that every row of q is sampled."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 3, n, 64, generator=generator) for n in (32, 50, 50))
    sums = ColumnErrors(3, 64, torch.device("cpu"))
    for part in (slice(0, 1), slice(1, 2)):
        sums.add(Heads(q[part], k[part], v[part]), 0.2)
    taken = sums.taken(32)
    found = AttentionStatistics(**{**attention_statistics(2, 3, 64).tensors(), **taken})

    def attend(q, k):
        return torch.softmax(0.2 * q.double() @ k.double().mT, dim=3) @ v.double()

    wanted, errors = attend(q, k), errors_of_module(found.errors())
    for rank in (32, 48):
        less = attend(q[..., :rank], k[..., :rank])
        assert errors[f"rank {rank}"] == pytest.approx(
            float((less - wanted).norm() / wanted.norm()), rel=1e-4
        )
    centred = k - k.mean(2, keepdim=True)
    groups = centred.unflatten(3, (4, 16))
    least = groups.abs().topk(2, dim=3).values.amin(3, keepdim=True)
    less = attend(q, torch.where(groups.abs() >= least, groups, 0).flatten(3))
    assert errors["2:4"] == pytest.approx(float((less - wanted).norm() / wanted.norm()), rel=1e-4)
    both = merge_attention(found, found)
    assert both.errors()["held_out"].tolist() == [64]
    assert torch.equal(both.errors()["rank_lost"], 2 * taken["rank_lost"])
    assert merge_attention(found, attention_statistics(2, 3, 64)).errors() is None


def test_nothing_to_lose_is_no_error():
    sums = ColumnErrors(1, 32, torch.device("cpu"))
    nothing = torch.zeros(1, 1, 4, 32)
    sums.add(Heads(nothing, nothing, nothing), None)
    assert errors_of_module(sums.taken(32)) == {"rank 16": 0.0, "2:4": 0.0}


def test_heads_that_one_instruction_multiplies_have_nothing_to_leave_out():
    sums = ColumnErrors(1, 6, torch.device("cpu"))
    sums.add(Heads(*torch.ones(3, 1, 1, 4, 6)), None)
    assert errors_of_module(sums.taken(32)) == {}


def test_prompts_of_the_calibration_are_left_out(rotated):
    about = rotated["unet"].calibration.metadata
    assert held_out_prompts((*SEEN, *OTHERS), about, 33) == OTHERS
    assert held_out_prompts(OTHERS, about, 32) == OTHERS[:32]
    with pytest.raises(PromptError, match="31 prompts that the calibration was not taken from"):
        held_out_prompts((*SEEN, *OTHERS[:31]), about, 32)
    with pytest.raises(PromptError, match=r"8 prompts .*, wanted 32: .*; give more") as caught:
        held_out_prompts(OTHERS, about, 8)
    assert caught.value.fields == ("count",)


def test_the_command_prints_errors_and_reasons(sources, rotated, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(OTHERS))
    before = rotated["unet"].outputs.calibration.parent / "before.safetensors"
    arguments = [str(sources["unet"]), "-c", before, "-o", tmp_path / "r", "--prompts", prompts]
    done = CliRunner().invoke(command, [str(a) for a in (*arguments, "--batch", 16, "--json")])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert set(told["errors"]) == set(rotated["unet"].rotation.bases)
    assert set(told["left"].values()) == {"attention to another sequence"}
    done = CliRunner().invoke(command, [str(a) for a in (*arguments, "--batch", 16, "--force")])
    assert "4 modules keep their basis: attention to another sequence" in done.stdout
    assert "rank 16" in done.stdout
    done = CliRunner().invoke(command, [str(sources["unet"]), "-o", str(tmp_path / "x")])
    assert "no calibration" in str(done.exception)


@pytest.fixture(scope="module")
def flux_dir(tmp_path_factory):
    with small_pictures("FluxPipeline"):
        yield tiny_flux_pipeline(tmp_path_factory.mktemp("tiny") / "flux")


def refuse(error, text, *arguments, **options):
    with pytest.raises(error, match=text):
        quantkit.rotate(*arguments, prompts=OTHERS, batch=16, **options)


def test_rotary_embeddings_are_named(flux_dir, tmp_path):
    made = quantkit.calibrate(flux_dir, recipe="fp8", sampling=FEW_STEPS, prompts=SEEN)
    text = "a rotary embedding or a norm follows the projections"
    refuse(ModelError, text, flux_dir, calibration=made.calibration, output=tmp_path / "r")
    assert not list(tmp_path.iterdir())


FEW_STEPS = quantkit.Sampling(steps=4, batch=3)


def test_what_does_not_fit_is_refused(sources, rotated, tmp_path):
    source, other = sources["unet"], rotated["unet"]
    out = {"output": tmp_path / "r"}
    older = replace(other.calibration, attention={})
    refuse(ArtefactError, "no attention of unet; calibrate again", source, calibration=older, **out)
    text = "is not that of .*; calibrate this model"
    refuse(ArtefactError, text, source, calibration=other.calibration, **out)
    refuse(ModelError, "a component alone", source / "unet", calibration=older, **out)
    beside = tmp_path / "r.calibration.safetensors"
    beside.write_text("mine")
    refuse(OutputError, "exists already", source, calibration=other.calibration, **out)
    assert beside.read_text() == "mine"


def test_nan_of_a_weight_is_named(sources, rotated, tmp_path):
    broken = shutil.copytree(sources["unet"], tmp_path / "broken")
    file = next((broken / "unet").glob("*.safetensors"))
    tensors = load_file(file)
    before = load_calibration(rotated["unet"].outputs.calibration.parent / "before.safetensors")
    name = f"{next(iter(rotated['unet'].rotation.bases))}.to_q.weight"
    tensors[name][0, 0] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    from quantkit.recovery.rotated_model import RotatedTensors

    component = open_model(str(broken)).components[0]
    with pytest.raises(NonFiniteError, match=f"{name}: NaN"):
        RotatedTensors(component, plan_rotation(component, before))[name]


WRONG = {
    "missing": ("power", None, "power: missing"),
    "float ranks": ("ranks", torch.Tensor.double, "ranks: torch.float64"),
    "odd rank": ("ranks", lambda t: t + 1, r"ranks: \[17\], wanted ascending multiples"),
    "all columns": ("ranks", lambda t: t * 2, r"ranks: \[32\], wanted .* below 32"),
    "heads": ("rank_lost", lambda t: t[:, :1].contiguous(), r"rank_lost: shape \(1, 1\)"),
    "negative": ("sparse_lost", lambda t: -t - 1, "sparse_lost: below 0"),
    "rows": ("sparse_lost", lambda t: t.repeat(2, 1), "sparse_lost: 2 rows, wanted 0 or 1"),
    "nan": ("power", lambda t: t * torch.nan, "power: NaN or Inf"),
    "two": ("held_out", lambda t: t.repeat(2), r"held_out: shape \(2,\)"),
}


@pytest.mark.parametrize(("field", "change", "message"), WRONG.values(), ids=WRONG)
def test_wrong_errors_are_refused(rotated, tmp_path, field, change, message):
    path = tmp_path / "c.safetensors"
    save_calibration(rotated["unet"].calibration, path, force=False)
    tensors, about = read_artefact(path, "quantkit_calibration", newest=5)
    name = f"unet/{next(iter(rotated['unet'].rotation.bases))}/attention.{field}"
    tensor = tensors.pop(name)
    if change is not None:
        tensors[name] = change(tensor)
    write_artefact(path, "quantkit_calibration", tensors, about, force=True, version=5)
    with pytest.raises(ArtefactError, match=message):
        load_calibration(path)
