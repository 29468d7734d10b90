"""Serial stepping, the truth that solves are held against."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def serial(step, u0, ts, params=None, args=None):
    """The truth: one step after another."""
    u0, ts = jax.tree.map(jnp.asarray, (u0, ts))

    def body(u, x):
        u = step(*x[:2], u, x[2], args)
        return u, u

    us = jax.lax.scan(body, u0, (ts[:-1], ts[1:], params))[1]
    return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), u0, us)
