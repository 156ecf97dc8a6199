"""The demo: all steps on the bundled pipeline."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from quantkit.eval.demo import commands as plan
from quantkit.eval.demo.demo_run import (
    DemoContext,
    DemoResult,
    methods,
    remarks,
    run_demo,
    write_index,
)
from quantkit.eval.judging.gates import State
from quantkit.eval.pages.methods_table import Method
from quantkit.pipelines.running import choose_device
from quantkit.progress import Progress, silent


@dataclass(frozen=True, eq=False)
class Demo:
    """The results of the demo."""

    outcomes: tuple[DemoResult, ...]
    output: Path
    seconds: float

    @property
    def methods(self) -> tuple[Method, ...]:
        """The rows of the table."""
        return tuple(methods(self.outcomes))

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks on failed gates."""
        return tuple(remarks(self.outcomes))

    @property
    def state(self) -> State:
        """The state of FP8's gates."""
        return self.outcomes[0].report.state

    @property
    def passed(self) -> bool:
        """True when FP8 passes its gates."""
        return self.state is State.PASSED

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "schema": "quantkit.demo",
            "schema_version": 1,
            "output": str(self.output),
            "seconds": self.seconds,
            "reports": {o.row.compared: o.report.to_json() for o in self.outcomes},
        }


def make_demo(
    output: str | Path,
    *,
    command: Callable[[list[str]], dict[str, Any]],
    full: bool = False,
    prompts: int | None = None,
    steps: int | None = None,
    noise_floor: bool = True,
    device: str = "auto",
    tell: Callable[[str], None],
    progress: Progress = silent,
) -> Demo:
    """Calibrate, choose masks, pack, verify, load, generate and compare the bundled pipeline.

    Args:
        output: where to write; the output of an earlier demo is replaced.
        command: runs one command of quantkit and returns what it prints as JSON.
        full: every method, recovery by distillation included.
        prompts: pictures to compare; None: 12, with ``full`` 64.
        steps: denoising steps of a picture; None: 4, with ``full`` 20.
        noise_floor: run the original twice more, against itself.
        device: auto, cpu or cuda[:N].
        tell: told a line about every step.
        progress: told of steps in work.

    Returns:
        a report for every way to pack.

    Raises:
        OutputError: the output exists and is not a demo's.
        PromptError: more prompts than the demo has.
    """
    started = perf_counter()
    chosen = plan.FULL if full else plan.SHORT
    outcomes = run_demo(
        DemoContext(Path(output), command, tell, progress, choose_device(device)),
        chosen,
        prompts=prompts or chosen.prompts,
        steps=steps or chosen.picture_steps,
        noise_floor=noise_floor,
    )
    seconds = perf_counter() - started
    write_index(Path(output), outcomes, seconds)
    return Demo(outcomes, Path(output), seconds)
