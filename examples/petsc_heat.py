"""The heat equation in a square, stepped by PETSc's Krylov solvers on the host.

u_t = Laplace u + f, u = 0 on the boundary, by backward Euler on the five-point stencil. A step is
solved by conjugate gradients with an incomplete Cholesky factorisation, one state after another;
MGRIT runs in JAX around it. `make test-petsc` installs PETSc and petsc4py on Debian.

    python examples/petsc_heat.py
    python examples/petsc_heat.py --quick
"""

import functools

import numpy as np
from host_runs import figure, options, residual_axes, save, solve_and_compare, square_image

import jaxbraid


def make_heat(nx):
    """(fn, vjp, u0) on nx x nx interior points; states are vectors."""
    import petsc4py

    petsc4py.init(["-no_signal_handler"])  # JAX handles signals
    from petsc4py import PETSc

    h = 1 / (nx + 1)
    x = np.linspace(h, 1 - h, nx)
    source = 20 * np.exp(-80 * np.add.outer((x - 0.7) ** 2, (x - 0.3) ** 2)).ravel()
    u0 = np.outer(np.sin(np.pi * x), np.sin(2 * np.pi * x)).ravel()

    @functools.cache
    def solver(dt):
        """A solver of I - dt Laplace, and vectors for its right-hand side and solution."""
        matrix = PETSc.Mat().createAIJ((nx * nx, nx * nx), nnz=5, comm=PETSc.COMM_SELF)
        for row in range(nx * nx):
            i, j = divmod(row, nx)
            matrix.setValue(row, row, 1 + 4 * dt / h**2)
            for k, l in ((i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)):
                if 0 <= k < nx and 0 <= l < nx:
                    matrix.setValue(row, k * nx + l, -dt / h**2)
        matrix.assemble()
        ksp = PETSc.KSP().create(PETSc.COMM_SELF)
        ksp.setOperators(matrix)
        ksp.setType("cg")
        ksp.getPC().setType("icc")
        ksp.setTolerances(rtol=1e-12, atol=1e-14)
        return ksp, *matrix.createVecs()

    def solve(dt, b, transpose=False):
        ksp, solution, rhs = solver(float(f"{dt:.12g}"))
        rhs.setArray(b)
        (ksp.solveTranspose if transpose else ksp.solve)(rhs, solution)
        if ksp.getConvergedReason() < 0:
            raise RuntimeError(f"PETSc: KSP ended with reason {ksp.getConvergedReason()}.")
        return solution.getArray().copy()

    def fn(t0, t1, u, params, args):
        steps = zip(t1 - t0, u, strict=True)
        return np.stack([solve(dt, v + dt * source) for dt, v in steps])

    def vjp(t0, t1, u, params, args, ct):
        steps = zip(t1 - t0, ct, strict=True)
        return np.stack([solve(dt, w, transpose=True) for dt, w in steps]), None, None

    return fn, vjp, u0


def main(argv=None):
    chosen = options(__doc__, argv, "petsc_heat")
    nx, n = (15, 64) if chosen.quick else (63, 256)
    fn, vjp, u0 = make_heat(nx)
    ts = np.linspace(0, 0.2, n + 1)
    config = jaxbraid.MGRIT(levels=3, coarsening=4, tol=1e-9, max_iters=20, batch_intervals="all")
    solution, error = solve_and_compare("heat equation, PETSc", fn, u0, ts, config=config, vjp=vjp)

    fig, (left, right) = figure(2)
    square_image(fig, left, solution.u, ts[-1])
    residual_axes(right, solution.stats)
    save(fig, chosen.out, "petsc_heat.png")
    return error


if __name__ == "__main__":
    main()
