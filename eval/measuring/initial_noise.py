"""The same noise for pipelines of every dtype."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode


@contextmanager
def one_noise(pipe: Any) -> Iterator[None]:
    """Draw the noise of a diffusers pipeline in float32, whatever its dtype, and round it.

    torch draws other numbers in 16 bit from the same seed: FP16 and BF16 runs of one prompt would
    be two different pictures (SSIM 0.48 on the demo), and so would those of a CPU and a GPU.
    """
    with ExitStack() as stack:
        # Only where noise is drawn: the mode costs every torch call inside it time.
        for owner, name in ((pipe, "prepare_latents"), (getattr(pipe, "scheduler", None), "step")):
            if hasattr(owner, name):
                stack.enter_context(patch.object(owner, name, _rounding(getattr(owner, name))))
        yield


def _rounding(method: Callable[..., Any]) -> Callable[..., Any]:
    # Pipelines look at the signature of a scheduler's step, which wraps() hands on.
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _SinglePrecisionNoise():
            return method(*args, **kwargs)

    return call


class _SinglePrecisionNoise(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        dtype = kwargs.get("dtype")
        if func is not torch.randn or dtype not in (torch.float16, torch.bfloat16):
            return func(*args, **kwargs)
        return func(*args, **{**kwargs, "dtype": torch.float32}).to(dtype)
