/// \file
/// Errors: every failure of the library is an exception derived from headlong::Error. It carries a code that
/// programs can act on and a message that names the argument, its value and what is allowed. An operation that
/// fails leaves the objects it was given as they were (outputs of a cancelled or failed call are unspecified).
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include <headlong/export.hpp>

namespace headlong HEADLONG_API {

/// Kinds of errors.
enum class ErrorCode : std::uint8_t {
    invalid_argument,  ///< a shape, stride, option or value that the call does not allow
    unsupported,       ///< a valid request for something that this version or this machine cannot do
    out_of_memory,     ///< the memory resource refused, or a capacity is exhausted
    would_forget,      ///< the operation needs positions that a cache no longer holds
    bad_file,          ///< a file whose contents break its format
    io,                ///< the operating system could not open, read or write
    cancelled,         ///< the caller asked to stop
};

/// The code's name as it is written here, for logs: "invalid_argument" and so on. Never fails.
HEADLONG_API const char* to_string(ErrorCode code) noexcept;

/// Base of all exceptions thrown by Headlong. Copyable; what() is one line without a trailing newline.
class Error : public std::runtime_error {
  public:
    /// `message` is one line.
    Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
    ErrorCode code() const noexcept { return code_; }  ///< what kind of error it is

  private:
    ErrorCode code_;
};

/// One type per code, so that callers can catch what they mean to handle.
template <ErrorCode Code>
class ErrorOf final : public Error {
  public:
    explicit ErrorOf(const std::string& message) : Error(Code, message) {}  ///< `message` is one line
};

using InvalidArgument = ErrorOf<ErrorCode::invalid_argument>;  ///< ErrorCode::invalid_argument
using Unsupported = ErrorOf<ErrorCode::unsupported>;           ///< ErrorCode::unsupported
using OutOfMemory = ErrorOf<ErrorCode::out_of_memory>;         ///< ErrorCode::out_of_memory
using WouldForget = ErrorOf<ErrorCode::would_forget>;          ///< ErrorCode::would_forget
using BadFile = ErrorOf<ErrorCode::bad_file>;                  ///< ErrorCode::bad_file
using IoError = ErrorOf<ErrorCode::io>;                        ///< ErrorCode::io
using Cancelled = ErrorOf<ErrorCode::cancelled>;               ///< ErrorCode::cancelled

}  // namespace headlong
