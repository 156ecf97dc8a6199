"""The Python API: every job of the command line, typed, from the names quantkit exports."""

import ast
import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import quantkit
import quantkit.workflow
from quantkit.bench.models.model_result import ModelBenchSettings
from quantkit.cli import options_of
from quantkit.cli import quantkit as command
from quantkit.cli.recovery_options import take_training
from quantkit.errors import InputError, OutputError, QuantkitError, RecipeError
from quantkit.inference.layers.layer_summary import packed_layers
from quantkit.workflow.bench import bench_kernels, bench_model
from quantkit.workflow.compare_images import compare_images
from quantkit.workflow.kernels import build_kernels

ROOT = Path(__file__).parents[2]
NAMES = sorted(set(quantkit.__all__) - {"__version__"})


# What there is.


def imported_for_types():
    """Return name -> module of what type checkers are told that ``quantkit`` exports."""
    tree = ast.parse((ROOT / "quantkit" / "__init__.py").read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.If))
    return {n.names[0].asname: n.module for n in body if isinstance(n, ast.ImportFrom)}


def test_type_checkers_see_what_python_does():
    homes = {name: f"quantkit.{home}" for name, home in quantkit._HOMES.items()}
    assert imported_for_types() == homes
    assert set(quantkit.__all__) == {*homes, "__version__"} == set(dir(quantkit))


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_there(name):
    found = getattr(quantkit, name)
    assert found.__name__ == name
    assert found.__module__.startswith("quantkit.")


def test_other_names_are_not():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = quantkit.nonsense


def test_importing_quantkit_imports_nothing_heavy():
    heavy = {"torch", "numpy", "diffusers", "transformers", "pydantic", "click", "typing", "ast"}
    code = f"""
import sys
before = set(sys.modules)
import quantkit
dir(quantkit)
new = set(sys.modules) - before
print(*sorted(new & {heavy}), len(new))
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(out.stdout) <= 5, out.stdout  # quantkit, _version, inference.loading and its hook


def workflow_functions():
    for module in pkgutil.iter_modules(quantkit.workflow.__path__, "quantkit.workflow."):
        for name, found in vars(importlib.import_module(module.name)).items():
            own = getattr(found, "__module__", None) == module.name
            if inspect.isfunction(found) and own and not name.startswith("_"):
                yield pytest.param(found, id=f"{module.name.removeprefix('quantkit.')}.{name}")


#: Told something, or made for another module of the workflow: no jobs of users.
INNER = {
    "as_model", "as_recipe", "as_calibration", "as_hessians", "as_masks", "as_path", "as_prompts",
    "opened", "name_of", "surgeon_of", "with_prompts", "recipe_with", "masks_to_json",
    "refuse_foreign", "settings_of", "require_packed", "refuse_unknown", "moments_of",
    "baseline_of", "limits_of",
    "files_of", "usual_threads", "refuse_search", "build", "adapt", "search_ssim",
    "predicted_errors", "is_packed", "packed_source", "dense_source", "planned_source",
    "quantized_source", "fitted", "refuse_other_formats", "refuse_rest", "logged", "watched",
}  # fmt: skip


def exported_functions():
    for name in NAMES:
        if (
            inspect.isfunction(found := getattr(quantkit, name))
            and "workflow" not in found.__module__
        ):
            yield pytest.param(found, id=name)


@pytest.mark.parametrize("function", [*workflow_functions(), *exported_functions()])
def test_functions_are_typed_and_their_options_are_named(function):
    signature = inspect.signature(function)
    assert signature.return_annotation is not inspect.Signature.empty
    for parameter in signature.parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty, parameter.name
    if function.__name__ in INNER or not signature.parameters:
        return
    positional = [p for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert len(positional) <= 2, "options are keyword-only"
    text = inspect.getdoc(function)
    for part in ("Args:", "Returns:", "Raises:"):
        assert part in text, f"no {part}"
    missing = [name for name in signature.parameters if f"    {name}: " not in text]
    assert not missing, "parameters that the docstring does not explain"


def results():
    for module in pkgutil.iter_modules(quantkit.workflow.__path__, "quantkit.workflow."):
        for name, found in vars(importlib.import_module(module.name)).items():
            if is_dataclass(found) and found.__module__ == module.name and name[0] != "_":
                yield pytest.param(found, id=name)


@pytest.mark.parametrize("found", results())
def test_values_are_frozen(found):
    assert found.__dataclass_params__.frozen


def test_every_command_is_a_function_of_the_workflow():
    """No command works by itself: each module of the command line imports the workflow's."""
    printing = {"__init__", "bench_tables", "command", "console", "estimate_tables",
                "evaluation_options", "help_command", "kernel_tables", "library_noise",
                "mask_table", "options",
                "preview", "rate_column", "recovery_options", "report_tables",
                "standard_streams", "stopping"}  # fmt: skip
    modules = {path.stem: path.read_text() for path in (ROOT / "quantkit/cli").glob("*.py")}
    idle = [name for name in set(modules) - printing if "quantkit.workflow." not in modules[name]]
    assert not idle


# Messages.


def library():
    for path in sorted([*ROOT.glob("quantkit/**/*.py"), *ROOT.glob("eval/**/*.py")]):
        if "cli" not in path.parts and "train" not in path.stem:
            yield path.relative_to(ROOT)


def raised(path):
    """Yield the texts of what a module raises, and the fields that are named."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            texts = [c.value for c in ast.walk(node.exc) if isinstance(c, ast.Constant)]
            named = [k.value for k in node.exc.keywords if k.arg == "fields"]
            yield [t for t in texts if isinstance(t, str)], named


def test_errors_name_arguments_and_not_options():
    errors = [(path, *found) for path in library() for found in raised(path)]
    options = [(p, t) for p, texts, _ in errors for t in texts if " --" in f" {t}"]
    assert not options
    known = {p.name for c in every_command(command) for p in c.params}
    tuples = [(p, n) for p, _, named in errors for n in named if isinstance(n, ast.Tuple)]
    fields = {(p, e.value) for p, n in tuples for e in n.elts if isinstance(e, ast.Constant)}
    unknown = {(path, field) for path, field in fields if field not in known}
    # Keys of recipes, which --set takes.
    keys = set(quantkit.load_recipe("fp8").model_dump())
    assert not {(path, f) for path, f in unknown if str(f).split(".")[0] not in keys}


def every_command(group):
    for found in group.commands.values():
        yield from every_command(found) if isinstance(found, click.Group) else (found,)


def test_the_command_line_says_which_options_an_error_means():
    assert (
        options_of(QuantkitError("x", fields=("calibration", "list_all")))
        == " (--calibration, --all)"
    )
    assert options_of(RecipeError("x", fields=("weight.format",))) == " (--set weight.format=...)"
    assert (
        options_of(QuantkitError("x", fields=("noise_floor",)))
        == " (--noise-floor/--no-noise-floor)"
    )
    assert options_of(QuantkitError("x", fields=("nothing",))) == ""
    assert options_of(OutputError("x")) == ""


def test_errors_keep_their_fields_between_processes():
    import pickle

    error = pickle.loads(pickle.dumps(RecipeError("x: y; z", fields=("recipe",))))
    assert (str(error), error.fields) == ("x: y; z", ("recipe",))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"calibration.steps": 0}, "calibration.steps: .* found 0"),
        ({"calibration.batch": "many"}, "calibration.batch: .* found 'many'"),
        ({"sparsity.method": "lottery"}, "sparsity.method: .* found 'lottery'"),
    ],
)
def test_settings_out_of_range_are_refused(settings, words):
    with pytest.raises(RecipeError, match=words):
        quantkit.load_recipe("fp8-buckets", settings)


def test_an_unknown_way_to_recover_is_refused(pipeline_dir):
    with pytest.raises(InputError, match="method 'magic': unknown, expected one of distill, obs"):
        quantkit.recover(pipeline_dir, output="x", method="magic")


#: Commands, their functions, and the settings that their options are fields of.
JOBS: dict[str, tuple[Callable[..., Any], tuple[type, ...]]] = {
    "calibrate model": (quantkit.calibrate, ()),
    "calibrate hessian": (quantkit.calibrate_hessians, ()),
    "calibrate sensitivity": (quantkit.measure_sensitivity, ()),
    "calibrate optimize": (quantkit.optimize, ()),
    "sparsify": (quantkit.sparsify, ()),
    "recover": (quantkit.recover, (quantkit.Training,)),
    "pack": (quantkit.pack, ()),
    "export": (quantkit.export, ()),
    "import": (quantkit.import_file, ()),
    "run": (quantkit.run, (quantkit.EvaluationSettings,)),
    "eval report": (quantkit.evaluate, (quantkit.EvaluationSettings,)),
    "eval compare": (quantkit.compare, (quantkit.EvaluationSettings,)),
    "eval images": (compare_images, ()),
    "kernels build": (build_kernels, ()),
    "kernels bench": (bench_kernels, ()),
    "bench model": (bench_model, (ModelBenchSettings,)),
}
#: Options that the command line itself reads, and arguments that no option sets.
READ_HERE = {"quiet", "as_json", "gates", "preview", "estimate"}
PASSED_ON = {"progress", "tell", "commands", "settings", "training", "limits", "watch", "without",
             "trajectories", "scratch"}  # fmt: skip


@pytest.mark.parametrize("name", JOBS)
def test_options_of_a_command_are_the_arguments_of_its_function(name):
    group, *rest = name.split(" ")
    found = command.commands[group]
    for word in rest:
        assert isinstance(found, click.Group)
        found = found.commands[word]
    job, settings = JOBS[name]
    arguments = {*inspect.signature(job).parameters, *(f.name for s in settings for f in fields(s))}
    options = {p.name for p in found.params if p.expose_value}
    assert options - READ_HERE - PASSED_ON == arguments - PASSED_ON


def test_training_has_an_option_for_every_setting():
    options = {p.name for p in command.commands["recover"].params}
    names = {field.name for field in fields(quantkit.Training)}
    assert names - {"trajectories"} <= options
    given = dict.fromkeys((*names, "other"))
    assert take_training(given) == quantkit.Training()
    assert given == {"other": None}


# The same work.


def files_of(folder):
    return {p.relative_to(folder): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def run(name, *arguments):
    result = CliRunner().invoke(command.commands[name], [*map(str, arguments), "-q", "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def masked_by(method):
    return quantkit.load_recipe("fp8", {"sparsity.method": method})


@pytest.fixture(scope="module")
def masks(pipeline_dir, tmp_path_factory):
    """Masks of the command line."""
    path = tmp_path_factory.mktemp("masks") / "masks.safetensors"
    return path, run("sparsify", pipeline_dir, "--set", "sparsity.method=magnitude", "-o", path)


def test_sparsify_writes_what_the_command_writes(pipeline_dir, masks, tmp_path):
    found = quantkit.sparsify(pipeline_dir, recipe=masked_by("magnitude"), output=tmp_path / "mine")
    assert (tmp_path / "mine").read_bytes() == masks[0].read_bytes()
    assert found.to_json() | {"written": None} == masks[1] | {"written": None}
    assert repr(found).startswith("2:4 by magnitude: 71 of 7")


@pytest.mark.parametrize("recipe", ["fp8", "fp8-sparse"])
def test_pack_writes_what_the_command_writes(pipeline_dir, masks, recipe, tmp_path):
    model = quantkit.open_model(pipeline_dir)
    chosen = (
        quantkit.sparsify(model, recipe=masked_by("magnitude")).masks if recipe != "fp8" else None
    )
    stored = ("--masks", masks[0]) if recipe != "fp8" else ()
    told = run("pack", pipeline_dir, "-r", recipe, *stored, "-o", tmp_path / "theirs")
    found = quantkit.pack(
        model, recipe=quantkit.load_recipe(recipe), masks=chosen, output=tmp_path / "mine"
    )
    assert files_of(tmp_path / "mine") == files_of(tmp_path / "theirs")
    about = {"written": True, **json.loads(json.dumps(found.to_json()))}
    assert about | {"output": ""} == told | {"output": ""}
    assert "layers packed" in repr(found)


def test_from_a_model_to_its_report(pipeline_dir, tmp_path):
    """What docs/guides/python.md shows, on the tiny pipeline."""
    model = quantkit.open_model(pipeline_dir)
    steps = []
    calibrated = quantkit.calibrate(
        model,
        prompts=("a red fox", "two dogs"),
        recipe=quantkit.load_recipe("fp8", {"calibration.steps": 4, "calibration.batch": 2}),
        device="cpu",
        progress=lambda step, done, total: steps.append((step, done, total)),
    )
    assert calibrated.to_json()["prompts"] == 2
    assert any(step == "denoising" and done == total for step, done, total in steps)
    sparse = quantkit.sparsify(model, recipe=masked_by("wanda"), calibration=calibrated.calibration)
    packed = quantkit.pack(
        model,
        recipe="fp8-static",
        calibration=calibrated.calibration,
        masks=sparse.masks,
        output=tmp_path / "packed",
    )
    assert packed.masked == len(sparse.masks.layers["unet"])
    assert quantkit.verify(tmp_path / "packed").breaches == ()
    inspected = quantkit.inspect(tmp_path / "packed")
    assert len(inspected.layers) == sum(packed.by_scheme().values())
    pipe = quantkit.load_pipeline(tmp_path / "packed")
    assert len(packed_layers(pipe)) == len(inspected.layers)
    report = quantkit.evaluate(
        model,
        tmp_path / "packed",
        settings=quantkit.EvaluationSettings(
            prompts=("a tree", "a boat"), steps=2, batch=2, without=("lpips", "clip"),
            noise_floor=False,
        ),
        device="cpu",
    )  # fmt: skip
    assert report.to_json()["run"]["prompts"] == ["a tree", "a boat"]
    assert repr(report) == f"{report.title}\n{report.verdict}"
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]


def test_an_output_that_exists_ends_the_work_before_it_begins(pipeline_dir, tmp_path):
    for work in (quantkit.pack, quantkit.calibrate, quantkit.sparsify):
        with pytest.raises(OutputError, match="exists already") as caught:
            work(pipeline_dir, output=tmp_path)
        assert caught.value.fields == ("force",)
