"""The trunk's C structures and functions, as in engine/moe/kernels/native/trunk.h."""

from __future__ import annotations

import ctypes
import functools

from engine.moe.kernels.bindings import CActivation, Matrix, load
from engine.moe.timing import Part

KEY_BLOCK = 16
"""Positions per block of keys, which are stored transposed (PLLM_KEY_BLOCK)."""

HEAD_KINDS = 2
"""Maximum kinds of heads of keys and values (PLLM_HEAD_KINDS)."""

STEPS_TOGETHER = 16
"""Maximum tokens of a pass whose bits equal those of single steps (PLLM_STEPS)."""

MOST_TAPS = 16
"""Maximum tokens of a delta-net's or an n-gram's convolution (PLLM_MOST_TAPS)."""

MOST_STREAMS = 16
"""Maximum residual streams with alternating updates (PLLM_MOST_STREAMS)."""

HEAD_NORMS = {"none": 0, "per-head": 1, "rotated": 1, "whole": 2}
SCORINGS = {"softmax": 0, "sigmoid": 1}
DELTA_KINDS = {"delta-net": 0, "mamba": 1, "kda": 2}

PARTS: tuple[Part, ...] = ("attention", "router", "experts", "other")
"""The timed parts of a layer, in the order of the library."""

MEANING = {-1: "this CPU lacks the instruction set", -2: "memory ran out", -3: "its numbers do not fit together"}


class Delta(ctypes.Structure):
    """``pllm_delta``."""

    _fields_ = (
        ("input", Matrix),
        ("key", Matrix),
        ("value", Matrix),
        ("gate", Matrix),
        ("decay", Matrix),
        ("rate", Matrix),
        ("gate_down", Matrix),
        ("decay_down", Matrix),
        ("kernel", ctypes.c_void_p),
        ("kernel_bias", ctypes.c_void_p),
        ("decay_scale", ctypes.c_void_p),
        ("decay_bias", ctypes.c_void_p),
        ("skip", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
    )


class Convolution(ctypes.Structure):
    """``pllm_convolution``."""

    _fields_ = (("input", Matrix), ("kernel", ctypes.c_void_p))


class Indexer(ctypes.Structure):
    """``pllm_indexer``."""

    _fields_ = (
        ("query", Matrix),
        ("key", Matrix),
        ("weights", Matrix),
        ("norm", ctypes.c_void_p),
        ("norm_bias", ctypes.c_void_p),
        ("place", ctypes.c_int64),
    )


class Latent(ctypes.Structure):
    """``pllm_latent``."""

    _fields_ = (
        ("indexer", ctypes.POINTER(Indexer)),
        ("query_down", Matrix),
        ("query", Matrix),
        ("down", Matrix),
        ("keys", ctypes.POINTER(Matrix)),
        ("values", ctypes.POINTER(Matrix)),
        ("query_norm", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
    )


class Norms(ctypes.Structure):
    """``pllm_norms``."""

    _fields_ = (
        ("attention", ctypes.c_void_p),
        ("router", ctypes.c_void_p),
        ("experts", ctypes.c_void_p),
        ("shared_after", ctypes.c_void_p),
        ("experts_after", ctypes.c_void_p),
        ("after", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("reserved", ctypes.c_int32),
    )


class OwnInput(ctypes.Structure):
    """``pllm_own_input``."""

    _fields_ = (("gate", Matrix), ("projection", Matrix), ("norm", ctypes.c_void_p))


class Blocks(ctypes.Structure):
    """``pllm_blocks``."""

    _fields_ = (
        ("query", Matrix),
        ("key", Matrix),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
    )


class Streams(ctypes.Structure):
    """``pllm_streams``."""

    _fields_ = (("down", Matrix), ("up", Matrix), ("inject", Matrix), ("norm", ctypes.c_void_p))


class Altup(ctypes.Structure):
    """``pllm_altup``."""

    _fields_ = (
        ("router", Matrix),
        ("down", Matrix),
        ("up", Matrix),
        ("router_norm", ctypes.c_void_p),
        ("prediction", ctypes.c_void_p),
        ("correction", ctypes.c_void_p),
        ("norm", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
    )


class Sparse(ctypes.Structure):
    """``pllm_sparse``."""

    _fields_ = (
        ("gate", Matrix),
        ("up", Matrix),
        ("down", Matrix),
        ("deviations", ctypes.c_float),
        ("reserved", ctypes.c_int32),
    )


class Lexical(ctypes.Structure):
    """``pllm_lexical``."""

    _fields_ = (
        ("key", Matrix),
        ("value", Matrix),
        ("key_norm", ctypes.c_void_p),
        ("query_norm", ctypes.c_void_p),
        ("input_norm", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
    )


class Heads(ctypes.Structure):
    """``pllm_heads``."""

    _fields_ = (
        ("heads", ctypes.c_int64),
        ("key_value_heads", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("value_width", ctypes.c_int64),
        ("rotated", ctypes.c_int64),
    )


class TrunkLayer(ctypes.Structure):
    """``pllm_trunk_layer``."""

    _fields_ = (
        ("query", Matrix),
        ("output", Matrix),
        ("key", Matrix),
        ("value", Matrix),
        ("router", Matrix),
        ("gate", Matrix),
        ("shared_gate", Matrix),
        ("narrow", Matrix),
        ("widen", Matrix),
        ("attention_norm", ctypes.c_void_p),
        ("ffn_norm", ctypes.c_void_p),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
        ("value_norm", ctypes.c_void_p),
        ("query_bias", ctypes.c_void_p),
        ("key_bias", ctypes.c_void_p),
        ("value_bias", ctypes.c_void_p),
        ("output_bias", ctypes.c_void_p),
        ("router_bias", ctypes.c_void_p),
        ("correction", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("expert_scale", ctypes.c_void_p),
        ("norms", ctypes.POINTER(Norms)),
        ("own_input", ctypes.POINTER(OwnInput)),
        ("blocks", ctypes.POINTER(Blocks)),
        ("attention_streams", ctypes.POINTER(Streams)),
        ("ffn_streams", ctypes.POINTER(Streams)),
        ("altup", ctypes.POINTER(Altup)),
        ("sparse", ctypes.POINTER(Sparse)),
        ("lexical", ctypes.POINTER(Lexical)),
        ("experts", ctypes.c_void_p),
        ("shared", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("ahead", ctypes.c_void_p),
        ("ahead_from", ctypes.c_void_p),
        ("delta", ctypes.POINTER(Delta)),
        ("latent", ctypes.POINTER(Latent)),
        ("convolution", ctypes.POINTER(Convolution)),
        ("window", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("place", ctypes.c_int64),
        ("lexical_place", ctypes.c_int64),
        ("chunked", ctypes.c_int32),
        ("grown", ctypes.c_int32),
    )


class Trunk(ctypes.Structure):
    """``pllm_trunk``."""

    _fields_ = (
        ("layers", ctypes.POINTER(TrunkLayer)),
        ("embedding", Matrix),
        ("head", Matrix),
        ("final_norm", ctypes.c_void_p),
        ("final_streams", ctypes.POINTER(Streams)),
        ("spread", ctypes.POINTER(Matrix)),
        ("gather", ctypes.POINTER(Matrix)),
        ("own_embedding", Matrix),
        ("own_projection", Matrix),
        ("own_norm", ctypes.c_void_p),
        ("own_width", ctypes.c_int64),
        ("own_activation", CActivation),
        ("kinds", Heads * HEAD_KINDS),
        ("kind_count", ctypes.c_int64),
        ("layer_count", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("top_k", ctypes.c_int64),
        ("delta_layers", ctypes.c_int64),
        ("delta_key_heads", ctypes.c_int64),
        ("delta_value_heads", ctypes.c_int64),
        ("delta_key_width", ctypes.c_int64),
        ("delta_value_width", ctypes.c_int64),
        ("delta_taps", ctypes.c_int64),
        ("delta_ranks", ctypes.c_int64),
        ("convolution_layers", ctypes.c_int64),
        ("convolution_taps", ctypes.c_int64),
        ("streams", ctypes.c_int64),
        ("stream_rank", ctypes.c_int64),
        ("laurel_rank", ctypes.c_int64),
        ("sparse_width", ctypes.c_int64),
        ("block_heads", ctypes.c_int64),
        ("block_width", ctypes.c_int64),
        ("block_size", ctypes.c_int64),
        ("block_budget", ctypes.c_int64),
        ("lexical_width", ctypes.c_int64),
        ("lexical_taps", ctypes.c_int64),
        ("lexical_apart", ctypes.c_int64),
        ("latent_plain", ctypes.c_int64),
        ("latent_values", ctypes.c_int64),
        ("latent_rank", ctypes.c_int64),
        ("index_top", ctypes.c_int64),
        ("expert_groups", ctypes.c_int64),
        ("kept_groups", ctypes.c_int64),
        ("set", ctypes.c_int32),
        ("exact_set", ctypes.c_int32),
        ("cache_dtype", ctypes.c_int32),
        ("head_norm", ctypes.c_int32),
        ("normalise", ctypes.c_int32),
        ("scoring", ctypes.c_int32),
        ("rotated_first", ctypes.c_int32),
        ("paired_rotary", ctypes.c_int32),
        ("group_best", ctypes.c_int32),
        ("softplus_gates", ctypes.c_int32),
        ("gated_queries", ctypes.c_int32),
        ("sigmoid_gates", ctypes.c_int32),
        ("delta_kind", ctypes.c_int32),
        ("tiled_heads", ctypes.c_int32),
        ("parallel", ctypes.c_int32),
        ("centred", ctypes.c_int32),
        ("paired_index", ctypes.c_int32),
        ("scale_input", ctypes.c_int32),
        ("epsilon", ctypes.c_float),
        ("clip", ctypes.c_float),
        ("embedding_scale", ctypes.c_float),
        ("attention_scale", ctypes.c_float),
        ("residual_scale", ctypes.c_float),
        ("logits_divisor", ctypes.c_float),
        ("logits_cap", ctypes.c_float),
        ("scores_cap", ctypes.c_float),
        ("value_scale", ctypes.c_float),
        ("shared_scale", ctypes.c_float),
        ("routed_scale", ctypes.c_float),
        ("least_sum", ctypes.c_float),
        ("latent_epsilon", ctypes.c_float),
        ("step_least", ctypes.c_float),
        ("step_most", ctypes.c_float),
        ("decay_least", ctypes.c_float),
    )


class CSegment(ctypes.Structure):
    """``pllm_segment``."""

    _fields_ = (
        ("keys", ctypes.c_void_p * HEAD_KINDS),
        ("values", ctypes.c_void_p * HEAD_KINDS),
        ("key_stride", ctypes.c_int64 * HEAD_KINDS),
        ("value_stride", ctypes.c_int64 * HEAD_KINDS),
        ("blocks", ctypes.c_void_p),
        ("block_stride", ctypes.c_int64),
        ("capacity", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("start", ctypes.c_int64),
        ("count", ctypes.c_int64),
    )


class CGroup(ctypes.Structure):
    """``pllm_group``."""

    _fields_ = (
        ("segments", ctypes.POINTER(CSegment)),
        ("segment_count", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("start", ctypes.c_int64),
    )


Stop = ctypes.CFUNCTYPE(ctypes.c_int)
"""``pllm_stop``."""
STOPPED = -4
"""``PLLM_E_STOPPED``."""


class Pass(ctypes.Structure):
    """``pllm_pass``."""

    _fields_ = (
        ("ids", ctypes.c_void_p),
        ("given", ctypes.c_void_p),
        ("lexical", ctypes.c_void_p),
        ("seen", ctypes.c_void_p),
        ("cosine", ctypes.c_void_p * HEAD_KINDS),
        ("sine", ctypes.c_void_p * HEAD_KINDS),
        ("block_cosine", ctypes.c_void_p),
        ("block_sine", ctypes.c_void_p),
        ("query_scale", ctypes.c_void_p),
        ("groups", ctypes.POINTER(CGroup)),
        ("logits", ctypes.c_void_p),
        ("states_before", ctypes.c_void_p),
        ("states_after", ctypes.c_void_p),
        ("seconds", ctypes.c_void_p),
        ("workspace", ctypes.c_void_p),
        ("stop", Stop),
        ("stop_interval", ctypes.c_int64),
        ("group_count", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("tokens", ctypes.c_int64),
        ("first_layer", ctypes.c_int64),
        ("last_layer", ctypes.c_int64),
        ("reads", ctypes.c_int64),
        ("every", ctypes.c_int64),
        ("given_id", ctypes.c_int64),
        ("given_layers", ctypes.c_int64),
        ("seen_in_full", ctypes.c_int64),
    )


class Cut(ctypes.Structure):
    """``pllm_cut``."""

    _fields_ = (
        ("hidden", ctypes.c_void_p),
        ("indices", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("sum", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("layer", ctypes.c_int64),
        ("reads", ctypes.c_int64),
    )


@functools.cache
def native() -> ctypes.CDLL:
    """The library with the trunk's functions declared. Raises ModelError with the reason if it is missing."""
    library = load()
    pointer = ctypes.c_void_p
    library.pllm_trunk_bytes.argtypes = [pointer, pointer, ctypes.c_int]
    library.pllm_trunk_bytes.restype = ctypes.c_size_t
    library.pllm_trunk_run.argtypes, library.pllm_trunk_run.restype = [pointer, pointer, pointer], ctypes.c_int
    library.pllm_trunk_to_routes.argtypes = [pointer, pointer, pointer, pointer]
    library.pllm_trunk_to_routes.restype = ctypes.c_int
    library.pllm_trunk_shared.argtypes = [pointer, pointer, pointer, ctypes.c_int64]
    library.pllm_trunk_shared.restype = ctypes.c_int
    return library
