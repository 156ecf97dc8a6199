"""The whole job on the bundled pipeline: one original, two packed pipelines, two reports."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from quantkit.calibration.collect import calibrate
from quantkit.calibration.running import quiet_libraries, read_prompts
from quantkit.calibration.statistics import save_calibration
from quantkit.checkpoint.reader import verify
from quantkit.device.backends import choose
from quantkit.errors import OutputError, PromptError
from quantkit.files import staged_file
from quantkit.models.source import Model, open_model
from quantkit.pipeline import pack
from quantkit.progress import Progress
from quantkit.recipefile import load_recipe
from quantkit.resources import demo_assets
from quantkit.sparsity.choose import choose_masks
from quantkit.sparsity.maskfile import save_masks

from .backbones import load_backbones
from .build import CALIBRATION, MASKS
from .evaluation import Baseline, evaluate, measure_baseline, open_pair
from .gates import Limits
from .generation import make_settings
from .methods import Method
from .report import write_report
from .result import Report

#: Written first: a folder that holds it is the demo's own and may be replaced.
MARK = ".quantkit-demo"
#: What the bundled pipeline's own samples were drawn with (eval/assets/training.json).
GUIDANCE = 4.0
#: Enough for scales and second moments of 64x64 pictures, and few enough for seconds.
CALIBRATION_RUN = {"prompts": 4, "steps": 12, "batch": 4, "guidance": GUIDANCE}
SEED = 100
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Configuration:
    """One way to pack the bundled pipeline."""

    recipe: str
    title: str
    #: said when a gate fails
    remark: str


CONFIGURATIONS = (
    Configuration("fp8-static", "FP8", "FP8 alone should hold its gates: please report this."),
    Configuration(
        "fp8-sparse",
        "4:2 and FP8",
        "One-shot 4:2 drops half of the weights of every layer and trains nothing afterwards, so "
        "the pictures change; 'quantkit sparsify --recover distill' brings them back.",
    ),
)


@dataclass(frozen=True)
class Stage:
    """Where the demo works and whom it tells."""

    output: Path
    #: told the result of every step in one line
    say: Callable[[str], None]
    progress: Progress

    def under(self, configuration: Configuration) -> Progress:
        """Return a progress that names the configuration with every step."""

        def report(step: str, done: int, total: int) -> None:
            self.progress(f"{configuration.title}: {step}", done, total)

        return report

    @contextmanager
    def step(self, words: str) -> Iterator[None]:
        """Say what was done and how long it took, when it is done."""
        started = perf_counter()
        yield
        self.say(f"{words} ({perf_counter() - started:.1f} s)")

    def packed(self, configuration: Configuration) -> Path:
        """Return where the packed pipeline lies."""
        return self.output / f"packed-{configuration.recipe}"

    def report(self, configuration: Configuration) -> Path:
        """Return where the report lies."""
        return self.output / f"report-{configuration.recipe}"


@dataclass(frozen=True)
class Outcome:
    """One configuration's report."""

    configuration: Configuration
    report: Report
    #: folder of the report, inside the demo's
    folder: str


@quiet_libraries()
def run_demo(stage: Stage, *, prompts: int, steps: int, noise_floor: bool) -> tuple[Outcome, ...]:
    """Calibrate, sparsify, pack twice, verify, run on quantkit's kernels and report twice.

    Args:
        stage: its output is replaced if an earlier demo made it.
        prompts: number of pictures to compare.
        steps: denoising steps of each.
        noise_floor: whether to run the original twice more, against itself.

    Returns:
        One outcome per configuration, in their order.

    Raises:
        OutputError: the output exists and is not a demo's.
        PromptError: more prompts than the demo has.
    """
    assets = demo_assets()
    texts = read_prompts(assets / "prompts.txt")
    if prompts > len(texts):
        raise PromptError(f"--prompts {prompts}: the demo has {len(texts)}")
    # Calibration reads the prompts from their start, so the pictures are taken from their end.
    settings = make_settings(
        texts[-prompts:], steps=steps, guidance=GUIDANCE, seed=SEED, batch=prompts
    )
    _claim(stage.output)
    model = open_model(str(assets / "pipeline"))
    stage.say(f"kernels: {describe_kernels()}")
    _pack_all(stage, model, texts)
    with stage.step("load the networks of LPIPS and CLIP score"):
        backbones = load_backbones(assets / "alexnet", str(assets / "clip"), device=CPU)
    runs = f"{3 if noise_floor else 1} x {prompts} pictures of {steps} steps"
    with stage.step(f"original pipeline{' and its noise floor' * noise_floor}: {runs}"):
        baseline = measure_baseline(
            model,
            settings,
            backbones=backbones,
            device=CPU,
            noise_floor=noise_floor,
            progress=stage.progress,
        )
    return tuple(_evaluate(stage, configuration, baseline) for configuration in CONFIGURATIONS)


def describe_kernels() -> str:
    """Return what will compute packed layers on this machine, and why if it is no kernel."""
    choice = choose("gemm_fp8", CPU, k=64)
    return f"{choice.backend.value}{f', because {choice.reason}' if choice.reason else ''}"


def remarks(outcomes: tuple[Outcome, ...]) -> tuple[str, ...]:
    """Return one sentence per configuration whose gates fail."""
    return tuple(
        f"{outcome.configuration.title}: {outcome.configuration.remark}"
        for outcome in outcomes
        if not outcome.report.passed
    )


def methods(outcomes: tuple[Outcome, ...]) -> tuple[Method, ...]:
    """Return the configurations as rows of the table of methods."""
    return tuple(
        Method(o.configuration.title, o.report, o.folder, o.configuration.remark) for o in outcomes
    )


def _claim(output: Path) -> None:
    """Empty ``output`` if it is an earlier demo's, and mark it."""
    if output.exists():
        if not (output / MARK).is_file():
            raise OutputError(f"{output}: exists and was not made by the demo; pass another -o")
        shutil.rmtree(output)
    with staged_file(output / MARK, force=True) as mark:
        mark.write_text("quantkit demo replaces this folder\n", encoding="utf-8")


def _pack_all(stage: Stage, model: Model, texts: tuple[str, ...]) -> None:
    run = CALIBRATION_RUN
    recipes = [load_recipe(configuration.recipe) for configuration in CONFIGURATIONS]
    with stage.step(f"calibrate: {run['prompts']} prompts of {run['steps']} steps"):
        calibration = calibrate(
            model, recipes[0].with_calibration(run), texts, device="cpu", progress=stage.progress
        )
        save_calibration(calibration, stage.output / CALIBRATION, force=False)
    with stage.step("sparsify: 2 of every 4 weights by Wanda"):
        masks = choose_masks(model, recipes[-1], calibration, progress=stage.progress)
        save_masks(masks, stage.output / MASKS, force=False)
    for configuration, recipe in zip(CONFIGURATIONS, recipes, strict=True):
        with stage.step(f"pack and verify: {configuration.title}"):
            pack(
                model,
                recipe,
                stage.packed(configuration),
                calibration=calibration,
                masks=masks if recipe.sparsity else None,
                threads=os.cpu_count() or 1,
                force=False,
                progress=stage.under(configuration),
            )
            verify(stage.packed(configuration), progress=stage.under(configuration))


def _evaluate(stage: Stage, configuration: Configuration, baseline: Baseline) -> Outcome:
    model = str(demo_assets() / "pipeline")
    packed, folder = stage.packed(configuration), stage.report(configuration)
    with stage.step(f"load, run on kernels, compare: {configuration.title}"):
        report, pairs = evaluate(
            open_pair(model, packed),
            baseline,
            limits=Limits(),
            title=f"quantkit demo: {configuration.title} against the FP16 original",
            commands=_commands(stage, configuration, baseline),
            progress=stage.under(configuration),
        )
        write_report(report, pairs, folder, force=False)
    return Outcome(configuration, report, folder.name)


def _commands(stage: Stage, configuration: Configuration, baseline: Baseline) -> tuple[str, ...]:
    """Return the single commands that make one report."""
    settings = baseline.original.settings
    plain = "" if baseline.floors else " --no-noise-floor"
    assets, out = demo_assets(), stage.output
    model, packed = assets / "pipeline", stage.packed(configuration)
    recipe = configuration.recipe
    sparse = load_recipe(recipe).sparsity is not None
    calibrate_it = (
        f"quantkit calibrate model {model} -r {CONFIGURATIONS[0].recipe} "
        f"--prompts {assets / 'prompts.txt'} --count {CALIBRATION_RUN['prompts']} "
        f"--steps {CALIBRATION_RUN['steps']} --batch {CALIBRATION_RUN['batch']} "
        f"--guidance {CALIBRATION_RUN['guidance']} -o {out / CALIBRATION}"
    )
    sparsify_it = f"quantkit sparsify {model} -r {recipe} -c {out / CALIBRATION} -o {out / MASKS}"
    masks = f" --masks {out / MASKS}" if sparse else ""
    return (
        calibrate_it,
        *([sparsify_it] if sparse else []),
        f"quantkit pack {model} -r {recipe} -c {out / CALIBRATION}{masks} -o {packed}",
        f"quantkit verify {packed}",
        f"quantkit demo -o {out} --prompts {len(settings.prompts)} --steps {settings.steps}{plain}",
    )
