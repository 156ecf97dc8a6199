"""Searching for the smallest choice of treatments whose generated pictures pass a gate."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from quantkit.errors import QuantkitError
from quantkit.eval.measuring.backbones import Backbones
from quantkit.eval.measuring.generation import GenerationSettings, generate, rehearse_pictures
from quantkit.eval.measuring.metrics import measure_ssim
from quantkit.pipelines.running import load_pipeline, quiet_libraries
from quantkit.progress import Progress, silent
from quantkit.recipe.goals import BudgetRecipe
from quantkit.sensitivity.analyse import treated_pipeline
from quantkit.sensitivity.budget import Assignment, AssignmentProblem, goal_of, optimize, options_of
from quantkit.sensitivity.knapsack import walk
from quantkit.sensitivity.measured_model import MeasuredModel


@dataclass(frozen=True)
class Trial:
    """The pictures of one choice."""

    assignment: Assignment
    #: mean over the prompts
    ssim: float


@dataclass(frozen=True)
class SearchResult:
    """The smallest choice that passed, and all trials in their order."""

    best: Trial
    trials: tuple[Trial, ...]


def search_ssim(
    subject: MeasuredModel,
    problems: Sequence[AssignmentProblem],
    settings: GenerationSettings,
    *,
    least: float,
    device: torch.device,
    progress: Progress = silent,
) -> SearchResult:
    """Bisect on the predicted error for the smallest choice whose pictures keep the SSIM.

    Layers compute under their treatments in plain PyTorch, with the codes and scales that packing
    writes.

    Args:
        subject: the model and its calibration.
        problems: from its sensitivity.
        settings: of the pictures, few: they are made again for every trial.
        least: the mean SSIM to keep.
        device: where the pipeline runs.
        progress: told of every denoising step.

    Raises:
        QuantkitError: not even 16 bit keeps it, which repeated runs of one pipeline should.
    """
    errors = predicted_errors(problems)
    trials: list[Trial] = []
    with quiet_libraries():
        pipe = load_pipeline(subject.model, device)
        settings = rehearse_pictures(pipe, settings)
        expected = generate(pipe, settings, label="original", progress=progress).pictures
        passed, failed = -1, len(errors)
        best: Trial | None = None
        while failed - passed > 1:
            middle = (passed + failed) // 2
            assignment = optimize(problems, BudgetRecipe(error=errors[middle]))
            names = {
                layer.name: candidate.treatment
                for layer, candidate in zip(
                    assignment.problem.layers, assignment.chosen, strict=True
                )
            }
            with treated_pipeline(subject, pipe, names):
                label = f"trial {len(trials) + 1}"
                found = generate(pipe, settings, label=label, progress=progress).pictures
            pairs = zip(expected, found, strict=True)
            trial = Trial(assignment, fmean(measure_ssim(a, b, Backbones()) for a, b in pairs))
            trials.append(trial)
            if trial.ssim >= least:
                passed, best = middle, trial
            else:
                failed = middle
    if best is None:
        raise QuantkitError(
            f"ssim {least:g}: the gentlest treatments reach {trials[-1].ssim:.4f}; ask for less"
        )
    return SearchResult(best, tuple(trials))


def predicted_errors(problems: Sequence[AssignmentProblem]) -> tuple[float, ...]:
    """Return the predicted errors at which a choice changes, ascending, those above 0."""
    found: set[float] = set()
    for problem in problems:
        items = options_of(problem, goal_of(problem, BudgetRecipe(bytes=1.0)))
        found |= {Assignment(problem, picked).error for picked in walk(items)}
    return tuple(sorted(error for error in found if error > 0))
