"""Several processes: start them, lay out a mesh, make parameters where they live, save them.

    jaxbraid.distributed.initialize()                       # on a cluster, before anything else
    mesh = make_mesh(layer=8, batch=2)
    params = global_layers(make_layer, 64, mesh)            # each process makes its own layers only
    net = jaxbraid.parallel_ode_net(f, params, layers=64, mesh=mesh, batch_axis="batch")
    y = net(shard_batch(x, mesh))
    save("checkpoints/1", params, layers=64)

Every process runs the same program and calls the same functions in the same order. All of it works
in one process, too.
"""

from jaxbraid.distributed._arrays import gather as gather
from jaxbraid.distributed._arrays import replicate as replicate
from jaxbraid.distributed._arrays import shard_batch as shard_batch
from jaxbraid.distributed._checkpoint import read_notes as read_notes
from jaxbraid.distributed._checkpoint import read_shapes as read_shapes
from jaxbraid.distributed._checkpoint import restore as restore
from jaxbraid.distributed._checkpoint import save as save
from jaxbraid.distributed._layers import global_layers as global_layers
from jaxbraid.distributed._layers import own_layers as own_layers
from jaxbraid.distributed._mesh import make_mesh as make_mesh
from jaxbraid.distributed._start import initialize as initialize
