"""The ways to run a denoiser that the model benchmark compares."""

from dataclasses import dataclass, replace

from quantkit.bench.models.packed_copies import PackedVariant


@dataclass(frozen=True)
class ModelContender:
    """One way to run a denoiser."""

    name: str
    compiled: bool
    #: None: as it is, or as torchao makes it
    variant: PackedVariant | None = None
    #: fp8 or int8: what torchao makes of its linear layers
    torchao: str = ""
    #: under ``fast_sums``
    fast: bool = False
    #: largest ||difference|| / ||output|| from float16, of those that are not packed
    limit: float = 0.05
    #: format of queries and keys of its attention; empty: attention is torch's
    attention: str = ""
    #: its steps are replayed (``quantkit.replay``); not compiled
    replayed: bool = False

    def with_attention(self, qk_format: str) -> "ModelContender":
        """Return the same with its attention on codes, under a name that says so."""
        return replace(self, name=f"{self.name}-{qk_format}-attention", attention=qk_format)


#: FP8's and int8's own error over all layers of a random model is not ours to judge.
_COARSE = 0.5

#: Suffix, compiled, replayed.
_WAYS = (("", False, False), ("-replayed", False, True), ("-compiled", True, False))

MODEL_CONTENDERS: dict[str, ModelContender] = {
    contender.name: contender
    for contender in (
        ModelContender("f16", compiled=False),
        ModelContender("f16-replayed", compiled=False, replayed=True),
        ModelContender("f16-compiled", compiled=True),
        *(
            ModelContender(f"torchao{suffix}-compiled", compiled=True, torchao=kind, limit=_COARSE)
            for kind, suffix in (("fp8", ""), ("int8", "-int8"))
        ),
        *(
            ModelContender(f"{name}{suffix}", compiled, variant, replayed=replayed)
            for name, variant in (
                ("fp8", PackedVariant()),
                ("sparse", PackedVariant(sparse=True)),
                ("fp8-static", PackedVariant(static=True)),
                ("sparse-static", PackedVariant(sparse=True, static=True)),
                ("fp8-linear", PackedVariant(linear_only=True)),
                ("sparse-linear", PackedVariant(sparse=True, linear_only=True)),
                ("int8", PackedVariant(weights="int8")),
                ("int8-static", PackedVariant(weights="int8", static=True)),
                ("w4a8", PackedVariant(weights="int4")),
                ("w4a8-static", PackedVariant(weights="int4", static=True)),
            )
            for suffix, compiled, replayed in _WAYS
        ),
        *(
            ModelContender(f"{name}-fast{suffix}", compiled, variant, fast=True, replayed=replayed)
            for name, variant in (
                ("fp8-static", PackedVariant(static=True)),
                ("sparse-static", PackedVariant(sparse=True, static=True)),
            )
            for suffix, compiled, replayed in _WAYS
            if suffix
        ),
    )
}

#: What is estimated where nothing is named.
ESTIMATED = (
    "f16-compiled", "f16-replayed", "fp8-static-replayed", "sparse-static-replayed",
    "int8-static-replayed", "fp8-static-compiled", "f16", "fp8-static",
)  # fmt: skip
assert set(ESTIMATED) <= set(MODEL_CONTENDERS), "no such contender"
