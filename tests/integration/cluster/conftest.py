"""Reference checkers for the demo model, shared by all tests of this folder."""

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
