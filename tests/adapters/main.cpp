// The host's arena and mimalloc's memory, lent to the shared library.
#include <cstdio>
#include <headlong/attention.hpp>
#include <headlong/mimalloc.hpp>
#include <headlong/tbb.hpp>
#include <vector>

int main() {
    tbb::task_arena arena(1);
    headlong::Context context({.executor = headlong::borrow_arena(arena), .memory = &headlong::mimalloc_resource()});
    const std::vector<float> rows(4 * 200 * 16, 0.5F);
    std::vector<float> output(rows.size());
    const auto input = headlong::InputTensor<4>::dense(rows.data(), {1, 4, 200, 16});
    headlong::attend(context, input, input, input, {},
                     headlong::OutputTensor<4>::dense(output.data(), {1, 4, 200, 16}));
    std::printf("%zu threads, %zu bytes of scratch: %g\n", context.concurrency(), context.scratch_bytes(),
                static_cast<double>(output[0]));
    return output == rows && context.scratch_bytes() > 0 ? 0 : 1;
}
