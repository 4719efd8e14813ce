// What c_api_c99.c gives to the tests.
#ifndef HEADLONG_TESTS_C_API_C99_H
#define HEADLONG_TESTS_C_API_C99_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

#define C99_HEADS 2
#define C99_LENGTH 37
#define C99_DIM 24

/// A structure of headlong.h (field is ""), or one of its fields.
typedef struct c99_entry {
    const char* structure;
    const char* field;
    size_t offset;
    size_t bytes;
} c99_entry;

const c99_entry* c99_layout(size_t* count);

/// Causal attention over [1, C99_HEADS, C99_LENGTH, C99_DIM]; what went wrong, or "".
const char* c99_attend(const float* query, const float* key, const float* value, float* output);

#ifdef __cplusplus
}
#endif

#endif
