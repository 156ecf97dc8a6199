"""torch's dtypes by their names in a safetensors header. Only this module imports torch for it."""

import torch

from quantkit.numerics.formats import FORMATS

#: Of packed tensors.
PACKED_DTYPES: dict[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "U8": torch.uint8,
    **{f.safetensors_dtype: f.torch_dtype for f in FORMATS.values() if f.codes_per_byte == 1},
}

#: Of floats of 16 bits and more.
FLOAT_DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}

#: Of what is checked for NaN and infinity.
NUMBER_DTYPES = {
    **FLOAT_DTYPES,
    **{fmt.safetensors_dtype: fmt.torch_dtype for fmt in FORMATS.values() if not fmt.is_integer},
}
