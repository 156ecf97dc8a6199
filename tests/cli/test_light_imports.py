"""Packing and verifying import no torch where the compiled core does all of the work."""

import json
import os
import subprocess
import sys

import pytest

from quantkit.device import compilers
from tests.support.kernel_cases import need

#: Runs a command and says what it has imported.
CODE = """
import sys
from quantkit.cli import main
try:
    main(sys.argv[1:])
finally:
    found = {"torch", "numpy", "diffusers", "transformers", "safetensors.torch"} & set(sys.modules)
    print("imported:", *sorted(found), file=sys.stderr)
"""
RECIPES = {
    "fp8": "fp8",
    "sparse": "{name: sparse, weight: {format: e4m3fn, granularity: channel, observer: amax}, "
    'activation: {mode: token}, sparsity: {pattern: "2:4", method: magnitude}}',
    "int4": "{name: int4, weight: {format: int4, granularity: channel, observer: amax}, "
    "activation: {mode: token}, data_free: true}",
    "tensor": "{name: tensor, weight: {format: int8, granularity: tensor, observer: amax}, "
    "activation: {mode: token}, data_free: true}",
}


def run(*arguments, **environment):
    """Return what a command says it imported, after it has succeeded."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, *map(str, arguments), "--quiet"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("imported:"))
    return line.removeprefix("imported:").split()


def recipe_file(folder, name):
    text = RECIPES[name]
    if not text.startswith("{"):
        return text
    path = folder / f"{name}.yaml"
    path.write_text(text)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_packing_and_verifying_import_no_torch(pipeline_dir, tmp_path, name):
    need(compilers.host_compiler)
    packed, recipe = tmp_path / "packed", recipe_file(tmp_path, name)
    assert run("pack", pipeline_dir, "-r", recipe, "-o", packed) == []
    assert run("verify", packed) == []


@pytest.mark.slow
def test_without_a_compiler_torch_writes_the_same(pipeline_dir, tmp_path):
    need(compilers.host_compiler)
    by_core, by_torch = tmp_path / "core", tmp_path / "torch"
    assert run("pack", pipeline_dir, "-o", by_core) == []
    # What was compiled before is found by its compiler.
    nowhere = {"CXX": str(tmp_path / "no-compiler")}
    assert "torch" in run("pack", pipeline_dir, "-o", by_torch, **nowhere)
    assert "torch" in run("verify", by_core, **nowhere)
    files = sorted(path.relative_to(by_core) for path in by_core.rglob("*") if path.is_file())
    assert files == sorted(p.relative_to(by_torch) for p in by_torch.rglob("*") if p.is_file())
    for file in files:
        assert (by_core / file).read_bytes() == (by_torch / file).read_bytes(), file
    assert json.loads((by_core / "unet" / "config.json").read_text())["quantization_config"]
