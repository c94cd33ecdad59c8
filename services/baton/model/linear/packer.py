"""Packs the weights of one model whose native product is right and the one to use."""

from collections.abc import Callable

import torch

from baton.model.kernels.cpu.kernel_library import Kernels
from baton.model.linear.packed_weight import ArenaMemory, PackedWeight, WeightMemory, pack_weight
from baton.model.linear.product_check import product_problem, shape_class
from baton.model.linear.product_choice import Product, ProductFacts, choose_product
from baton.model.linear.weights import FloatWeight, Weight
from baton.runtime.logging import get_logger

log = get_logger(__name__)


class WeightPacker:
    """Packs weights one by one. The first of each format and shape class verifies the native product.

    dtype: of activations. native_is_faster, is_mixed: see `ProductFacts`; `is_mixed` is true from the first
    weight on that is not plain. memory: where the next weights are placed.
    """

    def __init__(
        self, kernels: Kernels, *, dtype: torch.dtype, native_is_faster: bool, memory: WeightMemory | None = None
    ) -> None:
        """memory: None uses memory of this process."""
        self.kernels = kernels
        self.dtype = dtype
        self.native_is_faster = native_is_faster
        self.is_mixed = False
        self.memory: WeightMemory = memory or ArenaMemory(kernels.weight_arena)
        self._problems: dict[tuple[object, ...], str | None] = {}

    def product_for(self, weight: Weight, *, is_verified: bool = True) -> Product:
        """Return the product that computes a weight, if the native one is verified or not."""
        return choose_product(
            ProductFacts(
                has_kernels=True,
                is_plain=is_plain(weight, self.dtype),
                native_is_faster=self.native_is_faster,
                is_mixed=self.is_mixed,
                is_verified=is_verified,
            )
        )

    def pack(self, name: str, weight: Weight) -> PackedWeight | None:
        """Return the packed weight of a module, or None if another product computes it.

        Raises OSError if there is no memory.
        """
        self.is_mixed |= not is_plain(weight, self.dtype)
        if self.product_for(weight) is not Product.NATIVE:
            return None
        packed = pack_weight(self.kernels, weight, self.memory, self.dtype)
        problem = self.problem_of(packed, weight)
        if problem is None:
            return packed
        log.warning(
            "native_product_not_verified",
            module=name,
            problem=problem,
            hint=f"it is computed by the {self.product_for(weight, is_verified=False)} product, slower",
        )
        return None

    def problem_of(self, packed: PackedWeight, weight: Weight | None = None) -> str | None:
        """Return what is wrong with the product of a packed weight; None if nothing is.

        weight: what was packed; None: it no longer exists. Each format and shape class is verified once.
        """
        key = shape_class(packed, self.dtype)
        if key not in self._problems:
            self._problems[key] = product_problem(packed, weight, self.dtype)
        return self._problems[key]


def is_plain(weight: Weight, dtype: torch.dtype) -> bool:
    """True if torch's own product takes a weight beside activations of `dtype`."""
    return isinstance(weight, FloatWeight) and weight.scales is None and weight.values.dtype == dtype


PackerForDtype = Callable[[torch.dtype], WeightPacker | None]
"""Makes what packs the weights of a model of this dtype; None: nothing does."""
