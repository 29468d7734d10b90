"""How tests compile: with less optimised machine code, as compiling takes most of their time."""

import importlib.metadata

FLAGS = "--xla_backend_optimization_level=0"
if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones do not know it
    FLAGS += " --xla_cpu_use_fusion_emitters=false"
