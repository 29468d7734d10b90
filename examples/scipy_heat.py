"""The heat equation in a square, stepped by SciPy's sparse LU on the host, and a gradient.

u_t = Laplace u + s f, u = 0 on the boundary, by backward Euler on the five-point stencil: each step
size has one factorisation, which solves for all intervals of a batch at once. MGRIT runs in JAX
around it. The derivative of a misfit at the end with respect to the strength s of the source comes
from transposed solves and is compared with a difference quotient.

    python examples/scipy_heat.py
    python examples/scipy_heat.py --quick
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import scipy.sparse as sp
from host_runs import (
    by_step_size,
    console,
    figure,
    options,
    residual_axes,
    save,
    solve_and_compare,
    square_image,
)
from scipy.sparse.linalg import splu

import jaxbraid
from jaxbraid.host import host_step


def make_heat(nx):
    """(fn, vjp, u0) on nx x nx interior points; states are vectors."""
    h = 1 / (nx + 1)
    line = sp.diags_array([-1.0, 2.0, -1.0], offsets=[-1, 0, 1], shape=(nx, nx)) / h**2
    matrix = sp.kronsum(line, line, format="csc")
    x = np.linspace(h, 1 - h, nx)
    source = np.exp(-80 * np.add.outer((x - 0.7) ** 2, (x - 0.3) ** 2)).ravel()
    u0 = np.outer(np.sin(np.pi * x), np.sin(2 * np.pi * x)).ravel()

    @functools.cache
    def factors(dt):
        return splu(sp.csc_array(sp.eye_array(nx * nx) + dt * matrix))

    def solve(t0, t1, b, trans):
        out = np.empty_like(b)
        for dt, i in by_step_size(t0, t1):
            out[i] = factors(dt).solve(b[i].T, trans).T
        return out

    def fn(t0, t1, u, params, args):
        return solve(t0, t1, u + np.outer(t1 - t0, args * source), "N")

    def vjp(t0, t1, u, params, args, ct):
        w = solve(t0, t1, ct, "T")
        return w, None, (t1 - t0) * (w @ source)

    return fn, vjp, u0


def main(argv=None):
    chosen = options(__doc__, argv, "scipy_heat")
    nx, n = (15, 64) if chosen.quick else (63, 256)
    fn, vjp, u0 = make_heat(nx)
    ts = np.linspace(0, 0.2, n + 1)
    config = jaxbraid.MGRIT(levels=3, coarsening=4, tol=1e-9, max_iters=20, batch_intervals="all")
    strength = np.float64(20)
    solution, error = solve_and_compare(
        "heat equation, SciPy", fn, u0, ts, config=config, vjp=vjp, args=strength
    )

    step = host_step(fn, vjp=vjp)

    @jax.jit
    def misfit(s):
        u = jaxbraid.solve(step, u0, ts, args=s, config=config, save="final").u
        return jnp.sum((u - 0.1) ** 2) / nx**2

    slope, eps = float(jax.grad(misfit)(strength)), 1e-3
    quotient = float(misfit(strength + eps) - misfit(strength - eps)) / (2 * eps)
    console.print(f"d misfit / d s: {slope:.8e}; difference quotient: {quotient:.8e}")

    fig, (left, right) = figure(2)
    square_image(fig, left, solution.u, ts[-1])
    residual_axes(right, solution.stats)
    save(fig, chosen.out, "scipy_heat.png")
    return error, abs(slope - quotient) / abs(quotient)


if __name__ == "__main__":
    main()
