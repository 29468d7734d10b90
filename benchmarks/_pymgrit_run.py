"""PyMGRIT's side of `peers`, in an environment of its own (NumPy below 2): prints JSON.

python benchmarks/_pymgrit_run.py {heat,brusselator,arenstorf} NT REPEATS
"""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import sys
import time

for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import numpy as np  # noqa: E402
from pymgrit.arenstorf_orbit.arenstorf_orbit import ArenstorfOrbit  # noqa: E402
from pymgrit.brusselator.brusselator import Brusselator  # noqa: E402
from pymgrit.core.mgrit import Mgrit  # noqa: E402
from pymgrit.heat.heat_1d import Heat1D  # noqa: E402


def heat(nt):
    def rhs(x, t):
        return -np.sin(np.pi * x) * (np.sin(t) - np.pi**2 * np.cos(t))

    space = {"x_start": 0, "x_end": 1, "nx": 65, "a": 1, "rhs": rhs}
    space["init_cond"] = lambda x: np.sin(np.pi * x)
    levels = [Heat1D(**space, t_start=0, t_stop=2, nt=nt)]
    for _ in range(3):
        levels.append(Heat1D(**space, t_interval=levels[-1].t[::4]))
    return levels, {"tol": 1e-9, "nested_iteration": False, "cycle_type": "F"}


def brusselator(nt):
    levels = [Brusselator(t_start=0, t_stop=12, nt=nt)]
    for _ in range(2):
        levels.append(Brusselator(t_interval=levels[-1].t[::8]))
    return levels, {"tol": 1e-9}


def arenstorf(nt):
    fine = ArenstorfOrbit(t_start=0, t_stop=17.06521656015796, nt=nt)
    return [fine, ArenstorfOrbit(t_interval=fine.t[::100])], {"tol": 1e-7}


MAKERS = {"heat": heat, "brusselator": brusselator, "arenstorf": arenstorf}


def main():
    name, nt, repeats = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    seconds = []
    for _ in range(repeats):
        levels, options = MAKERS[name](nt)
        start = time.perf_counter()
        solver = Mgrit(problem=levels, cf_iter=1, logging_lvl=logging.ERROR, **options)
        solver.solve()
        seconds.append(time.perf_counter() - start)
    history = np.asarray(solver.conv)
    out = {
        "seconds": min(seconds),
        "history": history[history != 0].tolist(),
        "version": importlib.metadata.version("pymgrit"),
        "numpy": np.__version__,
    }
    print(json.dumps(out))


if __name__ == "__main__":
    main()
