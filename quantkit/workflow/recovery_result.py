"""What a recovery says of itself."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.recovery.distill.early_stopping import TrainingProgress
from quantkit.workflow.sparsify import Sparsified


@dataclass(frozen=True)
class Recovery:
    """A recovered pipeline that was written, and how it went."""

    method: str
    output: Path
    #: its masks; None: nothing is masked
    masks: Path | None
    #: parameters that were written anew
    tensors: int
    #: the losses on the way; none of obs, which trains nothing
    points: tuple[TrainingProgress, ...]
    #: sampled from the teacher
    trajectories: int
    #: seconds of looks, saving and refilling, which the points leave out
    seconds_aside: float
    #: the masks, where the recovery chose them itself
    chosen: Sparsified | None = None

    def __repr__(self) -> str:
        """Return how it went in a line."""
        masks = f"; masks: {self.masks}" if self.masks else ""
        if not self.points:
            chosen = "" if self.chosen is None else f"{self.chosen.summary}\n"
            return f"{chosen}updated {self.tensors} tensors{masks}"
        first, last = self.points[0], self.points[-1]
        looks = [point.look for point in self.points if point.look]
        seen = ""
        if looks:
            seen = f"; {looks[0].metric} {looks[0].value:.4f} -> {looks[-1].value:.4f}"
        return (
            f"recovered in {last.step} steps, {round(last.seconds, 1):g} s and "
            f"{round(self.seconds_aside, 1):g} s aside: loss {first.loss:.5f} -> "
            f"{last.loss:.5f}{seen}{masks}"
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        masks = None if self.masks is None else str(self.masks)
        written = {"written": str(self.output), "masks": masks}
        if not self.points:
            chosen = {} if self.chosen is None else {"layers": self.chosen.to_json()["layers"]}
            return {**written, "tensors": self.tensors, **chosen}
        first, last = self.points[0], self.points[-1]
        looks = [point.look for point in self.points if point.look]
        return {
            **written,
            "steps": last.step,
            "seconds": round(last.seconds, 1),
            "seconds_aside": round(self.seconds_aside, 1),
            "trajectories": self.trajectories,
            "first_loss": first.loss,
            "last_loss": last.loss,
            "looks": [{"metric": look.metric, "value": look.value} for look in looks],
        }


@dataclass(frozen=True)
class RecoveryPlan:
    """What a recovery would work on."""

    masked: int
    quantized: int

    def __repr__(self) -> str:
        """Return it in a line."""
        return f"{self.masked} layers masked, {self.quantized} quantized"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {"written": None, "masked": self.masked, "quantized": self.quantized}
