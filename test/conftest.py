"""The pretrained models and texts, loaded once; and the skip of ``gpu`` tests where torch has no CUDA device.

Without network a test that needs a model which is not cached fails with zoo's message: what is missing, what to run.
"""

import pytest
import torch

from torchq.zoo import albert, minilm, smollm2, texts, whisper


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason=f"no CUDA device: torch {torch.__version__} sees none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(scope="session", name="smollm2")
def _smollm2():
    return smollm2.load()


@pytest.fixture(scope="session", name="minilm")
def _minilm():
    return minilm.load()


@pytest.fixture(scope="session", name="whisper")
def _whisper():
    return whisper.load()


@pytest.fixture(scope="session", name="albert")
def _albert():
    return albert.load()


@pytest.fixture(scope="session", name="wikipedia")
def _wikipedia():
    return texts.wikipedia()
