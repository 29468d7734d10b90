"""All tests run on eight host devices, on the CPU unless asked otherwise, in float64.

Compiling takes most of a test's time, so machine code is optimised less than by default.
"""

import importlib.metadata
import os

# JAX reads both variables when it's imported, or at its first use.
_DEVICES = "--xla_force_host_platform_device_count"
_flags = os.environ.get("XLA_FLAGS", "")
if _DEVICES not in _flags:
    _flags += f" {_DEVICES}=8 --xla_backend_optimization_level=0"
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # later ones do not know it
        _flags += " --xla_cpu_use_fusion_emitters=false"
    os.environ["XLA_FLAGS"] = _flags.strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402

jax.config.update("jax_enable_x64", True)
