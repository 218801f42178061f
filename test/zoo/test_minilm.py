"""MiniLM gives the embeddings its authors publish."""

import torch

from torchq.zoo.minilm import embed


def test_embeddings(minilm):
    sentences = ["This is an example sentence", "A man is eating food.", "A man is eating a piece of bread."]
    example, food, bread = embed(*minilm, sentences)
    torch.testing.assert_close(example[:5], torch.tensor([0.0677, 0.0635, 0.0487, 0.0793, 0.0374]), atol=1e-4, rtol=0)
    assert abs(food @ bread - 0.755) < 1e-3
    assert food @ example < 0.25


def test_padding_does_not_change_an_embedding(minilm):
    short = "A man is eating food."
    together = embed(*minilm, [short, "This sentence is so much longer that the short one has to be padded."])
    torch.testing.assert_close(together[:1], embed(*minilm, [short]), atol=1e-5, rtol=0)
