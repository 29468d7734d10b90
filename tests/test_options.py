"""`MGRIT`: what each option accepts and refuses, equality and hashing, the table of a solve."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxbraid
from jaxbraid import MGRIT
from jaxbraid._stats import Stats

# option, bad value, error, what the message must say
REFUSED = [
    ("levels", 0, ValueError, "levels=0: must be >= 1"),
    ("levels", 2.0, TypeError, r"levels=2\.0: must be an integer >= 1"),
    ("levels", True, TypeError, "levels=True: must be an integer"),
    ("levels", "2", TypeError, "levels='2': must be an integer"),
    ("coarsening", 1, ValueError, "coarsening=1: must be >= 2"),
    ("coarsening", True, TypeError, "coarsening=True: must be an integer"),
    ("coarsening", 4.0, TypeError, r"coarsening=4\.0: must be"),
    ("coarsening", "44", TypeError, "coarsening='44': must be"),
    ("coarsening", None, TypeError, "coarsening=None: must be"),
    ("coarsening", (2, 2), ValueError, "coarsening has 2 entries: .* levels - 1 = 1"),
    ("coarsening", [], ValueError, "coarsening has 0 entries: .* levels - 1 = 1"),
    ("coarsening", (1,), ValueError, r"coarsening\[0\]=1: must be >= 2"),
    ("coarsening", (2.5,), TypeError, r"coarsening\[0\]=2\.5: must be a factor >= 2 or a list"),
    ("coarsening", (None,), TypeError, r"coarsening\[0\]=None: must be a factor >= 2"),
    ("coarsening", ([0.0, 4.0],), TypeError, r"coarsening\[0\]=\[0\.0, 4\.0\]: must be a factor"),
    ("coarsening", ([],), TypeError, r"coarsening\[0\]=\[\]: must be a factor >= 2"),
    ("coarsening", ([0],), ValueError, r"coarsening\[0\]=\[0\]: leaves nothing to coarsen"),
    ("coarsening", ([1, 3],), ValueError, r"coarsening\[0\].*must start with 0 and increase"),
    ("coarsening", ([0, 3, 2],), ValueError, r"coarsening\[0\].*must start with 0 and increase"),
    ("coarsening", ([0, 3, 3],), ValueError, r"coarsening\[0\].*must start with 0 and increase"),
    ("cf_relax", -1, ValueError, "cf_relax=-1: must be >= 0"),
    ("cf_relax", 1.0, TypeError, r"cf_relax=1\.0: must be an integer >= 0"),
    ("cf_relax", (1, 1), ValueError, "cf_relax has 2 entries: .* levels - 1 = 1"),
    ("cf_relax", (-1,), ValueError, r"cf_relax\[0\]=-1: must be >= 0"),
    ("cf_relax", (True,), TypeError, r"cf_relax\[0\]=True: must be an integer"),
    ("cycle", "v", ValueError, "cycle='v': must be one of 'V', 'F', 'W'"),
    ("cycle", None, ValueError, "cycle=None: must be one of"),
    ("cycle", ["V"], ValueError, r"cycle=\['V'\]: must be one of"),
    ("max_iters", -1, ValueError, "max_iters=-1: must be >= 0"),
    ("max_iters", None, TypeError, "max_iters=None: must be an integer >= 0"),
    ("max_iters", 1e3, TypeError, r"max_iters=1000\.0: must be an integer >= 0"),
    ("tol", -1e-3, ValueError, r"tol=-0\.001: must be a finite number >= 0"),
    ("tol", float("nan"), ValueError, "tol=nan: must be a finite number >= 0"),
    ("tol", float("inf"), ValueError, "tol=inf: must be a finite number >= 0"),
    ("tol", "1e-3", (TypeError, ValueError), "tol='1e-3': must be a finite number >= 0"),
    ("tol", None, (TypeError, ValueError), "tol=None: must be a finite number >= 0"),
    ("c_weight", 0, ValueError, "c_weight=0: must be positive and finite"),
    ("c_weight", float("nan"), ValueError, "c_weight=nan: must be positive and finite"),
    ("c_weight", float("inf"), ValueError, "c_weight=inf: must be positive and finite"),
    ("c_weight", "1", TypeError, "c_weight='1': must be a positive number"),
    ("c_weight", True, TypeError, "c_weight=True: must be a positive number"),
    ("c_weight", (1.0, 1.0), ValueError, "c_weight has 2 entries: .* levels - 1 = 1"),
    ("c_weight", (-1.0,), ValueError, r"c_weight\[0\]=-1\.0: must be positive"),
    ("nested_iteration", 1, TypeError, "nested_iteration=1: must be True or False"),
    ("skip_first_down", None, TypeError, "skip_first_down=None: must be True or False"),
    ("criterion", "jumps", ValueError, "criterion='jumps': must be one of 'residual', 'jump'"),
    ("temporal_norm", 2, ValueError, "temporal_norm=2: must be one of 'two', 'one', 'max'"),
    ("norm", "two", TypeError, "norm='two': must be None or a function"),
    ("window", 1, ValueError, "window=1: must be >= 2"),
    ("window", 2.0, TypeError, r"window=2\.0: must be an integer >= 2"),
    ("min_coarse", 0, ValueError, "min_coarse=0: must be >= 1"),
    ("min_coarse", "2", TypeError, "min_coarse='2': must be an integer >= 1"),
    ("coarse_solver", "direct", ValueError, "coarse_solver='direct': .* 'serial', 'relax'"),
    ("final_relax", "C", ValueError, "final_relax='C': must be one of 'F', 'FC', 'FCF'"),
    ("coarse_placement", 0, ValueError, "coarse_placement=0: must be >= 1 or None"),
    ("coarse_placement", 1.0, TypeError, "coarse_placement=1.0: must be an integer >= 1 or None"),
    ("linearization", "store", ValueError, "linearization='store': must be .*'recompute', 'keep'"),
    ("saved_states", None, ValueError, "saved_states=None: must be one of 'all', 'coarse'"),
    ("remat", True, TypeError, "remat=True: must be None or a jax.checkpoint policy"),
    ("remat", jax.checkpoint_policies.dots_saveable, ValueError, "remat needs linearization='keep"),
    ("batch_intervals", 0, ValueError, "batch_intervals=0: must be >= 1 or 'auto', 'all', 'one'"),
    ("batch_intervals", "some", TypeError, "batch_intervals='some': .* or 'auto', 'all', 'one'"),
    ("batch_intervals", None, TypeError, "batch_intervals=None: .* or 'auto', 'all', 'one'"),
    ("adjoint_transfers", "T", ValueError, "adjoint_transfers='T': .* 'transpose', 'forward'"),
]


@pytest.mark.parametrize(("option", "value", "error", "message"), REFUSED)
def test_bad_values_are_named(option, value, error, message):
    with pytest.raises(error, match=message):
        MGRIT(**{option: value})


# Values that slip through, or whose error does not name the option.
UNCLEAR = [
    ("cycle", np.array(["V", "F"]), "cycle="),
    ("batch_intervals", np.array([1, 2]), "batch_intervals="),
    ("coarsening", ([0, [1, 2]],), r"coarsening\[0\]="),
    ("coarsening", ([0, 3, 2],), r"coarsening\[0\]=\[0, 3, 2\]"),
    ("coarsening", np.array([[0, 4]]), "coarsening="),  # a 2-D array
    ("tol", True, "tol=True: must be a finite number"),
    ("tol", np.complex128(1), "tol=.*must be a finite number"),
    ("c_weight", np.complex128(1), "c_weight=.*must be a positive number"),
]


@pytest.mark.parametrize(("option", "value", "message"), UNCLEAR)
def test_odd_values_are_named(option, value, message):
    with pytest.raises((TypeError, ValueError), match=message):
        MGRIT(**{option: value})


def test_options_that_exclude_each_other():
    with pytest.raises(ValueError, match="window and coarse_solver='relax' exclude each other"):
        MGRIT(window=3, coarse_solver="relax")


def test_norm_must_be_hashable():
    class Norm:
        __hash__ = None

        def __call__(self, u):
            return jnp.max(jnp.abs(u))

    with pytest.raises(TypeError, match=r"norm=.* must be hashable"):
        MGRIT(norm=Norm())


def test_options_cannot_be_changed():
    with pytest.raises(AttributeError, match="levels"):
        MGRIT().levels = 3


ALIKE = [
    ({"levels": 3, "coarsening": (2, 4)}, {"levels": np.int64(3), "coarsening": [2, np.int32(4)]}),
    ({"levels": 3, "coarsening": (2, 4)}, {"levels": 3, "coarsening": np.array([2, 4])}),
    ({"coarsening": ((0, 3, 5),)}, {"coarsening": [np.array([0, 3, 5])]}),
    ({"coarsening": ((0, 3, 5),)}, {"coarsening": np.array([0, 3, 5])}),
    ({"coarsening": ((0, 2, 4),)}, {"coarsening": (range(0, 5, 2),)}),
    ({"levels": 3, "cf_relax": (0, 1)}, {"levels": 3, "cf_relax": np.array([0, 1])}),
    ({"levels": 3, "c_weight": (0.5, 1.0)}, {"levels": 3, "c_weight": [np.float32(0.5), 1]}),
    ({"tol": 0.5, "max_iters": 3}, {"tol": np.float32(0.5), "max_iters": np.uint8(3)}),
    ({"window": 3, "batch_intervals": 2}, {"window": np.int64(3), "batch_intervals": np.int8(2)}),
    ({"nested_iteration": False}, {"nested_iteration": np.False_}),
    ({}, {"coarsening": np.int64(4), "tol": 0, "c_weight": 1}),
]


@pytest.mark.parametrize(("plain", "other"), ALIKE)
def test_numpy_values_make_equal_options_with_equal_hashes(plain, other):
    a, b = MGRIT(**plain), MGRIT(**other)
    assert a == b and hash(a) == hash(b)


def test_each_option_tells_configs_apart():
    other = {
        "levels": 3, "coarsening": 2, "cf_relax": 0, "cycle": "F", "max_iters": 1, "tol": 1e-3,
        "c_weight": 0.5, "nested_iteration": False, "criterion": "jump", "temporal_norm": "max",
        "norm": jnp.linalg.norm, "window": 2, "min_coarse": 1, "skip_first_down": True,
        "coarse_solver": "relax", "final_relax": "FC", "batch_intervals": "one",
        "adjoint_transfers": "forward", "coarse_placement": 1, "linearization": "keep",
        "remat": jax.checkpoint_policies.nothing_saveable, "saved_states": "coarse",
        "delta": "full", "coarse_rounds": 2,
    }  # fmt: skip
    assert set(other) == set(MGRIT.__dataclass_fields__)
    configs = {MGRIT()}
    for name, value in other.items():
        needed = {"linearization": "keep"} if name == "remat" else {}
        configs.add(MGRIT(**{name: value}, **needed))
    assert len(configs) == 1 + len(other)


def test_options_are_a_static_argument():
    traces = []

    def count(config):
        traces.append(config)
        return jnp.zeros(())

    f = jax.jit(count, static_argnames="config")
    f(config=MGRIT(coarsening=(2,)))
    f(config=MGRIT(coarsening=[np.int64(2)]))
    assert len(traces) == 1


# -- the table ------------------------------------------------------------------------------------


def stats(residuals, initial, iterations, converged=False, finite=True):
    return Stats(
        jnp.array(residuals), jnp.array(initial), jnp.int32(iterations), jnp.array(converged),
        jnp.array(finite),
    )  # fmt: skip


NAN = float("nan")
TABLES = [
    (
        stats([0.5, 0.125, NAN], 2.0, 2, converged=True),
        "iteration    residual    factor\n"
        "        0  2.0000e+00         -\n"
        "        1  5.0000e-01  2.50e-01\n"
        "        2  1.2500e-01  2.50e-01\n"
        "converged",
    ),
    (
        stats([0.5, 0.0], NAN, 2),  # jump: no residual of the guess, and zero is reached
        "iteration    residual    factor\n"
        "        1  5.0000e-01         -\n"
        "        2  0.0000e+00  0.00e+00",
    ),
    (
        stats([NAN, NAN], 1.0, 1, finite=False),
        "iteration    residual    factor\n"
        "        0  1.0000e+00         -\n"
        "        1         nan         -\n"
        "stopped: not finite",
    ),
    (stats([], 3.0, 0), "iteration    residual    factor\n        0  3.0000e+00         -"),
]


@pytest.mark.parametrize(("record", "table"), TABLES)
def test_table(record, table):
    assert str(record) == table


def test_factors():
    factors = stats([0.5, 0.125, NAN], 2.0, 2).factors()
    np.testing.assert_array_equal(factors, [0.25, 0.25])


def halve(t0, t1, u, params, args):
    return u * (1 - (t1 - t0) / 2)


TS = np.linspace(0, 1, 9)


def test_table_of_a_solve_lists_the_iterations_that_were_run():
    sol = jaxbraid.solve(halve, 1.0, TS, config=MGRIT(coarsening=2, tol=1e-12))
    lines = str(sol.stats).splitlines()
    assert lines[0].split() == ["iteration", "residual", "factor"]
    assert lines[-1] == "converged"
    rows = [line.split() for line in lines[1:-1]]
    assert [int(row[0]) for row in rows] == list(range(int(sol.stats.iterations) + 1))
    norms = [sol.stats.initial_residual, *sol.stats.residuals]
    for row, norm in zip(rows, norms, strict=False):
        assert row[1] == f"{float(norm):.4e}"


def test_table_while_tracing_and_of_a_batch():
    texts = []

    @jax.jit
    def traced(u):
        s = jaxbraid.solve(halve, u, TS, config=MGRIT(coarsening=2, max_iters=2)).stats
        texts.append(str(s))
        return s

    batch = jax.vmap(traced)(jnp.array([0.0, 1.0]))
    assert set(texts) == {"Stats(traced, max_iters=2)"}
    assert str(batch).startswith("Stats(of (2,) solves")
    assert batch.residuals.shape == (2, 2)
    np.testing.assert_array_equal(batch.residuals[0], 0.0)


def test_importing_the_engine_does_not_import_what_is_optional():
    code = (
        "import sys, jaxbraid; names = {'flax', 'mpi4py', 'mpi4jax', 'matplotlib', 'diffrax',"
        " 'optax'}; print(sorted(names & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
