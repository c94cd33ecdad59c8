"""Describes the weights of a linear layer in the formats that checkpoints use, before they are packed.

A weight is [n, k]: n outputs, k inputs. Groups of factors run along k.
"""

from dataclasses import dataclass

import torch

from baton.core.errors import LayoutMismatch, ModelError

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
CODE_BITS = (4, 5, 6, 8)
GROUP_SIZES = (16, 32, 64, 128)
FACTOR_CODE_DTYPES = (torch.int8, torch.uint8)
NUM_CODE_VALUES = 16
"""Values of a code table. Only 4-bit codes can have one."""


@dataclass(frozen=True, slots=True, eq=False)
class FloatWeight:
    """A weight of floats, with one scale per block if `scales` is given.

    values: [n, k] of float32, bfloat16, float16 or float8_e4m3fn.
    scales: float32 [ceil(n / bn), ceil(k / bk)], or None.
    scale_block: (bn, bk), the rows and columns that share a scale. Unused without scales.
    Raises LayoutMismatch for shapes that do not fit, ModelError for a dtype that is not supported.
    """

    values: torch.Tensor
    scales: torch.Tensor | None = None
    scale_block: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        if self.values.dtype not in FLOAT_DTYPES:
            raise ModelError(f"weight values are {self.values.dtype}; must be one of {_names(FLOAT_DTYPES)}")
        _require_matrix("weight values", self.values)
        rows, columns = self.scale_block
        if rows < 1 or columns < 1:
            raise LayoutMismatch(f"scale_block is {self.scale_block}; both sizes must be at least 1")
        if self.scales is not None:
            n, k = self.values.shape
            _require_dtype("weight scales", self.scales, torch.float32)
            _require_shape("weight scales", self.scales, (-(-n // rows), -(-k // columns)))

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k): the numbers of outputs and inputs."""
        n, k = self.values.shape
        return n, k

    def bits_per_weight(self) -> float:
        """Return the mean bits of one weight, scales included."""
        scale_bits = 0 if self.scales is None else 32 * self.scales.numel()
        return 8 * self.values.itemsize + scale_bits / self.values.numel()

    def dequantized(self) -> torch.Tensor:
        """Return the weight as float32 [n, k]."""
        values = self.values.float()
        if self.scales is None:
            return values
        (n, k), (rows, columns) = self.shape, self.scale_block
        return values * self.scales[torch.arange(n) // rows][:, torch.arange(k) // columns]


@dataclass(frozen=True, slots=True, eq=False)
class GroupFactors:
    """One factor for each group of inputs of each output: a scale or an offset.

    The factor is the group's code times the super of the groups that it belongs to. Without codes it is the
    super alone, and a super belongs to one group. Two levels keep the scales of Q4_K, Q5_K and Q6_K exactly.

    supers: float32 [n, k / super_size].
    super_size: inputs per super.
    codes: int8 or uint8 [n, k / group size], or None.
    """

    supers: torch.Tensor
    super_size: int
    codes: torch.Tensor | None = None

    def __post_init__(self) -> None:
        _require_dtype("supers", self.supers, torch.float32)
        _require_matrix("supers", self.supers)
        if self.super_size < 1:
            raise LayoutMismatch(f"super_size is {self.super_size}; must be at least 1")
        if self.codes is None:
            return
        if self.codes.dtype not in FACTOR_CODE_DTYPES:
            raise ModelError(f"codes of factors are {self.codes.dtype}; must be one of {_names(FACTOR_CODE_DTYPES)}")
        _require_matrix("codes of factors", self.codes)
        (rows, supers), (code_rows, groups) = self.supers.shape, self.codes.shape
        if code_rows != rows or groups % supers or self.super_size % (groups // supers):
            raise LayoutMismatch(
                f"codes of factors {tuple(self.codes.shape)} do not divide supers {tuple(self.supers.shape)} of "
                f"{self.super_size} inputs each"
            )

    @property
    def group_size(self) -> int:
        """Inputs per factor."""
        if self.codes is None:
            return self.super_size
        return self.super_size * self.supers.shape[1] // self.codes.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes of supers and codes."""
        return 4 * self.supers.numel() + (0 if self.codes is None else self.codes.numel())

    def values(self) -> torch.Tensor:
        """Return the factors as float32 [n, k / group_size]."""
        if self.codes is None:
            return self.supers
        return self.codes.float() * self.supers.repeat_interleave(self.super_size // self.group_size, dim=1)


@dataclass(frozen=True, slots=True, eq=False)
class CodedWeight:
    """A weight of integer codes: value = scale * code + offset, with a scale and an offset per group.

    codes: uint8 [n, k], each below 2**bits.
    bits: 4, 5, 6 or 8.
    group_size: 16, 32, 64 or 128; divides k.
    scales, offsets: factors of these groups. offsets None is symmetric: offset = -scale * 2**(bits - 1), or 0
        with code_values.
    code_values: 16 integers of 8 bits that stand for the 4-bit codes, such as mxfp4's, or None.
    input_order: int32 [k], or None. Column i of the codes multiplies input `input_order[i]`, so that columns
        of a group lie side by side, whatever inputs belong to it.
    Raises LayoutMismatch for shapes that do not fit, ModelError for what is not supported.
    """

    codes: torch.Tensor
    bits: int
    group_size: int
    scales: GroupFactors
    offsets: GroupFactors | None = None
    code_values: tuple[int, ...] | None = None
    input_order: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.bits not in CODE_BITS:
            raise ModelError(f"codes of {self.bits} bits; must be one of {CODE_BITS}")
        if self.group_size not in GROUP_SIZES:
            raise ModelError(f"groups of {self.group_size} inputs; must be one of {GROUP_SIZES}")
        _require_dtype("weight codes", self.codes, torch.uint8)
        _require_matrix("weight codes", self.codes)
        n, k = self.codes.shape
        if k % self.group_size:
            raise LayoutMismatch(f"{k} inputs are not a multiple of the groups of {self.group_size}")
        if (largest := int(self.codes.max())) >= 2**self.bits:
            raise ModelError(f"weight code {largest}; codes of {self.bits} bits must be below {2**self.bits}")
        for name, factors in (("scales", self.scales), ("offsets", self.offsets)):
            if factors is not None:
                self._require_factors(name, factors, n, k)
        self._require_code_values()
        if self.input_order is not None:
            require_order(self.input_order, k)

    def _require_factors(self, name: str, factors: GroupFactors, n: int, k: int) -> None:
        if factors.group_size != self.group_size:
            raise LayoutMismatch(f"{name} are for groups of {factors.group_size} inputs; must be {self.group_size}")
        if factors.supers.shape != (n, k // factors.super_size) or k % factors.super_size:
            raise LayoutMismatch(
                f"supers of {name} are {tuple(factors.supers.shape)}, {factors.super_size} inputs each; the weight is "
                f"{n} x {k}"
            )

    def _require_code_values(self) -> None:
        if self.code_values is None:
            return
        if self.bits != 4 or len(self.code_values) != NUM_CODE_VALUES:
            raise ModelError(
                f"{len(self.code_values)} code_values for codes of {self.bits} bits; must be {NUM_CODE_VALUES} for 4"
            )
        if strange := [value for value in self.code_values if not -128 <= value <= 127]:
            raise ModelError(f"code value {strange[0]}; must be between -128 and 127")

    @property
    def shape(self) -> tuple[int, int]:
        """(n, k): the numbers of outputs and inputs."""
        n, k = self.codes.shape
        return n, k

    @property
    def zero_point(self) -> int:
        """Code whose value is zero, if the weight has no offsets and no code_values."""
        return 2 ** (self.bits - 1)

    def bits_per_weight(self) -> float:
        """Return the mean bits of one weight, factors included."""
        factor_bytes = self.scales.num_bytes + (0 if self.offsets is None else self.offsets.num_bytes)
        return self.bits + 8 * factor_bytes / self.codes.numel()

    def dequantized(self) -> torch.Tensor:
        """Return the weight as float32 [n, k], columns in the order of the inputs."""
        if self.code_values is not None:
            values = torch.tensor(self.code_values, dtype=torch.float32)[self.codes.int()]
        elif self.offsets is None:
            values = self.codes.float() - self.zero_point
        else:
            values = self.codes.float()
        values = values * self.scales.values().repeat_interleave(self.group_size, dim=1)
        if self.offsets is not None:
            values = values + self.offsets.values().repeat_interleave(self.group_size, dim=1)
        return in_input_order(values, self.input_order)


Weight = FloatWeight | CodedWeight


def in_input_order(values: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Return [rows, k] whose columns are in `order`, see `CodedWeight`, in the order of the inputs."""
    if order is None:
        return values
    found = torch.empty_like(values)
    found[:, order.long()] = values
    return found


def require_order(order: torch.Tensor, k: int) -> None:
    """Raise LayoutMismatch unless `order` has each of k inputs once. The kernels rely on it."""
    if order.dtype != torch.int32 or not torch.equal(order.sort().values, torch.arange(k, dtype=torch.int32)):
        raise LayoutMismatch(f"input_order is {order.dtype} {tuple(order.shape)}; must have each of {k} inputs once")


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _require_dtype(what: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise ModelError(f"{what} are {tensor.dtype}; must be {dtype}")


def _require_matrix(what: str, tensor: torch.Tensor) -> None:
    if tensor.dim() != 2 or not tensor.numel():
        raise LayoutMismatch(f"{what} are {tuple(tensor.shape)}; must be a matrix that is not empty")


def _require_shape(what: str, tensor: torch.Tensor, shape: tuple[int, int]) -> None:
    if tensor.shape != shape:
        raise LayoutMismatch(f"{what} are {tuple(tensor.shape)}; must be {shape}")
