"""The pretrained models and texts, loaded once; tests that need one are skipped where it cannot be downloaded."""

import pytest

from torchq.zoo import albert, minilm, smollm2, texts, whisper
from torchq.zoo.fetch import Unavailable


def _or_skip(load):
    try:
        return load()
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session", name="smollm2")
def _smollm2():
    return _or_skip(smollm2.load)


@pytest.fixture(scope="session", name="minilm")
def _minilm():
    return _or_skip(minilm.load)


@pytest.fixture(scope="session", name="whisper")
def _whisper():
    return _or_skip(whisper.load)


@pytest.fixture(scope="session", name="albert")
def _albert():
    return _or_skip(albert.load)


@pytest.fixture(scope="session", name="wikipedia")
def _wikipedia():
    return _or_skip(texts.wikipedia)
