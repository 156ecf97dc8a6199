"""Short names for the quantization of components besides denoisers: one literal row each."""

from typing import Any

#: Key of a recipe -> what its short names stand for.
COMPONENT_FORMATS: dict[str, dict[str, dict[str, Any]]] = {
    # A prompt is encoded once per picture: only FP8 quantizes inputs, whose steps grow with the
    # number, because some channels of language models are a thousand times larger than the rest.
    "text_encoders": {
        "fp8": {"weight": {"format": "e4m3fn", "observer": "mse"}, "activation": {"mode": "token"}},
        "int8": {"weight": {"format": "int8", "observer": "mse"}, "activation": {"mode": "none"}},
        "int4": {"weight": {"format": "int4", "observer": "mse"}, "activation": {"mode": "none"}},
        "int8-gptq": {
            "weight": {"format": "int8", "observer": "mse", "rounding": "gptq"},
            "activation": {"mode": "none"},
        },
        "int4-gptq": {
            "weight": {"format": "int4", "observer": "mse", "rounding": "gptq"},
            "activation": {"mode": "none"},
        },
    },
    # Norms keep channels alike, and a scale per window follows what they leave.
    "vae": {
        "int8": {
            "weight": {"format": "int8", "observer": "mse"},
            "activation": {"mode": "token"},
            "data_free": True,
        },
    },
}
