"""Shared by all tests: our own helpers on the path, and an environment that asks nobody outside."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

from raytune_eagle.nodes import local_ray

sys.path.insert(0, str(Path(__file__).parent))
settings.register_profile("ours", deadline=None)  # how long an example takes tells how busy the machine is
settings.load_profile("ours")


def pytest_collection_modifyitems(items):
    """Every test says in its docstring what it proves."""
    silent = [item.nodeid for item in items if not (getattr(item, "function", None) and item.function.__doc__)]
    if silent:
        raise pytest.UsageError(f"tests without a docstring: {', '.join(silent)}")


# Ray reads these once, when it is imported, whichever test that may be in.
os.environ.update(local_ray.ENVIRONMENT)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
