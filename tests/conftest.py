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
import pytest  # noqa: E402

jax.config.update("jax_enable_x64", True)


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_programs():
    """Each holds memory maps, of which the system lends a process only so many (65530 on Linux)."""
    yield
    jax.clear_caches()
