"""Memory a device for the forward pass and the gradient of a 512-layer network.

    python benchmarks/memory.py                 # the table in docs/performance.md
    python benchmarks/memory.py --layers 2048 --width 128

For 1 to 8 devices and the options that trade memory for work. The figures are the compiler's own
(`compiled.memory_analysis()`): arguments, results and temporaries of one device. Nothing is run;
the devices are virtual ones on the CPU.
"""

import argparse
import os

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxbraid
from jaxbraid import MGRIT

DEVICES = (1, 2, 4, 8)
VARIANTS = {
    "as by default": {},
    "linearisations kept": {"linearization": "keep"},
    "the same, only products of matrices": {
        "linearization": "keep",
        "remat": jax.checkpoint_policies.dots_saveable,
    },
    "C-points saved": {"saved_states": "coarse"},
}


def block(params, x):
    """A layer with some work inside: two matrices, a wider state between them."""
    return jnp.tanh(jax.nn.gelu(x @ params["up"]) @ params["down"])


def sizes(options, devices, gradient, **variant):
    """Bytes a device of arguments, results and temporaries."""
    mesh = Mesh(np.array(jax.devices()[:devices]), ("layer",))
    config = MGRIT(levels=3, coarsening=8, max_iters=2, final_relax="FC", **variant)

    def loss(params, x):
        net = jaxbraid.parallel_ode_net(block, params, forward=config, mesh=mesh)
        return jnp.sum(net(x) ** 2)

    def array(*shape, axis=None):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(axis)))

    n, width = options.layers, options.width
    params = {
        "up": array(n, width, 2 * width, axis="layer"),
        "down": array(n, 2 * width, width, axis="layer"),
    }
    fn = jax.value_and_grad(loss) if gradient else loss
    compiled = jax.jit(fn).lower(params, array(options.batch, width)).compile()
    analysis = compiled.memory_analysis()
    return np.array(
        [
            analysis.argument_size_in_bytes,
            analysis.output_size_in_bytes,
            analysis.temp_size_in_bytes,
        ]
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("--layers", 512), ("--width", 64), ("--batch", 256)):
        parser.add_argument(name, default=default, type=int, metavar="N", help=f"({default})")
    options = parser.parse_args()

    print(f"{options.layers} layers, width {options.width}, batch {options.batch}; MiB a device")
    print(f"{'':44}{'arguments':>10}{'results':>10}{'temporary':>10}{'total':>10}{'ratio':>8}")
    for gradient in (False, True):
        for name, variant in VARIANTS.items() if gradient else [("", {})]:
            print(f"{'gradient' if gradient else 'forward'} {name}".rstrip())
            for devices in DEVICES:
                parts = sizes(options, devices, gradient, **variant) / 2**20
                total = parts.sum()
                one = total if devices == 1 else one
                row = "".join(f"{v:10.2f}" for v in (*parts, total))
                print(f"  {devices} device{'s' * (devices > 1):33}{'':2}{row}{total / one:8.3f}")


if __name__ == "__main__":
    main()
