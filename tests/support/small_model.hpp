// A decoder that is small enough to be loaded a thousand times.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "tests/support/random.hpp"
#include "tests/support/write_safetensors.hpp"

namespace headlong::test {

/// Of three tokens.
inline constexpr const char* kSmallTokenizer =
    R"({"model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2},"merges":["a b"]}})";

/// A Llama of two layers.
inline nlohmann::json small_config() {
    return {{"architectures", {"LlamaForCausalLM"}},
            {"vocab_size", 11},
            {"hidden_size", 12},
            {"intermediate_size", 10},
            {"num_hidden_layers", 2},
            {"num_attention_heads", 4},
            {"num_key_value_heads", 2},
            {"head_dim", 6},
            {"max_position_embeddings", 40},
            {"rms_norm_eps", 1e-5},
            {"rope_theta", 10000.0},
            {"hidden_act", "silu"},
            {"tie_word_embeddings", false},
            {"torch_dtype", "float32"},
            {"eos_token_id", 2}};
}

/// Its weights, which bf16 holds exactly.
inline std::vector<TensorToWrite> small_tensors(bool biases = false) {
    Random random(52);
    std::vector<TensorToWrite> tensors;
    const auto add = [&](const std::string& name, const std::vector<std::int64_t>& shape) {
        std::int64_t count = 1;
        for (const std::int64_t extent : shape) count *= extent;
        std::vector<float> values(static_cast<std::size_t>(count));
        for (float& x : values) {
            x = random.normal_f32() * 0.3F;
            std::uint32_t bits = 0;
            std::memcpy(&bits, &x, 4);
            bits &= 0xFFFF0000U;
            std::memcpy(&x, &bits, 4);
        }
        tensors.push_back(tensor_to_write(name, "F32", shape, values));
    };
    add("model.embed_tokens.weight", {11, 12});
    add("lm_head.weight", {11, 12});
    add("model.norm.weight", {12});
    for (const char* layer : {"0", "1"}) {
        const std::string prefix = std::string("model.layers.") + layer + ".";
        add(prefix + "input_layernorm.weight", {12});
        add(prefix + "post_attention_layernorm.weight", {12});
        const std::vector<std::pair<std::string, std::vector<std::int64_t>>> linear{
            {"self_attn.q_proj", {24, 12}}, {"self_attn.k_proj", {12, 12}}, {"self_attn.v_proj", {12, 12}},
            {"self_attn.o_proj", {12, 24}}, {"mlp.gate_proj", {10, 12}},    {"mlp.up_proj", {10, 12}},
            {"mlp.down_proj", {12, 10}}};
        for (const auto& [name, shape] : linear) {
            add(prefix + name + ".weight", shape);
            if (biases) add(prefix + name + ".bias", {shape[0]});
        }
    }
    return tensors;
}

}  // namespace headlong::test
