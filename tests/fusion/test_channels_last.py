"""Pictures with channels last, on the host: the calls that go, and answers that stay."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from quantkit.device import compilers
from quantkit.device.torch_operators import OPERATORS, OVERLOADS
from quantkit.fusion.checking import WrongKernelError, run_checked
from quantkit.fusion.patterns import picture_operators
from quantkit.fusion.patterns.channels_last import laid_out, reads_pixels, with_picture_calls
from quantkit.fusion.patterns.picture_operators import cloned_rows, padded_rows
from quantkit.fusion.simplify import simplify
from quantkit.fusion.trace import trace
from tests.support.kernel_cases import need
from tests.support.packed import packed_module
from tests.support.picture_schemes import CODED, TOKEN

LAST = torch.channels_last
C, GROUPS = 32, 4


@pytest.fixture(scope="module", autouse=True)
def compiler():
    need(compilers.host_compiler)


def picture(*shape, dtype=torch.float16, seed=1):
    shape = shape or (2, C, 6, 5)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def convolution(scheme=CODED["int8"], channels=C, outputs=C, **options):
    torch.manual_seed(0)
    options = {"padding": 1} | options
    conv = nn.Conv2d(channels, outputs, options.pop("kernel", 3), **options)
    return packed_module(conv.half(), scheme).half()


def norm(channels=C, groups=GROUPS, **options):
    torch.manual_seed(2)
    made = nn.GroupNorm(groups, channels, **options).half()
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made


def laid(step, *inputs):
    """Names of what is called with channels last, its answer, and the step's."""
    with torch.no_grad():
        program, eager = trace(lambda: step(*inputs), inputs)
        program = simplify(program)
        assert reads_pixels(program)
        pictured = with_picture_calls(program)
        same = run_checked(program, pictured, inputs)
        torch.testing.assert_close(same, eager, rtol=0, atol=0, equal_nan=True)
        found, answer = laid_out(pictured, inputs)
        again = found.run(inputs)
    torch.testing.assert_close(again, answer, rtol=0, atol=0, equal_nan=True)
    assert (answer.shape, answer.dtype) == (eager.shape, eager.dtype)
    assert answer.is_contiguous() == eager.is_contiguous()
    names = [call.operator.overloadpacket.__name__ for call in found.calls if call.fresh]
    return names, answer, eager


def near(found, expected, share=0.02):
    """Codes may be the next ones: what is normed is rounded once, not twice."""
    size = float(expected.float().abs().max())
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=share * size)


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("shape", [(2, C, 6, 5), (1, C, 7, 3), (1, C, 1, 1)])
def test_a_norm_its_activation_and_the_embedding_end_in_codes(name, shape):
    conv, first, group_norm = convolution(CODED[name]), convolution(), norm()
    embedding = picture(shape[0], C, seed=5)

    def step(x, embedding):
        x = first(x) + embedding[:, :, None, None]
        return conv(functional.silu(group_norm(x)))

    names, found, expected = laid(step, picture(*shape), embedding)
    kind = "int8" if name == "int8" else "fp8"
    assert not {"add", "silu", "native_group_norm"} & {*names}
    assert f"group_norm_codes_{kind}" in names
    assert len([n for n in names if n != "clone"]) == 5
    near(found, expected, 0.06)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_norm_without_numbers_in_any_dtype(dtype):
    conv, group_norm = convolution().to(dtype), norm(affine=False)
    names, found, expected = laid(lambda x: conv(group_norm(x)), picture(dtype=dtype))
    assert "group_norm_codes_int8" in names
    near(found, expected)


def test_a_norm_without_codes_keeps_its_activation():
    conv, group_norm, last = convolution(), norm(), convolution(TOKEN)
    names, found, expected = laid(lambda x: last(functional.silu(group_norm(conv(x)))), picture())
    assert "group_norm" in names
    assert not {"silu", "native_group_norm"} & {*names}
    near(found, expected)


def test_rows_of_a_linear_layer_are_pixels():
    conv, group_norm = convolution(), norm()
    linear = packed_module(nn.Linear(C, 48).half(), CODED["int8"]).half()

    def step(x):
        y = group_norm(conv(x))
        return linear(y.permute(0, 2, 3, 1).reshape(2, 30, C))

    names, found, expected = laid(step, picture())
    assert names[-3:] == ["group_partials", "group_norm_codes_int8", "gemm_int8"]
    near(found, expected)


def test_a_residual_is_added_by_the_convolution():
    conv, first = convolution(), convolution()

    def step(x):
        h = first(x)
        return first(h + conv(h))

    names, found, expected = laid(step, picture())
    assert "conv_int8_residual" in names
    assert not {"add"} & {*names}
    near(found, expected)


@pytest.mark.parametrize("channels", [32, 20])
def test_parts_of_a_convolution_have_their_bias(channels):
    """As gated convolutions have them: the last part may be smaller."""
    conv, deep = convolution(), nn.Conv2d(C, C, 3, padding=1, groups=C).half()

    def step(x):
        first, *others = deep(conv(x)).split(channels, 1)
        return conv(torch.cat([functional.silu(first), *others], 1))

    names, found, expected = laid(step, picture())
    whole = channels == C
    assert names.count("add") == (1 if whole else 2)
    near(found, expected)


def test_an_unsplit_convolution_keeps_its_bias():
    conv, deep = convolution(), nn.Conv2d(C, C, 3, padding=1).half()

    def step(x):
        y = deep(conv(x))
        return conv(y[:, :16].repeat(1, 2, 1, 1) + y)

    names, found, expected = laid(step, picture())
    assert names.count("add") == 1
    near(found, expected)


@pytest.mark.parametrize("shape", [(2, 30, C), (3, 1, C)])
def test_a_copy_before_a_batched_product_keeps_its_rows(shape):
    """Linear attention: heads (B, 4, 8, N) of rows of tokens."""
    conv = convolution()

    def step(x, rows):
        heads = rows.transpose(1, 2).unflatten(1, (4, 8)).relu().float()
        scores = heads @ heads.transpose(-1, -2)
        return conv(x), scores @ heads

    x, rows = picture(), picture(*shape)
    program = simplify(trace(lambda: step(x, rows), (x, rows))[0])
    operators = [call.operator for call in with_picture_calls(program).calls]
    assert operators.count(cloned_rows) == (1 if shape[1] > 1 else 0)
    found, answer = laid_out(with_picture_calls(program), (x, rows))
    torch.testing.assert_close(answer, step(x, rows), rtol=1e-6, atol=1e-6)
    multiplied = [c.arguments for c in found.calls if c.operator is torch.ops.aten.bmm.default]
    assert [found.layouts[right].strides[-2] for _, right in multiplied] == [C // 4, 1]


@pytest.mark.parametrize("sides", [(0, 0, 0, 1), (0, 0, 1, 0), (1, 1, 0, 1), (0, 1)])
def test_values_are_padded_where_a_product_reads_them(sides):
    """Linear attention sums its weights with a row of ones."""
    conv = convolution()

    def step(x, rows):
        heads = rows.transpose(1, 2).unflatten(1, (4, 8)).float()
        padded = functional.pad(heads, sides, value=1.0)
        return conv(x), padded @ padded.transpose(-1, -2)

    x, rows = picture(), picture(2, 30, C)
    program = simplify(trace(lambda: step(x, rows), (x, rows))[0])
    pictured = with_picture_calls(program)
    found = [call.operator is padded_rows for call in pictured.calls]
    assert sum(found) == (sides == (0, 0, 0, 1))
    _, answer = laid_out(pictured, (x, rows))
    torch.testing.assert_close(answer, step(x, rows), rtol=1e-6, atol=1e-6)


def test_copies_of_rows_are_the_same_matrices():
    x = picture(2, 3, 5, 7)
    torch.testing.assert_close(cloned_rows(x), x, rtol=0, atol=0)
    assert cloned_rows(x).stride() == (105, 35, 1, 5)
    padded = padded_rows(x, 2, 0.5)
    torch.testing.assert_close(padded, functional.pad(x, (0, 0, 0, 2), value=0.5), rtol=0, atol=0)
    assert padded.stride() == (147, 49, 1, 7)


def test_pixels_are_repeated_as_codes_may_be():
    conv = convolution()

    def step(x):
        return conv(functional.interpolate(conv(x), scale_factor=2.0, mode="nearest"))

    names, found, expected = laid(step, picture())
    assert "upsample_nearest2d" not in names
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_skip_connections_are_joined_as_pixels():
    conv, wide = convolution(), convolution(channels=2 * C)

    def step(x):
        h = conv(x)
        return wide(torch.cat([h, conv(h)], dim=1))

    names, found, expected = laid(step, picture())
    assert names.count("clone") == 2  # the step's input, and its answer
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_first_and_last_convolutions_keep_the_layout_of_the_step():
    first, last = nn.Conv2d(4, C, 3, padding=1).half(), nn.Conv2d(C, 4, 3, padding=1).half()
    conv = convolution()
    names, found, expected = laid(lambda x: last(conv(first(x))), picture(2, 4, 6, 5))
    assert names.count("convolution") == 2
    near(found, expected)


OTHERS = {
    "read twice": lambda x, conv, normed: conv(normed(x)) + normed(x),
    "other axes": lambda x, conv, normed: conv(normed(x.flatten(2)).unflatten(2, x.shape[2:])),
    "no multiple of 8": lambda x, conv, normed: conv(
        functional.pad(functional.group_norm(x[:, :20], 4), (0, 0, 0, 0, 0, 12))
    ),
    "mixed dtypes": lambda x, conv, normed: conv(
        functional.group_norm(x.float(), 4, torch.ones(C), None).half()
    ),
    "a view in between": lambda x, conv, normed: conv(normed(x).transpose(2, 3)),
    "a view before silu": lambda x, conv, normed: conv(
        functional.silu(normed(x).flatten(2)).unflatten(2, x.shape[2:])
    ),
    "a turned sum": lambda x, conv, normed: conv(normed((x + x[:, :, :1, :1]).transpose(2, 3))),
    "pixels are added": lambda x, conv, normed: (
        conv(x).permute(0, 2, 3, 1) + x.permute(0, 2, 3, 1)
    ).permute(0, 3, 1, 2),
    "a turned product": lambda x, conv, normed: conv(x).transpose(2, 3) + x.transpose(2, 3),
    "weighted sum": lambda x, conv, normed: torch.add(x, conv(x), alpha=2),
    "a number is added": lambda x, conv, normed: conv(normed(x + 1.5)),
    "a picture of one": lambda x, conv, normed: conv(x) + x[:1],
    "product read twice": lambda x, conv, normed: torch.mul(*(conv(x),) * 2) + x,
    "upsampled by three": lambda x, conv, _: conv(functional.interpolate(x, scale_factor=3.0)),
    "joined rows": lambda x, conv, normed: conv(torch.cat([x, x], dim=2)),
    "joined firsts": lambda x, conv, normed: conv(torch.cat([conv(x), x], dim=1)[:, :C]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_graphs_answer_as_they_did(name):
    conv, first, group_norm = convolution(), convolution(), norm()
    _, found, expected = laid(lambda x: OTHERS[name](first(x), conv, group_norm), picture())
    near(found, expected)


def test_no_number_is_a_codes_nan():
    conv, group_norm, x = convolution(CODED["e4m3fn"]), norm(), picture()
    x[1, 3, 2, 2] = float("nan")
    _, found, expected = laid(lambda x: conv(group_norm(x)), x)
    assert torch.equal(found.isnan(), expected.isnan())
    assert found[1].isnan().any()
    assert not found[0].isnan().any()


def test_steps_without_packed_convolutions_have_no_pixels():
    conv, x = nn.Conv2d(C, C, 3).half(), picture()
    with torch.no_grad():
        program, _ = trace(lambda: conv(x), [x])
    assert not reads_pixels(program)


def test_a_wrong_norm_is_refused(monkeypatch):
    right = OPERATORS["group_norm"]
    wrong = {**OPERATORS, "group_norm": lambda *given: right(*given) * 1.1}
    monkeypatch.setattr(picture_operators, "OPERATORS", wrong)
    conv, group_norm = convolution(), norm()
    with pytest.raises(WrongKernelError):
        laid(lambda x: group_norm(conv(x)), picture())


def test_codes_of_the_step_are_those_of_the_operation():
    """The norm's codes against torch's norm in float64: the nearest, or the next one at a tie."""
    conv, group_norm, x = convolution(), norm(), picture()
    with torch.no_grad():
        program, _ = trace(lambda: conv(functional.silu(group_norm(x))), [x])
        found, _ = laid_out(with_picture_calls(simplify(program)), [x])
        (call,) = [c for c in found.calls if "group_norm_codes" in c.name]
        tensors = {**found.constants, found.inputs[0]: x}
        for one in found.calls[: found.calls.index(call) + 1]:
            tensors |= one.make(tensors)
    codes = tensors[call.results[0]].view(torch.int8).reshape(2, 6, 5, C).permute(0, 3, 1, 2)
    wide = [p.double() for p in (x, group_norm.weight, group_norm.bias)]
    normed = functional.group_norm(wide[0], GROUPS, wide[1], wide[2], group_norm.eps)
    exact = functional.silu(normed)
    scaled = (exact / conv.part("input_scale").double()).clamp(-127, 127)
    assert (codes - scaled).abs().max() <= 0.5 + 1e-3 * scaled.abs().max()
    assert OVERLOADS["group_norm_codes_int8"] is call.operator
