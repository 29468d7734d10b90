"""Finite elements of scikit-fem on the host: diffusion in an L-shaped room, and Burgers' equation.

- Diffusion, M u' + K u = b in 2D, with assembled mass and stiffness matrices and linear triangles,
  by backward Euler: a factorisation for each step size, one solve for all intervals of a batch.
- Burgers' equation u_t + u u_x = eps u_xx in 1D, by backward Euler and Newton's method, which
  assembles its Jacobian anew in every iteration: a nonlinear step, one interval after another.

    python examples/scikit_fem.py
    python examples/scikit_fem.py --quick
"""

import functools

import numpy as np
import scipy.sparse as sp
from host_runs import by_step_size, figure, options, residual_axes, save, solve_and_compare
from scipy.sparse.linalg import splu, spsolve
from skfem import (
    Basis,
    BilinearForm,
    ElementLineP1,
    ElementTriP1,
    LinearForm,
    MeshLine,
    MeshTri,
    asm,
    condense,
)
from skfem.models.poisson import laplace, mass, unit_load

import jaxbraid


def make_diffusion(refinements):
    """(fn, u0, basis, inner): diffusion with a constant source, u = 0 on the boundary."""
    basis = Basis(MeshTri.init_lshaped().refined(refinements), ElementTriP1())
    m, k, load = asm(mass, basis), asm(laplace, basis), asm(unit_load, basis)
    inner = basis.complement_dofs(basis.get_dofs())
    m, k, load = m[inner][:, inner], k[inner][:, inner], load[inner]

    @functools.cache
    def factors(dt):
        return splu(sp.csc_matrix(m + dt * k))

    def fn(t0, t1, u, params, args):
        out = np.empty_like(u)
        for dt, i in by_step_size(t0, t1):
            out[i] = factors(dt).solve(m @ u[i].T + dt * load[:, None]).T
        return out

    x, y = basis.doflocs[:, inner]
    return fn, np.sin(np.pi * x) * np.sin(np.pi * y), basis, inner


def make_burgers(nx, eps):
    """(fn, u0, x): the nodes' values, 0 at both ends of (0, 1)."""
    basis = Basis(MeshLine(np.linspace(0, 1, nx + 1)), ElementLineP1(), intorder=3)
    inner = basis.complement_dofs(basis.get_dofs())

    @LinearForm
    def residual(v, w):
        u = w["u"]
        return (u - w["old"]) * v + w["dt"] * (u * u.grad[0] * v + eps * u.grad[0] * v.grad[0])

    @BilinearForm
    def jacobian(du, v, w):
        u = w["u"]
        transport = du * u.grad[0] + u * du.grad[0]
        return du * v + w["dt"] * (transport * v + eps * du.grad[0] * v.grad[0])

    def one(dt, old):
        u, before = old.copy(), basis.interpolate(old)
        for _ in range(20):
            here = {"u": basis.interpolate(u), "dt": dt}
            r = residual.assemble(basis, old=before, **here)
            if np.abs(r[inner]).max() < 1e-13:
                return u
            change = spsolve(*condense(jacobian.assemble(basis, **here), r, I=inner, expand=False))
            u[inner] -= change
        raise RuntimeError(f"Newton's method has not converged for dt = {dt:.3g}.")

    def fn(t0, t1, u, params, args):
        return np.stack([one(dt, old) for dt, old in zip(t1 - t0, u, strict=True)])

    x = basis.doflocs[0]
    return fn, np.sin(2 * np.pi * x), x


def main(argv=None):
    chosen = options(__doc__, argv, "scikit_fem")
    refinements, n, nx = (2, 64, 32) if chosen.quick else (5, 256, 128)
    fig, axes = figure(4)
    config = jaxbraid.MGRIT(levels=2, coarsening=4, tol=1e-10, batch_intervals="all")

    ts = np.linspace(0, 0.2, n + 1)
    fn, u0, basis, inner = make_diffusion(refinements)
    solution, linear_error = solve_and_compare("diffusion, 2D", fn, u0, ts, config=config)
    u = np.zeros(basis.N)
    u[inner] = solution.u
    image = axes[0].tripcolor(*basis.mesh.p, basis.mesh.t.T, u, shading="gouraud")
    fig.colorbar(image, ax=axes[0], label="u")
    axes[0].set(title=f"diffusion, t = {ts[-1]:g}", xlabel="x", ylabel="y", aspect="equal")
    residual_axes(axes[1], solution.stats)

    ts = np.linspace(0, 0.5, n // 2 + 1)
    fn, u0, x = make_burgers(nx, eps=0.02)
    solution, error = solve_and_compare("Burgers' equation, 1D", fn, u0, ts, config=config)
    order = np.argsort(x)
    for i, style in ((0, ":"), (len(ts) // 2, "--"), (len(ts) - 1, "-")):
        values = np.asarray(solution.us[i])[order]
        axes[2].plot(x[order], values, style, color="#D55E00", label=f"t = {ts[i]:.2g}")
    axes[2].set(title="Burgers' equation", xlabel="x", ylabel="u")
    axes[2].legend()
    residual_axes(axes[3], solution.stats)
    save(fig, chosen.out, "scikit_fem.png")
    return linear_error, error


if __name__ == "__main__":
    main()
