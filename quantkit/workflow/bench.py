"""Measuring speed: kernels against libraries, and whole denoisers packed and not."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quantkit.bench.estimate.cards import find_card
from quantkit.bench.estimate.estimate_figures import EstimateResult
from quantkit.bench.estimate.estimate_step import estimate_step
from quantkit.bench.kernels import compare as comparing
from quantkit.bench.kernels.compare import RunComparison
from quantkit.bench.kernels.figures import save_figures
from quantkit.bench.kernels.kernel_benchmark import run_bench
from quantkit.bench.kernels.kernel_figures import BenchResult, EarlierRun, load_baseline
from quantkit.bench.kernels.kernel_shapes import find_shapes
from quantkit.bench.kernels.machine import describe_machine
from quantkit.bench.kernels.operations import OPERATIONS, cases
from quantkit.bench.kernels.timing import TimingPlan
from quantkit.bench.models.denoisers import find_denoiser
from quantkit.bench.models.model_benchmark import run_model_bench
from quantkit.bench.models.model_contenders import ESTIMATED, MODEL_CONTENDERS, ModelContender
from quantkit.bench.models.model_result import ModelBenchSettings, ModelResult
from quantkit.errors import ArtefactError
from quantkit.pipelines.running import choose_device
from quantkit.progress import Progress, silent
from quantkit.storage.files import write_or_keep
from quantkit.storage.places import check_file
from quantkit.workflow.arguments import as_path
from quantkit.workflow.kernels import refuse_unknown
from quantkit.workflow.pack import usual_threads

__all__ = ["KernelBench", "ModelBenchSettings", "bench_kernels", "bench_model", "estimate_model"]


@dataclass(frozen=True, eq=False)
class KernelBench:
    """The figures, and the comparison with a baseline."""

    result: BenchResult
    #: None: there was no baseline
    comparison: RunComparison | None

    @property
    def passed(self) -> bool:
        """True when every output was right, all was measured, and nothing became slower."""
        slower = self.comparison is not None and bool(self.comparison.regressions)
        return self.result.complete and not self.result.wrong and not slower

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        comparison = self.comparison and comparing.to_json(self.comparison)
        return {**self.result.to_json(), "comparison": comparison}


def bench_kernels(
    *,
    ops: Sequence[str] = (),
    shapes: str = "auto",
    against_torch: bool = False,
    device: str = "auto",
    repeats: int = 100,
    seconds: float = 1.0,
    baseline: str | Path | None = None,
    threshold: float = 1.10,
    save_baseline: str | Path | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> KernelBench:
    """Check and time the kernels, and say how near they come to what the device can do.

    Args:
        ops: only these operations; empty: all.
        shapes: a group (sdxl, flux, sd15, sd3, other, all, host), a .json or .csv file, or auto:
            all on a GPU, host on a CPU. Each operation takes those of its kind.
        against_torch: run what torch, cuSPARSELt, torchao, SageAttention and cuDNN have, too.
        device: auto, cpu or cuda[:N].
        repeats: rounds at most.
        seconds: for the rounds of one operation on one shape, at most.
        baseline: a file of the same device to compare with.
        threshold: times the baseline's median above which a kernel counts as slower.
        save_baseline: where to write the figures.
        force: replace that file.
        progress: told of shapes done.

    Returns:
        times, throughput and errors of every contender.

    Raises:
        InputError: an unknown operation or device, shapes or a baseline that cannot be used, or a
            file that exists.
    """
    saved = as_path(save_baseline)
    if saved is not None:
        check_file(saved, force=force)
    refuse_unknown("op", ops, list(OPERATIONS))
    chosen = tuple(o for o in OPERATIONS.values() if not ops or o.name in ops)
    place = choose_device(device)
    if shapes == "auto":
        shapes = "host" if place.type == "cpu" else "all"
    table = find_shapes(shapes)
    if not cases(chosen, table):
        axes = ", ".join(dict.fromkeys(operation.problem.kind.axes for operation in chosen))
        raise ArtefactError(f"shapes {shapes!r}: none of {', '.join(ops)}, expected {axes}")
    before = _baseline(as_path(baseline), place)
    plan = TimingPlan(warmup=3, repeats=repeats, seconds=seconds)
    result = run_bench(table, chosen, place, plan, against_torch=against_torch, progress=progress)
    if saved is not None:
        write_or_keep(partial(save_figures, result, force=force), saved)
    return KernelBench(result, comparing.compare(result, before, threshold) if before else None)


def _baseline(path: Path | None, device: torch.device) -> EarlierRun | None:
    """Return the baseline, refused before anything is measured when it is of another device."""
    if path is None:
        return None
    found, machine = load_baseline(path), describe_machine(device)
    comparing.check_device(found, machine.device, machine.architecture)
    return found


def bench_model(
    config: str = "sdxl",
    *,
    settings: ModelBenchSettings,
    contenders: Sequence[str] = (),
    device: str = "auto",
    repeats: int = 30,
    seconds: float = 20.0,
    save: str | Path | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> ModelResult:
    """Time one step of a denoiser in 16 bit, by torchao, and packed, in one run.

    Args:
        config: what to build with random weights: as sdxl or flux, a directory with a
            config.json, a hub id in the cache, or a denoiser class of diffusers.
        settings: batch, size, compilation, attention, profile, scratch folder.
        contenders: names, in the order to run; empty: all.
        device: auto, cpu or cuda[:N].
        repeats: rounds at most.
        seconds: for all rounds, at most.
        save: where to write the figures.
        force: replace that file.
        progress: told of contenders and rounds.

    Returns:
        times and memory of every contender, each checked first.

    Raises:
        InputError: a config, contender or device that cannot be used, a class whose inputs are not
            known, or a file that exists.
    """
    saved = as_path(save)
    if saved is not None:
        check_file(saved, force=force)
    refuse_unknown("contenders", contenders, list(MODEL_CONTENDERS))
    # As they were given: after an interrupt, the first ones are ready.
    chosen = [MODEL_CONTENDERS[name] for name in dict.fromkeys(contenders or MODEL_CONTENDERS)]
    result = run_model_bench(
        find_denoiser(config),
        tuple(c for one in chosen for c in _with_attention(one, settings.attention)),
        settings,
        choose_device(device),
        TimingPlan(warmup=2, repeats=repeats, seconds=seconds),
        threads=usual_threads(),
        progress=progress,
    )
    if saved is not None:
        write_or_keep(partial(save_figures, result, force=force), saved)
    return result


def estimate_model(
    config: str = "sdxl",
    *,
    card: str,
    settings: ModelBenchSettings,
    contenders: Sequence[str] = (),
    save: str | Path | None = None,
    force: bool = False,
    progress: Progress = silent,
) -> EstimateResult:
    """Estimate one step of a denoiser on a card, without the card.

    Args:
        config: what to build without weights, as in bench_model.
        card: gfx1201, gfx1101, sm_90 and so on, or a card's name, as RX 9070.
        settings: batch, size, layout, projections, attention.
        contenders: names; empty: float16, FP8, 2:4 and int8 replayed, compiled, module by module.
        save: where to write the figures.
        force: replace that file.
        progress: told of contenders.

    Returns:
        milliseconds by group of kernels, with their range, and what bounds each.

    Raises:
        InputError: a config, card or contender that cannot be used, or a file that exists.
    """
    saved, place = as_path(save), find_card(card)
    if saved is not None:
        check_file(saved, force=force)
    refuse_unknown("contenders", contenders, list(MODEL_CONTENDERS))
    chosen = [MODEL_CONTENDERS[name] for name in dict.fromkeys(contenders or ESTIMATED)]
    every = [c for one in chosen for c in _with_attention(one, settings.attention)]
    result = estimate_step(find_denoiser(config), every, settings, place, progress)
    if saved is not None:
        write_or_keep(partial(save_figures, result, force=force), saved)
    return result


def _with_attention(contender: ModelContender, formats: Sequence[str]) -> list[ModelContender]:
    """Return a contender, and variants with attention on codes of each format."""
    # What torchao makes goes without: it would be a third tool's and quantkit's work in one.
    return [contender, *(contender.with_attention(f) for f in formats if not contender.torchao)]
