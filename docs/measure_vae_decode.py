"""How long a packed VAE decodes, and what memory it takes, on a CUDA or HIP device.

``python docs/measure_vae_decode.py [SIDE]``: an AutoencoderKL of SDXL's shape, random weights in
bfloat16, one picture of SIDE x SIDE (default 1024): torch as it is, torch with channels last, and
packed in int8. Milliseconds are the median of ten decodes; memory is torch's peak.
"""

import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import diffusers
import torch
from torch import Tensor

import quantkit

SIDE = int(sys.argv[1]) if len(sys.argv) > 1 else 1024
SDXL: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "latent_channels": 4,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
}


def load(path: Path) -> Any:
    """Return a VAE on the device, packed or not."""
    vae = diffusers.AutoencoderKL.from_pretrained(path, torch_dtype=torch.bfloat16)
    return vae.to("cuda").eval()


def timed(decode: Callable[[Tensor], Any], latents: Tensor, runs: int = 10) -> tuple[float, float]:
    """Return median milliseconds of a decode, and the peak in GiB."""
    for _ in range(3):
        decode(latents)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    found = []
    for _ in range(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        decode(latents)
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end))
    return statistics.median(found), torch.cuda.max_memory_allocated() / 2**30


@torch.no_grad()
def main() -> None:
    """Print a line for each way to decode."""
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    with tempfile.TemporaryDirectory() as name:
        source, packed = Path(name, "vae"), Path(name, "packed")
        diffusers.AutoencoderKL(**SDXL).to(torch.bfloat16).save_pretrained(source)
        quantkit.pack(source, output=packed, recipe=quantkit.load_recipe("int8", {"vae": "int8"}))
        latents = torch.randn(1, 4, SIDE // 8, SIDE // 8, device="cuda", dtype=torch.bfloat16)
        for words, path, layout in (
            ("torch", source, torch.contiguous_format),
            ("torch, channels last", source, torch.channels_last),
            ("int8", packed, torch.contiguous_format),
        ):
            vae = load(path).to(memory_format=layout)
            ms, peak = timed(vae.decode, latents)
            click.echo(f"{words:22s} {ms:8.2f} ms  {peak:6.3f} GiB")
            del vae
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
