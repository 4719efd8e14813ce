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
    /// Opens it for writing, to find out whether that is possible; what is in it stays until write(). Throws IoError.
    explicit TraceFile(std::string path);
    /// Removes the file if it is new and write() has not done its work.
    ~TraceFile();
    TraceFile(const TraceFile&) = delete;
    TraceFile& operator=(const TraceFile&) = delete;

    /// Replaces what is in the file: a track of phases and their segments, and one track per worker with the tasks that
    /// were kept; and closes it. Times count from the first phase. Throws IoError.
    void write(const std::vector<TracePhase>& phases, const TimedExecutor& executor);

  private:
    struct Closer {
        void operator()(std::FILE* file) const noexcept { static_cast<void>(std::fclose(file)); }
    };
    [[noreturn]] void fail(int error) const;

    std::string path_;
    bool unfinished_ = false;  ///< the file is new, and not written yet
    std::unique_ptr<std::FILE, Closer> file_;
};

}  // namespace headlong::tools
