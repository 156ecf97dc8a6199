"""The rate of a progress bar in a readable unit."""

from rich.progress import ProgressColumn, Task
from rich.text import Text


def show_rate(speed: float | None) -> str:
    """Return parts a second, or seconds a part where that is more than one; empty if unknown."""
    if not speed:
        return ""
    return f"{speed:.1f}/s" if speed >= 1 else f"{1 / speed:.1f} s each"


class RateColumn(ProgressColumn):
    """Parts of a step a second, over the last half minute, or over all of a finished one."""

    def render(self, task: Task) -> Text:
        """Return the rate of one bar."""
        return Text(show_rate(task.finished_speed or task.speed), style="progress.data.speed")
