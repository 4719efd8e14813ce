// The binary interface of headlong.h against its record, tests/abi/headlong.abi: a change that is not recorded fails.
// Where the change is meant (an addition: a new function, enumerator, or field at the end of a structure that has a
// size), HEADLONG_RECORD_ABI=1 writes the record anew. Anything else raises HL_ABI_VERSION.
#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <regex>
#include <sstream>
#include <string>
#include <vector>

#include <headlong/headlong.h>

#include "tests/c_api_c99.h"

namespace headlong::test {
namespace {

const std::string kSource = HEADLONG_SOURCE_DIR;

std::string contents(const std::string& path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
}

std::string header() {
    return std::regex_replace(contents(kSource + "/include/headlong/headlong.h"), std::regex("//[^\n]*"), "");
}

std::string one_line(const std::string& text) {
    std::string line = std::regex_replace(text, std::regex("\\s+"), " ");
    if (line.starts_with(' ')) line.erase(0, 1);
    if (line.ends_with(' ')) line.pop_back();
    return line;
}

struct Declaration {
    std::string structure;
    std::string text;
};

std::vector<Declaration> declared_fields(const std::string& text) {
    std::vector<Declaration> fields;
    const std::regex structure("typedef struct (hl_\\w+) \\{([^}]*)\\} hl_\\w+;");
    for (std::sregex_iterator it(text.begin(), text.end(), structure), end; it != end; ++it) {
        fields.push_back({(*it)[1], ""});
        std::istringstream body((*it)[2]);
        for (std::string declaration; std::getline(body, declaration, ';');) {
            declaration = one_line(declaration);
            if (!declaration.empty()) fields.push_back({(*it)[1], declaration});
        }
    }
    return fields;
}

std::vector<std::string> functions(const std::string& text) {
    std::vector<std::string> found;
    const std::regex function("HL_API ((?:const )?\\w+\\*? hl_\\w+\\([^;]*\\)) HL_NOEXCEPT;");
    const std::string line = one_line(text);
    for (std::sregex_iterator it(line.begin(), line.end(), function), end; it != end; ++it) found.push_back((*it)[1]);
    return found;
}

std::string name_of(const std::string& function) {
    const std::size_t end = function.find('(');
    return function.substr(function.rfind(' ', end) + 1, end - function.rfind(' ', end) - 1);
}

std::string interface_now() {
    const std::string text = header();
    std::ostringstream now;
    now << "version " << HL_ABI_VERSION << '\n';
    const std::vector<Declaration> declared = declared_fields(text);
    std::size_t count = 0;
    const c99_entry* entries = c99_layout(&count);
    EXPECT_EQ(declared.size(), count) << "c_api_c99.c must list every structure and field of headlong.h";
    std::size_t end = 0;  // of the fields so far
    std::size_t whole = 0;
    for (std::size_t i = 0; i < std::min(count, declared.size()); ++i) {
        const c99_entry& entry = entries[i];
        EXPECT_EQ(declared[i].structure, entry.structure);
        const std::string field = entry.field;
        EXPECT_EQ(field.empty(), declared[i].text.empty()) << declared[i].structure << ' ' << declared[i].text;
        EXPECT_NE(declared[i].text.find(field), std::string::npos) << entry.structure << ": " << field;
        if (field.empty()) {
            EXPECT_EQ(end, whole) << "the structure before " << entry.structure << " has padding at its end";
            end = 0;
            whole = entry.bytes;
            now << "struct " << entry.structure << ' ' << entry.bytes << '\n';
        } else {
            EXPECT_EQ(entry.offset, end) << entry.structure << ": padding before " << field;
            end = entry.offset + entry.bytes;
            now << "  " << entry.offset << ' ' << entry.bytes << ' ' << declared[i].text << '\n';
        }
    }
    EXPECT_EQ(end, whole) << "the last structure has padding at its end";
    const std::regex enumerator("\\b(HL_\\w+) = (-?[0-9]+)");
    for (std::sregex_iterator it(text.begin(), text.end(), enumerator), last; it != last; ++it) {
        now << "enumerator " << (*it)[1] << ' ' << (*it)[2] << '\n';
    }
    for (const std::string& function : functions(text)) now << "function " << function << '\n';
    return now.str();
}

TEST(CApiAbi, IsAsRecorded) {
    if (sizeof(void*) != 8 || sizeof(size_t) != 8) GTEST_SKIP() << "the record is that of 64-bit machines";
    const std::string path = kSource + "/tests/abi/headlong.abi";
    const std::string now = interface_now();
    if (std::getenv("HEADLONG_RECORD_ABI") != nullptr) std::ofstream(path) << now;
    EXPECT_EQ(contents(path), now) << "headlong.h has changed; see the head of this file";
    EXPECT_EQ(hl_abi_version(), HL_ABI_VERSION);
}

TEST(CApiAbi, EveryDeclarationIsSeen) {
    const std::string text = header();
    std::size_t declared = 0;
    for (std::size_t at = text.find("HL_API "); at != std::string::npos; at = text.find("HL_API ", at + 1)) {
        if (text.compare(at, 8, "HL_API _") != 0) ++declared;
    }
    std::size_t macros = 0;
    for (std::size_t at = text.find("#define HL_API"); at != std::string::npos;
         at = text.find("#define HL_API", at + 1))
        ++macros;
    EXPECT_EQ(macros, 4U);
    EXPECT_EQ(functions(text).size(), declared);
    EXPECT_GT(functions(text).size(), 60U);
}

/// With every one of its pointers NULL.
TEST(CApiAbi, EveryFunctionIsTested) {
    const std::string tests = contents(kSource + "/tests/c_api_null_test.cpp");
    for (const std::string& function : functions(header())) {
        EXPECT_NE(tests.find(name_of(function) + "("), std::string::npos) << function;
    }
}

}  // namespace
}  // namespace headlong::test
