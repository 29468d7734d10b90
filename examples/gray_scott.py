"""Patterns of Gray and Scott, parallel in time and space.

Two substances diffuse and react on a periodic square; spots grow and divide. The mesh has two
devices along time and two along space: each holds half of the square, and steps exchange columns
for their Fourier transforms.

    python examples/gray_scott.py
    python examples/gray_scott.py --f 0.035 --k 0.065      # another pattern
    python examples/gray_scott.py --quick                  # a small square, a short time

The devices are virtual ones on the CPU, so the times tell nothing about speed-up. Writes
outputs/gray_scott/gray_scott.png (elsewhere: --out).
"""

import argparse
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console

from jaxbraid import MGRIT, problems

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_num_cpu_devices", 4)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=96, help="in each direction")
    parser.add_argument("--time", type=int, default=2048, help="as many steps of length 1")
    parser.add_argument("--f", type=float, default=0.04, help="feed rate")
    parser.add_argument("--k", type=float, default=0.06, help="kill rate")
    parser.add_argument("--quick", action="store_true", help="32 points, up to t = 256")
    parser.add_argument("--out", type=Path, default=Path("outputs/gray_scott"))
    given = parser.parse_args()
    if given.quick:
        given.points, given.time = 32, 256
    return given


def main() -> None:
    given, console = options(), Console()
    size = {"nx": given.points, "t_end": float(given.time), "nt": given.time}
    problem = problems.gray_scott_2d(**size, f=given.f, k=given.k, space_axis="space")
    mesh = jax.make_mesh((2, 2), ("layer", "space"))
    config = MGRIT(levels=2, coarsening=2, max_iters=15, tol=1e-6)
    begin = time.perf_counter()
    sol = problem.solve(config, mesh=mesh, space_axis="space", save="coarse", progress=True)
    jax.block_until_ready(sol.us)
    console.print(f"seconds: {time.perf_counter() - begin:.0f} (with compiling)")
    one_device = problems.gray_scott_2d(**size, f=given.f, k=given.k)
    error = jnp.abs(sol.u["v"] - one_device.serial()["v"][-1]).max()
    console.print(f"largest difference from serial stepping on one device: {float(error):.1e}")

    given.out.mkdir(parents=True, exist_ok=True)
    shown = problems.gray_scott_2d(nx=given.points, f=given.f, k=given.k, ts=sol.ts)
    shown.plot(jax.device_get(sol.us), given.out / "gray_scott.png")
    console.print(f"picture: {given.out / 'gray_scott.png'}")


if __name__ == "__main__":
    main()
