// The decoder of a tokenizer: tokens become text in a chain of steps. Every step works on a stream, so that whole
// texts and streams are decoded by the same code: it takes fragments of tokens and passes on what later ones cannot
// change. To add a step: a class in tokenizer_decoders.cpp and a line in the function that reads its type.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/json_node.hpp"

namespace headlong {

/// A part of a token on its way through the chain; always whole characters of valid UTF-8.
struct Fragment {
    std::string text;
    bool ends_token = false;
};

/// A step, and its state in one stream.
class DecoderStep {
  public:
    virtual ~DecoderStep() = default;
    virtual std::unique_ptr<DecoderStep> clone() const = 0;
    /// Appends what became certain.
    virtual void take(Fragment&& fragment, std::vector<Fragment>& out) = 0;
    /// No fragment follows, and the last one ended its token.
    virtual void finish(std::vector<Fragment>&) {}

  protected:
    DecoderStep() = default;
    DecoderStep(const DecoderStep&) = default;
    DecoderStep& operator=(const DecoderStep&) = default;
};

/// All steps. A copy begins where the original is: the chain that a file describes is copied for each stream.
class DecoderChain {
  public:
    /// Reads the "decoder" of a tokenizer.json. Without one, tokens are joined by spaces.
    explicit DecoderChain(const JsonNode& node);
    DecoderChain(const DecoderChain& other);
    DecoderChain(DecoderChain&&) noexcept = default;
    DecoderChain& operator=(DecoderChain&&) noexcept = default;
    ~DecoderChain() = default;

    /// Appends the text that became certain with a token.
    void push(std::string_view token, std::string& text);
    /// Appends the rest.
    void finish(std::string& text);

  private:
    void run(std::vector<Fragment> fragments, std::size_t first, std::string& text);
    std::vector<std::unique_ptr<DecoderStep>> steps_;
};

}  // namespace headlong
