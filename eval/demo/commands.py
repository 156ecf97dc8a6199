"""The demo's commands, as a user types them.

Every row of its table of methods is made by these commands and by nothing else, so whoever doubts a
number can make it again.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path

#: What several commands share; {model} and {out} are the bundled pipeline and the demo's folder.
_SHARED = {
    # The recipe that packs most layers, and so observes them for all rows.
    "calibrated": "int4",
    "sampling": "--prompts {out}/captions.txt --count {count} --device {device} "
    "--set calibration.guidance=4 --set calibration.steps={steps} --set calibration.batch={batch}",
    # Self-attention of the bundled pipeline has 256, 64 and 16 keys, text has 32.
    "attention": "--set attention.min_keys=64 --set attention.qk",
    "moments": "--hessians {out}/hessians --device {device}",
    "training": "--prompts {out}/captions.txt --set calibration.guidance=4 --minutes 1.8333 "
    "--rate 6e-4 --device {device}",
}


@dataclass(frozen=True)
class DemoRow:
    """One configuration of the table of methods."""

    title: str
    #: the directory that is compared with the original, packed or in 16 bit
    compared: str
    #: one a line, in their order; what several rows share is run once
    script: str
    #: said when a gate fails
    remark: str = ""


@dataclass(frozen=True)
class DemoPlan:
    """One demo: its rows, and how much is calibrated on and compared."""

    rows: tuple[DemoRow, ...]
    #: captions drawn, for calibration and training; none of them is compared
    captions: int
    #: of calibration: prompts, steps, prompts at a time
    count: int
    steps: int
    batch: int
    #: pictures, and the steps of each, when nobody says how many
    prompts: int
    picture_steps: int

    def commands(self, row: DemoRow, model: Path, out: Path, device: str) -> tuple[str, ...]:
        """Return the commands of a row as a shell reads them, without "quantkit"."""
        places = {
            "model": shlex.quote(str(model)), "out": shlex.quote(str(out)), "device": device,
            "count": self.count, "steps": self.steps, "batch": self.batch,
        }  # fmt: skip
        shared = {name: text.format_map(places) for name, text in _SHARED.items()}
        lines = row.script.strip().splitlines()
        return tuple(line.strip().format_map(places | shared) for line in lines)


_ONE_SHOT = (
    "One-shot 2:4 drops half of the weights of every layer and trains nothing afterwards, so the "
    "pictures change; 'quantkit recover --masks' brings them back."
)
_REFITTED = (
    "Without training, kept weights and biases make up for much of what one-shot 2:4 drops; "
    "'quantkit recover --masks' makes up for the rest."
)

_STATIC = DemoRow(
    "FP8, static",
    "fp8-static",
    """
    calibrate model {model} -r {calibrated} {sampling} -o {out}/calibration
    pack {model} -r fp8-static -c {out}/calibration -o {out}/fp8-static
    """,
    "FP8 alone should hold its gates: please report this.",
)
_STATIC_ATTENTION = DemoRow(
    "FP8, static, attention too",
    "fp8-static",
    """
    calibrate model {model} -r {calibrated} {sampling} -o {out}/calibration
    pack {model} -r fp8-static {attention}=e4m3fn -c {out}/calibration -o {out}/fp8-static
    """,
    "FP8 alone should hold its gates: please report this.",
)
_GPTQ = DemoRow(
    "FP8, static by timestep, GPTQ",
    "fp8-gptq",
    """
    calibrate model {model} -r {calibrated} {sampling} -o {out}/calibration
    calibrate hessian {model} -r {calibrated} {sampling} -o {out}/hessians
    pack {model} -r fp8-gptq -c {out}/calibration --hessians {out}/hessians -o {out}/fp8-gptq
    """,
)
_INT8 = DemoRow(
    "INT8, per token, smoothed",
    "int8",
    """
    calibrate model {model} -r {calibrated} {sampling} -o {out}/calibration
    pack {model} -r int8-token -c {out}/calibration -o {out}/int8
    """,
    "INT8 should hold its gates: please report this.",
)
_INT8_ATTENTION = DemoRow(
    "INT8, per token, smoothed, attention too",
    "int8",
    """
    calibrate model {model} -r {calibrated} {sampling} -o {out}/calibration
    pack {model} -r int8-token {attention}=int8 -c {out}/calibration -o {out}/int8
    """,
    "INT8 should hold its gates: please report this.",
)
_INT4 = DemoRow(
    "INT4 by GPTQ, and INT8 inputs",
    "int4",
    """
    calibrate model {model} -r {calibrated} {sampling} -o {out}/calibration
    calibrate hessian {model} -r {calibrated} {sampling} -o {out}/hessians
    pack {model} -r int4 -c {out}/calibration --hessians {out}/hessians -o {out}/int4
    """,
)
_WANDA = DemoRow(
    "2:4 by Wanda, and FP8",
    "wanda-fp8",
    """
    calibrate hessian {model} -r {calibrated} {sampling} -o {out}/hessians
    sparsify {model} -r fp8-sparse --set sparsity.method=wanda {moments} -o {out}/wanda.masks
    pack {model} -r fp8-sparse --masks {out}/wanda.masks -o {out}/wanda-fp8
    """,
    _ONE_SHOT,
)
_SPARSEGPT = DemoRow(
    "2:4 by SparseGPT, refitted, 16 bit",
    "sparsegpt",
    """
    calibrate hessian {model} -r {calibrated} {sampling} -o {out}/hessians
    recover {model} -r fp8-sparsegpt --method obs {moments} -o {out}/sparsegpt
    """,
    _REFITTED,
)
_BUDGET = DemoRow(
    "2:4 by SparseGPT where it costs little, and FP8",
    "budget-fp8",
    """
    calibrate model {model} -r {calibrated} {sampling} -o {out}/calibration
    calibrate hessian {model} -r {calibrated} {sampling} -o {out}/hessians
    sparsify {model} -r fp8-sparse-budget {moments} -o {out}/budget.masks
    pack {model} -r fp8-sparse-budget -c {out}/calibration --hessians {out}/hessians \
--masks {out}/budget.masks -o {out}/budget-fp8
    """,
)

_BUDGET_INT8 = DemoRow(
    "2:4 by SparseGPT where it costs little, and INT8",
    "budget-int8",
    """
    calibrate model {model} -r {calibrated} {sampling} -o {out}/calibration
    calibrate hessian {model} -r {calibrated} {sampling} -o {out}/hessians
    sparsify {model} -r int8-sparse-budget {moments} -o {out}/budget.masks
    pack {model} -r int8-sparse-budget -c {out}/calibration --hessians {out}/hessians \
--masks {out}/budget.masks -o {out}/budget-int8
    """,
    "2:4 within this budget should hold its gates: please report this.",
)

#: Minutes on two cores. Prompts rather than steps: fewer than these decide no gate of CLIP score.
SHORT = DemoPlan(
    rows=(_STATIC_ATTENTION, _INT8_ATTENTION, _BUDGET_INT8, _INT4),
    captions=64,
    count=8,
    steps=12,
    batch=8,
    prompts=12,
    # Of 4, 12 prompts leave INT4 and the CLIP score of INT8 undecided.
    picture_steps=10,
)

#: Every method, for a GPU.
FULL = DemoPlan(
    rows=(
        DemoRow("FP8, per token", "fp8", "pack {model} -r fp8 -o {out}/fp8"),
        DemoRow(
            "FP8, per token, GPTQ",
            "fp8-token-gptq",
            """
            calibrate hessian {model} -r {calibrated} {sampling} -o {out}/hessians
            pack {model} -r fp8-token-gptq --hessians {out}/hessians -o {out}/fp8-token-gptq
            """,
        ),
        _STATIC,
        _GPTQ,
        _INT8,
        _INT4,
        DemoRow(
            "2:4 by magnitude, and FP8",
            "magnitude-fp8",
            """
            sparsify {model} -r fp8-sparse --set sparsity.method=magnitude {moments} \
-o {out}/magnitude.masks
            pack {model} -r fp8-sparse --masks {out}/magnitude.masks -o {out}/magnitude-fp8
            """,
            _ONE_SHOT,
        ),
        _WANDA,
        DemoRow(
            "2:4 by Wanda, refitted, 16 bit",
            "wanda",
            """
            recover {model} -r fp8-sparse --method obs {moments} -o {out}/wanda
            """,
            _REFITTED,
        ),
        _SPARSEGPT,
        _BUDGET,
        DemoRow(
            "2:4 by magnitude, distilled, 16 bit",
            "distilled",
            """
            sparsify {model} -r fp8-sparse --set sparsity.method=magnitude -o {out}/one-shot.masks
            recover {model} -r fp8-sparse --masks {out}/one-shot.masks {training} \
-o {out}/distilled
            """,
        ),
        DemoRow(
            "2:4 by magnitude, distilled, and FP8",
            "distilled-fp8",
            """
            pack {out}/distilled -r fp8-sparse --masks {out}/distilled.masks.safetensors \
-o {out}/distilled-fp8
            """,
        ),
        DemoRow(
            "2:4 by magnitude, distilled, FP8, and trained as packed",
            "trained-fp8",
            """
            recover {model} --packed {out}/distilled-fp8 {training} -o {out}/trained-fp8
            """,
        ),
    ),
    captions=4096,
    count=128,
    steps=20,
    batch=32,
    prompts=64,
    picture_steps=20,
)
