"""Write tables of estimated steps into docs/guides/benchmark.md, beside what was measured.

``python docs/measure_estimate.py`` does it all. What was measured is in the files of RUNS, which
``quantkit bench model --profile --in-a-row 20 --save FILE`` wrote on the card that stands beside
them: put a new run in its place and run this again. ``python docs/measure_estimate.py CARD FILE``
prints the rows of one file.

The model is estimated as a run built it, with a row for every contender that was timed. Measured is
a step of many in a row where a file has it, else one that was waited for.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import click

from quantkit.bench.denoisers import DENOISERS, Denoiser
from quantkit.bench.estimate.cards import Card, find_card
from quantkit.bench.estimate.result import EstimateRow
from quantkit.bench.estimate.run import estimate_step
from quantkit.bench.model_contenders import MODEL_CONTENDERS, ModelContender
from quantkit.bench.model_result import ModelBenchSettings
from quantkit.bench.profiling import IDLE, group_of
from quantkit.progress import silent

RESULTS = Path(__file__).parent / "notes" / "results"
PAGE = Path(__file__).parent / "guides" / "benchmark.md"
#: Card -> files of runs on it.
RUNS = {"H200": ("h200-step-sdxl.json", "h200-step-flux-quarter.json", "h200-sdxl.json")}
#: Group of an estimate -> groups of a profile.
GROUPS = {
    "products": ("library products", "quantkit products", "convolutions"),
    "attention": ("attention",),
    "norms": ("norms",),
    "elementwise and copies": ("elementwise and copies", "quantize"),
    "launches": (IDLE,),
}
