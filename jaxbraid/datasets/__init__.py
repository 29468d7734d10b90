"""Loaders of usual data sets from files on a local path, as NumPy arrays; nothing is downloaded."""

from jaxbraid.datasets._har import load_uci_har as load_uci_har
from jaxbraid.datasets._idx import load_mnist as load_mnist
from jaxbraid.datasets._idx import read_idx as read_idx
from jaxbraid.datasets._off import Mesh as Mesh
from jaxbraid.datasets._off import load_modelnet as load_modelnet
from jaxbraid.datasets._off import read_off as read_off
from jaxbraid.datasets._off import voxelize as voxelize
from jaxbraid.datasets._tiny_imagenet import load_tiny_imagenet as load_tiny_imagenet
