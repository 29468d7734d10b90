"""Space-time parallelism: what a step needs from other parts of a state that is split in space.

With `jaxbraid.solve(..., mesh=mesh, space_axis="space")` every device steps its own part of the
state: consecutive entries of the first axis, which must be divisible by the size of the mesh axis.
A step that looks at neighbours in space takes them from `halo`; one that needs the whole axis at
once (a transform, a direct solve) goes through `along`. All of it is differentiable, and with
`axis_name=None` does the same on one device, so a step can be written once for both:

```python
import jax.numpy as jnp
from jaxbraid import space

def heat(axis_name=None):                      # u_t = u_xx, periodic, forward Euler
    def step(t0, t1, u, params, args):
        left_and_right = space.halo(u, axis_name)
        return u + (t1 - t0) * args * (left_and_right[2:] - 2 * u + left_and_right[:-2])
    return step
```
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree, Shaped

__all__ = ["along", "halo", "part"]

Boundary = Literal["periodic", "zero", "edge"]


def halo(
    u: PyTree, axis_name: str | None, width: int = 1, boundary: Boundary = "periodic"
) -> PyTree:
    """A device's part of the state with `width` entries of its neighbours on either side.

    **Arguments**

    - `u`: arrays `(n, ...)`, this device's part.
    - `axis_name`: the mesh axis that splits space; `None` on one device.
    - `width`: at most `n`.
    - `boundary`: what lies beyond the ends of the whole axis: `"periodic"`, `"zero"`, or `"edge"`
        (the first or last entry again).

    **Returns**

    Arrays `(width + n + width, ...)`.

    **Raises**

    `ValueError` if `width` or `boundary` is not one of these.
    """
    if boundary not in ("periodic", "zero", "edge"):
        raise ValueError(f"boundary={boundary!r}: must be 'periodic', 'zero' or 'edge'.")

    def one(a: jax.Array) -> jax.Array:
        if jnp.ndim(a) == 0 or not 1 <= width <= a.shape[0]:
            raise ValueError(
                f"width={width}: must be between 1 and the entries of this part; u has a leaf of "
                f"shape {jnp.shape(a)}."
            )
        before, after = a[-width:], a[:width]
        first = last = True
        if axis_name is not None:
            size = lax.axis_size(axis_name)
            before = lax.ppermute(before, axis_name, [(i, (i + 1) % size) for i in range(size)])
            after = lax.ppermute(after, axis_name, [(i, (i - 1) % size) for i in range(size)])
            first, last = lax.axis_index(axis_name) == 0, lax.axis_index(axis_name) == size - 1
        if boundary != "periodic":
            ends = [jnp.broadcast_to(e, before.shape) for e in (a[:1], a[-1:])]
            if boundary == "zero":
                ends = [jnp.zeros_like(e) for e in ends]
            before, after = jnp.where(first, ends[0], before), jnp.where(last, ends[1], after)
        return jnp.concatenate([before, a, after])

    return jax.tree.map(one, u)


def along(
    fn: Callable[..., jax.Array],
    u: Shaped[Array, "n columns ..."],
    axis_name: str | None,
    *given: Shaped[Array, "columns ..."],
) -> Shaped[Array, "n columns ..."]:
    """`fn`, which works on each column of the whole first axis, of arrays that are split along it.

    The devices exchange their parts, so that each has whole columns (second axis), work on those,
    and exchange them back: two messages between all of them.

    **Arguments**

    - `fn`: `fn(u, *given) -> u`, from arrays `(N, q, ...)` to arrays of the same shape. It must not
        matter to a column which others it is with.
    - `u`: this device's part; any number of columns.
    - `axis_name`: the mesh axis that splits space; `None` on one device.
    - `given`: arrays `(columns, ...)` with what `fn` has to know about each column.

    **Returns**

    This device's part of the result.
    """
    if axis_name is None:
        return fn(u, *given)
    size, columns = lax.axis_size(axis_name), u.shape[1]
    each = -(-columns // size)
    u = jnp.pad(u, [(0, 0), (0, each * size - columns)] + [(0, 0)] * (u.ndim - 2))
    whole = lax.all_to_all(u, axis_name, split_axis=1, concat_axis=0, tiled=True)
    index = jnp.minimum(lax.axis_index(axis_name) * each + jnp.arange(each), columns - 1)
    whole = fn(whole, *(jnp.asarray(x)[index] for x in given))
    u = lax.all_to_all(whole, axis_name, split_axis=0, concat_axis=1, tiled=True)
    return u[:, :columns]


def part(x: PyTree, axis_name: str | None) -> PyTree:
    """This device's part of arrays `(N, ...)` that describe the whole axis: a grid, coefficients.

    **Raises**

    `ValueError` if the size of the mesh axis does not divide `N`.
    """
    if axis_name is None:
        return x
    size = lax.axis_size(axis_name)

    def one(a: Any) -> jax.Array:
        a = jnp.asarray(a)
        if a.ndim == 0 or a.shape[0] % size:
            raise ValueError(
                f"x has a leaf of shape {a.shape}: the mesh axis {axis_name!r} of size {size} must "
                "divide its first axis."
            )
        n = a.shape[0] // size
        return lax.dynamic_slice_in_dim(a, lax.axis_index(axis_name) * n, n)

    return jax.tree.map(one, x)
