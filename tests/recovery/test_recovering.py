"""A recovery beyond its loss: as packed, watched, resumed, offloaded, by several processes."""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from skimage.metrics import structural_similarity

import quantkit
from quantkit.checkpoint.reader import open_packed
from quantkit.cli.recover_command import recover as recover_command
from quantkit.cli.sparsify_command import sparsify as sparsify_command
from quantkit.errors import ArtefactError, CheckpointError, InputError, OutputError, RecipeError
from quantkit.models.source import open_model
from quantkit.packing.pack_model import pack
from quantkit.pipelines.running import choose_device, load_pipeline
from quantkit.progress import silent
from quantkit.recipe.layer_recipes import WeightRecipe
from quantkit.recipe.load import load_recipe
from quantkit.recipe.schema import Recipe, SparsityRecipe
from quantkit.recovery.distill import student_training
from quantkit.recovery.distill.distillation import (
    Look,
    RecoveryTask,
    SaveSettings,
    _Gallery,
    ignore,
    recover,
)
from quantkit.recovery.distill.distributed import Ranks
from quantkit.recovery.distill.optimizer import Offloaded, Resident
from quantkit.recovery.distill.score_change import ScoreChange
from quantkit.recovery.distill.settings import DistillSettings
from quantkit.recovery.distill.training_progress import (
    ScoredStep,
    TrainingProgress,
    ValidationScore,
)
from quantkit.recovery.distill.training_resume import refuse_others, refuse_unfinished
from quantkit.recovery.distill.trajectories import Teacher, TrajectoryStore
from quantkit.recovery.distill.validation import compare_latents, compare_pictures, hold_out
from quantkit.recovery.packed_training import install
from quantkit.sparsity.maskfile import save_masks
from quantkit.workflow.recovery_result import Recovery
from tests.support.pipelines import tiny_sd15_pipeline

pytestmark = pytest.mark.usefixtures("one_thread")

FP8 = load_recipe("fp8")
INT4 = Recipe(name="int4", weight=WeightRecipe(format="int4", observer="mse"), data_free=True)
SPARSE = FP8.model_copy(update={"sparsity": SparsityRecipe()})
PROMPTS = ("a red cat", "two dogs", "a house")
SHORT = DistillSettings(
    steps=8,
    seconds=None,
    batch=2,
    rate=1e-3,
    warm_up=2,
    average=0.9,
    sampling_steps=2,
    sampling_batch=1,
    trajectories=2,
    refresh=3,
    watch_every=None,
)


@pytest.fixture(autouse=True)
def _points_are_many(monkeypatch):
    monkeypatch.setattr(student_training, "READ_EVERY", 2)


@pytest.fixture(scope="module")
def packed(pipeline_dir, tmp_path_factory):
    """The tiny pipeline in INT4, which training has much to gain in."""
    path = tmp_path_factory.mktemp("packed") / "int4"
    pack(open_model(str(pipeline_dir)), INT4, path, calibration=None, masks=None, threads=1,
         force=False, progress=silent)  # fmt: skip
    return open_packed(path)


def run(model, masks, settings, *, packed=None, save=None, watch=ignore, show=ignore):
    task = RecoveryTask(model, masks, packed, PROMPTS, "cpu")
    return recover(task, settings, progress=silent, save=save, watch=watch, show=show)


def test_loss_of_a_packed_model_is_what_packing_costs(model, packed):
    few = replace(SHORT, steps=1, rate=1e-30, batch=16, sampling_batch=2)
    found = run(model, None, few, packed=packed).points[0].loss
    pipe = load_pipeline(model, choose_device("cpu"))
    bank = TrajectoryStore(Teacher(pipe, pipe.unet, PROMPTS, few).sample(2), 1)
    rows, answers = bank.draw(few.batch, torch.Generator().manual_seed(few.seed * 1_000_003))
    install(pipe.unet, packed.components[0])
    with torch.no_grad():
        answer = pipe.unet(**bank.template.arguments(rows))[0]
    wanted = float((answer - answers).square().mean())
    assert wanted > 1e-4
    # Sums in another order move single inputs to other codes, and this is one batch.
    assert found == pytest.approx(wanted, rel=0.1)


def test_codes_scales_and_biases_are_what_is_trained(model, packed):
    # The same calls again and again.
    few = replace(SHORT, steps=40, batch=8, rate=3e-3, refresh=100)
    result = run(model, None, few, packed=packed)
    losses = [point.loss for point in result.points]
    assert fmean(losses[-3:]) < 0.5 * losses[0]
    unet = packed.components[0]
    moved = dict.fromkeys(("weight", "weight_scale", "bias"), 0)
    for name, value in result.weights.items():
        layer, _, part = name.rpartition(".")
        if layer in unet.config.layers and part != "bias":
            moved[part] += not torch.equal(value.reshape(-1), unet.read(name).reshape(-1))
    assert moved["weight"] == moved["weight_scale"] == len(unet.config.layers)
    assert result.weights.keys() <= unet.tensors.keys()


@pytest.mark.parametrize("killed", [2, 8], ids=["young", "after the bank turned over"])
def test_resumed_training_goes_on_as_if_it_had_not_ended(model, masks, tmp_path, killed):
    whole = run(model, masks, SHORT)
    save = SaveSettings(tmp_path / "training.safetensors", every=1e-9)

    def kill(point):
        # Before this point is saved: the one before it is what is left.
        if point.step == killed:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, masks, SHORT, save=save, watch=kill)
    resumed = run(model, masks, SHORT, save=replace(save, resume=True))
    assert [p.step for p in resumed.points] == [1, 2, 4, 6, 8]
    assert [p.loss for p in resumed.points] == [p.loss for p in whole.points]
    assert resumed.aside > 0
    assert all(torch.equal(resumed.weights[n], whole.weights[n]) for n in whole.weights)


def test_a_last_look_that_fails_costs_no_training(model, masks, tmp_path, monkeypatch):
    save = SaveSettings(tmp_path / "training.safetensors", every=1e9)

    def fail(gallery, watcher, weights):
        if gallery.trainer.step == SHORT.steps:
            raise MemoryError

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(_Gallery, "look", fail)
        run(model, masks, SHORT, save=save)
    whole = run(model, masks, SHORT)
    monkeypatch.setattr(student_training.Trainer, "_train", None)
    resumed = run(model, masks, SHORT, save=replace(save, resume=True))
    assert [p.loss for p in resumed.points] == [p.loss for p in whole.points]
    assert all(torch.equal(resumed.weights[n], whole.weights[n]) for n in whole.weights)


def test_time_goes_on_where_it_was(model, masks, tmp_path):
    save = SaveSettings(tmp_path / "training.safetensors", every=1e-9)
    before = []

    def kill(point):
        before.append(point.seconds)
        if point.step == 4:
            raise KeyboardInterrupt

    timed = replace(SHORT, steps=6, seconds=1e4)
    with pytest.raises(KeyboardInterrupt):
        run(model, masks, timed, save=save, watch=kill)
    resumed = run(model, masks, timed, save=replace(save, resume=True))
    seconds = [p.seconds for p in resumed.points]
    assert seconds[:2] == before[:2]
    assert seconds == sorted(seconds)
    # Sampling again is left out, or the third point would come later than it did before.
    assert seconds[2] - seconds[1] < 10


@pytest.mark.parametrize(
    "case",
    [
        ({"settings": replace(SHORT, rate=2e-3)}, "rate was 0.001 and is 0.002"),
        ({"masks": None, "packed": True}, "masks was checksum"),
    ],
    ids=["settings", "packed"],
)
def test_other_training_is_not_resumed(model, masks, packed, tmp_path, case):
    changes, text = case
    save = SaveSettings(tmp_path / "training.safetensors", every=1e-9)
    few = replace(SHORT, steps=1, trajectories=2)
    run(model, masks, replace(few, rate=1e-3), save=save)
    given = {"settings": few, "masks": masks, "packed": False} | changes
    given["settings"] = replace(given["settings"], steps=1, trajectories=2)
    with pytest.raises(ArtefactError, match=text):
        run(model, given["masks"], given["settings"], packed=packed if given["packed"] else None,
            save=replace(save, resume=True))  # fmt: skip


def test_checkpoint_of_another_model_is_refused(tmp_path):
    with pytest.raises(ArtefactError, match=r"model was checksum b+ and is checksum a"):
        refuse_others(tmp_path / "file", {"model": "b" * 64}, {"model": "a" * 64})


def test_damaged_checkpoint_is_refused(model, masks, tmp_path):
    save = SaveSettings(tmp_path / "training.safetensors", every=1.0, resume=True)
    save.path.write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    with pytest.raises(ArtefactError, match="not a quantkit_recovery file"):
        run(model, masks, replace(SHORT, steps=1, trajectories=2), save=save)


def test_saved_training_is_neither_lost_nor_invented(tmp_path):
    path = tmp_path / "training.safetensors"
    with pytest.raises(ArtefactError, match="no training was saved"):
        refuse_unfinished(path, resume=True, force=False)
    refuse_unfinished(path, resume=False, force=False)
    path.touch()
    with pytest.raises(OutputError, match="resume it, or set force"):
        refuse_unfinished(path, resume=False, force=False)
    refuse_unfinished(path, resume=True, force=False)
    refuse_unfinished(path, resume=False, force=True)


def test_pictures_are_looked_at_and_change_nothing(model, masks):
    plain = run(model, masks, SHORT)
    seen = []
    watched = run(model, masks, replace(SHORT, watch_every=4, watched=2), watch=seen.append)
    looks = {p.step: p.look for p in seen if p.look}
    assert sorted(looks) == [4, 8]
    assert {look.metric for look in looks.values()} == {"SSIM"}
    assert all(-1 <= look.value < 1 for look in looks.values())
    assert all(torch.equal(plain.weights[n], watched.weights[n]) for n in plain.weights)
    assert watched.aside > 0
    assert plain.aside == 0


def test_perfect_student_looks_perfect(model, packed):
    # Rates that move nothing, and no masks: what is packed is what the look must show.
    still = replace(SHORT, steps=1, rate=1e-30, watch_every=1, watched=2, trajectories=2)
    look = run(model, None, still, packed=packed).points[0].look
    assert 0.5 < look.value < 0.99999


@pytest.mark.parametrize(("every", "steps"), [(1, [0, 1, 2]), (5, [0, 2]), (None, [])])
def test_scores_are_of_the_first_and_of_the_written_weights(model, packed, every, steps):
    short = replace(SHORT, steps=2, watch_every=every, watched=1)
    seen: list[Look] = []
    result = run(model, None, short, packed=packed, show=seen.append)
    assert [look.step for look in seen] == steps
    if not steps:
        assert result.first_look is result.written_look is None
        return
    assert result.first_look == ScoredStep(0, seen[0].score)
    assert result.written_look == ScoredStep(2, seen[-1].score)


def test_prompts_are_held_out_where_there_are_many():
    many = [str(i) for i in range(64)]
    assert hold_out(many, 4) == (many[:60], many[60:])
    few = many[:63]
    assert hold_out(few, 4) == (few, few[:4])


def test_looks_measure_as_the_report_does():
    rng = np.random.default_rng(0)
    pictures = rng.random((2, 16, 24, 3), dtype=np.float32)
    noise = rng.standard_normal(pictures.shape, dtype=np.float32)
    other = np.clip(pictures + 0.1 * noise, 0, 1)
    bytes_of = [np.round(255 * p).astype(np.uint8) for p in (pictures, other)]
    wanted = [structural_similarity(a, b, channel_axis=2) for a, b in zip(*bytes_of, strict=True)]
    assert compare_pictures(pictures, other).value == pytest.approx(np.mean(wanted), abs=1e-6)
    assert compare_pictures(pictures, pictures).value == pytest.approx(1)
    # A tenth of the amplitude is 20 dB.
    latents = rng.standard_normal((2, 4, 8, 8)).astype(np.float32)
    assert compare_latents(1.1 * latents, latents).value == pytest.approx(20, abs=1e-3)
    assert compare_latents(latents, latents).value == np.inf


def test_offloaded_steps_are_those_of_the_resident_optimizer():
    torch.manual_seed(0)
    source = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.SiLU(), torch.nn.Linear(8, 4))
    masks = {"0.weight": torch.rand(8, 8) > 0.5}
    settings = replace(SHORT, weight_decay=0.1, average=0.5)
    first, second = copy.deepcopy(source), copy.deepcopy(source)
    steppers: tuple[Any, Any] = (
        Resident(first, masks, settings, Ranks()),
        Offloaded(second, source, masks, settings, Ranks()),
    )
    x, wanted = torch.randn(16, 8), 0.1 * torch.randn(16, 4)
    for step in range(8):
        for student, stepper in zip((first, second), steppers, strict=True):
            # Young averages follow every step, in both.
            stepper.begin(1e-2 / (step + 1), 0.4)
            (student(x) - wanted).square().mean().backward()
            stepper.finish()
    assert not torch.any(second[0].get_parameter("weight")[~masks["0.weight"]])
    for name, value in first.named_parameters():
        found = dict(second.named_parameters())[name]
        torch.testing.assert_close(found, value, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(steppers[1].average[name], steppers[0].average[name])
        assert found.grad is None
    state = steppers[0].state()
    for name, kept in steppers[1].state().items():
        if name != "clip":
            torch.testing.assert_close(kept, state[name], rtol=1e-4, atol=1e-6)
    steppers[1].close()


def test_offloaded_states_are_restored():
    torch.manual_seed(0)
    source, x = torch.nn.Linear(8, 4), torch.randn(16, 8)

    def train(stepper, student, steps):
        for _ in range(steps):
            stepper.begin(1e-2, 0.5)
            student(x).square().mean().backward()
            stepper.finish()

    students = [copy.deepcopy(source).bfloat16().float() for _ in range(2)]
    first, second = (Offloaded(s, source, {}, SHORT, Ranks()) for s in students)
    train(first, students[0], 3)
    kept = {name: value.clone() for name, value in first.state().items()}
    train(first, students[0], 2)
    second.restore(kept, 3)
    train(second, students[1], 2)
    assert torch.equal(students[0].weight, students[1].weight)
    assert torch.equal(first.average["weight"], second.average["weight"])


def test_offloaded_teacher_is_on_the_device_only_while_it_samples(model):
    pipe = load_pipeline(model, choose_device("cpu"))
    moved = []
    pipe.to = lambda device: moved.append(str(device))
    teacher = Teacher(pipe, pipe.unet, PROMPTS, replace(SHORT, offload=True))
    teacher.rest()
    with teacher.awake():
        teacher.sample(1)
        assert moved == ["cpu", "cpu"]  # asleep; awake on its device, which is this CPU
    assert moved == ["cpu"] * 3
    Teacher(pipe, pipe.unet, PROMPTS, SHORT).sample(1)
    assert len(moved) == 3


def test_steps_are_replayed_while_the_teacher_is_awake(model):
    pipe = load_pipeline(model, choose_device("cpu"))
    teacher = Teacher(pipe, pipe.unet, PROMPTS, SHORT)
    with teacher.awake():
        with teacher.awake():
            step = vars(pipe.unet)["forward"]
        teacher.sample(2)
        assert vars(pipe.unet)["forward"] is step
    assert step.replayed.eager  # a CPU records nothing
    assert "forward" not in vars(pipe.unet)


def test_offloading_from_a_cpu_is_refused(model, masks):
    with pytest.raises(RecipeError, match="this is the CPU"):
        run(model, masks, replace(SHORT, offload=True))


RANK = """
import sys, torch, hashlib
sys.path[:0] = {paths}
from tests.recovery.test_recovering import *
torch.set_num_threads(1)
model = open_model({model!r})
few = replace(SHORT, steps=3, watch_every=2, watched=1)
result = run(model, None, few, packed=open_packed(Path({packed!r})))
digest = hashlib.sha256()
for name in sorted(result.weights):
    digest.update(result.weights[name].flatten().view(torch.uint8).numpy().tobytes())
print(result.writes, result.trajectories, digest.hexdigest(), result.points[-1].loss)
"""


@pytest.fixture(scope="module")
def two_ranks(pipeline_dir, packed):
    """What each of two processes over gloo says of its training."""
    root = Path(__file__).parents[2]
    code = RANK.format(paths=[str(root)], model=str(pipeline_dir), packed=str(packed.path))
    about = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
             "MASTER_PORT": str(20000 + os.getpid() % 20000)}  # fmt: skip
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code], env={**about, "RANK": str(r), "LOCAL_RANK": str(r)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for r in range(2)
    ]  # fmt: skip
    answers = [process.communicate(timeout=200) for process in running]
    assert [p.returncode for p in running] == [0, 0], answers
    return [out.splitlines()[-1].split() for out, _ in answers]


@pytest.mark.slow
def test_two_processes_end_with_the_same_weights(two_ranks, model, packed):
    (writes, made, digest, loss), other = two_ranks
    assert (writes, other[0]) == ("True", "False")
    assert other[1:] == [made, digest, loss]
    # Two trajectories fill a bank, and both processes have one of their own.
    assert made == "4"
    alone = run(model, None, replace(SHORT, steps=3), packed=packed)
    assert float(loss) != alone.points[-1].loss


@pytest.mark.parametrize(
    ("step", "line"),
    [
        (20, "; SSIM 0.9238 -> 0.9056, worse"),
        (10, "; SSIM 0.9238 -> 0.9300, better at step 10, written"),
    ],
)
def test_the_line_states_the_first_look_and_the_written_one(step, line):
    scores = {10: ValidationScore("SSIM", 0.93), 20: ValidationScore("SSIM", 0.9056)}
    points = tuple(TrainingProgress(s, 0.1, 1.0, s / 20, score) for s, score in scores.items())
    first = ScoredStep(0, ValidationScore("SSIM", 0.9238))
    result = Recovery(
        "distill", Path("out"), None, 1, points, 1, 0.0, first, ScoredStep(step, scores[step])
    )
    assert repr(result).endswith(f"loss 0.10000 -> 0.10000{line}")
    assert [look["step"] for look in result.to_json()["looks"]] == [0, 10, 20]
    assert result.to_json()["written_step"] == step


@pytest.mark.parametrize(
    ("start", "end", "sign"),
    [
        (0.5, 0.6, "better"),
        (0.6, 0.5, "worse"),
        (0.5, 0.49999, "unchanged"),
        (0.5, np.nan, "worse"),
    ],
)
def test_a_change_has_its_sign(start, end, sign):
    change = ScoreChange.between(*(ValidationScore("SSIM", value) for value in (start, end)))
    assert (change.sign, change.is_worse) == (sign, sign == "worse")
    assert str(change) == f"SSIM {start:.4f} -> {end:.4f}, {sign}"


@pytest.mark.parametrize(
    ("after", "told"),
    [
        ((0.90, 0.92, 0.94, 0.96), "SSIM 0.9400 -> 0.9300, worse"),
        # One picture of four that fell much: a paired t-test has p = 0.2.
        ((0.87, 0.93, 0.95, 0.97), "SSIM 0.9400 -> 0.9300, undecided by 4 pictures"),
        ((0.91, 0.93, 0.95, 0.96), "SSIM 0.9400 -> 0.9375, undecided by 4 pictures"),
        ((0.92, 0.94, 0.96, 0.98), "SSIM 0.9400 -> 0.9500, better"),
    ],
)
def test_a_fall_by_chance_is_no_harm(after, told):
    before = (0.91, 0.93, 0.95, 0.97)
    change = ScoreChange.between(
        *(ValidationScore("SSIM", float(np.mean(v)), v) for v in (before, after))
    )
    assert str(change) == told
    assert change.is_worse == told.endswith("worse")


def command(*arguments):
    return CliRunner().invoke(recover_command, [str(a) for a in arguments])


FEW = ("--steps", 2, "--batch", 2, "--set", "calibration.steps=2", "--device", "cpu", "-q",
       "--json")  # fmt: skip


def test_command_trains_a_packed_model(pipeline_dir, packed, tmp_path):
    result = command(pipeline_dir, "--packed", packed.path, "-o", tmp_path / "out", *FEW)
    report = json.loads(result.stdout)
    # Two steps may do harm: then it says so.
    assert (result.exit_code, report["change"] == "worse") in {(0, False), (1, True)}
    assert ("the pictures are worse than before" in result.stderr) == bool(result.exit_code)
    assert report["steps"] == 2
    assert report["masks"] is None
    looks = [(look["step"], look["metric"]) for look in report["looks"]]
    assert looks == [(0, "SSIM"), (2, "SSIM")]
    assert report["written_step"] == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "out.recovery.html"]
    page = (tmp_path / "out.recovery.html").read_text(encoding="utf-8")
    assert set(re.findall('data-side="(step [^"]*)"', page)) == {"step 0", "step 2"}
    first, last = (f"{report['looks'][i]['value']:.4f}" for i in (0, -1))
    change = re.escape(f"SSIM {first} -&gt; {last}, {report['change']}")
    assert re.search(rf"{change}( by 8 pictures)?, from step 0 to 2\.", page)
    assert not quantkit.verify(tmp_path / "out").breaches


def test_a_damaged_packed_model_is_refused_before_it_is_trained(pipeline_dir, packed, tmp_path):
    shutil.copytree(packed.path, tmp_path / "damaged")
    file = next((tmp_path / "damaged" / "unet").glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    out = tmp_path / "out"
    result = command(pipeline_dir, "--packed", tmp_path / "damaged", "-o", out, *FEW)
    assert isinstance(result.exception, CheckpointError)
    assert file.name in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["damaged"]


def test_command_trains_with_masks_and_resumes(pipeline_dir, tmp_path, monkeypatch):
    file, out = tmp_path / "masks", tmp_path / "out"
    how = ["-r", "fp8-sparse", "--set", "sparsity.method=magnitude", "-o", str(file), "-q"]
    chosen = CliRunner().invoke(sparsify_command, [str(pipeline_dir), *how])
    assert chosen.exit_code == 0, chosen.output
    given = (pipeline_dir, "-o", out, "--masks", file, *FEW)
    monkeypatch.setattr("quantkit.workflow.recovery_job._SAVED_EVERY", 1e-9)
    with monkeypatch.context() as broken:
        broken.setattr("quantkit.workflow.recovery_job.write_recovered", None)
        assert isinstance(command(*given).exception, TypeError)
    page = (tmp_path / "out.recovery.html").read_text(encoding="utf-8")
    assert "Not finished (ended by an error: " in page
    again = command(*given)
    assert isinstance(again.exception, OutputError)
    result = command(*given, "--resume")
    assert result.exit_code in {0, 1}, result.output
    assert json.loads(result.stdout)["masks"] == str(tmp_path / "out.masks.safetensors")
    beside = [f"out.{end}" for end in ("masks.safetensors", "recovery.html")]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["masks", "out", *beside]


def test_dry_run_says_what_would_be_trained(pipeline_dir, packed, masks, tmp_path):
    save_masks(masks, tmp_path / "masks", force=False)
    given = {"--packed": packed.path, "--masks": tmp_path / "masks"}
    found = [
        json.loads(command(pipeline_dir, "-o", tmp_path / "out", *item, "-n", "--json").stdout)
        for item in given.items()
    ]
    layers = len(packed.components[0].config.layers)
    assert found[0] == {"written": None, "masked": 0, "packed": layers}
    assert found[1] == {"written": None, "masked": 71, "packed": 0}
    assert [p.name for p in tmp_path.iterdir()] == ["masks"]


@pytest.mark.parametrize(
    "case",
    [
        ((), "masks: no layer is masked, and nothing is packed"),
        (("--packed", "PACKED", "--masks", "MASKS"), "masks: given with a packed model"),
        (("--packed", "MODEL"), "nothing in it is packed"),
        (("--packed", "OTHER"), "packs transformer (SD3Transformer2DModel), expected unet"),
        (("--packed", "WIDER"), "is no layer of the 16-bit model"),
    ],
    ids=["nothing", "both", "16 bit", "another class", "other layers"],
)
def test_what_cannot_be_trained_is_refused(folders, tmp_path, case):
    options, text = case
    given = [folders.get(word, word) for word in options]
    result = command(folders["MODEL"], "-o", tmp_path / "out", *given, *FEW)
    assert isinstance(result.exception, InputError), result.output
    assert text in str(result.exception)


@pytest.fixture(scope="module")
def folders(pipeline_dir, transformer_pipeline_dir, packed, masks, tmp_path_factory):
    """What may be given for masks and for a packed model."""
    root = tmp_path_factory.mktemp("folders")
    save_masks(masks, root / "masks", force=False)
    pack(open_model(str(transformer_pipeline_dir)), FP8, root / "other", calibration=None,
         masks=None, threads=1, force=False, progress=silent)  # fmt: skip
    wider = tiny_sd15_pipeline(root / "wider")
    pack(open_model(str(wider)), FP8, root / "wider-fp8", calibration=None, masks=None, threads=1,
         force=False, progress=silent)  # fmt: skip
    return {"PACKED": packed.path, "MASKS": root / "masks", "MODEL": pipeline_dir,
            "OTHER": root / "other", "WIDER": root / "wider-fp8"}  # fmt: skip


def test_packed_models_have_no_method_that_does_not_train(pipeline_dir, packed, tmp_path):
    with pytest.raises(ArtefactError, match="packed: method obs"):
        quantkit.recover(pipeline_dir, packed=packed.path, method="obs", hessians=tmp_path,
                         output=tmp_path / "out")  # fmt: skip


@pytest.mark.parametrize("more", [(), ("--json",)], ids=["words", "json"])
@pytest.mark.parametrize("end", [0.5, 0.7])
def test_the_command_ends_with_1_where_pictures_became_worse(monkeypatch, tmp_path, end, more):
    first, last = (ScoredStep(s, ValidationScore("SSIM", v)) for s, v in ((0, 0.6), (4, end)))
    points = (TrainingProgress(4, 0.1, 1.0, 1.0, last.score),)
    found = Recovery("distill", tmp_path, None, 1, points, 1, 0.0, first, last)
    monkeypatch.setattr("quantkit.workflow.recover.recover", lambda *_, **__: found)
    result = command(tmp_path, "-o", tmp_path / "out", *more)
    worse = "the pictures are worse than before; train longer (--minutes, --steps)"
    assert (result.exit_code, worse in result.output) == ((1, True) if end < 0.6 else (0, False))
    assert more == () or json.loads(result.stdout)["change"] == ("worse" if end < 0.6 else "better")
