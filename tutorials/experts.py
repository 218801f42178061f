"""Quantize a mixture of experts with real weights: experts in MXFP4 with 16-bit activations, attention in MXFP8.

The model is SmolLM2-135M made into a Mixtral of four experts with top-2 routing, which computes what SmolLM2 computes
(torchq.zoo.experts). Run it with `python tutorials/experts.py` in an environment that has torchq[tutorials].
"""

# %% [markdown]
# # Mixtures of experts
# Transformers keeps all experts of a block in one module, `mlp.experts`, their matrices stacked in 3-D parameters. To
# torchq that module is one layer, of kind `moe`, matched by its name like any other.

# %%
import copy
import json
import logging
import sys

import torch
import transformers

from torchq import ConfigError, Quantizer, quantize_
from torchq.zoo import experts, smollm2, texts
from torchq.zoo.fetch import Unavailable
from torchq.zoo.measure import perplexity

transformers.utils.logging.disable_progress_bar()
for name in ("torchao", "torch.utils._pytree"):  # full of warnings on machines without a GPU
    logging.getLogger(name).setLevel(logging.ERROR)

# %% [markdown]
# ## The model
# Four experts a block, of which the router picks two for each token. Every expert is SmolLM2's MLP with its neurons in
# another order: whatever the router picks, the answer is SmolLM2's, but one expert's matrix in another's place would
# give nonsense.

# %%
try:
    dense, tokenizer = smollm2.load()
    text = texts.wikipedia()
except Unavailable as missing:
    sys.exit(str(missing))
tokens = tokenizer(text[:6000], return_tensors="pt")["input_ids"]
moe = experts.build(dense, "upcycle")


def say(model, question="What is the capital of France?"):
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        answer = model.generate(**chat, max_new_tokens=24, do_sample=False)
    return tokenizer.decode(answer[0, chat["input_ids"].shape[1] :], skip_special_tokens=True)


def judge(model):
    return f"perplexity {perplexity(model, tokens, windows=2):.2f} on 1022 tokens of Wikipedia; it says: {say(model)!r}"


block = moe.model.layers[0].mlp
print(block)
print({name: tuple(parameter.shape) for name, parameter in block.named_parameters()}, "\n")
print("SmolLM2:", judge(dense))
print("Mixtral:", judge(moe))

# %% [markdown]
# ## A plan
# The configuration is the JSON that a serving engine takes. `null` means 16-bit activations; attention gets the
# default ones of MXFP8. A plan costs nothing, and raises now what would go wrong later. The router is no linear layer,
# so that no rule can hit it by accident.

# %%
CONFIG = json.loads('{"targets": {"*mlp.experts*": {"weight": "mxfp4", "activation": null}, "*self_attn*": "mxfp8"}}')
print(Quantizer(CONFIG).plan(moe))

# %% [markdown]
# ## Quantize
# The logger `torchq` says which backend computes each pair of formats, and in one line what was quantized and why.

# %%
logger = logging.getLogger("torchq")
logger.setLevel(logging.INFO)
handler = logging.StreamHandler(sys.stdout)
handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
logger.addHandler(handler)

model = copy.deepcopy(moe)
report = quantize_(model, CONFIG)
logger.removeHandler(handler)

# %%
print(report, "\n")
print(model.model.layers[0].mlp, "\n")
print("Mixtral, quantized:", judge(model))

# %% [markdown]
# Four bits without calibration cost a model this small some perplexity. None of it is owed to the routing: the same
# formats on SmolLM2's own MLP cost the same.

# %%
twin = copy.deepcopy(dense)
quantize_(twin, {"targets": {"*.mlp.*": {"weight": "mxfp4", "activation": None}, "*self_attn*": "mxfp8"}})
print("SmolLM2, quantized:", judge(twin))

# %% [markdown]
# ## Activations, layer by layer
# The first ten blocks (`?` is one digit) with MXFP8 activations, the others with 16-bit ones. What is asked for is what
# runs: a backend that can't compute a pair is passed over, and the activation never changes.

# %%
mixed = copy.deepcopy(moe)
by_layer = {
    "model.layers.?.mlp.experts": {"weight": "mxfp4", "activation": "mxfp8"},
    "model.layers.??.mlp.experts": {"weight": "mxfp4", "activation": None},
    "*self_attn*": "mxfp8",
}
print(quantize_(mixed, {"targets": by_layer}).summary(), "\n")
print(judge(mixed))

# %% [markdown]
# ## Rules on one projection or one expert
# `*.experts.*.down_proj` and the like work as if every expert's matrices were layers, so `down_proj` may have a format
# of its own.

# %%
by_projection = {"*.experts.*.gate_proj": "mxfp4", "*.experts.*.up_proj": "mxfp4", "*.experts.*.down_proj": "mxfp8"}
print(Quantizer({"targets": by_projection}).plan(moe).quantized[0].spec)

# %% [markdown]
# The experts of one module are computed together, in one format. A rule that splits them raises before anything
# changes, and says which it leaves out.

# %%
try:
    quantize_(moe, {"targets": {"model.layers.0.mlp.experts.3.*": "mxfp8"}})
except ConfigError as error:
    print(f"ConfigError: {error}")
