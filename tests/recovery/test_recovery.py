"""Recovery: the student learns, its zeros stay, all else stays as it was, and pack takes it."""

import filecmp
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from diffusers import DDIMScheduler
from safetensors.torch import load_file, safe_open, save_file

from quantkit.calibration.moments.timestep_weights import responses
from quantkit.cli.recover_command import recover as recover_command
from quantkit.cli.verify_command import verify as verify_command
from quantkit.errors import (
    ArtefactError,
    ModelError,
    NonFiniteError,
    OutputError,
    PromptError,
    RecipeError,
)
from quantkit.models.component_layers import list_layers
from quantkit.models.source import open_model
from quantkit.numerics.packed_2to4 import from_rows, unpack_positions
from quantkit.packing.pack_model import pack
from quantkit.pipelines.running import choose_device, load_pipeline
from quantkit.progress import silent
from quantkit.recipe.load import load_recipe
from quantkit.recipe.schema import SparsityRecipe
from quantkit.recovery.denoiser_calls import recording
from quantkit.recovery.distill.distillation import RecoveryTask, recover
from quantkit.recovery.distill.settings import DistillSettings
from quantkit.recovery.distill.trajectories import Teacher, TrajectoryStore
from quantkit.recovery.recovered_model import write_recovered
from quantkit.sparsity.choose import choose_masks
from quantkit.sparsity.maskfile import load_masks, save_masks
from quantkit.storage.marker import MARKER
from quantkit.workflow.recovery_settings import Training, settings_of
from tests.support.pipelines import tiny_flux_pipeline

pytestmark = pytest.mark.usefixtures("one_thread")

RECIPE = load_recipe("fp8").model_copy(update={"sparsity": SparsityRecipe()})
PROMPTS = ("a red cat", "two dogs", "a house")
SHORT = DistillSettings(
    steps=40,
    seconds=None,
    batch=4,
    rate=1e-3,
    warm_up=2,
    average=0.9,
    sampling_steps=2,
    sampling_batch=2,
    trajectories=4,
    refresh=15,
    watch_every=None,
)
WEIGHTS = "diffusion_pytorch_model.safetensors"


def run(model, masks, settings, prompts=PROMPTS, **more):
    task = RecoveryTask(model, masks, None, prompts, "cpu")
    return recover(task, settings, progress=silent, **more)


@pytest.fixture(scope="module")
def recovered(model, masks):
    return run(model, masks, SHORT)


@pytest.fixture(scope="module")
def written(model, masks, recovered, tmp_path_factory):
    """The recovered pipeline's directory, its mask file, and the masks."""
    folder = tmp_path_factory.mktemp("recovered")
    out, file = folder / "sparse", folder / "masks.safetensors"
    return out, file, write_recovered(model, masks, recovered, out, file, force=False)


def dense_masks(model, masks):
    component = model.components[0]
    chosen = masks.of(component)
    return {
        layer.weight.name: from_rows(chosen[layer.name].dense(layer.n, layer.k), layer.shape)
        for layer in list_layers(component)
        if layer.name in chosen
    }


def test_loss_falls(recovered):
    assert recovered.points[-1].step == SHORT.steps
    assert recovered.points[-1].fraction == 1
    assert recovered.points[-1].loss < 0.7 * recovered.points[0].loss


def test_student_is_nearer_to_its_teacher_than_masks_alone(model, masks, recovered):
    torch.manual_seed(0)
    teacher = load_pipeline(model, choose_device("cpu")).unet
    question = torch.randn(4, 4, 8, 8), 500, torch.randn(4, 16, 32)

    def error(change):
        unet = load_pipeline(model, choose_device("cpu")).unet
        state = unet.state_dict()
        unet.load_state_dict({name: change(name, value) for name, value in state.items()})
        with torch.no_grad():
            return float((unet(*question)[0] - teacher(*question)[0]).square().mean())

    dense = dense_masks(model, masks)
    one_shot = error(lambda name, value: value * dense.get(name, 1))
    assert error(lambda name, _: recovered.weights[name]) < 0.7 * one_shot


def test_weights_outside_the_masks_are_exactly_zero(model, masks, recovered, written):
    file = load_file(written[0] / "unet" / WEIGHTS)
    dense = dense_masks(model, masks)
    assert len(dense) == 71
    for name, mask in dense.items():
        assert not torch.any(recovered.weights[name][~mask])
        assert not torch.any(file[name][~mask])
        assert torch.any(file[name][mask])


def test_every_other_file_is_copied_byte_for_byte(pipeline_dir, written):
    names = sorted(p.relative_to(pipeline_dir) for p in pipeline_dir.rglob("*") if p.is_file())
    found = sorted(p.relative_to(written[0]) for p in written[0].rglob("*") if p.is_file())
    # The marker says that quantkit wrote the folder.
    assert found == [Path(MARKER), *names]
    changed = [n for n in names if not filecmp.cmp(pipeline_dir / n, written[0] / n, shallow=False)]
    assert changed == [Path("unet") / WEIGHTS]


def test_denoiser_keeps_names_shapes_dtypes_and_metadata(pipeline_dir, written):
    before, after = (folder / "unet" / WEIGHTS for folder in (pipeline_dir, written[0]))
    old, new = load_file(before), load_file(after)
    assert {n: (t.shape, t.dtype) for n, t in old.items()} == {
        n: (t.shape, t.dtype) for n, t in new.items()
    }
    with safe_open(before, "pt") as first, safe_open(after, "pt") as second:
        assert first.metadata() == second.metadata()
    assert not any(torch.equal(old[name], new[name]) for name in old if name.endswith("weight"))


def test_packed_zeros_are_the_trained_ones(model, masks, written, tmp_path):
    out, file, _ = written
    packed = tmp_path / "packed"
    source = open_model(str(out))
    recipe = load_recipe("fp8-sparse")
    pack(source, recipe, packed, calibration=None, masks=load_masks(file), threads=1, force=False,
         progress=silent)  # fmt: skip
    verified = CliRunner().invoke(verify_command, [str(packed), "-q"])
    assert verified.exit_code == 0, verified.output
    tensors = load_file(packed / "unet" / WEIGHTS)
    chosen = masks.of(model.components[0])
    layers = {layer.name: layer for layer in list_layers(source.components[0])}
    for name, mask in chosen.items():
        positions = unpack_positions(tensors[f"{name}.weight_meta"])
        kept = torch.zeros(*positions.shape[:2], 4, dtype=torch.bool).scatter_(2, positions, True)
        assert torch.equal(kept.flatten(1), mask.dense(layers[name].n, layers[name].k))


def test_same_settings_give_the_same_weights(model, masks):
    few = replace(SHORT, steps=2, trajectories=2)
    first, second = run(model, masks, few), run(model, masks, few)
    assert all(torch.equal(first.weights[n], second.weights[n]) for n in first.weights)


def test_checkpointing_changes_no_result(model, masks):
    few = replace(SHORT, steps=2, trajectories=2)
    plain, frugal = run(model, masks, few), run(model, masks, replace(few, checkpointing=True))
    torch.testing.assert_close(frugal.points[-1].loss, plain.points[-1].loss)


def test_time_limit_ends_the_run(model, masks):
    begun = time.monotonic()
    result = run(model, masks, replace(SHORT, steps=10**9, seconds=1.0))
    assert result.points[-1].fraction == 1
    assert result.points[-1].seconds < 10
    assert time.monotonic() - begun < 30


def test_bank_keeps_what_the_teacher_saw_and_said(model):
    pipe = load_pipeline(model, choose_device("cpu"))
    one_step = replace(SHORT, sampling_steps=1)
    assert Teacher(pipe, pipe.unet, PROMPTS, one_step).sample(2).answers.shape == (4, 1, 4, 8, 8)
    chunk = Teacher(pipe, pipe.unet, PROMPTS, SHORT).sample(2)
    # With guidance a sample has two rows: without its caption, then with it.
    assert chunk.answers.shape == (4, chunk.steps, 4, 8, 8)
    bank = TrajectoryStore(chunk, 1)
    rows, answers = bank.draw(16, torch.Generator().manual_seed(0))
    with torch.no_grad():
        again = pipe.unet(**bank.template.arguments(rows))[0]
    torch.testing.assert_close(again, answers, rtol=1e-4, atol=1e-5)
    states = rows[-1]
    assert len({float(state.sum()) for state in states}) == 3  # the empty caption and two prompts


def test_bank_is_bounded_and_drops_the_oldest(model):
    pipe = load_pipeline(model, choose_device("cpu"))
    teacher = Teacher(pipe, pipe.unet, PROMPTS, SHORT)
    chunks = [teacher.sample(1) for _ in range(3)]
    bank = TrajectoryStore(chunks[0], 2)
    for chunk in chunks[1:]:
        bank.put(chunk)
    _, answers = bank.draw(64, torch.Generator().manual_seed(0))
    seen = {float(answer.sum()) for answer in answers}
    stored = [{float(a.sum()) for a in chunk.answers.flatten(0, 1)} for chunk in chunks]
    assert seen == stored[1] | stored[2]


def test_schedules_have_half_to_twice_the_steps(model):
    pipe = load_pipeline(model, choose_device("cpu"))
    teacher = Teacher(pipe, pipe.unet, PROMPTS, replace(SHORT, sampling_steps=4))
    chunks = [teacher.sample(1) for _ in range(24)]
    steps = [chunk.steps for chunk in chunks]
    assert teacher.most_steps == max(steps) == 8
    assert min(steps) == 2
    timesteps = [{float(t) for t in chunk.moving[1].flatten()} for chunk in chunks]
    assert len(set.union(*timesteps)) > 12
    # A training that goes on samples the same again.
    teacher.go_to(5, 1)
    again = teacher.sample(1)
    assert torch.equal(again.answers, chunks[5].answers)
    bank = TrajectoryStore(chunks[0], 24)
    for chunk in chunks[1:]:
        bank.put(chunk)
    rows, answers = bank.draw(64, torch.Generator().manual_seed(0))
    assert {float(t) for t in rows[1]} <= set.union(*timesteps)
    with torch.no_grad():
        expected = pipe.unet(**bank.template.arguments(rows))[0]
    torch.testing.assert_close(answers, expected, rtol=1e-4, atol=1e-5)


def test_half_of_the_calls_are_drawn_by_their_effect_on_the_sample(model):
    pipe = load_pipeline(model, choose_device("cpu"))
    settings = replace(SHORT, sampling_steps=4, weighting="schedule")
    chunk = Teacher(pipe, pipe.unet, PROMPTS, settings).sample(1)
    pipe.scheduler.set_timesteps(chunk.steps)
    power = responses(pipe.scheduler).square()
    expected = (power / power.sum() + 1 / chunk.steps) / 2
    torch.testing.assert_close(chunk.chances.double(), expected)
    timesteps = chunk.draw(4000, torch.Generator().manual_seed(0))[1]
    found = [(timesteps == t).double().mean() for t in pipe.scheduler.timesteps]
    torch.testing.assert_close(torch.stack(found), expected, atol=0.03, rtol=0)
    alike = Teacher(pipe, pipe.unet, PROMPTS, SHORT).sample(1)
    assert torch.equal(alike.chances, torch.full((alike.steps,), 1 / alike.steps))


class FewSteps(DDIMScheduler):
    """A scheduler of at most five steps, as those of distilled models are."""

    def set_timesteps(self, num_inference_steps, device=None):
        if num_inference_steps > 5:
            raise ValueError("more than 5 steps")
        super().set_timesteps(num_inference_steps, device)


def test_schedules_have_no_more_steps_than_the_scheduler_takes(model):
    pipe = load_pipeline(model, choose_device("cpu"))
    pipe.scheduler = FewSteps.from_config(pipe.scheduler.config)
    teacher = Teacher(pipe, pipe.unet, PROMPTS, replace(SHORT, sampling_steps=4))
    assert teacher.most_steps == 4
    assert {teacher.sample(1).steps for _ in range(12)} == {2, 3, 4}


@pytest.mark.parametrize("kind", ["sd3", "flux"])
def test_transformers_are_recovered_too(kind, transformer_pipeline_dir, tmp_path_factory):
    path = transformer_pipeline_dir
    if kind == "flux":
        path = tiny_flux_pipeline(tmp_path_factory.mktemp("tiny") / "flux")
    model = open_model(str(path))
    pipe = load_pipeline(model, choose_device("cpu"))
    few = replace(SHORT, steps=1, batch=1, sampling_batch=1, trajectories=1, checkpointing=True)
    chunk = Teacher(pipe, pipe.transformer, PROMPTS, few).sample(1)
    bank = TrajectoryStore(chunk, 1)
    rows, answers = bank.draw(2, torch.Generator().manual_seed(0))
    with torch.no_grad():
        again = pipe.transformer(**bank.template.arguments(rows))[0]
    torch.testing.assert_close(again, answers, rtol=1e-4, atol=1e-5)
    masks = choose_masks(model, RECIPE, None, progress=silent)
    result = run(model, masks, few)
    before = dict(pipe.transformer.named_parameters())
    dense = dense_masks(model, masks)
    for name, mask in dense.items():
        assert not torch.any(result.weights[name][~mask])
    # SD3's last block has text queries whose result nothing reads: they stay as they were.
    trained = [n for n, m in dense.items() if not torch.equal(result.weights[n][m], before[n][m])]
    assert len(trained) > 0.8 * len(dense)


def test_denoiser_that_is_not_called_is_refused(model):
    with (
        recording(torch.nn.Linear(1, 1)) as record,
        pytest.raises(ModelError, match="did not call"),
    ):
        record.chunk()


def test_no_masks_are_refused(model, masks):
    empty = replace(masks, layers={"unet": {}})
    for nothing in (empty, None):
        with pytest.raises(ArtefactError, match="no layer is masked"):
            run(model, nothing, SHORT)


def test_masks_of_other_weights_are_refused(model, masks, written):
    with pytest.raises(ArtefactError, match="had other weights"):
        run(open_model(str(written[0])), masks, SHORT)


def test_masks_of_an_unknown_layer_are_refused(model, masks):
    strange = replace(
        masks, layers={"unet": {"nowhere": next(iter(masks.layers["unet"].values()))}}
    )
    with pytest.raises(ArtefactError, match="nowhere is not a layer"):
        run(model, strange, SHORT)


def test_component_alone_is_refused(pipeline_dir, masks):
    with pytest.raises(ModelError, match="recovery runs the whole pipeline"):
        run(open_model(str(pipeline_dir / "unet")), masks, SHORT)


def test_no_prompts_are_refused(model, masks):
    with pytest.raises(PromptError, match="no prompts"):
        run(model, masks, SHORT, prompts=())


def test_loss_that_is_not_finite_ends_the_run(model, masks):
    with pytest.raises(NonFiniteError, match="the loss is"):
        run(model, masks, replace(SHORT, steps=5, rate=1e30))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"steps": None, "seconds": None}, "neither steps nor seconds"),
        ({"steps": 0}, "steps 0"),
        ({"seconds": 0.0}, "seconds 0"),
        ({"batch": 0}, "batch 0"),
        ({"rate": 0.0}, "rate 0"),
        ({"average": 1.0}, "average 1"),
    ],
)
def test_settings_out_of_range_are_refused(changes, text):
    with pytest.raises(RecipeError, match=text):
        replace(DistillSettings(), **changes)


def test_weight_that_the_file_cannot_hold_is_refused(model, masks, recovered, tmp_path):
    huge = {name: value * 1e9 for name, value in recovered.weights.items()}
    out = tmp_path / "out"
    with pytest.raises(NonFiniteError, match="does not fit"):
        write_recovered(
            model, masks, replace(recovered, weights=huge), out, tmp_path / "m", force=False
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("inside", ["sparse/masks.safetensors", "sparse"])
def test_masks_inside_the_pipeline_are_refused(model, masks, recovered, tmp_path, inside):
    with pytest.raises(OutputError, match="inside the pipeline"):
        write_recovered(
            model, masks, recovered, tmp_path / "sparse", tmp_path / inside, force=False
        )
    assert list(tmp_path.iterdir()) == []


def test_other_weights_of_the_denoiser_are_left_out(pipeline_dir, masks, recovered, tmp_path):
    import shutil

    source = tmp_path / "source"
    shutil.copytree(pipeline_dir, source)
    save_file({"x": torch.zeros(1)}, source / "all.safetensors")
    save_file({"x": torch.zeros(1)}, source / "unet" / "other.safetensors")
    again = open_model(str(source))
    write_recovered(again, masks, recovered, tmp_path / "out", tmp_path / "m", force=False)
    assert sorted(p.name for p in (tmp_path / "out").glob("**/*.safetensors")) == sorted(
        p.name for p in pipeline_dir.glob("**/*.safetensors")
    )


def test_existing_masks_end_the_command_before_the_work(pipeline_dir, masks, tmp_path):
    save_masks(masks, tmp_path / "masks", force=False)
    (tmp_path / "out.masks.safetensors").touch()
    given = (pipeline_dir, "-o", tmp_path / "out", "--masks", tmp_path / "masks")
    result = CliRunner().invoke(recover_command, [str(a) for a in given])
    assert isinstance(result.exception, OutputError)


@pytest.mark.parametrize(
    ("given", "steps", "seconds"),
    [
        ({}, None, 120),
        ({"steps": 5}, 5, None),
        ({"minutes": 0.5}, None, 30),
        ({"steps": 5, "minutes": 0.5}, 5, 30),
    ],
)
def test_minutes_and_steps_limit_the_run(given, steps, seconds):
    settings = settings_of(Training(**given), RECIPE.calibration, on_cpu=False)
    assert (settings.steps, settings.seconds) == (steps, seconds)
