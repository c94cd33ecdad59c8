"""Values that the layouts share: the tensors of one module, and the weight that is made of them."""

from collections.abc import Mapping
from typing import Protocol

import torch

from baton.core.errors import ModelError
from baton.model.linear.weights import GROUP_SIZES, CodedWeight, FloatWeight, GroupFactors, Weight

Tensors = Mapping[str, torch.Tensor]
"""Tensors of one module by the last part of their name, such as `weight_packed`. Bias is not among them."""


class CheckpointLayout(Protocol):
    """Reader of the modules of a quantised checkpoint.

    description: what is stored, for the log.
    """

    description: str

    def weight(self, module: str, tensors: Tensors) -> Weight:
        """Return the weight of a linear layer from its tensors. `module`: its name.

        Raises ModelError if tensors are missing, have other shapes, or are of an unknown kind.
        """
        ...


def need(module: str, tensors: Tensors, name: str) -> torch.Tensor:
    """Return a tensor of a module. Raises ModelError if it is missing."""
    if name not in tensors:
        have = ", ".join(sorted(tensors)) or "none"
        raise ModelError(f"{module} has no tensor {name} (there are: {have}); the checkpoint is incomplete")
    return tensors[name]


def plain_weight(module: str, tensors: Tensors) -> Weight | None:
    """Return the weight of a module that is not quantised; None if it is.

    The plain kinds are floats of 16 or 32 bits without scales.
    """
    weight = tensors.get("weight")
    plain = (torch.float32, torch.bfloat16, torch.float16)
    if weight is None or weight.dtype not in plain or any(name.startswith("weight_scale") for name in tensors):
        return None
    if weight.dim() != 2:
        raise ModelError(f"{module}.weight has {weight.dim()} dimensions; must be 2")
    return FloatWeight(weight)


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the unsigned integers in int32 words, lowest bits first: uint8 [rows, words * 32 / bits].

    bits: 4 or 8.
    """
    packed = words.contiguous().view(torch.uint8)
    if bits == 8:
        return packed
    return torch.stack((packed & 15, packed >> 4), dim=-1).view(len(packed), -1)


def grouped_weight(
    module: str,
    codes: torch.Tensor,
    bits: int,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    stated_group: int | None = None,
    input_order: torch.Tensor | None = None,
) -> CodedWeight:
    """Return the weight `scale * (code - zero)`, with one scale and zero for each group of columns.

    codes: uint8 [n, k]. scales: floats [n, groups]. zeros: integers [n, groups], or None for 2**(bits - 1).
    stated_group: columns of a group according to the configuration, see `group_columns`. input_order: of the
    codes, see `CodedWeight`. Raises ModelError if the shapes do not fit, or if groups are not multiples of 16
    columns.
    """
    rows, columns = codes.shape
    group = None
    if scales.dim() == 2 and len(scales) == rows and scales.shape[1]:
        group = group_columns(columns, scales.shape[1], stated_group)
    if group is None:
        raise ModelError(
            f"{module} has scales of the shape {tuple(scales.shape)}; must be {rows} rows, "
            f"and a number of groups that divides {columns}"
        )
    if zeros is not None and zeros.shape != scales.shape:
        raise ModelError(f"{module} has zero points of the shape {tuple(zeros.shape)}; must be {tuple(scales.shape)}")
    size = next((each for each in reversed(GROUP_SIZES) if group % each == 0 and columns % each == 0), None)
    if size is None:
        raise ModelError(
            f"{module} has groups of {group} of its {columns} columns; both must be multiples of {GROUP_SIZES[0]}"
        )
    if zeros is not None and bool((zeros == 1 << (bits - 1)).all()):
        zeros = None
    group_of = torch.arange(0, columns, size) // group
    factors = scales.float()[:, group_of].contiguous()
    offsets = None
    if zeros is not None:
        offsets = GroupFactors(-factors * zeros.float()[:, group_of], size)
    return CodedWeight(codes, bits, size, GroupFactors(factors, size), offsets, input_order=input_order)


def group_columns(columns: int, num_groups: int, stated: int | None) -> int | None:
    """Return the number of columns of a group, of which the last one may have fewer; None if there is none.

    stated: by the configuration. It counts if it gives this number of groups; a module may have a size of its
    own, which then divides its columns.
    """
    if isinstance(stated, int) and stated > 0 and -(-columns // stated) == num_groups:
        return stated
    return None if columns % num_groups else columns // num_groups


def in_group_order(
    module: str, g_idx: torch.Tensor, columns: int, num_groups: int, stated_group: int | None = None
) -> torch.Tensor | None:
    """Return the order of inputs, int32, in which columns of a group are side by side; None if they are.

    g_idx: integers [columns], the group of each column. stated_group: see `group_columns`. Raises ModelError
    if groups have other sizes.
    """
    groups, size = g_idx.long(), group_columns(columns, num_groups, stated_group)
    is_usable = groups.shape == (columns,) and 0 <= int(groups.min()) <= int(groups.max()) < num_groups
    sizes = torch.bincount(groups, minlength=num_groups).tolist() if is_usable else None
    if size is None or sizes != [size] * (num_groups - 1) + [columns - size * (num_groups - 1)]:
        raise ModelError(f"{module}.g_idx does not give each of {num_groups} groups {size or 'as many'} columns")
    order = torch.argsort(groups, stable=True)
    return None if torch.equal(order, torch.arange(columns)) else order.int()
