"""Real English text to measure perplexity on."""

import bz2
import html
import re
from collections.abc import Iterator
from functools import cache

from torchq.zoo.fetch import fetch_file

_PARAGRAPHS_PER_ARTICLE = 6
_SHORTEST_PARAGRAPH = 200

_WIKI_MARKUP = [
    (r"<!--.*?-->", ""),
    (r"<ref[^>]*/>", ""),
    (r"<ref.*?</ref>", ""),
    *[(r"\{\{[^{}]*\}\}", ""), (r"\{\|[^{}]*\|\}", "")] * 6,  # templates and tables, from the innermost out
    (r"\[\[(?:File|Image|Category)[^\[\]]*(?:\[\[[^\]]*\]\][^\[\]]*)*\]\]", ""),
    (r"\[\[[^\]|]*\|([^\]]*)\]\]", r"\1"),  # [[target|shown]]
    (r"\[\[([^\]]*)\]\]", r"\1"),
    (r"'''?", ""),
    (r"\[https?:\S+ ([^\]]*)\]", r"\1"),
    (r"<[^>]+>", ""),
]


@cache
def wikipedia() -> str:
    """97 articles of English Wikipedia, each its title and first long paragraphs, markup removed."""
    return "\n\n".join(
        title + "\n\n" + "\n".join(paragraphs[:_PARAGRAPHS_PER_ARTICLE]) for title, paragraphs in _articles()
    )


def python_docs() -> str:
    """The Python language reference from the standard library: needs no download, differs between Python versions."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def _articles() -> Iterator[tuple[str, list[str]]]:
    with bz2.open(fetch_file("gensim", "4.4.0"), "rt", encoding="utf8") as stream:
        pages = re.findall(r"<title>(.*?)</title>.*?<text[^>]*>(.*?)</text>", stream.read(), re.DOTALL)
    for title, body in pages:
        text = html.unescape(html.unescape(body))  # the dump escapes entities that authors had typed
        for pattern, replacement in _WIKI_MARKUP:
            text = re.sub(pattern, replacement, text, flags=re.DOTALL)
        paragraphs = [re.sub("  +", " ", line.strip()) for line in text.split("\n") if _is_prose(line.strip())]
        if paragraphs:
            yield title, paragraphs


def _is_prose(line: str) -> bool:
    return len(line) > _SHORTEST_PARAGRAPH and line[0].isalpha() and not set(line) & set("|{")
