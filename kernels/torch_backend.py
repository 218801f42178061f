"""The torch backend: the twins themselves. It serves every operation and pair on every device."""

from torchq.kernels import twin


class Kernels:
    name = "torch"
    quantize = staticmethod(twin.quantize)
    dequantize = staticmethod(twin.dequantize)
    linear = staticmethod(twin.linear)
    grouped_linear = staticmethod(twin.grouped_linear)

    def unusable(self, op, weight, activation, device):
        return None
