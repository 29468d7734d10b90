"""All tests run on eight host devices, on the CPU unless asked otherwise, in float64."""

import os

import compiler

# JAX reads both variables when it's imported, or at its first use.
_DEVICES = "--xla_force_host_platform_device_count"
_flags = os.environ.get("XLA_FLAGS", "")
if _DEVICES not in _flags:
    os.environ["XLA_FLAGS"] = f"{_flags} {_DEVICES}=8 {compiler.FLAGS}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402

jax.config.update("jax_enable_x64", True)
