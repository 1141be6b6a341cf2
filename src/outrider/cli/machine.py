"""Facts about the machine that decide how fast decoding can be."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path

from outrider.cli.reexec import is_active, is_glibc

INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "bf16", "i8mm")
"""Instruction sets that matter for matrix products, as /proc/cpuinfo spells them."""

_PROBE_BYTES = 256 << 20
_PROBE_SECONDS = 1.5


def inspect_machine() -> dict[str, object]:
    """Name -> value, plain enough for JSON."""
    import psutil
    import torch

    import outrider

    memory = psutil.virtual_memory()
    return {
        "outrider": outrider.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "torch threads": torch.get_num_threads(),
        "instruction sets": instruction_sets(),
        "bfloat16 products": "in hardware" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "emulated",
        "memory GB": round(memory.total / 1e9, 1),
        "memory free GB": round(memory.available / 1e9, 1),
        "memory read GB/s": round(read_bandwidth(), 1),
        "GPU": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
        "allocator settings": allocator_state(),
        "model cache": cache_directory(),
        "models fetched": fetched_models(),
    }


def processor_name() -> str:
    """The processor's marketing name, or the architecture."""
    for line in _cpuinfo():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def instruction_sets() -> list[str]:
    """Those of ``INSTRUCTIONS`` that the processor has; empty where /proc/cpuinfo does not exist."""
    for line in _cpuinfo():
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return [flag for flag in INSTRUCTIONS if flag in flags.split()]
    return []


def read_bandwidth() -> float:
    """GB/s at which all threads read memory: the best of several passes over 256 MB, within two seconds."""
    import torch

    block = torch.ones(_PROBE_BYTES // 4, dtype=torch.float32)
    block.sum()  # untimed: the first pass also starts the threads
    best, deadline = float("inf"), time.perf_counter() + _PROBE_SECONDS
    while best == float("inf") or time.perf_counter() < deadline:
        start = time.perf_counter()
        block.sum()
        best = min(best, time.perf_counter() - start)
    return _PROBE_BYTES / best / 1e9


def allocator_state() -> str:
    """Whether the settings of ``reexec.py`` are in force."""
    if not is_glibc():
        return "not needed (no glibc)"
    return "active" if is_active(os.environ) else "not active: large forward passes are slower"


def cache_directory() -> str:
    """Where fetched models lie."""
    from outrider.models import store

    return str(store.cache_directory())


def fetched_models() -> list[str]:
    """Catalogue names that are in the cache."""
    from outrider.models import store

    return [name for name in store.catalogue() if store.cached_path(name) is not None]


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
