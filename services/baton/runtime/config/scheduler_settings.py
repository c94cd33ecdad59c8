"""Settings of the scheduler: its placement and admission policies, and its queue."""

from typing import Literal

from baton.runtime.config.byte_sizes import MIB
from baton.runtime.config.config_base import Config, config, setting
from baton.runtime.config.setting import OtherForm

_NAME = "[A-Za-z_][A-Za-z0-9_]*"
POLICY_OF_A_MODULE = OtherForm(name="MODULE:FUNCTION", pattern=rf"{_NAME}(\.{_NAME})*:{_NAME}")
"""A scheduling policy that is not part of Baton."""


@config
class PolicySettings(Config):
    """Placement and admission policy of the scheduler, and its queue."""

    policy: Literal["kv_centric", "prefix_aware", "least_loaded", "round_robin", "random"] | str = setting(
        "kv_centric",
        help="scheduling policy, which selects the workers of each request; MODULE:FUNCTION loads one of your own",
        other_form=POLICY_OF_A_MODULE,
    )
    admission: Literal["off", "early", "predictive"] = setting(
        "off",
        help="whether to refuse requests that are predicted to miss their SLO; early predicts from the present load, "
        "predictive from the "
        "load expected when the prompt is computed",
    )

    max_worker_queue_s: float = setting(
        1.0,
        help="predicted queueing time above which a worker gets no more requests; if no worker is below it, requests "
        "are queued at the "
        "scheduler",
        unit="seconds",
        above=0,
    )
    max_queued_requests: int = setting(
        1024,
        help="maximum number of requests queued at the scheduler; more are refused; 0 disables the queue",
        minimum=0,
        aliases=("max_waiting",),
    )
    max_record_bytes: int = setting(
        64 * MIB,
        help="memory of the decision records of a cluster in Redis; the oldest are removed first",
        unit="bytes",
        minimum=64 * 1024,
    )
