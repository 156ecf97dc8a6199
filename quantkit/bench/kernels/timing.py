"""Timing calls: warm-up, then rounds in which every contender runs once, with a cold cache.

On a GPU a time is what passes between two events on the stream around one call. Before each call a
buffer larger than the last cache is written, which empties the cache, and which takes longer than
the host needs to queue the call: so a slow host does not count as a slow kernel. The host's own
time per call is kept beside it. On the CPU both are the wall clock.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch

#: One run of what is measured; its result is dropped.
Call = Callable[[], object]

#: Bytes to write before a call at least: the 64 MB Infinity Cache of a Radeon, four times, is in no
#: table that torch has.
_FLUSH_BYTES = 256 * 2**20
#: Where no cache size is known for the CPU.
_CPU_CACHE = 32 * 2**20
#: Fewer rounds have no tail to speak of.
LEAST_ROUNDS = 5


@dataclass(frozen=True)
class TimingPlan:
    """Rounds and seconds of a measurement."""

    #: runs of each contender that do not count
    warmup: int
    #: rounds, unless ``seconds`` end first
    repeats: int
    #: of one group of contenders; never fewer than LEAST_ROUNDS rounds
    seconds: float


@dataclass(frozen=True)
class Timing:
    """The times of one contender, in microseconds."""

    rounds: int
    p50_us: float
    p95_us: float
    p99_us: float
    #: median of what a call costs the host
    host_us: float


@dataclass(frozen=True)
class Samples:
    """Times of every round, in microseconds."""

    device: list[float]
    host: list[float]

    def summary(self) -> Timing:
        """Return the percentiles, linear between neighbours."""
        import numpy as np

        p50, p95, p99 = np.percentile(self.device, (50, 95, 99))
        return Timing(
            len(self.device), float(p50), float(p95), float(p99), float(np.median(self.host))
        )


class Stopwatch:
    """Times single calls on one device."""

    def __init__(self, device: torch.device, *, cold: bool = True) -> None:
        """Make the buffer that empties the cache.

        Args:
            device: where the calls run.
            cold: False leaves the cache as the call before left it.
        """
        self.device = device
        self._flush = torch.empty(_flush_bytes(device) if cold else 0, dtype=torch.uint8)
        if device.type == "cuda":
            self._flush = self._flush.to(device)
        self._flushes = 1

    def warm_up(self, calls: Mapping[str, Call], times: int) -> None:
        """Run every call, and see how long the host takes to queue it."""
        slowest = 0.0
        for call in calls.values():
            for _ in range(times):
                start = time.perf_counter()
                call()
                slowest_now = time.perf_counter() - start
                self._wait()
            if times:
                slowest = max(slowest, slowest_now)
        if self.device.type == "cuda" and self._flush.numel():
            # Twice what the host needs: it must stay ahead also when it is disturbed.
            self._flushes = min(16, max(1, ceil(2 * slowest / self._flush_seconds())))

    def rounds(self, calls: Mapping[str, Call], plan: TimingPlan) -> dict[str, Samples]:
        """Return the times of every call, taken in turns; each round starts with another one."""
        found = {name: Samples([], []) for name in calls}
        for order in _orders(list(calls), plan):
            for name, (device_us, host_us) in self._round(order, calls):
                found[name].device.append(device_us)
                found[name].host.append(host_us)
        return found

    def in_a_row(
        self, calls: Mapping[str, Call], times: int, plan: TimingPlan
    ) -> dict[str, Samples]:
        """Return the times per call of so many, one after another, that are waited for once.

        What the host does for a call may pass while the device is at the one before. By the wall
        clock, from the first call until the device is done; the cache is as calls leave it.
        """
        found = {name: Samples([], []) for name in calls}
        for order in _orders(list(calls), plan):
            for name in order:
                self._wait()
                start = time.perf_counter()
                for _ in range(times):
                    calls[name]()
                queued = time.perf_counter()
                self._wait()
                done = time.perf_counter()
                found[name].device.append((done - start) / times * 1e6)
                found[name].host.append((queued - start) / times * 1e6)
        return found

    def _round(
        self, order: list[str], calls: Mapping[str, Call]
    ) -> Iterator[tuple[str, tuple[float, float]]]:
        if self.device.type != "cuda":
            for name in order:
                self._flush.fill_(1)
                start = time.perf_counter()
                calls[name]()
                passed = (time.perf_counter() - start) * 1e6
                yield name, (passed, passed)
            return
        pending = [(name, *self._queue(calls[name])) for name in order]
        self._wait()
        for name, before, after, host_us in pending:
            yield name, (before.elapsed_time(after) * 1e3, host_us)

    def _queue(self, call: Call) -> tuple[Any, Any, float]:
        event: Any = torch.cuda.Event
        before, after = (event(enable_timing=True) for _ in range(2))
        # A queue that grows over a whole round would hide a host that is slower than the device.
        self._wait()
        for _ in range(self._flushes):
            self._flush.fill_(1)
        before.record()
        start = time.perf_counter()
        call()
        host_us = (time.perf_counter() - start) * 1e6
        after.record()
        return before, after, host_us

    def _flush_seconds(self) -> float:
        self._wait()
        start = time.perf_counter()
        for _ in range(4):
            self._flush.fill_(1)
        self._wait()
        return (time.perf_counter() - start) / 4

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _orders(names: list[str], plan: TimingPlan) -> Iterator[list[str]]:
    """Yield the order of every round, until the plan ends."""
    end = time.perf_counter() + plan.seconds
    for index in range(plan.repeats):
        if index >= LEAST_ROUNDS and time.perf_counter() > end:
            return
        turn = index % len(names) if names else 0
        yield names[turn:] + names[:turn]


def _flush_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        cache: int = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
        return max(_FLUSH_BYTES, 4 * cache)
    return 2 * _cpu_cache()


def _cpu_cache() -> int:
    """Return the bytes of the CPU's largest cache, as Linux names it."""
    sizes = [_CPU_CACHE]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text(encoding="ascii").strip()
        if text.endswith("K") and text[:-1].isdecimal():
            sizes.append(int(text[:-1]) * 1024)
    # A server's cache is shared by many; ours is a part of it, and flushing it all takes long.
    return min(max(sizes), 4 * _CPU_CACHE)
