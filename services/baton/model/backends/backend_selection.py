"""Chooses the fastest backend that is verified to compute what the model's own code computes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton.core.errors import BatonError
from baton.model.attention.attention_inputs import AttentionParams
from baton.model.attention.paged_attention import PagedKernel, paged_attention
from baton.model.backends.compiled_layers import CompiledForward
from baton.model.backends.cuda_graphs import BATCHES, CudaGraphForward
from baton.model.backends.decoder_layers import is_plain_decoder
from baton.model.backends.fused_layers import FusedForward
from baton.model.backends.native_layers import DecoderForward, prefers_native_gemm
from baton.model.device.device_info import free_bytes, release_freed_memory
from baton.model.kernels.cpu.kernel_library import Kernels, load_kernels, paged_kernel
from baton.model.loading.model_loader import LoadedModel, require_free_memory
from baton.model.step.forward import Forward, ModelForward
from baton.model.verification.verify_backend import verify_logits, verify_masks
from baton.runtime.logging import get_logger

log = get_logger(__name__)

COMPILED_TOKENS = (1, 2)
"""Numbers of step tokens to compile for. One token is compiled specially; two stand for all larger
numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A way to run the model.

    name: for logs and the startup summary.
    forward: runs a step.
    kernel: the paged attention, if `forward` runs the model's own code.
    warm_batches: sizes of decode steps that are slow the first time.
    warm_tokens: sizes of prompt chunks that are slow the first time.
    warm_contexts: context lengths before a prompt chunk that are slow the first time.
    after_warmup: called once after all of these have been run.
    """

    name: str
    forward: Forward
    kernel: PagedKernel = paged_attention
    warm_batches: tuple[int, ...] = ()
    warm_tokens: tuple[int, ...] = ()
    warm_contexts: tuple[int, ...] = ()
    after_warmup: Callable[[], None] = lambda: None


def choose_backend(loaded: LoadedModel, *, kernels: str, num_threads: int, block_size_tokens: int) -> Backend:
    """Return the fastest backend that can be built here and is verified against the model's own code.

    `kernels`: the setting, `auto` or `torch`. Each backend that is skipped is logged with its problem. Raises
    ModelError if no backend can serve the model. Afterwards only the returned backend can run the model,
    because it may have taken the weights, see `FusedForward.release_model_weights`.
    """
    attention_params = verify_masks(loaded, block_size_tokens)
    backend = None
    if kernels == "auto" and loaded.device.type == "cpu":
        backend = _native_backend(loaded, attention_params, num_threads, block_size_tokens)
    elif kernels == "auto":
        backend = _triton_backend(loaded, block_size_tokens)
    if backend is None:
        verify_logits(loaded, block_size_tokens)
        backend = Backend(name="torch", forward=ModelForward(loaded.model))
    release_freed_memory()  # verification frees a lot, and KV memory is sized next by what is free
    return backend


def _native_backend(
    loaded: LoadedModel, attention_params: Sequence[AttentionParams], num_threads: int, block_size_tokens: int
) -> Backend | None:
    """Return the fastest verified backend that uses the C++ kernels, or None."""
    try:
        kernels = load_kernels(num_threads)
    except Exception as error:  # compiler, linker and loader fail in many ways, and torch needs none of them
        hint = "the model runs through torch, slower; see `baton doctor`"
        log.warning("kernels_unavailable", problem=_describe(error), hint=hint)
        return None
    for use_native_decoder in (True, False):
        try:
            if is_plain_decoder(loaded.model) and (
                not use_native_decoder or prefers_native_gemm(loaded.model, kernels)
            ):
                return _fused_backend(loaded, attention_params, kernels, block_size_tokens, use_native_decoder)
        except Exception as error:  # such as a oneDNN operation that this build of torch lacks
            backend = "native decoder" if use_native_decoder else "fused layers"
            hint = "a slower backend is tried next"
            log.warning("backend_not_verified", backend=backend, problem=_describe(error), hint=hint)
    try:
        verify_logits(loaded, block_size_tokens, kernel=paged_kernel(kernels))
    except Exception as error:
        hint = "the model runs through torch, slower"
        log.warning("backend_not_verified", backend="native attention", problem=_describe(error), hint=hint)
        return None
    return Backend(name="native attention", forward=ModelForward(loaded.model), kernel=paged_kernel(kernels))


def _triton_backend(loaded: LoadedModel, block_size_tokens: int) -> Backend | None:
    """Return the model's own code with Triton attention, compiled layers and CUDA graphs, as far as
    verified."""
    try:
        from baton.model.kernels.triton.triton_attention import (
            LONG_TOKENS,
            split_contexts,
            triton_attention,
            triton_decode,
        )

        verify_logits(loaded, block_size_tokens, kernel=triton_attention, longest=LONG_TOKENS)
    except Exception as error:  # Triton needs a host compiler and the driver's, which fail in many ways
        hint = "attention gathers each context first, slower"
        log.warning("backend_not_verified", backend="Triton attention", problem=_describe(error), hint=hint)
        return None
    compiled = compiled_backend(loaded, triton_attention, "Triton attention", block_size_tokens)
    backend = compiled or Backend(name="Triton attention", forward=ModelForward(loaded.model), kernel=triton_attention)
    backend = replace(backend, warm_contexts=split_contexts(loaded.max_model_len))
    assert isinstance(backend.forward, ModelForward)
    graphed = CudaGraphForward(backend.forward, triton_decode, max_model_len=loaded.max_model_len)
    try:
        verify_logits(loaded, block_size_tokens, kernel=triton_attention, forward=graphed)
    except Exception as error:  # model code that synchronises or allocates in ways that cannot be captured
        hint = "each kernel of a decode step is launched separately, slower for small batches"
        log.warning("cuda_graphs_disabled", problem=_describe(error), hint=hint)
        return backend
    if graphed.is_disabled:
        return backend
    graphed.release_graphs()  # captured over the KV memory of the verification
    return replace(backend, name=f"{backend.name}, CUDA graphs", forward=graphed, warm_batches=BATCHES)


def compiled_backend(
    loaded: LoadedModel, kernel: PagedKernel, name: str, block_size_tokens: int, *, backend: str = "inductor"
) -> Backend | None:
    """Return a backend that runs the model's own code with compiled layers and attention `kernel`.

    `backend`: of torch.compile. Returns None, and logs a warning, if compilation or verification fails.
    """
    forward = None
    try:
        forward = CompiledForward(loaded.model, backend=backend)
        verify_logits(loaded, block_size_tokens, kernel=kernel, forward=forward)
    except Exception as error:  # torch.compile traces the model's code, and either may fail
        if forward is not None:
            forward.close()
        hint = "the model's layers run operation by operation, slower"
        log.warning("backend_not_verified", backend=f"{name}, compiled", problem=_describe(error), hint=hint)
        return None
    return Backend(
        name=f"{name}, compiled",
        forward=forward,
        kernel=kernel,
        warm_tokens=COMPILED_TOKENS,
        after_warmup=forward.stop_recompiling,
    )


def _fused_backend(
    loaded: LoadedModel,
    attention_params: Sequence[AttentionParams],
    kernels: Kernels,
    block_size_tokens: int,
    use_native_decoder: bool,
) -> Backend:
    weight_bytes = sum(parameter.numel() * parameter.itemsize for parameter in loaded.model.parameters())
    what = "packed weights, beside the plain ones until verification ends,"
    require_free_memory(weight_bytes, free_bytes(loaded.device), what, str(loaded.device))
    forward = (DecoderForward if use_native_decoder else FusedForward)(loaded.model, attention_params, kernels)
    verify_logits(loaded, block_size_tokens, forward=forward)
    # Only now: verification runs the model's own code, and so does the next backend if this one fails.
    forward.release_model_weights()
    return Backend(name="native decoder" if use_native_decoder else "fused layers", forward=forward)


def _describe(error: Exception) -> str:
    return str(error) if isinstance(error, BatonError) else f"{type(error).__name__}: {error}"
