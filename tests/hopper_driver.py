"""Launches Hopper kernels for the tests from nothing but what quantkit/device/hopper.py says."""

import ctypes

import torch

from quantkit.device.hopper import ARCHITECTURE, HopperKernel, arguments, plan_launch
from quantkit.device.nvrtc import load_nvrtc
from quantkit.resources import kernel_sources

# CUtensorMapDataType, CUtensorMapSwizzle, CUtensorMapL2promotion and CUfunction_attribute.
ELEMENTS = {"u8": 0, "f16": 6, "f32": 7, "bf16": 9}
SWIZZLES = {64: 2, 128: 3}
L2_256, MAX_DYNAMIC_SHARED = 3, 8
MAP_BYTES = 128


def compile_kernel(kernel: HopperKernel) -> bytes:
    sources = kernel_sources()
    options = [f"--gpu-architecture={ARCHITECTURE}", "-std=c++17", "-default-device"]
    options += [f"-I{sources / 'include'}", *kernel.defines]
    text = (sources / kernel.source).read_text(encoding="utf-8")
    cubin, _ = load_nvrtc().compile(text, kernel.source, options)
    return cubin


class Hopper:
    """A kernel, loaded."""

    def __init__(self, kernel):
        self.cuda, self.kernel = ctypes.CDLL("libcuda.so.1"), kernel
        torch.zeros(1, device="cuda")  # makes the context
        module, self.function = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.cuda.cuModuleLoadData(ctypes.byref(module), compile_kernel(kernel)))
        name = kernel.symbol.encode()
        self.check(self.cuda.cuModuleGetFunction(ctypes.byref(self.function), module, name))
        attribute = (self.function, MAX_DYNAMIC_SHARED, kernel.shared_bytes)
        self.check(self.cuda.cuFuncSetAttribute(*attribute))

    def check(self, status):
        if status:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{self.kernel.symbol}: {text.value!r}")

    def __call__(self, tensors, m, n, k):
        """Run on tensors by argument name (without _map); bias may be None."""
        units = torch.cuda.get_device_properties(0).multi_processor_count
        launch = plan_launch(self.kernel, m, n, k, units)
        values = {
            name: ctypes.c_void_p(None if t is None else t.data_ptr())
            for name, t in tensors.items()
        }
        for name, spec in zip(("x_map", "w_map", "y_map"), launch.maps, strict=True):
            values[name] = self.encode(spec, tensors[name[0]])
        numbers = zip(("m", "n", "k", "group"), launch.numbers, strict=True)
        values |= {name: ctypes.c_int32(number) for name, number in numbers}
        slots = [values[name] for name in arguments(self.kernel)]
        params = (ctypes.c_void_p * len(slots))(*(ctypes.addressof(slot) for slot in slots))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        shape = (*launch.grid, launch.block, 1, 1, launch.shared_bytes)
        self.check(self.cuda.cuLaunchKernel(self.function, *shape, stream, params, None))
        torch.cuda.synchronize()

    def encode(self, spec, tensor):
        content = (ctypes.c_uint64 * (MAP_BYTES // 8))()
        if spec is None:
            return content
        room = (ctypes.c_uint8 * (MAP_BYTES + 64))()
        place = -(-ctypes.addressof(room) // 64) * 64
        sizes = (ctypes.c_uint64 * 2)(spec.columns, spec.rows)
        pitch = (ctypes.c_uint64 * 1)(spec.row_bytes)
        box = (ctypes.c_uint32 * 2)(spec.box_columns, spec.box_rows)
        ones = (ctypes.c_uint32 * 2)(1, 1)
        head = (ctypes.c_void_p(place), ELEMENTS[spec.element], 2)
        modes = (0, SWIZZLES[spec.swizzle], L2_256, 0)
        address = ctypes.c_void_p(tensor.data_ptr())
        encode = self.cuda.cuTensorMapEncodeTiled
        self.check(encode(*head, address, sizes, pitch, box, ones, *modes))
        ctypes.memmove(content, place, MAP_BYTES)
        return content
