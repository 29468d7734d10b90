"""Networks whose layers are computed in parallel, over those of `jaxbraid.flax`."""

from jaxbraid.nn._spline import spline_basis as spline_basis
from jaxbraid.nn._spline import spline_layers as spline_layers
from jaxbraid.nn._spline_stack import SplineStack as SplineStack
