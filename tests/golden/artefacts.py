"""What packing, sparsifying, exporting and calibrating write, as digests by name.

``rows`` runs in a process of its own (``__main__``), where matrix libraries take the paths that all
x86-64 processors have.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quantkit.calibration.statistics.layer_statistics import Calibration
from quantkit.errors import InputError
from quantkit.models.families import find_family
from quantkit.models.general_family import GENERAL
from quantkit.models.recommended import tuned
from quantkit.recipe.load import load_recipe, recipe_names
from quantkit.recipe.recommended import RECOMMENDED
from quantkit.recipe.schema import Recipe
from tests.golden import digests
from tests.golden.made import (
    DENOISERS,
    PIPELINES,
    make_calibration,
    make_moments,
    write_denoiser,
    write_pipeline,
)
from tests.golden.table import HERE, Table

PATH = HERE / "artefacts.json"
RENEW = "python -m tests.golden artefacts"

#: One thread, and instructions that every x86-64 processor has: sums keep one order.
ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "MKL_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "OPENBLAS_CORETYPE": "PRESCOTT",
    "OPENBLAS_NUM_THREADS": "1",
}

#: Models whose family is called otherwise.
_FAMILIES = {"sd15": "unet", "sdxl": "unet", "general-unet": "general", "general-dit": "general"}
#: Models whose files other programs read, and the recipes that are made for those.
_EXPORTED = ("sd15", "sdxl", "sd3", "flux")
_FOR_EXPORT = ("comfyui", "comfyui-int8", "gguf")
#: Of a quick run: the model with every recipe, and what is exported and calibrated.
_QUICK_MODEL = "general-dit"
_QUICK_EXPORTED = ("flux",)
_QUICK_PIPELINES = ("sd15",)
#: Of the statistics of recipes that are not tuned, but for some: merging is exact.
_BUCKETS, _MORE_BUCKETS = 4, ("fp8-token-gptq", "int4-sparse")
_RECOMMENDED = tuple(row.recipe for row in RECOMMENDED)
_TUNED = tuple(name for name in recipe_names() if load_recipe(name).tuned)
_PROMPTS = ("a red circle", "two blue squares", "a tree", "a small house")


def recipe_for(model: str, name: str) -> Recipe | None:
    """Return a bundled recipe, tuned for a model's family; None: the row would say nothing new.

    Models of the general family take every recipe, those of others the recommended ones, and those
    that are exported all tuned recipes and those for export.
    """
    family, recipe = find_family("", _FAMILIES.get(model, model)), load_recipe(name)
    exported = model in _EXPORTED and (recipe.tuned is not None or name in _FOR_EXPORT)
    return tuned(recipe, family) if family == GENERAL or exported or name in _RECOMMENDED else None


@dataclass(frozen=True)
class Made:
    """The denoisers, their statistics and what was packed of them, below one folder."""

    folder: Path
    calibrations: dict[tuple[str, int], Calibration] = field(default_factory=dict)

    def model(self, name: str) -> Path:
        """Return the folder of a row of ``DENOISERS``."""
        place = self.folder / "models" / name
        return place if place.exists() else write_denoiser(name, place)

    def calibration(self, name: str, buckets: int) -> Calibration:
        """Return its statistics."""
        key = name, buckets
        if key not in self.calibrations:
            self.calibrations[key] = make_calibration(self.model(name), buckets)
        return self.calibrations[key]

    def moments(self, name: str) -> Path:
        """Return the directory of its second moments."""
        place = self.folder / "moments" / name
        return place if place.exists() else make_moments(self.model(name), place)

    def given(self, name: str, recipe: Recipe) -> dict[str, Any]:
        """Return what a recipe needs besides the model."""
        needed: dict[str, Any] = {}
        if recipe.needs_calibration:
            more = recipe.name in (*_MORE_BUCKETS, *_TUNED)
            buckets = recipe.calibration.buckets if more else _BUCKETS
            needed["calibration"] = self.calibration(name, buckets)
        if recipe.needs_hessians:
            needed["hessians"] = self.moments(name)
        return needed

    def packed(self, name: str, generic: str, recipe: Recipe) -> Path:
        """Return the folder of a packed denoiser."""
        from quantkit.workflow.pack import pack

        place = self.folder / "packed" / name / generic
        if not place.exists():
            pack(self.model(name), output=place, recipe=recipe, **self.given(name, recipe))
        return place


def rows(made: Made, *, quick: bool = False) -> Iterator[tuple[str, str]]:
    """Yield rows: a name, and the digest of what is written now.

    Args:
        made: where, and what is there already.
        quick: without most second moments, exports and runs.
    """
    for model in DENOISERS:
        for generic in recipe_names():
            recipe = recipe_for(model, generic)
            if recipe is not None and not (quick and _is_slow(model, recipe)):
                yield from _of_recipe(made, model, generic, recipe)
    for model in _QUICK_EXPORTED if quick else _EXPORTED:
        yield from _exports(made, model)
    yield from _pipelines(made.folder, _QUICK_PIPELINES if quick else tuple(PIPELINES))


def _is_slow(model: str, recipe: Recipe) -> bool:
    return model != _QUICK_MODEL and (recipe.needs_hessians or recipe.budget is not None)


def _of_recipe(made: Made, model: str, generic: str, recipe: Recipe) -> Iterator[tuple[str, str]]:
    if recipe.budget is not None:
        recipe, digest = _optimized(made, model, recipe)
        yield f"sensitivity/{model}", digest
    if recipe.sparsity is not None:
        yield f"masks/{model}/{generic}", _masks(made, model, generic, recipe)
    for _, digest in digests.of_folder(made.packed(model, generic, recipe)):
        yield f"packed/{model}/{generic}", digest


def _optimized(made: Made, model: str, recipe: Recipe) -> tuple[Recipe, str]:
    from quantkit.calibration.statistics.layer_statistics import save_calibration
    from quantkit.workflow.optimize import optimize
    from quantkit.workflow.sensitivity import measure_sensitivity

    file = made.folder / f"{model}.calibration"
    save_calibration(made.calibration(model, _BUCKETS), file, force=False)
    found = measure_sensitivity(
        made.model(model), calibration=file, recipe=recipe, measure=0, device="cpu"
    )
    chosen = optimize(found, recipe=recipe).recipe
    return chosen, digests.of_json(found.to_json())


def _masks(made: Made, model: str, generic: str, recipe: Recipe) -> str:
    from quantkit.workflow.sparsify import sparsify

    file = made.folder / f"{model}-{generic}.masks"
    given = made.given(model, recipe)
    sparsify(made.model(model), recipe=recipe, output=file, device="cpu", **given)
    return digests.of_files(file)


def _exports(made: Made, model: str) -> Iterator[tuple[str, str]]:
    """Yield exports of the 16-bit model and of all that was packed of it, where targets hold it."""
    from quantkit.workflow.export import targets

    packed = sorted((made.folder / "packed" / model).iterdir())
    for to in targets():
        for source in (made.model(model), *packed):
            name = "16-bit" if source == made.model(model) else source.name
            digest = _exported(made, source, to, f"{model}-{name}")
            if digest is not None:
                yield f"exported/{to}/{model}/{name}", digest


def _exported(made: Made, source: Path, to: str, name: str) -> str | None:
    from quantkit.workflow.export import export

    output = made.folder / "exported" / to / f"{name}.safetensors"
    output.parent.mkdir(parents=True, exist_ok=True)
    calibration = None
    if to == "comfyui" and source.parent.name == "models":
        calibration = made.calibration(source.name, 4)
    try:
        export(source, to=to, output=output, calibration=calibration)
    except InputError:
        return None
    if output.is_dir():
        return " ".join(digest for _, digest in digests.of_folder(output))
    return digests.of_file(output)


def _pipelines(folder: Path, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield what runs of pipelines give, and packed text encoders."""
    for name in names:
        place = write_pipeline(name, folder / "pipelines" / name)
        yield f"calibration/{name}", _calibrated(place, folder / f"{name}.run")
        yield f"moments/{name}", _observed(place, folder / f"{name}.moments")
        for encoders in ("fp8", "int8", "int4"):
            yield from _encoders(place, folder / f"{name}-{encoders}", encoders)


_RUN: dict[str, Any] = {
    "calibration.buckets": 2, "calibration.steps": 3, "calibration.batch": 2
}  # fmt: skip
_SAMPLED: dict[str, Any] = {"prompts": _PROMPTS, "device": "cpu"}


def _calibrated(model: Path, output: Path) -> str:
    from quantkit.workflow.calibrate import calibrate

    calibrate(model, recipe=load_recipe("int8-token", _RUN), output=output, **_SAMPLED)
    return digests.of_files(output)


def _observed(model: Path, output: Path) -> str:
    from quantkit.workflow.hessians import calibrate_hessians

    recipe = load_recipe("int4", _RUN | {"calibration.row_share": 0.5})
    calibrate_hessians(model, recipe=recipe, output=output, **_SAMPLED)
    return digests.of_files(*sorted(output.rglob("*.safetensors")))


def _encoders(model: Path, output: Path, encoders: str) -> Iterator[tuple[str, str]]:
    from quantkit.workflow.pack import pack

    pack(model, output=output, recipe=load_recipe("fp8", {"text_encoders": encoders}))
    for component, digest in digests.of_folder(output):
        if component.startswith("text_encoder"):
            yield f"packed/{model.name}-{component}/{encoders}", digest


def rows_of_this_process(*, quick: bool) -> dict[str, str]:
    """Return the rows as libraries compute here; ``run`` takes care of the environment."""
    import torch

    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return dict(rows(Made(Path(folder)), quick=quick))


def run(*, quick: bool = False) -> dict[str, str]:
    """Return the rows of now, made in a process with ``ENVIRONMENT``.

    Args:
        quick: only those that are made in less than half a minute.
    """
    command = [sys.executable, "-m", "tests.golden", "rows", *(("--quick",) if quick else ())]
    done = subprocess.run(
        command,
        env={**os.environ, **ENVIRONMENT},
        cwd=HERE.parents[1],
        stdout=subprocess.PIPE,
        check=True,
    )
    rows: dict[str, str] = json.loads(done.stdout)
    return rows


def made_with() -> dict[str, str]:
    """Return what sums of floats depend on, besides the environment."""
    libraries = {name: version(name) for name in ("torch", "diffusers", "transformers")}
    return {"machine": platform.machine(), **libraries}


def depends_on_libraries(name: str) -> bool:
    """Return whether a row has sums of floats in it: of matrix products, or of a run."""
    generic = name.rpartition("/")[2]
    if name.startswith(("calibration/", "moments/", "sensitivity/")):
        return True
    if generic not in recipe_names():
        return False
    recipe = load_recipe(generic)
    return recipe.needs_hessians or recipe.bias_correction


def read() -> Table:
    """Return the table."""
    return Table(**json.loads(PATH.read_text(encoding="utf-8")))


def write(found: Mapping[str, str]) -> None:
    """Write the table."""
    table = {"made_with": made_with(), "rows": dict(sorted(found.items()))}
    PATH.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
