// Which processors a context's threads keep to: the performance cores of a hybrid machine, a NUMA node, a list.
#pragma once

#include <bitset>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace headlong {

class Executor;

/// By the numbers that the system gives them. As many as Linux's cpu_set_t holds.
using ProcessorSet = std::bitset<1024>;

/// Linux's notation for sets, "0-3,8" (cpuset(7), "List format"); nothing if `text` is not of it or a number is too
/// large.
std::optional<ProcessorSet> parse_processor_list(std::string_view text);

/// The processors that ContextOptions::processors names, among those that the calling thread may use. `devices` is the
/// system's folder of devices (/sys/devices). Throws InvalidArgument if the text names none, Unsupported on systems
/// whose threads cannot be kept to processors.
ProcessorSet choose_processors(const std::string& text, const std::string& devices);

/// Where the calling thread may run; nothing if the system does not tell.
std::optional<ProcessorSet> processors_of_this_thread();

/// Lets the calling thread run there alone, if the system allows that.
void keep_this_thread_to(const ProcessorSet& processors) noexcept;

/// make_tbb_executor(threads) whose threads, and those that call it while they do, run on `processors` alone.
/// Defined in executor.cpp.
std::shared_ptr<Executor> make_tbb_executor_on(const ProcessorSet& processors, std::size_t threads);

}  // namespace headlong
