"""The model's own code with its layers compiled: the operations between two products of matrices become one
kernel.

Attention is not compiled but called: it follows block tables that differ from step to step. All layers share
what is compiled, for any number of tokens, so that it does not take long, and less at the next start
(Inductor keeps what it makes). A CPU has `fused.py`.
"""

from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from baton.model.attention.paged_attention import PAGED, attend
from baton.model.step.forward import ModelForward

_CALL = "_compiled_call_impl"
"""What `Module.compile` makes, and a module calls in place of its own code."""


class CompiledForward(ModelForward):
    """Implements `Forward`. Whoever else runs the model runs its own code: it is what this is proven by."""

    def __init__(self, model: PreTrainedModel, *, backend: str = "inductor") -> None:
        """Raises AttributeError if the model has no layers where models have them."""
        base: Any = model.base_model
        layers: list[torch.nn.Module] = list(base.layers)
        AttentionInterface.register(PAGED, torch.compiler.disable(attend))
        self._compiled = []
        for layer in layers:
            layer.compile(dynamic=True, backend=backend)
            self._compiled.append((vars(layer), vars(layer).pop(_CALL)))
        super().__init__(model)

    def compute(
        self, token_ids: torch.Tensor, position_ids: torch.Tensor, sample_rows: torch.Tensor, attention: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `ModelForward.compute`."""
        for layer, call in self._compiled:
            layer[_CALL] = call
        try:
            return super().compute(token_ids, position_ids, sample_rows, attention)
        finally:
            for layer, _ in self._compiled:
                del layer[_CALL]

    def settle(self) -> None:
        """When all kinds of steps have run: no request waits for a compiler. What would have to be compiled
        from now on runs as it is, in the whole process."""
        torch.compiler.set_stance("eager_on_recompile")
