"""What benchmarks read from the list of the processor's instruction sets."""

from pathlib import Path

import pytest

from bench.support.processor import faster_vllm_dtype, has_vnni


def cpuinfo(directory: Path, line: str) -> Path:
    """Write a file like /proc/cpuinfo; an empty line writes none."""
    file = directory / "cpuinfo"
    if line:
        file.write_text(f"processor : 0\n{line}\n")
    return file


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("flags\t\t: avx2 avx512_vnni", True),
        ("flags\t\t: avx_vnni fma", True),
        ("flags\t\t: avx2 fma", False),
        ("", False),
    ],
)
def test_vnni_is_read_from_the_processor(tmp_path: Path, line: str, found: bool) -> None:
    assert has_vnni(cpuinfo(tmp_path, line)) is found


@pytest.mark.parametrize(
    ("line", "dtype"),
    [
        ("flags\t\t: avx512f avx512_bf16", "bfloat16"),
        ("flags\t\t: amx_tile amx_bf16", "bfloat16"),
        ("Features\t: asimd bf16", "bfloat16"),
        ("flags\t\t: avx2 avx512f avx512_vnni", "float32"),
        ("", "float32"),
    ],
)
def test_vllm_runs_in_float32_where_bfloat16_is_emulated(tmp_path: Path, line: str, dtype: str) -> None:
    assert faster_vllm_dtype(cpuinfo(tmp_path, line)) == dtype
