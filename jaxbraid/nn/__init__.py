"""Flax NNX modules for networks that are parallel over their layers, or over a sequence."""

from jaxbraid.nn._buffered import BufferedStack as BufferedStack
from jaxbraid.nn._cells import GRUCell as GRUCell
from jaxbraid.nn._cells import ImplicitGRUCell as ImplicitGRUCell
from jaxbraid.nn._cells import LSTMCell as LSTMCell
from jaxbraid.nn._conv import Conv as Conv
from jaxbraid.nn._conv import conv_general_dilated as conv_general_dilated
from jaxbraid.nn._conv_net import ConvBlock as ConvBlock
from jaxbraid.nn._conv_net import spatial_coarsening as spatial_coarsening
from jaxbraid.nn._encoder_decoder import EncoderDecoderBlock as EncoderDecoderBlock
from jaxbraid.nn._encoder_decoder import EncoderDecoderStack as EncoderDecoderStack
from jaxbraid.nn._rnn import RNN as RNN
from jaxbraid.nn._spline import spline_basis as spline_basis
from jaxbraid.nn._spline import spline_layers as spline_layers
from jaxbraid.nn._spline_stack import SplineStack as SplineStack
from jaxbraid.nn._stochastic_depth import StochasticDepth as StochasticDepth
from jaxbraid.nn._transformer import TransformerBlock as TransformerBlock
