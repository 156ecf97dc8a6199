"""quantkit: pack diffusers pipelines to FP8 and 4:2 sparsity, validate them, load them back.

Importing this package is enough for ``DiffusionPipeline.from_pretrained`` to load a packed
directory. It imports nothing heavy: torch and diffusers come with the first call that needs them.
"""

__version__ = "0.1.0"

__all__ = ["fast_sums", "load_pipeline"]

# After the version, which the loaders read when diffusers is imported already.
from quantkit.inference import hook as _hook

TYPE_CHECKING = False  # the typing module takes longer to import than all of this
if TYPE_CHECKING:
    from quantkit.device.backends import fast_sums as fast_sums
    from quantkit.inference.loading import load_pipeline as load_pipeline

_hook.install()


def __getattr__(name: str) -> object:
    """Return ``load_pipeline`` or ``fast_sums``, importing what they need only now."""
    if name == "fast_sums":
        from quantkit.device.backends import fast_sums

        return fast_sums
    if name == "load_pipeline":
        from quantkit.inference.loading import load_pipeline

        return load_pipeline
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
