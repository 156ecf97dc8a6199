"""Run the host kernels under AddressSanitizer and UndefinedBehaviorSanitizer: ``make sanitize``.

The tests of the compiled core, then every operation, every layout of the products, and every tile
and word of each family, at the shapes of the conformance tests, with the bytes around each operand
forbidden. What is computed is not judged here. The interpreter is no sanitized program, so the
library is loaded before it; kernels are compiled with $CXX into a cache of their own.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

SANITIZERS = "-fsanitize=address,undefined -fno-sanitize-recover=all -g1"
CHILD = "QUANTKIT_SANITIZED"
CORE = ("tests/packing/test_native.py", "tests/checkpoint/test_code_rules.py")
_ATTENTION = ((1, 1, 64), (37, 101, 96), (33, 128, 160), (130, 43, 64))
_NORMS = ((1, 1, 64), (65, 3, 96), (130, 2, 320), (7, 2, 2560))
_SUMS = ((1, 1, 64), (19, 21, 160), (67, 130, 288))
_WINDOWS = ((1, 1, 72), (7, 1, 1224), (19, 1, 2880))
#: first word of an operation's name -> sizes of the samples that it draws itself
SAMPLED = {
    **dict.fromkeys(("attention", "head", "value", "project", "joint", "stream"), _ATTENTION),
    **dict.fromkeys(("group", "observe"), _NORMS),
}
#: the same by the last word, which counts first
SAMPLED_LAST = {"residual": _SUMS, "windows": _WINDOWS}


def main():
    if os.environ.get(CHILD) == "1":
        prepare()
        run_core()
        run_all()
        return 0
    compiler = os.environ.get("CXX", "g++")
    # ASan looks for what throws when it is loaded, and PyTorch throws.
    libraries = [library_of(compiler, name) for name in ("libasan.so", "libstdc++.so.6")]
    with tempfile.TemporaryDirectory(prefix="quantkit-") as cache:
        environment = {
            **os.environ,
            CHILD: "1",
            "CXX": f"{compiler} {SANITIZERS}",
            "LD_PRELOAD": " ".join(libraries),
            # Kernels are threads of their own stacks, and Python keeps its memory to the end.
            "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
            # Around small objects of Python's, too.
            "PYTHONMALLOC": "malloc",
            "XDG_CACHE_HOME": cache,
        }
        command = [sys.executable, "-m", "tests.device.sanitize"]
        return subprocess.run(command, env=environment, check=False).returncode


def library_of(compiler, name):
    command = [*shlex.split(compiler), f"-print-file-name={name}"]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    assert Path(path).is_absolute(), f"{compiler} has no {name}; install g++"
    return path


def prepare():
    from quantkit.device.host import compiling

    # The compiler is no sanitized program either.
    del os.environ["LD_PRELOAD"]
    # Checks are put in before anything is optimised, and compiling is nearly all of the time.
    compiling._FLAGS = tuple("-O1" if flag == "-O3" else flag for flag in compiling._FLAGS)


def run_core():
    """Run the tests of the core of packing and verifying."""
    import pytest

    assert (
        pytest.main(["-q", "-x", "-s", "-p", "no:cacheprovider", "-m", "not exhaustive", *CORE])
        == 0
    )


def run_all():
    from quantkit.device.archs import HOST_LAYOUTS
    from quantkit.device.host import library as host
    from quantkit.device.ops.table import OPS
    from tests.support.kernel_cases import covering_variants

    launches, first = 0, {op.family: op for op in reversed(OPS.values())}
    for layout in HOST_LAYOUTS:
        # Gates, pictures and quantizing know no fragments: one layout is enough.
        kind = "" if layout == "gfx12" else "gemm"
        for op in (op for op in OPS.values() if op.name.startswith(kind)):
            variants = covering_variants(op, pairs=False, layout=layout)
            # The rest of a family shares its source, and heads of every size their loop.
            whole = op is first[op.family] and layout == "gfx12"
            variants = variants[:: 4 if op.words("QK_HEAD") else 1] if whole else variants[:1]
            host.prebuild(variants, layout)
            launches += sum(launch_all(variant, layout) for variant in variants)
    sys.stdout.write(f"sanitizers: {launches} launches of host kernels, nothing found\n")


def launch_all(variant, layout):
    """Launch a variant at all its shapes; return how many."""
    import torch

    from tests.support.conv_cases import conv_case, conv_shapes
    from tests.support.gated_cases import gated_case
    from tests.support.int4_cases import twin_of, with_int4
    from tests.support.kernel_cases import gemm_case, shapes_of

    generator = torch.Generator().manual_seed(1)
    kind, last = variant.op.name.partition("_")[0], variant.op.name.rpartition("_")[2]
    sampled = SAMPLED_LAST.get(last) or SAMPLED.get(kind)
    if sampled:
        return sum(sample(variant, layout, size, generator) for size in sampled)
    if kind == "quantize":
        rows = [(1, 1), (7, 17), (9, 1025), (3, 520), (2, 2056), (1, 16400)]
        for m, k in rows:
            quantize(variant, layout, m, k)
        return len(rows)
    if variant.op.name == "gemm_w16":
        from tests.device.test_weight_only import SHAPES, case_of

        words = variant.word("QK_W_FORMAT"), variant.word("QK_IO")
        for shape in SHAPES:
            case_of(*words, shape, generator).run(layout)
        return len(SHAPES)
    int4 = variant.word("QK_W_FORMAT") == "int4"
    drawn = twin_of(variant) if int4 else variant
    if kind == "conv":
        cases = [conv_case(drawn, shape, generator) for shape in conv_shapes(variant)[:6]]
    else:
        make = gated_case if kind == "geglu" else gemm_case
        # The largest grids have no edge that the others lack.
        shapes = [shape for shape in shapes_of(variant) if shape[0] * shape[1] < 2**16]
        cases = [make(drawn, m, n, k, generator, bias=m % 2 == 0) for m, n, k in shapes]
    for case in cases:
        (with_int4(variant, case, generator)[1] if int4 else case).run(layout)
    return len(cases)


def sample(variant, layout, sizes, generator):
    """Launch the operation's own sample once; return 1."""
    import torch

    from tests.support.kernel_cases import launch

    op = variant.op
    operands, options = op.sample(variant, sizes, generator)
    numbers = op.integers(op.check(op, operands, options).sizes)
    written = (torch.empty(s, dtype=dtype) for s, dtype in op.outputs(operands, options))
    names = (a.name for a in op.args if a.is_pointer)
    tensors = dict(zip(names, (*operands, *written), strict=True))
    launch(variant, layout, tensors, numbers)
    return 1


def quantize(variant, layout, m, k):
    import torch

    from tests.support.kernel_cases import DTYPES, launch

    tensors = {
        "x": torch.randn(m, k).to(DTYPES[variant.word("QK_IO")]),
        "smooth": torch.rand(k) if variant.word("QK_SMOOTH") else None,
        "scale": torch.ones(1) if variant.op.name.endswith("static") else torch.empty(m),
        "q": torch.empty(m, k, dtype=torch.uint8),
    }
    launch(variant, layout, tensors, {"m": m, "k": k})


if __name__ == "__main__":
    sys.exit(main())
