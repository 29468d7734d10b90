r"""Coarsening in space: restriction and prolongation of a state between the levels of MGRIT.

Level $l + 1$ may hold smaller states than level $l$. $R$ takes a state down and $P$ takes a
correction up; they enter the cycle as

$$ v_k = R u_{mk}, \qquad
   \tau_k = R(g_{mk} + \Phi_l(u_{mk-1}) - u_{mk}) + v_k - \Phi_{l+1}(v_{k-1}), \qquad
   u_{mk} \leftarrow u_{mk} + P(v'_k - v_k) $$

so $R$ acts on states as well as on residuals: it should keep constants. Both are linear and
differentiable. The adjoint solve goes through the levels with $P^T$ in place of $R$ and $R^T$ in
place of $P$ (`transpose`), which for $R = P^T / 2^d$ differ from the forward ones in scale only.

A transfer is any pair of functions on pytrees (`Transfer`). Those made here act along some axes
of every leaf as the tensor product of one operator on a line of $n$ points, coarsened by a factor
$f$ to $n_c$ points:

| grid         | points                         | $n$       | $n_c$               | coarse $j$     |
|--------------|--------------------------------|-----------|---------------------|----------------|
| `"vertex"`   | interior ones, 0 at both ends  | $f k - 1$ | $(n + 1)/f - 1$     | $f(j + 1) - 1$ |
| `"nodes"`    | all, both ends among them      | $f k + 1$ | $(n - 1)/f + 1$     | $f j$          |
| `"periodic"` | one period                     | $f k$     | $n/f$               | $f j$          |
| cells        | (`average_pooling`)            | any       | $\lceil n/f \rceil$ | from $f j$ on  |

Sizes are found from the state, so one transfer serves several levels.

??? cite "Reference"

    W. L. Briggs, V. E. Henson, S. F. McCormick: A Multigrid Tutorial, 2nd edition. SIAM, 2000.
    U. Trottenberg, C. W. Oosterlee, A. Schüller: Multigrid. Academic Press, 2001.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from jaxbraid._options import check_choice

__all__ = ["Transfer", "average_pooling", "full_weighting", "injection", "transpose"]

Axes = int | Iterable[int]
Grid = Literal["vertex", "nodes", "periodic"]
Prolongation = Literal["linear", "constant"]

_GRIDS = ("vertex", "nodes", "periodic")
_PROLONGATIONS = ("linear", "constant")


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Restriction to the next coarser level and prolongation from it.

    **Arguments**

    - `restrict`: `restrict(u) -> v`, from a fine state to a coarse one: any pytrees of arrays.
    - `prolong`: `prolong(v, like) -> u`, from a coarse state to a fine one. `like` is a pytree of
        `jax.ShapeDtypeStruct` with the shapes and dtypes of the fine state. A function of `v`
        alone will do: one whose second parameter is neither required nor called `like`, or whose
        signature can't be read, is called with `v` only.

    Both must be linear. Made from functions of a module or by the builders here, transfers are
    hashable, and equal when their parts are, so that equal ones share compiled programs.

    **Raises**

    `TypeError` if one of them isn't a function.
    """

    restrict: Callable[..., PyTree]
    prolong: Callable[..., PyTree]

    def __post_init__(self) -> None:
        for name in ("restrict", "prolong"):
            value = getattr(self, name)
            if not callable(value):
                raise TypeError(f"{name}={value!r}: must be a function.")
        if not _takes_like(self.prolong):
            object.__setattr__(self, "prolong", _WithoutLike(self.prolong))


@dataclasses.dataclass(frozen=True)
class _WithoutLike:
    """A prolongation `fn(v)` that is called as `fn(v, like)`."""

    fn: Callable[[PyTree], PyTree]

    def __call__(self, v: PyTree, like: PyTree = None) -> PyTree:
        return self.fn(v)


def _takes_like(prolong: Callable[..., PyTree]) -> bool:
    try:
        parameters = inspect.signature(prolong).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(positional) > 1 and (
        positional[1].default is inspect.Parameter.empty or positional[1].name == "like"
    )


def transpose(transfer: Transfer, fine: PyTree) -> Transfer:
    r"""The transfer of the adjoint solve: restriction $P^T$ and prolongation $R^T$.

    For complex states these are plain transposes without conjugation, as in `jax.vjp`.

    **Arguments**

    - `transfer`: whose transpose is taken.
    - `fine`: arrays or `jax.ShapeDtypeStruct` of the fine state; all leaves real or complex.

    **Returns**

    A `Transfer` for states shaped like `fine`. It is hashable if `transfer` is.

    **Raises**

    `TypeError` for a leaf that is neither real nor complex. An operator that isn't linear raises
    JAX's error when it is applied.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(fine)
    shapes = tuple(jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for _, x in leaves)
    for (path, _), leaf in zip(leaves, shapes, strict=True):
        if not _is_inexact(leaf):
            raise TypeError(
                f"fine{jax.tree_util.keystr(path)} has dtype {leaf.dtype}: only real and complex "
                "leaves can be transposed."
            )
    return Transfer(
        _Transposed("prolong", transfer, treedef, shapes),
        _Transposed("restrict", transfer, treedef, shapes),
    )


@dataclasses.dataclass(frozen=True)
class _Transposed:
    """P^T or R^T; the fine shapes are kept flat because a pytree of them need not be hashable."""

    of: Literal["restrict", "prolong"]
    transfer: Transfer
    treedef: Any
    shapes: tuple[jax.ShapeDtypeStruct, ...]

    def __call__(self, x: PyTree, like: PyTree = None) -> PyTree:
        fine = self.treedef.unflatten(self.shapes)
        fn, primal = self.transfer.restrict, fine
        if self.of == "prolong":
            fn, primal = lambda v: self.transfer.prolong(v, fine), jax.eval_shape(fn, fine)
        try:
            return jax.linear_transpose(fn, primal)(x)[0]
        except Exception as e:
            e.add_note(
                f"This arose in the transpose of a transfer's `{self.of}`, which must be linear "
                "and map real and complex leaves to such. MGRIT(adjoint_transfers='forward') "
                "needs no transposes."
            )
            raise


def injection(
    axes: Axes = -1,
    factor: int = 2,
    grid: Grid = "vertex",
    prolongation: Prolongation = "linear",
) -> Transfer:
    r"""Restriction takes the values at the coarse points: $(R u)_j = u_{f(j+1)-1}$ or $u_{f j}$.

    **Arguments**

    - `axes`: axis or axes of every leaf that are coarsened; negative ones count from the end.
    - `factor`: $f \ge 2$, every which point is a coarse one.
    - `grid`: `"vertex"` (interior points; $n = f k - 1$, coarse points $f(j+1)-1$), `"nodes"`
        (boundary included; $n = f k + 1$, coarse points $f j$) or `"periodic"` ($n = f k$, coarse
        points $f j$).
    - `prolongation`: `"linear"` interpolation, where `"vertex"` takes zero at both ends; or
        `"constant"`, the value of the nearest coarse point (the left of two, within the grid).

    The dtype of each leaf is kept. Leaves that are neither real nor complex (masks, counters, keys)
    are injected, and prolonged as by `"constant"`; if they lack the axes, they stay as they are.

    **Returns**

    A `Transfer` between leaves of shape `(..., n, ...)` and `(..., n_c, ...)`.

    **Raises**

    `ValueError` or `TypeError` for options that aren't among those above. When applied,
    `ValueError` for a real or complex leaf without the axes, for a size that can't be coarsened,
    and for a coarse leaf that doesn't fit the fine one.

    ??? cite "Reference"

        W. L. Briggs, V. E. Henson, S. F. McCormick: A Multigrid Tutorial, 2nd edition. SIAM, 2000,
        chapter 3.
    """
    check_choice("grid", grid, _GRIDS, "; for means over cells see average_pooling")
    check_choice("prolongation", prolongation, _PROLONGATIONS)
    return _build("inject", axes, factor, grid, prolongation)


def full_weighting(axes: Axes = -1, grid: Grid = "vertex") -> Transfer:
    r"""Restriction by $[\tfrac14\ \tfrac12\ \tfrac14]$, prolongation by linear interpolation.

    The factor is 2. On `"vertex"` and `"periodic"` grids $R = P^T / 2^d$ for $d$ axes. On
    `"nodes"` the two end points are injected, so that boundary values stay what they are. Constants
    and, away from the wrap of a periodic grid, linear functions are restricted to themselves.

    **Arguments**

    - `axes`: axis or axes of every leaf that are coarsened; negative ones count from the end.
        Several give the tensor product: with two, the weights $1/16, 1/8, 1/4$.
    - `grid`: `"vertex"` ($n$ odd, $n_c = (n-1)/2$), `"nodes"` ($n$ odd, $n_c = (n+1)/2$) or
        `"periodic"` ($n$ even, $n_c = n/2$), see `injection`.

    Dtypes, leaves that are neither real nor complex, the value returned and errors are as for
    `injection`.

    ??? cite "Reference"

        W. L. Briggs, V. E. Henson, S. F. McCormick: A Multigrid Tutorial, 2nd edition. SIAM, 2000,
        chapter 3. U. Trottenberg, C. W. Oosterlee, A. Schüller: Multigrid. Academic Press, 2001,
        chapter 2.
    """
    check_choice("grid", grid, _GRIDS, "; for means over cells see average_pooling")
    return _build("weight", axes, 2, grid, "linear")


def average_pooling(
    axes: Axes = -1, factor: int = 2, prolongation: Prolongation = "constant"
) -> Transfer:
    r"""Means over blocks of `factor` cells: finite volumes, and images of any size.

    A size $n$ that `factor` doesn't divide ends in a smaller cell, the mean of what is there:
    7 x 7 becomes 4 x 4. On images with channels last, `axes=(-3, -2)`.

    **Arguments**

    - `axes`: axis or axes of every leaf that are coarsened; negative ones count from the end.
    - `factor`: $f \ge 2$, cells a block.
    - `prolongation`: `"constant"` gives every fine cell its block's value, so that $R P = I$, and
        $R = P^T / f^d$ where $f$ divides the sizes. `"linear"` interpolates between the centres of
        the coarse cells (weights 3/4, 1/4 for $f = 2$) and is constant beyond the first and last.

    Dtypes and the value returned are as for `injection`. Leaves that are neither real nor complex
    take the value of the first cell of each block; if they lack the axes, they stay as they are.

    **Raises**

    `ValueError` or `TypeError` for options that aren't among those above. When applied,
    `ValueError` for a real or complex leaf without the axes, for a size less than 2, and for a
    coarse leaf that doesn't fit the fine one.

    ??? cite "Reference"

        U. Trottenberg, C. W. Oosterlee, A. Schüller: Multigrid. Academic Press, 2001, chapter 2.
    """
    check_choice("prolongation", prolongation, _PROLONGATIONS)
    return _build("average", axes, factor, "cell", prolongation)


def _build(restriction: str, axes: Any, factor: Any, grid: str, prolongation: str) -> Transfer:
    line = _Line(_checked_axes(axes), _checked_factor(factor), grid)
    return Transfer(_Restrict(restriction, line), _Prolong(prolongation, line))


@dataclasses.dataclass(frozen=True)
class _Line:
    """What both directions share: a kind of grid along each of some axes, and its coarsening."""

    axes: tuple[int, ...]
    factor: int
    grid: str

    def find(self, where: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The axes of a leaf of this shape, counted from the front."""
        ndim = len(shape)
        if not self.within(shape):
            raise ValueError(
                f"axes={self.axes}: {where} has shape {shape}, without some of these axes."
            )
        found = tuple(a % ndim for a in self.axes)
        if len(set(found)) < len(found):
            raise ValueError(f"axes={self.axes}: in {where}, of shape {shape}, two are the same.")
        return found

    def within(self, shape: tuple[int, ...]) -> bool:
        return all(-len(shape) <= a < len(shape) for a in self.axes)

    def coarse(self, where: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that a leaf has on the coarse grid."""
        out, f = list(shape), self.factor
        for axis in self.find(where, shape):
            n = shape[axis]
            if self.grid == "vertex":
                k, rest, least, sizes = (n + 1) // f - 1, (n + 1) % f, 2 * f - 1, f"{f} k - 1"
            elif self.grid == "nodes":
                k, rest, least, sizes = (n - 1) // f + 1, (n - 1) % f, f + 1, f"{f} k + 1"
            elif self.grid == "periodic":
                k, rest, least, sizes = n // f, n % f, f, f"{f} k"
            else:
                k, rest, least, sizes = -(-n // f), 0, 2, ""
            if rest or n < least:
                sizes = f"{sizes} and " if sizes else ""
                raise ValueError(
                    f"{where} has size {n} on axis {axis} (shape {shape}), which a {self.grid!r} "
                    f"grid can't coarsen by {f}: it must be {sizes}at least {least}."
                )
            out[axis] = k
        return tuple(out)


@dataclasses.dataclass(frozen=True)
class _Restrict:
    kind: str
    line: _Line

    def __call__(self, u: PyTree) -> PyTree:
        return jax.tree_util.tree_map_with_path(self._leaf, u)

    def _leaf(self, path: Any, u: Any) -> Array:
        u = jnp.asarray(u)
        if not _is_inexact(u) and not self.line.within(u.shape):
            return u
        where = "state" + jax.tree_util.keystr(path)
        self.line.coarse(where, u.shape)  # checks all axes before any is worked on
        f, grid = self.line.factor, self.line.grid
        kind = self.kind if _is_inexact(u) else "inject"
        out = u if kind == "inject" else _widen(u)
        for axis in self.line.find(where, u.shape):
            if kind == "inject":
                out = _inject(out, axis, f, grid)
            elif kind == "weight":
                out = _weight(out, axis, grid)
            else:
                out = _average(out, axis, f)
        return out if out.dtype == u.dtype else out.astype(u.dtype)


@dataclasses.dataclass(frozen=True)
class _Prolong:
    kind: str
    line: _Line

    def __call__(self, v: PyTree, like: PyTree) -> PyTree:
        return jax.tree_util.tree_map_with_path(self._leaf, v, like)

    def _leaf(self, path: Any, v: Any, like: Any) -> Array:
        v, fine = jnp.asarray(v), jnp.shape(like)
        if not _is_inexact(v) and not self.line.within(v.shape):
            return v
        where = "state" + jax.tree_util.keystr(path)
        coarse = self.line.coarse(where, fine)
        if v.shape != coarse:
            raise ValueError(
                f"{where} has shape {v.shape}: to be prolonged to {fine}, it must be {coarse}."
            )
        f, grid = self.line.factor, self.line.grid
        kind = self.kind if _is_inexact(v) else "constant"
        out = v if kind == "constant" else _widen(v)
        for axis in self.line.find(where, fine):
            n = fine[axis]
            if kind == "constant":
                out = _nearest(out, n, axis, f, grid)
            elif grid == "cell":
                out = _linear_in_cells(out, n, axis, f)
            else:
                out = _linear(out, axis, f, grid)
        return out if out.dtype == v.dtype else out.astype(v.dtype)


# The operators on one axis. They are made of strided slices and stacks, whose transposes are again
# such: reductions over a short axis, and their transposes, are several times slower on CPU.


def _inject(u: Array, axis: int, f: int, grid: str) -> Array:
    return _cut(u, axis, f - 1 if grid == "vertex" else 0, None, f)


def _weight(u: Array, axis: int, grid: str) -> Array:
    even, odd = _cut(u, axis, 0, None, 2), _cut(u, axis, 1, None, 2)
    if grid == "vertex":
        return 0.5 * odd + 0.25 * (_cut(even, axis, 0, -1) + _cut(even, axis, 1))
    if grid == "periodic":
        left = jnp.concatenate([_cut(odd, axis, -1), _cut(odd, axis, 0, -1)], axis)
        return 0.5 * even + 0.25 * (left + odd)
    inner = 0.25 * (_cut(odd, axis, 0, -1) + _cut(odd, axis, 1))
    inner += 0.5 * _cut(even, axis, 1, -1)
    return jnp.concatenate([_cut(even, axis, 0, 1), inner, _cut(even, axis, -1)], axis)


def _average(u: Array, axis: int, f: int) -> Array:
    n = u.shape[axis]
    whole = n // f * f
    means = [_mean([_cut(u, axis, i, whole, f) for i in range(f)])] if whole else []
    if whole < n:
        means.append(_mean([_cut(u, axis, i, i + 1) for i in range(whole, n)]))
    return jnp.concatenate(means, axis)


def _mean(parts: list[Array]) -> Array:
    return sum(parts[1:], parts[0]) / len(parts)


def _nearest(v: Array, n: int, axis: int, f: int, grid: str) -> Array:
    """Every fine point takes the value of its coarse cell or of the nearest coarse point."""
    first, last = _cut(v, axis, 0, 1), _cut(v, axis, -1)
    start = 0 if grid == "cell" else (f - 1) // 2
    if grid == "vertex":
        v, start = jnp.concatenate([first, v, last], axis), start + 1
    elif grid == "periodic":
        v = jnp.concatenate([v, first], axis)
    return _cut(_interleave([v] * f, axis), axis, start, start + n)


def _linear(v: Array, axis: int, f: int, grid: str) -> Array:
    """Linear interpolation between the coarse points, which stand at both ends of `f` steps."""
    if grid == "vertex":
        v = jnp.pad(v, [(int(a == axis), int(a == axis)) for a in range(v.ndim)])
    elif grid == "periodic":
        v = jnp.concatenate([v, _cut(v, axis, 0, 1)], axis)
    left, right = _cut(v, axis, 0, -1), _cut(v, axis, 1)
    change = right - left
    u = _interleave([left] + [left + (r / f) * change for r in range(1, f)], axis)
    if grid == "vertex":
        return _cut(u, axis, 1)
    return jnp.concatenate([u, _cut(v, axis, -1)], axis) if grid == "nodes" else u


def _linear_in_cells(v: Array, n: int, axis: int, f: int) -> Array:
    """Linear interpolation between the centres of cells, the last of which may be smaller."""
    n_c = v.shape[axis]
    if n_c == 1:
        return _nearest(v, n, axis, f, "cell")
    last = n - f * (n_c - 1)
    slope = (_cut(v, axis, 1) - _cut(v, axis, 0, -1)) / f
    before, after = _cut(slope, axis, 0, -1), _cut(slope, axis, -1) * (2 * f / (f + last))
    right = jnp.concatenate([before, after], axis)
    left = jnp.concatenate([jnp.zeros_like(after), before], axis)

    def cells(v: Array, size: int, left: Array, right: Array | None) -> Array:
        out = []
        for r in range(size):
            x = r - (size - 1) / 2  # from the centre of the coarse cell, in fine cells
            side = left if x < 0 else right
            out.append(v if x == 0 or side is None else v + x * side)
        return _interleave(out, axis)

    most = cells(_cut(v, axis, 0, -1), f, left, right)
    return jnp.concatenate([most, cells(_cut(v, axis, -1), last, after, None)], axis)


def _cut(x: Array, axis: int, start: int, stop: int | None = None, stride: int = 1) -> Array:
    """`x[start:stop:stride]` along an axis; negative bounds count from the end."""
    start, stop, _ = slice(start, stop).indices(x.shape[axis])
    return lax.slice_in_dim(x, start, max(start, stop), stride, axis)


def _interleave(parts: list[Array], axis: int) -> Array:
    """`[a_0, b_0, ..., a_1, b_1, ...]` along an axis."""
    x = jnp.stack(parts, axis + 1)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype if hasattr(x, "dtype") else jnp.result_type(x), jnp.inexact)


def _widen(x: Array) -> Array:
    """Half precision and less is worked on in single precision and rounded once at the end."""
    return x if jnp.finfo(x.dtype).bits >= 32 else x.astype(jnp.float32)


def _checked_axes(axes: Any) -> tuple[int, ...]:
    try:
        out = tuple(operator.index(a) for a in (axes if isinstance(axes, Iterable) else (axes,)))
    except TypeError:
        raise TypeError(f"axes={axes!r}: must be an integer or a tuple of integers.") from None
    if not out or len(set(out)) < len(out):
        raise ValueError(f"axes={axes!r}: must be one or more different axes.")
    return out


def _checked_factor(factor: Any) -> int:
    try:
        out = operator.index(factor)
    except TypeError:
        raise TypeError(f"factor={factor!r}: must be an integer.") from None
    if out < 2:
        raise ValueError(f"factor={factor!r}: must be at least 2.")
    return out
