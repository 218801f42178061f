"""Module rewrites that know nothing of quantization: walk and swap modules, Hadamard rotation."""
