// What a model holds.
#pragma once

#include <headlong/model.hpp>

#include "engine/decoder.hpp"

namespace headlong {

class Model::Impl {
  public:
    Impl(Context& context, std::pmr::memory_resource& memory, const DecoderConfig& config,
         std::shared_ptr<const WeightFiles> weights, Tokenizer tokenizer_of_model, const ModelOptions& options);

    Decoder decoder;
    Tokenizer tokenizer;
    ModelInfo info;
};

}  // namespace headlong
