"""``quantkit doctor``: devices, compilers, and the backend of each operation or layer."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from quantkit.cli import options
from quantkit.cli.command import Command
from quantkit.cli.console import echo, print_json, print_table, progress_bar, some

if TYPE_CHECKING:
    from quantkit.device.survey import Gpu, OpChoice, Survey
    from quantkit.inference.attention.attention_choices import AttentionChoice
    from quantkit.inference.layers.layer_choices import LayerChoice
    from quantkit.workflow.bundle import Bundle


@click.command(cls=Command, example="quantkit doctor --bundle card.json")
@click.argument("packed", required=False, type=options.PATH, callback=options.directory)
@options.device
@click.option("--strict", is_flag=True, help="End with 1 unless a GPU runs quantkit's kernels.")
@click.option(
    "--bundle",
    type=options.PATH,
    help="Also time kernels and a step of SDXL (two minutes), and write all of it to this file, to "
    "be sent with the issue form 'Results of a card'. It names no folder, user or host.",
)
@options.force
@options.quiet
@options.as_json
def doctor(
    packed: Path | None,
    device: str,
    strict: bool,
    bundle: Path | None,
    force: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Show devices, compilers and caches, and which back end would run each operation and why.

    The first line says which GPU runs quantkit's kernels, or why none does. With PACKED, also
    which back end each of its packed layers would use, which attention modules run on 8-bit codes,
    and why others keep their processors.
    """
    from quantkit.workflow.doctor import examine

    if bundle is not None and packed is not None:
        raise click.UsageError("--bundle is of a card, expected no packed directory")
    made = bundle and _bundled(bundle, device, force=force, quiet=quiet)
    found = made.examination if made else examine(packed, device=device)
    if as_json:
        print_json(found.to_json())
    else:
        _print_survey(found.survey)
        if packed is not None:
            _print_layers(packed, found.layers)
            _print_attention(packed, found.attention)
        if made:
            echo(*str(made).splitlines())
            echo(f"written: {bundle}; send it with the issue form 'Results of a card'")
    if strict and not found.survey.headline.fine:
        sys.exit(1)


def _bundled(path: Path, device: str, *, force: bool, quiet: bool) -> "Bundle":
    from quantkit.workflow.bundle import make_bundle

    with progress_bar(quiet=quiet) as progress:
        return make_bundle(path, device=device, force=force, progress=progress)


def _print_survey(found: "Survey") -> None:
    echo(found.headline.text)
    echo(f"torch {found.torch_version}")
    for device in found.devices:
        echo(device)
    for gpu in found.gpus:
        _print_gpu(gpu)
    used, limit = found.cache_bytes / 2**20, found.cache_limit / 2**20
    echo(f"kernel cache: {found.cache} ({used:.1f} of {limit:.0f} MiB)")
    tools = [(t.name, t.needed_for, t.found or f"missing: {t.problem}") for t in found.tools]
    print_table("Compilers", ("tool", "needed for", "found"), tools)
    rows = [(o.op, o.device, *_says(o)) for o in found.operations]
    _print_alike("Operations", "operations", ("device", "back end", "why"), rows)


def _print_gpu(gpu: "Gpu") -> None:
    echo(f"{gpu.device}: {gpu.name}, {gpu.architecture}, {gpu.memory_gib:.0f} GiB")
    if gpu.driver:
        echo(f"  kernels: {gpu.kernels}; {gpu.driver}; {gpu.compiler}")
        echo(f"  objects: {gpu.cached_objects} cached in {gpu.cache or 'no folder'}")
    if gpu.formats:
        echo(f"  formats: {gpu.formats}")
    for folder in gpu.prebuilt:
        echo(f"  prebuilt: {folder}")
    passed = f"passed in {gpu.self_test_seconds:.2f} s"
    echo(f"  self-test: {gpu.problem or passed}")


def _says(choice: "OpChoice") -> tuple[str, str]:
    return choice.backend, choice.choice.reason or "a kernel runs"


def _print_layers(packed: Path, layers: "tuple[LayerChoice, ...]") -> None:
    kernels = sum(layer.runs_on_kernel for layer in layers)
    rows = [
        (_joined(layer.component, layer.layer), layer.op, layer.backend, layer.reason)
        for layer in layers
    ]
    _print_alike(str(packed), "layers", ("operation", "back end", "why"), rows)
    echo(f"{kernels} of {len(layers)} packed layers run on a kernel")


def _print_attention(packed: Path, modules: "tuple[AttentionChoice, ...]") -> None:
    if not modules:
        echo("attention is torch's, in 16 bit: the checkpoint asks for no codes")
        return
    kernels = sum(module.runs_on_kernel for module in modules)
    rows = [
        (
            _joined(m.component, m.module),
            m.format or "16 bit",
            m.backend,
            m.reason or "a kernel runs",
        )
        for m in modules
    ]
    columns = ("queries and keys", "back end", "why")
    _print_alike(f"{packed}: attention", "modules", columns, rows)
    echo(f"{kernels} of {len(modules)} attention modules run on a kernel")


def _print_alike(
    title: str, of: str, columns: Sequence[str], rows: Sequence[tuple[str, ...]]
) -> None:
    """Print a row for all that have the same to say; their names are in --json.

    Args:
        title: of the table.
        of: what the first cell of a row names, in the plural.
        columns: names of the other cells.
        rows: a name, and the other cells.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, *rest in rows:
        groups.setdefault(tuple(rest), []).append(name)
    told = [(len(names), some(names), *rest) for rest, names in groups.items()]
    print_table(title, ("number", of, *columns), told)


def _joined(component: str, name: str) -> str:
    return "/".join(filter(None, (component, name)))
