"""Reports made of pictures made for them: no pipeline runs."""

from dataclasses import replace

import numpy as np
from quantkit.eval.judging.evaluation_result import (
    GenerationFacts,
    KernelCalls,
    Kernels,
    LayerRow,
    ModelFacts,
    Packing,
    Report,
    Timesteps,
)
from quantkit.eval.judging.gates import Compression, Limits, judge
from quantkit.eval.judging.noise_floor import Floor, measure_gaps
from quantkit.eval.measuring.backbones import Backbones
from quantkit.eval.measuring.comparison import compare
from quantkit.eval.measuring.pictures import Pairs
from quantkit.eval.measuring.range_map import RangeMap, RangeRow
from quantkit.eval.measuring.step_errors import StepErrors

NASTY = "a <script>alert(1)</script> | \"quoted\" & 'said' ball"


def pictures(count, side=32):
    rng = np.random.default_rng(0)
    return tuple(
        np.kron(rng.integers(0, 256, (side // 8, side // 8, 3)), np.ones((8, 8, 1))).astype(
            np.uint8
        )
        for _ in range(count)
    )


def made(count=3, *, sigma=4.0, side=32):
    originals = pictures(count, side)
    rng = np.random.default_rng(1)
    # The first pair is identical: PSNR infinite, which JSON cannot say.
    packed = tuple(
        np.clip(p + rng.normal(0, sigma * i, p.shape), 0, 255).round().astype(np.uint8)
        for i, p in enumerate(originals)
    )
    prompts = (NASTY, *(f"ball {i}" for i in range(1, count)))
    return Pairs(tuple(f"{i:03d}" for i in range(count)), originals, packed, prompts)


def layer(index, *, packed=True):
    words = "e4m3fn per channel, input per token" if packed else "F16, not packed"
    numbers = (0.02 + index / 1000, 0.03, 1e-7) if packed else (None, None, None)
    return LayerRow("unet", f"block.{index}.conv", "conv2d", (64, 32, 3, 3), words,
                    "host" if packed else "torch", "", *numbers, 36864, 18688)  # fmt: skip


def made_floors(pairs):
    """BF16 moved every picture by a little noise; the other floor could not be measured."""
    rng = np.random.default_rng(2)
    moved = tuple(
        np.clip(p + rng.normal(0, 2, p.shape), 0, 255).round().astype(np.uint8)
        for p in pairs.original
    )
    steps = StepErrors((900.0, 100.0), ((1e-6,) * 3, (1e-5, 2e-5, 6e-5)))
    return (
        Floor(
            "dtype", "BF16 instead of float32",
            compare(replace(pairs, packed=moved), Backbones()), steps,
        ),
        Floor("batch", "batches of 1 instead of 2", None, None, "the original overflows"),
    )  # fmt: skip


STEPS = Timesteps(
    StepErrors((900.0, 100.0), ((1e-4, 2e-4), (1e-3, 4e-3))),
    StepErrors((900.0, 100.0), ((1e-5, 1e-5), (2e-5, 2e-5))),
    "divergence over 2 prompts",
)


def made_report(pairs, limits=None):
    comparison = compare(pairs, Backbones())
    count = len(pairs.names)
    return Report(
        title="tiny against tiny",
        created="2026-01-02 03:04 UTC",
        quantkit_version="0.1.0",
        compression=Compression.QUANTIZED,
        original=ModelFacts("pipeline", "ab" * 32, 4_000_000),
        packed=ModelFacts("packed", "cd" * 32, 2_100_000),
        packing=Packing("fp8-static", 5, 4, 0, 0.0),
        run=GenerationFacts(
            pairs.prompts, tuple(range(count)), 5, None, 2, "cpu", "float32", 1.0, 2.5, "note"
        ),
        comparison=comparison,
        noise_floor=measure_gaps(comparison, made_floors(pairs)),
        timesteps=STEPS,
        gates=judge(comparison, limits or Limits(), Compression.QUANTIZED),
        kernels=Kernels(
            tuple(KernelCalls("gemm_fp8", "t0", *row) for row in (("host", 70), ("reference", 3))),
            2.5e-7, "unet.block.1.conv", "8 calls of 4 layers were computed again on reference",
        ),
        layers=(*(layer(i) for i in range(4)), layer(9, packed=False)),
        environment=(("torch", "2.9.0"),),
        commands=("quantkit eval report pipeline packed -o report",),
        warnings=("something to know <first>",),
        ranges=RangeMap(
            ("from 500", "below 500"),
            tuple(RangeRow("unet", f"block.{i}.conv", (0.0, 0.75 * i)) for i in range(4)),
        ),
    )  # fmt: skip
