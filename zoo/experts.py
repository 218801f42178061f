"""Mixture-of-experts models with real weights, each computing exactly what the dense SmolLM2 it is made from computes.

There is no small pretrained one in a wheel, so `build` cuts the dense MLP, a sum over its I inner neurons, into slices
and calls each slice an expert. Every token goes to every expert with the same weight, and the down projection carries
whatever factor makes the sum come out. The kinds differ in how transformers stores and weighs experts.

`upcycle` is the one with real top-2 routing: each expert is the whole MLP with its neurons in another order, so any
choice of experts gives the dense answer, and mixing up two experts' matrices gives nonsense. Blocks of 128 neurons
stay together: the groups that share a scale are those of the dense model, so that the quantized models agree too.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_State = dict[str, Tensor]
_OFF = 1e9  # a clamp limit that no activation reaches
_BLOCK = 128  # neurons that stay together in upcycle: the widest group that shares a scale in any format
_SILENT_SINK = -1e4  # an attention sink logit that takes no probability


@dataclass(frozen=True)
class _Mlp:
    """The weights of one dense MLP: gate and up (I, H), down (H, I)."""

    gate: Tensor
    up: Tensor
    down: Tensor

    def routed(self, experts: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """The first experts * size neurons as stacked experts: gate and up (E, size, H), down (E, H, size)."""
        gate, up = (weight[: experts * size].unflatten(0, (experts, size)) for weight in (self.gate, self.up))
        return gate, up, self.down[:, : experts * size].unflatten(1, (experts, size)).transpose(0, 1)

    def shared(self, start: int, name: str) -> _State:
        """The neurons from `start` on as a dense MLP called `name`."""
        return {
            f"{name}.gate_proj.weight": self.gate[start:],
            f"{name}.up_proj.weight": self.up[start:],
            f"{name}.down_proj.weight": self.down[:, start:],
        }


@dataclass(frozen=True)
class _Kind:
    """How to make one kind of model: its class name, the config fields and the layer state for (I, E)."""

    family: str
    experts: int
    fields: Callable[[int, int], dict]
    layer: Callable[[_Mlp, int], _State]


def build(dense: nn.Module, kind: str, experts: int | None = None, layers: int | None = None) -> nn.Module:
    """A model of one of `KINDS` with the weights of `dense` (a LlamaForCausalLM) and its outputs, in eval mode.

    experts: how many routed experts; 4 unless given, 3 for llama4, whose shared expert is one more slice of that size.
    layers: keep only the first few; compare with `smollm2.load(layers=...)`.
    Raises ValueError if the kind is unknown or the MLP cannot be cut into that many slices.
    """
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is not a kind of expert model; choose from {', '.join(KINDS)}")
    recipe = KINDS[kind]
    experts = experts or recipe.experts
    layers = layers or dense.config.num_hidden_layers
    fields = _dense_fields(dense.config, layers) | recipe.fields(dense.config.intermediate_size, experts)
    model = _empty(recipe.family, fields).to(dense.dtype)
    state = _neutral(model) | _attention_state(dense, layers, paired=recipe.family == "Llama4")
    for i, block in enumerate(dense.model.layers[:layers]):
        mlp = _Mlp(*(getattr(block.mlp, f"{name}_proj").weight.detach() for name in ("gate", "up", "down")))
        state |= {f"model.layers.{i}.{name}": weight for name, weight in recipe.layer(mlp, experts).items()}
    model.load_state_dict(state)
    model.tie_weights()
    return model.eval()


def _empty(family: str, fields: dict) -> nn.Module:
    import transformers
    from transformers.initialization import no_init_weights

    name = "Llama4TextConfig" if family == "Llama4" else f"{family}Config"
    with no_init_weights():
        return getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, name)(**fields))


def _dense_fields(config, layers: int) -> dict:
    kept = (
        "vocab_size hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim "
        "max_position_embeddings rms_norm_eps tie_word_embeddings bos_token_id eos_token_id pad_token_id"
    )
    fields = {name: getattr(config, name) for name in kept.split()}
    rope = dict(config.rope_parameters) | {"partial_rotary_factor": 1.0}
    return fields | {
        "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers,
        "no_rope_layers": [1] * layers,  # in Llama4, 1 means with RoPE
        "rope_parameters": rope,
        "sliding_window": None,
    }


def _attention_state(dense: nn.Module, layers: int, paired: bool) -> _State:
    """Everything of the dense model but its MLPs; paired puts the rows of q and k in the order of rotary pairs."""
    heads = {"q_proj": dense.config.num_attention_heads, "k_proj": dense.config.num_key_value_heads}
    state = {}
    for name, weight in dense.state_dict().items():
        parts = name.split(".")
        beyond = parts[1] == "layers" and int(parts[2]) >= layers
        if ".mlp." in name or beyond:
            continue
        projection = parts[-2]
        if paired and projection in heads:
            weight = weight.unflatten(0, (heads[projection], 2, -1)).transpose(1, 2).reshape(weight.shape)
        state[name] = weight
    return state


def _neutral(model: nn.Module) -> _State:
    """Values without effect for the attention parameters that a Llama does not have."""
    state = {}
    for name, value in model.state_dict().items():
        if name.endswith("_proj.bias"):
            state[name] = torch.zeros_like(value)
        if name.endswith("sinks"):
            state[name] = torch.full_like(value, _SILENT_SINK)
    return state


def _whole_slices(inner: int, slices: int) -> int:
    if inner % slices:
        raise ValueError(f"an MLP of {inner} inner neurons cannot be cut into {slices} equal slices")
    return inner // slices


def _mixtral_fields(inner: int, experts: int) -> dict:
    size = _whole_slices(inner, experts)
    return {"intermediate_size": size, "num_local_experts": experts, "num_experts_per_tok": experts}


def _mixtral_layer(mlp: _Mlp, experts: int) -> _State:
    gate, up, down = mlp.routed(experts, mlp.gate.shape[0] // experts)
    return {
        "mlp.gate.weight": torch.zeros(experts, gate.shape[-1]),
        "mlp.experts.gate_up_proj": torch.cat([gate, up], 1),
        "mlp.experts.down_proj": down * experts,  # softmax weighs each by 1/E
    }


def _upcycle_fields(inner: int, experts: int) -> dict:
    return {"num_local_experts": experts, "num_experts_per_tok": 2}


def _upcycle_layer(mlp: _Mlp, experts: int) -> _State:
    generator = torch.Generator().manual_seed(0)
    neurons = torch.arange(mlp.gate.shape[0]).view(-1, _BLOCK)
    gate_up, down = [], []
    for _ in range(experts):
        order = neurons[torch.randperm(len(neurons), generator=generator)].flatten()
        gate_up.append(torch.cat([mlp.gate[order], mlp.up[order]]))
        down.append(mlp.down[:, order])
    return {
        "mlp.gate.weight": torch.randn(experts, mlp.gate.shape[1], generator=generator) * 0.1,
        "mlp.experts.gate_up_proj": torch.stack(gate_up),
        "mlp.experts.down_proj": torch.stack(down),
    }


def _qwen2_size(inner: int, experts: int) -> int:
    return inner // (experts + 1) // 32 * 32


def _qwen2_fields(inner: int, experts: int) -> dict:
    size = _qwen2_size(inner, experts)
    return {
        "moe_intermediate_size": size,
        "shared_expert_intermediate_size": inner - experts * size,
        "num_experts": experts,
        "num_experts_per_tok": experts,
        "norm_topk_prob": True,
    }


def _qwen2_layer(mlp: _Mlp, experts: int) -> _State:
    size = _qwen2_size(mlp.gate.shape[0], experts)
    gate, up, down = mlp.routed(experts, size)
    return mlp.shared(experts * size, "mlp.shared_expert") | {
        "mlp.shared_expert.down_proj.weight": mlp.down[:, experts * size :] * 2,  # its gate gives sigmoid(0) = 1/2
        "mlp.shared_expert_gate.weight": torch.zeros(1, gate.shape[-1]),
        "mlp.gate.weight": torch.zeros(experts, gate.shape[-1]),
        "mlp.experts.gate_up_proj": torch.cat([gate, up], 1),
        "mlp.experts.down_proj": down * experts,
    }


def _glm4_fields(inner: int, experts: int) -> dict:
    shared = experts // 2
    return {
        "moe_intermediate_size": _whole_slices(inner, experts + shared),
        "n_routed_experts": experts,
        "n_shared_experts": shared,
        "num_experts_per_tok": experts,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": float(experts),  # undoes the 1/E of the router
        "first_k_dense_replace": 0,
        "use_qk_norm": False,
        "attention_bias": False,
    }


def _glm4_layer(mlp: _Mlp, experts: int) -> _State:
    size = mlp.gate.shape[0] // (experts + experts // 2)
    gate, up, down = mlp.routed(experts, size)
    return mlp.shared(experts * size, "mlp.shared_experts") | {
        "mlp.gate.weight": torch.zeros(experts, gate.shape[-1]),
        "mlp.gate.e_score_correction_bias": torch.zeros(experts),
        "mlp.experts.gate_up_proj": torch.cat([gate, up], 1),
        "mlp.experts.down_proj": down,
    }


def _gpt_oss_fields(inner: int, experts: int) -> dict:
    return _mixtral_fields(inner, experts) | {
        "swiglu_alpha": 1.0,  # gate * sigmoid(gate) is SiLU
        "swiglu_limit": _OFF,
        "sliding_window": 4096,
    }


def _gpt_oss_layer(mlp: _Mlp, experts: int) -> _State:
    gate, up, down = mlp.routed(experts, mlp.gate.shape[0] // experts)
    hidden = gate.shape[-1]
    interleaved = torch.stack([gate, up], 2).flatten(1, 2)  # [E, 2S, H], rows gate, up, gate, up, ...
    return {
        "mlp.router.weight": torch.zeros(experts, hidden),
        "mlp.router.bias": torch.zeros(experts),
        "mlp.experts.gate_up_proj": interleaved.transpose(1, 2),
        "mlp.experts.gate_up_proj_bias": torch.tensor([0.0, -1.0]).repeat(experts, gate.shape[1]),  # undoes up + 1
        "mlp.experts.down_proj": down.transpose(1, 2) * experts,
        "mlp.experts.down_proj_bias": torch.zeros(experts, hidden),
    }


def _llama4_fields(inner: int, experts: int) -> dict:
    return {
        "intermediate_size": _whole_slices(inner, experts + 1),
        "intermediate_size_mlp": inner,
        "num_local_experts": experts,
        "num_experts_per_tok": experts,
        "interleave_moe_layer_step": 1,
        "use_qk_norm": False,
        "attention_chunk_size": None,
        "attn_temperature_tuning": False,
    }


def _llama4_layer(mlp: _Mlp, experts: int) -> _State:
    size = mlp.gate.shape[0] // (experts + 1)
    gate, up, down = mlp.routed(experts, size)
    return mlp.shared(experts * size, "feed_forward.shared_expert") | {
        "feed_forward.router.weight": torch.zeros(experts, gate.shape[-1]),
        # The router's sigmoid(0) = 1/2 scales the input of an expert, not its output.
        "feed_forward.experts.gate_up_proj": torch.cat([gate, up], 1).transpose(1, 2) * 2,
        "feed_forward.experts.down_proj": down.transpose(1, 2),
    }


KINDS = {
    "mixtral": _Kind("Mixtral", 4, _mixtral_fields, _mixtral_layer),
    "upcycle": _Kind("Mixtral", 4, _upcycle_fields, _upcycle_layer),
    "qwen2_moe": _Kind("Qwen2Moe", 4, _qwen2_fields, _qwen2_layer),
    "glm4_moe": _Kind("Glm4Moe", 4, _glm4_fields, _glm4_layer),
    "gpt_oss": _Kind("GptOss", 4, _gpt_oss_fields, _gpt_oss_layer),
    "llama4": _Kind("Llama4", 3, _llama4_fields, _llama4_layer),
}
