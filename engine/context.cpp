#include <fmt/format.h>

#include <algorithm>
#include <headlong/error.hpp>
#include <utility>

#include "engine/context_impl.hpp"
#include "engine/isa.hpp"
#include "engine/processors.hpp"

namespace headlong {
namespace {

Isa choose_isa(const ContextOptions& options) {
    if (options.isa && options.isa_cap) {
        throw InvalidArgument("ContextOptions: isa and isa_cap are both set; give one");
    }
    const std::vector<Isa> available = available_isas();
    if (options.isa) {
        if (std::find(available.begin(), available.end(), *options.isa) != available.end()) return *options.isa;
        std::string names;
        for (const Isa isa : available) {
            if (!names.empty()) names += ", ";
            names += to_string(isa);
        }
        throw Unsupported(
            fmt::format("instruction set {}: not available here; available: {}", to_string(*options.isa), names));
    }
    if (options.isa_cap && !is_of_this_architecture(*options.isa_cap)) {
        throw InvalidArgument(fmt::format("ContextOptions: isa_cap is {}, an instruction set of another architecture",
                                          to_string(*options.isa_cap)));
    }
    Isa best = available.front();
    for (const Isa isa : available) {
        if (!options.isa_cap || isa <= *options.isa_cap) best = isa;
    }
    return best;
}

constexpr std::size_t kMaxThreads = 4096;

std::shared_ptr<Executor> choose_executor(const ContextOptions& options) {
    if (options.executor != nullptr) {
        if (options.threads != 0) throw InvalidArgument("ContextOptions: threads and executor are both set; give one");
        if (!options.processors.empty()) {
            throw InvalidArgument("ContextOptions: processors and executor are both set; give one");
        }
        return options.executor;
    }
    if (options.threads > kMaxThreads) {
        throw InvalidArgument(fmt::format("ContextOptions: threads is {}; at most {}", options.threads, kMaxThreads));
    }
    if (!options.processors.empty()) {
        const ProcessorSet processors = choose_processors(options.processors, "/sys/devices");
        const std::size_t threads = std::min(default_concurrency(), processors.count());
        return make_tbb_executor_on(processors, options.threads == 0 ? threads : options.threads);
    }
#if HEADLONG_TBB
    const std::size_t threads = options.threads == 0 ? default_concurrency() : options.threads;
#else
    const std::size_t threads = std::max<std::size_t>(options.threads, 1);  // there are no others
#endif
    return threads == 1 ? make_serial_executor() : make_tbb_executor(threads);
}

}  // namespace

Context::Impl::Impl(Isa isa_, std::shared_ptr<Executor> executor_, std::pmr::memory_resource& memory_)
    : Impl(table_of(isa_), isa_, std::move(executor_), memory_) {}

Context::Impl::Impl(const kernels::KernelTable& table, Isa isa_, std::shared_ptr<Executor> executor_,
                    std::pmr::memory_resource& memory_)
    : isa(isa_), kernels(table), executor(std::move(executor_)), memory(memory_), workspaces(memory_) {}

Context::Context(std::unique_ptr<Impl> impl) noexcept : impl_(std::move(impl)) {}

Context::Context(const ContextOptions& options) {
    std::pmr::memory_resource* memory = options.memory != nullptr ? options.memory : std::pmr::new_delete_resource();
    impl_ = std::make_unique<Impl>(choose_isa(options), choose_executor(options), *memory);
}

Context::~Context() = default;

Isa Context::isa() const noexcept { return impl_->isa; }
std::size_t Context::concurrency() const noexcept { return impl_->executor->concurrency(); }
std::pmr::memory_resource& Context::memory() const noexcept { return impl_->memory; }
std::size_t Context::scratch_bytes() const noexcept { return impl_->workspaces.bytes(); }

}  // namespace headlong
