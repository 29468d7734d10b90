"""Layer-parallel stacks as Flax modules: `jaxbraid.flax.nnx` and `jaxbraid.flax.linen`.

Both make the stacked parameters of equal blocks and run them through `jaxbraid.parallel_ode_net`,
between ordinary layers of a larger model. What a block changes besides its output (BatchNorm's
statistics, Dropout's counters) is taken once, from the last sweep, however many iterations were
run; each layer uses one dropout mask in all of them.
"""

from jaxbraid.flax import linen as linen
from jaxbraid.flax import nnx as nnx
