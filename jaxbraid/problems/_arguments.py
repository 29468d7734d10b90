"""What the builders share: checks of their arguments, time grids, precision."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxbraid import _check
from jaxbraid._options import check_integer as integer

__all__ = ["integer"]


def number(name: str, value: Any, above: float = -math.inf, least: float = -math.inf) -> Any:
    """`value`, a finite real number greater than `above` and at least `least`, as a float."""
    if isinstance(value, Tracer):
        raise TypeError(
            f"{name} is traced: must be a number. To differentiate by a coefficient, replace the "
            "problem's args."
        )
    limit = f" > {above:g}" if above > -math.inf else f" >= {least:g}" if least > -math.inf else ""
    wrong = f"{name}={value!r}: must be a finite real number{limit}."
    if isinstance(value, (bool, np.bool_)) or np.ndim(value) != 0:
        raise TypeError(wrong)
    try:
        value = float(value)
    except (TypeError, ValueError) as e:
        raise TypeError(wrong) from e
    if not math.isfinite(value) or value <= above or value < least:
        raise ValueError(wrong)
    return value


def interval(name: str, value: Any) -> tuple[float, float]:
    """`value`, two increasing numbers."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{name}={value!r}: must be a pair of numbers, start and end.")
    start, end = (number(f"{name}[{i}]", v) for i, v in enumerate(value))
    if not start < end:
        raise ValueError(f"{name}={value!r}: must increase.")
    return start, end


def each_level(name: str, value: Any, check: Any) -> tuple[Any, ...]:
    """One value, or a sequence with one a level, as a tuple of checked values."""
    if isinstance(value, (list, tuple)):
        if not value:
            raise ValueError(f"{name}={value!r}: must have one value a level, at least one.")
        return tuple(check(f"{name}[{i}]", v) for i, v in enumerate(value))
    return (check(name, value),)


def fraction(name: str, value: Any) -> float:
    """`value`, a number in [0, 1]: the weight of the new time in a theta method."""
    value = number(name, value)
    if not 0 <= value <= 1:
        raise ValueError(f"{name}={value}: must lie in [0, 1].")
    return value


def one_or_all(steps: tuple[Any, ...]) -> Any:
    """One step for all levels as it is, one a level as a tuple."""
    return steps[0] if len(steps) == 1 else steps


def time_grid(t_end: Any, nt: Any, ts: Any) -> np.ndarray:
    """`ts`, or `nt` steps of one length from 0 to `t_end`."""
    if ts is None:
        end = number("t_end", t_end, above=0.0)
        return np.linspace(0.0, end, integer("nt", nt, 1) + 1)
    return np.asarray(_check.time_grid(ts))


def precision(dtype: Any, complex_state: bool = False) -> np.dtype:
    """The dtype of a state: `dtype`, or double precision."""
    wanted = np.complexfloating if complex_state else np.floating
    if dtype is None:
        return np.dtype(np.complex128 if complex_state else np.float64)
    try:
        result = jnp.dtype(dtype)
    except TypeError as e:
        raise TypeError(f"dtype={dtype!r}: must be a dtype.") from e
    if not jnp.issubdtype(result, wanted):
        raise TypeError(f"dtype={result}: must be {'complex' if complex_state else 'real'}.")
    return result


def real(u: Any, *values: Any) -> Any:
    """`values` in the precision of the state `u` (one as it is, several as a tuple).

    Times and coefficients may come in another precision, and the state's is to be kept.
    """
    dtype = jnp.finfo(u.dtype).dtype
    cast = tuple(jnp.asarray(v).astype(dtype) for v in values)
    return cast[0] if len(cast) == 1 else cast


def like(u: Any, value: Any) -> Any:
    """`value`, real or complex, in the precision of the state `u`."""
    kind = jnp.result_type(u.dtype, jnp.complex64) if jnp.iscomplexobj(value) else u.dtype
    return jnp.asarray(value).astype(kind)


def vector(name: str, value: Any, size: int, dtype: Any) -> np.ndarray:
    """`value`, so many numbers, as a state."""
    value = np.asarray(value)
    if value.shape != (size,):
        raise ValueError(f"{name} has shape {value.shape}: must be ({size},).")
    return value.astype(precision(dtype))
