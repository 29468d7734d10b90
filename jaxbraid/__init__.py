"""Multigrid reduction in time (MGRIT) in JAX: layer-parallel networks, parallel-in-time solves."""

from jaxbraid import convergence as convergence
from jaxbraid import space as space
from jaxbraid import transfers as transfers
from jaxbraid._adaptive import AdaptiveRound as AdaptiveRound
from jaxbraid._adaptive import AdaptiveSolution as AdaptiveSolution
from jaxbraid._adaptive import solve_adaptive as solve_adaptive
from jaxbraid._checker import check_problem as check_problem
from jaxbraid._ode_net import ParallelODENet as ParallelODENet
from jaxbraid._ode_net import parallel_ode_net as parallel_ode_net
from jaxbraid._options import MGRIT as MGRIT
from jaxbraid._report import Finding as Finding
from jaxbraid._report import Report as Report
from jaxbraid._richardson import richardson as richardson
from jaxbraid._solve import solve as solve
from jaxbraid._stats import AdjointStats as AdjointStats
from jaxbraid._stats import Solution as Solution
from jaxbraid._stats import Stats as Stats
from jaxbraid.transfers import Transfer as Transfer

__version__ = "0.1.0"
