"""Write directories with SDNQ in a process of its own: importing it changes torch and diffusers.

python -m tests.support.write_sdnq PIPELINE FOLDER: FOLDER/NAME is the pipeline of PIPELINE, or its
UNet, in the formats of NAME; FOLDER/NAME.COMPONENT.safetensors holds the weights that SDNQ makes of
its codes in float32.
"""

import json
import os
import sys
from pathlib import Path

SMALL = {"minimum_allowed_numel": 0, "minimum_allowed_channel_size": 0}
INTEGERS = [f"{sign}int{bits}" for bits in range(2, 9) for sign in ("", "u")]
#: Settings of UNets.
UNETS = {
    "pipeline": {"weights_dtype": "int8", "quant_conv": True},
    "svd": {"weights_dtype": "uint4", "group_size": 16, "use_svd": True, "svd_rank": 4,
            "quant_conv": True, "dequantize_fp32": False},
    "products": {"weights_dtype": "int8", "use_quantized_matmul": True, "quant_conv": True,
                 "use_quantized_matmul_conv": True},
    "tensor": {"weights_dtype": "uint8", "quant_conv": True, "group_size": -2},
    "mixed": {"weights_dtype": "uint4", "quant_conv": True, "group_size": 8},
}  # fmt: skip


def main(pipeline, folder):
    import diffusers
    import torch
    import transformers
    from sdnq import SDNQConfig

    torch.set_num_threads(1)
    for name, settings in UNETS.items():
        config = SDNQConfig(**settings, **SMALL, **(formats(pipeline) if name == "mixed" else {}))
        unet = diffusers.UNet2DConditionModel.from_pretrained(
            pipeline / "unet", torch_dtype=torch.bfloat16, quantization_config=config
        )
        if name != "pipeline":
            unet.save_pretrained(folder / name)
            read(folder / name, diffusers.UNet2DConditionModel, folder / f"{name}..safetensors")
            continue
        encoder = transformers.CLIPTextModel.from_pretrained(
            pipeline / "text_encoder", dtype=torch.float16,
            quantization_config=SDNQConfig(
                weights_dtype="uint4", group_size=16, quant_embedding=True, **SMALL
            ),
        )  # fmt: skip
        whole = diffusers.DiffusionPipeline.from_pretrained(
            pipeline, unet=unet, text_encoder=encoder
        )
        whole.save_pretrained(folder / name)
        for part, cls in (("unet", type(unet)), ("text_encoder", transformers.CLIPTextModel)):
            read(folder / name / part, cls, folder / f"{name}.{part}.safetensors")


def formats(pipeline):
    """Return a format for each attention layer, all formats in turn."""
    from safetensors import safe_open

    ends = ("to_q.weight", "to_k.weight", "to_v.weight", "conv1.weight")
    with safe_open(pipeline / "unet/diffusion_pytorch_model.safetensors", framework="pt") as file:
        names = sorted(name for name in set(file.keys()) if name.endswith(ends))
    kinds = [*INTEGERS, "float8_e4m3fn", "float8_e5m2"]
    chosen = {kind: names[i :: len(kinds)] for i, kind in enumerate(kinds)}
    assert all(chosen.values()), len(names)
    return {"modules_dtype_dict": {**chosen, "minimum_6bit": ["conv_shortcut"]}}


def read(folder, cls, answer):
    """Save the weights, as float32."""
    import torch
    from safetensors.torch import save_file
    from sdnq.dequantizer import dequantize_sdnq_model

    key = (
        "torch_dtype"
        if "_class_name" in json.loads((folder / "config.json").read_text())
        else "dtype"
    )
    # In float32, for diffusers casts SDNQ's float32 scales to the dtype that it loads in.
    model = cls.from_pretrained(folder, **{key: torch.float32})
    coded = [name for name, layer in model.named_modules() if hasattr(layer, "sdnq_dequantizer")]
    state = {
        name: value.contiguous()
        for name, value in dequantize_sdnq_model(model).state_dict().items()
    }
    save_file(state, answer, metadata={"layers": " ".join(coded)})


if __name__ == "__main__":
    os.environ["SDNQ_USE_TORCH_COMPILE"] = "0"
    # diffusers imports them where they are there, which takes longer than all else here.
    sys.modules.update(dict.fromkeys(("pandas", "peft", "scipy", "sklearn", "torchvision")))
    main(Path(sys.argv[1]), Path(sys.argv[2]))
