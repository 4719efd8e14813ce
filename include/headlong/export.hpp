/// \file
/// What a shared library shows of the public headers. The library is compiled with hidden visibility, and what is
/// public marked: the headers' namespaces, for the types in them, so that an exception thrown by the library is caught
/// by its name outside; and each function, for clang, which looks for the namespace's mark where a function is defined.
#pragma once

#if defined(__GNUC__) && !defined(_WIN32)
#define HEADLONG_API __attribute__((visibility("default")))
#define HEADLONG_LOCAL __attribute__((visibility("hidden")))  // what is the library's own inside of it
#else
#define HEADLONG_LOCAL
#define HEADLONG_API  // a DLL would need it at each class: Windows has the static library
#endif
