"""Kernels that the tests of the loader launch on the stand-in, and a call of the smallest."""

import torch

from quantkit.device import cache
from quantkit.device.aot.codeobject import Resources
from quantkit.device.aot.manifest import Manifest, describe_kernel, write_manifest
from quantkit.device.gpu import objects
from quantkit.device.gpu.gpu_calls import Call
from quantkit.device.ops.op import Variant
from quantkit.device.ops.table import OPS

GEMMS = [OPS["gemm_fp8"], OPS["gemm_fp8_sparse"]]
SMALL = Variant(OPS["quantize_fp8_token"], ("f32", "e4m3fn", ""))
GEMM = Variant(OPS["gemm_fp8"], ("e4m3fn", "e4m3fn", "token", "channel", "f16", "t2"))


def quantize(device, x=None):
    x = torch.randn(5, 48) if x is None else x
    m, k = x.shape
    outputs = [((m,), torch.float32), ((m, k), torch.uint8)]
    return Call(device, SMALL, {"m": m, "k": k}, outputs, [1])(x, None)


def prebuilt(hip, folder, *, target="gfx1201", sources=None):
    """Write a folder like ``kernels build``, of the stand-in's objects."""
    folder.mkdir(parents=True)
    hip.provide(SMALL)
    found = objects.read_object(hip.device().driver, target, SMALL)
    path = folder / f"{SMALL.symbol}.co"
    path.write_bytes(found.content)
    entry = describe_kernel(SMALL, path, Resources(SMALL.symbol, 1, 1, 0, 0, 0, None))
    digest = cache.device_sources_digest() if sources is None else sources
    write_manifest(Manifest(target, "clang", (), (entry,), digest), folder)
    found.path.unlink()
    objects._read_folder.cache_clear()  # it was looked at before it was whole
    hip.forget_calls()
    return path
