"""A worker finds what its child has compiled for a reduced model, with inductor's backend for CPUs."""

import os
import shutil
from pathlib import Path

import pytest

from baton.model.loading.random_init import init_model
from baton.runtime.child.child_process import run_child
from baton.worker.device.compile_caches import VARIABLES, share_compile_caches
from tests.integration.test_model_exactness import TINY_MODELS

ENOUGH_S = 400.0

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler"),
]


def test_layers_of_the_whole_model_are_found_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = TINY_MODELS["qwen3"]()
    config.num_hidden_layers = 4
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[0]] * 4
    init_model(config, tmp_path / "model", seed=1)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[4]), prepend=os.pathsep)
    for variable in VARIABLES:
        monkeypatch.setenv(variable, "")
    share_compile_caches(os.environ, tmp_path / "compiled")
    runs = [{"scratch": str(tmp_path / "reduced")}, {}]
    ends = [
        run_child("tests.child_checks:compile_layers", {"path": str(tmp_path / "model"), **run}, ENOUGH_S)
        for run in runs
    ]
    (child,), (worker,) = (end.answers for end in ends)
    assert (child["layers"], worker["layers"]) == (2, 4)
    assert child["misses"] > 0
    assert (worker["hits"], worker["misses"]) == (child["misses"] + child["hits"], 0)
