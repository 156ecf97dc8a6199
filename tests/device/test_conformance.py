"""Every row of the table alike: what an operation gives where it is called, against its reference.

Tiles, tails and layouts have tests of their own (test_kernels, test_conv, test_geglu).
"""

import re

import pytest
import torch

from quantkit.device import compilers, log
from quantkit.device.backends import Backend, use
from quantkit.device.ops import call as execute
from quantkit.device.ops.table import OPS
from quantkit.device.torch_operators import OVERLOADS
from quantkit.errors import KernelError, ShapeError
from tests.support.kernel_cases import covering_variants, need
from tests.support.sampling import one_of_each

SIZES = ((1, 3, 64), (5, 7, 96), (37, 70, 288), (130, 45, 1152))


@pytest.fixture(autouse=True)
def _host_compiler():
    need(compilers.host_compiler)


def each(found):
    return found if isinstance(found, tuple) else (found,)


def check_agrees(op, variants, sizes):
    """Call a kernel and the reference with the same operands."""
    generator = torch.Generator().manual_seed(sum(sizes))
    for variant in variants:
        operands, options = op.sample(variant, sizes, generator)
        with log.record() as seen:
            found = each(execute.call(op, *operands, *options))
        with use(Backend.REFERENCE):
            right = each(execute.call(op, *operands, *options))
        assert {(name, where) for name, _, where in seen.calls} == {(op.name, Backend.HOST)}
        promised = op.outputs(operands, options)
        assert [(tuple(t.shape), t.dtype) for t in found] == list(promised)
        for mine, wanted in zip(found, right, strict=True):
            near(op, mine, wanted)


def near(op, found, wanted):
    exact = op.budget.nmse == 0 and op.family != "geglu"
    if exact or found.dtype is torch.int32:
        assert torch.equal(found.nan_to_num(-1), wanted.nan_to_num(-1))
    elif found.dtype is torch.uint8:
        # Sums in another order move a value across the boundary between two codes.
        assert float((found != wanted).float().mean()) < 0.02
    else:
        eps = torch.finfo(found.dtype).eps
        size = wanted.float().square().mean().sqrt()
        # A float16 has so many neighbours that some probability of every call moves to the next.
        moved = 5e-4 if op.family == "attention_f16" else 1e-4
        assert float((found.float() - wanted.float()).abs().max() / size) < 8 * eps + moved


#: Of each family.
FIRST = {op.family: op for op in reversed(OPS.values())}.values()


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_the_kernel_agrees_with_the_reference(op):
    """In two variants of a family's first; the rest has its source, and other tests its tiles."""
    first = op in FIRST
    for sizes in SIZES if first else SIZES[2:3]:
        check_agrees(op, covering_variants(op, pairs=False)[: 1 + first], sizes)


@pytest.mark.exhaustive
@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_every_word_agrees_with_the_reference(op):
    for sizes in SIZES:
        check_agrees(op, covering_variants(op, pairs=False), sizes)


@pytest.mark.parametrize(
    "op", one_of_each(OPS.values(), lambda op: op.family), ids=lambda op: op.name
)
def test_the_operator_keeps_torchs_contract(op):
    variant = covering_variants(op, pairs=False)[0]
    operands, options = op.sample(variant, SIZES[1], torch.Generator().manual_seed(1))
    torch.library.opcheck(OVERLOADS[op.name], (*operands, *map(plain, options)))


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_the_table_says_the_shapes_of_all_operands(op):
    """A manifest of compiled kernels hands them on, to launchers without PyTorch."""
    variant = covering_variants(op, pairs=False)[0]
    operands, options = op.sample(variant, SIZES[3], torch.Generator().manual_seed(1))
    head = {"QK_HEAD": int(word[1:]) // 16 if (word := variant.word("QK_HEAD")) else 0}
    known = head | op.integers(op.check(op, operands, options).sizes)
    read = [a for a in op.args if a.is_pointer and not a.written]
    made = [shape for shape, _ in op.outputs(operands, options)]
    written = [a for a in op.args if a.written]
    given = [(a, tuple(t.shape)) for a, t in zip(read, operands, strict=True) if t is not None]
    for argument, shape in (*given, *zip(written, made, strict=True)):
        assert shape in alternatives(argument.shape, known), argument


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_operands_of_other_sizes_are_refused(op):
    variant = covering_variants(op, pairs=False)[0]
    operands, options = op.sample(variant, SIZES[3], torch.Generator().manual_seed(1))
    for index, axis in fixed_sizes(op, operands):
        tensor = operands[index]
        for size in {tensor.shape[axis] - 1, tensor.shape[axis] + 1} - {0}:
            shape = (*tensor.shape[:axis], size, *tensor.shape[axis + 1 :])
            changed = (*operands[:index], tensor.new_zeros(shape), *operands[index + 1 :])
            with pytest.raises((KernelError, ShapeError)):
                op.check(op, changed, options)


#: Operation, which of its options, and a value out of range.
OUT_OF_RANGE = [
    *(("head_codes_fp8", column, value) for column in (0, 1) for value in (-8, 4, 1 << 20)),
    *(("attention_fp8", 2, head_size) for head_size in (-8, 0, 4, 24)),
]


@pytest.mark.parametrize(("name", "index", "value"), OUT_OF_RANGE)
def test_options_out_of_range_are_refused(name, index, value):
    variant = covering_variants(OPS[name], pairs=False)[0]
    operands, options = OPS[name].sample(variant, SIZES[3], torch.Generator().manual_seed(1))
    changed = (*options[:index], value, *options[index + 1 :])
    with pytest.raises(ShapeError):
        OPS[name].check(OPS[name], operands, changed)


@pytest.mark.parametrize("change", [lambda x: x[0], lambda x: x[None]], ids=["3", "5"])
def test_pictures_have_four_dimensions(change):
    op = OPS["conv_fp8"]
    variant = covering_variants(op, pairs=False)[0]
    (x, *others), options = op.sample(variant, SIZES[3], torch.Generator().manual_seed(1))
    with pytest.raises(ShapeError, match=r"conv_fp8: x is .* expected uint8 codes of shape"):
        op.check(op, (change(x), *others), options)


def fixed_sizes(op, operands):
    """Yield (index, axis) of operands whose size another operand decides."""
    for index, tensor in enumerate(operands):
        for axis in range(0 if tensor is None else tensor.ndim):
            # A second stream has as many rows as it has.
            free = (op.args[index].name, axis) == ("second", 1)
            rows = index == 0 and axis < tensor.ndim - 1
            alone = index == 0 and op.name.startswith(("quantize_", "observe_"))
            if not (free or rows or alone):
                yield index, axis


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_operands_of_two_devices_are_refused(op):
    variant = covering_variants(op, pairs=False)[0]
    operands, options = op.sample(variant, SIZES[3], torch.Generator().manual_seed(1))
    for index, tensor in enumerate(operands[1:], 1):
        if tensor is not None:
            moved = (*operands[:index], tensor.to("meta"), *operands[index + 1 :])
            with pytest.raises(KernelError, match=r" is on (meta, x is on cpu|cpu, .* meta)"):
                op.check(op, moved, options)


def alternatives(text, known):
    """Return the shapes that an argument may have: ``[1] or [2 n]``, of these integers."""
    shapes = [re.sub(r"(\d) (?=[a-z])", r"\1 * ", x) for x in re.findall(r"\[(.*?)\]", text)]
    names = {"ceil_div": lambda a, b: -(-a // b), **known}
    return [tuple(map(int, eval(f"({shape},)", {}, names))) for shape in shapes]


def plain(option):
    return list(option) if isinstance(option, tuple) else option


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_no_tokens_have_no_results(op):
    variant = covering_variants(op, pairs=False)[0]
    (x, *operands), options = op.sample(variant, SIZES[1], torch.Generator().manual_seed(1))
    empty = [t if t is None or len(t) != len(x) or t is x else t[:0] for t in operands]
    found = each(execute.call(op, x[:0], *empty, *options))
    assert all(t.numel() == 0 for t in found)
