"""References that every test of a cluster shares; both are of the demo model."""

import pytest
import torch

from baton.model.loading.model_source import DEMO_DIR
from tests.cache_audit import CacheAuditor
from tests.exactness import ExactnessChecker


@pytest.fixture(scope="session")
def checker() -> ExactnessChecker:
    torch.set_num_threads(1)
    return ExactnessChecker(DEMO_DIR)


@pytest.fixture(scope="session")
def auditor() -> CacheAuditor:
    torch.set_num_threads(1)
    return CacheAuditor(DEMO_DIR)
