"""Print estimates of steps beside what was measured.

``python docs/measure_estimate.py CARD FILE...``: FILE is what ``quantkit bench model --save`` wrote
on that card (sm_90, H100, ...). The model is estimated as that run built it, with a row for every
contender that was timed.
"""

import json
import sys
from pathlib import Path

import click

from quantkit.bench.denoisers import Denoiser
from quantkit.bench.estimate.cards import Card, find_card
from quantkit.bench.estimate.result import EstimateRow
from quantkit.bench.estimate.run import estimate_step
from quantkit.bench.model_contenders import MODEL_CONTENDERS
from quantkit.bench.model_result import ModelBenchSettings
from quantkit.progress import silent

#: Group of an estimate -> groups of a profile.
GROUPS = {
    "products": ("library products", "quantkit products", "convolutions"),
    "attention": ("attention",),
    "norms": ("norms",),
    "elementwise and copies": ("elementwise and copies", "quantize"),
    "launches": ("device idle",),
}


def rows_of(card: Card, run: dict) -> list[tuple[str, EstimateRow, dict]]:
    """Return model, estimate and measured row of every contender that has both."""
    measured = {row["contender"]: row for row in run["rows"] if row["timing"]}
    contenders = [
        MODEL_CONTENDERS[name]
        for name in measured
        if name in MODEL_CONTENDERS and not MODEL_CONTENDERS[name].fast
    ]
    settings, model = run["settings"], Denoiser(**run["model"])
    kept = ModelBenchSettings(
        settings["batch"],
        settings["size"],
        channels_last=settings["channels_last"],
        fuse_projections=settings["fuse_projections"],
    )
    found = estimate_step(model, contenders, kept, card, silent)
    name = Path(model.name).name
    return [(name, row, measured[row.contender]) for row in found.rows if row.ms]


def line(model: str, row: EstimateRow, measured: dict) -> str:
    """Return a row of the table."""
    ms = measured["timing"]["p50_us"] / 1e3
    groups = []
    for group in row.groups:
        profile = [measured["profile"].get(name, 0) for name in GROUPS[group.group]]
        groups.append(f"{group.ms.middle:.1f} ({sum(profile):.1f})" if measured["profile"] else "")
    whole = f"{row.ms.low:.1f} to {row.ms.high:.1f}"
    cells = (f"{row.ms.middle:.1f}", whole, f"{ms:.1f}", f"{row.ms.middle / ms:.2f}", *groups)
    return f"| {model} | {row.contender} | {' | '.join(cells)} |"


def main() -> None:
    """Print the table."""
    card = find_card(sys.argv[1])
    head = ("model", "contender", "estimate", "range", "measured", "ratio", *GROUPS)
    click.echo(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for path in sys.argv[2:]:
        run = json.loads(Path(path).read_text(encoding="utf-8"))
        for found in rows_of(card, run):
            click.echo(line(*found))


if __name__ == "__main__":
    main()
