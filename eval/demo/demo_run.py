"""The whole job on the bundled pipeline: one original, several ways to pack it, a report each."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from quantkit.eval.demo.commands import DemoPlan, DemoRow
from quantkit.eval.judging.evaluation import (
    Baseline,
    evaluate,
    measure_baseline,
    open_pair,
    rehearse_original,
)
from quantkit.eval.judging.evaluation_result import Report
from quantkit.eval.judging.gates import Limits, State
from quantkit.eval.measuring.backbones import load_backbones
from quantkit.eval.measuring.generation import GenerationSettings, make_settings
from quantkit.eval.pages.methods_table import Method, write_methods
from quantkit.eval.pages.report import write_report
from quantkit.eval.world.scenes import captions, draw_scenes

from quantkit.checkpoint.verification import verify
from quantkit.device.choosing import choose
from quantkit.errors import PromptError
from quantkit.models.source import open_model
from quantkit.pipelines.running import quiet_libraries, read_prompts
from quantkit.progress import Progress
from quantkit.resources import demo_assets
from quantkit.storage.files import claimed_directory, mark_directory
from quantkit.storage.places import check_directory

#: What the marker calls the output: a folder of this kind is the demo's own and may be replaced.
KIND = "demo"
#: What the bundled pipeline's own samples were drawn with (eval/assets/training.json).
GUIDANCE = 4.0
SEED = 100
#: None of these captions is among the prompts that are compared: a test holds that.
CAPTION_SEED = 20


@dataclass(frozen=True)
class DemoContext:
    """The demo's folder, device, and listeners."""

    output: Path
    #: runs one command of quantkit and returns what it prints as JSON
    command: Callable[[list[str]], dict[str, Any]]
    #: told the result of every step in one line
    say: Callable[[str], None]
    progress: Progress
    device: torch.device

    def under(self, row: DemoRow) -> Progress:
        """Return a progress that names the row with every step."""

        def report(step: str, done: int, total: int) -> None:
            self.progress(f"{row.title}: {step}", done, total)

        return report

    @contextmanager
    def step(self, words: str) -> Iterator[None]:
        """Say what was done and how long it took, when it is done."""
        started = perf_counter()
        self.progress(words, 0, 1)
        yield
        self.progress(words, 1, 1)
        self.say(f"{words} ({perf_counter() - started:.1f} s)")


@dataclass(frozen=True)
class DemoResult:
    """One row's report."""

    row: DemoRow
    report: Report
    #: folder of the report, inside the demo's
    folder: str
    #: mean over the masked layers of the share of their output's power that is lost
    local_error: float | None


@quiet_libraries()
def run_demo(
    context: DemoContext, plan: DemoPlan, *, prompts: int, steps: int, noise_floor: bool
) -> tuple[DemoResult, ...]:
    """Run the plan's commands, verify what they packed, and report on every row.

    Args:
        context: its output is replaced if an earlier demo made it.
        plan: what to do.
        prompts: number of pictures to compare.
        steps: denoising steps of each.
        noise_floor: whether to run the original twice more, against itself.

    Returns:
        One outcome per row, in their order.

    Raises:
        OutputError: the output exists and is not a demo's.
        PromptError: more prompts than the demo has.
    """
    assets = demo_assets()
    texts = read_prompts(assets / "prompts.txt")
    if prompts > len(texts):
        raise PromptError(
            f"prompts {prompts}: the demo has only {len(texts)}; ask for fewer", fields=("prompts",)
        )
    settings = make_settings(
        texts[:prompts], steps=steps, guidance=GUIDANCE, seed=SEED, batch=prompts
    )
    check_directory(context.output, kind=KIND, force=True)
    with claimed_directory(context.output, kind=KIND):
        return _run(context, plan, settings, noise_floor=noise_floor)


def _run(
    context: DemoContext, plan: DemoPlan, settings: GenerationSettings, *, noise_floor: bool
) -> tuple[DemoResult, ...]:
    """Run the commands and report on every row, in a folder that is claimed."""
    assets, prompts, steps = demo_assets(), len(settings.prompts), settings.steps
    context.say(f"kernels: {describe_kernels(context.device)}")
    context.say(f"attention on codes: {describe_attention(context.device)}")
    # Before the long work: a pipeline or network that does not run here is not found out last.
    model = open_model(str(assets / "pipeline"))
    with context.step("load the networks of LPIPS and CLIP score"):
        backbones = load_backbones(assets / "alexnet", str(assets / "clip"), device=context.device)
        rehearse_original(model, settings, context.device)
    errors = _make(context, plan, assets / "pipeline")
    runs = f"{3 if noise_floor else 1} x {prompts} pictures of {steps} steps"
    with context.step(f"original pipeline{' and its noise floor' * noise_floor}: {runs}"):
        baseline = measure_baseline(
            model,
            settings,
            backbones=backbones,
            device=context.device,
            noise_floor=noise_floor,
            progress=context.progress,
        )
    return tuple(_evaluate(context, plan, row, baseline, errors) for row in plan.rows)


def describe_kernels(device: torch.device) -> str:
    """Return what will compute packed layers on this machine, and why if it is no kernel."""
    choice = choose("gemm_fp8", device, k=64)
    return f"{choice.backend.value}{f', because {choice.reason}' if choice.reason else ''}"


def describe_attention(device: torch.device) -> str:
    """Return what will compute attention where a recipe asks for codes, and why if no kernel."""
    choices = {op: choose(op, device, k=64) for op in ("attention_fp8", "attention_int8")}
    reasons = {choice.reason for choice in choices.values() if choice.reason}
    kernels = {choice.backend.value for choice in choices.values() if not choice.reason}
    return ", ".join((*sorted(kernels), *(f"torch, because {why}" for why in sorted(reasons))))


def remarks(outcomes: tuple[DemoResult, ...]) -> tuple[str, ...]:
    """Return one sentence per row whose gates fail, each said once."""
    found: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome.row.remark and outcome.report.state is State.FAILED:
            found.setdefault(outcome.row.remark, []).append(outcome.row.title)
    return tuple(f"{', '.join(titles)}: {remark}" for remark, titles in found.items())


def methods(outcomes: tuple[DemoResult, ...]) -> tuple[Method, ...]:
    """Return the outcomes as rows of the table of methods."""
    return tuple(
        Method(o.row.title, o.report, o.folder, o.row.remark, o.local_error) for o in outcomes
    )


def write_index(folder: Path, outcomes: tuple[DemoResult, ...], seconds: float) -> None:
    """Write the page that compares the rows, links their reports and lists the commands.

    Args:
        folder: holds the reports' folders.
        outcomes: made on the same prompts.
        seconds: how long the demo took.
    """
    commands = dict.fromkeys(line for o in outcomes for line in o.report.commands)
    run = outcomes[0].report.run
    facts = (
        f"The bundled pipeline in {len(outcomes)} forms against its FP16 original: "
        f"{len(run.prompts)} prompts, {run.steps} steps, same seeds, guidance {run.guidance}. Made "
        f"in {seconds:.1f} s. LPIPS and CLIP numbers are those of the demo's own networks and "
        "compare with no published number."
    )
    write_methods(methods(outcomes), folder, tuple(commands), title="quantkit demo", facts=facts)
    mark_directory(folder, kind=KIND)


def _make(context: DemoContext, plan: DemoPlan, pipeline: Path) -> dict[str, float]:
    """Run every command of the plan once; return the local errors by command."""
    scenes = draw_scenes(plan.captions, torch.Generator().manual_seed(CAPTION_SEED))
    (context.output / "captions.txt").write_text("\n".join(captions(scenes)), encoding="utf-8")
    errors: dict[str, float] = {}
    for command in dict.fromkeys(c for row in plan.rows for c in _commands(context, plan, row)):
        arguments = shlex.split(command)
        with context.step(_named(arguments)):
            found = context.command([*arguments, "--quiet", "--json"])
        if arguments[0] in {"sparsify", "recover"} and "--hessians" in arguments:
            errors[command] = _mean_error(found)
    for row in plan.rows:
        folder = context.output / row.compared
        if open_pair(str(pipeline), folder).plain is None:
            verify(folder, progress=context.under(row))
    return errors


def _commands(context: DemoContext, plan: DemoPlan, row: DemoRow) -> tuple[str, ...]:
    return plan.commands(row, demo_assets() / "pipeline", context.output, str(context.device))


def _named(arguments: Sequence[str]) -> str:
    """Return a command in a few words: its name and what it writes."""
    words = arguments[: 2 if arguments[0] == "calibrate" else 1]
    return f"{' '.join(words)}: {Path(arguments[-1]).name}"


def _mean_error(found: dict[str, Any]) -> float:
    """Return the mean error of the masked layers, from what ``sparsify`` and ``recover`` print."""
    errors = [layer["error"] for layer in found["layers"] if layer["chosen"]]
    return sum(errors) / len(errors) if errors else 0.0


def _evaluate(
    context: DemoContext, plan: DemoPlan, row: DemoRow, baseline: Baseline, errors: dict[str, float]
) -> DemoResult:
    model, folder = str(demo_assets() / "pipeline"), context.output / f"report-{row.compared}"
    with context.step(f"load, run, compare: {row.title}"):
        report, pairs = evaluate(
            open_pair(model, context.output / row.compared),
            baseline,
            limits=Limits(),
            title=f"quantkit demo: {row.title} against the FP16 original",
            commands=_reproduced(context, plan, row, baseline),
            progress=context.under(row),
        )
        write_report(report, pairs, folder, force=False, indexed=True)
    local = [errors[c] for c in _commands(context, plan, row) if c in errors]
    return DemoResult(row, report, folder.name, local[-1] if local else None)


def _reproduced(
    context: DemoContext, plan: DemoPlan, row: DemoRow, baseline: Baseline
) -> tuple[str, ...]:
    """Return the single commands that make one report."""
    settings, assets = baseline.original.settings, demo_assets()
    compared = (
        f"eval report {assets / 'pipeline'} {context.output / row.compared} "
        f"--prompts {assets / 'prompts.txt'} --count {len(settings.prompts)} "
        f"--steps {settings.steps} --guidance {GUIDANCE:g} --seed {SEED} "
        f"--batch {settings.batch} --lpips-weights {assets / 'alexnet'} --clip {assets / 'clip'} "
        f"--device {context.device} -o {context.output / f'report-{row.compared}'}"
        f"{'' if baseline.floors else ' --no-noise-floor'}"
    )
    return tuple(f"quantkit {command}" for command in (*_commands(context, plan, row), compared))
