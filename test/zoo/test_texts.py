"""The texts are prose without markup, and long enough."""

import re

from torchq.zoo.texts import python_docs


def test_wikipedia_is_prose(wikipedia):
    assert wikipedia.startswith("Anarchism\n\nAnarchism is a political philosophy")
    assert len(wikipedia) > 300_000
    assert not re.search(r"\[\[|\]\]|\{\{|<ref|&[a-z]+;", wikipedia)


def test_python_docs():
    text = python_docs()
    assert len(text) > 300_000
    assert "assert" in text
