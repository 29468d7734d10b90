import dataclasses
from typing import Any, Callable
import jax
@dataclasses.dataclass(frozen=True)
class Transfer:
    restrict: Callable
    prolong: Callable
def transpose(t, fine):
    coarse = jax.eval_shape(t.restrict, fine)
    R = jax.linear_transpose(t.restrict, fine)
    P = jax.linear_transpose(lambda v: t.prolong(v), coarse)
    return Transfer(lambda x: P(x)[0], lambda v, like: R(v)[0])
