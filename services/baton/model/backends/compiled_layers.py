"""Runs the model's own code with each layer compiled by torch.compile.

This fuses the operations between matrix products. Attention is called, not compiled, because its block tables
change from step to step. All layers share one compiled graph with dynamic sizes, so compilation is short.
Inductor's cache makes it shorter at the next start. CPUs use `fused_layers.py` instead.
"""

from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from baton.model.attention.paged_attention import PAGED, attend
from baton.model.step.forward import ModelForward

_COMPILED_CALL = "_compiled_call_impl"
"""Attribute that `Module.compile` sets, and that a module calls instead of its own `forward`."""


class CompiledForward(ModelForward):
    """Implements `Forward`. The compiled code is active only during `compute`, so that verification can run
    the original."""

    def __init__(self, model: PreTrainedModel, *, backend: str = "inductor") -> None:
        """Compile every layer. Raises AttributeError if the model has no `layers` in its base model."""
        base: Any = model.base_model
        layers: list[torch.nn.Module] = list(base.layers)
        AttentionInterface.register(PAGED, torch.compiler.disable(attend))
        self._compiled = []
        for layer in layers:
            layer.compile(dynamic=True, backend=backend)
            self._compiled.append((vars(layer), vars(layer).pop(_COMPILED_CALL)))
        super().__init__(model)

    def compute(
        self, token_ids: torch.Tensor, position_ids: torch.Tensor, sample_rows: torch.Tensor, attention: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the compiled model, see `ModelForward.compute`."""
        for layer, call in self._compiled:
            layer[_COMPILED_CALL] = call
        try:
            return super().compute(token_ids, position_ids, sample_rows, attention)
        finally:
            for layer, _ in self._compiled:
                del layer[_COMPILED_CALL]

    def stop_recompiling(self) -> None:
        """Disable further compilation in the whole process, so that no request waits for it.

        Call it after all kinds of steps have run. Anything that would need a new graph runs uncompiled from
        then on.
        """
        torch.compiler.set_stance("eager_on_recompile")
