"""Settings of torch's allocator with which NIXL cannot register KV memory."""

import pytest

from baton.core.errors import ConfigError
from baton.worker.device.gpu_allocator import (
    VARIABLES,
    expandable_segments,
    require_plain_memory,
    require_plain_segments,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", ""),
        ("expandable_segments:True", "True"),
        ("expandable_segments:False", "False"),
        (" expandable_segments : True ", "True"),
        ("expandable\t_segments:\nTrue", "True"),
        ("max_split_size_mb:128,expandable_segments:True", "True"),
        ("expandable_segments:True,max_split_size_mb:128", "True"),
        ("roundup_power2_divisions:[256:1,512:2,>:8],expandable_segments:True", "True"),
        ("roundup_power2_divisions:[256:1,expandable_segments:True]", ""),
        ("expandable_segments:True,expandable_segments:False", "False"),
        ("expandable_segments:False,expandable_segments:True", "True"),
        ("expandable_segments:true", "true"),
        ("my_expandable_segments:True", ""),
        ("backend:native,garbage_collection_threshold:0.8", ""),
        (",,expandable_segments:True,", "True"),
        ("expandable_segments", ""),
        ("[", ""),
    ],
)
def test_the_option_is_found_as_torch_reads_it(text: str, value: str) -> None:
    assert expandable_segments(text) == value


@pytest.mark.parametrize("name", VARIABLES)
@pytest.mark.parametrize("value", ["True", "true", "1"])
def test_expandable_segments_are_refused_with_a_remedy(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} sets expandable_segments:{value}; .* --transfer local"):
        require_plain_segments({name: f"max_split_size_mb:64, expandable_segments:{value}"})


@pytest.mark.parametrize("environ", [{}, {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, {"OTHER": "x"}])
def test_other_settings_are_allowed(environ: dict[str, str]) -> None:
    require_plain_segments(environ)


def test_any_variable_must_be_harmless() -> None:
    """Which of them torch reads first depends on its version."""
    environ = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    with pytest.raises(ConfigError, match="PYTORCH_ALLOC_CONF"):
        require_plain_segments(environ)


def test_memory_in_an_expandable_segment_is_refused() -> None:
    segments = [
        {"address": 0x1000, "total_size": 0x1000, "is_expandable": False},
        {"address": 0x2000, "total_size": 0x1000, "is_expandable": True},
        {"address": 0x3000, "total_size": 0x1000},
    ]
    for address in (0x1000, 0x1FFF, 0x3000, 0x9000):
        require_plain_memory(segments, address)
    for address in (0x2000, 0x2FFF):
        with pytest.raises(ConfigError, match="expandable segment"):
            require_plain_memory(segments, address)
