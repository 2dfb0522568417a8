"""Times that no program can be under: the task's bytes at the device's peak, and beside it at the copy that it reaches.

Needed are the outputs, the parameters and the inputs, each once, without the input elements that are zero (a kernel may
know that they are). What L2 holds need not cross: so much is taken off every batch. Times in ms, bandwidth in GB/s.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from kbsub.eval.bench.floors import copy_bandwidth
from kbsub.eval.remote.memory import driver
from kbsub.eval.remote.ring import tensors_of

_MEMORY_CLOCK_KHZ, _BUS_BITS, _L2_BYTES = 36, 37, 38  # CUdevice_attribute


def needed_bytes(inputs: Sequence[Any], reference: torch.nn.Module, answer: Any) -> int:
    """Bytes that a call must move."""
    tensors = [*reference.parameters(), *reference.buffers(), *tensors_of(answer)]
    read = sum(int(torch.count_nonzero(each)) * each.element_size() for each in tensors_of(list(inputs)))
    return read + sum(each.numel() * each.element_size() for each in tensors)


def l2_bytes(device: torch.device) -> int:
    """Of a GPU; 0 on a CPU."""
    return _attribute(device, _L2_BYTES) if device.type == "cuda" else 0


def peak_bandwidth(device: torch.device) -> float | None:
    """GB/s of the device's memory, by its driver: both edges of its clock on every wire. None where it does not say."""
    clock, bits = _attribute(device, _MEMORY_CLOCK_KHZ), _attribute(device, _BUS_BITS)
    return 2 * clock * 1e3 * bits / 8 / 1e9 if clock > 0 and bits > 0 else None


def floors(device: torch.device, nbytes: int, calls: int) -> dict[str, Any]:
    """{bytes, peak_gb_s, peak_ms, one_call_peak_ms, copy_gb_s, copy_ms} of a call in a batch of `calls`; {} on a CPU.

    peak_ms: at the device's peak, a share of L2 left out; one_call_peak_ms: of one call alone, as upstream times it.
    """
    if device.type != "cuda":
        return {}
    copy = copy_bandwidth(device)
    peak = peak_bandwidth(device)
    found = {"bytes": nbytes, "copy_gb_s": copy, "copy_ms": nbytes / (copy * 1e6)}
    if peak is not None and peak > copy:
        l2 = l2_bytes(device)
        found |= {
            "peak_gb_s": peak,
            "peak_ms": max(0.0, nbytes - l2 / calls) / (peak * 1e6),
            "one_call_peak_ms": max(0.0, nbytes - l2) / (peak * 1e6),
        }
    return found


def _attribute(device: torch.device, which: int) -> int:
    number, value = ctypes.c_int(), ctypes.c_int()
    index = torch.cuda.current_device() if device.index is None else device.index
    # torch's number and the driver's are the same: both obey CUDA_VISIBLE_DEVICES.
    if driver().cuDeviceGet(ctypes.byref(number), index):
        return 0
    if driver().cuDeviceGetAttribute(ctypes.byref(value), which, number):
        return 0
    return value.value
