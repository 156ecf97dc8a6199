"""Models in compiled blocks, and steps that are replayed from a CUDA graph."""

# ruff: noqa: SLF001  torch's settings of its compilers are public by documentation alone

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from quantkit.errors import ModelError
from quantkit.pipelines.recorded_step import Recording, capture, run_aside

#: Classes of a UNet's blocks. Its lists hold whole levels, which would be compiled one by one.
_UNET_BLOCKS = {"ResnetBlock2D", "Transformer2DModel", "Downsample2D", "Upsample2D"}
#: Sizes of a block that are compiled; SDXL's residual blocks have twelve, dynamo takes eight.
_MOST_SIZES = 64

#: Before a capture: what is compiled, chosen or allocated at a first call is there then.
_WARM_UP = 3


def compile_blocks(model: nn.Module) -> nn.Module:
    """Return a copy, its tensors shared, in which every block is compiled.

    Raises:
        ModelError: the model has no blocks.
    """
    model = with_shared_weights(model)
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _MOST_SIZES)
    blocks = blocks_of(model)
    if not blocks:
        name = type(model).__name__
        raise ModelError(f"{name}: no list of blocks; `--compile whole` compiles it in one piece")
    for block in blocks.values():
        block.compile(fullgraph=True, dynamic=False)
    return model


def outside_blocks(model: nn.Module) -> frozenset[str]:
    """Return the modules that `compile_blocks` leaves as they are."""
    blocks = tuple(f"{name}." for name in blocks_of(model))
    return frozenset(n for n, _ in model.named_modules() if not f"{n}.".startswith(blocks))


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return a UNet's blocks, or the members of the lists that the model itself holds.

    diffusers' ``_repeated_blocks`` is empty for SD 3, PixArt and Sana.
    """
    found = {n: m for n, m in model.named_modules() if type(m).__name__ in _UNET_BLOCKS}
    lists = [(n, m) for n, m in model.named_children() if isinstance(m, nn.ModuleList)]
    return found or {f"{n}.{i}": block for n, blocks in lists for i, block in enumerate(blocks)}


@contextmanager
def compiler_settings_kept() -> Iterator[None]:
    """Undo what a library sets for all of torch.compile, so that no other contender gets it."""
    from torch._inductor import config

    before = config.get_config_copy()
    try:
        yield
    finally:
        now = config.get_config_copy()
        config.load_config({key: value for key, value in before.items() if now[key] != value})


def with_shared_weights(model: nn.Module) -> nn.Module:
    """Return a copy whose tensors are those of ``model``: it can be compiled on its own."""
    tensors = chain(model.parameters(), model.buffers())
    return deepcopy(model, {id(tensor): tensor for tensor in tensors})


def captured(step: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """Return a call that replays what ``step`` queues, so that a slow host is not measured.

    Args:
        step: reads the same memory at every call, and waits for nothing that the device computes.
        device: a GPU; on the CPU there is nothing to capture, and ``step`` is returned.
    """
    if device.type != "cuda":
        return step
    for _ in range(_WARM_UP):
        run_aside(step, device)
    return partial(_replay, capture(step, device, None), step)


def _replay(recording: Recording, _step: Callable[[], Tensor]) -> Tensor:
    """Launch what was recorded; the step is held, as the graph reads its weights and holds none."""
    recording.launch()
    return recording.output  # type: ignore[no-any-return]
