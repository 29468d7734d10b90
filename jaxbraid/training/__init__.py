"""Techniques of training layer-parallel networks."""

from jaxbraid.training._inexact import ControlState as ControlState
from jaxbraid.training._inexact import Decision as Decision
from jaxbraid.training._inexact import GradientError as GradientError
from jaxbraid.training._inexact import InexactnessControl as InexactnessControl
from jaxbraid.training._inexact import Solvers as Solvers
from jaxbraid.training._inexact import adjoint_error as adjoint_error
from jaxbraid.training._inexact import gradient_error as gradient_error
from jaxbraid.training._inexact import gradient_noise as gradient_noise
from jaxbraid.training._inexact import model_gradient as model_gradient
from jaxbraid.training._inexact import set_solvers as set_solvers
from jaxbraid.training._inexact import solver_ladder as solver_ladder
