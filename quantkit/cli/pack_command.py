"""``quantkit pack``: write the packed checkpoint of a model."""

from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options
from quantkit.cli.command import Command
from quantkit.cli.console import echo, print_json, print_table, progress_bar, some
from quantkit.storage.sizes import tell_bytes

if TYPE_CHECKING:
    from quantkit.workflow.pack import Forecast, PackSummary


@click.command(cls=Command, example="quantkit pack sdxl -r int8 -c sdxl.calibration -o sdxl-int8")
@options.model
@options.recipe
@options.calibration
@options.hessians
@click.option(
    "--masks",
    type=options.PATH,
    callback=options.there,
    help="Masks written by 'quantkit sparsify'; default: chosen here, as the recipe says.",
)
@options.output
@click.option(
    "--threads",
    type=options.THREADS,
    help="Tensors processed at once; default: the number of cores, at most 8. The result does not "
    "depend on it.",
)
@options.force
@options.dry_run
@options.quiet
@options.as_json
def pack(quiet: bool, as_json: bool, **given: Any) -> None:
    """Pack MODEL: a pipeline directory, a component directory (as its unet) or a hub id.

    Linear and Conv2d weights of the denoiser become codes, 2:4 sparse where the recipe says so,
    and those of text encoders and the VAE where it asks for it (--set text_encoders=int8, --set
    vae=int8). Everything else is copied byte for byte. Without --calibration, weights are scaled
    from the weights alone and activations per token.
    Memory stays small whatever the model's size.

    With --dry-run, a calibration or second moments that the recipe needs may still be missing.
    """
    from quantkit.workflow.pack import Forecast, pack

    with progress_bar(quiet=quiet) as progress:
        found = pack(**given, progress=progress)
    written = not given["dry_run"]
    if isinstance(found, Forecast):
        _print_forecast(found, as_json=as_json)
    elif as_json:
        print_json({"written": written, **found.to_json()})
    else:
        _print(found, f"written to {given['output']}" if written else "nothing written")


def _print_forecast(forecast: "Forecast", *, as_json: bool) -> None:
    """Print what would be packed if the artefacts that the recipe needs were there."""
    missing = [f"--{name}" for name in forecast.missing]
    if as_json:
        print_json({"written": False, **forecast.to_json()})
        return
    _print(forecast.summary, "nothing written")
    echo(forecast.outlook)
    echo(f"missing, planned as if given: {', '.join(missing)}")


def _print(summary: "PackSummary", where: str) -> None:
    treatments: Counter[tuple[str, ...]] = Counter()
    for scheme, count in summary.by_scheme().items():
        pattern = "dense" if scheme.sparsity is None else str(scheme.sparsity)
        activation = scheme.activation.value
        treatments[scheme.weight.name, str(scheme.granularity), pattern, activation] += count
    rows = [(*words, count) for words, count in treatments.items()]
    columns = ("weight", "scale per", "sparsity", "activation", "layers")
    print_table("Packed", columns, rows)
    _print_reasons("Kept in 16 bit", summary.kept())
    _print_reasons("Not as the recipe asks", summary.otherwise())
    if summary.by_alpha():
        alphas = [(a, len(names), some(names)) for a, names in summary.by_alpha().items()]
        print_table("Smoothed", ("alpha", "layers", "which"), alphas)
    if uncorrected := summary.uncorrected():
        echo(f"Without a bias to correct: {len(uncorrected)} layers, {some(uncorrected)}")
    if summary.left_out:
        echo(f"Left out (other weights): {', '.join(map(str, summary.left_out))}")
    for component in summary.components:
        echo(f"{component.name or component.class_name}: {component.sizes}")
    if summary.copied_files:
        echo(f"copied: {summary.copied_files} files, {tell_bytes(summary.copied_bytes)}")
    echo(f"total: {summary.sizes}, {where}")


def _print_reasons(title: str, reasons: dict[str, list[str]]) -> None:
    if reasons:
        rows = [(reason, len(names), some(names)) for reason, names in reasons.items()]
        print_table(title, ("why", "layers", "which"), rows)
