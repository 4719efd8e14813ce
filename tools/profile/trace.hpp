// Traces for Perfetto (ui.perfetto.dev) and chrome://tracing.
#pragma once

#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "tools/profile/recorder.hpp"
#include "tools/profile/timed_executor.hpp"

namespace headlong::tools {

struct TracePhase {
    const char* name;
    Clock::time_point begin;
    Clock::time_point end;
    const Recorder* recorder;  ///< whose kept segments lie between begin and end
};

/// A file in the Trace Event Format.
class TraceFile {
  public:
    /// Opens it for writing, which empties it. Throws IoError.
    explicit TraceFile(std::string path);

    /// Writes a track of phases and their segments, and one track per worker with the tasks that were kept, and closes
    /// the file. Times count from the first phase. Throws IoError.
    void write(const std::vector<TracePhase>& phases, const TimedExecutor& executor);

  private:
    struct Closer {
        void operator()(std::FILE* file) const noexcept { static_cast<void>(std::fclose(file)); }
    };
    [[noreturn]] void fail(int error) const;

    std::string path_;
    std::unique_ptr<std::FILE, Closer> file_;
};

}  // namespace headlong::tools
