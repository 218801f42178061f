"""An ALBERT that reads chemical reactions: real weights, and 12 layers that share one physical layer.

Every linear runs 12 times per forward, so hooks on it fire 12 times and a swap must reach all of its names.
"""

import torch
from torch import nn

from torchq.zoo.fetch import fetch_file

# Esterification of acetic acid with ethanol.
REACTION = "CC(=O)O.OCC>>CC(=O)OCC"

# One token per atom, bond, ring digit or bracket of a SMILES string, the alphabet of the model's vocabulary.
_SMILES_TOKEN = r"\[[^\]]+\]|Br?|Cl?|>>?|%\d{2}|[NOSPFIbcnops()=#+\\/:~@?.*$|\-\d]"


def load() -> tuple[nn.Module, object]:
    """The model (AlbertForMaskedLM, fp32, eval mode) and a tokenizer for reaction SMILES."""
    from transformers import AlbertForMaskedLM

    folder = fetch_file("rxnmapper", "0.4.3").parent
    model = AlbertForMaskedLM.from_pretrained(folder, weights_only=True).eval()
    return model, _tokenizer((folder / "vocab.txt").read_text().split())


@torch.no_grad()
def masked_accuracy(model: nn.Module, tokenizer, reaction: str = REACTION) -> float:
    """The fraction of the reaction's tokens that the model names when only that one is masked."""
    ids = tokenizer(reaction, return_tensors="pt")["input_ids"][0]
    places = torch.arange(1, len(ids) - 1)  # between [CLS] and [SEP]
    masked = ids.repeat(len(places), 1)
    masked[range(len(places)), places] = tokenizer.mask_token_id
    guesses = model(input_ids=masked).logits[range(len(places)), places].argmax(-1)
    return (guesses == ids[places]).float().mean().item()


def _tokenizer(vocabulary: list[str]):
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    index = {token: i for i, token in enumerate(vocabulary)}
    smiles = Tokenizer(models.WordLevel(index, unk_token="[UNK]"))
    smiles.pre_tokenizer = pre_tokenizers.Split(Regex(_SMILES_TOKEN), behavior="isolated")
    smiles.post_processor = processors.BertProcessing(("[SEP]", index["[SEP]"]), ("[CLS]", index["[CLS]"]))
    return PreTrainedTokenizerFast(
        tokenizer_object=smiles,
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        mask_token="[MASK]",
    )
