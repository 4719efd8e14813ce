/// \file
/// The C interface of Headlong: exact attention, key-value caches, the multi-head attention layer and decoder models,
/// for C99 and for every language that can call C. C++ programs have headlong.hpp.
///
///     hl_context* context = NULL;
///     char message[256];
///     if (hl_context_create(NULL, &context, message, sizeof message) != HL_OK) return fail(message);
///     const int64_t shape[4] = {1, 8, 128, 64};                       // batch, heads, length, head_dim
///     hl_tensor q = hl_dense(query, HL_F32, 4, shape), k = hl_dense(key, HL_F32, 4, shape);
///     hl_tensor v = hl_dense(value, HL_F32, 4, shape), o = hl_dense(output, HL_F32, 4, shape);
///     if (hl_attend(context, &q, &k, &v, NULL, &o, NULL) != HL_OK) fail(hl_context_message(context));
///     hl_context_destroy(context);
///
/// Errors. Functions that can fail return an hl_status. A failed call leaves the objects it was given as they were,
/// writes NULL where it would have written a handle, and leaves outputs unspecified. Its message is kept by the context
/// that was passed to it, or else by the one that its object was made with: see hl_context_message(). No exception
/// leaves a function, and nothing aborts or prints.
///
/// NULL. A NULL where something is needed is HL_INVALID_ARGUMENT, and the message names it, where there is a context to
/// keep one. Destroying NULL does nothing; getters that return a number give 0 for NULL (lengths: -1).
///
/// Structures. Those that begin with `size` may grow in later versions. Set size to sizeof of the structure: fields
/// beyond it, of which the program knew nothing when it was compiled, take their defaults. A size that is smaller than
/// the structure's first version, or larger than this library knows, is refused. For structures with an _init function
/// that function sets size and defaults; the others are zeroed but for size, and zero is the default. Fields that are
/// called reserved must be 0. NULL in the place of options means defaults. Truth values are int32_t: 0 is no, all else
/// yes. Structures without size never change.
///
/// Lifetimes. Structures, tensors, texts and lists must be valid during the call they are passed to, and are not needed
/// after it unless said otherwise. Handles may be destroyed in any order, but not while a call uses them: an object
/// keeps alive what it needs of the context it was made with, its memory callbacks included.
///
/// Threads. There is no global state. "Threads: any" means that any number of threads may make the call at the same time
/// with the same objects. "Threads: one writer" means that nobody else may use the cache during the call, while calls
/// that only read a cache may run together.
///
/// Callbacks. They are called with what `user` holds, must not throw C++ exceptions or jump out, and must not destroy
/// what the running call uses. (An exception from a callback that runs on the calling thread ends the call with
/// HL_INTERNAL.)
#ifndef HEADLONG_HEADLONG_H
#define HEADLONG_HEADLONG_H

#include <stddef.h>
#include <stdint.h>

/// \def HL_API
/// Of the declarations below. On Windows HEADLONG_DLL says that the library is a DLL, HEADLONG_DLL_EXPORTS that this is
/// its own build.
#if defined(_WIN32) && defined(HEADLONG_DLL_EXPORTS)
#define HL_API __declspec(dllexport)
#elif defined(_WIN32) && defined(HEADLONG_DLL)
#define HL_API __declspec(dllimport)
#elif !defined(_WIN32) && defined(__GNUC__)
#define HL_API __attribute__((visibility("default")))
#else
#define HL_API
#endif

/// Of all functions: none throws.
#ifdef __cplusplus
#define HL_NOEXCEPT noexcept
extern "C" {
#else
#define HL_NOEXCEPT
#endif

// ---------------------------------------------------------------------------------------------- status and version

/// What became of a call. The order is that of headlong::ErrorCode.
typedef enum hl_status {
    HL_OK = 0,                ///< done
    HL_INVALID_ARGUMENT = 1,  ///< a shape, stride, option, value or NULL that the call does not allow
    HL_UNSUPPORTED = 2,       ///< a valid request for something that this version, build or machine cannot do
    HL_OUT_OF_MEMORY = 3,     ///< the memory callback or the system refused, or a capacity is exhausted
    HL_WOULD_FORGET = 4,      ///< the operation needs positions that a cache no longer holds
    HL_BAD_FILE = 5,          ///< a file whose contents break its format
    HL_IO = 6,                ///< the operating system could not open, read or write
    HL_CANCELLED = 7,         ///< the caller asked to stop, or the time was up
    HL_INTERNAL = 8           ///< none of these: a callback threw, or the library has a fault
} hl_status;

/// "ok", "invalid_argument" and so on, for logs; "unknown" for a number that is no status. Never NULL. Threads: any.
HL_API const char* hl_status_name(int32_t status) HL_NOEXCEPT;

/// "major.minor.patch" of the library that runs. Threads: any.
HL_API const char* hl_version(void) HL_NOEXCEPT;

/// Of this header.
#define HL_ABI_VERSION 1

/// The HL_ABI_VERSION of the library that runs. A program works with every library of its own number: additions leave
/// it, anything else raises it. Threads: any.
HL_API int32_t hl_abi_version(void) HL_NOEXCEPT;

/// 1 if the library was built with a part that can be left out, else 0 (also for names it does not know, and NULL):
/// "models" is what hl_model needs, "tbb" is threads of the library's own. Threads: any.
HL_API int32_t hl_has_feature(const char* name) HL_NOEXCEPT;

/// The instruction sets that the library has kernels for, that this machine can run and that the environment variable
/// HEADLONG_ISA allows: "generic" first, then ascending. Writes the first `capacity` names to `names` (NULL if capacity
/// is 0) and their whole number to `count`. The names live as long as the library. HL_INVALID_ARGUMENT if HEADLONG_ISA
/// names no instruction set of this architecture. Threads: any.
HL_API hl_status hl_available_isas(const char** names, size_t capacity, size_t* count) HL_NOEXCEPT;

/// The number of processors that this process may use: the least of the hardware's, the affinity mask's and the
/// cgroup's CPU quota; at least 1. Threads: any.
HL_API size_t hl_default_concurrency(void) HL_NOEXCEPT;

// ---------------------------------------------------------------------------------------------------------- context

/// How to compute: with which instruction set, on which threads, with whose memory.
typedef struct hl_context hl_context;
/// A cache of keys and values: one sequence, all layers of a model.
typedef struct hl_cache hl_cache;
/// Blocks of memory that caches share.
typedef struct hl_pool hl_pool;
/// A multi-head attention layer.
typedef struct hl_layer hl_layer;
/// A decoder model and its tokenizer.
typedef struct hl_model hl_model;
/// What hl_generate() made.
typedef struct hl_generation hl_generation;
/// A request to stop, which other threads can make.
typedef struct hl_cancel hl_cancel;

/// Where scratch memory, the blocks of caches and weights come from. (Handles and a model's tokenizer come from
/// operator new.) Both functions are called from any thread, several at a time, as long as the context or anything made
/// with it lives, and with locks held: they must not call the library.
typedef struct hl_memory {
    size_t size;  ///< sizeof(hl_memory)
    void* user;   ///< passed to both
    /// Returns `bytes` bytes (at least 1) at a multiple of `alignment`, a power of two, or NULL if there is no memory,
    /// which ends the call with HL_OUT_OF_MEMORY. So does an address that is no such multiple.
    void* (*allocate)(void* user, size_t bytes, size_t alignment);
    /// Takes back what allocate returned for the same bytes and alignment.
    void (*deallocate)(void* user, void* address, size_t bytes, size_t alignment);
} hl_memory;

/// One task of a loop; does not throw, block or start loops.
typedef void (*hl_task)(void* state, size_t task, size_t worker);

/// A thread pool of the program's, which the library's loops run on.
typedef struct hl_executor {
    size_t size;          ///< sizeof(hl_executor)
    void* user;           ///< passed to run
    size_t concurrency;   ///< the largest number of tasks that run at the same time; at least 1
    size_t worker_slots;  ///< workers are numbered below this; 0 = concurrency, otherwise at least that
    /// Calls task(state, t, worker) once for every t in [0, tasks), preferably in ascending order, on any threads, and
    /// returns when all calls have returned. No two calls that run at the same time in one loop have the same `worker`.
    /// Called from many threads at once. If the calls are not as many as the tasks, or a number is too large,
    /// the library's call ends with HL_INVALID_ARGUMENT; a task that is run twice in the place of another is not
    /// noticed.
    void (*run)(void* user, size_t tasks, hl_task task, void* state);
} hl_executor;

/// What a context is made of.
typedef struct hl_context_options {
    size_t size;          ///< sizeof(hl_context_options)
    const char* isa;      ///< exactly this instruction set ("avx2"); HL_UNSUPPORTED if it is not available
    const char* isa_cap;  ///< the best available one that is not above this; not with isa
    /// Of the context's own; 0 = hl_default_concurrency() (1 without "tbb"), 1 = the calling thread alone.
    size_t threads;
    const hl_executor* executor;  ///< copied; runs the loops instead; not with threads
    const hl_memory* memory;      ///< copied; NULL = aligned operator new
    /// The processors that the context's threads keep to, and callers while they are inside of a call: "performance",
    /// the performance cores of a machine that has others beside them; "node1", those of a NUMA node; or a list,
    /// "0-3,8". NULL or "": wherever the system places them. Not with executor. HL_UNSUPPORTED but on Linux with "tbb".
    const char* processors;
} hl_context_options;

/// Makes a context. There is none yet to keep a message: if `message` is not NULL, the call writes it there, cut to
/// capacity - 1 bytes and ended by 0 (the empty text after success).
/// HL_INVALID_ARGUMENT, HL_UNSUPPORTED, HL_OUT_OF_MEMORY. Threads: any.
HL_API hl_status hl_context_create(const hl_context_options* options, hl_context** context, char* message,
                                   size_t capacity) HL_NOEXCEPT;

/// Threads: any, but not while the context is used. Caches, pools, layers and models that were made with it live on.
HL_API void hl_context_destroy(hl_context* context) HL_NOEXCEPT;

/// The message of the last call that failed on this thread and for which this context keeps messages: one line of
/// UTF-8, at most 1,023 bytes, "" if there was none (and for NULL). It names the argument, its value and what is
/// allowed. Calls that succeed leave it. Valid until the thread's next failure with this context, or the context's end.
/// Each thread has a message of its own, so that threads which share a context do not overwrite each other's; the first
/// few need no memory, and where a later one finds none the text says so. (A thread that has the id of one which ended
/// may see that one's.) Threads: any.
HL_API const char* hl_context_message(const hl_context* context) HL_NOEXCEPT;

/// The name of the instruction set it computes with; "" for NULL. Threads: any.
HL_API const char* hl_context_isa(const hl_context* context) HL_NOEXCEPT;
/// The largest number of threads that work on one call. Threads: any.
HL_API size_t hl_context_concurrency(const hl_context* context) HL_NOEXCEPT;
/// Bytes of scratch memory that it holds. They grow on first use and do not depend on lengths. Threads: any.
HL_API size_t hl_context_scratch_bytes(const hl_context* context) HL_NOEXCEPT;

// ----------------------------------------------------------------------------------------------------- cancellation
//
//     hl_cancel* cancel = NULL;
//     hl_cancel_create(&cancel);
//     options.cancel = cancel;                    // hl_attend() and the like return HL_CANCELLED ...
//     hl_cancel_request(cancel);                  // ... soon after another thread has said so
//     hl_cancel_reset(cancel);                    // for the next call

/// Makes a token that is not requested. It must outlive the calls that it is passed to. HL_INVALID_ARGUMENT,
/// HL_OUT_OF_MEMORY. Threads: any.
HL_API hl_status hl_cancel_create(hl_cancel** cancel) HL_NOEXCEPT;
/// Threads: any, but not while a call uses it.
HL_API void hl_cancel_destroy(hl_cancel* cancel) HL_NOEXCEPT;
/// Asks all calls that use the token, those that run and those to come, to end. It locks a mutex: not from a signal
/// handler. Nothing happens for NULL. Threads: any.
HL_API void hl_cancel_request(hl_cancel* cancel) HL_NOEXCEPT;
/// Takes the request back for calls that begin from now on. HL_INVALID_ARGUMENT (NULL), HL_OUT_OF_MEMORY. Threads: any.
HL_API hl_status hl_cancel_reset(hl_cancel* cancel) HL_NOEXCEPT;
/// Whether it is requested. Threads: any.
HL_API int32_t hl_cancel_requested(const hl_cancel* cancel) HL_NOEXCEPT;

// ---------------------------------------------------------------------------------------------------------- tensors

/// Element types of tensors.
enum hl_dtype {
    HL_F32 = 0,  ///< IEEE 754 binary32
    HL_F16 = 1,  ///< IEEE 754 binary16
    HL_BF16 = 2  ///< the upper half of a binary32
};

/// A view of the caller's memory: element [i, j, ...] lies at data + i * strides[0] + j * strides[1] + ... elements.
/// Strides may be negative; those of inputs may be 0 to broadcast. A view with an extent of 0 is never touched and may
/// have a NULL data. Inputs are not written. Rank 0 with a NULL data means that an optional tensor is not there.
typedef struct hl_tensor {
    void* data;          ///< element [0, 0, ...]
    int32_t dtype;       ///< an hl_dtype
    int32_t rank;        ///< how many extents and strides count
    int64_t extents[4];  ///< >= 0
    int64_t strides[4];  ///< in elements
} hl_tensor;

/// A dense row-major tensor: the last dimension has stride 1. Rank 1 to 4; any other, or NULL extents, gives rank -1,
/// which every call refuses. Threads: any.
HL_API hl_tensor hl_dense(const void* data, int32_t dtype, int32_t rank, const int64_t* extents) HL_NOEXCEPT;

// -------------------------------------------------------------------------------------------------------- attention

/// Element types of masks.
enum hl_mask_type {
    HL_MASK_BOOLEAN = 0,  ///< one byte, nonzero = attend
    HL_MASK_F32 = 1,      ///< added to scores; -infinity = not allowed
    HL_MASK_F16 = 2,      ///< the same in binary16
    HL_MASK_BF16 = 3      ///< the same in bfloat16
};

/// Which keys a mask's last dimension is laid over.
enum hl_mask_keys {
    HL_MASK_ALL_KEYS = 0,  ///< key 0 and those that follow
    HL_MASK_LAST_Q = 1     ///< a sequence's last q_len live keys, all earlier ones being allowed
};

/// A mask over scores, broadcast by right alignment against [batch, heads, q_len, kv_len]. An extent of 1 broadcasts,
/// and so does a stride of 0. Fewer keys than there are (but not 1) leave the others not allowed.
typedef struct hl_mask {
    size_t size;         ///< sizeof(hl_mask)
    const void* data;    ///< element [0, 0, ...]
    int32_t type;        ///< an hl_mask_type
    int32_t rank;        ///< 1 to 4
    int32_t keys;        ///< an hl_mask_keys
    int32_t reserved;    ///< 0
    int64_t extents[4];  ///< the first `rank` of them
    int64_t strides[4];  ///< in elements, of any sign
} hl_mask;

/// Whether row i sees only keys j <= i + offset.
enum hl_causal {
    HL_CAUSAL_DEFAULT = 0,  ///< not for plain tensors, yes with a cache
    HL_CAUSAL_NO = 1,       ///< it sees all keys
    HL_CAUSAL_YES = 2       ///< it does
};

/// Where query row i stands among the keys: its position is i + offset.
enum hl_alignment {
    HL_BOTTOM_RIGHT = 0,  ///< offset = kv_len - q_len: the last query stands on the last live key
    HL_TOP_LEFT = 1,      ///< offset = 0: the first query stands on the first key
    HL_OFFSET = 2         ///< offset = causal_offset
};

/// What attention computes besides the plain operator. All of it works together, in every call.
typedef struct hl_attention_options {
    size_t size;            ///< set by hl_attention_options_init()
    int32_t has_scale;      ///< no: 1 / sqrt(head_dim)
    float scale;            ///< factor of every score; finite
    int32_t causal;         ///< an hl_causal
    int32_t alignment;      ///< an hl_alignment
    int64_t causal_offset;  ///< with HL_OFFSET, else 0
    /// A query at position p sees the keys p - window_left <= j <= p + window_right; -1 (the default) = unbounded.
    int64_t window_left;
    int64_t window_right;       ///< keys after the query, as window_left
    float softcap;              ///< scores become softcap * tanh(score / softcap), before ALiBi and masks; 0 = off
    int32_t reserved;           ///< 0
    const float* alibi_slopes;  ///< one per query head, finite
    size_t alibi_slopes_count;  ///< 0 = no ALiBi
    const hl_mask* mask;        ///< broadcast against [batch, heads, q_len, kv_len]; NULL = none
    const float* sink_logits;   ///< one per query head; finite, or -infinity for none
    size_t sink_logits_count;   ///< 0 = none
    const int64_t* kv_lengths;  ///< live keys, per sequence of the call
    size_t kv_lengths_count;    ///< 0 = all keys are live
    hl_cancel* cancel;          ///< checked between tiles; the call ends with HL_CANCELLED
    double timeout_seconds;     ///< the same so long after the call began; 0 = never
} hl_attention_options;

/// Sets `size` bytes to the defaults; pass sizeof *options. HL_INVALID_ARGUMENT, and a size of 0 in the structure, if
/// the library does not know a structure of that size. Threads: any.
HL_API hl_status hl_attention_options_init(hl_attention_options* options, size_t size) HL_NOEXCEPT;

/// softmax(scale * Q K^T) V over plain tensors of one batch.
///
///   query   [batch, heads,    q_len,  head_dim]     head_dim >= 1; every other extent may be 0
///   key     [batch, kv_heads, kv_len, head_dim]     heads is a multiple of kv_heads; query head h reads
///   value   [batch, kv_heads, kv_len, value_dim]    KV head h / (heads / kv_heads)
///   output  [batch, heads,    q_len,  value_dim]    written whole; must not overlap the inputs
///   lse     [batch, heads,    q_len]                log of the sum of e^score; f32; NULL or rank 0 = not wanted
///
/// The tensors may be of any types, each its own. A row that sees no key gives 0, and an lse of -infinity.
/// HL_INVALID_ARGUMENT, HL_OUT_OF_MEMORY, HL_CANCELLED. Threads: any.
HL_API hl_status hl_attend(hl_context* context, const hl_tensor* query, const hl_tensor* key, const hl_tensor* value,
                           const hl_attention_options* options, const hl_tensor* output,
                           const hl_tensor* lse) HL_NOEXCEPT;

/// Attention over `sequences` sequences that lie packed one behind the other: sequence s has the rows
/// [query_offsets[s], query_offsets[s + 1]) of query, output and lse, and the rows [key_offsets[s], key_offsets[s + 1])
/// of key and value. Both lists have sequences + 1 elements, begin at 0 and do not decrease. Otherwise as hl_attend().
///
///   query  [heads, rows, head_dim]    key [kv_heads, kv_rows, head_dim]    value [kv_heads, kv_rows, value_dim]
///   output [heads, rows, value_dim]   lse [heads, rows]
HL_API hl_status hl_attend_packed(hl_context* context, const hl_tensor* query, const hl_tensor* key,
                                  const hl_tensor* value, const int64_t* query_offsets, const int64_t* key_offsets,
                                  size_t sequences, const hl_attention_options* options, const hl_tensor* output,
                                  const hl_tensor* lse) HL_NOEXCEPT;

/// One sequence of hl_attend_cached().
typedef struct hl_cached_query {
    size_t size;            ///< sizeof(hl_cached_query)
    hl_tensor query;        ///< [heads, q_len, head_dim]
    const hl_cache* cache;  ///< its keys and values; read, not changed
    size_t layer;           ///< of the cache
    hl_tensor output;       ///< [heads, q_len, value_dim]
    hl_tensor lse;          ///< [heads, q_len], f32; rank 0 = not wanted
    const hl_mask* mask;    ///< of its own, rank 1 to 3, or NULL; not together with hl_attention_options.mask
} hl_cached_query;

/// Attention of `count` sequences, each over a layer of a cache: rows of a prompt, of a chunk or of one decode step,
/// which have just been appended (causal and bottom-right unless the options say otherwise). The elements of `queries`
/// lie queries[0].size bytes apart. q_len and cache may differ, heads and dims may not. Rows of a cache with a rotary
/// description are rotated here. HL_INVALID_ARGUMENT, HL_UNSUPPORTED (a mask over forgotten keys), HL_WOULD_FORGET,
/// HL_OUT_OF_MEMORY, HL_CANCELLED. Threads: any.
HL_API hl_status hl_attend_cached(hl_context* context, const hl_cached_query* queries, size_t count,
                                  const hl_attention_options* options) HL_NOEXCEPT;

// ------------------------------------------------------------------------------------------------- key-value caches
//
//     hl_cache_options options;
//     hl_cache_options_init(&options, sizeof options);
//     options.shape.head_dim = options.shape.value_dim = 64;
//     options.shape.kv_heads = 2;
//     hl_cache* cache = NULL;
//     hl_cache_create(context, &options, &cache);
//     hl_cache_append(context, cache, 0, &keys, &values);       // then hl_attend_cached()
//     hl_cache_destroy(cache);

/// How a cache stores keys or values. int8 and int4 are quantised in groups, and attention over them computes in
/// integers.
enum hl_kv_type {
    HL_KV_F32 = 0,   ///< 4 bytes an element
    HL_KV_F16 = 1,   ///< 2 bytes
    HL_KV_BF16 = 2,  ///< 2 bytes
    HL_KV_INT8 = 3,  ///< 1 byte, and a scale per group
    HL_KV_INT4 = 4   ///< half a byte, and a scale per group
};

/// What the rows of a cache look like.
typedef struct hl_kv_shape {
    int64_t kv_heads;    ///< >= 1
    int64_t head_dim;    ///< >= 1: elements of a key
    int64_t value_dim;   ///< >= 0: elements of a value
    int32_t key_type;    ///< an hl_kv_type
    int32_t value_type;  ///< an hl_kv_type
} hl_kv_shape;

/// Which elements of a row a rotary embedding turns together.
enum hl_rotary_pairing {
    HL_ROTARY_HALVES = 0,      ///< x[i] with x[i + rotary_dim / 2]
    HL_ROTARY_INTERLEAVED = 1  ///< x[2 i] with x[2 i + 1]
};

/// How its frequencies are stretched to longer contexts; the formulas are those of Hugging Face transformers.
enum hl_rotary_scaling {
    HL_ROTARY_NONE = 0,     ///< as they are
    HL_ROTARY_LINEAR = 1,   ///< all divided by factor
    HL_ROTARY_NTK = 2,      ///< theta times factor^(r / (r - 2))
    HL_ROTARY_LLAMA3 = 3,   ///< long wavelengths divided, short ones kept, between them a ramp
    HL_ROTARY_YARN = 4,     ///< a ramp over pairs, and an attention factor
    HL_ROTARY_LONGROPE = 5  ///< one divisor per pair, and an attention factor
};

/// A rotary position embedding. Fields of other scalings than the chosen one are not looked at. headlong/rotary.hpp
/// says for each what is allowed.
typedef struct hl_rotary_options {
    size_t size;                   ///< set by hl_rotary_options_init()
    int64_t head_dim;              ///< 1 to 2^20
    int64_t rotary_dim;            ///< even: what is turned; 0 = head_dim
    double theta;                  ///< base of the frequencies; 10000
    int32_t pairing;               ///< an hl_rotary_pairing
    int32_t scaling;               ///< an hl_rotary_scaling
    double factor;                 ///< 1
    int64_t original_context;      ///< llama3, yarn, longrope: the context trained at
    double low_freq_factor;        ///< llama3; 1
    double high_freq_factor;       ///< llama3; 4
    double beta_fast;              ///< yarn; 32
    double beta_slow;              ///< yarn; 1
    int32_t truncate;              ///< yarn; yes
    int32_t has_attention_factor;  ///< no: computed from factor
    double attention_factor;       ///< yarn, longrope
    const double* pair_factors;    ///< longrope: one per pair
    size_t pair_factors_count;     ///< rotary_dim / 2, or 0
} hl_rotary_options;

/// As hl_attention_options_init().
HL_API hl_status hl_rotary_options_init(hl_rotary_options* options, size_t size) HL_NOEXCEPT;

/// What a cache holds, and how.
typedef struct hl_cache_options {
    size_t size;        ///< set by hl_cache_options_init()
    hl_kv_shape shape;  ///< kv_heads 1, f32; the dims have no default
    int64_t layers;     ///< 1
    /// Tokens it may hold; without limit. An append beyond it is refused with HL_OUT_OF_MEMORY, unless it is a ring.
    int64_t capacity;
    int64_t sink_tokens;    ///< at the beginning, never forgotten; 0 to capacity - 1
    int64_t max_chunk;      ///< tokens that layers which forget take at once; 512
    int32_t ring;           ///< holds the first sink_tokens and the last capacity - sink_tokens of any number of tokens
    int32_t hadamard_keys;  ///< turn keys by a Walsh-Hadamard transform before quantising; int8 and int4
    const int64_t* layer_windows;     ///< per layer, NULL = none: tokens that a query sees, its own included; 0 = all
    size_t layer_windows_count;       ///< layers, or 0
    const hl_rotary_options* rotary;  ///< NULL: rows are taken as they are
    /// Per layer, in the place of rotary; an element may be NULL.
    const hl_rotary_options* const* layer_rotary;
    size_t layer_rotary_count;  ///< layers, or 0
    const float* key_centre;    ///< [kv_heads, head_dim], copied: subtracted before quantising; int8 and int4
    size_t key_centre_count;    ///< kv_heads * head_dim, or 0
    hl_pool* pool;  ///< to share blocks; must have the same shape. NULL: blocks of its own, from the context's memory
    /// The sink tokens are stored in f16; with keys or values of int8 or int4. From 65520 on an element becomes
    /// infinite.
    int32_t f16_sinks;
    int32_t reserved;  ///< 0
} hl_cache_options;

/// As hl_attention_options_init().
HL_API hl_status hl_cache_options_init(hl_cache_options* options, size_t size) HL_NOEXCEPT;

/// Makes a pool, whose slabs come from the context's memory and are kept until the pool and all caches that use it are
/// destroyed. HL_INVALID_ARGUMENT, HL_UNSUPPORTED, HL_OUT_OF_MEMORY. Threads: any.
HL_API hl_status hl_pool_create(hl_context* context, const hl_kv_shape* shape, hl_pool** pool) HL_NOEXCEPT;
/// Caches that use the pool keep its blocks. Threads: any.
HL_API void hl_pool_destroy(hl_pool* pool) HL_NOEXCEPT;
/// Bytes of one block: 64 tokens of all KV heads of one layer. Threads: any.
HL_API size_t hl_pool_block_bytes(const hl_pool* pool) HL_NOEXCEPT;
/// Bytes of the blocks that caches hold. Threads: any.
HL_API size_t hl_pool_used_bytes(const hl_pool* pool) HL_NOEXCEPT;
/// Bytes of all slabs. Threads: any.
HL_API size_t hl_pool_reserved_bytes(const hl_pool* pool) HL_NOEXCEPT;

/// Makes an empty cache, which takes no blocks yet. HL_INVALID_ARGUMENT, HL_UNSUPPORTED, HL_OUT_OF_MEMORY. Threads:
/// any.
HL_API hl_status hl_cache_create(hl_context* context, const hl_cache_options* options, hl_cache** cache) HL_NOEXCEPT;
/// Gives its blocks back. Threads: one writer.
HL_API void hl_cache_destroy(hl_cache* cache) HL_NOEXCEPT;

/// Writes to `bytes` what the blocks of a cache of these options hold at `tokens` tokens, at most. Allocates no blocks.
/// HL_INVALID_ARGUMENT, HL_OUT_OF_MEMORY (more than 64 bits count). Threads: any.
HL_API hl_status hl_cache_estimate_bytes(hl_context* context, const hl_cache_options* options, int64_t tokens,
                                         size_t* bytes) HL_NOEXCEPT;

/// Takes the blocks that `tokens` more tokens need in every layer, or fails and changes nothing. HL_INVALID_ARGUMENT,
/// HL_OUT_OF_MEMORY. Threads: one writer.
HL_API hl_status hl_cache_reserve(hl_cache* cache, int64_t tokens) HL_NOEXCEPT;

/// Appends keys [kv_heads, n, head_dim] and values [kv_heads, n, value_dim] to one layer, n >= 0, of any element types.
/// Each layer has its own length; the cache's is the number of tokens that every layer has. HL_INVALID_ARGUMENT,
/// HL_OUT_OF_MEMORY. Threads: one writer.
HL_API hl_status hl_cache_append(hl_context* context, hl_cache* cache, size_t layer, const hl_tensor* keys,
                                 const hl_tensor* values) HL_NOEXCEPT;

/// Tokens that all layers have, forgotten ones included; -1 for NULL. Threads: any.
HL_API int64_t hl_cache_length(const hl_cache* cache) HL_NOEXCEPT;
/// Tokens that one layer has; -1 if there is no such layer. Threads: any.
HL_API int64_t hl_cache_layer_length(const hl_cache* cache, size_t layer) HL_NOEXCEPT;
/// Bytes of the rows that it holds, padding included. Threads: any.
HL_API size_t hl_cache_used_bytes(const hl_cache* cache) HL_NOEXCEPT;
/// Bytes of the blocks that it holds, shared ones too. Threads: any.
HL_API size_t hl_cache_reserved_bytes(const hl_cache* cache) HL_NOEXCEPT;

/// What a cache is, and how full.
typedef struct hl_cache_info {
    size_t size;            ///< sizeof(hl_cache_info), set by the caller
    hl_kv_shape shape;      ///< what its rows look like
    int64_t layers;         ///< of the model
    int64_t capacity;       ///< as in hl_cache_options
    int64_t sink_tokens;    ///< as in hl_cache_options
    int64_t max_chunk;      ///< as in hl_cache_options
    int64_t length;         ///< as hl_cache_length()
    int32_t ring;           ///< as in hl_cache_options
    int32_t forgets;        ///< in a ring, or by a window: appends of at most max_chunk tokens are then safe
    size_t used_bytes;      ///< as hl_cache_used_bytes()
    size_t reserved_bytes;  ///< as hl_cache_reserved_bytes()
    int32_t f16_sinks;      ///< as in hl_cache_options
    int32_t reserved;       ///< 0
} hl_cache_info;

/// Fills `info` as far as its size says. HL_INVALID_ARGUMENT. Threads: any.
HL_API hl_status hl_cache_get_info(const hl_cache* cache, hl_cache_info* info) HL_NOEXCEPT;

/// Takes back what was appended to some layers but not to all, after a step that failed. Threads: one writer.
HL_API void hl_cache_discard_unfinished(hl_cache* cache) HL_NOEXCEPT;
/// Takes back the newest tokens of all layers, down to `length`. HL_INVALID_ARGUMENT, HL_WOULD_FORGET, and nothing
/// changed, where a cache of that length would hold positions that this one has forgotten. Threads: one writer.
HL_API hl_status hl_cache_truncate(hl_cache* cache, int64_t length) HL_NOEXCEPT;
/// Forgets all tokens and gives the blocks back. Threads: one writer.
HL_API void hl_cache_reset(hl_cache* cache) HL_NOEXCEPT;
/// Makes a cache that holds the same tokens in the same blocks, each copied when one of its holders writes to it. The
/// two may then be used by different threads. HL_INVALID_ARGUMENT, HL_OUT_OF_MEMORY. Threads: any.
HL_API hl_status hl_cache_fork(const hl_cache* cache, hl_cache** fork) HL_NOEXCEPT;

/// Copies the stored rows [first, first + n) of a layer, n being the tensors' middle extent: keys [kv_heads, n,
/// head_dim], values [kv_heads, n, value_dim], of any element types. HL_INVALID_ARGUMENT, HL_WOULD_FORGET,
/// HL_OUT_OF_MEMORY. Threads: any.
HL_API hl_status hl_cache_read_back(const hl_cache* cache, size_t layer, int64_t first, const hl_tensor* keys,
                                    const hl_tensor* values) HL_NOEXCEPT;

/// Bytes that hl_cache_save() writes with an attachment of so many bytes. Threads: any.
HL_API size_t hl_cache_saved_bytes(const hl_cache* cache, size_t attachment_bytes) HL_NOEXCEPT;
/// Writes all that the cache holds, and an attachment of the caller's (its tokens, say), to memory of exactly
/// hl_cache_saved_bytes() bytes. The format is the same on every machine and ends in a checksum. HL_INVALID_ARGUMENT
/// (also: layers of different lengths), HL_OUT_OF_MEMORY. Threads: any.
HL_API hl_status hl_cache_save(const hl_cache* cache, void* bytes, size_t bytes_count, const void* attachment,
                               size_t attachment_bytes) HL_NOEXCEPT;
/// The same to a file, which is written beside and then moved over what was there. HL_IO, too. Threads: any.
HL_API hl_status hl_cache_save_file(const hl_cache* cache, const char* path, const void* attachment,
                                    size_t attachment_bytes) HL_NOEXCEPT;
/// Replaces what the cache holds. What is restored must be of a cache of the same options (but for the capacity of one
/// that is no ring). HL_BAD_FILE says what is wrong, and the cache is as it was. HL_INVALID_ARGUMENT, HL_OUT_OF_MEMORY.
/// Threads: one writer.
HL_API hl_status hl_cache_restore(hl_cache* cache, const void* bytes, size_t bytes_count) HL_NOEXCEPT;
/// The same from a file. HL_IO, too. Threads: one writer.
HL_API hl_status hl_cache_restore_file(hl_cache* cache, const char* path) HL_NOEXCEPT;
/// The attachment that the last successful restore found; NULL if there is none. Its length goes to `bytes` unless that
/// is NULL. Valid until the next restore, or the cache's end. A fork has none. Threads: any.
HL_API const void* hl_cache_attachment(const hl_cache* cache, size_t* bytes) HL_NOEXCEPT;

// ------------------------------------------------------------------------------------- the multi-head attention layer
//
//   Q, K, V = x Wq + bq, x Wk + bk, x Wv + bv      split into heads
//   y       = concatenate(softmax(Q K^T / sqrt(head_dim)) V) Wo + bo

/// A layer's heads.
typedef struct hl_layer_options {
    size_t size;       ///< sizeof(hl_layer_options)
    int64_t heads;     ///< >= 1; head_dim is query's outputs / heads
    int64_t kv_heads;  ///< a divisor of heads; 0 = heads
} hl_layer_options;

/// Weights are applied as x W: [inputs, outputs], f32. A transposed weight is the same memory with its strides
/// exchanged. A bias of rank 0 is none.
typedef struct hl_layer_weights {
    size_t size;            ///< sizeof(hl_layer_weights)
    hl_tensor query;        ///< [d_model, heads * head_dim]
    hl_tensor key;          ///< [d_model, kv_heads * head_dim]
    hl_tensor value;        ///< [d_model, kv_heads * head_dim]
    hl_tensor output;       ///< [heads * head_dim, d_model]
    hl_tensor query_bias;   ///< [heads * head_dim]
    hl_tensor key_bias;     ///< [kv_heads * head_dim]
    hl_tensor value_bias;   ///< [kv_heads * head_dim]
    hl_tensor output_bias;  ///< [d_model]
} hl_layer_weights;

/// What a layer is.
typedef struct hl_layer_info {
    size_t size;       ///< sizeof(hl_layer_info), set by the caller
    int64_t d_model;   ///< elements of a row of x and y
    int64_t heads;     ///< query heads
    int64_t kv_heads;  ///< heads of keys and values
    int64_t head_dim;  ///< elements of a head
} hl_layer_info;

/// Makes a layer, which copies the weights to the context's memory and never changes. HL_INVALID_ARGUMENT,
/// HL_OUT_OF_MEMORY. Threads: any.
HL_API hl_status hl_layer_create(hl_context* context, const hl_layer_options* options, const hl_layer_weights* weights,
                                 hl_layer** layer) HL_NOEXCEPT;
/// Threads: any, but not while a call uses it.
HL_API void hl_layer_destroy(hl_layer* layer) HL_NOEXCEPT;
/// Fills `info` as far as its size says. HL_INVALID_ARGUMENT. Threads: any.
HL_API hl_status hl_layer_get_info(const hl_layer* layer, hl_layer_info* info) HL_NOEXCEPT;

/// x [batch, length, d_model] -> y of the same shape; each sequence attends to itself, causally if the options say so.
/// HL_INVALID_ARGUMENT, HL_OUT_OF_MEMORY, HL_CANCELLED. Threads: any.
HL_API hl_status hl_layer_forward(hl_context* context, const hl_layer* layer, const hl_tensor* x,
                                  const hl_attention_options* options, const hl_tensor* y) HL_NOEXCEPT;

/// x [length, d_model] -> y of the same shape: appends the rows' keys and values to a layer of the cache and attends
/// over all it holds, causally. If it fails, the layer holds what it held before. HL_INVALID_ARGUMENT, HL_WOULD_FORGET,
/// HL_OUT_OF_MEMORY, HL_CANCELLED. Threads: one writer.
HL_API hl_status hl_layer_forward_cached(hl_context* context, const hl_layer* layer, const hl_tensor* x,
                                         hl_cache* cache, size_t cache_layer, const hl_attention_options* options,
                                         const hl_tensor* y) HL_NOEXCEPT;

// ---------------------------------------------------------------------------------------------------- decoder models
//
//     hl_model* model = NULL;
//     hl_model_load(context, "models/llama", NULL, &model);
//     hl_generate_options options;
//     hl_generate_options_init(&options, sizeof options);
//     options.on_text = print;                           // int32_t print(void* user, const char* piece, size_t bytes)
//     hl_generate(context, model, "It is a truth", HL_TO_THE_END, &options, NULL);
//     hl_model_destroy(model);
//
// In a build without "models" (hl_has_feature()) these functions return HL_UNSUPPORTED.

/// For a text's length: it ends with a 0.
#define HL_TO_THE_END ((size_t)-1)

/// How linear layers store their weights.
enum hl_weight_type {
    HL_WEIGHTS_AS_FILE = 0,  ///< as the file does
    HL_WEIGHTS_F32 = 1,      ///< binary32
    HL_WEIGHTS_F16 = 2,      ///< binary16, rounded to nearest even
    HL_WEIGHTS_BF16 = 3,     ///< bfloat16, rounded to nearest even
    HL_WEIGHTS_INT8 = 4,     ///< quantised in groups of 64 inputs
    HL_WEIGHTS_INT4 = 5      ///< quantised in groups of 64 inputs
};

/// How a model is loaded.
typedef struct hl_model_options {
    size_t size;      ///< set by hl_model_options_init()
    int32_t weights;  ///< an hl_weight_type
    int32_t map;      ///< yes: maps the weight file, which must not shrink. No: reads it into memory
    /// Called while weights are loaded, on the calling thread, with the bytes of the file that are done and all of
    /// them; may be NULL.
    void (*on_load)(void* user, uint64_t done, uint64_t all);
    void* user;  ///< passed to the callbacks
} hl_model_options;

/// As hl_attention_options_init().
HL_API hl_status hl_model_options_init(hl_model_options* options, size_t size) HL_NOEXCEPT;

/// The files of a model that the program holds in memory. Weights are not copied and must outlive the model.
typedef struct hl_model_files {
    size_t size;             ///< sizeof(hl_model_files)
    const char* name;        ///< for messages; NULL = "model"
    const char* config;      ///< config.json
    size_t config_bytes;     ///< of config, or HL_TO_THE_END
    const char* tokenizer;   ///< tokenizer.json
    size_t tokenizer_bytes;  ///< of tokenizer, or HL_TO_THE_END
    const void* weights;     ///< model.safetensors
    size_t weights_bytes;    ///< of weights
} hl_model_files;

/// Reads a Hugging Face folder: config.json, tokenizer.json, generation_config.json if it is there, and the
/// safetensors. HL_INVALID_ARGUMENT, HL_IO, HL_BAD_FILE (naming the key or tensor), HL_UNSUPPORTED (naming the
/// architecture or key), HL_OUT_OF_MEMORY. The model never changes. Threads: any.
HL_API hl_status hl_model_load(hl_context* context, const char* folder, const hl_model_options* options,
                               hl_model** model) HL_NOEXCEPT;
/// The same of files in memory. Threads: any.
HL_API hl_status hl_model_load_memory(hl_context* context, const hl_model_files* files, const hl_model_options* options,
                                      hl_model** model) HL_NOEXCEPT;
/// Threads: any, but not while a call uses it.
HL_API void hl_model_destroy(hl_model* model) HL_NOEXCEPT;

/// What a model is, from its config.json. Pointers are valid as long as the model.
typedef struct hl_model_info {
    size_t size;               ///< sizeof(hl_model_info), set by the caller
    const char* architecture;  ///< as config.json spells it
    int64_t vocab_size;        ///< elements of a row of logits
    int64_t hidden_size;       ///< elements of a hidden state
    int64_t layers;            ///< of the decoder
    int64_t heads;             ///< query heads
    int64_t kv_heads;          ///< heads of keys and values
    int64_t head_dim;          ///< elements of a head
    int64_t max_positions;     ///< tokens a text may have
    const int32_t* eos_ids;    ///< tokens that end a text
    size_t eos_ids_count;      ///< tokens in eos_ids
    int32_t has_bos_id;        ///< whether there is a bos_id
    int32_t bos_id;            ///< the token that begins a text
} hl_model_info;

/// Fills `info` as far as its size says. HL_INVALID_ARGUMENT, HL_UNSUPPORTED. Threads: any.
HL_API hl_status hl_model_get_info(const hl_model* model, hl_model_info* info) HL_NOEXCEPT;

/// The ids of a text in UTF-8 of `bytes` bytes, or HL_TO_THE_END. Their number goes to `count`, the ids to `ids` if
/// `capacity` has room for all; call with NULL and 0 to learn the number. HL_INVALID_ARGUMENT: no UTF-8, or ids is not
/// NULL and capacity is too small (count is then right all the same). HL_BAD_FILE, HL_OUT_OF_MEMORY. Threads: any.
HL_API hl_status hl_model_tokenize(const hl_model* model, const char* text, size_t bytes, int32_t add_special_tokens,
                                   int32_t* ids, size_t capacity, size_t* count) HL_NOEXCEPT;
/// The text of ids, which is valid UTF-8. Its length goes to `bytes`, the text and a 0 behind it to `text` if
/// `capacity` has room for bytes + 1; call with NULL and 0 to learn the length. Errors as hl_model_tokenize(). Threads:
/// any.
HL_API hl_status hl_model_detokenize(const hl_model* model, const int32_t* ids, size_t count,
                                     int32_t skip_special_tokens, char* text, size_t capacity,
                                     size_t* bytes) HL_NOEXCEPT;

/// Of a cache for a model. NULL in its place, and zeros, give an f32 cache of max_positions tokens.
typedef struct hl_model_cache_options {
    size_t size;          ///< sizeof(hl_model_cache_options)
    int32_t key_type;     ///< an hl_kv_type
    int32_t value_type;   ///< an hl_kv_type
    int64_t capacity;     ///< 1 to max_positions tokens; 0 = max_positions. Not with window
    int64_t window;       ///< of a ring; 0 = no ring
    int64_t sink_tokens;  ///< of the ring; 0 to window - 1
    int64_t max_chunk;    ///< as hl_cache_options.max_chunk; 0 = its default
    hl_pool* pool;        ///< as hl_cache_options.pool
    int32_t f16_sinks;    ///< as hl_cache_options.f16_sinks
    int32_t reserved;     ///< 0
} hl_model_cache_options;

/// Makes a cache for a model: its layers, their windows and rotary descriptions, its shape. HL_INVALID_ARGUMENT,
/// HL_UNSUPPORTED, HL_OUT_OF_MEMORY. Threads: any.
HL_API hl_status hl_model_cache_create(hl_context* context, const hl_model* model,
                                       const hl_model_cache_options* options, hl_cache** cache) HL_NOEXCEPT;

/// When a forward pass is to end before it is done: looked at between the tiles of its products and attention.
typedef struct hl_forward_options {
    size_t size;             ///< sizeof(hl_forward_options)
    hl_cancel* cancel;       ///< the call ends with HL_CANCELLED
    double timeout_seconds;  ///< the same so long after the call began; 0 = never
} hl_forward_options;

/// Appends `count` tokens to a cache of hl_model_cache_create() and writes the logits [m, vocab_size] that follow each
/// of the last m of them; NULL or rank 0 = none. If it fails, the cache is as it was. HL_INVALID_ARGUMENT,
/// HL_WOULD_FORGET, HL_OUT_OF_MEMORY, HL_UNSUPPORTED, HL_CANCELLED. Threads: one writer.
HL_API hl_status hl_model_forward(hl_context* context, const hl_model* model, const int32_t* tokens, size_t count,
                                  hl_cache* cache, const hl_tensor* logits,
                                  const hl_forward_options* options) HL_NOEXCEPT;

/// How a text is continued.
typedef struct hl_generate_options {
    size_t size;         ///< set by hl_generate_options_init()
    int64_t max_tokens;  ///< to generate at most; 256
    float temperature;   ///< logits are divided by it; 0 (the default) = the likeliest token
    float top_p;         ///< then only the smallest set that holds this share of the probability; 1
    int64_t top_k;       ///< before top_p, only the k largest; 0 = all
    uint64_t seed;       ///< the same seed, logits and options give the same tokens
    /// Texts that end the generation, and are cut off; UTF-8, ended by 0, 1 to 4,096 bytes each.
    const char* const* stop_texts;
    size_t stop_texts_count;  ///< texts in stop_texts
    int32_t ignore_eos;       ///< go on after an end-of-text token
    int32_t f16_sinks;        ///< as hl_cache_options.f16_sinks, of the ring that hl_generate() makes
    int32_t key_type;         ///< an hl_kv_type: of the cache that hl_generate() makes
    int32_t value_type;       ///< an hl_kv_type
    int64_t window;           ///< of the ring cache that hl_generate() makes; 0 = none
    int64_t sink_tokens;      ///< of that ring
    int64_t prefill_chunk;    ///< tokens of the prompt that are computed at once; 512
    /// Called after each chunk of the prompt, on the calling thread, with the tokens done and all of them; may be NULL.
    void (*on_prefill)(void* user, int64_t done, int64_t all);
    /// Called with each piece of text once it is certain, on the calling thread: whole characters of UTF-8, `bytes`
    /// bytes and a 0 behind them. Returns 0 to go on, anything else to end the generation. May be NULL.
    int32_t (*on_text)(void* user, const char* piece, size_t bytes);
    void* user;              ///< passed to the callbacks
    hl_cancel* cancel;       ///< ends the generation at once: what is computed of a token or chunk is dropped
    double timeout_seconds;  ///< the same so long after the call began; 0 = never
} hl_generate_options;

/// As hl_attention_options_init().
HL_API hl_status hl_generate_options_init(hl_generate_options* options, size_t size) HL_NOEXCEPT;

/// Continues a prompt of `bytes` bytes of UTF-8 (or HL_TO_THE_END), special tokens added as tokenizer.json says. What
/// was made goes to `generation`, which may be NULL where on_text is enough. A generation that was cancelled is HL_OK:
/// the reason says so. HL_INVALID_ARGUMENT, HL_BAD_FILE, HL_OUT_OF_MEMORY, HL_UNSUPPORTED. Threads: any.
HL_API hl_status hl_generate(hl_context* context, const hl_model* model, const char* prompt, size_t bytes,
                             const hl_generate_options* options, hl_generation** generation) HL_NOEXCEPT;
/// Continues what a cache of hl_model_cache_create() holds by `count` tokens, at least one, and then generates: for a
/// dialogue that goes on. key_type, value_type, window, sink_tokens and f16_sinks are not looked at. If it fails, a
/// cache that forgets may have got chunks of the prompt, and tokens; any other is as it was. Threads: one writer.
HL_API hl_status hl_generate_cached(hl_context* context, const hl_model* model, hl_cache* cache, const int32_t* prompt,
                                    size_t count, const hl_generate_options* options,
                                    hl_generation** generation) HL_NOEXCEPT;
/// Threads: any.
HL_API void hl_generation_destroy(hl_generation* generation) HL_NOEXCEPT;

/// Why a generation ended.
enum hl_stop_reason {
    HL_STOP_MAX_TOKENS = 0,    ///< as many as asked for
    HL_STOP_END_OF_TEXT = 1,   ///< an end-of-text token, which is not part of the result
    HL_STOP_TEXT = 2,          ///< one of stop_texts
    HL_STOP_CONTEXT_FULL = 3,  ///< the text has max_positions tokens, and the cache is no ring
    HL_STOP_CANCELLED = 4      ///< cancel, the timeout, or on_text
};

/// What was generated. Pointers are valid as long as the hl_generation.
typedef struct hl_generation_info {
    size_t size;                   ///< sizeof(hl_generation_info), set by the caller
    const int32_t* prompt_tokens;  ///< of the prompt, special tokens included
    size_t prompt_tokens_count;    ///< tokens in prompt_tokens
    const int32_t* tokens;         ///< the continuation alone
    size_t tokens_count;           ///< tokens in tokens
    const char* text;              ///< of the continuation alone, ended by 0
    size_t text_bytes;             ///< bytes of text, without the 0
    int32_t reason;                ///< an hl_stop_reason
    int32_t reserved;              ///< 0
    int64_t prefill_tokens;        ///< tokens of the prompt that were computed
    double prefill_seconds;        ///< what they took
    int64_t decode_steps;          ///< tokens that were computed one by one; the first one comes with the prefill
    double decode_seconds;         ///< what they took
    size_t kv_bytes;               ///< used by the cache at the end
} hl_generation_info;

/// Fills `info` as far as its size says. HL_INVALID_ARGUMENT, HL_UNSUPPORTED. Threads: any.
HL_API hl_status hl_generation_get_info(const hl_generation* generation, hl_generation_info* info) HL_NOEXCEPT;

#ifdef __cplusplus
}
#endif

#endif
