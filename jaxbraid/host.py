r"""Steps that are computed on the host, by SciPy, PETSc, a finite element code or a simulator.

`host_step` turns a function of NumPy arrays into a step for `jaxbraid.solve`. JAX calls it back in
the middle of a compiled solve, with all intervals that are stepped at once as one batch: in an
F-relaxation of $K$ intervals of $m$ steps the host is called $m$ times, with $K$ states each. What
JAX cannot look into it cannot differentiate: for gradients the host also gives the step's vjp,
$(\partial \Phi / \partial u)^T w$ and so on, as an adjoint code does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxbraid import _check
from jaxbraid._tree import Split, Tree, is_inexact, shapes

__all__ = ["host_step"]


def host_step(
    fn: Callable[..., Any], *, vjp: Callable[..., Any] | None = None, batched: bool = True
) -> Callable[..., Any]:
    r"""A step for `jaxbraid.solve` from a function that runs on the host, on NumPy arrays.

    `fn` must be pure: JAX may call it again, in any order, from several threads where there are
    several devices, or not at all where nobody uses the result. It must not change the arrays that
    it gets. It must not call JAX, which is busy with the very computation that waits for `fn`, and
    may wait for ever: convert what it needs to NumPy beforehand. With several CPU devices in one
    process and large states, give JAX more threads than devices (`docs/host.md`).

    **Arguments**

    - `fn`: `fn(t0, t1, u, params_n, args) -> u_next` for a batch of `B` intervals: `t0` and `t1`
        have shape `(B,)`, all leaves of `u`, `params_n` and the result a leading axis `B`; `args`
        are as they were given, for the whole batch. (If a `jax.vmap` maps over `args`, there is one
        call for each of them.) Nested batches arrive as one. `MGRIT(batch_intervals="all")` makes
        batches as large as can be, `"one"` batches of one.
    - `vjp`: `vjp(t0, t1, u, params_n, args, ct) -> (du, dparams_n, dargs)`, the derivatives of the
        sum over all entries of `ct * u_next` with respect to `u`, `params_n` and `args`, for a
        batch. `ct` is like `u`; all results have a leading axis `B`, those for `args` too: each
        interval's own share. `None` in place of one of them is zero. Without `vjp`, a derivative
        is an error.
    - `batched`: with `False`, `fn` and `vjp` take one interval (`t0`, `t1` are scalars, no leading
        axes) and are called in a loop on the host.

    Results must have the dtypes of what they belong to. Leaves of the state that are not real or
    complex are constants: whatever `fn` returns for them is left out. Whatever `vjp` returns for
    such leaves, also of `params_n` and `args`, is left out as well; `ct` holds the constants.

    **Returns**

    `step(t0, t1, u, params_n, args) -> u_next`. Works under `jit` and `vmap`, on a mesh (every
    device calls the host for its own intervals) and, with `vjp`, in adjoint solves. Equal
    functions make equal steps, which share compiled programs.

    **Raises**

    `TypeError` if `fn` or `vjp` isn't a function, and when a derivative without `vjp`, or one with
    respect to the times, is taken. What `fn` raises, or returns in a wrong shape or dtype, ends the
    solve with JAX's error for callbacks, whose text has the message of the original one.
    """
    if not callable(fn):
        raise TypeError(f"fn={fn!r}: must be a function.")
    if vjp is not None and not callable(vjp):
        raise TypeError(f"vjp={vjp!r}: must be a function or None.")
    if not isinstance(batched, bool):
        raise TypeError(f"batched={batched!r}: must be True or False.")
    return _HostStep(fn, vjp, batched)


@dataclasses.dataclass(frozen=True)
class _HostStep:
    fn: Callable[..., Any]
    vjp: Callable[..., Any] | None
    batched: bool

    def __call__(self, t0: Any, t1: Any, u: Tree, params: Tree = None, args: Tree = None) -> Tree:
        u = _check.arrays("u", u)
        params, args = _check.arrays("params", params), _check.arrays("args", args)
        for path, leaf in jax.tree_util.tree_leaves_with_path((u, params, args)):
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                where = ("u", "params", "args")[path[0].idx] + jax.tree_util.keystr(path[1:])
                raise TypeError(
                    f"{where} is a PRNG key, which has no meaning on the host: give its numbers, "
                    "jax.random.key_data(key)."
                )
        # The times are an argument of their own, so that a derivative in them is found out.
        out: Any = _step(self, (jnp.asarray(t0), jnp.asarray(t1)), u, params, args)
        split = Split.of(u)
        return split.join(out, split(u)[1])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _step(host: _HostStep, time: Any, u: Tree, params: Tree, args: Tree) -> list[Any]:
    """The leaves of the next state that are real or complex."""
    call = _Call(host.fn, host.batched, ("state",), (u,))
    return _call_back(call, (*time, u, params), args)[0]


def _step_fwd(host: _HostStep, time: Any, u: Any, params: Any, args: Any) -> tuple[Any, Any]:
    if host.vjp is None:
        name = _name(host.fn)
        raise TypeError(
            f"a derivative of host_step({name}) is taken, but JAX cannot look into {name}: give "
            f"host_step({name}, vjp=...) the function that computes it."
        )
    perturbed = [x.perturbed for x in jax.tree.leaves(time, is_leaf=_is_primal)]
    if any(perturbed):
        raise TypeError(
            f"a derivative of host_step({_name(host.fn)}) with respect to the times t0 and t1 is "
            "taken: there is none."
        )
    time, u, params, args = jax.tree.map(
        lambda x: x.value, (time, u, params, args), is_leaf=_is_primal
    )
    return _step(host, time, u, params, args), (time, u, params, args)


def _is_primal(x: Any) -> bool:
    return hasattr(x, "perturbed")


def _step_bwd(host: _HostStep, saved: Any, ct: list[Any]) -> tuple[Any, ...]:
    time, u, params, args = saved
    split = Split.of(u)
    leaves, constants = split(u)
    # a cotangent that is known to be zero comes as a symbol
    ct = [
        jnp.zeros_like(x) if isinstance(c, jax.custom_derivatives.SymbolicZero) else c
        for c, x in zip(ct, leaves, strict=True)
    ]
    names = ("du", "dparams", "dargs")
    assert host.vjp is not None
    call = _Call(host.vjp, host.batched, names, (u, params, args))
    out = _call_back(call, (*time, u, params, split.join(ct, constants)), args)
    return None, *(
        Split.of(x).join(d, [None] * (len(jax.tree.leaves(x)) - len(d)))
        for x, d in zip((u, params, args), out, strict=True)
    )


_step.defvjp(_step_fwd, _step_bwd, symbolic_zeros=True)


def _call_back(call: _Call, each: tuple[Any, ...], args: Tree) -> tuple[list[Any], ...]:
    """The real and complex leaves of what `call` returns, one list for each of its results."""
    like = tuple([x for x in jax.tree.leaves(t) if is_inexact(x)] for t in call.like)
    call = dataclasses.replace(call, like=shapes(call.like))
    ranks = jax.tree.map(jnp.ndim, (each, args))
    return jax.pure_callback(
        partial(_on_host, call, ranks), shapes(like), each, args, vmap_method="expand_dims"
    )


# -- on the host: nothing below calls JAX but for arithmetic on pytrees ----------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Call:
    """A host function, and what it returns: the names of its results and what they look like."""

    fn: Callable[..., Any]
    batched: bool
    names: tuple[str, ...]
    like: tuple[Tree, ...]


def _on_host(call: _Call, ranks: Any, each: Any, args: Any) -> tuple[list[np.ndarray], ...]:
    """One call for a batch. Each `vmap` has added a leading axis, of size 1 where it's constant."""
    each, args = jax.tree.map(np.asarray, (each, args))
    lead = _lead((*each, args), (*ranks[0], ranks[1]))
    lead_args = _lead(args, ranks[1], len(lead))
    out = tuple(
        [np.empty(lead + s.shape, s.dtype) for s in jax.tree.leaves(t) if is_inexact(s)]
        for t in call.like
    )
    for where, index in _parts(lead_args):
        shared = jax.tree.map(
            lambda x, r, i=index: x[tuple(np.minimum(i, np.array(x.shape[: x.ndim - r]) - 1))],
            args,
            ranks[1],
        )
        part = tuple(n if isinstance(w, slice) else 1 for n, w in zip(lead, where, strict=True))
        size = int(np.prod(part, dtype=int))

        def batch(x: np.ndarray, rank: int, where: Any = where, size: int = size) -> np.ndarray:
            shape = x.shape[x.ndim - rank :]
            return np.broadcast_to(x, lead + shape)[where].reshape(size, *shape)

        t0, t1, u, params, *ct = jax.tree.map(batch, each, ranks[0])
        results = _run(call, size, (t0, t1, u, params), shared, ct)
        for target, values in zip(out, results, strict=True):
            for a, b in zip(target, values, strict=True):
                a[where] = b.reshape(a[where].shape)
    return out


def _lead(x: Any, ranks: Any, axes: int = 0) -> tuple[int, ...]:
    """The axes that vmaps have put in front of all leaves."""
    pairs = zip(jax.tree.leaves(x), jax.tree.leaves(ranks), strict=True)
    return np.broadcast_shapes((1,) * axes, *(a.shape[: a.ndim - r] for a, r in pairs))


def _parts(lead: tuple[int, ...]) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """The parts of a batch with the same shared arguments: where they are, the index of those."""
    for index in np.ndindex(*lead):
        yield tuple(slice(None) if n == 1 else i for i, n in zip(index, lead, strict=True)), index


def _run(call: _Call, size: int, each: tuple[Any, ...], args: Any, ct: list[Any]) -> list[Any]:
    """The inexact leaves of all results for a batch, checked."""
    try:
        if call.batched:
            return _checked(call, call.fn(*each, args, *ct), (size,))
        single = []
        for i in range(size):
            one, ct_one = jax.tree.map(lambda x, i=i: x[i], (each, ct))
            single.append(_checked(call, call.fn(*one, args, *ct_one), ()))
        return [
            [np.stack(leaves) for leaves in zip(*same, strict=True)]
            for same in zip(*single, strict=True)
        ]
    except Exception as e:
        e.add_note(f"This arose on the host, in {_name(call.fn)}, for a batch of {size}.")
        raise


def _checked(call: _Call, out: Any, lead: tuple[int, ...]) -> list[list[np.ndarray]]:
    name = _name(call.fn)
    if len(call.names) == 1:
        out = (out,)
    elif not isinstance(out, (tuple, list)) or len(out) != len(call.names):
        raise TypeError(f"{name} must return the tuple ({', '.join(call.names)}).")
    return [
        _checked_result(name, what, value, like, lead)
        for what, value, like in zip(call.names, out, call.like, strict=True)
    ]


def _checked_result(
    fn: str, what: str, value: Any, like: Tree, lead: tuple[int, ...]
) -> list[np.ndarray]:
    paths, treedef = jax.tree_util.tree_flatten_with_path(like)
    if value is None and what != "state":
        return [np.zeros(lead + s.shape, s.dtype) for _, s in paths if is_inexact(s)]
    try:
        values = treedef.flatten_up_to(value)
    except (TypeError, ValueError) as e:
        raise TypeError(
            f"{fn} returns {what} as {type(value).__name__}: must have the structure {treedef}."
        ) from e
    out = []
    for (path, s), x in zip(paths, values, strict=True):
        if not is_inexact(s):
            continue
        where, x, shape = what + jax.tree_util.keystr(path), np.asarray(x), lead + s.shape
        if x.shape != shape:
            batch = f", for a batch of {lead[0]}" if lead else ""
            raise ValueError(f"{fn} returns {where} with shape {x.shape}: must be {shape}{batch}.")
        if x.dtype != s.dtype:
            raise TypeError(f"{fn} returns {where} with dtype {x.dtype}: must be {s.dtype}.")
        out.append(x)
    return out


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", None) or repr(fn)
