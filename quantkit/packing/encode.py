"""Encoding a weight of 16 or 32 bit to packed tensors, with the compiled core or PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantkit.packing import native
from quantkit.packing.weight_plan import Encoded

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from torch import Tensor

    from quantkit.checkpoint.tensor_layout import Sink
    from quantkit.checkpoint.weight_reader import SourceTensor
    from quantkit.device.host.hashing import Parts
    from quantkit.packing.weight_plan import WeightPlan
    from quantkit.storage.tensorfile import TensorInfo


def needs_torch(plan: WeightPlan, info: TensorInfo) -> bool:
    """Tell whether PyTorch packs a weight: it is not imported for the others."""
    return plan.blocks is not None or not native.takes(plan, info)


def encode_weight(
    plan: WeightPlan, source: SourceTensor, sinks: Mapping[str, Sink]
) -> Generator[Parts, None, Encoded]:
    """Write the packed tensors of one layer.

    Args:
        plan: its treatment.
        source: its dense weight.
        sinks: by part: weight, weight_scale, and what the scheme asks for besides.

    Yields:
        what is to be hashed before the next step.

    Returns:
        what the header says of it, and what its bias should gain.

    Raises:
        NonFiniteError: NaN or Inf in the weight, after smoothing, or asked for by its moments.
        ShapeError: a mask that does not fit.
    """
    if needs_torch(plan, source.info):
        from quantkit.packing.torch_encode import Encoder, copy_blocks

        if plan.blocks is not None:
            return copy_blocks(plan, plan.blocks, source, sinks)
        return Encoder(plan, source).run(sinks)
    return Encoded((yield from native.encode(plan, source, sinks)), None)


def tensor_scale(plan: WeightPlan, source: SourceTensor) -> Tensor:
    """Return the one scale that a weight would get, float32 []; smoothing is left out."""
    from quantkit.packing.torch_encode import Encoder

    return Encoder(plan, source).tensor_scale()
