"""Plans and traces, which a simulator may import, load no client library, no command line and nothing of
Baton."""

import subprocess
import sys

PURE = """
    plan.plan plan.plan_check plan.plan_file plan.plan_summary plan.prompt_tokens plan.words plan.vocabulary plan.draws
    plan.lengths plan.arrivals plan.mixes plan.cache_model
    plan.sources.workloads plan.sources.trace plan.sources.servegen plan.sources.sharegpt
    text_forms user_files slo_target loadgen_errors measure.records measure.request_metrics
""".split()
FORBIDDEN = {"aiohttp", "grpc", "rich", "click", "tokenizers", "httpx", "baton"}
CODE = f"""
import importlib, sys
for name in {PURE!r}:
    importlib.import_module("loadgen." + name)
print(sorted({FORBIDDEN!r} & sys.modules.keys()))
"""


def test_plans_need_no_client_library() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "[]\n"
