"""Scale on paper: training 4096 layers on 2 to 4096 devices, and splits of layers and batch.

    python benchmarks/scaling.py [--png docs/scaling.png]

Three machines. The CPU cores are measured where this runs: layers tanh(x W) of width 64, batch 64,
one core a device, messages between two of them. The other two are *assumptions*, not measurements:
round numbers for an accelerator, with layers so small that starting kernels takes the time and with
layers that keep it busy; see `assumed`. For each number of devices, the options of least predicted
time among `jaxbraid.performance.candidates` are taken.
"""

from __future__ import annotations

import argparse
import os

# Before JAX is loaded: two devices, of one core each.
FLAGS = "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import jaxbraid  # noqa: E402
from jaxbraid import performance, plot  # noqa: E402
from jaxbraid.performance import Cost, Machine  # noqa: E402

LAYERS = 4096
SAMPLES = 64  # of the batch: the most parts that it can be split into
ITERATIONS = performance.ITERATIONS


def measured() -> Machine:
    w = jax.random.normal(jax.random.key(0), (512, 64, 64)) / 8
    net = jaxbraid.parallel_ode_net(lambda w, x: jnp.tanh(x @ w), w)
    mesh = jax.make_mesh((2,), ("layer",), axis_types=(jax.sharding.AxisType.Auto,))
    shares = (1 / SAMPLES, 1 / 16, 1 / 4)
    return performance.measure(
        net,
        jnp.ones((SAMPLES, 64)),
        mesh=mesh,
        shares=shares,
        repeats=15,
        name="cpu cores (measured)",
    )


def assumed(name: str, each: float, width: int, rows: int) -> Machine:
    """An accelerator by assumption.

    A loop iteration takes 40 us however many intervals it steps (some kernels, 5 to 10 us each, of
    the loop, the layer and what is around it), three times that for a vjp with the forward step in
    it, and `each` s of work for an interval: forward 1, vjp 2, with parameters 3. Links of 8 us and
    75 GB/s. A state has `rows` x `width` numbers of two bytes, a layer 4 `width`^2 of four bytes.
    """
    fixed = 40e-6
    return Machine(
        step=Cost.line(fixed, each),
        vjp=Cost.line(3 * fixed, 2 * each),
        last=Cost.line(3 * fixed, 3 * each),
        state_bytes=2 * rows * width,
        layer_bytes=4 * 4 * width**2,
        latency=8e-6,
        bandwidth=75e9,
        dispatch=50e-6,
        name=name,
    )


def machines() -> list[Machine]:
    return [
        measured(),
        # 4 matrices of 256 x 256 on 64 rows: 34 Mflop, 0.3 us at 100 Tflop/s
        assumed("small layers (assumed)", 0.3e-6, 256, SAMPLES),
        # the same of 2048 x 2048 on 8192 rows (64 samples of 128): 0.27 Tflop at 400 Tflop/s
        assumed("large layers (assumed)", 0.7e-3, 2048, 128 * SAMPLES),
    ]


def describe(m: Machine) -> str:
    def at(cost: Cost) -> str:
        return "/".join(f"{cost(k) * 1e6:.3g}" for k in (1, 16, 256))

    return (
        f"{m.name}: us of an iteration of 1/16/256 intervals: step {at(m.step)}, vjp {at(m.vjp)}, "
        f"last {at(m.last)}; state {m.state_bytes / 1024:.0f} KiB, layer "
        f"{m.layer_bytes / 1024:.0f} KiB; latency {m.latency * 1e6:.3g} us, "
        f"bandwidth {m.bandwidth / 1e9:.3g} GB/s"
    )


def picture(path: str, scaling: dict, splits: dict) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.8), layout="constrained")
    plot.scaling(scaling, ax=left)
    left.set_title(f"training {LAYERS} layers, layers alone", fontsize="medium")
    plot.scaling(splits, ax=right)
    for line, rows in zip(right.get_lines(), splits.values(), strict=False):
        line.set_xdata([p.parts for p in rows])
    right.relim()
    right.autoscale()
    right.set_xlabel("parts of the batch (the other devices: layers)")
    right.set_title("layers x batch, devices fixed", fontsize="medium")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--png", help="where to save the picture")
    png = parser.parse_args().png
    scaling, splits = {}, {}
    for machine in machines():
        print(describe(machine))
        rows = [
            performance.choose(LAYERS, 2**k, machine, iterations=ITERATIONS)[0] for k in range(13)
        ]
        print(performance.table(rows))
        scaling[machine.name] = rows
        for devices in (64, 1024):
            print(f"{machine.name}: {devices} devices split between layers and batch")
            rows = performance.tradeoff(
                LAYERS, devices, machine, iterations=ITERATIONS, most_parts=SAMPLES
            )
            print(performance.table(rows))
            splits[f"{machine.name}, {devices} devices"] = rows
        print(flush=True)
    if png:
        picture(png, scaling, splits)


if __name__ == "__main__":
    main()
