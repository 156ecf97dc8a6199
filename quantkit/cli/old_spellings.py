"""Spellings of an earlier release that still work, with a hint; the next release drops them.

``sparsify`` was three commands in one: ``sparsify --permute`` is ``permute`` now, ``sparsify
--recover obs|reconstruct`` and the settings of a recovery are those of ``recover``.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options
from quantkit.cli.console import progress_bar
from quantkit.cli.permute import print_permuted
from quantkit.cli.recovery_options import recovery_options, training_of
from quantkit.errors import RecipeError

if TYPE_CHECKING:
    from quantkit.workflow.training import Training


def of_sparsify(command: Callable[..., None]) -> Callable[..., None]:
    """Add what ``sparsify`` took; help leaves it out."""
    command = recovery_options(hidden=True)(command)
    command = click.option("--prompts", type=options.PATH, hidden=True)(command)
    command = click.option("--masks-output", type=options.PATH, hidden=True)(command)
    return click.option("--permute", is_flag=True, hidden=True)(command)


@dataclass(frozen=True)
class Given:
    """What ``sparsify`` was given that decides whether it is spelled as before."""

    recover: str | None
    hessians: Path | None
    device: str | None
    permute: bool
    masks_output: Path | None
    prompts: Path | None
    training: "Training"

    @classmethod
    def of(
        cls, recover: str | None, hessians: Path | None, device: str | None, old: dict[str, Any]
    ) -> "Given":
        """Take the options of ``of_sparsify``, and those that they do not go with."""
        apart = {name: old.pop(name) for name in ("permute", "masks_output", "prompts")}
        return cls(recover, hessians, device, training=training_of(old), **apart)

    @property
    def _settings(self) -> tuple[str, ...]:
        """The settings of a recovery that were given."""
        apart = {"masks_output": self.masks_output, "prompts": self.prompts}
        return (*self.training.changed, *(name for name, value in apart.items() if value))

    def hints(self) -> Iterator[str]:
        """Yield a line that names the new spelling, where the old one was used."""
        if self.permute:
            yield _hint("sparsify --permute", "permute")
        elif self.recover in {"obs", "reconstruct"}:
            yield _hint(f"sparsify --recover {self.recover}", f"recover --method {self.recover}")
        elif self.recover is not None and self._settings:
            yield _hint("sparsify --recover distill with settings", "recover")

    def refuse_alone(self) -> None:
        """Refuse the options of a recovery where there is none.

        Raises:
            RecipeError: naming the first.
        """
        # Second moments are computed with somewhere, recovery or not.
        place = ("device",) if self.device is not None and self.hessians is None else ()
        for name in sorted((*self._settings, *place)):
            raise RecipeError(
                f"{name}: a setting of recovery; run 'quantkit recover', or drop it",
                fields=(name,),
            )

    def refuse_beside_permute(self) -> None:
        """Refuse what belongs to the permuted pipeline, and not to the step that makes it.

        Raises:
            RecipeError: naming the first.
        """
        for option, value in ((f"--recover {self.recover}", self.recover),
                              ("--hessians", self.hessians)):  # fmt: skip
            if value is not None:
                taken = ", taken from that output" if option == "--hessians" else ""
                raise RecipeError(
                    f"--permute with {option}: permute first, then run sparsify on its output with "
                    f"{option}{taken}"
                )
        for name in sorted(set(self._settings) - {"masks_output", "seed"}):
            raise RecipeError(
                f"{name}: a setting of recovery, which --permute does not do; drop it",
                fields=(name,),
            )


def permute_as_before(
    given: Given,
    model: str,
    *,
    output: Path,
    recipe: str,
    calibration: Path | None,
    rule: tuple[str | None, str | None, float | None],
    force: bool,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Do what ``quantkit permute`` does, with the options that ``sparsify`` took for it."""
    from quantkit.workflow.permute import permute

    pattern, method, error_budget = rule
    with progress_bar(quiet=quiet) as progress:
        found = permute(
            model,
            output=output,
            recipe=recipe,
            calibration=calibration,
            masks_output=given.masks_output,
            pattern=pattern,
            method=method,
            error_budget=error_budget,
            device="auto" if given.device is None else given.device,
            seed=given.training.seed or 0,
            force=force,
            dry_run=dry_run,
            progress=progress,
        )
    print_permuted(found, as_json=as_json)


def _hint(old: str, new: str) -> str:
    return f"hint: 'quantkit {old}' is 'quantkit {new}' now; it works for one more release"
