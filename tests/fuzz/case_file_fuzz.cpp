// A case file of `headlong verify`: it is refused with one line, or computed, whatever then comes out.
#include <headlong/context.hpp>

#include "tests/fuzz/fuzzer.hpp"
#include "tools/cases/load_case.hpp"

namespace headlong::fuzz {

void case_file(Input input) {
    static Context context([] {
        ContextOptions options;
        options.threads = 1;
        return options;
    }());
    const tools::Case loaded = tools::load_case("input", input);
    for (const KvTypes types : {KvTypes{}, KvTypes{KvType::int8, KvType::f16}}) {
        const tools::Outcome outcome = loaded.run(context, types);
        require(outcome.status == tools::Status::passed || !outcome.why.empty(), "what failed or was skipped says why");
        require(outcome.why.find('\n') == std::string::npos, "in one line");
    }
}

}  // namespace headlong::fuzz
