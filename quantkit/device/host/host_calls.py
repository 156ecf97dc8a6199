"""Calls of an operation on the host: tiles, plain memory, and running to the end."""

import torch
from torch import Tensor

from quantkit.device import log
from quantkit.device.backends import Backend
from quantkit.device.host import library as host
from quantkit.device.ops.op import Op, Operands, Output, Problem, Variant
from quantkit.device.tile_choice import choose_tile

#: GFLOP/s of one core per tile of the menu, whole tiles of a dense GEMM with K = 512 (Zen 5, g++
#: 12, docs/notes/kernels.md); only the ratios matter. Its tiles beyond these are made for gfx12.
_TILE_SPEED = (75.0, 55.0, 26.0)


def run(op: Op, problem: Problem, operands: Operands, outputs: tuple[Output, ...]) -> list[Tensor]:
    """Run the kernel of an operation to its end, and return what it writes.

    Args:
        op: what is computed.
        problem: of these operands.
        operands: the arguments that the kernel reads, in launch order.
        outputs: what it writes, none of them empty.
    """
    numbers, threads = op.integers(problem.sizes), torch.get_num_threads()
    kernel = host.load(Variant(op, _with_tile(op, problem.words, numbers, threads)))
    made = [torch.empty(shape, dtype=dtype) for shape, dtype in outputs]
    # The name keeps the copies alive until the kernel has returned.
    plain = [None if t is None else _plain(t) for t in (*operands, *made)]
    passed = (numbers[a.name] for a in op.args if not a.is_pointer)
    sizes = (numbers["m"], numbers.get("n", 0), numbers["k"])
    kernel.launch((*map(_address, plain), *passed), *sizes, threads)
    log.note(op.name, kernel.variant.name, Backend.HOST)
    return made


def _with_tile(
    op: Op, words: tuple[str, ...], numbers: dict[str, int], threads: int
) -> tuple[str, ...]:
    """Return the variant's words, with the best tile of the menu where there are several."""
    if not op.tiled:
        return words
    rows = op.rows_per_column * numbers["n"]
    speed = _TILE_SPEED[: len(op.words("QK_TILE"))]
    return (*words, choose_tile(numbers["m"], rows, threads, speed))


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.contiguous()
    # A view can start anywhere, and weights mapped from a file often start on 8 bytes.
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
