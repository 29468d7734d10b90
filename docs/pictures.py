"""Draw the pictures of the documentation: python docs/pictures.py."""

from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
from gallery import shrink

import jaxbraid
from jaxbraid import MGRIT, plot, problems
from jaxbraid.training import diagnose

OUT = Path(__file__).parent / "images"
jax.config.update("jax_enable_x64", True)


def pendulum(t0, t1, u, params, args):
    """The symplectic Euler method, of order 1: long steps are inaccurate, but stable."""
    speed = u[1] - 9.81 * (t1 - t0) * jnp.sin(u[0])
    return jnp.stack([u[0] + (t1 - t0) * speed, speed])


def iterates():
    """States at C-points after each iteration from a constant guess, their times, and the truth."""
    seen = []
    u0, ts = jnp.array([1.5, 0.0]), jnp.linspace(0, 6, 513)
    sol = jaxbraid.solve(
        pendulum,
        u0,
        ts,
        config=MGRIT(levels=2, coarsening=16, cf_relax=0, max_iters=5),
        guess="constant",
        save="coarse",
        callback=lambda i, r, u: seen.append(u[:, 0]),
    )
    jax.effects_barrier()
    truth = jaxbraid.solve(pendulum, u0, ts, config=MGRIT(levels=1)).us[::16, 0]
    return seen, np.asarray(sol.ts), truth


def idea():
    figure = matplotlib.figure.Figure(figsize=(11, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.25, 1))
    plot.hierarchy(MGRIT(levels=3, coarsening=4), 32, 4, title="Levels and devices", ax=left)
    seen, ts, truth = iterates()
    plot.iterates(seen, ts, truth, ylabel="angle", title="Iterations", ax=right)
    figure.savefig(OUT / "idea.png", dpi=130)


def network():
    w = 0.3 * jax.random.normal(jax.random.key(0), (64, 8, 8))
    net = jaxbraid.parallel_ode_net(lambda w, x: jnp.tanh(x @ w), w, t_final=8.0)
    x = jax.random.normal(jax.random.key(1), (4, 8))
    return diagnose(net, x, loss=lambda y: jnp.mean(y**2))


def main():
    idea()
    plot.hierarchy(MGRIT(levels=3, coarsening=4), 64, 4, path=OUT / "hierarchy.png")
    problem = problems.dahlquist(nt=128)
    options = {"coarsening": 8, "max_iters": 12, "tol": 1e-10, "nested_iteration": False}
    solutions = {
        name: problem.solve(MGRIT(cf_relax=nu, **options), point_residuals=True, save="coarse")
        for nu, name in enumerate(("F-relaxation", "FCF-relaxation"))
    }
    plot.residuals(solutions, tol=1e-10, path=OUT / "residuals.png")
    sol = solutions["F-relaxation"]
    plot.iteration(sol, sol.ts[1:], xlabel="t", path=OUT / "iteration.png")
    plot.iterates(*iterates(), ylabel="angle", path=OUT / "iterates.png")
    plot.depth(network(), path=OUT / "depth.png")
    for name in ("idea", "hierarchy", "residuals", "iteration", "iterates", "depth"):
        shrink(OUT / f"{name}.png", OUT / f"{name}.png")


if __name__ == "__main__":
    main()
