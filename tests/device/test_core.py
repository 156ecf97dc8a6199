"""What the compiled core hashes and looks at, against hashlib and PyTorch."""

import hashlib
import random

import ml_dtypes
import numpy as np
import pytest

from quantkit.checkpoint import weight_reader
from quantkit.device.host import checker, core, hashing

#: Around a block of 64 bytes, and around the place of the length in the last one.
SIZES = [0, 1, 55, 56, 57, 63, 64, 65, 119, 120, 127, 128, 129, 1000, 4096, 10007]


@pytest.mark.parametrize("streams", [1, 2, 3, 5])
@pytest.mark.usefixtures("either_core")
def test_digests_are_those_of_hashlib(streams):
    chosen = random.Random(streams)
    pairs = [(hashing.new_digest(), hashlib.sha256()) for _ in range(streams)]
    for _ in range(40):
        parts = []
        for mine, theirs in pairs:
            data = bytearray(chosen.randbytes(chosen.choice(SIZES)))
            theirs.update(data)
            parts.append((mine, memoryview(data)))
        hashing.update_all(parts)
        # A digest may be asked for on the way.
        assert [mine.hexdigest() for mine, _ in pairs] == [t.hexdigest() for _, t in pairs]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.usefixtures("either_core")
def test_bytes_that_cannot_be_written_to_are_hashed(size):
    digest, data = hashing.new_digest(), bytes(range(256)) * 40
    digest.update(memoryview(data)[:size])
    assert digest.hexdigest() == hashlib.sha256(data[:size]).hexdigest()


def test_lengths_beyond_32_bits_are_hashed(either_core):
    if either_core == "torch":
        return
    digest, wanted = hashing.new_digest(), hashlib.sha256()
    # Eight times the bytes are more bits than a 32-bit word counts.
    chunk = bytearray(b"quantkit" * (1 << 17))
    for _ in range(520):
        digest.update(memoryview(chunk))
        wanted.update(chunk)
    assert digest.hexdigest() == wanted.hexdigest()


@pytest.mark.usefixtures("either_core")
def test_jobs_of_different_lengths_run_together():
    def job(digest, count):
        for index in range(count):
            yield [(digest, bytearray([index]) * 100)]
        return digest.hexdigest()

    assert hashing.run_together([]) == []
    counts = (3, 0, 7, 1)
    found = hashing.run_together([job(hashing.new_digest(), count) for count in counts])
    wanted = [hashlib.sha256(b"".join(bytes([i]) * 100 for i in range(n))) for n in counts]
    assert found == [digest.hexdigest() for digest in wanted]


def test_hashing_nothing_asks_for_no_core(monkeypatch):
    monkeypatch.setattr(core, "library", lambda: pytest.fail("no compiler is needed"))
    hashing.update_all([])
    hashing.update_all([(hashlib.sha256(), bytearray(b"x"))])


#: Every number of 8 and 16 bits, by numpy's types.
NUMPY = {
    "F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32, "F64": np.float64,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip
ODD = (np.nan, np.inf, -np.inf, -0.0, 0.0, -1.0, 1e-30)


def samples(dtype):
    """Yield single numbers: all of a narrow type, the odd ones and the smallest of a wide one."""
    kind = NUMPY[dtype]
    if np.dtype(kind).itemsize <= 2:
        bits = np.dtype(kind).itemsize * 8
        return np.arange(1 << bits).astype(f"uint{bits}").view(kind)
    info = np.finfo(kind)
    limits = (info.max, -info.max, info.tiny, -info.tiny, info.smallest_subnormal)
    return np.array([*ODD, *limits], dtype=kind)


def first_broken(values, dtype, positive=False):
    return weight_reader.first_broken(bytearray(values.tobytes()), dtype, positive=positive)


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("dtype", checker.NUMBERS)
def test_every_number_is_judged_as_numpy_does(either_core, dtype, positive):
    values = samples(dtype)
    with np.errstate(invalid="ignore"):
        wide = values.astype(np.float64)
    broken = ~np.isfinite(wide) | (positive & (wide <= 0))
    assert first_broken(values[~broken], dtype, positive) is None
    # PyTorch takes too long for all of them.
    for value in values[broken][:: 1 if either_core == "compiled" else 11]:
        assert first_broken(value, dtype, positive) == 0


@pytest.mark.usefixtures("either_core")
@pytest.mark.parametrize("place", [0, 1, 31, 4095, 4096, 4097, 9000, 9999])
@pytest.mark.parametrize("dtype", checker.NUMBERS)
def test_the_first_of_many_is_found(dtype, place):
    values = np.ones(10_000).astype(NUMPY[dtype])
    assert first_broken(values, dtype) is None
    values[place:] = np.nan
    assert first_broken(values, dtype) == place
    values[place:], values[-1] = -1, np.nan
    assert first_broken(values, dtype, positive=True) == place
    # Bytes need not begin where a number of this width would.
    data = memoryview(bytearray(b"\0" + values.tobytes()))[1:]
    assert weight_reader.first_broken(data, dtype) == 9999
