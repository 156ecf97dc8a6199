"""The result and the plan of a recovery."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from quantkit.recovery.distill.score_change import ScoreChange
from quantkit.recovery.distill.training_progress import ScoredStep, TrainingProgress
from quantkit.workflow.sparsify import Sparsified


@dataclass(frozen=True)
class Recovery:
    """A recovered or packed pipeline that was written, and how it went."""

    method: str
    output: Path
    #: its masks; None: nothing is masked, or it is packed
    masks: Path | None
    #: parameters that were rewritten
    tensors: int
    #: the losses on the way; none of obs, which trains nothing
    points: tuple[TrainingProgress, ...]
    #: sampled from the teacher
    trajectories: int
    #: seconds of looks, saving and refilling, which the points leave out
    seconds_aside: float
    #: the pictures before the first step, and those of the weights that were written
    first_look: ScoredStep | None = None
    written_look: ScoredStep | None = None
    #: the masks, where the recovery chose them itself
    chosen: Sparsified | None = None

    def __repr__(self) -> str:
        """Return how it went in a line."""
        masks = f"; masks: {self.masks}" if self.masks else ""
        if not self.points:
            chosen = "" if self.chosen is None else f"{self.chosen.summary}\n"
            return f"{chosen}updated {self.tensors} tensors{masks}"
        first, last = self.points[0], self.points[-1]
        return (
            f"recovered in {last.step} steps, {round(last.seconds, 1):g} s and "
            f"{round(self.seconds_aside, 1):g} s aside: loss {first.loss:.5f} -> "
            f"{last.loss:.5f}{self._seen}{masks}"
        )

    @property
    def _seen(self) -> str:
        if self.change is None or self.written_look is None:
            return ""
        step = self.written_look.step
        early = "" if step == self.points[-1].step else f" at step {step}, written"
        return f"; {self.change}{early}"

    @property
    def change(self) -> ScoreChange | None:
        """The change of the pictures' score; None: they were not looked at."""
        if self.first_look is None or self.written_look is None:
            return None
        return ScoreChange.between(self.first_look.score, self.written_look.score)

    @property
    def _looks(self) -> list[ScoredStep]:
        """All looks, by step; the one written may be in the middle."""
        looks = {p.step: ScoredStep(p.step, p.look) for p in self.points if p.look}
        ends = [look for look in (self.first_look, self.written_look) if look]
        return sorted((looks | {e.step: e for e in ends}).values(), key=lambda look: look.step)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        masks = None if self.masks is None else str(self.masks)
        written = {"written": str(self.output), "masks": masks}
        if not self.points:
            chosen = {} if self.chosen is None else {"layers": self.chosen.to_json()["layers"]}
            return {**written, "tensors": self.tensors, **chosen}
        first, last = self.points[0], self.points[-1]
        return {
            **written,
            "steps": last.step,
            "seconds": round(last.seconds, 1),
            "seconds_aside": round(self.seconds_aside, 1),
            "trajectories": self.trajectories,
            "first_loss": first.loss,
            "last_loss": last.loss,
            "looks": [{"step": look.step, **asdict(look.score)} for look in self._looks],
            "change": self.change and self.change.sign,
            "written_step": self.written_look.step if self.written_look else last.step,
        }


@dataclass(frozen=True)
class RecoveryPlan:
    """The plan of a recovery."""

    masked: int
    packed: int

    def __repr__(self) -> str:
        """Return it in a line."""
        return f"{self.masked} layers masked, {self.packed} packed"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {"written": None, "masked": self.masked, "packed": self.packed}
