"""Pictures of solves, levels, networks and predictions.

    from jaxbraid import MGRIT, plot, problems

    sol = problems.dahlquist().solve(MGRIT(levels=3, coarsening=2, tol=1e-10), point_residuals=True)
    plot.residuals(sol, path="residuals.png")
    plot.iteration(sol, path="iteration.png")

Every function returns the Matplotlib figure, for what is left to change, and writes it to `path` if
that is given; its ending says in which format. Those that draw into one pair of axes take them by
`ax`, to be one panel among others. Colours are told apart by the colour-blind, and lines differ in
style and marks too, for print. Matplotlib (`pip install "jaxbraid[plot]"`) is imported where a
picture is drawn; no window is opened.

Solutions of a `jaxbraid.problems.Problem` are drawn by its method `plot`.
"""

from jaxbraid.plot._bounds import bounds as bounds
from jaxbraid.plot._depth import depth as depth
from jaxbraid.plot._hierarchy import hierarchy as hierarchy
from jaxbraid.plot._iteration import iterates as iterates
from jaxbraid.plot._iteration import iteration as iteration
from jaxbraid.plot._residuals import residuals as residuals
from jaxbraid.plot._scaling import scaling as scaling
