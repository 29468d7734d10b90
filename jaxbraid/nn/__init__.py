"""Flax NNX modules for networks that are parallel over their layers, or over a sequence."""

from jaxbraid.nn._cells import GRUCell as GRUCell
from jaxbraid.nn._cells import ImplicitGRUCell as ImplicitGRUCell
from jaxbraid.nn._cells import LSTMCell as LSTMCell
from jaxbraid.nn._rnn import RNN as RNN
