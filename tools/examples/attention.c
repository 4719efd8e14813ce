/* Attention from C: 8 query heads over 2 KV heads, 128 tokens, causal. Prints the first results.
 *
 *     cc attention.c -o attention -lheadlong          (or: cc attention.c $(pkg-config --cflags --libs headlong))
 */
#include <headlong/headlong.h>
#include <stdio.h>

enum { HEADS = 8, KV_HEADS = 2, TOKENS = 128, DIM = 64 };
static float query[HEADS][TOKENS][DIM], key[KV_HEADS][TOKENS][DIM], value[KV_HEADS][TOKENS][DIM];
static float output[HEADS][TOKENS][DIM];

static void fill(float* x, size_t count, unsigned seed) { /* numbers between -1 and 1 */
    for (size_t i = 0; i < count; ++i) x[i] = (float)((seed = seed * 1664525u + 1013904223u) >> 8) / 8388608.0f - 1.0f;
}

int main(void) {
    fill(&query[0][0][0], sizeof query / sizeof(float), 1);
    fill(&key[0][0][0], sizeof key / sizeof(float), 2);
    fill(&value[0][0][0], sizeof value / sizeof(float), 3);
    const int64_t rows[4] = {1, HEADS, TOKENS, DIM}, kv_rows[4] = {1, KV_HEADS, TOKENS, DIM};
    const hl_tensor q = hl_dense(query, HL_F32, 4, rows), o = hl_dense(output, HL_F32, 4, rows);
    const hl_tensor k = hl_dense(key, HL_F32, 4, kv_rows), v = hl_dense(value, HL_F32, 4, kv_rows);

    hl_context* context = NULL;
    char message[256];
    if (hl_context_create(NULL, &context, message, sizeof message) != HL_OK) return fprintf(stderr, "%s\n", message), 1;
    hl_attention_options options;
    hl_attention_options_init(&options, sizeof options);
    options.causal = HL_CAUSAL_YES;
    const hl_status status = hl_attend(context, &q, &k, &v, &options, &o, NULL);
    if (status != HL_OK) fprintf(stderr, "%s: %s\n", hl_status_name(status), hl_context_message(context));
    printf("headlong %s, %s: %g %g %g\n", hl_version(), hl_context_isa(context), output[0][0][0], output[0][1][0],
           output[HEADS - 1][TOKENS - 1][DIM - 1]);
    hl_context_destroy(context);
    /* the first row sees the first key alone: it is that key's value */
    return status == HL_OK && output[0][0][0] == value[0][0][0] ? 0 : 1;
}
