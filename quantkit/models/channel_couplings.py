"""Where input channels may change places: layers whose inputs are the outputs of known others.

Nothing is computed when channels move: the rows of the producers' weights and biases move, and the
columns of the consumers' weights likewise. So whatever lies between must treat channels alike.
Left out are the convolutions of residual blocks, between which a GroupNorm leaves its 3 to 5
channels a group together, where nothing was gained on the demo; Sana's feed-forward, whose middle
is a depthwise convolution; and whatever reads or writes the residual stream, which all share.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from quantkit.models.layers import Layer
from quantkit.models.source import Component
from quantkit.models.source_tensors import source_tensors


@dataclass(frozen=True)
class Rule:
    """One way in which modules of diffusers hang together; names are below a common module."""

    #: the first is always there, the others in some models; their outputs move alike
    producers: tuple[str, ...]
    #: likewise; their inputs move alike
    consumers: tuple[str, ...]
    #: outputs of a producer for each input of a consumer; twos are a value and its gate, as halves
    copies: tuple[int, ...] = (1,)
    #: channels stay in their attention head
    in_heads: bool = False
    #: layers whose outputs a consumer reads before the producers', and after them
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    #: what else may be below the module; with anything more it is not what the rule is for
    beside: tuple[str, ...] = ()


_ATTENTION = ("to_q", "to_k", "norm_q", "norm_k")
_ADDED = ("add_q_proj", "add_k_proj", "norm_added_q", "norm_added_k")
_SINGLE = ("norm.linear", *(f"attn.{name}" for name in _ATTENTION))

RULES = (
    # FeedForward: GELU and its kin in one piece, GEGLU and SwiGLU as value and gate.
    Rule(("net.0.proj",), ("net.2",), copies=(1, 2)),
    # Attention mixes tokens, never the channels of values. Joint attention reads the values of both
    # streams with one softmax and parts its output by tokens again.
    Rule(
        ("to_v", "add_v_proj"),
        ("to_out.0", "to_add_out"),
        in_heads=True,
        beside=(*_ATTENTION, *_ADDED),
    ),
    # FLUX's single blocks: proj_out reads the attention's output and then the GELU's.
    Rule(("proj_mlp",), ("proj_out",), before=("attn.to_v",), beside=_SINGLE),
    Rule(("attn.to_v",), ("proj_out",), in_heads=True, after=("proj_mlp",), beside=_SINGLE),
)


@dataclass(frozen=True)
class Coupling:
    """Layers of one model that a rule joins."""

    producers: tuple[Layer, ...]
    consumers: tuple[Layer, ...]
    #: channels that move
    channels: int
    #: how many of them stay together: all, or the width of a head
    block: int
    #: the first column of the consumers that moves
    start: int


def find_couplings(
    component: Component, layers: Mapping[str, Layer], heads: Mapping[str, int]
) -> tuple[Coupling, ...]:
    """Return what may be permuted, in the order of the files.

    Modules that a rule fits in part, by name or shape, are left out.

    Args:
        component: the denoiser.
        layers: all of it, by module path.
        heads: of each attention module.
    """
    names = sorted(source_tensors(component))
    found: list[Coupling] = []
    for path in layers:
        for rule in RULES:
            prefix = path.removesuffix(rule.producers[0])
            if prefix.endswith(".") and path != prefix:
                found += _couple(rule, prefix, layers, heads, names)
    return tuple(found)


def _couple(
    rule: Rule, prefix: str, layers: Mapping[str, Layer], heads: Mapping[str, int], names: list[str]
) -> Iterator[Coupling]:
    def of(parts: tuple[str, ...]) -> tuple[Layer, ...]:
        return tuple(layers[prefix + part] for part in parts if prefix + part in layers)

    producers, consumers, before, after = map(
        of, (rule.producers, rule.consumers, rule.before, rule.after)
    )
    known = (*rule.producers, *rule.consumers, *rule.before, *rule.after, *rule.beside)
    if prefix + rule.consumers[0] not in layers or _has_strangers(names, prefix, known):
        return
    start = sum(layer.n for layer in before)
    channels = consumers[0].channels - start - sum(layer.n for layer in after)
    block = channels
    if rule.in_heads:
        count = heads.get((prefix + rule.producers[0]).rpartition(".")[0], 0)
        if not count or channels % count:
            return
        block = channels // count
    fits = (
        channels > 0
        and len(before) + len(after) == len(rule.before) + len(rule.after)
        and all(layer.kind == "linear" for layer in (*producers, *consumers))
        and all(layer.n in [copies * channels for copies in rule.copies] for layer in producers)
        and all(layer.channels == consumers[0].channels for layer in consumers)
    )
    if fits:
        yield Coupling(producers, consumers, channels, block, start)


def _has_strangers(names: list[str], prefix: str, known: tuple[str, ...]) -> bool:
    allowed = {f"{prefix}{part}.{kind}" for part in known for kind in ("weight", "bias")}
    return any(name.startswith(prefix) and name not in allowed for name in names)
