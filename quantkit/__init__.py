"""quantkit: pack diffusers pipelines to FP8 and 4:2 sparsity, validate them, load them back.

Importing this package is enough for ``DiffusionPipeline.from_pretrained`` to load a packed
directory. It imports nothing heavy: torch and diffusers come with the first call that needs them.
"""

__version__ = "0.1.0"
