"""Import messages of other libraries that users cannot act on, by their exact words.

Only these lines are suppressed; everything else that those libraries log is shown.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

#: logger -> how the lines begin that it is not to print
NOISE = {
    # Of checkpoints in torchao's format, where an older or newer torchao is installed.
    "diffusers.quantizers.torchao.torchao_quantizer": (
        "Unable to import `torchao` Tensor objects",
    ),
    # An nvcc without a GPU, as where kernels are compiled for another machine.
    "torch.utils.cpp_extension": ("No CUDA runtime is found, using CUDA_HOME",),
    # torchao of another torch: its compiled parts stay unused, quantkit has its own.
    "torchao": ("Skipping import of cpp extensions",),
}
#: Of modules of these, deprecations between their versions are not the user's to act on.
_LIBRARIES = r"(accelerate|diffusers|huggingface_hub|peft|torchao|transformers)(\.|$)"


class _Begins(logging.Filter):
    def __init__(self, beginnings: tuple[str, ...]) -> None:
        super().__init__()
        self.beginnings = beginnings

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self.beginnings)


@contextmanager
def without_noise() -> Iterator[None]:
    """Suppress the lines of NOISE, and deprecations inside those libraries."""
    filters = [(logging.getLogger(name), _Begins(lines)) for name, lines in NOISE.items()]
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):
            warnings.filterwarnings("ignore", category=category, module=_LIBRARIES)
        for logger, held_back in filters:
            logger.addFilter(held_back)
        try:
            yield
        finally:
            for logger, held_back in filters:
                logger.removeFilter(held_back)
