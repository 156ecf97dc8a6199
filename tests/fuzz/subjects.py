"""What is damaged: a tiny pipeline, packed in several ways, and every other file quantkit reads.

Made by quantkit's own commands, so that a change of a format needs no change here.
"""

import json
import shutil
from pathlib import Path

from .running import run

#: Layers that artefacts are made of: a few suffice and are read fast.
FEW = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.*"

RECIPES = {
    "static": """\
name: static
smooth: 0.5
activation: {mode: static, buckets: 2, observer: amax}
keep: ["up_blocks.0.attentions.1.*"]
calibration: {steps: 4, buckets: 4, prompts: 1, batch: 1}
""",
    "sparse": """\
name: sparse
weight: {granularity: "group:16"}
sparsity: {method: magnitude}
keep: ["up_blocks.0.attentions.1.*"]
overrides:
  - layers: ["*.to_k"]
    weight: {format: e5m2, granularity: tensor}
    activation: {mode: none}
""",
    "token": f"""\
name: token
keep: ["*"]
overrides:
  - {{layers: ["{FEW}"], keep: false}}
""",
    "few": f"""\
name: few
activation: {{mode: static, observer: amax}}
keep: ["*"]
overrides:
  - {{layers: ["{FEW}"], keep: false}}
calibration: {{steps: 2, buckets: 2, prompts: 1, batch: 1}}
""",
    "few-masked": f"""\
name: few-masked
sparsity: {{layers: ["{FEW}"]}}
keep: ["*"]
overrides:
  - {{layers: ["{FEW}"], keep: false}}
""",
    "few-gptq": f"""\
name: few-gptq
weight: {{rounding: gptq}}
keep: ["*"]
overrides:
  - {{layers: ["{FEW}"], keep: false}}
calibration: {{steps: 2, buckets: 2, prompts: 1, batch: 1}}
""",
}

#: of the packed pipelines
PACKED = ("static", "sparse", "token")

#: A file of shapes, for 'kernels bench --shapes'.
SHAPES = [[16, 32, 64], [8, 8, 32]]


def make_subjects(root: Path) -> None:
    """Write every subject below ``root``, and what belongs beside them below ``root/fixed``."""
    fixed = root / "fixed"
    fixed.mkdir(parents=True)
    for name, text in RECIPES.items():
        (fixed / f"{name}.yaml").write_text(text)
    _write_sources(root, fixed)
    pipeline, whole, few = fixed / "pipeline", root / "whole", fixed / "few.yaml"
    _run("calibrate", "model", pipeline, "-r", fixed / "static.yaml", "-o", whole, "--count", 1)
    _pack(root, fixed, whole)
    _write_artefacts(root, pipeline, few, fixed)
    _write_measured(root)
    _write_gguf(root, fixed)
    shutil.copytree(root / "packed" / "token", root / "streams" / "token")
    _write_outputs(root, fixed)
    (root / "argument" / "none").mkdir(parents=True)
    (root / "argument" / "none" / "file").write_text("")
    for name, text in RECIPES.items():
        folder = root / "recipe" / name
        folder.mkdir(parents=True)
        (folder / "recipe.yaml").write_text(text)


def _run(*arguments: object) -> None:
    ran = run([*map(str, arguments), "-q"])
    assert ran.code == 0, f"{arguments}: {ran.err}{ran.out}{ran.escaped}"


def _write_sources(root: Path, fixed: Path) -> None:
    """Write a StableDiffusionPipeline as small as they go, whole and its UNet cut into shards."""
    import diffusers
    import torch

    from tests.support import pipelines

    def unet() -> torch.nn.Module:
        return diffusers.UNet2DConditionModel(
            sample_size=8,
            in_channels=4,
            out_channels=4,
            block_out_channels=(32,),
            layers_per_block=1,
            down_block_types=("CrossAttnDownBlock2D",),
            mid_block_type=None,
            up_block_types=("CrossAttnUpBlock2D",),
            norm_num_groups=8,
            cross_attention_dim=32,
            attention_head_dim=2,
        )

    torch.manual_seed(0)
    pipe = pipelines._stable_diffusion(
        unet, diffusers.DDIMScheduler(clip_sample=False, steps_offset=1)
    )
    pipe.to(torch.float16).save_pretrained(fixed / "pipeline")
    source = root / "source" / "pipeline"
    shutil.copytree(fixed / "pipeline", source)
    (source / "README.md").write_text("A tiny pipeline.\n")
    cut = root / "source" / "sharded"
    shutil.copytree(fixed / "pipeline", cut, ignore=shutil.ignore_patterns("unet"))
    pipe.unet.save_pretrained(cut / "unet", max_shard_size="120KB")
    shutil.copytree(fixed / "pipeline" / "unet", root / "source" / "component")


def _pack(root: Path, fixed: Path, calibration: Path) -> None:
    source = {"sparse": root / "source" / "sharded"}
    more = {"static": ("-c", calibration)}
    (root / "packed").mkdir()
    for name in PACKED:
        model = source.get(name, root / "source" / "pipeline")
        recipe = fixed / f"{name}.yaml"
        _run("pack", model, "-r", recipe, "-o", root / "packed" / name, *more.get(name, ()))


def _write_artefacts(root: Path, pipeline: Path, few: Path, fixed: Path) -> None:
    for family in ("calibration", "hessians", "masks", "sensitivity"):
        (root / family / "few").mkdir(parents=True)
    calibration = root / "calibration" / "few" / "file"
    _run("calibrate", "model", pipeline, "-r", few, "-o", calibration, "--count", 1)
    moments = root / "hessians" / "few" / "folder"
    _run("calibrate", "hessian", pipeline, "-r", few, "-o", moments, "--count", 1)
    masked = fixed / "few-masked.yaml"
    _run("sparsify", pipeline, "-r", masked, "-o", root / "masks" / "few" / "file")
    found = root / "sensitivity" / "few" / "file.json"
    measure = ("-c", calibration, "-o", found, "--measure", 0)
    _run("calibrate", "sensitivity", pipeline, "-r", few, *measure)
    shutil.copy(found, fixed / "sensitivity.json")
    written = ("--set", "budget.bytes=0.99", "-o", fixed / "written.yaml")
    _run("calibrate", "optimize", found, "-r", fixed / "token.yaml", *written)
    # Beside the pipeline for those that damage something else.
    shutil.copy(calibration, fixed / "calibration")


def _write_measured(root: Path) -> None:
    """Write what takes a machine to measure, made up, a compiled kernel, prompts and shapes."""
    for family in ("baseline", "prompts", "shapes"):
        (root / family / "made").mkdir(parents=True)
    row = {
        "op": "gemm",
        "contender": "quantkit",
        "shape": {"m": 16, "n": 32, "k": 64},
        "timing": {"p50_us": 12.5},
    }
    from quantkit.bench.kernels.figures import VERSION
    from quantkit.bench.kernels.kernel_figures import SCHEMA

    baseline = {
        "schema": SCHEMA,
        "schema_version": VERSION,
        "machine": {"device": "a device", "architecture": "host"},
        "rows": [row, {**row, "op": "geglu"}],
    }
    (root / "baseline" / "made" / "file.json").write_text(json.dumps(baseline))
    _write_kernel(root / "kernels" / "made")
    prompts = "a red house by a lake\n\nzwei Hunde im Schnee, 35 mm\n"
    (root / "prompts" / "made" / "prompts.txt").write_text(prompts)
    (root / "shapes" / "made" / "shapes.json").write_text(json.dumps(SHAPES))
    (root / "shapes" / "made" / "shapes.csv").write_text("m,n,k\n16,32,64\n8,8,32\n")


def _write_gguf(root: Path, fixed: Path) -> None:
    """Write a denoiser of another family, and files of it in blocks of both sizes."""
    from tests.support.denoisers import tiny_denoiser

    model = fixed / "denoiser"
    tiny_denoiser("sd3").save_pretrained(model)
    for kind in ("Q4_0", "Q8_0"):
        (root / "gguf" / kind).mkdir(parents=True)
        _run("export", model, "--to", f"gguf:{kind}", "-o", root / "gguf" / kind / "file.gguf")


def _write_outputs(root: Path, fixed: Path) -> None:
    """Lay outputs of quantkit's in the way of others."""
    outputs = {
        "recipe": fixed / "written.yaml",
        "masks": root / "masks" / "few" / "file",
        "measured": fixed / "sensitivity.json",
        "gguf": root / "gguf" / "Q4_0" / "file.gguf",
    }
    for name, path in outputs.items():
        (root / "force" / name).mkdir(parents=True)
        shutil.copy(path, root / "force" / name / "file")


def _write_kernel(folder: Path) -> None:
    """Compile one kernel, where there is a compiler."""
    from quantkit.device.aot.object_build import build
    from quantkit.device.ops.op import all_variants
    from quantkit.device.ops.table import OPS
    from quantkit.errors import CompilerMissingError
    from quantkit.progress import silent

    # One with a tile, and one without.
    names = ("quantize_fp8_token", "gemm_fp8")
    variants = tuple(next(iter(all_variants(OPS[name]))) for name in names)
    try:
        build("gfx1100", folder, variants, compiler=None, force=False, progress=silent)
    except CompilerMissingError:
        (folder.parent / "none").mkdir(parents=True)
