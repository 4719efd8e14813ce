#!/usr/bin/env python3
"""Calls the shared library with ctypes over numpy arrays, without copying them, and checks attention and the
multi-head attention layer against their formulas in numpy.

    python3 numpy_attention.py [libheadlong.so]

The library is looked for where the system looks for libraries unless its path is given. Nothing is compiled.
"""
import ctypes
import ctypes.util
import sys
from ctypes import POINTER, byref, c_char_p, c_double, c_float, c_int32, c_int64, c_size_t, c_void_p

import numpy as np


class Tensor(ctypes.Structure):
    """hl_tensor: a view of an array's memory; strides count elements."""
    _fields_ = [("data", c_void_p), ("dtype", c_int32), ("rank", c_int32),
                ("extents", c_int64 * 4), ("strides", c_int64 * 4)]

    @staticmethod
    def of(array):
        assert array.dtype == np.float32
        view = Tensor(array.ctypes.data, 0, array.ndim)
        view.array = array  # the memory lives as long as the view
        for i in range(array.ndim):
            view.extents[i] = array.shape[i]
            view.strides[i] = array.strides[i] // array.itemsize
        return view


class AttentionOptions(ctypes.Structure):
    """hl_attention_options."""
    _fields_ = [("size", c_size_t), ("has_scale", c_int32), ("scale", c_float), ("causal", c_int32),
                ("alignment", c_int32), ("causal_offset", c_int64), ("window_left", c_int64),
                ("window_right", c_int64), ("softcap", c_float), ("reserved", c_int32),
                ("alibi_slopes", c_void_p), ("alibi_slopes_count", c_size_t), ("mask", c_void_p),
                ("sink_logits", c_void_p), ("sink_logits_count", c_size_t), ("kv_lengths", c_void_p),
                ("kv_lengths_count", c_size_t), ("cancel", c_void_p), ("timeout_seconds", c_double)]


class LayerOptions(ctypes.Structure):
    """hl_layer_options."""
    _fields_ = [("size", c_size_t), ("heads", c_int64), ("kv_heads", c_int64)]


class LayerWeights(ctypes.Structure):
    """hl_layer_weights; a tensor of rank 0 is none."""
    _fields_ = [("size", c_size_t)] + [(name, Tensor) for name in (
        "query", "key", "value", "output", "query_bias", "key_bias", "value_bias", "output_bias")]


def load(path):
    library = ctypes.CDLL(path)
    library.hl_version.restype = c_char_p
    library.hl_context_message.restype = library.hl_context_isa.restype = c_char_p
    library.hl_context_message.argtypes = library.hl_context_isa.argtypes = [c_void_p]
    library.hl_context_create.argtypes = [c_void_p, POINTER(c_void_p), c_char_p, c_size_t]
    library.hl_context_destroy.argtypes = library.hl_layer_destroy.argtypes = [c_void_p]
    library.hl_context_destroy.restype = library.hl_layer_destroy.restype = None
    library.hl_attention_options_init.argtypes = [POINTER(AttentionOptions), c_size_t]
    tensor = POINTER(Tensor)
    library.hl_attend.argtypes = [c_void_p, tensor, tensor, tensor, POINTER(AttentionOptions), tensor, tensor]
    library.hl_layer_create.argtypes = [c_void_p, POINTER(LayerOptions), POINTER(LayerWeights), POINTER(c_void_p)]
    library.hl_layer_forward.argtypes = [c_void_p, c_void_p, tensor, POINTER(AttentionOptions), tensor]
    return library


def softmax_of_scores(q, k, causal):
    """[..., q_len, kv_len] in double precision."""
    scores = q.astype(np.float64) @ np.swapaxes(k.astype(np.float64), -1, -2) / np.sqrt(q.shape[-1])
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:], k=scores.shape[-1] - scores.shape[-2], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def main():
    path = sys.argv[1] if len(sys.argv) > 1 else ctypes.util.find_library("headlong")
    if path is None:
        sys.exit("numpy_attention: libheadlong.so was not found; give its path")
    hl = load(path)
    context = c_void_p()
    message = ctypes.create_string_buffer(512)
    if hl.hl_context_create(None, byref(context), message, len(message)) != 0:
        sys.exit(message.value.decode())

    def check(status):
        if status != 0:
            sys.exit(f"status {status}: {hl.hl_context_message(context).decode()}")

    def report(name, ours, formula):
        error = float(np.abs(ours - formula).max())
        print(f"{name}: largest difference {error:.1e}")
        return error < 2e-5

    random = np.random.default_rng(1)

    # Attention over arrays of [batch, length, heads, dim], as many frameworks have them: the same call, other strides.
    def heads_first(array):
        return array.transpose(0, 2, 1, 3)

    q = random.standard_normal((2, 50, 6, 32), dtype=np.float32)
    k = random.standard_normal((2, 80, 2, 32), dtype=np.float32)
    v = random.standard_normal((2, 80, 2, 24), dtype=np.float32)
    out = np.empty((2, 50, 6, 24), dtype=np.float32)
    options = AttentionOptions()
    check(hl.hl_attention_options_init(byref(options), ctypes.sizeof(options)))
    options.causal = 2  # HL_CAUSAL_YES
    check(hl.hl_attend(context, Tensor.of(heads_first(q)), Tensor.of(heads_first(k)), Tensor.of(heads_first(v)),
                       byref(options), Tensor.of(heads_first(out)), None))
    repeated = [np.repeat(heads_first(x), 3, axis=1) for x in (k, v)]  # 3 query heads read each KV head
    weights = softmax_of_scores(heads_first(q), repeated[0], causal=True)
    good = report("attention", heads_first(out), weights @ repeated[1])

    # The layer: y = concatenate(softmax(Q K^T / sqrt(head_dim)) V) Wo + bo.
    d_model, heads, length = 48, 4, 33
    x = random.standard_normal((2, length, d_model), dtype=np.float32)
    matrices = [random.standard_normal((d_model, d_model), dtype=np.float32) / np.float32(7) for _ in range(4)]
    biases = [random.standard_normal(d_model, dtype=np.float32) for _ in range(4)]
    given = LayerWeights(ctypes.sizeof(LayerWeights), *map(Tensor.of, matrices + biases))
    layer = c_void_p()
    check(hl.hl_layer_create(context, LayerOptions(ctypes.sizeof(LayerOptions), heads, 0), given, byref(layer)))
    y = np.empty_like(x)
    check(hl.hl_layer_forward(context, layer, Tensor.of(x), None, Tensor.of(y)))

    def split(rows):
        return rows.reshape(2, length, heads, d_model // heads).transpose(0, 2, 1, 3)

    query, key, value = (split(x.astype(np.float64) @ w + b) for w, b in zip(matrices[:3], biases[:3]))
    attended = (softmax_of_scores(query, key, causal=False) @ value).transpose(0, 2, 1, 3).reshape(2, length, d_model)
    good &= report("multi-head attention layer", y, attended @ matrices[3] + biases[3])

    hl.hl_layer_destroy(layer)
    print(f"headlong {hl.hl_version().decode()}, {hl.hl_context_isa(context).decode()}: {'ok' if good else 'WRONG'}")
    hl.hl_context_destroy(context)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
