"""torchq: quantize PyTorch models by layer name."""
