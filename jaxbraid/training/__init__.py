"""Training techniques over Optax: several depths, inexact gradients, guesses, a look inside."""

from jaxbraid.training._deepen import deepen as deepen
from jaxbraid.training._deepen import deepen_optimizer as deepen_optimizer
from jaxbraid.training._deepen import split_model as split_model
from jaxbraid.training._depth import prolong_layers as prolong_layers
from jaxbraid.training._depth import prolong_optimizer_state as prolong_optimizer_state
from jaxbraid.training._depth import restrict_layers as restrict_layers
from jaxbraid.training._depth import restrict_optimizer_state as restrict_optimizer_state
from jaxbraid.training._diagnostics import Diagnosis as Diagnosis
from jaxbraid.training._diagnostics import diagnose as diagnose
from jaxbraid.training._line_search import Backtracking as Backtracking
from jaxbraid.training._mgopt import MGOPT as MGOPT
from jaxbraid.training._mgopt import MGOPTInfo as MGOPTInfo
from jaxbraid.training._nested import Nested as Nested
from jaxbraid.training._nested import NestedStep as NestedStep
from jaxbraid.training._nested import nested_iteration as nested_iteration
from jaxbraid.training._smooth import depth_penalty as depth_penalty
from jaxbraid.training._smooth import smooth_layers as smooth_layers
from jaxbraid.training._timers import Timers as Timers
from jaxbraid.training._timers import timers as timers
