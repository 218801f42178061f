"""The reaction model is loaded right: it fills in most atoms, with one physical layer for all twelve."""

from torch import nn

from torchq.zoo.albert import REACTION, masked_accuracy


def test_fills_in_masked_atoms(albert):
    assert round(masked_accuracy(*albert) * 21) == 15


def test_every_token_of_the_reaction_is_in_the_vocabulary(albert):
    _, tokenizer = albert
    tokens = tokenizer.tokenize(REACTION)
    assert "".join(tokens) == REACTION
    assert tokenizer.unk_token not in tokens


def test_layers_share_their_linears(albert):
    model, tokenizer = albert
    calls = []
    query = next(m for name, m in model.named_modules() if name.endswith("query") and isinstance(m, nn.Linear))
    handle = query.register_forward_hook(lambda *_: calls.append(1))
    model(**tokenizer(REACTION, return_tensors="pt"))
    handle.remove()
    assert len(calls) == model.config.num_hidden_layers == 12
