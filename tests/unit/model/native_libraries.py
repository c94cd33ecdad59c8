"""Builds the C++ kernels for several processors, and programs over them. All runs share the cached builds."""

import platform
import subprocess
from functools import cache
from pathlib import Path

from baton.model.kernels.cpu.kernel_build import HERE, NATIVE, OPTIONS, build, default_cache, find_compiler
from baton.model.kernels.cpu.kernel_library import load_kernels
from tests.scale import IS_LONG

BASELINE, AVX2 = ("-march=x86-64",), ("-march=x86-64-v3",)
AVX_VNNI, AVX512_WITHOUT_VNNI = (*AVX2, "-mavxvnni"), ("-march=skylake-avx512",)
EMULATED_TILES = ("-march=icelake-server", "-DBATON_EMULATE_TILES")
"""AVX512-VNNI, with AMX's tiles computed in plain C++."""
BF16_FLOATS = (NATIVE, "-DBATON_PREFER_FLOATS")
"""Products of bfloat16 as floats, whatever is faster here."""
NOT_HERE = 9
"""Exit status of a program that needs AVX512-BF16, on a processor without it."""


def bf16_program_status(source: str, directory: Path) -> int:
    """Compile a program for this processor, run it, and return its exit status.

    On a processor without AVX512-BF16 it must be NOT_HERE, and 0 is returned.
    """
    (directory / "program.cpp").write_text(source)
    options = [option for option in OPTIONS if option not in ("-fPIC", "-shared")]
    compile_it = [find_compiler(), *options, f"-I{HERE}", "program.cpp", "-o", "program"]
    subprocess.run(compile_it, cwd=directory, check=True)
    status = subprocess.run([directory / "program"], check=False).returncode
    if load_kernels(1).has_bf16_dot:
        return status
    assert status == NOT_HERE
    return 0


def processors() -> list[tuple[str, ...]]:
    """Return compiler options for this processor and for the next smaller set of instructions.

    That is AVX2 if it has AVX-512, else the baseline x86-64 (vectors as short as ARM's). Long runs have all
    sets of this processor: the baseline, integer dot products of AVX2's width, AVX-512 without them, AVX-512
    with them and with AMX's tiles emulated, and products of bfloat16 as floats.
    """
    if platform.machine() != "x86_64":
        return [(NATIVE,)]
    flags = Path("/proc/cpuinfo").read_text().split()
    found = [(NATIVE,), AVX2 if "avx512f" in flags else BASELINE]
    if IS_LONG:
        found += [BASELINE] if "avx512f" in flags else []
        found += [AVX_VNNI] if "avx_vnni" in flags and "avx512f" in flags else []
        found += [AVX512_WITHOUT_VNNI, EMULATED_TILES] if {"avx512_vnni", "avx512_vbmi2"} <= set(flags) else []
        found += [BF16_FLOATS] if "avx512_bf16" in flags else []
    return found


@cache
def library_for(processor: tuple[str, ...]) -> Path:
    """Return the kernels for one processor.

    Libraries for other processors use another namespace, because inline functions are shared within a
    process.
    """
    if processor == (NATIVE,):
        return build()
    name = "_".join(option.strip("-").replace("-", "_").replace("=", "_") for option in processor)
    options = [{"-O3": "-O2"}.get(option, option) for option in OPTIONS if option != NATIVE]
    return build(default_cache() / "tests" / name, (*options, *processor, f"-Dbaton=for_{name}"))
