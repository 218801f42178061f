"""Tests marked ``gpu`` are skipped, with the reason, where torch has no CUDA device."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason=f"no CUDA device: torch {torch.__version__} sees none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
