"""``quantkit calibrate sensitivity``: how much each layer loses under each treatment."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from quantkit.cli import options
from quantkit.cli.console import echo, print_json, print_table, progress_bar
from quantkit.storage.limits import MAX_COUNT

if TYPE_CHECKING:
    from quantkit.sensitivity.result import LayerSensitivity, Sensitivity

#: Layers of the table on the terminal; the file has all.
SHOWN = 10
ORDERED_BY = "e4m3fn-token"
#: Treatments of the table, and their headings.
COLUMNS = {"e4m3fn-static": "static", "e4m3fn-token": "token", "2:4-wanda-e4m3fn-token": "2:4"}


@click.command("sensitivity")
@options.model
@click.option(
    "-c",
    "--calibration",
    type=options.PATH,
    required=True,
    help="Statistics and stored inputs, written by 'quantkit calibrate model'.",
)
@options.hessians
@options.recipe
@options.output
@click.option("--plot", type=options.PATH, help="Draw it too, as .svg, .png or .pdf.")
@click.option(
    "--measure",
    type=click.IntRange(0, MAX_COUNT),
    default=24,
    show_default=True,
    help="Most layers to run in the pipeline; 0 runs none.",
)
@options.prompts
@click.option("--count", type=options.COUNT, help="Prompts to run on; default: one batch.")
@click.option("--steps", type=options.STEPS, help="Denoising steps; default: the recipe's.")
@click.option("--guidance", type=options.NUMBER, help="Guidance scale; default: the recipe's.")
@click.option("--seed", type=options.SEED, help="Of the first prompt's noise.")
@click.option("--batch", type=options.COUNT, help="Prompts denoised at a time.")
@options.device
@options.force
@options.quiet
@options.as_json
def sensitivity(
    model: str,
    calibration: Path,
    hessians: Path | None,
    recipe: str,
    output: Path,
    plot: Path | None,
    measure: int,
    prompts: Path | None,
    count: int | None,
    device: str,
    force: bool,
    quiet: bool,
    as_json: bool,
    **run: Any,
) -> None:
    """Measure what every layer of MODEL loses under every treatment.

    All layers are measured on the inputs that the calibration stored. Those whose treatment the
    recipe's budget would change if their error weighed twice or half as much are run in the
    pipeline, one at a time, for the error of the final latents.

    Masks by SparseGPT are measured with --hessians only.
    """
    from quantkit.sensitivity.result import to_json

    found = measure_layers(
        model,
        calibration,
        recipe,
        output,
        hessians=hessians,
        plot=plot,
        measure=measure,
        prompts=prompts,
        count=count,
        run={name: value for name, value in run.items() if value is not None},
        device=device,
        force=force,
        quiet=quiet,
    )
    if as_json:
        print_json({"written": str(output), **to_json(found)})
    else:
        _print(found, output)


def measure_layers(
    model: str,
    calibration: Path,
    recipe: str,
    output: Path,
    *,
    hessians: Path | None,
    plot: Path | None,
    measure: int,
    prompts: Path | None,
    count: int | None,
    run: dict[str, Any],
    device: str,
    force: bool,
    quiet: bool,
) -> "Sensitivity":
    """Measure, write the file, and draw it.

    Args:
        model: pipeline directory or hub id.
        calibration: of the same model, with stored inputs.
        recipe: a bundled name or a YAML file.
        output: the JSON file to write.
        hessians: second moments of the same model; None: no masks by SparseGPT.
        plot: the drawing to write, if any.
        measure: most layers to run in the pipeline.
        prompts: a file of prompts; None: the bundled set.
        count: how many of them; None: one batch.
        run: settings of the recipe's calibration section to replace.
        device: auto, cpu or cuda[:N].
        force: replace existing files.
        quiet: no progress.
    """
    from quantkit.calibration.hessian import load_hessians
    from quantkit.calibration.statistics import load_calibration
    from quantkit.models.chosen import open_for
    from quantkit.pipelines.running import choose_device, read_prompts
    from quantkit.sensitivity.analyse import measure_sensitivity
    from quantkit.sensitivity.plot import check_plot_path, save_plot
    from quantkit.sensitivity.result import save_sensitivity
    from quantkit.sensitivity.subject import Subject
    from quantkit.sparsity.surgery import Surgeon
    from quantkit.storage.digest import sha256_of_file
    from quantkit.storage.files import write_or_keep
    from quantkit.storage.places import check_file

    check_file(output, force=force)
    if plot is not None:
        check_plot_path(plot)
        check_file(plot, force=force)
    source, chosen = open_for(model, recipe)
    chosen = chosen.with_calibration(run)
    texts = read_prompts(prompts)[: count or chosen.calibration.batch]
    surgeon = None if hessians is None else Surgeon(load_hessians(hessians), choose_device(device))
    subject = Subject.of(source, chosen, load_calibration(calibration), surgeon)
    with progress_bar(quiet=quiet) as progress:
        found = measure_sensitivity(
            subject,
            texts,
            measure=measure,
            device=device,
            calibration_digest=sha256_of_file(calibration),
            progress=progress,
        )
    write_or_keep(partial(save_sensitivity, found, force=force), output)
    if plot is not None:
        write_or_keep(partial(save_plot, found, force=force), plot)
    return found


def _print(found: "Sensitivity", output: Path) -> None:
    from quantkit.sensitivity.gains import find_gains

    gains = find_gains(found.layers)

    def final(layer: "LayerSensitivity") -> float:
        return gains[layer.name].value * layer.outcomes[ORDERED_BY].error

    worst = sorted(found.layers, key=lambda layer: (-final(layer), layer.name))[:SHOWN]
    rows = [
        (
            layer.name,
            *(_figure(layer, name) for name in COLUMNS),
            f"{gains[layer.name].value:.2g}{'' if gains[layer.name].measured else '*'}",
            f"{final(layer):.1e}",
        )
        for layer in worst
    ]
    title = f"Worst {len(rows)} of {len(found.layers)} layers: relative error (NMSE) of the output"
    print_table(title, ("layer", *COLUMNS.values(), "gain", "final FP8"), rows)
    count = sum(gain.measured for gain in gains.values())
    echo(
        f"final FP8: gain x error of {ORDERED_BY}; {count} layers were run in the pipeline, gains "
        f"with * are medians; every layer and treatment is in {output}"
    )


def _figure(layer: "LayerSensitivity", name: str) -> str:
    return f"{layer.outcomes[name].error:.1e}" if name in layer.outcomes else "-"
