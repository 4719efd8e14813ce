#include "tools/cases/features.hpp"

#include <array>

namespace headlong::tools {
namespace {

struct Row {
    Feature feature;
    const char* name;
    bool built;
};

/// The one place to change when a feature has been built.
constexpr std::array kFeatures{
    Row{Feature::mask, "mask", true},
    Row{Feature::window, "window", true},
    Row{Feature::softcap, "softcap", true},
    Row{Feature::sink_logits, "sink_logits", true},
    Row{Feature::kv_lengths, "kv_lengths", true},
    Row{Feature::qk_matmul_output, "qk_matmul_output", false},
    Row{Feature::f16, "f16 tensors", true},
    Row{Feature::bf16, "bf16 tensors", true},
    Row{Feature::f64, "f64 tensors", false},
};

}  // namespace

std::string missing(const std::set<Feature>& needed) {
    std::string names;
    for (const Row& row : kFeatures) {
        if (!row.built && needed.contains(row.feature))
            names += (names.empty() ? "needs " : ", ") + std::string(row.name);
    }
    return names;
}

}  // namespace headlong::tools
