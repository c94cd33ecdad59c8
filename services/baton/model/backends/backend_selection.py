"""Chooses the fastest backend that is verified to compute what the model's own code computes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import nn

from baton.core.errors import BatonError, ModelError
from baton.model.attention.attention_inputs import AttentionParams
from baton.model.attention.paged_attention import PagedKernel, paged_attention
from baton.model.backends.compiled_layers import CompiledForward
from baton.model.backends.cuda_graphs import BATCHES, CudaGraphForward
from baton.model.backends.fused_layers import FusedForward
from baton.model.backends.native_layers import DecoderForward, new_packer, prefers_native_gemm
from baton.model.backends.native_products import ProductsForward
from baton.model.device import device_info
from baton.model.forms.decoder_form import DecoderForm
from baton.model.forms.describe import describe_decoder
from baton.model.kernels.cpu.kernel_library import Kernels, load_kernels, paged_kernel
from baton.model.linear.experts import is_experts
from baton.model.linear.linear import Linear
from baton.model.linear.pack_model import holds_weight, pack_model, unknown_matrices
from baton.model.loading.model_loader import LoadedModel, require_free_memory
from baton.model.sampling.best_tokens import FindBest, find_best
from baton.model.step.forward import Forward, ModelForward
from baton.model.verification.verify_backend import Windows, verify_logits, verify_masks
from baton.runtime.logging import get_logger

log = get_logger(__name__)

TRITON, COMPILED, GRAPHS = GPU_STAGES = "Triton attention", "compiled layers", "CUDA graphs"
"""The parts of the fastest backend of a GPU. Each builds on those before it."""
NOTHING_REFUSED: Mapping[str, str] = MappingProxyType({})
NOTICED_SHARE = 0.05
"""Share of a model's weights in modules of unknown form that a worker warns of. Routers have less."""
COMPILED_TOKENS = (1, 2)
"""Numbers of step tokens to compile for. One token is compiled specially; two stand for all larger
numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A way to run the model.

    name: for logs and the startup summary.
    forward: runs a step.
    attention_params: of each layer, as verified; empty if they were not.
    kernel: the paged attention, if `forward` runs the model's own code.
    find_best: finds the most likely tokens.
    warm_batches: sizes of decode steps that are slow the first time.
    warm_tokens: sizes of prompt chunks that are slow the first time.
    warm_contexts: context lengths before a prompt chunk that are slow the first time.
    after_verification: called once when the backend is verified. It may take weights from the model, whose
    own code then raises.
    after_warmup: called once after all of these have been run.
    """

    name: str
    forward: Forward
    attention_params: tuple[AttentionParams, ...] = ()
    kernel: PagedKernel = paged_attention
    find_best: FindBest = find_best
    warm_batches: tuple[int, ...] = ()
    warm_tokens: tuple[int, ...] = ()
    warm_contexts: tuple[int, ...] = ()
    after_verification: Callable[[], None] = lambda: None
    after_warmup: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuBackend:
    """A backend over the C++ kernels: which models it serves, and how it is built.

    serves: true if the backend runs a model of this form, and no slower than the next one. The form is None
    if it is unknown.
    build: returns the backend, not yet verified. The model's own code still works.
    packs_weights: the backend holds a second copy of the weights, at least until it is verified.
    """

    name: str
    serves: Callable[[LoadedModel, DecoderForm | None, Kernels], bool]
    build: Callable[[LoadedModel, DecoderForm | None, Kernels], Backend]
    packs_weights: bool = False


def _build_native_decoder(loaded: LoadedModel, form: DecoderForm | None, kernels: Kernels) -> Backend:
    # Weights are freed only after verification: it runs the model's own code, and so does the next backend.
    assert form is not None
    forward = DecoderForward(form, kernels)
    return Backend(name=NATIVE_DECODER.name, forward=forward, after_verification=forward.release_model_weights)


def _build_fused_layers(loaded: LoadedModel, form: DecoderForm | None, kernels: Kernels) -> Backend:
    assert form is not None
    forward = FusedForward(form, kernels)
    return Backend(name=FUSED_LAYERS.name, forward=forward, after_verification=forward.release_model_weights)


def _build_native_products(loaded: LoadedModel, form: DecoderForm | None, kernels: Kernels) -> Backend:
    forward = ProductsForward(loaded.model, kernels)
    return Backend(
        name=NATIVE_PRODUCTS.name,
        forward=forward,
        kernel=paged_kernel(kernels),
        after_verification=forward.release_model_weights,
    )


def _build_native_attention(loaded: LoadedModel, form: DecoderForm | None, kernels: Kernels) -> Backend:
    return Backend(name=NATIVE_ATTENTION.name, forward=ModelForward(loaded.model), kernel=paged_kernel(kernels))


def _holds_weights(loaded: LoadedModel) -> bool:
    """True if a linear layer holds its weight in a format that torch's products do not take."""
    return any(holds_weight(module) for module in loaded.model.modules())


def _needs_native_gemm(loaded: LoadedModel, kernels: Kernels) -> bool:
    return prefers_native_gemm(loaded.dtype, kernels) or _holds_weights(loaded)


NATIVE_DECODER = CpuBackend(
    name="native decoder",
    serves=lambda loaded, form, kernels: form is not None and _needs_native_gemm(loaded, kernels),
    build=_build_native_decoder,
    packs_weights=True,
)
FUSED_LAYERS = CpuBackend(
    name="fused layers",
    serves=lambda loaded, form, kernels: form is not None and not _holds_weights(loaded),
    build=_build_fused_layers,
    packs_weights=True,
)
NATIVE_PRODUCTS = CpuBackend(
    name="native products",
    serves=lambda loaded, form, kernels: _needs_native_gemm(loaded, kernels),
    build=_build_native_products,
    packs_weights=True,
)
NATIVE_ATTENTION = CpuBackend(
    name="native attention", serves=lambda loaded, form, kernels: True, build=_build_native_attention
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuBackends:
    """The backends for a CPU, in the order in which they are tried.

    load: loads the kernels for a number of threads. Without them, no backend is used.
    free_bytes: bytes that can still be allocated on a device.
    """

    fastest_first: tuple[CpuBackend, ...] = (NATIVE_DECODER, FUSED_LAYERS, NATIVE_PRODUCTS, NATIVE_ATTENTION)
    load: Callable[[int], Kernels] = load_kernels
    free_bytes: Callable[[torch.device], int] = device_info.free_bytes


CPU_BACKENDS = CpuBackends()


def choose_backend(
    loaded: LoadedModel,
    *,
    kernels: str,
    num_threads: int,
    block_size_tokens: int,
    cpu_backends: CpuBackends = CPU_BACKENDS,
    gpu_refused: Mapping[str, str] = NOTHING_REFUSED,
) -> Backend:
    """Return the fastest backend that can be built here and is verified against the model's own code.

    `kernels`: the setting, `auto` or `torch`. `gpu_refused`: those of `GPU_STAGES` that must not run in this
    process, with the reason, see `gpu_check`. Each backend that is skipped is logged with its problem. Raises
    ModelError if no backend can serve the model. Afterwards only the returned backend can run the model,
    because it may have taken the weights, see `Backend.after_verification`.
    """
    native = None
    if kernels == "auto" and loaded.device.type == "cpu":
        native = _load_kernels(cpu_backends, num_threads)
    if native is not None and loaded.packer is None:
        pack_model(loaded.model, new_packer(native, loaded.dtype))
    _warn_of_reference_products(loaded)
    _warn_of_unknown_matrices(loaded)
    attention_params = verify_masks(loaded, block_size_tokens)
    windows = tuple(params.window for params in attention_params)
    backend = None
    if native is not None:
        backend = _cpu_backend(loaded, attention_params, cpu_backends, native, block_size_tokens)
    elif kernels == "auto" and loaded.device.type != "cpu":
        backend = _gpu_backend(loaded, block_size_tokens, windows, gpu_refused)
    if backend is None:
        verify_logits(loaded, block_size_tokens, windows=windows)
        backend = Backend(name="torch", forward=ModelForward(loaded.model))
    device_info.release_freed_memory()  # verification frees a lot, and KV memory is sized next by what is free
    return replace(backend, attention_params=attention_params)


def _load_kernels(backends: CpuBackends, num_threads: int) -> Kernels | None:
    try:
        return backends.load(num_threads)
    except Exception as error:  # compiler, linker and loader fail in many ways, and torch needs none of them
        hint = "the model runs through torch, slower; see `baton doctor`"
        log.warning("kernels_load_failed", problem=_describe(error), hint=hint)
        return None


def _warn_of_reference_products(loaded: LoadedModel) -> None:
    number = sum(isinstance(module, Linear) and not module.is_packed for module in loaded.model.modules())
    if number:
        hint = "their weights are dequantised at each step, which is slow; the kernels need a C++ compiler"
        log.warning("reference_products_used", num_modules=number, problem="no verified kernel", hint=hint)


def _warn_of_unknown_matrices(loaded: LoadedModel) -> None:
    shares = unknown_matrices(loaded.model)
    if loaded.device.type == "cpu" and sum(shares.values()) > NOTICED_SHARE:
        problem = f"{sum(shares.values()):.0%} of the weights are in {', '.join(sorted(shares))}"
        hint = "the model's own code multiplies them, slower than Baton's kernels, and --weights leaves them plain"
        log.warning("weights_of_unknown_form", problem=problem, hint=hint)


def _cpu_backend(
    loaded: LoadedModel,
    attention_params: Sequence[AttentionParams],
    backends: CpuBackends,
    kernels: Kernels,
    block_size_tokens: int,
) -> Backend | None:
    """Return the fastest verified backend that uses the C++ kernels, or None."""
    form = _form_of(loaded, attention_params)
    windows = tuple(params.window for params in attention_params)
    for candidate in backends.fastest_first:
        try:
            if candidate.serves(loaded, form, kernels):
                if candidate.packs_weights:
                    _require_memory_for_packed_weights(loaded, backends.free_bytes)
                backend = candidate.build(loaded, form, kernels)
                verified = _verified(backend, loaded, block_size_tokens, windows)
                return replace(verified, find_best=kernels.find_best)
        except Exception as error:  # such as a oneDNN operation that this build of torch lacks
            hint = "a slower backend is tried next"
            log.warning("backend_not_verified", backend=candidate.name, problem=_describe(error), hint=hint)
    return None


def _form_of(loaded: LoadedModel, attention_params: Sequence[AttentionParams]) -> DecoderForm | None:
    """Return the model's form, or None, with a log line that names the reason."""
    try:
        return describe_decoder(loaded, attention_params)
    except Exception as error:  # the model's own code is run in a way that it may not support
        hint = "the model's own code runs, with native products and attention"
        log.info("decoder_form_unknown", problem=_describe(error), hint=hint)
        return None


def _require_memory_for_packed_weights(loaded: LoadedModel, free_bytes: Callable[[torch.device], int]) -> None:
    packed = [module for module in loaded.model.modules() if type(module) is nn.Linear or is_experts(module)]
    weight_bytes = sum(each.numel() * each.itemsize for module in packed for each in module.parameters(recurse=False))
    what = "packed weights, beside the plain ones until verification ends,"
    require_free_memory(weight_bytes, free_bytes(loaded.device), what, str(loaded.device))


def _verified(backend: Backend, loaded: LoadedModel, block_size_tokens: int, windows: Windows) -> Backend:
    """Verify the backend and return it. If that fails, raise and leave the model as it was."""
    try:
        verify_logits(loaded, block_size_tokens, kernel=backend.kernel, forward=backend.forward, windows=windows)
    except BaseException:
        backend.forward.close()
        raise
    backend.after_verification()
    return backend


def _gpu_backend(
    loaded: LoadedModel, block_size_tokens: int, windows: Windows, refused: Mapping[str, str]
) -> Backend | None:
    """Return the model's own code with Triton attention, compiled layers and CUDA graphs, as far as
    verified."""
    try:
        _require_not_refused(TRITON, refused)
        backend = triton_backend(loaded, block_size_tokens, windows)
    except Exception as error:  # Triton needs a host compiler and the driver's, which fail in many ways
        hint = "attention gathers each context first, slower"
        log.warning("backend_not_verified", backend=TRITON, problem=_describe(error), hint=hint)
        return None
    if COMPILED in refused:
        hint = "the model's layers run operation by operation, slower"
        log.warning("backend_not_verified", backend=f"{TRITON}, compiled", problem=refused[COMPILED], hint=hint)
    else:
        compiled = compiled_backend(loaded, backend.kernel, TRITON, block_size_tokens, windows)
        backend = backend if compiled is None else replace(compiled, warm_contexts=backend.warm_contexts)
    try:
        _require_not_refused(GRAPHS, refused)
        return graphed_backend(loaded, backend, block_size_tokens, windows)
    except Exception as error:  # model code that synchronises or allocates in ways that cannot be captured
        hint = "each kernel of a decode step is launched separately, slower for small batches"
        log.warning("cuda_graphs_disabled", problem=_describe(error), hint=hint)
        return backend


def _require_not_refused(stage: str, refused: Mapping[str, str]) -> None:
    if stage in refused:
        raise ModelError(refused[stage])


def triton_backend(loaded: LoadedModel, block_size_tokens: int, windows: Windows = ()) -> Backend:
    """Return the model's own code with Triton attention. Raises what compilation or verification raises.

    `windows`: of each layer, see `verify_logits`.
    """
    from baton.model.kernels.triton.triton_attention import LONG_TOKENS, split_contexts, triton_attention

    verify_logits(loaded, block_size_tokens, kernel=triton_attention, longest=LONG_TOKENS, windows=windows)
    return Backend(
        name=TRITON,
        forward=ModelForward(loaded.model),
        kernel=triton_attention,
        warm_contexts=split_contexts(loaded.max_model_len),
    )


def graphed_backend(loaded: LoadedModel, backend: Backend, block_size_tokens: int, windows: Windows = ()) -> Backend:
    """Return a Triton backend whose decode steps are CUDA graphs.

    Raises what capture or verification raises; ModelError if a capture has failed.
    """
    from baton.model.kernels.triton.triton_attention import triton_decode

    assert isinstance(backend.forward, ModelForward)
    graphed = CudaGraphForward(backend.forward, triton_decode, max_model_len=loaded.max_model_len)
    verify_logits(loaded, block_size_tokens, kernel=backend.kernel, forward=graphed, windows=windows)
    if graphed.is_disabled:
        raise ModelError(f"a decode step of this model cannot be captured: {graphed.problem}")
    graphed.release_graphs()  # captured over the KV memory of the verification
    return replace(backend, name=f"{backend.name}, {GRAPHS}", forward=graphed, warm_batches=BATCHES)


def compiled_backend(
    loaded: LoadedModel,
    kernel: PagedKernel,
    name: str,
    block_size_tokens: int,
    windows: Windows = (),
    *,
    backend: str = "inductor",
) -> Backend | None:
    """Return `build_compiled_backend`, or None, with a warning, if compilation or verification fails."""
    try:
        return build_compiled_backend(loaded, kernel, name, block_size_tokens, windows, backend=backend)
    except Exception as error:  # torch.compile traces the model's code, and either may fail
        hint = "the model's layers run operation by operation, slower"
        log.warning("backend_not_verified", backend=f"{name}, compiled", problem=_describe(error), hint=hint)
        return None


def build_compiled_backend(
    loaded: LoadedModel,
    kernel: PagedKernel,
    name: str,
    block_size_tokens: int,
    windows: Windows = (),
    *,
    backend: str = "inductor",
) -> Backend:
    """Return a backend that runs the model's own code with compiled layers and attention `kernel`.

    `windows`: of each layer, see `verify_logits`. `backend`: of torch.compile. Raises what compilation or
    verification raises; the model is then as before.
    """
    forward = CompiledForward(loaded.model, backend=backend)
    try:
        verify_logits(loaded, block_size_tokens, kernel=kernel, forward=forward, windows=windows)
    except BaseException:
        forward.close()
        raise
    return Backend(
        name=f"{name}, compiled",
        forward=forward,
        kernel=kernel,
        warm_tokens=COMPILED_TOKENS,
        after_warmup=forward.stop_recompiling,
    )


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, BatonError) else f"{type(error).__name__}: {error}"
