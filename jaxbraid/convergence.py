r"""How fast two-level MGRIT converges, told from eigenvalues before anything is run.

A linear problem whose fine propagator $\Phi$ and coarse propagator $\Phi_\Delta$ (of $m$ fine
steps) have the same eigenvectors falls apart into modes. With the eigenvalues $\lambda$ of $\Phi$
and $\mu$ of $\Phi_\Delta$, and the shift $S$ from one C-point to the next, the error of one mode
at its $N_c$ C-points is multiplied in every iteration by the $N_c \times N_c$ matrix

$$ E = (\lambda^m - \mu)\, S\, (I - \mu S)^{-1}\,
   \bigl((1 - \omega) I + \omega \lambda^m S\bigr)^{\nu} $$

with $\nu$ C-relaxations of weight $\omega$ ($\nu = 0$: F-relaxation, 1: FCF-relaxation). $E$
commutes with the equation's own matrix $I - \lambda^m S$, so residuals obey the same law. The
factors here are the 2-norm of $E$ (`"sharp"`) or a bound of it (`"dobrev"`); that of the problem
is the largest of its modes. $E^{N_c} = 0$: no factor says that the method diverges for ever, but
one beyond 1 says that it may grow before it ends.

??? cite "Reference"

    V. A. Dobrev, Tz. Kolev, N. A. Petersson, J. B. Schroder: Two-level convergence theory for
    multigrid reduction in time (MGRIT). SIAM J. Sci. Comput. 39(5), 2017. B. S. Southworth:
    Necessary conditions and tight two-level convergence bounds for parareal and multigrid
    reduction in time. SIAM J. Matrix Anal. Appl. 40(2), 2019. A. Hessenthaler, B. S. Southworth,
    D. Nordsletten, O. Röhrle, R. D. Falgout, J. B. Schroder: Multilevel convergence analysis of
    multigrid-reduction-in-time. SIAM J. Sci. Comput. 42(2), 2020.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
from jaxtyping import ArrayLike

from jaxbraid._options import check_integer

__all__ = ["ConvergenceBound", "stability", "two_level_bound"]

Kind = Literal["sharp", "dobrev"]

_GAMMA = 1 - 1 / math.sqrt(2)
_TABLEAUS: dict[str, tuple[Any, Any]] = {
    "FE": ([[0]], [1]),
    "BE": ([[1]], [1]),
    "TR": ([[0, 0], [0.5, 0.5]], [0.5, 0.5]),
    "MR": ([[0.5]], [1]),
    "Heun": ([[0, 0], [1, 0]], [0.5, 0.5]),
    "SDIRK2": ([[_GAMMA, 0], [1 - _GAMMA, _GAMMA]], [1 - _GAMMA, _GAMMA]),
    "RK4": (
        [[0, 0, 0, 0], [0.5, 0, 0, 0], [0, 0.5, 0, 0], [0, 0, 1, 0]],
        [1 / 6, 1 / 3, 1 / 3, 1 / 6],
    ),
}
_MOST_DENSE = 1024  # C-points: a matrix of this size takes a second or so a mode


@dataclasses.dataclass(frozen=True, eq=False)  # holds arrays: compared by identity
class ConvergenceBound:
    """Convergence factors of a two-level iteration.

    Of the whole problem, in the 2-norm, it is `factor`, the largest.

    - `modes`: the factor of every mode, in the shape of the eigenvalues.
    - `kind`: `"sharp"`, the norm itself, or `"dobrev"`, an upper bound of it.
    """

    modes: np.ndarray
    kind: Kind

    @property
    def factor(self) -> float:
        """The largest of the factors."""
        return float(np.max(self.modes))

    def __str__(self) -> str:
        what = "factor" if self.kind == "sharp" else "bound"
        return f"two-level {what} {self.factor:.4g} (largest of {self.modes.size} modes)"


def stability(
    method: str | tuple[ArrayLike, ArrayLike] | Callable[[np.ndarray], Any], z: ArrayLike
) -> np.ndarray:
    r"""$R(z)$: what a step of $u' = a u$ of size $\Delta t$ multiplies $u$ by; $z = a \Delta t$.

    For a Runge-Kutta method with the coefficients $A$, $b$ it is
    $R(z) = 1 + z\, b^T (I - z A)^{-1} \mathbf 1$.

    **Arguments**

    - `method`: `"FE"`, `"BE"` (Euler, explicit and implicit), `"TR"` (trapezoidal rule), `"MR"`
        (implicit midpoint rule), `"Heun"`, `"SDIRK2"` (L-stable), `"RK4"`; or the pair `(A, b)`;
        or a function of `z`, such as `lambda z: step(0.0, 1.0, 1.0, None, z)` of a step that takes
        `a` as its `args`.
    - `z`: real or complex, any shape. With the eigenvalues `a` of a spatial operator,
        `stability("BE", dt * a)` is the `fine` of `two_level_bound`, and
        `stability("BE", m * dt * a)` its `coarse`.

    **Returns**

    The values, in the shape of `z`; complex where `z` is.

    **Raises**

    `ValueError` for a method that isn't among those above or coefficients that don't fit together.

    ??? cite "Reference"

        E. Hairer, G. Wanner: Solving Ordinary Differential Equations II. Springer, 1996, IV.3.
    """
    z = np.asarray(z)
    z = z.astype(complex if np.iscomplexobj(z) else float)
    if callable(method):
        return np.asarray(method(z))
    if isinstance(method, str):
        if method not in _TABLEAUS:
            names = ", ".join(map(repr, _TABLEAUS))
            raise ValueError(f"method={method!r}: must be one of {names}, a pair or a function.")
        method = _TABLEAUS[method]
    a, b = (np.asarray(x, float) for x in method)
    if b.ndim != 1 or a.shape != (b.size, b.size):
        raise ValueError(
            f"method has coefficients of the shapes {a.shape} and {b.shape}: must be (s, s), (s,)."
        )
    ones = np.ones((*z.shape, b.size, 1))
    stages = np.linalg.solve(np.eye(b.size) - z[..., None, None] * a, ones)[..., 0]
    return 1 + z * (stages @ b)


def two_level_bound(
    fine: ArrayLike,
    coarse: ArrayLike,
    *,
    coarsening: int,
    steps: int,
    cf_relax: int = 1,
    c_weight: float = 1.0,
    kind: Kind = "sharp",
) -> ConvergenceBound:
    r"""The factor by which one iteration of two-level MGRIT can multiply error and residual.

    With $N_c = \lfloor N / m \rfloor$ C-points behind the initial one, whose value is known, the
    2-norm of $E$ (see above) for $\omega = 1$ is

    $$ |\lambda^m - \mu|\, |\lambda|^{m \nu}\, \frac{\sin n\theta}{\sin\theta}, \qquad
       \sin (n + 1)\theta = |\mu| \sin n\theta, \quad 0 < \theta \le \frac{\pi}{n + 1}, \quad
       n = N_c - 1 - \nu $$

    (with hyperbolic functions where $|\mu| > 1 + 1/n$): $(I - \mu S)^{-1}$ has the singular vectors
    $\sin i\theta$. It is attained by one initial error; measured factors of others, and of
    later iterations, stay below it. With $\sin n\theta / \sin\theta$ replaced by
    the sum of the moduli of $E$'s first column it is the bound of Dobrev et al.,

    $$ |\lambda^m - \mu|\, |\lambda|^{m \nu}\, \frac{1 - |\mu|^{N_c - \nu}}{1 - |\mu|}, $$

    whose last factor tends to $N_c - \nu$ for $|\mu| \to 1$. That form counts the initial point,
    too, as an unknown, hence $N_c - \nu$ instead of $n$.

    **Arguments**

    - `fine`: $\lambda$, eigenvalues of the propagator of one fine step, real or complex; an array
        over modes, of any shape.
    - `coarse`: $\mu$, those of the coarse propagator, over $m$ fine steps, mode by mode.
    - `coarsening`: the factor $m \ge 2$; `steps`: the number $N$ of fine steps, at least $m$.
    - `cf_relax`: the number $\nu$ of C-F-relaxations after the first F-relaxation.
    - `c_weight`: weight $\omega$ of the C-relaxation. For another than 1, `"sharp"` is found from
        the matrix itself (up to 1024 C-points), and `"dobrev"` is
        $|\lambda^m - \mu| (|1 - \omega| + \omega |\lambda|^m)^\nu (1 - |\mu|^{N_c})/(1 - |\mu|)$.
    - `kind`: `"sharp"` or `"dobrev"`.

    **Returns**

    A `ConvergenceBound`. Where $N_c \le 1 + \nu$ the iteration is exact, and `"sharp"` is 0.

    **Raises**

    `ValueError` or `TypeError` naming the argument at fault.

    ??? cite "Reference"

        Dobrev, Kolev, Petersson, Schroder (2017); Southworth (2019); see the head of this module.
    """
    m = check_integer("coarsening", coarsening, 2)
    points = check_integer("steps", steps, m) // m
    nu = check_integer("cf_relax", cf_relax, 0)
    if not isinstance(c_weight, (int, float)) or not 0 < c_weight < math.inf:
        raise ValueError(f"c_weight={c_weight!r}: must be a positive number.")
    if kind not in ("sharp", "dobrev"):
        raise ValueError(f"kind={kind!r}: must be 'sharp' or 'dobrev'.")
    lam_m, mu = _eigenvalues("fine", fine) ** m, _eigenvalues("coarse", coarse)
    if lam_m.shape != mu.shape:
        raise ValueError(
            f"fine has shape {lam_m.shape} and coarse {mu.shape}: they must be the same."
        )
    r = np.abs(mu)
    if c_weight != 1 and nu and kind == "sharp":
        modes = _dense_norms(lam_m, mu, points, nu, c_weight)
    elif kind == "sharp":
        modes = np.abs(lam_m - mu) * np.abs(lam_m) ** nu * _resolvent_norm(r, points - 1 - nu)
    else:
        relaxed = (abs(1 - c_weight) + c_weight * np.abs(lam_m)) ** nu
        terms = max(0, points - nu) if c_weight == 1 else points
        modes = np.abs(lam_m - mu) * relaxed * _geometric_sum(r, terms)
    return ConvergenceBound(modes, kind)


def _eigenvalues(name: str, value: Any) -> np.ndarray:
    out = np.asarray(value)
    if not np.issubdtype(out.dtype, np.number):
        raise TypeError(f"{name} has dtype {out.dtype}: must be real or complex eigenvalues.")
    if out.size == 0 or not np.all(np.isfinite(out)):
        raise ValueError(f"{name} must hold at least one eigenvalue, none NaN or infinite.")
    return out.astype(complex)


def _geometric_sum(r: np.ndarray, terms: int) -> np.ndarray:
    """1 + r + ... + r^(terms - 1), by exp and log so that it is exact near r = 1 as well."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        log = np.log(r)
        out = np.expm1(terms * log) / np.expm1(log)
    return np.where(r == 1, float(terms), np.where(r == 0, float(terms > 0), out))


def _resolvent_norm(r: np.ndarray, n: int) -> np.ndarray:
    """2-norm of (I - r S)^(-1), r >= 0, of size n: sin(n theta) / sin(theta), or hyperbolic."""
    if n <= 0:
        return np.zeros_like(r)
    oscillates = r * n < n + 1
    low, high = np.zeros_like(r), np.where(oscillates, np.pi / (n + 1), np.log(np.maximum(r, 1)))
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        for _ in range(100):  # bisection, to the last bit
            x = (low + high) / 2
            positive = np.where(
                oscillates,
                np.sin((n + 1) * x) < r * np.sin(n * x),
                # sinh((n + 1) x) > r sinh(n x), divided by exp((n + 1) x)
                -np.expm1(-2 * (n + 1) * x) > -r * np.exp(-x) * np.expm1(-2 * n * x),
            )
            low, high = np.where(positive, low, x), np.where(positive, x, high)
        x = (low + high) / 2
        out = np.where(oscillates, np.sin(n * x) / np.sin(x), np.sinh(n * x) / np.sinh(x))
    return np.where(x == 0, float(n), out)  # r = 1 + 1/n: between the two


def _dense_norms(
    lam_m: np.ndarray, mu: np.ndarray, points: int, nu: int, weight: float
) -> np.ndarray:
    """Norms of the lower triangular Toeplitz matrices E, mode by mode."""
    if points > _MOST_DENSE:
        raise ValueError(
            f"c_weight={weight}: kind='sharp' takes at most {_MOST_DENSE} C-points, here {points}; "
            "kind='dobrev' takes any number."
        )
    lag = np.subtract.outer(np.arange(points), np.arange(points))
    out = np.zeros(mu.shape)
    for index in np.ndindex(mu.shape):
        column = np.zeros(points, complex)  # of S (I - mu S)^-1: 0, 1, mu, mu^2, ...
        column[1:] = mu[index] ** np.arange(points - 1)
        for _ in range(nu):
            shifted = np.concatenate([[0], column[:-1]])
            column = (1 - weight) * column + weight * lam_m[index] * shifted
        e = np.where(lag >= 0, (lam_m[index] - mu[index]) * column[np.maximum(lag, 0)], 0)
        out[index] = np.linalg.norm(e, 2)
    return out
