"""Decides which product computes the weight of a linear layer."""

from dataclasses import dataclass
from enum import StrEnum

import torch


class Product(StrEnum):
    """Ways to multiply by a weight.

    NATIVE: the processor's kernels, with the weight packed. TORCH: torch's own product, with the weight as a
    parameter. REFERENCE: torch's product with the weight dequantised at each call.
    """

    NATIVE = "native"
    TORCH = "torch"
    REFERENCE = "reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductFacts:
    """Facts about the processor and a weight.

    has_kernels: the C++ kernels can be used.
    is_plain: torch's own product takes the weight.
    native_is_faster: than torch's, for plain weights of the model's dtype.
    is_mixed: other weights of the model are not plain.
    is_verified: the native product of this format and shape was found right.
    """

    has_kernels: bool
    is_plain: bool
    native_is_faster: bool
    is_mixed: bool
    is_verified: bool


def choose_product(facts: ProductFacts) -> Product:
    """Return the product that computes a weight.

    A model with weights that only the native product takes gets it for all weights, so that one decoder runs
    all of its layers.
    """
    if facts.has_kernels and facts.is_verified and (facts.native_is_faster or facts.is_mixed or not facts.is_plain):
        return Product.NATIVE
    return Product.TORCH if facts.is_plain else Product.REFERENCE


def native_gemm_is_faster(dtype: torch.dtype, *, has_bf16_dot: bool, has_amx: bool, has_onednn_gemm: bool) -> bool:
    """True if the native GEMM is expected to be faster than torch's for plain weights.

    `has_bf16_dot`: the processor and the kernels support AVX512-BF16. `has_onednn_gemm`: oneDNN has a GEMM on
    packed bfloat16 weights.

    With AMX, oneDNN is faster. Without AVX512-BF16, the native GEMM is used only if oneDNN has none: torch's
    fallback is many times slower than float32. oneDNN emulates bfloat16 on plain AVX-512; the native GEMM was
    not measured against that. In float32 a worker measures, see `native_is_faster_here`.
    """
    if dtype != torch.bfloat16:
        return False
    return not has_amx if has_bf16_dot else not has_onednn_gemm
