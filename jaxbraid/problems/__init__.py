"""Problems of the field, each with its scheme, a serial solution and a picture.

    from jaxbraid import MGRIT, problems

    heat = problems.heat_1d(nx=129, nt=1024)
    sol = heat.solve(MGRIT(levels=3, coarsening=8, tol=1e-8))
    heat.plot(sol.us, "heat.png")

`diffrax_step` makes a step of any one-step solver of diffrax, and `ode` a problem of any vector
field; `tridiagonal_solve` serves implicit steps of your own.
"""

from jaxbraid.problems._advection import advection_1d as advection_1d
from jaxbraid.problems._advection import burgers_1d as burgers_1d
from jaxbraid.problems._diffrax import arenstorf as arenstorf
from jaxbraid.problems._diffrax import diffrax_step as diffrax_step
from jaxbraid.problems._diffrax import ode as ode
from jaxbraid.problems._heat import heat_1d as heat_1d
from jaxbraid.problems._heat import heat_1d_bdf as heat_1d_bdf
from jaxbraid.problems._heat_2d import heat_2d as heat_2d
from jaxbraid.problems._ode import brusselator as brusselator
from jaxbraid.problems._ode import dahlquist as dahlquist
from jaxbraid.problems._ode import lorenz_63 as lorenz_63
from jaxbraid.problems._ode import van_der_pol as van_der_pol
from jaxbraid.problems._plot import Picture as Picture
from jaxbraid.problems._problem import Problem as Problem
from jaxbraid.problems._reaction import allen_cahn_2d as allen_cahn_2d
from jaxbraid.problems._reaction import gray_scott_2d as gray_scott_2d
from jaxbraid.problems._spectral import kuramoto_sivashinsky as kuramoto_sivashinsky
from jaxbraid.problems._spectral import schroedinger_1d as schroedinger_1d
from jaxbraid.problems._tridiagonal import tridiagonal_solve as tridiagonal_solve
