"""What CONTRIBUTING promises: a file adds an operation, a row adds a number format."""

import importlib.util
import json
import sys

import pytest
import torch
from safetensors.torch import load_file

from quantkit.checkpoint.verification import verify
from quantkit.device import compilers
from quantkit.device.ops.op import all_variants
from quantkit.device.ops.table import OPS
from quantkit.device.survey import survey
from quantkit.device.torch_operators import define
from quantkit.numerics import formats
from quantkit.numerics.formats import NumberFormat
from quantkit.progress import silent
from tests.device.test_conformance import check_agrees
from tests.support.kernel_cases import need
from tests.support.packing import component, expected, run, small_tensors

SOURCE = """
#include "config.h"

QK_KERNEL(QK_THREADS)
QK_SYMBOL(const qk::u8* x, qk::u8* y, int m, int k) {
  const int at = qk::block_x() * QK_THREADS + qk::thread_index();
  if (at < m * k) y[at] = x[at] ^ 0x80;
}

QK_HOST_ENTRY(QK_THREADS, 0)
"""
LAUNCH = {"negate": {"grid": ["ceil_div(m * k, 64)", "1", "1"], "block": 64, "lds": 0}}
MODULE = '''
"""Codes of -x."""

from pathlib import Path

import torch

from quantkit.device.ops.op import Argument, Axis, Budget, Op, Problem
from quantkit.device.ops.products.stored_weights import sample_codes


def negate(x, x_format):
    return x ^ 0x80


def _check(op, operands, options):
    (x,) = operands
    return Problem(options, {"m": x.shape[0], "k": x.shape[1]})


def _sample(variant, sizes, generator):
    m, _, k = sizes
    return (sample_codes((m, k), variant.words[0], generator),), variant.words


OPS = (
    Op(
        name="negate_fp8",
        family="negate",
        source=str(Path(__file__).with_name("negate.hip")),
        formula="y[i, j] = -x[i, j]",
        schema="(Tensor x, str x_format) -> Tensor",
        axes=(Axis("QK_X_FORMAT", ("e4m3fn", "e5m2")),),
        args=(
            Argument("x", "u8", "[m, k]"),
            Argument("y", "u8", "[m, k]", written=True),
            *(Argument("m", "i32"), Argument("k", "i32")),
        ),
        k_multiple=1,
        check=_check,
        outputs=lambda operands, options: ((tuple(operands[0].shape), torch.uint8),),
        reference=negate,
        budget=Budget(0.0, 0.0, (0.0, 0.0), "a bit changes"),
        sample=_sample,
    ),
)
'''


@pytest.fixture
def negate(tmp_path, monkeypatch):
    """The operation of a package that lies elsewhere, in the table."""
    folder = tmp_path / "toy"
    folder.mkdir()
    (folder / "negate.hip").write_text(SOURCE)
    (folder / "launch.json").write_text(json.dumps(LAUNCH))
    (folder / "negate.py").write_text(MODULE)
    spec = importlib.util.spec_from_file_location("toy_negate", folder / "negate.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "toy_negate", module)
    spec.loader.exec_module(module)
    (op,) = module.OPS
    monkeypatch.setitem(OPS, op.name, op)
    return op


def test_one_file_adds_an_operation(negate):
    need(compilers.host_compiler)
    check_agrees(negate, all_variants(negate), (5, 1, 96))
    found = {choice.op: choice.choice for choice in survey().operations if choice.device == "cpu"}
    assert found["negate_fp8"].reason == ""
    assert [variant.symbol for variant in all_variants(negate)] == [
        "negate_fp8_e4m3fn",
        "negate_fp8_e5m2",
    ]


def test_its_operator_compiles_into_one_graph(negate):
    need(compilers.host_compiler)
    operator = define(negate)
    x = torch.randint(0, 120, (4, 32), dtype=torch.uint8)
    torch.library.opcheck(operator, (x, "e4m3fn"))
    compiled = torch.compile(lambda t: operator(t, "e4m3fn") + 1, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), (x ^ 0x80) + 1)


INT6 = NumberFormat("int6", exponent_bits=0, mantissa_bits=5)


@pytest.mark.usefixtures("any_model")
def test_one_row_adds_a_number_format(tmp_path, monkeypatch):
    monkeypatch.setitem(formats.FORMATS, "int6", INT6)
    folder = component(tmp_path / "source", small_tensors())
    recipe = {"weight": {"format": "int6"}, "activation": {"mode": "none"}}
    run(folder, tmp_path / "packed", recipe)
    (file,) = (tmp_path / "packed").glob("*.safetensors")
    found, wanted = load_file(file), expected(small_tensors()["a.fc.weight"], INT6, "channel")
    assert INT6.max == 31
    assert torch.equal(found["a.fc.weight"], wanted["weight"])
    assert torch.equal(found["a.fc.weight_scale"], wanted["weight_scale"])
    assert int(found["a.fc.weight"].abs().max()) == 31
    verify(tmp_path / "packed", progress=silent)
