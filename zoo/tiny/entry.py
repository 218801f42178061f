"""What a tiny model is, how its values are made, and the sizes and inputs that many of them share."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

HIDDEN, VOCAB = 64, 256
TOKENS = (2, 16)  # [B, T]
_FILL_STD = 0.1


@dataclass(frozen=True)
class Tiny:
    """One architecture; experts says whether tokens are routed to some of several experts."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Tensor]]
    experts: bool = False

    def build(self) -> nn.Module:
        """A new model in fp32 and eval mode, with the same values on every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.make().eval()
        _fill(model)
        return model

    @staticmethod
    def output(out) -> Tensor:
        """The tensor to compare: the logits, or the last hidden states of a model without a head."""
        if isinstance(out, Tensor):
            return out
        return out.logits if "logits" in out else out.last_hidden_state


@torch.no_grad()
def _fill(model: nn.Module) -> None:
    """Gives a value to what a config leaves at zero or unset: experts, routers, biases, attention sinks, hash routes.

    Zero biases and uniform routers would hide a dropped bias or a token sent to the wrong expert.
    """
    generator = torch.Generator().manual_seed(1)

    def randomize(tensor: Tensor) -> None:
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * _FILL_STD)

    for name, parameter in model.named_parameters():
        routed = any(part in name for part in ("expert", "router", "gate.weight", "sinks"))
        if routed or not parameter.any():
            randomize(parameter)
    for name, buffer in model.named_buffers():
        if name.endswith(("correction_bias", "expert_bias")):  # the router's preference between experts
            randomize(buffer)
        if name.endswith("tid2eid"):  # DeepSeek-V4: the experts of each token id
            experts = model.config.n_routed_experts
            routes = [torch.randperm(experts, generator=generator)[: buffer.shape[1]] for _ in range(buffer.shape[0])]
            buffer.copy_(torch.stack(routes))


def _random_ids(seed: int = 2) -> Tensor:
    # Below 3 are special tokens, from 250 on the image tokens of Kimi-K2.5.
    return torch.randint(3, 250, TOKENS, generator=torch.Generator().manual_seed(seed))


def token_ids() -> dict[str, Tensor]:
    return {"input_ids": _random_ids()}


def two_sides() -> dict[str, Tensor]:
    return {"input_ids": _random_ids(), "decoder_input_ids": _random_ids(seed=3)}


def floats(name: str, *shape: int) -> Callable[[], dict[str, Tensor]]:
    return lambda: {name: torch.randn(shape, generator=torch.Generator().manual_seed(2))}


def find(name: str):
    """A class of transformers by name, or by `model.name` where it is only in that model's modeling file."""
    if "." not in name:
        return getattr(importlib.import_module("transformers"), name)
    model, name = name.split(".")
    return getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)


def hf(model: str, config: str, inputs=token_ids, experts: bool = False, **fields) -> Tiny:
    return Tiny(lambda: find(model)(find(config)(**fields)), inputs, experts)


SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZE = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2}
LLAMA = {
    **SIZE,
    **SPECIAL,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
QWEN3 = {**LLAMA, "head_dim": 16}
T5 = {"vocab_size": VOCAB, "d_model": HIDDEN, "d_kv": 16, "num_heads": 4, "num_layers": 2, "decoder_start_token_id": 0}
