"""No byte beyond an operand is read: every operand ends where a page that nobody may touch begins.

A value read there need not be in any result, so that only the trap shows it. ``make sanitize``
looks at every variant and at both ends; this is the part that takes seconds.
"""

import subprocess
import sys

from quantkit.device import compilers
from tests.support.kernel_cases import need

# Rows of 20 and 36 float32 end on 16 bytes, as kernels want operands to start, but within the runs
# of 8 and 16 values that lanes take.
CHILD = """
import ctypes, mmap, sys
import torch
from tests.support.kernel_cases import gemm_case
from quantkit.device.host import library as host
from quantkit.device.ops.op import Variant
from quantkit.device.ops.table import OPS

libc = ctypes.CDLL(None, use_errno=True)
kept = []

def at_the_end(tensor):
    size = tensor.numel() * tensor.element_size()
    assert size % 16 == 0, size
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, room + mmap.PAGESIZE)
    kept.append(pages)
    first = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    assert libc.mprotect(ctypes.c_void_p(first + room), mmap.PAGESIZE, 0) == 0
    found = torch.frombuffer(pages, dtype=torch.uint8, count=size, offset=room - size)
    return found.view(tensor.dtype).view(tensor.shape).copy_(tensor)

def launch(variant, tensors, sizes):
    placed = {n: None if t is None else at_the_end(t) for n, t in tensors.items()}
    values = [
        (placed[a.name] is not None and placed[a.name].data_ptr()) or None if a.is_pointer
        else sizes[a.name] for a in variant.op.args
    ]
    kernel = host.load(variant)
    kernel.launch(values, sizes["m"], sizes.get("n", 0), sizes["k"], 1)

def launch_all(variant):
    if variant.op.name.startswith("quantize"):
        for m, k in ((4, 20), (1, 36), (8, 2068)):
            scale = torch.ones(4 if variant.op.name.endswith("static") else -(-m // 4) * 4)
            tensors = {"x": torch.randn(m, k), "smooth": torch.rand(k),
                       "scale": scale, "q": torch.empty(-(-m * k // 16) * 16, dtype=torch.uint8)}
            launch(variant, tensors, {"m": m, "k": k})
        return
    for m, n, k in ((4, 20, 96), (20, 36, 160), (36, 4, 1056)):
        case = gemm_case(variant, m, n, k, torch.Generator().manual_seed(1))
        launch(variant, {**case.tensors, "y": torch.empty(m, n)}, {"m": m, "n": n, "k": k})

for line in sys.argv[1:]:
    print(line, flush=True)
    op, *words = line.split(",")
    launch_all(Variant(OPS[op], tuple(words)))
"""
WORDS = ("e4m3fn", "e4m3fn", "token", "channel", "f32")
VARIANTS = [
    ("quantize_fp8_static", "f32", "e4m3fn", "smooth"),
    ("quantize_fp8_token", "f32", "e4m3fn", "smooth"),
    *(("gemm_fp8", *WORDS, tile) for tile in ("t1", "t4")),
    *(("gemm_fp8_sparse", *WORDS, tile) for tile in ("t2", "t4")),
]


def test_nothing_beyond_an_operand_is_touched(request):
    need(compilers.host_compiler)
    command = [sys.executable, "-c", CHILD, *map(",".join, VARIANTS)]
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=request.config.rootpath, check=False
    )
    last = (result.stdout.splitlines() or ["nothing"])[-1]
    assert result.returncode == 0, f"{last}: status {result.returncode} {result.stderr[-800:]}"
    assert len(result.stdout.splitlines()) == len(VARIANTS)
