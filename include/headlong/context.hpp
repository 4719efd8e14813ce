/// \file
/// A context says how to compute: with which instruction set, on which threads, with whose memory. There is no
/// global state: contexts work side by side, and one context may be used from many threads at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <memory_resource>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <headlong/export.hpp>

namespace headlong HEADLONG_API {

/// Instruction sets, in the order in which a cap (ContextOptions::isa_cap, HEADLONG_ISA) compares them.
/// `generic` runs on any processor of the architecture the library was built for.
enum class Isa : std::uint8_t { generic, avx2, avx2vnni, avx512, avx512vnni, neon, neondot };

/// "generic", "avx2", ...: the name that HEADLONG_ISA and the command line use.
HEADLONG_API const char* to_string(Isa isa) noexcept;

/// The instruction set of that name, or nothing.
HEADLONG_API std::optional<Isa> parse_isa(std::string_view name) noexcept;

/// The instruction sets that this build has kernels for, that this processor and operating system can run
/// (CPUID and XGETBV, getauxval), and that HEADLONG_ISA allows; ascending, `generic` first, never empty.
/// Throws InvalidArgument if HEADLONG_ISA holds a name that is not an instruction set of this architecture.
HEADLONG_API std::vector<Isa> available_isas();

/// Runs the library's parallel loops. Implement it to lend a thread pool of your own.
class Executor {
  public:
    /// One task of a loop. `worker` is in [0, worker_slots()) and no two tasks that run at the same time in one
    /// loop share it: scratch memory is indexed by it. Bodies do not throw, block or start loops of their own.
    using Body = void (*)(void* state, std::size_t task, std::size_t worker) noexcept;

    Executor() = default;
    Executor(const Executor&) = delete;
    Executor& operator=(const Executor&) = delete;
    virtual ~Executor() = default;

    /// The largest number of tasks that run at the same time; at least 1, constant.
    virtual std::size_t concurrency() const noexcept = 0;

    /// Scratch memory is held for this many workers; at least concurrency(), constant.
    virtual std::size_t worker_slots() const noexcept { return concurrency(); }

    /// Runs body(state, t, worker) for every t in [0, tasks), preferably starting them in ascending order, and
    /// returns when all are done. Called from many threads at once.
    virtual void run(std::size_t tasks, Body body, void* state) = 0;
};

/// Runs every task on the calling thread.
HEADLONG_API std::shared_ptr<Executor> make_serial_executor();

/// An arena of oneTBB threads that belongs to the executor. threads = 0 takes default_concurrency(); it gets no more
/// than oneTBB allows in this process (the number of processors, unless the program raises it by tbb::global_control).
/// Throws Unsupported in a library that was built without oneTBB, whose contexts are serial by default.
HEADLONG_API std::shared_ptr<Executor> make_tbb_executor(std::size_t threads = 0);

/// The number of processors that this process may use: the least of the hardware's, the affinity mask's and the
/// cgroup's CPU quota (rounded up); at least 1.
HEADLONG_API std::size_t default_concurrency();

/// What a context is made of. A value; what it points to must outlive the context.
struct ContextOptions {
    std::optional<Isa> isa = {};      ///< exactly this one; Unsupported if the machine or the build lacks it
    std::optional<Isa> isa_cap = {};  ///< the best available one that is not above this; not with `isa`
    std::size_t threads = 0;          ///< size of the context's own oneTBB arena; 0 = default_concurrency(), 1 = serial
    std::shared_ptr<Executor> executor = {};      ///< runs the loops instead of an arena of its own; not with `threads`
    std::pmr::memory_resource* memory = nullptr;  ///< where scratch memory comes from; must outlive the context
                                                  ///< and be thread-safe; nullptr = aligned operator new
    /// The processors that the context's threads keep to, and callers while they are inside of a call: "performance",
    /// the performance cores of a machine that has others beside them; "node1", those of a NUMA node, whose memory then
    /// holds what the context's threads write first; or a list, "0-3,8". Empty: wherever the system places them.
    /// Not with `executor`. `threads` = 0 then counts no others.
    /// Linux; elsewhere, and without oneTBB, Unsupported.
    std::string processors = {};
};

/// Its scratch memory grows on first use and is kept until it is destroyed. The scratch of attend() depends on head
/// dims, query heads per KV head, rows up to 2048, types of caches, batch, pages and workers, not on any length (but
/// for 64 bytes of every 2048 query rows, in steps of 64 KiB); a layer also needs its activations and what its products
/// pack or quantise, a shared prefix and a rotary cache some memory for each query row. Thread-safe: any number of
/// calls may use one context at the same time. Must outlive the calls, not the caches.
class Context {
  public:
    /// Throws InvalidArgument for options that contradict each other and for a wrong HEADLONG_ISA, Unsupported for an
    /// instruction set that is not available.
    explicit Context(const ContextOptions& options = {});
    ~Context();
    Context(const Context&) = delete;
    Context& operator=(const Context&) = delete;

    Isa isa() const noexcept;                            ///< the instruction set that it computes with
    std::size_t concurrency() const noexcept;            ///< the largest number of threads that work on one call
    std::pmr::memory_resource& memory() const noexcept;  ///< where its scratch memory comes from

    /// Bytes of scratch memory that the context holds now.
    std::size_t scratch_bytes() const noexcept;

    class HEADLONG_LOCAL Impl;
    HEADLONG_LOCAL explicit Context(std::unique_ptr<Impl> impl) noexcept;  ///< for the library's own use
    Impl& impl() const noexcept { return *impl_; }                         ///< for the library's own use

  private:
    std::unique_ptr<Impl> impl_;
};

}  // namespace headlong
