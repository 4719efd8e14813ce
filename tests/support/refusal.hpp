// What a refused call says.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include <headlong/error.hpp>

namespace headlong::test {

/// The message of the error that the operation must throw: one line, with this code.
template <class Operation>
std::string refusal(const Operation& operation, ErrorCode code = ErrorCode::invalid_argument) {
    try {
        operation();
    } catch (const Error& error) {
        EXPECT_EQ(error.code(), code) << error.what();
        EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << "an error is one line";
        return error.what();
    }
    ADD_FAILURE() << "nothing was thrown";
    return {};
}

inline testing::AssertionResult says(const std::string& message, const std::string& text) {
    if (message.find(text) != std::string::npos) return testing::AssertionSuccess();
    return testing::AssertionFailure() << "'" << message << "' does not say '" << text << "'";
}

}  // namespace headlong::test
