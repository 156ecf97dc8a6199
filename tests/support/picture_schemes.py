"""Schemes of layers that read codes of pictures as they are, and of others."""

from quantkit.numerics.formats import E4M3FN, INT8
from quantkit.numerics.granularity import PerChannel
from quantkit.numerics.masks import TWO_OF_FOUR
from quantkit.numerics.scheme import Activation, Scheme

_STATIC = Activation.STATIC
CODED = {
    "e4m3fn": Scheme(E4M3FN, PerChannel(), None, _STATIC),
    "int8": Scheme(INT8, PerChannel(), None, _STATIC),
    "sparse": Scheme(E4M3FN, PerChannel(), TWO_OF_FOUR, _STATIC),
    "smooth": Scheme(E4M3FN, PerChannel(), None, _STATIC, smooth=True),
}
TOKEN = Scheme(E4M3FN, PerChannel(), None, Activation.TOKEN)
