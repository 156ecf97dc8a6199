"""Writing models for other programs: one row for each kind of file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from quantkit.checkpoint.reader import open_packed, read_packed
from quantkit.errors import CheckpointError, InputError, ModelError
from quantkit.interchange.denoiser import Denoiser, dense_denoiser, packed_denoiser
from quantkit.interchange.gguf_export import GgufExport, plan_gguf, write_gguf
from quantkit.progress import Progress, silent
from quantkit.workflow.inputs import ModelLike, as_model

__all__ = ["GgufExport", "export"]

_Component = TypeVar("_Component")


@dataclass(frozen=True)
class Exporter:
    """A kind of file that models are exported to."""

    #: the kinds that it comes in, after the colon
    variants: tuple[str, ...]
    run: "_Run"


class _Run(Protocol):
    def __call__(
        self,
        denoiser: Denoiser,
        variant: str,
        output: Path,
        *,
        convolutions: bool,
        force: bool,
        dry_run: bool,
        progress: Progress,
    ) -> GgufExport: ...


def _export_gguf(
    denoiser: Denoiser,
    variant: str,
    output: Path,
    *,
    convolutions: bool,
    force: bool,
    dry_run: bool,
    progress: Progress,
) -> GgufExport:
    plan = plan_gguf(denoiser, variant, convolutions=convolutions)
    if dry_run:
        return plan.summary(output)
    return write_gguf(plan, output, force=force, progress=progress)


#: What ``--to`` takes: a name, and for those with variants one of them after a colon.
EXPORTERS: Mapping[str, Exporter] = {"gguf": Exporter(("Q8_0", "Q4_0"), _export_gguf)}


def export(
    model: ModelLike,
    *,
    to: str,
    output: str | Path,
    convolutions: bool = False,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress = silent,
) -> GgufExport:
    """Write a model's denoiser as a file for other programs: all of it, or nothing.

    Args:
        model: a pipeline's or component's directory, 16-bit or packed in blocks, a hub id, a .gguf
            file with its config, or opened.
        to: ``gguf:Q8_0`` or ``gguf:Q4_0``.
        output: the file to make.
        convolutions: quantize them, too; the file is for ComfyUI-GGUF alone then.
        force: replace an existing output once the new one is complete.
        dry_run: only say what would be written.
        progress: told of tensors done.

    Returns:
        what the file holds.

    Raises:
        InputError: anything that is wrong with the input; ``output`` is as it was.
    """
    exporter, variant = _find(to)
    return exporter.run(
        _denoiser(model),
        variant,
        Path(output),
        convolutions=convolutions,
        force=force,
        dry_run=dry_run,
        progress=progress,
    )


def _find(to: str) -> tuple[Exporter, str]:
    name, _, variant = to.partition(":")
    if name not in EXPORTERS or variant not in EXPORTERS[name].variants:
        known = ", ".join(f"{name}:{v}" for name, row in EXPORTERS.items() for v in row.variants)
        raise InputError(f"to {to!r:.80}: unknown, wanted one of {known}", fields=("to",))
    return EXPORTERS[name], variant


def _denoiser(model: ModelLike) -> Denoiser:
    """Return the one denoiser of a model, packed or not."""
    if isinstance(model, str | Path) and _is_packed(Path(model)):
        return packed_denoiser(_only(open_packed(Path(model)).components, str(model)))
    opened = as_model(model)
    return dense_denoiser(_only(opened.components, str(opened.path)))


def _only(components: tuple[_Component, ...], where: str) -> _Component:
    if len(components) > 1:
        raise ModelError(
            f"{where}: {len(components)} denoisers, and a file holds one; pass the directory of one"
        )
    return components[0]


def _is_packed(path: Path) -> bool:
    try:
        return path.is_dir() and bool(read_packed(path).components)
    except CheckpointError:
        return False
