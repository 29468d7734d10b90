r"""Scale on paper: the time of a solve on any number of devices, from times measured on one.

All devices go through the same phases of a cycle, so its time is the sum over phases of the longest
that a device takes in them (the *critical path*):

$$T = \sum_{l,k} n_{l,k}\, t(k) + \sum_l n^{msg}_l (\lambda + S / \beta) + \text{reductions}.$$

$n_{l,k}$ counts loop iterations on level $l$ that step $k$ intervals at once, $t(k)$ is the time
of one, $\lambda$ the latency of a message, $\beta$ the bandwidth and $S$ the bytes of a state.
The counts follow the engine's cycle phase by phase, on the levels that it builds; where an interval
spans a group of devices, they step in turn, and their times add up.

    machine = measure(net, x, latency=10e-6, bandwidth=50e9)
    best = choose(steps=4096, devices=256, machine=machine, iterations={0: 3, 1: 2})[0]
    print(best.speedup, best.forward)

All times are in seconds, all sizes in bytes.
"""

from jaxbraid.performance._choose import ITERATIONS as ITERATIONS
from jaxbraid.performance._choose import candidates as candidates
from jaxbraid.performance._choose import choose as choose
from jaxbraid.performance._choose import tradeoff as tradeoff
from jaxbraid.performance._machine import Cost as Cost
from jaxbraid.performance._machine import Machine as Machine
from jaxbraid.performance._measure import measure as measure
from jaxbraid.performance._predict import Prediction as Prediction
from jaxbraid.performance._predict import predict as predict
from jaxbraid.performance._show import describe as describe
from jaxbraid.performance._show import table as table
