"""KV pools over 4 GiB on a GPU, and in Triton's interpreter: offsets need more than 32 bits.

`TRITON_INTERPRET=1` runs the attention over untouched virtual memory on a CPU, if triton is installed.
"""

import pytest
import torch

from baton.model.attention.paged_attention import PagedKernel, paged_attention
from tests.large_pool import check_large_pool

pytestmark = [pytest.mark.gpu, pytest.mark.interpreted, pytest.mark.timeout(600)]

FORMATS = [(torch.float32, "auto"), (torch.bfloat16, "auto"), (torch.bfloat16, "int8")]


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def kernel(device: str, monkeypatch: pytest.MonkeyPatch) -> PagedKernel:
    from baton.model.kernels.triton.triton_attention import triton_attention

    if device == "cpu":  # the interpreter would copy each argument's whole memory onto itself
        from triton.runtime.interpreter import GridExecutor

        monkeypatch.setattr(GridExecutor, "_init_args_hst", lambda self, args, kwargs: (args, kwargs))
        monkeypatch.setattr(GridExecutor, "_restore_args_dev", lambda self, *_arguments: None)
    return triton_attention


@pytest.mark.parametrize(("dtype", "kv_dtype"), FORMATS)
def test_triton_attention(kernel: PagedKernel, device: str, dtype: torch.dtype, kv_dtype: str) -> None:
    check_large_pool(kernel, dtype, kv_dtype, device)


@pytest.mark.parametrize(("dtype", "kv_dtype"), FORMATS)
def test_reference_attention_on_the_gpu(device: str, dtype: torch.dtype, kv_dtype: str) -> None:
    if device == "cpu":
        pytest.skip("tests/unit/model/test_large_pool.py runs it on a CPU")
    check_large_pool(paged_attention, dtype, kv_dtype, device)
