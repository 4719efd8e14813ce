// A case file of `headlong verify`: it is refused with one line, or computed, whatever then comes out.
#include <memory>
#include <string>

#include <headlong/context.hpp>
#include <headlong/kv_cache.hpp>

#include "tests/fuzz/contexts.hpp"
#include "tests/fuzz/fuzzer.hpp"
#include "tests/fuzz/scratch_file.hpp"
#include "tools/cases/load_case.hpp"

namespace headlong::fuzz {

void case_file(Input input) {
    static ScratchFile scratch;
    scratch.set(input);
    const tools::Case loaded = tools::load_case({scratch.path()});
    require(loaded.name.find('\n') == std::string::npos, "a case's name is one line");
    for (Context* context : contexts()) {
        for (const KvTypes types :
             {KvTypes{}, KvTypes{KvType::int8, KvType::f16}, KvTypes{KvType::f16, KvType::int4}}) {
            const tools::Outcome outcome = loaded.run(*context, types);
            require((outcome.status == tools::Status::passed) == outcome.why.empty(),
                    "what failed or was skipped says why");
            require(outcome.why.find('\n') == std::string::npos, "why is one line");
            require(!outcome.max_abs_err || *outcome.max_abs_err >= 0.0, "errors are not negative");
        }
    }
}

}  // namespace headlong::fuzz
