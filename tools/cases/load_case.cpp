#include "tools/cases/load_case.hpp"

#include <algorithm>
#include <array>
#include <exception>
#include <filesystem>
#include <new>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include <headlong/error.hpp>

#include "engine/mapped_file.hpp"
#include "tools/cases/attention_case.hpp"
#include "tools/cases/case_file.hpp"
#include "tools/cases/model_case.hpp"
#include "tools/cases/multi_head_case.hpp"
#include "tools/cases/row_ops_case.hpp"

namespace headlong::tools {
namespace {

namespace fs = std::filesystem;

struct Op {
    const char* name;
    Case (*make)(std::string name, const CaseFile& file);
};

constexpr std::array kOps{
    Op{"Attention", attention_case},    Op{"MultiHead", multi_head_case}, Op{"RMSNormalization", rms_norm_case},
    Op{"RotaryEmbedding", rotary_case}, Op{"SwiGLU", swiglu_case},
};

std::string file_name(const fs::path& path) {
    const fs::path tidy = path.lexically_normal();
    // "folder/" has an empty last part
    return (tidy.has_filename() ? tidy : tidy.parent_path()).filename().string();
}

Case case_of_file(const std::string& path) {
    const CaseFile file(path);
    const std::string name = one_line(file.text("name").value_or(fs::path(path).stem().string()));
    const auto text = file.text("op");
    if (!text) file.fail("metadata 'op' is missing: this is not a case file");
    for (const Op& op : kOps) {
        if (*text == op.name) return op.make(name, file);
    }
    return {name, [why = "needs op " + one_line(*text)](Context&, const KvTypes&) { return skipped(why); }};
}

/// Turns what a run throws into an outcome.
Case guarded(Case inner) {
    return {inner.name, [run = std::move(inner.run)](Context& context, const KvTypes& types) {
                try {
                    return run(context, types);
                } catch (const Unsupported& error) {
                    return skipped(one_line(error.what()));
                } catch (const std::bad_alloc&) {
                    return failed("out of memory");
                } catch (const std::exception& error) {
                    return failed(one_line(error.what()));
                }
            }};
}

}  // namespace

std::vector<CasePath> find_cases(const std::string& path) {
    std::error_code error;
    const fs::file_status status = fs::status(path, error);
    if (!fs::exists(status)) throw IoError(fmt::format("{}: no such file or folder", one_line(path)));
    if (!fs::is_directory(status)) return {{path, false}};
    if (fs::exists(fs::path(path) / "config.json", error)) return {{path, true}};

    std::vector<CasePath> cases;
    fs::directory_iterator entry(path, error);
    for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
        std::error_code ignored;
        if (entry->path().extension() != ".safetensors" || entry->is_directory(ignored)) continue;
        cases.push_back({entry->path().string(), false});
    }
    if (error) throw IoError(fmt::format("{}: cannot be listed: {}", one_line(path), error.message()));
    if (cases.empty()) {
        throw IoError(fmt::format("{}: holds no *.safetensors and no config.json; name a case file or its own folder",
                                  one_line(path)));
    }
    std::ranges::sort(cases, {}, &CasePath::path);
    return cases;
}

Case load_case(const CasePath& path) {
    const std::string name = one_line(file_name(path.path));
    if (path.model) return guarded(model_case(name, path.path));
    std::string why;
    try {
        return guarded(case_of_file(path.path));
    } catch (const std::bad_alloc&) {
        why = "out of memory";
    } catch (const std::exception& error) {
        why = one_line(error.what());
    }
    return {one_line(fs::path(path.path).stem().string()), [why](Context&, const KvTypes&) { return failed(why); }};
}

}  // namespace headlong::tools
