"""Steps of states of few numbers, number by number.

A batch of vectors of two numbers holds them side by side in memory, and between the stages of a
step XLA takes such vectors apart and puts them together. So a step that does nothing with its state
but arithmetic on its entries is carried out on each number by itself: batched, these are long
vectors. A kernel has one result on CPUs, and XLA evaluates the step anew for each: there two
numbers are stored as one complex number, whose parts one kernel computes together.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from jaxbraid import _tree
from jaxbraid._tree import Split, Tree

MOST = 8  # numbers of a state
PAIRED = (jnp.float32, jnp.float64)  # types that are parts of complex ones

# what acts on each entry
_ON_ENTRIES = frozenset(
    name
    for names in (
        "abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt clamp complex conj copy",
        "convert_element_type cos cosh div eq erf erf_inv erfc exp exp2 expm1 floor ge gt imag",
        "integer_pow is_finite le log log1p logistic lt max min mul ne neg not or pow real rem",
        "round rsqrt select_n sign sin sinh sqrt square stop_gradient sub tan tanh xor",
    )
    for name in names.split(" ")
)

# what only moves entries, of arrays of objects: `fn(params, *operands)`
_MOVES: dict[str, Callable[..., Any]] = {
    "broadcast_in_dim": lambda p, x: _broadcast(x, p["shape"], p["broadcast_dimensions"]),
    "concatenate": lambda p, *xs: np.concatenate(xs, p["dimension"]),
    "reshape": lambda p, x: x.reshape(p["new_sizes"]),
    "rev": lambda p, x: np.flip(x, p["dimensions"]),
    "slice": lambda p, x: x[_slices(p)],
    "squeeze": lambda p, x: np.squeeze(x, p["dimensions"]),
    "stack": lambda p, *xs: np.stack(xs, p["axis"]),
    "transpose": lambda p, x: x.transpose(p["permutation"]),
    "reduce_sum": lambda p, x: x.sum(axis=p["axes"]),
    "split": lambda p, x: np.split(x, np.cumsum(p["sizes"])[:-1], p["axis"]),
    "unstack": lambda p, x: list(np.moveaxis(x, p["axis"], 0)),
}


class NeedsWhole(Exception):
    """An operation needs the array, not its entries."""


@dataclasses.dataclass(frozen=True)
class NumbersSplit(Split):
    """A split of states whose inexact leaves are taken apart into their numbers.

    With `pairs`, neighbours of one real type are parts of a complex number.
    """

    leaves: tuple[jax.ShapeDtypeStruct, ...]
    pairs: bool

    @classmethod
    def of(cls, tree: Tree, pairs: bool = False) -> NumbersSplit:
        whole = Split.of(tree)
        leaves = tuple(_tree.shapes(a) for a in whole(tree)[0])
        return cls(whole.treedef, whole.mask, leaves, pairs)

    def _widths(self) -> list[int]:
        """How many numbers each of the arrays holds: 1 or 2."""
        types = [a.dtype for a in self.leaves for _ in range(a.size)]
        widths: list[int] = []
        while (i := sum(widths)) < len(types):
            pair = self.pairs and types[i] in PAIRED and types[i : i + 2] == [types[i]] * 2
            widths.append(1 + pair)
        return widths

    def __call__(self, tree: Tree) -> tuple[list[Any], list[Any]]:
        diff, rest = super().__call__(tree)
        numbers = []
        for a, like in zip(diff, self.leaves, strict=True):
            lead = jnp.shape(a)[: jnp.ndim(a) - like.ndim]
            flat = jnp.reshape(a, (*lead, like.size))
            numbers += [flat[..., i] for i in range(like.size)]
        following = iter(numbers)
        own = [[next(following) for _ in range(n)] for n in self._widths()]
        return [lax.complex(*x) if len(x) == 2 else x[0] for x in own], rest

    def join(self, diff: list[Any], rest: list[Any]) -> Tree:
        pairs = zip(diff, self._widths(), strict=True)
        parts = ([lax.real(x), lax.imag(x)] if n == 2 else [x] for x, n in pairs)
        numbers, leaves = itertools.chain.from_iterable(parts), []
        for like in self.leaves:
            own = list(itertools.islice(numbers, like.size))
            leaves.append(jnp.stack(own, -1).reshape(*jnp.shape(own[0]), *like.shape))
        return super().join(leaves, rest)


def few(u: Tree) -> bool:
    """Whether a state has few numbers, in arrays."""
    sizes = [(jnp.size(a), jnp.ndim(a)) for a in jax.tree.leaves(u) if _tree.is_inexact(a)]
    return sum(n for n, _ in sizes) <= MOST and any(d > 0 and n > 0 for n, d in sizes)


def by_numbers(fn: Callable[..., Tree], *args: Tree) -> Tree:
    """`fn(*args)`, its arithmetic on arrays that are made of scalars done on these.

    Raises `NeedsWhole` where it does something else with them.
    """
    jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
    out = _evaluate(jaxpr.jaxpr, jaxpr.consts, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shapes), [_whole(x) for x in out])


def _evaluate(jaxpr: Jaxpr, consts: Any, args: Any) -> list[Any]:
    env: dict[Any, Any] = dict(zip(jaxpr.constvars + jaxpr.invars, [*consts, *args], strict=True))

    def value(v: Any) -> Any:
        return v.val if isinstance(v, Literal) else env[v]

    for eqn in jaxpr.eqns:
        operands = [value(v) for v in eqn.invars]
        if eqn.primitive.name == "jit":
            inner = eqn.params["jaxpr"]
            out = _evaluate(inner.jaxpr, inner.consts, operands)
        elif any(map(_is_apart, operands)) or _makes_array(eqn, operands):
            out = _of_entries(eqn, [_entries(x) for x in operands])
        else:
            names = [v for v in eqn.invars if not isinstance(v, Literal)]
            alone = jaxpr.replace(
                constvars=[], invars=names, outvars=eqn.outvars, eqns=[eqn], effects=eqn.effects
            )
            out = jaxpr_as_fun(ClosedJaxpr(alone, ()))(*(env[v] for v in names))
        env |= zip(eqn.outvars, out, strict=True)
    return [value(v) for v in jaxpr.outvars]


def _makes_array(eqn: Any, operands: list[Any]) -> bool:
    """Whether an array of few numbers is made of scalars."""
    size = math.prod(eqn.outvars[0].aval.shape) if eqn.outvars else MOST + 1
    return eqn.primitive.name in _MOVES and size <= MOST and not any(map(jnp.ndim, operands))


def _of_entries(eqn: Any, operands: list[np.ndarray]) -> list[Any]:
    name = eqn.primitive.name
    if name in _MOVES:
        out = _MOVES[name](eqn.params, *operands)
    elif name in _ON_ENTRIES:
        shape = eqn.outvars[0].aval.shape
        parts = [np.broadcast_to(x, shape).flat for x in operands]  # axes of one entry may be wide
        out = np.empty(math.prod(shape), object)  # NumPy keeps an object as it is at an index
        for i, entries in enumerate(zip(*parts, strict=True)):
            out[i] = eqn.primitive.bind(*entries, **eqn.params)
        out = out.reshape(shape)
    else:
        raise NeedsWhole(name)
    outs = out if eqn.primitive.multiple_results else [out]
    return [x.item() if isinstance(x, np.ndarray) and x.ndim == 0 else x for x in outs]


def _is_apart(x: Any) -> bool:
    return isinstance(x, np.ndarray) and x.dtype == object


def _entries(x: Any) -> np.ndarray:
    """The entries of an array as an array of objects."""
    if _is_apart(x):
        return x
    shape = jnp.shape(x)
    out = np.empty(math.prod(shape), object)
    for k, i in enumerate(np.ndindex(shape)):
        out[k] = x[i] if shape else x
    return out.reshape(shape)


def _whole(x: Any) -> Any:
    return jnp.stack(list(x.flat)).reshape(x.shape) if _is_apart(x) else x


def _broadcast(x: np.ndarray, shape: tuple[int, ...], axes: tuple[int, ...]) -> np.ndarray:
    sizes = [1] * len(shape)
    for axis, n in zip(axes, x.shape, strict=True):
        sizes[axis] = n
    return np.broadcast_to(x.reshape(sizes), shape)


def _slices(params: Any) -> tuple[slice, ...]:
    strides = params["strides"] or (1,) * len(params["start_indices"])
    ends = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return tuple(slice(*e) for e in ends)
