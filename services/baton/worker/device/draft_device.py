"""Opens a draft model beside the model whose drafts it makes: on the same device, in the same compute
thread."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from baton.core.cluster.worker_report import WorkerRole
from baton.core.kv.kv_layout import KvLayout
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.speculation.model_rounds import MAX_MISSING_TOKENS, MAX_PIECE_TOKENS
from baton.engine.state.engine_config import EngineConfig
from baton.runtime.config.settings import WorkerConfig
from baton.runtime.config.worker_settings import draft_model_of
from baton.transfer.integrity.generation_table import ENTRY_BYTES, MemoryGenerationTable
from baton.worker.costs.step_cost_keeper import step_costs_key
from baton.worker.device.gpu_start import Say
from baton.worker.device.gpu_use import step_tokens_of
from baton.worker.device.packing_settings import packing
from baton.worker.device.worker_device import DraftDevice, num_blocks_per_draft_block

if TYPE_CHECKING:
    from baton.model.backends.backend_selection import Backend
    from baton.model.loading.model_loader import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDraft:
    """A loaded draft model, before it has KV memory.

    layout: one block table, also for layers with a window: KV is kept for all tokens.
    step_bytes: peak activations of its largest step. vocab_size: of the model that verifies.
    """

    loaded: "LoadedModel"
    backend: "Backend"
    layout: KvLayout
    engine_config: EngineConfig
    num_threads: int
    step_bytes: int
    vocab_size: int

    def open(self, thread: ThreadPoolExecutor, layout: KvLayout, num_model_blocks: int) -> DraftDevice:
        """Allocate KV memory for the tokens of a model with this layout and start the executor.

        Call it in `thread`, and `backend.after_warmup` once both models have run each kind of step.
        """
        from baton.model.device.device_info import device_name
        from baton.model.device.kv_tensors import KvCache
        from baton.model.torch_executor import TorchExecutor

        loaded = self.loaded
        num_blocks = -(-num_model_blocks // num_blocks_per_draft_block(layout))
        cache = KvCache.zeros(self.layout, num_blocks, loaded.device, loaded.dtype)
        backend = replace(self.backend, after_warmup=lambda: None)  # the other model is still to be compiled
        executor = TorchExecutor(loaded.model, cache, thread=thread, backend=backend)
        executor.warm(self.engine_config.max_num_seqs)
        generations = MemoryGenerationTable(bytearray(ENTRY_BYTES * num_blocks), 0)
        return DraftDevice(
            executor=executor,
            engine_config=self.engine_config,
            pool=BlockPool(num_blocks, self.layout.block_size_tokens, generations),
            vocab_size=self.vocab_size,
            summary=f"drafts by {loaded.path.name}, {self.backend.name}",
            costs_key=step_costs_key(
                self.layout.model_fingerprint,
                device_name(loaded.device),
                str(loaded.dtype),
                self.num_threads,
                self.backend.name,
                self.layout.block_size_tokens,
            ),
        )


def draft_config(config: WorkerConfig) -> WorkerConfig | None:
    """Return the settings by which the draft model of a worker is loaded and run, as if it were its model.

    None if `speculate` names no draft model, or on a prefill worker. Its dtypes are those of its checkpoint.
    A step has each sequence, and a piece of one that is behind.
    """
    name = draft_model_of(config.speculate)
    if name is None or not WorkerRole(config.role).can_decode:
        return None
    return replace(
        config,
        model=name,
        dtype="auto",
        kv_dtype="auto",
        max_model_len=None,
        max_num_batched_tokens=MAX_PIECE_TOKENS + MAX_MISSING_TOKENS * config.max_num_seqs,
    )


def load_draft(
    own: WorkerConfig,
    verifying: "LoadedModel",
    num_threads: int,
    gpu_refused: Mapping[str, str],
    say: Say = lambda text: None,
) -> LoadedDraft:
    """Load the draft model of `own`, see `draft_config`. `gpu_refused`: as in `choose_backend`.

    say: told what takes long.
    Raises ModelError if the model cannot be served, does not fit, or has another tokenizer than `verifying`.
    """
    from baton.model.backends.backend_selection import choose_backend
    from baton.model.loading.model_loader import load_model
    from baton.model.loading.model_source import resolve_model
    from baton.model.loading.same_tokenizer import require_same_tokenizer
    from baton.model.peak_memory import known_step_bytes

    path = resolve_model(own.model)
    require_same_tokenizer(verifying.path, path)
    loaded = load_model(
        path,
        device=verifying.device.type,
        weights=own.weights,
        max_model_len=_draft_max_model_len(path, verifying.max_model_len),
        say=say,
        **packing(own, num_threads),
    )
    backend = choose_backend(
        loaded,
        kernels=own.kernels,
        num_threads=num_threads,
        block_size_tokens=own.block_size_tokens,
        gpu_refused=gpu_refused,
    )
    limits = EngineConfig(
        max_num_batched_tokens=step_tokens_of(own),
        max_num_seqs=own.max_num_seqs,
        max_model_len=loaded.max_model_len,
        block_size_tokens=own.block_size_tokens,
    )
    return LoadedDraft(
        loaded=loaded,
        backend=backend,
        layout=loaded.layout(own.block_size_tokens),
        engine_config=limits,
        num_threads=num_threads,
        vocab_size=verifying.vocab_size,
        step_bytes=known_step_bytes(
            loaded,
            backend,
            block_size_tokens=limits.block_size_tokens,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_seqs=limits.max_num_seqs,
            num_threads=num_threads,
        ),
    )


def _draft_max_model_len(path: Path, verifying: int) -> int | None:
    """Return the longest context of a draft model: that of the model that verifies, or its own if shorter.

    Some models are served only if the longest context is given.
    """
    from baton.model.loading.model_loader import text_config_and_dtype

    own = getattr(text_config_and_dtype(path, "auto")[0], "max_position_embeddings", None)
    return min(own, verifying) if isinstance(own, int) else None  # None: loading says what is missing
