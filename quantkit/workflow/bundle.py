"""One file of a card's results: what doctor says, times of kernels, and one step of SDXL."""

import json
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quantkit.bench.kernels.figures import Verdict
from quantkit.bench.kernels.kernel_benchmark import one_line, run_bench
from quantkit.bench.kernels.kernel_figures import BenchResult
from quantkit.bench.kernels.kernel_shapes import SHAPES, AnyShape, Shape
from quantkit.bench.kernels.operations import OPERATIONS
from quantkit.bench.kernels.timing import TimingPlan
from quantkit.bench.models.model_result import ModelResult
from quantkit.errors import QuantkitError
from quantkit.pipelines.running import choose_device
from quantkit.progress import Progress, silent
from quantkit.storage.files import staged_file, write_or_keep
from quantkit.storage.places import check_file
from quantkit.workflow.bench import ModelBenchSettings, bench_model
from quantkit.workflow.doctor import Examination, examine

SCHEMA, VERSION = "quantkit.card", 1
#: One of each kind of product that packed layers and attention make.
_OPERATIONS = (
    "gemm_int8", "gemm_int8_sparse", "gemm_fp8", "gemm_fp8_sparse", "gemm_w4a8",
    "attention_int8", "attention_fp8",
)  # fmt: skip
_CONTENDERS = ("f16-replayed", "int8-static-replayed", "fp8-static-replayed")
#: 8192 x 8192 x 8192 is left out: its reference in float64 takes seconds on a consumer's card.
_LARGEST = 8192**3
#: Seconds of an operation on a shape, and of the step.
_KERNEL, _STEP = 0.2, 5.0
#: The folder of a path from the root or from home.
_FOLDER = re.compile(r"(?<![\w.:/])~?/(?:[^\s/'\",;:]+/)+")


@dataclass(frozen=True, eq=False)
class Bundle:
    """Results of a card, as its owner sends them."""

    examination: Examination
    kernels: BenchResult
    #: None where no step was timed
    model: ModelResult | None
    #: why; empty where one was
    no_model: str

    @property
    def timed(self) -> int:
        """Operations on shapes that were right, and timed."""
        return sum(row.verdict is Verdict.TIMED for row in self.kernels.rows)

    def __repr__(self) -> str:
        """Return what was timed, and why a step was not."""
        rows = self.model.rows if self.model else ()
        steps = [
            f"{row.contender} {row.timing.p50_us / 1e3:.1f} ms"
            if row.timing
            else f"{row.contender}: {row.reason}"
            for row in rows
        ]
        return (
            f"{self.timed} of {len(self.kernels.rows)} kernels on shapes are right and timed\n"
            f"one step of SDXL: {'; '.join(steps) or self.no_model}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values, without names of the user, the host and folders."""
        values = {
            "schema": SCHEMA,
            "schema_version": VERSION,
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "doctor": self.examination.to_json(),
            "kernels": self.kernels.to_json(),
            "model": self.model and self.model.to_json(),
            "no_model": self.no_model,
        }
        found: dict[str, Any] = _without_names(values, _private_names())
        return found


def make_bundle(
    path: str | Path, *, device: str = "auto", force: bool = False, progress: Progress = silent
) -> Bundle:
    """Survey the machine, time kernels and a step of SDXL, and write all of it to one file.

    On a CPU, few small shapes and no step. Nothing is sent anywhere.

    Args:
        path: of the JSON file.
        device: auto, cpu or cuda[:N].
        force: replace that file.
        progress: told of shapes and models done.

    Returns:
        what was written.

    Raises:
        InputError: a device that is not here, or a file that exists.
    """
    output, place = Path(path), choose_device(device)
    check_file(output, force=force)
    examination, kernels = examine(device=device), _time_kernels(place, progress)
    model, why = _time_step(place, progress)
    bundle = Bundle(examination, kernels, model, why)
    write_or_keep(partial(_save, bundle, force=force), output)
    return bundle


def _shapes_of(device: torch.device) -> tuple[AnyShape, ...]:
    """Return the shapes that a bundle has of a device."""
    groups = ("host",) if device.type == "cpu" else ("sdxl", "flux", "sd15", "sd3", "other")
    every = [shape for group in groups for shape in SHAPES[group]]
    return tuple(s for s in every if not isinstance(s, Shape) or s.m * s.n * s.k < _LARGEST)


def _time_kernels(device: torch.device, progress: Progress) -> BenchResult:
    # The first contender is the operator; others are compiled, which takes minutes.
    chosen = [replace(OPERATIONS[name], own=OPERATIONS[name].own[:1]) for name in _OPERATIONS]
    plan = TimingPlan(warmup=2, repeats=20, seconds=_KERNEL)
    return run_bench(
        _shapes_of(device), chosen, device, plan, against_torch=False, progress=progress
    )


def _time_step(device: torch.device, progress: Progress) -> tuple[ModelResult | None, str]:
    """Return a step of SDXL at 1024x1024 with guidance, or why there is none."""
    if device.type == "cpu":
        return None, "a step of SDXL takes minutes on a CPU"
    settings, place = ModelBenchSettings(batch=2, size=128), str(device)
    chosen = partial(bench_model, settings=settings, contenders=_CONTENDERS, device=place)
    try:
        return chosen(seconds=_STEP, progress=progress), ""
    except (QuantkitError, torch.cuda.OutOfMemoryError, OSError) as error:
        return None, one_line(error)


def _save(bundle: Bundle, path: Path, *, force: bool) -> None:
    with staged_file(path, force=force) as stage:
        stage.write_text(json.dumps(bundle.to_json()) + "\n", encoding="utf-8")


def _private_names() -> tuple[str, ...]:
    """Return the user's and the host's names, the longest first."""
    host = platform.node()
    users = (Path.home().name, *(os.environ.get(name, "") for name in ("USER", "LOGNAME")))
    return tuple(sorted({*users, host, host.partition(".")[0]} - {""}, key=len, reverse=True))


def _without_names(values: Any, names: Iterable[str]) -> Any:
    """Return JSON values whose texts name no folder, and none of ``names`` as a word."""
    if isinstance(values, dict):
        return {key: _without_names(value, names) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_without_names(value, names) for value in values]
    if not isinstance(values, str):
        return values
    text = _FOLDER.sub("", values.replace(str(Path.home()), "~"))
    for name in names:
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "...", text)
    return text
