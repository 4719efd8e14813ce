// A line on a terminal's stderr that says what is going on; nothing anywhere else.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <string>

#include <fmt/format.h>

namespace headlong::tools {

class Progress {
  public:
    Progress() : visible_(::isatty(STDERR_FILENO) == 1) {}
    ~Progress() { show(""); }
    Progress(const Progress&) = delete;
    Progress& operator=(const Progress&) = delete;

    void show(const std::string& text) const {
        if (visible_) fmt::print(stderr, "\r\x1b[K{}", text);
        if (visible_) std::fflush(stderr);
    }

  private:
    bool visible_;
};

}  // namespace headlong::tools
