/// \file
/// Everything but the optional adapters (tbb.hpp, mimalloc.hpp).
#pragma once

#include <headlong/attention.hpp>
#include <headlong/context.hpp>
#include <headlong/error.hpp>
#include <headlong/kv_cache.hpp>
#include <headlong/model.hpp>
#include <headlong/multi_head_attention.hpp>
#include <headlong/rotary.hpp>
#include <headlong/tensor.hpp>
#include <headlong/tokenizer.hpp>
#include <headlong/version.hpp>

/// The C++ interface.
namespace headlong {}
