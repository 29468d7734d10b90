"""Techniques of training layer-parallel networks."""

from jaxbraid.training._checkpoint import restore_training as restore_training
from jaxbraid.training._checkpoint import save_training as save_training
from jaxbraid.training._convert import SerialStack as SerialStack
from jaxbraid.training._convert import to_parallel as to_parallel
from jaxbraid.training._convert import to_serial as to_serial
from jaxbraid.training._diagnostics import Diagnostics as Diagnostics
from jaxbraid.training._diagnostics import diagnose as diagnose
from jaxbraid.training._diagnostics import diagnose_net as diagnose_net
from jaxbraid.training._guess import StateGuess as StateGuess
from jaxbraid.training._guess import class_means as class_means
from jaxbraid.training._guess import previous_states as previous_states
from jaxbraid.training._guess import sample_states as sample_states
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
from jaxbraid.training._timers import Timings as Timings
from jaxbraid.training._timers import time_parts as time_parts
