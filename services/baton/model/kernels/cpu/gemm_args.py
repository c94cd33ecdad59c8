"""ctypes mirrors of the arguments of the C++ products, see weight_format.h, gemm_pack.h and linear.h."""

import ctypes


class FactorFormat(ctypes.Structure):
    """ctypes mirror of `FactorFormat`. All zero: there are no such factors."""

    _fields_ = [(name, ctypes.c_int32) for name in ("super_size", "super_dtype", "codes")]


class WeightFormat(ctypes.Structure):
    """ctypes mirror of `WeightFormat`."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("kind", "bits", "group_size", "zero_point")),
        *((name, FactorFormat) for name in ("scales", "offsets")),
        ("has_table", ctypes.c_int32),
        ("table", ctypes.c_uint8 * 16),
    ]


class PackedWeightArgs(ctypes.Structure):
    """ctypes mirror of `PackedWeights`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("packed", "bias", "order")),
        *((name, ctypes.c_int64) for name in ("n", "k")),
        ("format", WeightFormat),
    ]


class UnpackedWeightArgs(ctypes.Structure):
    """ctypes mirror of `UnpackedWeights`."""

    _fields_ = [
        (name, ctypes.c_void_p) for name in ("values", "scale_supers", "scale_codes", "offset_supers", "offset_codes")
    ]


class GemmArgs(ctypes.Structure):
    """ctypes mirror of `GemmArgs`."""

    _fields_ = [("weights", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("count", "n", "k"))]
