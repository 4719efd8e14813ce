/* A host with a malloc of its own, which a library that it links must leave alone: it is what the host's calls reach,
 * and, as everywhere in the process, what the library's reach. */
#include <headlong/headlong.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static unsigned char arena[64 << 20];
static size_t used, calls;

static void* take(size_t bytes, size_t alignment) {
    const size_t at = (used + alignment - 1) / alignment * alignment;
    if (at + bytes + alignment > sizeof arena) return NULL;
    ++calls;
    used = at + bytes + (bytes == 0);
    return arena + at;
}
void* malloc(size_t bytes) { return take(bytes, 64); }
void* calloc(size_t n, size_t bytes) { return take(n * bytes, 64); }
void* aligned_alloc(size_t alignment, size_t bytes) { return take(bytes, alignment); }
void* realloc(void* old, size_t bytes) {
    void* p = take(bytes, 64);
    if (old != NULL && p != NULL) {
        size_t most = (size_t)(arena + sizeof arena - (unsigned char*)old);
        memmove(p, old, bytes < most ? bytes : most);
    }
    return p;
}
void free(void* p) { (void)p; }

int main(void) {
    const size_t before = calls;
    void* volatile own = malloc(100);
    const int ours = (unsigned char*)own >= arena && (unsigned char*)own < arena + sizeof arena && calls == before + 1;
    hl_context* context = NULL;
    char message[256];
    if (hl_context_create(NULL, &context, message, sizeof message) != HL_OK) return fprintf(stderr, "%s\n", message), 1;
    const int theirs = calls > before + 1;
    hl_context_destroy(context);
    printf("own malloc: %d, %zu calls\n", ours, calls);
    return ours && theirs ? 0 : 1;
}
