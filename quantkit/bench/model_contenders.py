"""The ways to run a denoiser that the model benchmark compares."""

from dataclasses import dataclass

from quantkit.bench.packing import PackedVariant


@dataclass(frozen=True)
class ModelContender:
    """One way to run a denoiser."""

    name: str
    compiled: bool
    #: None: as it is, or as torchao makes it
    variant: PackedVariant | None = None
    torchao: bool = False
    #: under ``fast_sums``
    fast: bool = False
    #: largest ||difference|| / ||output|| from float16, of those that are not packed
    limit: float = 0.05


#: FP8's own error over all layers of a random model is not ours to judge.
_COARSE = 0.5

MODEL_CONTENDERS: dict[str, ModelContender] = {
    contender.name: contender
    for contender in (
        ModelContender("f16", compiled=False),
        ModelContender("f16-compiled", compiled=True),
        ModelContender("torchao-compiled", compiled=True, torchao=True, limit=_COARSE),
        *(
            ModelContender(f"{name}{suffix}", compiled, variant)
            for name, variant in (
                ("fp8", PackedVariant()),
                ("sparse", PackedVariant(sparse=True)),
                ("fp8-static", PackedVariant(static=True)),
                ("sparse-static", PackedVariant(sparse=True, static=True)),
                ("fp8-linear", PackedVariant(linear_only=True)),
                ("sparse-linear", PackedVariant(sparse=True, linear_only=True)),
            )
            for suffix, compiled in (("", False), ("-compiled", True))
        ),
        *(
            ModelContender(f"{name}-fast-compiled", compiled=True, variant=variant, fast=True)
            for name, variant in (
                ("fp8-static", PackedVariant(static=True)),
                ("sparse-static", PackedVariant(sparse=True, static=True)),
            )
        ),
    )
}
