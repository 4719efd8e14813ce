#!/usr/bin/env python3
"""Writes the seeds of corpus/: make_corpus.py [NAME...], or all that are made here.

Seeds are small files that are right, or nearly so: what a fuzzer would take long to find. A seed that a bug was found
with is not made here: its name begins with `bug_`, and it is kept.
"""
import json
import pathlib
import random
import struct
import sys

CORPUS = pathlib.Path(__file__).parent / "corpus"
SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
         "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}


def floats(dtype, values):
    if dtype == "F64":
        return struct.pack(f"<{len(values)}d", *values)
    if dtype == "F32":
        return struct.pack(f"<{len(values)}f", *values)
    if dtype == "F16":
        return struct.pack(f"<{len(values)}e", *values)
    return b"".join(struct.pack("<f", value)[2:] for value in values)  # BF16, cut


def some(count, seed=0):
    """Numbers of either sign, none of them large."""
    return [((i * 37 + seed * 11) % 31 - 15) / 8 for i in range(count)]


def count_of(shape):
    count = 1
    for extent in shape:
        count *= extent
    return count


def tensors_file(tensors, metadata=None, length=None, header=None):
    """tensors: [(name, dtype, shape, bytes)]. `length` and `header` take the place of what is true."""
    table = {"__metadata__": metadata} if metadata else {}
    data = b""
    for name, dtype, shape, raw in tensors:
        table[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = header if header is not None else json.dumps(table, separators=(",", ":")).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(name, shape, dtype="F32", seed=0):
    return name, dtype, shape, floats(dtype, some(count_of(shape), seed))


def safetensors():
    every = [(dtype.lower(), dtype, [2], bytes(range(2 * size))) for dtype, size in SIZES.items()]
    one = [tensor("a", [2, 3])]
    yield "empty", tensors_file([])
    yield "one", tensors_file(one, {"format": "pt"})
    yield "scalar_and_empty", tensors_file([tensor("s", []), tensor("e", [3, 0, 2]), tensor("f", [1])])
    yield "every_type", tensors_file(every)
    yield "escapes", tensors_file([tensor('n"\u00e9\n', [1])], {"k\u2028": "v\\"})
    yield "long_header", tensors_file(one, length=1 << 62)
    yield "overlap", tensors_file([], header=b'{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},'
                                             b'"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}') + b"xyz"
    yield "huge_shape", tensors_file([], header=b'{"a":{"dtype":"F32","shape":[4611686018427387904,0,4],'
                                                b'"data_offsets":[0,0]}}')


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32, "hidden_size": 8,
         "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
         "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "eos_token_id": [1, 2],
         "bos_token_id": 0, "torch_dtype": "bfloat16"}


def config_json():
    def config(name, architecture, **keys):
        values = dict(LLAMA, architectures=[architecture])
        del values["model_type"]
        values.update(keys)
        return name, json.dumps(values, separators=(",", ":")).encode()

    def scaled(name, **scaling):
        return config(name, "LlamaForCausalLM", rope_scaling=scaling)

    yield "llama", json.dumps(LLAMA).encode()
    yield "llama_and_generation", json.dumps(LLAMA).encode() + b'\0{"bos_token_id":3,"eos_token_id":[4,31]}'
    yield config("mistral", "MistralForCausalLM", sliding_window=16, head_dim=6)
    yield config("mixtral", "MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    yield config("qwen2", "Qwen2ForCausalLM", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    yield config("qwen3", "Qwen3ForCausalLM", attention_bias=True, head_dim=4,
                 layer_types=["full_attention", "sliding_attention"], use_sliding_window=True)
    yield config("qwen3_moe", "Qwen3MoeForCausalLM", num_experts=4, moe_intermediate_size=3, norm_topk_prob=True,
                 num_experts_per_tok=1, decoder_sparse_step=2, mlp_only_layers=[0])
    yield config("smollm3", "SmolLM3ForCausalLM", no_rope_layers=[1, 0], sliding_window=None)
    yield config("gpt_oss", "GptOssForCausalLM", num_local_experts=2, experts_per_token=1, head_dim=4, swiglu_limit=7.0,
                 num_experts_per_tok=1, rope_scaling={"rope_type": "yarn", "factor": 32.0, "truncate": False,
                                                      "original_max_position_embeddings": 32, "beta_fast": 32.0})
    yield config("phi3", "Phi3ForCausalLM", num_key_value_heads=2, original_max_position_embeddings=32,
                 rope_scaling={"type": "longrope", "long_factor": [1.0, 2.0], "short_factor": [1.0, 1.5]})
    yield config("olmo2", "Olmo2ForCausalLM", tie_word_embeddings=False)
    yield config("granite", "GraniteForCausalLM", embedding_multiplier=12.0, attention_multiplier=0.5,
                 residual_multiplier=0.25, logits_scaling=8.0)
    yield config("gemma2", "Gemma2ForCausalLM", head_dim=4, query_pre_attn_scalar=4, sliding_window=8,
                 attn_logit_softcapping=50.0, final_logit_softcapping=None)
    yield config("gemma3", "Gemma3ForCausalLM", head_dim=4, sliding_window_pattern=2, rope_local_base_freq=100.0,
                 rope_scaling={"rope_type": "linear", "factor": 8.0})
    yield "gemma3_sees", json.dumps({"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": 1,
                                     "text_config": {"model_type": "gemma3_text", "vocab_size": 9,
                                                     "num_hidden_layers": 3}}).encode()
    yield "gpt2", json.dumps({"architectures": ["GPT2LMHeadModel"], "vocab_size": 32, "n_embd": 8, "n_layer": 1,
                              "n_head": 2, "n_positions": 16, "n_inner": None,
                              "activation_function": "gelu_new"}).encode()
    yield config("neox", "GPTNeoXForCausalLM", num_key_value_heads=2, layer_norm_eps=1e-5, rotary_pct=0.5,
                 rotary_emb_base=100, hidden_act="gelu", use_parallel_residual=False)
    yield scaled("llama3_scaling", rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                 original_max_position_embeddings=32)
    yield scaled("yarn", rope_type="yarn", factor=4.0, beta_fast=32, beta_slow=1, mscale=1.0, mscale_all_dim=0.5)
    yield config("large", "LlamaForCausalLM", num_hidden_layers=1 << 17, vocab_size=1 << 24, hidden_size=1 << 24,
                 intermediate_size=1 << 24, max_position_embeddings=1 << 24, head_dim=1 << 20, num_attention_heads=1024)
    # a step beyond what is allowed
    yield config("too_wide", "LlamaForCausalLM", num_attention_heads=1025, head_dim=1 << 20)
    yield config("too_deep_a_head", "LlamaForCausalLM", head_dim=(1 << 20) + 2)
    yield config("too_many_layers", "LlamaForCausalLM", num_hidden_layers=(1 << 17) + 1)
    yield config("too_large", "LlamaForCausalLM", hidden_size=(1 << 24) + 2, vocab_size=(1 << 24) + 1)
    yield config("too_few_experts", "MixtralForCausalLM", num_local_experts=2, num_experts_per_tok=3)
    yield config("no_such_token", "LlamaForCausalLM", eos_token_id=32)
    yield "deep", b'{"architectures":' + b"[" * 70 + b"]" * 70 + b"}"


def case_file():
    def case(name, op, tensors, **metadata):
        return name, tensors_file(tensors, dict({"op": op, "inputs": "", "outputs": "Y"}, **metadata))

    def attention(name, q, kv, value_dim=None, y=None, extra=(), dtype="F32", **metadata):
        v = kv[:3] + [kv[3] if value_dim is None else value_dim]
        attributes = {"attr." + key: str(value) for key, value in metadata.items()}
        return case(name, "Attention", [tensor("Q", q, dtype), tensor("K", kv, dtype, 1), tensor("V", v, dtype, 2),
                                        tensor("Y", y or q[:3] + [v[3]], dtype, 3), *extra], **attributes)

    yield attention("attention", [1, 2, 3, 4], [1, 1, 3, 4], is_causal=1)
    yield attention("attention_f16", [2, 2, 1, 3], [2, 2, 5, 3], value_dim=2, dtype="F16", scale=0.5, softcap=2)
    yield attention("window_lse_sinks", [1, 2, 4, 2], [1, 2, 4, 2], left_window_size=1, right_window_size=0,
                    extra=[tensor("sinks", [2]), tensor("lse", [1, 2, 4])])
    yield attention("past", [1, 1, 2, 4], [1, 1, 2, 4], is_causal=1, qk_matmul_output_mode=3,
                    extra=[tensor("past_key", [1, 1, 3, 4]), tensor("past_value", [1, 1, 3, 4]),
                           tensor("present_key", [1, 1, 5, 4]), tensor("present_value", [1, 1, 5, 4]),
                           tensor("qk_matmul_output", [1, 1, 2, 5])])
    yield attention("mask_lengths", [2, 1, 2, 2], [2, 1, 3, 2],
                    extra=[("attn_mask", "BOOL", [2, 3], b"\1\0\1\0\0\0"),
                           ("nonpad_kv_seqlen", "I64", [2], struct.pack("<2q", 3, 0))])
    name, file = "attention_3d", tensors_file(
        [tensor("Q", [1, 2, 8]), tensor("K", [1, 3, 4], seed=1), tensor("V", [1, 3, 6], seed=2),
         tensor("Y", [1, 2, 12])], {"op": "Attention", "attr.q_num_heads": "4", "attr.kv_num_heads": "2"})
    yield name, file
    yield attention("nothing", [2, 0, 3, 1], [2, 0, 0, 1])
    yield case("multi_head", "MultiHead",
               [tensor("x", [3, 4]), tensor("Wq", [4, 4], seed=1), tensor("Wk", [4, 2], seed=2),
                tensor("Wv", [4, 2], seed=3), tensor("Wo", [4, 4], seed=4), tensor("y", [3, 4], seed=5)],
               heads="2", kv_heads="1", causal="1", outputs="y", atol="1e-3")
    yield case("rotary", "RotaryEmbedding",
               [tensor("X", [1, 2, 3, 4]), tensor("Y", [1, 2, 3, 4]), tensor("cos_cache", [5, 2]),
                tensor("sin_cache", [5, 2]), ("position_ids", "I64", [1, 3], struct.pack("<3q", 0, 4, 2))],
               **{"attr.interleaved": "1"})
    yield case("rotary_3d", "RotaryEmbedding",
               [tensor("X", [1, 2, 12], "BF16"), tensor("Y", [1, 2, 12], "BF16"), tensor("cos_cache", [1, 2, 1]),
                tensor("sin_cache", [1, 2, 1])], **{"attr.num_heads": "3", "attr.rotary_embedding_dim": "2"})
    yield case("rms_norm", "RMSNormalization", [tensor("X", [2, 3, 2]), tensor("scale", [3, 2]), tensor("Y", [2, 3, 2])],
               **{"attr.axis": "1", "attr.epsilon": "1e-6"})
    yield case("swiglu", "SwiGLU", [tensor("A", [7], "F16"), tensor("B", [7], "F16"), tensor("Y", [7], "F16")])
    yield case("unknown", "Softmax", [])


def saved_cache():
    """Decisions, in the order in which saved_cache_fuzz.cpp draws them."""
    KEY_TYPES = {"f32": 0, "f16": 1, "bf16": 2, "int8": 3, "int4": 4}

    def kind(keys, values, tokens, mode=0, kv_heads=2, dims=(0, 0), layers=2, forgets=0, of_kind=(), sinks=0, chunk=40,
             f16_sinks=0, transform=(0, 0), rotary=0, attachment=b"\2ok", edits=b""):
        codes = bytes(transform) if keys in ("int8", "int4") else b""
        sinks_drawn = bytes([sinks]) if forgets == 1 else bytes([1, sinks]) if sinks else b"\0"
        # && does not draw after a 0, and rotary is drawn always
        return (bytes([mode, kv_heads - 1, *dims, KEY_TYPES[keys], KEY_TYPES[values], layers - 1, forgets, *of_kind]) +
                sinks_drawn + bytes([chunk - 1, f16_sinks]) + codes + bytes([rotary, tokens]) + attachment + edits)

    FIX = 2
    length = bytes([0, 3]) + struct.pack("<Q", 7)
    tail = b"\3\x09"
    for name in KEY_TYPES:
        yield name, kind(name, name, 70, rotary=1)
        yield name + "_ring", kind(name, name, 100, forgets=1, of_kind=[0], sinks=3, mode=4)
    yield "keys_and_values", kind("f16", "int8", 65, dims=(3, 3))
    yield "windows", kind("bf16", "int4", 130, forgets=2, of_kind=[33, 0])
    yield "f16_sinks", kind("int8", "int8", 120, sinks=5, f16_sinks=1, transform=(1, 1))
    yield "ring_of_1", kind("f32", "f32", 5, forgets=1, of_kind=[1])
    yield "into_a_cache_in_use", kind("int4", "f32", 20, mode=8 + 16)
    yield "empty", kind("f32", "f32", 0)
    yield "edited", kind("f32", "f32", 20, edits=b"\1" + struct.pack("<I", 300) + b"\3abcd")
    yield "edited_and_put_right", kind("int8", "f16", 20, mode=FIX, edits=b"\1" + struct.pack("<I", 400) + b"\3abcd")
    yield "shorter", kind("f32", "f32", 20, mode=FIX, edits=tail)
    yield "other_length", kind("f32", "f32", 20, mode=FIX, edits=length)
    for name, blocks in (("late", 3), ("very_late", (1 << 42) - 2)):
        yield name, kind("int8", "f32", 100, mode=FIX, forgets=1, of_kind=[0], rotary=1,
                         edits=b"\2" + struct.pack("<Q", blocks))
    yield "no_file", bytes([1]) + b"\0" * 20 + b"1HLCACHE"


def c_api():
    draw = random.Random(5)
    for i in range(12):
        yield f"calls_{i}", draw.randbytes(150 + 60 * i)


def tokenizer():
    texts = ["It is a truth universally acknowledged, that a single man", "the thing in the inn\n\n  and <end> more",
             "\u00e9\u00e8 \u4e2d\u6587 \U0001F600 a\u0301", "aaaa" * 40, "  \t\n 123 4567 don't we'll I'M", "<0x41><end>th"]
    patterns = [r"\p{L}+|\p{N}{1,3}|\s+|[^\s\p{L}\p{N}]+", r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\s+(?!\S)|\s+|.",
                r"(a+)+$", r"x*", r"(?=a)", r"\b", r"^", r"(.*)*b"]
    for i, text in enumerate(texts):
        yield f"bytes_{i}", b"\1" + text.encode()
        yield f"fallback_{i}", b"\2" + text.encode()
    for i, pattern in enumerate(patterns):
        yield f"pattern_{i}", b"\3" + pattern.encode() + b"\0" + texts[i % len(texts)].encode()
    small = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]}}
    yield "small", b"\0" + json.dumps(small).encode() + b"\0abab"
    small |= {"decoder": {"type": "Fuse"}, "normalizer": {"type": "NFC"},
              "added_tokens": [{"id": 3, "content": "<x>", "special": True, "single_word": False, "lstrip": True,
                                "rstrip": False, "normalized": False}]}
    yield "added", b"\0" + json.dumps(small).encode() + b"\0ab<x>c"


FUZZERS = {made.__name__: made for made in (safetensors, config_json, case_file, saved_cache, c_api, tokenizer)}

for name in sys.argv[1:] or FUZZERS:
    folder = CORPUS / name
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        if not old.name.startswith("bug_"):
            old.unlink()
    for seed, content in FUZZERS[name]():
        (folder / seed).write_bytes(content)
