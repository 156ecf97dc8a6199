"""Draw the demo's last 16 prompts with fewer columns of queries and keys, and print what it costs.

``python docs/measure_rank.py FOLDER`` calibrates on the first 16 prompts, gives queries and keys
their basis, and prints for every way the relative error of self attention (mean and worst of the
modules) and SSIM to the pictures of all columns (mean and worst), with the rest in float32, and
with e4m3fn codes.
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from diffusers import DiffusionPipeline
from scipy.stats import spearmanr
from skimage.metrics import structural_similarity
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import quantkit
from quantkit.calibration.attention_observer import attending
from quantkit.calibration.column_errors import relative
from quantkit.calibration.statistics import load_calibration
from quantkit.checkpoint.attention import PackedAttention
from quantkit.inference.attention import install, uninstall
from quantkit.models.attention import AttentionCall, Heads
from quantkit.numerics.attention_basis import largest_two_of_four

ASSETS = Path(__file__).parents[1] / "eval" / "assets"
SEEN, PICTURES, BATCH, STEPS, GUIDANCE = 16, 48, 16, 20, 4.0
BUDGET = 0.02


def attend(way: str, heads: Heads, call: AttentionCall) -> Tensor:
    """Return attention in float32 as a way has it: "rank 16", or "2:4"."""
    q, k, v = heads
    scale = q.shape[3] ** -0.5 if call.scale is None else call.scale
    if way == "2:4":
        k = largest_two_of_four(k - k.mean(dim=2, keepdim=True))
    else:
        rank = int(way.removeprefix("rank "))
        q, k = q[..., :rank], k[..., :rank]
    return scaled_dot_product_attention(q, k, v, scale=scale)


class Errors:
    """The relative error of each way in each module, while the pipeline runs as it is."""

    def __init__(self, ways: tuple[str, ...]) -> None:
        self._ways = ways
        self._sums: dict[str, Tensor] = {}

    def look(self, module: str, heads: Heads, call: AttentionCall) -> None:
        """Add a call."""
        wanted = scaled_dot_product_attention(*heads, scale=call.scale)
        found = [(attend(way, heads, call) - wanted).square().sum() for way in self._ways]
        sums = torch.stack([*found, wanted.square().sum()]).double()
        self._sums[module] = self._sums.get(module, 0.0) + sums

    def of(self, way: str) -> dict[str, float]:
        """Return errors by module."""
        place = self._ways.index(way)
        return {name: float((s[place] / s[-1]).sqrt()) for name, s in self._sums.items()}


def draw(pipe: DiffusionPipeline, prompts: list[str], seed: int) -> np.ndarray:
    """Return (prompts, height, width, 3) pictures from 0 to 1."""
    found = []
    for start in range(0, len(prompts), BATCH):
        batch = prompts[start : start + BATCH]
        seeds = [torch.Generator().manual_seed(seed + start + i) for i in range(len(batch))]
        drawn = pipe(
            batch, num_inference_steps=STEPS, guidance_scale=GUIDANCE, generator=seeds,
            output_type="np",
        )  # fmt: skip
        found.append(drawn.images)
    return np.concatenate(found)


def told(found: np.ndarray, wanted: np.ndarray) -> str:
    """Return SSIM."""
    pairs = zip(wanted, found, strict=True)
    scores = [structural_similarity(a, b, channel_axis=2, data_range=1.0) for a, b in pairs]
    return f"{np.mean(scores):.4f}, {np.min(scores):.4f}"


def exact(modules: Mapping[str, Any], chosen: Mapping[str, str]) -> AbstractContextManager[None]:
    """Return the context in which modules attend in float32 with what was chosen for them."""
    attends: dict[str, Callable[..., Tensor]] = {n: partial(attend, w) for n, w in chosen.items()}
    few = {name: modules[name] for name in chosen}
    return attending(few, attends) if few else nullcontext()


def on_codes(chosen: Mapping[str, str]) -> PackedAttention:
    """Return self attention on codes with the ranks that were chosen."""
    ranks = {name: int(way.removeprefix("rank ")) for name, way in chosen.items()}
    return PackedAttention("e4m3fn", 64, ("*.attn2",), ranks=ranks)


def rotated(folder: Path, prompts: list[str]) -> tuple[str, ...]:
    """Return the modules that have a basis; what an earlier run wrote is taken as it is."""
    beside = folder / "rotated.calibration.safetensors"
    if not beside.exists():
        sampling = quantkit.Sampling(steps=STEPS, guidance=GUIDANCE, batch=BATCH)
        seen = quantkit.calibrate(
            ASSETS / "pipeline", prompts=prompts[:SEEN], sampling=sampling, device="cpu"
        )
        assert seen is not None
        quantkit.rotate(
            ASSETS / "pipeline", calibration=seen.calibration, output=folder / "rotated",
            prompts=prompts, batch=BATCH, device="cpu",
        )  # fmt: skip
    table = load_calibration(beside).attention["unet"]
    return tuple(name for name, seen in table.items() if seen.errors())


def told_of_heads(folder: Path) -> str:
    """Return what entropy and locality say of the errors of heads that multiply 16 columns."""
    table = load_calibration(folder / "rotated.calibration.safetensors").attention["unet"]
    heads: list[tuple[float, float, float]] = []
    for seen in table.values():
        if lost := seen.errors():
            pooled = seen.pooled()
            error = relative(lost["rank_lost"][0], lost["power"])
            columns = (error, pooled.entropy[0], pooled.locality[0])
            heads += zip(*(c.tolist() for c in columns), strict=True)
    errors, entropy, locality = map(list, zip(*heads, strict=True))
    near = sum(error <= BUDGET for error in errors)
    ruled = sum(h <= 0.8 and near_keys > 0.6 for _, h, near_keys in heads)
    return (
        f"{len(heads)} heads, {near} within {BUDGET}; rank correlation of the error with entropy "
        f"{spearmanr(errors, entropy).statistic:.2f}, with locality "
        f"{spearmanr(errors, locality).statistic:.2f}; entropy at most 0.8 and locality above 0.6: "
        f"{ruled}"
    )


def main() -> None:
    """Print a line for every way."""
    folder = Path(sys.argv[1])
    prompts = (ASSETS / "prompts.txt").read_text(encoding="utf-8").split("\n")[:64]
    names = rotated(folder, prompts)
    pipes = [
        DiffusionPipeline.from_pretrained(path, torch_dtype=torch.float32)
        for path in (ASSETS / "pipeline", folder / "rotated")
    ]
    for pipe in pipes:
        pipe.set_progress_bar_config(disable=True)
    unet = pipes[1].unet
    modules = {name: unet.get_submodule(name) for name in names}
    columns = {name: m.inner_dim // m.heads for name, m in modules.items()}
    click.echo(f"columns of heads: {sorted(set(columns.values()))}")
    ways = ("rank 16", "rank 24", "2:4")
    errors = Errors(ways)
    with attending(modules, {name: partial(errors.look, name) for name in names}):
        wanted = draw(pipes[1], prompts[PICTURES:], 1000)
    click.echo(f"the basis alone: SSIM {told(wanted, draw(pipes[0], prompts[PICTURES:], 1000))}")
    half = errors.of("rank 16")
    rows = {way: dict.fromkeys(names, way) for way in ways}
    rows["all columns"] = {}
    rows[f"rank 16 where its error is at most {BUDGET}"] = {
        name: "rank 16" for name in names if half[name] <= BUDGET
    }
    for row, chosen in rows.items():
        with exact(modules, chosen):
            in_float = told(draw(pipes[1], prompts[PICTURES:], 1000) if chosen else wanted, wanted)
        codes = "not drawn"
        if row in {"all columns", "rank 16"}:
            install(unet, on_codes(chosen))
            codes = told(draw(pipes[1], prompts[PICTURES:], 1000), wanted)
            uninstall(unet)
        lost = [errors.of(way)[name] for name, way in chosen.items()] or [0.0]
        click.echo(
            f"{row}: {len(chosen)} of {len(names)} modules, error {np.mean(lost):.4f}, "
            f"{np.max(lost):.4f}; SSIM in float32 {in_float}; on codes {codes}"
        )
    click.echo(told_of_heads(folder))


if __name__ == "__main__":
    main()
