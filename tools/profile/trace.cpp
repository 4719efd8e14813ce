#include "tools/profile/trace.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <iterator>
#include <system_error>
#include <utility>

#include <headlong/error.hpp>

#include "engine/mapped_file.hpp"

namespace headlong::tools {
namespace {

/// Nanoseconds as microseconds, exactly.
std::string microseconds(Clock::duration time) {
    const auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
    return fmt::format("{}.{:03}", nanoseconds / 1000, nanoseconds % 1000);
}

std::string complete_event(const char* name, const char* category, Clock::duration at, Clock::duration lasting,
                           std::size_t thread, const std::string& arguments) {
    return fmt::format(R"({{"ph":"X","name":"{}","cat":"{}","ts":{},"dur":{},"pid":1,"tid":{},"args":{{{}}}}})", name,
                       category, microseconds(at), microseconds(lasting), thread, arguments);
}

std::string name_event(const char* what, std::size_t thread, const std::string& name) {
    return fmt::format(R"({{"ph":"M","name":"{}","pid":1,"tid":{},"args":{{"name":"{}"}}}})", what, thread, name);
}

/// The segment in which a task ran; null if it was not kept.
const Segment* segment_at(const std::vector<TracePhase>& phases, Clock::time_point time) {
    for (const TracePhase& phase : phases) {
        const std::vector<Segment>& segments = phase.recorder->kept_segments();
        const auto after = std::ranges::upper_bound(segments, time, {}, &Segment::begin);
        if (after != segments.begin() && time < std::prev(after)->end) return &*std::prev(after);
    }
    return nullptr;
}

}  // namespace

TraceFile::TraceFile(std::string path) : path_(std::move(path)) {
    constexpr int kFlags = O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC;
    constexpr mode_t kMode = 0666;  // less the umask, as fopen() has it
    int descriptor = ::open(path_.c_str(), kFlags | O_EXCL, kMode);
    unfinished_ = descriptor >= 0;
    if (descriptor < 0 && errno == EEXIST) descriptor = ::open(path_.c_str(), kFlags, kMode);
    if (descriptor < 0) fail(errno);
    file_.reset(::fdopen(descriptor, "ab"));
    if (file_ == nullptr) {
        const int error = errno;
        ::close(descriptor);
        fail(error);
    }
}

TraceFile::~TraceFile() {
    if (unfinished_) ::unlink(path_.c_str());
}

void TraceFile::fail(int error) const {
    throw IoError(fmt::format("--trace {}: cannot be written: {}", one_line(path_),
                              std::error_code(error, std::generic_category()).message()));
}

void TraceFile::write(const std::vector<TracePhase>& phases, const TimedExecutor& executor) {
    if (::ftruncate(::fileno(file_.get()), 0) != 0 && errno != EINVAL) fail(errno);  // EINVAL: a pipe or a device
    const char* separator = "{\"traceEvents\":[\n";
    const auto put = [&](const std::string& event) {
        if (std::fputs(std::exchange(separator, ",\n"), file_.get()) < 0 ||
            std::fputs(event.c_str(), file_.get()) < 0) {
            fail(errno);
        }
    };
    const Clock::time_point start = phases.front().begin;
    put(name_event("process_name", 0, "headlong profile"));
    put(name_event("thread_name", 0, "operations"));
    for (const TracePhase& phase : phases) {
        put(complete_event(phase.name, "phase", phase.begin - start, phase.end - phase.begin, 0, ""));
        for (const Segment& s : phase.recorder->kept_segments()) {
            put(complete_event(
                kind_name(s.kind), "operation", s.begin - start, s.end - s.begin, 0,
                fmt::format(R"("layer":{},"flops":{},"bytes":{})", s.layer, s.work.flops, s.work.bytes)));
        }
    }
    for (std::size_t worker = 0; worker < executor.worker_slots(); ++worker) {
        put(name_event("thread_name", worker + 1, fmt::format("worker {}", worker)));
        for (const TimedExecutor::Task& task : executor.kept_tasks(worker)) {
            const Segment* segment = segment_at(phases, task.begin);
            put(complete_event(segment != nullptr ? kind_name(segment->kind) : "task", "task", task.begin - start,
                               task.end - task.begin, worker + 1,
                               fmt::format(R"("layer":{})", segment != nullptr ? segment->layer : -1)));
        }
    }
    const std::string end = fmt::format("\n],\"displayTimeUnit\":\"ms\",\"otherData\":{{\"dropped_tasks\":{}}}}}\n",
                                        executor.dropped_tasks());
    if (std::fputs(end.c_str(), file_.get()) < 0) fail(errno);
    if (std::fclose(file_.release()) != 0) fail(errno);
    unfinished_ = false;
}

}  // namespace headlong::tools
