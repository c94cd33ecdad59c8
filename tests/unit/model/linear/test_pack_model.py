"""Tests which product computes a weight, and that a model's weights are packed once and freed."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from baton.model.kernels.cpu.kernel_library import Kernels
from baton.model.linear import packer as packer_module
from baton.model.linear.embedding import WeightEmbedding
from baton.model.linear.linear import Linear
from baton.model.linear.pack_model import pack_model, rounds_activations
from baton.model.linear.packed_weight import ArenaMemory, PlacedBytes
from baton.model.linear.packer import WeightPacker
from baton.model.linear.product_choice import Product, ProductFacts, choose_product
from baton.model.linear.quantise import quantise
from tests.unit.model.linear.test_packed_linear import kernels_of
from tests.unit.model.native_libraries import library_for, processors


def kernels() -> Kernels:
    return kernels_of(library_for(processors()[0]))


def new_packer(dtype: torch.dtype = torch.float32, **options: Any) -> WeightPacker:
    return WeightPacker(kernels(), dtype=dtype, **{"native_is_faster": True} | options)


class Tied(nn.Module):
    """A model whose output layer has the embedding's weight, with a router and a linear layer in its code."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(70, 32, padding_idx=60)
        self.inner = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32, bias=False))
        self.mixture = nn.ModuleDict({"gate": nn.Linear(32, 4)})
        self.mixture.experts = nn.Identity()
        self.head = nn.Linear(32, 70)
        self.head.weight = self.embed.weight
        self.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.head(self.inner(x) + x.to(self.inner[0].weight.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_computes_the_same_with_packed_weights(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, tokens = Tied().to(dtype), torch.tensor([[3, 60, 69]])
    expected = model(tokens)
    pack_model(model, new_packer(dtype))
    torch.testing.assert_close(model(tokens), expected, atol=1e-5 if dtype == torch.float32 else 0.05, rtol=0.01)


def test_shared_weights_are_packed_once_and_freed() -> None:
    model = Tied()
    unpacked = [weakref.ref(each) for each in (model.embed.weight, model.inner[0].weight, model.inner[1].weight)]
    pack_model(model, new_packer())
    gc.collect()
    assert not [each for each in unpacked if each() is not None]
    assert isinstance(model.embed, WeightEmbedding)
    assert model.embed.weight is model.head.weight  # type: ignore[comparison-overlap]
    assert type(model.mixture["gate"]) is nn.Linear, "routers stay"
    assert {name for name, _ in model.named_parameters()} == {
        *("inner.0.bias", "head.bias", "mixture.gate.weight", "mixture.gate.bias")
    }


def test_each_weight_is_freed_before_the_next_one_is_packed() -> None:
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32), nn.Linear(32, 8)).requires_grad_(False)
    unpacked = [weakref.ref(module.weight) for module in model]
    alive = []

    class CountingArena(ArenaMemory):
        def place(self, num_bytes: int, fill: Callable[[int], None]) -> PlacedBytes:
            gc.collect()
            alive.append(sum(each() is not None for each in unpacked))
            return super().place(num_bytes, fill)

    pack_model(model, new_packer(memory=CountingArena(kernels().weight_arena)))
    assert alive == [3, 2, 1]


def test_an_embedding_of_its_own_stays() -> None:
    model = nn.Sequential(nn.Embedding(8, 32), nn.Linear(32, 8))
    pack_model(model, new_packer())
    assert [type(module) for module in model] == [nn.Embedding, Linear]


def test_coded_weights_are_packed_wherever_they_are() -> None:
    """In a linear layer, in an embedding, and in a plain layer beside them."""
    weight = quantise(torch.randn(32, 32), 4, 32)
    model = nn.Sequential(
        WeightEmbedding(weight, nn.Embedding(32, 32), torch.float32),
        Linear(weight),
        nn.Linear(32, 8),
    ).requires_grad_(False)
    expected = model[0](torch.arange(5))
    pack_model(model, new_packer(native_is_faster=False))
    assert model[0].weight is model[1].weight
    assert model[1].is_packed
    assert isinstance(model[2], Linear)
    assert torch.equal(model[0](torch.arange(5)), expected)
    assert rounds_activations(model)


def test_plain_models_stay_where_torch_is_faster() -> None:
    model = nn.Sequential(nn.Linear(32, 8), nn.Linear(8, 8).bfloat16())
    pack_model(model, new_packer(native_is_faster=False))
    assert all(type(module) is nn.Linear for module in model)
    pack_model(model, new_packer())
    assert [type(module) for module in model] == [Linear, nn.Linear], "the other dtype belongs to the model's code"
    assert not rounds_activations(model)


def test_a_format_is_verified_once_and_not_used_if_it_is_wrong(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checked = []

    def problem(packed: Any, weight: Any, dtype: torch.dtype) -> str | None:
        checked.append(packed.shape)
        return "all outputs differ" if packed.shape[1] == 32 else None

    monkeypatch.setattr(packer_module, "product_problem", problem)
    model = nn.Sequential(*(nn.Linear(k, n) for n, k in ((64, 32), (128, 32), (64, 48), (128, 48))))
    pack_model(model, new_packer())
    assert sorted({k for _, k in checked}) == [32, 48]
    assert len(checked) == 2
    assert [type(module) for module in model] == [nn.Linear, nn.Linear, Linear, Linear]
    assert caplog.text.count("native_product_not_verified") == 2
    assert "torch product" in caplog.text


def test_without_memory_the_model_still_works(caplog: pytest.LogCaptureFixture) -> None:
    class Full:
        def place(self, num_bytes: int, fill: object) -> object:
            raise OSError(12, "Cannot allocate memory")

    model, tokens = Tied(), torch.tensor([1])
    expected = model(tokens)
    pack_model(model, new_packer(memory=Full()))
    assert torch.equal(model(tokens), expected)
    assert "weights_not_packed" in caplog.text


FACTS = ProductFacts(has_kernels=True, is_plain=True, native_is_faster=True, is_mixed=False, is_verified=True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Product.NATIVE),
        ({"native_is_faster": False}, Product.TORCH),
        ({"native_is_faster": False, "is_mixed": True}, Product.NATIVE),
        ({"native_is_faster": False, "is_plain": False}, Product.NATIVE),
        ({"is_verified": False}, Product.TORCH),
        ({"is_verified": False, "is_plain": False}, Product.REFERENCE),
        ({"has_kernels": False}, Product.TORCH),
        ({"has_kernels": False, "is_plain": False}, Product.REFERENCE),
    ],
)
def test_choice_of_the_product(changes: dict[str, bool], expected: Product) -> None:
    assert (
        choose_product(ProductFacts(**{name: getattr(FACTS, name) for name in FACTS.__slots__} | changes)) is expected
    )
