/* A forward of a Llama-like model on a CPU: one call per step, for any number of windows.
 *
 * A token's result depends on the model and the tokens it sees, and on nothing else: every sum has one order, whatever
 * the number of tokens, sequences and threads. So one token at a time and a window of seven give the same bits.
 *
 * Compiled for the machine it runs on (library.py). Code that differs by instruction set stands in the first part.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 16")
#define TILE 16  /* outputs of a matrix that are computed together */
#define GROUP 32 /* inputs of an output that share a scale and a minimum */
#define PAGE 16  /* tokens in a page of the KV cache */
#define AHEAD 6400 /* bytes: weights are fetched so long before they are needed */

/* ---- vectors of floats, as wide as the machine's */

#if defined(__AVX512BW__)
#define LANES 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define LANES 8
#else
#define LANES 4
#endif
#define PARTS (TILE / LANES)
#define ROWS (LANES == 16 ? 8 : 4) /* most tokens for which a tile is read once: as many as there are registers for */

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

INLINE floats load(const float *from) {
    floats v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE void store(float *to, floats v) { memcpy(to, &v, sizeof v); }

INLINE floats all(float x) {
#if LANES == 16
    return (floats){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
#elif LANES == 8
    return (floats){x, x, x, x, x, x, x, x};
#else
    return (floats){x, x, x, x};
#endif
}

INLINE floats fma_(floats a, floats b, floats c) {
#if LANES == 16
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE floats select_(ints mask, floats yes, floats no) { return (floats)((mask & (ints)yes) | (~mask & (ints)no)); }
INLINE floats max_(floats a, floats b) { return select_(a > b, a, b); }

INLINE float sum_(floats v) {
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += v[i];
    return sum;
}

/* exp for x <= 0 or small x; exactly zero where e^x is below float's smallest normal number */
INLINE floats exp_(floats x) {
    const ints alive = x > all(-87.0f);
    x = select_(alive, x, all(0.0f));
    x = select_(x < all(88.0f), x, all(88.0f));
    const floats magic = all(12582912.0f);
    const floats n = (x * all(1.44269504f) + magic) - magic;
    floats r = fma_(n, all(-0.693359375f), x);
    r = fma_(n, all(2.12194440e-4f), r);
    floats p = all(1.9875691500e-4f);
    p = fma_(p, r, all(1.3981999507e-3f));
    p = fma_(p, r, all(8.3334519073e-3f));
    p = fma_(p, r, all(4.1665795894e-2f));
    p = fma_(p, r, all(1.6666665459e-1f));
    p = fma_(p, r, all(5.0000001201e-1f));
    p = fma_(p, r * r, r + all(1.0f));
    const ints power = (__builtin_convertvector(n, ints) + 127) << 23;
    return (floats)(alive & (ints)(p * (floats)power));
}

/* Numbers below the smallest normal one count as zero: processors take a hundred times as long for them. */
INLINE unsigned flush_denormals(void) {
#if defined(__x86_64__)
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    return before;
#else
    return 0;
#endif
}

INLINE void restore_denormals(unsigned before) {
#if defined(__x86_64__)
    _mm_setcsr(before);
#else
    (void)before;
#endif
}

/* ---- 16-bit numbers */

INLINE uint16_t to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE float from_bf16(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

INLINE float from_half(uint16_t x) {
    const uint32_t sign = (uint32_t)(x & 0x8000) << 16, rest = x & 0x7fff;
    uint32_t bits = sign | ((rest << 13) + (112u << 23));
    float f;
    if (rest < 0x400) { /* zero and numbers below the smallest normal one */
        f = (float)rest * 5.9604644775390625e-8f;
        memcpy(&bits, &f, 4);
        bits |= sign;
    }
    memcpy(&f, &bits, 4);
    return f;
}

INLINE floats load_half(const uint16_t *from) {
#if LANES == 16
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif LANES == 8
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#elif defined(__aarch64__)
    return (floats)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
#else
    floats v;
    for (int i = 0; i < LANES; i++) v[i] = from_half(from[i]);
    return v;
#endif
}

/* ---- products of bytes: per 32-bit lane, the sum of four unsigned codes times four signed ones */

typedef uint8_t codes __attribute__((vector_size(4 * LANES)));

INLINE codes load_codes(const uint8_t *from) {
    codes v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE ints dot(ints sum, codes w, const int8_t *x) {
    int32_t four;
    memcpy(&four, x, 4);
#if defined(__AVX512VNNI__)
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(four));
#elif LANES == 16
    const __m512i even = _mm512_and_si512((__m512i)w, _mm512_set1_epi16(255)), odd = _mm512_srli_epi16((__m512i)w, 8);
    const __m512i b = _mm512_set1_epi32(four), low = _mm512_srai_epi16(_mm512_slli_epi16(b, 8), 8);
    const __m512i pairs = _mm512_madd_epi16(even, low), others = _mm512_madd_epi16(odd, _mm512_srai_epi16(b, 8));
    return sum + (ints)pairs + (ints)others;
#elif defined(__AVXVNNI__) && LANES == 8
    return (ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, _mm256_set1_epi32(four));
#elif LANES == 8
    const __m256i even = _mm256_and_si256((__m256i)w, _mm256_set1_epi16(255)), odd = _mm256_srli_epi16((__m256i)w, 8);
    const __m256i b = _mm256_set1_epi32(four), low = _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8);
    const __m256i pairs = _mm256_madd_epi16(even, low), others = _mm256_madd_epi16(odd, _mm256_srai_epi16(b, 8));
    return sum + (ints)pairs + (ints)others;
#elif defined(__SSE2__)
    const __m128i even = _mm_and_si128((__m128i)w, _mm_set1_epi16(255)), odd = _mm_srli_epi16((__m128i)w, 8);
    const __m128i b = _mm_set1_epi32(four), low = _mm_srai_epi16(_mm_slli_epi16(b, 8), 8);
    return sum + (ints)_mm_madd_epi16(even, low) + (ints)_mm_madd_epi16(odd, _mm_srai_epi16(b, 8));
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    return (ints)vusdotq_s32((int32x4_t)sum, (uint8x16_t)w, vreinterpretq_s8_s32(vdupq_n_s32(four)));
#elif defined(__ARM_FEATURE_DOTPROD) /* signed codes alone: w = (w - 128) + 64 + 64 */
    const int8x16_t b = vreinterpretq_s8_s32(vdupq_n_s32(four)), half = vdupq_n_s8(64);
    const int8x16_t signed_w = vreinterpretq_s8_u8(veorq_u8((uint8x16_t)w, vdupq_n_u8(128)));
    return (ints)vdotq_s32(vdotq_s32(vdotq_s32((int32x4_t)sum, signed_w, b), half, b), half, b);
#else
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < 4; j++) sum[i] += (int32_t)w[4 * i + j] * x[j];
    return sum;
#endif
}

/* ---- threads: all of them run the whole step and meet at barriers */

/* The entry of the OpenMP runtime that PyTorch has loaded: with threads of our own, both pools would fight for cores. */
extern void GOMP_parallel(void (*work)(void *), void *data, unsigned threads, unsigned flags);
extern int omp_get_thread_num(void), omp_get_num_threads(void), sched_yield(void);

typedef struct {
    int arrived, round;
    char apart[56];
} Barrier;

INLINE void pause_(void) {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void meet(Barrier *barrier, int threads) {
    if (threads == 1) return;
    const int round = __atomic_load_n(&barrier->round, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&barrier->arrived, 1, __ATOMIC_ACQ_REL) == threads) {
        __atomic_store_n(&barrier->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&barrier->round, round + 1, __ATOMIC_RELEASE);
        return;
    }
    for (int spins = 0; __atomic_load_n(&barrier->round, __ATOMIC_ACQUIRE) == round; spins++) {
        pause_();
        if (spins > 20000) sched_yield(); /* the other thread has lost its core */
    }
}

/* ---- what the caller describes: the structures of model.py */

enum { FLOAT32, BFLOAT16, INT8, INT4 };

/* Tiles of 16 outputs, one behind the other. FLOAT32: (inputs, 16). BFLOAT16: (inputs / 2, 16, 2). INT8 and INT4: for
 * each group of 32 inputs 16 scales and 16 minimums in half precision, then codes (8, 16, 4); of INT4, the first four of
 * the 8 in the low halves of bytes and the others in the high ones. A weight is minimum + scale * code. */
typedef struct {
    int32_t kind, inputs, outputs; /* padded to multiples of 32 */
    const void *tiles;
} Matrix;

/* Layers with a common input. */
typedef struct {
    int32_t count;
    Matrix weight[3];
    const float *bias[3]; /* or null */
    int32_t at[3];        /* where the outputs of each begin */
    Matrix a[3], b[3];    /* the factors of an adapter's changes; without outputs: no change */
} Linear;

typedef struct {
    const float *attention_norm, *mlp_norm, *query_norm, *key_norm; /* the last two may be null */
    Linear qkv, o, gate_up, down;
    int32_t sliding; /* 0: sees everything */
    void *keys, *values;
} Layer;

typedef struct {
    int32_t layers, hidden, heads, kv_heads, head_size, mlp, half_cache;
    float epsilon, rope_scale, attention_scale;
    const float *frequencies, *norm, *mask_row;
    int64_t mask_token;
    Matrix embedding, output;
    const float *output_bias;
    const Layer *layer;
} Model;

typedef struct {
    int32_t sequences, width, logits_wanted, table_pages, threads;
    const int64_t *tokens, *positions;     /* (sequences, width); tokens below zero are padding and left out */
    const int64_t *group, *offset, *reach; /* (sequences, width): see mars.method.visibility */
    const int64_t *slots, *cursors;        /* (sequences,) */
    const int64_t *page_table;             /* (slots, table_pages) */
    float *logits;                         /* (sequences, width, outputs) */
    char *scratch;                         /* memory for everything in between, aligned to 64 bytes */
    int64_t scratch_bytes;
} Inputs;

/* ---- inputs of products, in the form that a kind of matrix takes */

/* Rows in blocks of ROWS, so that those of a block are at constant distances: codes as (blocks, groups, ROWS, 32), numbers
 * as (blocks, groups, ROWS, 2), plain as (blocks, inputs, ROWS), half as (blocks, inputs / 2, ROWS, 2). */
typedef struct {
    int8_t *codes;
    float *numbers; /* of each group: the scale, and the sum of what the codes stand for */
    float *plain;
    uint16_t *half;
    int stride; /* inputs of a row */
} Input;

/* Where a row's inputs from `group` on begin. */
INLINE Input input_at(const Input *in, int row, int group) {
    const size_t block = row / ROWS * (size_t)(in->stride / GROUP) + group, lane = row % ROWS;
    return (Input){in->codes + (block * ROWS + lane) * GROUP, in->numbers + (block * ROWS + lane) * 2,
                   in->plain + block * GROUP * ROWS + lane, in->half + block * GROUP * ROWS + lane * 2, in->stride};
}

/* 32 inputs of a row. */
INLINE void encode(const Input *in, int kind, int row, int group, const float *x) {
    const Input at = input_at(in, row, group);
    if (kind == FLOAT32) {
        for (int i = 0; i < GROUP; i++) at.plain[i * ROWS] = x[i];
        return;
    }
    if (kind == BFLOAT16) {
        for (int i = 0; i < GROUP; i++) at.half[i / 2 * 2 * ROWS + i % 2] = to_bf16(x[i]);
        return;
    }
#if LANES == 16
    const __m512 low = _mm512_loadu_ps(x), high = _mm512_loadu_ps(x + 16);
    const __m512i size = _mm512_set1_epi32(0x7fffffff); /* floats without their sign are in the order of integers */
    const int32_t top = _mm512_reduce_max_epi32(_mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(low), size),
                                                                 _mm512_and_si512(_mm512_castps_si512(high), size)));
    float largest;
    memcpy(&largest, &top, 4);
    const float scale = largest / 127, inverse = largest > 0 ? 127 / largest : 0;
    const __m512i first = _mm512_cvtps_epi32(_mm512_mul_ps(low, _mm512_set1_ps(inverse)));
    const __m512i second = _mm512_cvtps_epi32(_mm512_mul_ps(high, _mm512_set1_ps(inverse)));
    const int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(first, second));
    _mm_storeu_si128((__m128i *)at.codes, _mm512_cvtepi32_epi8(first));
    _mm_storeu_si128((__m128i *)(at.codes + 16), _mm512_cvtepi32_epi8(second));
#else
    int32_t most = 0, bits[GROUP], whole[GROUP], sum = 0;
    memcpy(bits, x, sizeof bits);
    for (int i = 0; i < GROUP; i++) {
        const int32_t size = bits[i] & 0x7fffffff; /* floats without their sign are in the order of integers */
        most = size > most ? size : most;
    }
    float largest;
    memcpy(&largest, &most, 4);
    const float scale = largest / 127, inverse = largest > 0 ? 127 / largest : 0;
    for (int i = 0; i < GROUP; i++) whole[i] = (int32_t)rintf(x[i] * inverse);
    int8_t codes_of[GROUP];
    for (int i = 0; i < GROUP; i++) codes_of[i] = (int8_t)whole[i];
    for (int i = 0; i < GROUP; i++) sum += whole[i];
    memcpy(at.codes, codes_of, GROUP);
#endif
    at.numbers[0] = scale;
    at.numbers[1] = scale * (float)sum;
}

INLINE void fetch(const void *from, size_t bytes) {
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)from + i);
}

/* ---- products: 16 outputs of up to ROWS rows of a block, from `x` on; `count` is a constant wherever these are inlined */

INLINE void tile_of_codes(const uint8_t *tile, int groups, int bits, Input x, const int count, float out[ROWS][TILE]) {
    floats sums[ROWS][PARTS];
    UNROLLED for (int i = 0; i < count; i++)
        UNROLLED for (int p = 0; p < PARTS; p++) sums[i][p] = all(0);
    for (int group = 0; group < groups; group++) {
        const uint16_t *numbers = (const uint16_t *)tile;
        for (int line = 0; line < 1 + bits; line++) __builtin_prefetch(tile + AHEAD + 64 * line);
        UNROLLED for (int p = 0; p < PARTS; p++) {
            const floats scale = load_half(numbers + p * LANES), minimum = load_half(numbers + TILE + p * LANES);
            codes w[8];
            UNROLLED for (int j = 0; j < 8; j++) {
                if (bits == 8) {
                    w[j] = load_codes(tile + 64 + 64 * j + 4 * LANES * p);
                } else {
                    const codes both = load_codes(tile + 64 + 64 * (j & 3) + 4 * LANES * p);
#if LANES == 16
                    w[j] = (codes)(j < 4 ? (ints)both & 0x0f0f0f0f : ((ints)both >> 4) & 0x0f0f0f0f);
#else
                    w[j] = j < 4 ? both & 15 : both >> 4;
#endif
                }
            }
            UNROLLED for (int i = 0; i < count; i++) {
                ints sum = {0}, other = {0}; /* two sums: a processor adds to both at once */
                UNROLLED for (int j = 0; j < 4; j++) {
                    sum = dot(sum, w[j], x.codes + i * GROUP + 4 * j);
                    other = dot(other, w[j + 4], x.codes + i * GROUP + 4 * j + 16);
                }
                const floats product = __builtin_convertvector(sum + other, floats) * scale;
                sums[i][p] = fma_(product, all(x.numbers[2 * i]), sums[i][p]);
                sums[i][p] = fma_(minimum, all(x.numbers[2 * i + 1]), sums[i][p]);
            }
        }
        tile += 64 + 64 * bits;
        x.codes += ROWS * GROUP;
        x.numbers += ROWS * 2;
    }
    UNROLLED for (int i = 0; i < count; i++)
        UNROLLED for (int p = 0; p < PARTS; p++) store(out[i] + p * LANES, sums[i][p]);
}

INLINE void tile_of_floats(const float *tile, int inputs, Input x, const int count, float out[ROWS][TILE]) {
    floats sums[ROWS][PARTS];
    UNROLLED for (int i = 0; i < count; i++)
        UNROLLED for (int p = 0; p < PARTS; p++) sums[i][p] = all(0);
    for (int k = 0; k < inputs; k++, tile += TILE, x.plain += ROWS) {
        __builtin_prefetch((const char *)tile + AHEAD);
        UNROLLED for (int p = 0; p < PARTS; p++) {
            const floats w = load(tile + p * LANES);
            UNROLLED for (int i = 0; i < count; i++) sums[i][p] = fma_(w, all(x.plain[i]), sums[i][p]);
        }
    }
    UNROLLED for (int i = 0; i < count; i++)
        UNROLLED for (int p = 0; p < PARTS; p++) store(out[i] + p * LANES, sums[i][p]);
}

INLINE void tile_of_halves(const uint16_t *tile, int inputs, Input x, const int count, float out[ROWS][TILE]) {
    floats sums[ROWS][PARTS];
    UNROLLED for (int i = 0; i < count; i++)
        UNROLLED for (int p = 0; p < PARTS; p++) sums[i][p] = all(0);
    for (int k = 0; k < inputs; k += 2, tile += 2 * TILE, x.half += 2 * ROWS) {
        __builtin_prefetch((const char *)tile + AHEAD);
        UNROLLED for (int p = 0; p < PARTS; p++) {
            ints pairs;
            memcpy(&pairs, tile + p * 2 * LANES, sizeof pairs);
#if defined(__AVX512BF16__)
            UNROLLED for (int i = 0; i < count; i++) {
                int32_t two;
                memcpy(&two, x.half + 2 * i, 4);
                const __m512i both = _mm512_set1_epi32(two);
                sums[i][p] = (floats)_mm512_dpbf16_ps((__m512)sums[i][p], (__m512bh)pairs, (__m512bh)both);
            }
#else
            const floats even = (floats)(pairs << 16), odd = (floats)(pairs & (int32_t)0xffff0000);
            UNROLLED for (int i = 0; i < count; i++) {
                sums[i][p] = fma_(even, all(from_bf16(x.half[2 * i])), sums[i][p]);
                sums[i][p] = fma_(odd, all(from_bf16(x.half[2 * i + 1])), sums[i][p]);
            }
#endif
        }
    }
    UNROLLED for (int i = 0; i < count; i++)
        UNROLLED for (int p = 0; p < PARTS; p++) store(out[i] + p * LANES, sums[i][p]);
}

static size_t tile_bytes(const Matrix *m) {
    switch (m->kind) {
        case FLOAT32: return (size_t)m->inputs * TILE * 4;
        case BFLOAT16: return (size_t)m->inputs * TILE * 2;
        case INT8: return (size_t)m->inputs / GROUP * (64 + 64 * 8);
        default: return (size_t)m->inputs / GROUP * (64 + 64 * 4);
    }
}

INLINE void tile_of(const Matrix *m, const void *tile, Input x, const int count, float out[ROWS][TILE]) {
    switch (m->kind) {
        case FLOAT32: tile_of_floats(tile, m->inputs, x, count, out); break;
        case BFLOAT16: tile_of_halves(tile, m->inputs, x, count, out); break;
        case INT8: tile_of_codes(tile, m->inputs / GROUP, 8, x, count, out); break;
        default: tile_of_codes(tile, m->inputs / GROUP, 4, x, count, out); break;
    }
}

/* The groups of 32 columns out of so many columns that thread `me` works on, in every phase of a step: what a thread
 * has computed stays in its core. */
INLINE void share(int columns, int me, int threads, int *from, int *to) {
    *from = (int)((int64_t)(columns / GROUP) * me / threads);
    *to = (int)((int64_t)(columns / GROUP) * (me + 1) / threads);
}

/* Rows of a product: inputs from `group` on, and where their outputs go. */
typedef struct {
    const Input *in;
    int group, first, count;
    float *out;
    size_t stride;
    const int *places; /* rows of `out`, by number of the row; null: the same as those of `in` */
} Rows;

/* out = weight x + bias, or added to it, for this thread's share of the outputs. */
static void product(const Matrix *m, const float *bias, const Rows *rows, int adds, int me, int threads) {
    int from, to;
    share(m->outputs, me, threads, &from, &to);
    const size_t bytes = tile_bytes(m);
    const int end = rows->first + rows->count;
    for (int t = from * GROUP / TILE; t < to * GROUP / TILE; t++) {
        const void *tile = (const char *)m->tiles + t * bytes;
        for (int row = rows->first, now; row < end; row += now) {
            float y[ROWS][TILE];
            const Input x = input_at(rows->in, row, rows->group);
            now = ROWS - row % ROWS;
            if (now > end - row) now = end - row;
            switch (now) {
                case 1: tile_of(m, tile, x, 1, y); break;
                case 2: tile_of(m, tile, x, 2, y); break;
                case 3: tile_of(m, tile, x, 3, y); break;
#if LANES == 16
                case 4: tile_of(m, tile, x, 4, y); break;
                case 5: tile_of(m, tile, x, 5, y); break;
                case 6: tile_of(m, tile, x, 6, y); break;
                case 7: tile_of(m, tile, x, 7, y); break;
#endif
                default: tile_of(m, tile, x, ROWS, y); break;
            }
            for (int i = 0; i < now; i++) {
                const int place = rows->places ? rows->places[row + i] : row + i;
                float *at = rows->out + place * rows->stride + t * TILE;
                for (int p = 0; p < PARTS; p++) {
                    floats sum = load(y[i] + p * LANES);
                    if (bias) sum += load(bias + t * TILE + p * LANES);
                    if (adds) sum += load(at + p * LANES);
                    store(at + p * LANES, sum);
                }
            }
        }
    }
}

/* 32 inputs of a row of a matrix as floats. */
static void row_of(const Matrix *m, int64_t row, int group, float *out) {
    const char *tile = (const char *)m->tiles + row / TILE * tile_bytes(m);
    const int lane = row % TILE, bits = m->kind == INT8 ? 8 : 4;
    const uint8_t *codes_of = (const uint8_t *)tile + (size_t)group * (64 + 64 * bits);
    const uint16_t *numbers = (const uint16_t *)codes_of;
    for (int i = 0; i < GROUP; i++) {
        const int k = group * GROUP + i, j = i / 4;
        if (m->kind == FLOAT32) {
            out[i] = ((const float *)tile)[k * TILE + lane];
        } else if (m->kind == BFLOAT16) {
            out[i] = from_bf16(((const uint16_t *)tile)[k / 2 * 2 * TILE + 2 * lane + k % 2]);
        } else {
            const uint8_t byte = codes_of[64 + 64 * (bits == 8 ? j : j & 3) + 4 * lane + i % 4];
            const int code = bits == 8 ? byte : j < 4 ? byte & 15 : byte >> 4;
            out[i] = from_half(numbers[lane]) * (float)code + from_half(numbers[TILE + lane]);
        }
    }
}

/* ---- a step */

typedef struct {
    const Model *model;
    const Inputs *inputs;
    Barrier *barrier;
    int count, masks, threads; /* rows that are not padding; how many of them, the last ones, are masks */
    int *window_row;           /* where each row is in the windows */
    Input in, wide, low;       /* inputs of products: the residual stream; attention and MLP; an adapter's second ones */
    float *x, *y;              /* the residual stream, and outputs of a product */
    float *squares;            /* (rows, groups of x): sums over groups of the residual stream */
    float *projected;          /* outputs of an adapter's first factors */
    float *angles;             /* (rows, head size): cosines, then sines */
    float *scores;             /* (threads, 4, most) */
    size_t x_stride, y_stride, low_stride, most;
    int kind, me;
} Step;

static void meet_all(const Step *s) { meet(s->barrier, s->threads); }

/* The sums of squares of this thread's share of the residual stream. */
static void square(const Step *s) {
    int from, to;
    share((int)s->x_stride, s->me, s->threads, &from, &to);
    for (int row = 0; row < s->count; row++)
        for (int group = from; group < to; group++) {
            floats sum = all(0);
            for (int i = 0; i < GROUP; i += LANES) {
                const floats v = load(s->x + row * s->x_stride + group * GROUP + i);
                sum = fma_(v, v, sum);
            }
            s->squares[row * (s->x_stride / GROUP) + group] = sum_(sum);
        }
}

/* The norm of the residual stream as the input of products. Ends at a barrier. */
static void encode_norms(const Step *s, const float *weight) {
    const Model *m = s->model;
    const int groups = (int)s->x_stride / GROUP;
    int from, to;
    square(s);
    meet_all(s);
    share((int)s->x_stride, s->me, s->threads, &from, &to);
    for (int row = 0; row < s->count; row++) {
        float sum = 0, normed[GROUP];
        for (int group = 0; group < groups; group++) sum += s->squares[row * groups + group];
        const floats scale = all(1 / sqrtf(sum / m->hidden + m->epsilon));
        for (int group = from; group < to; group++) {
            const int at = group * GROUP;
            for (int i = 0; i < GROUP; i += LANES)
                store(normed + i, load(weight + at + i) * (load(s->x + row * s->x_stride + at + i) * scale));
            encode(&s->in, s->kind, row, group, normed);
        }
    }
    meet_all(s);
}

/* Products of all rows, with the adapter's change for masks. */
static void linear(const Step *s, const Linear *l, const Input *in, float *out, size_t stride, int adds) {
    const int text = s->count - s->masks;
    for (int i = 0; i < l->count; i++) {
        const Rows all_rows = {in, 0, 0, s->count, out + l->at[i], stride};
        product(&l->weight[i], l->bias[i], &all_rows, adds, s->me, s->threads);
    }
    if (!s->masks || !l->a[0].outputs) return;
    int first = 0, from, to; /* the first columns of the projection of each layer */
    for (int i = 0; i < l->count; first += l->a[i++].outputs) {
        const Rows masks = {in, 0, text, s->masks, s->projected + first, s->low_stride};
        product(&l->a[i], 0, &masks, 0, s->me, s->threads);
        share(l->a[i].outputs, s->me, s->threads, &from, &to);
        for (int row = text; row < s->count; row++)
            for (int group = from; group < to; group++)
                encode(&s->low, l->b[i].kind, row, first / GROUP + group, masks.out + row * s->low_stride + group * GROUP);
    }
    meet_all(s);
    for (int i = first = 0; i < l->count; first += l->a[i++].outputs) {
        const Rows masks = {&s->low, first / GROUP, text, s->masks, out + l->at[i], stride};
        product(&l->b[i], 0, &masks, 1, s->me, s->threads);
    }
}

static void normalise(float *x, const float *weight, int size, float epsilon) {
    float sum = 0;
    for (int i = 0; i < size; i++) sum += x[i] * x[i];
    const float scale = 1 / sqrtf(sum / size + epsilon);
    for (int i = 0; i < size; i++) x[i] = weight[i] * (x[i] * scale);
}

static void rotate(float *x, int size, const float *angles) {
    const int half = size / 2;
    for (int i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half], cosine = angles[i], sine = angles[i + half];
        x[i] = a * cosine - b * sine;
        x[i + half] = b * cosine + a * sine;
    }
}

INLINE size_t page_of(const Inputs *in, int sequence, int64_t index) {
    int64_t page = index / PAGE;
    if (page >= in->table_pages) page = in->table_pages - 1; /* the last windows of a text reach past it */
    return (size_t)in->page_table[in->slots[sequence] * in->table_pages + page];
}

/* Stores a row's key and value of one head. In float32: keys as (pages, heads, head size, 16 tokens), values as (pages,
 * heads, head size / 16, 16 tokens, 16). In bfloat16, numbers that are summed lie in pairs: keys as (pages, heads, head
 * size / 2, 16 tokens, 2), values as (pages, heads, head size / 16, 8, 16, 2 tokens). */
static void store_key(const Step *s, const Layer *layer, int row, int head) {
    const Model *m = s->model;
    const Inputs *in = s->inputs;
    const int size = m->head_size, padded = (size + 15) / 16 * 16, window_row = s->window_row[row];
    const int sequence = window_row / in->width;
    float *key = s->y + row * s->y_stride + layer->qkv.at[1] + head * size;
    const float *value = s->y + row * s->y_stride + layer->qkv.at[2] + head * size;
    if (layer->key_norm) normalise(key, layer->key_norm, size, m->epsilon);
    rotate(key, size, s->angles + row * size);
    const int64_t index = in->cursors[sequence] + window_row % in->width;
    const size_t token = index % PAGE, block = page_of(in, sequence, index) * m->kv_heads + head;
    const size_t key_at = block * size * PAGE, value_at = block * padded * PAGE;
    if (m->half_cache) {
        uint16_t *keys = (uint16_t *)layer->keys + key_at + token * 2;
        uint16_t *values = (uint16_t *)layer->values + value_at + token / 2 * 32 + token % 2;
        for (int i = 0; i < size; i++) keys[i / 2 * 2 * PAGE + i % 2] = to_bf16(key[i]);
        for (int i = 0; i < size; i++) values[i / 16 * 16 * PAGE + i % 16 * 2] = to_bf16(value[i]);
    } else {
        float *keys = (float *)layer->keys + key_at + token, *values = (float *)layer->values + value_at + token * 16;
        for (int i = 0; i < size; i++) keys[i * PAGE] = key[i];
        for (int i = 0; i < size; i++) values[i / 16 * 16 * PAGE + i % 16] = value[i];
    }
}

/* What pairs in bfloat16 are multiplied by: bfloat16 too where the processor multiplies it, floats elsewhere. */
#if defined(__AVX512BF16__)
typedef uint16_t number;
#else
typedef float number;
#endif

INLINE void store_numbers(number *to, floats v) {
#if defined(__AVX512BF16__)
    const __m256bh half = _mm512_cvtneps_pbh((__m512)v);
    memcpy(to, &half, sizeof half);
#else
    store(to, v);
#endif
}

/* sum + pairs[0] * numbers[0] + pairs[1] * numbers[1] in each lane */
INLINE floats add_pairs(floats sum, const uint16_t *pairs_at, const number *numbers) {
    ints pairs;
    memcpy(&pairs, pairs_at, sizeof pairs);
#if defined(__AVX512BF16__)
    int32_t two;
    memcpy(&two, numbers, 4);
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32(two));
#else
    sum = fma_((floats)(pairs << 16), all(numbers[0]), sum);
    return fma_((floats)(pairs & (int32_t)0xffff0000), all(numbers[1]), sum);
#endif
}

/* May a token of a window see the cache at `index`? The rule of mars.method.visibility. */
static int sees(const Inputs *in, int window_row, int64_t cursor, int64_t index, int64_t oldest) {
    if (index < cursor) return index >= oldest;
    const int64_t column = index - cursor;
    if (column >= in->width) return 0;
    const int key = (int)(window_row / in->width * in->width + column);
    if (in->tokens[key] < 0 || cursor + in->offset[key] < oldest) return 0;
    const int text = in->group[key] == 0 && in->offset[key] <= in->reach[window_row];
    return text || (in->group[key] == in->group[window_row] && in->offset[key] <= in->offset[window_row]);
}

#define SUMS 4 /* partial sums of attention: a processor adds to all of them at once */

/* `count` query heads of a row that share keys, into `out`; `half` and `count` are constants where this is inlined. */
INLINE void attend_heads(const Step *s, const Layer *layer, int row, int kv_head, const float *query, const int count,
                         const int half, float *out) {
    const Model *m = s->model;
    const Inputs *in = s->inputs;
    const int size = m->head_size, padded = (size + 15) / 16 * 16;
    const int window_row = s->window_row[row], sequence = window_row / in->width;
    const int64_t cursor = in->cursors[sequence], here = cursor + in->offset[window_row];
    const int64_t oldest = layer->sliding && here - layer->sliding + 1 > 0 ? here - layer->sliding + 1 : 0;
    const int64_t first = oldest / PAGE, last = (cursor + window_row % in->width) / PAGE; /* later ones see no more */
    const size_t most = s->most;
    float *scores = s->scores + s->me * 4 * most;
    number numbers[half ? count * size + TILE : 1]; /* the query */
    for (int i = 0; half && i < count * size; i += LANES) store_numbers(numbers + i, load(query + i));

    floats highest[4][PARTS];
    UNROLLED for (int h = 0; h < count; h++)
        UNROLLED for (int p = 0; p < PARTS; p++) highest[h][p] = all(-1e30f);
    for (int64_t page = first; page <= last; page++) {
        const size_t block = page_of(in, sequence, page * PAGE) * m->kv_heads + kv_head;
        const size_t next = page_of(in, sequence, (page + 1) * PAGE) * m->kv_heads + kv_head, bytes = half ? 2 : 4;
        fetch((const char *)layer->keys + next * size * PAGE * bytes, size * PAGE * bytes);
        fetch((const char *)layer->values + block * padded * PAGE * bytes, padded * PAGE * bytes);
        floats dots[4][PARTS];
        UNROLLED for (int p = 0; p < PARTS; p++) {
            floats sums[SUMS][4];
            UNROLLED for (int j = 0; j < SUMS; j++)
                UNROLLED for (int h = 0; h < count; h++) sums[j][h] = all(0);
            if (half) {
                const uint16_t *keys = (const uint16_t *)layer->keys + block * size * PAGE + p * 2 * LANES;
                for (int i = 0; i < size; i += 2 * SUMS)
                    UNROLLED for (int j = 0; j < SUMS; j++)
                        if (j < 2 || i + 2 * j < size) /* heads have multiples of four numbers */
                            UNROLLED for (int h = 0; h < count; h++)
                                sums[j][h] = add_pairs(sums[j][h], keys + (i + 2 * j) * PAGE, numbers + h * size + i + 2 * j);
            } else {
                const float *keys = (const float *)layer->keys + block * size * PAGE + p * LANES;
                for (int i = 0; i < size; i += SUMS)
                    UNROLLED for (int j = 0; j < SUMS; j++)
                        UNROLLED for (int h = 0; h < count; h++)
                            sums[j][h] = fma_(load(keys + (i + j) * PAGE), all(query[h * size + i + j]), sums[j][h]);
            }
            UNROLLED for (int h = 0; h < count; h++) dots[h][p] = (sums[0][h] + sums[1][h]) + (sums[2][h] + sums[3][h]);
        }
        float *to = scores + (page - first) * PAGE;
        const int whole = page * PAGE >= oldest && (page + 1) * PAGE <= cursor;
        int32_t visible[PAGE];
        if (!whole)
            for (int t = 0; t < PAGE; t++) visible[t] = -sees(in, window_row, cursor, page * PAGE + t, oldest);
        UNROLLED for (int h = 0; h < count; h++)
            UNROLLED for (int p = 0; p < PARTS; p++) {
                floats score = dots[h][p] * all(m->attention_scale);
                if (!whole) {
                    ints mask;
                    memcpy(&mask, visible + p * LANES, sizeof mask);
                    score = select_(mask, score, all(-1e30f));
                }
                highest[h][p] = max_(highest[h][p], score);
                store(to + h * most + p * LANES, score);
            }
    }
    const int64_t length = (last - first + 1) * PAGE;
    float total[4];
    UNROLLED for (int h = 0; h < count; h++) {
        float top = -1e30f;
        for (int p = 0; p < PARTS; p++)
            for (int i = 0; i < LANES; i++) top = highest[h][p][i] > top ? highest[h][p][i] : top;
        floats sums[PARTS];
        for (int p = 0; p < PARTS; p++) sums[p] = all(0);
        for (int64_t t = 0; t < length; t += TILE)
            for (int p = 0; p < PARTS; p++) {
                const floats weight = exp_(load(scores + h * most + t + p * LANES) - all(top));
                if (half) store_numbers((number *)(scores + h * most) + t + p * LANES, weight); /* behind what is read */
                else store(scores + h * most + t + p * LANES, weight);
                sums[p] += weight;
            }
        total[h] = 0;
        for (int p = 0; p < PARTS; p++) total[h] += sum_(sums[p]);
    }
    for (int part = 0; part < padded; part += LANES) {
        floats mixed[SUMS][4];
        UNROLLED for (int j = 0; j < SUMS; j++)
            UNROLLED for (int h = 0; h < count; h++) mixed[j][h] = all(0);
        for (int64_t page = first; page <= last; page++) {
            const size_t block = page_of(in, sequence, page * PAGE) * m->kv_heads + kv_head;
            const size_t at = block * padded * PAGE + part / 16 * 16 * PAGE;
            const int64_t t = (page - first) * PAGE;
            if (half) {
                const uint16_t *values = (const uint16_t *)layer->values + at + part % 16 * 2;
                UNROLLED for (int i = 0; i < PAGE; i += 2)
                    UNROLLED for (int h = 0; h < count; h++)
                        mixed[i / 2 % SUMS][h] =
                            add_pairs(mixed[i / 2 % SUMS][h], values + i * 16, (number *)(scores + h * most) + t + i);
            } else {
                const float *values = (const float *)layer->values + at + part % 16;
                UNROLLED for (int i = 0; i < PAGE; i++)
                    UNROLLED for (int h = 0; h < count; h++)
                        mixed[i % SUMS][h] = fma_(load(values + i * 16), all(scores[h * most + t + i]), mixed[i % SUMS][h]);
            }
        }
        UNROLLED for (int h = 0; h < count; h++) {
            float values[LANES];
            const floats sum = (mixed[0][h] + mixed[1][h]) + (mixed[2][h] + mixed[3][h]);
            store(values, sum / all(total[h]));
            const int real = size - part < LANES ? size - part : LANES;
            if (real > 0) memcpy(out + h * size + part, values, real * sizeof(float));
        }
    }
}

#define ATTEND(n)                                                                    \
    case n:                                                                          \
        if (m->half_cache) attend_heads(s, layer, row, kv_head, query, n, 1, out);   \
        else attend_heads(s, layer, row, kv_head, query, n, 0, out);                 \
        break;

/* Attention of a row's heads that share keys, as the input of a product: padded to whole groups. */
static void attend(const Step *s, const Layer *layer, int row, int kv_head) {
    const Model *m = s->model;
    const int size = m->head_size, folds = m->heads / m->kv_heads, groups = (folds * size + GROUP - 1) / GROUP;
    float *queries = s->y + row * s->y_stride + layer->qkv.at[0] + kv_head * folds * size;
    float mixed[groups * GROUP];
    memset(mixed, 0, sizeof mixed);
    for (int fold = 0; fold < folds; fold++) {
        if (layer->query_norm) normalise(queries + fold * size, layer->query_norm, size, m->epsilon);
        rotate(queries + fold * size, size, s->angles + row * size);
    }
    for (int done = 0; done < folds; done += 4) {
        const float *query = queries + done * size;
        float *out = mixed + done * size;
        switch (folds - done < 4 ? folds - done : 4) { ATTEND(1) ATTEND(2) ATTEND(3) ATTEND(4) }
    }
    for (int group = 0; group < groups; group++)
        encode(&s->wide, s->kind, row, kv_head * groups + group, mixed + group * GROUP);
}

/* silu(gate) * up of this thread's share, as the input of a product */
static void activate(const Step *s, const Layer *layer) {
    int from, to;
    share(layer->gate_up.weight[0].outputs, s->me, s->threads, &from, &to);
    for (int row = 0; row < s->count; row++) {
        const float *gate = s->y + row * s->y_stride, *up = gate + layer->gate_up.at[1];
        for (int group = from; group < to; group++) {
            float mixed[GROUP];
            for (int i = 0; i < GROUP; i += LANES) {
                const floats g = load(gate + group * GROUP + i);
                store(mixed + i, g / (all(1) + exp_(-g)) * load(up + group * GROUP + i));
            }
            encode(&s->wide, s->kind, row, group, mixed);
        }
    }
}

/* Embeddings, and what rotates the heads. */
static void embed(const Step *s) {
    const Model *m = s->model;
    const int half = m->head_size / 2;
    int from, to;
    share((int)s->x_stride, s->me, s->threads, &from, &to);
    for (int row = 0; row < s->count; row++) {
        const int64_t token = s->inputs->tokens[s->window_row[row]];
        for (int group = from; group < to; group++) {
            float *x = s->x + row * s->x_stride + group * GROUP;
            if (token == m->mask_token) memcpy(x, m->mask_row + group * GROUP, GROUP * sizeof *x);
            else row_of(&m->embedding, token, group, x);
        }
    }
    for (int row = s->me; row < s->count; row += s->threads) {
        float *angles = s->angles + row * m->head_size;
        for (int i = 0; i < half; i++) {
            const float angle = (float)s->inputs->positions[s->window_row[row]] * m->frequencies[i];
            angles[i] = cosf(angle) * m->rope_scale;
            angles[half + i] = sinf(angle) * m->rope_scale;
        }
    }
}

/* A thread's share of all heads of keys and rows, head by head. In a small step a thread has neighbouring rows, whose keys
 * lie in the same lines of a cache; in a large one every second row or so, since the later ones have more to read. */
typedef struct {
    int number, end, step;
} Unit;

static Unit first_unit(const Step *s) {
    const int units = s->count * s->model->kv_heads;
    if (s->count > 2 * ROWS) return (Unit){s->me, units, s->threads};
    return (Unit){units * s->me / s->threads, units * (s->me + 1) / s->threads, 1};
}

/* The whole step, as each thread runs it. */
static void run(Step *s) {
    const Model *m = s->model;
    embed(s);
    for (int l = 0; l < m->layers; l++) {
        const Layer *layer = m->layer + l;
        encode_norms(s, layer->attention_norm);
        linear(s, &layer->qkv, &s->in, s->y, s->y_stride, 0);
        meet_all(s);
        for (Unit u = first_unit(s); u.number < u.end; u.number += u.step)
            store_key(s, layer, u.number % s->count, u.number / s->count);
        meet_all(s);
        if (l == m->layers - 1 && !s->inputs->logits_wanted) return; /* prefill wants keys and values alone */
        s->wide.stride = layer->o.weight[0].inputs;
        for (Unit u = first_unit(s); u.number < u.end; u.number += u.step)
            attend(s, layer, u.number % s->count, u.number / s->count);
        meet_all(s);
        linear(s, &layer->o, &s->wide, s->x, s->x_stride, 1);
        encode_norms(s, layer->mlp_norm);
        linear(s, &layer->gate_up, &s->in, s->y, s->y_stride, 0);
        s->wide.stride = layer->down.weight[0].inputs;
        activate(s, layer);
        meet_all(s);
        linear(s, &layer->down, &s->wide, s->x, s->x_stride, 1);
    }
    encode_norms(s, m->norm);
    const Rows rows = {&s->in, 0, 0, s->count, s->inputs->logits, m->output.outputs, s->window_row};
    product(&m->output, m->output_bias, &rows, 0, s->me, s->threads);
}

/* ---- what is called */

static size_t padded(size_t size) { return (size + 63) / 64 * 64; }

/* The next `bytes` of scratch memory; only counted if there is none yet. */
static void *carve(char *scratch, size_t *used, size_t bytes) {
    void *at = scratch ? scratch + *used : 0;
    *used += padded(bytes);
    return at;
}

static void carve_input(Input *in, char *scratch, size_t *used, size_t rows, size_t width) {
    rows = (rows + ROWS - 1) / ROWS * ROWS;
    in->codes = carve(scratch, used, rows * width);
    in->numbers = carve(scratch, used, rows * width / GROUP * 8);
    in->plain = carve(scratch, used, rows * width * 4);
    in->half = carve(scratch, used, rows * width * 2);
    in->stride = (int)width;
}

static void widen(int *widest, int size) {
    if (size > *widest) *widest = size;
}

/* Lays out a step's memory; returns how much it takes. */
static size_t lay_out(Step *s, char *scratch) {
    const Model *m = s->model;
    const Inputs *in = s->inputs;
    const size_t rows = (size_t)in->sequences * in->width;
    int widest = 0, outputs = 0, low = 0;
    int64_t longest = 0;
    for (const Layer *layer = m->layer; layer < m->layer + m->layers; layer++) {
        const Linear *linears[] = {&layer->qkv, &layer->o, &layer->gate_up, &layer->down};
        for (int i = 0; i < 4; i++) {
            int ranks = 0;
            widen(&widest, linears[i]->weight[0].inputs);
            for (int part = 0; part < linears[i]->count; part++) {
                widen(&outputs, linears[i]->at[part] + linears[i]->weight[part].outputs);
                ranks += linears[i]->a[part].outputs;
            }
            widen(&low, ranks);
        }
    }
    for (int i = 0; i < in->sequences; i++)
        if (in->cursors[i] > longest) longest = in->cursors[i];
    s->x_stride = m->output.inputs;
    s->y_stride = outputs;
    s->low_stride = low;
    s->most = (longest + in->width + 2 * PAGE) / PAGE * PAGE;
    size_t used = 0;
    s->barrier = carve(scratch, &used, sizeof(Barrier));
    s->window_row = carve(scratch, &used, rows * sizeof(int));
    s->x = carve(scratch, &used, rows * s->x_stride * 4);
    s->y = carve(scratch, &used, rows * s->y_stride * 4);
    s->squares = carve(scratch, &used, rows * s->x_stride / GROUP * 4);
    s->projected = carve(scratch, &used, rows * s->low_stride * 4);
    s->angles = carve(scratch, &used, rows * m->head_size * 4);
    s->scores = carve(scratch, &used, in->threads * s->most * 4 * 4);
    carve_input(&s->in, scratch, &used, rows, s->x_stride);
    carve_input(&s->wide, scratch, &used, rows, widest);
    carve_input(&s->low, scratch, &used, rows, low);
    return used;
}

static void run_thread(void *step) {
    Step mine = *(const Step *)step;
    mine.threads = omp_get_num_threads();
    mine.me = omp_get_thread_num();
    const unsigned before = flush_denormals();
    run(&mine);
    restore_denormals(before);
}

/* Runs the windows: logits, if they are wanted, and keys and values into the cache. Returns 0, or does nothing and
 * returns how many bytes of scratch memory it needs. */
int64_t mars_step(const Model *model, const Inputs *inputs) {
    Step step = {.model = model, .inputs = inputs, .kind = model->layer[0].qkv.weight[0].kind};
    const int64_t needed = (int64_t)lay_out(&step, 0);
    if (needed > inputs->scratch_bytes) return needed;
    lay_out(&step, inputs->scratch);
    memset(step.barrier, 0, sizeof(Barrier));
    const int all_rows = inputs->sequences * inputs->width;
    for (int i = 0; i < all_rows; i++)
        if (inputs->tokens[i] >= 0 && inputs->tokens[i] != model->mask_token) step.window_row[step.count++] = i;
    const int text = step.count;
    for (int i = 0; i < all_rows && model->mask_token >= 0; i++)
        if (inputs->tokens[i] == model->mask_token) step.window_row[step.count++] = i;
    step.masks = step.count - text;
    GOMP_parallel(run_thread, &step, inputs->threads, 0);
    return 0;
}

/* What greedy decoding takes from rows of logits: their argmax and its probability. With a Markov head, its part is
 * added to the logits first. */
typedef struct {
    float *logits; /* (rows, stride) */
    int32_t stride, vocabulary, count, threads;
    const int64_t *rows;          /* (count,) */
    const Matrix *before, *after; /* of the head, or null */
    const int64_t *tokens;        /* (count,): those before the head's */
    int64_t *chosen;              /* (count,) */
    float *probability;           /* (count,) or null */
} Greedy;

typedef struct {
    const Greedy *greedy;
    Barrier *barrier;
    Input in;
    const int *places;
    float *highest, *total; /* (threads, count) */
    int64_t *where;
} Choice;

static void choose_thread(void *data) {
    const Choice *c = data;
    const Greedy *g = c->greedy;
    const int me = omp_get_thread_num(), threads = omp_get_num_threads();
    int from, to;
    const Rows rows = {&c->in, 0, 0, g->count, g->logits, g->stride, c->places};
    if (g->after) product(g->after, 0, &rows, 1, me, threads);
    share(g->stride, me, threads, &from, &to);
    from *= GROUP, to *= GROUP;
    if (to > g->vocabulary) to = g->vocabulary;
    const int whole = from + (to > from ? (to - from) / LANES * LANES : 0);
    for (int i = 0; i < g->count; i++) {
        const float *logits = g->logits + g->rows[i] * g->stride;
        floats best = all(-INFINITY);
        ints at = {0};
        for (int k = from; k < whole; k += LANES) {
            const floats here = load(logits + k);
            const ints better = here > best;
            best = select_(better, here, best);
            at = (better & k) | (~better & at);
        }
        float top = -INFINITY;
        int64_t where = g->vocabulary;
        for (int lane = 0; lane < LANES && from < whole; lane++)
            if (best[lane] > top || (best[lane] == top && at[lane] + lane < where))
                top = best[lane], where = at[lane] + lane;
        for (int k = whole; k < to; k++)
            if (logits[k] > top) top = logits[k], where = k;
        c->highest[me * g->count + i] = top;
        c->where[me * g->count + i] = where;
    }
    if (!g->probability) return;
    meet(c->barrier, threads);
    for (int i = 0; i < g->count; i++) {
        const float *logits = g->logits + g->rows[i] * g->stride;
        float top = -INFINITY, total = 0;
        for (int t = 0; t < threads; t++) top = c->highest[t * g->count + i] > top ? c->highest[t * g->count + i] : top;
        floats sum = all(0);
        for (int k = from; k < whole; k += LANES) sum += exp_(load(logits + k) - all(top));
        total = sum_(sum);
        for (int k = whole; k < to; k++) total += expf(logits[k] - top);
        c->total[me * g->count + i] = total;
    }
}

/* Returns 0, or 1 if there is no memory. */
int mars_greedy(const Greedy *g) {
    Choice choice = {.greedy = g};
    const int width = g->after ? g->after->inputs : GROUP;
    int *places;
    char *scratch = 0;
    for (int pass = 0; pass < 2; pass++) { /* the first one counts the memory */
        size_t used = 0;
        choice.barrier = carve(scratch, &used, sizeof(Barrier));
        places = carve(scratch, &used, g->count * sizeof(int));
        choice.highest = carve(scratch, &used, (size_t)g->threads * g->count * 4);
        choice.total = carve(scratch, &used, (size_t)g->threads * g->count * 4);
        choice.where = carve(scratch, &used, (size_t)g->threads * g->count * 8);
        carve_input(&choice.in, scratch, &used, g->count, width);
        if (!scratch && !(scratch = aligned_alloc(64, used))) return 1;
    }
    memset(choice.barrier, 0, sizeof(Barrier));
    memset(choice.total, 0, (size_t)g->threads * g->count * 4);
    for (int i = 0; i < g->threads * g->count; i++) choice.highest[i] = -INFINITY; /* of threads that do not come */
    for (int i = 0; i < g->count; i++) {
        places[i] = (int)g->rows[i];
        for (int group = 0; g->after && group < width / GROUP; group++) {
            float x[GROUP];
            row_of(g->before, g->tokens[i], group, x);
            encode(&choice.in, g->after->kind, i, group, x);
        }
    }
    choice.places = places;
    GOMP_parallel(choose_thread, &choice, g->threads, 0);
    for (int i = 0; i < g->count; i++) {
        float top = -INFINITY, total = 0;
        g->chosen[i] = 0; /* if no logit is a number */
        for (int t = 0; t < g->threads; t++) {
            const int at = t * g->count + i;
            total += choice.total[at];
            if (choice.highest[at] > top) top = choice.highest[at], g->chosen[i] = choice.where[at];
        }
        if (g->probability) g->probability[i] = total > 0 ? 1 / total : 0;
    }
    free(scratch);
    return 0;
}

/* ---- a whole step of greedy sequences: windows, forward, choices, and the state after it */

/* Does what mars.method.windows.build_windows, mars.method.acceptance.decide_by and DeviceState.advance do. */
typedef struct {
    int32_t sequences, drafts, most_groups, masks; /* the last three: most of a window */
    int32_t state_drafts, table_pages, threads;
    const int64_t *slots, *verifies, *groups, *masks_of; /* (sequences,) */
    int64_t *cursor, *last, *draft_count, *state;        /* by slot; `state` are the drafts (slots, state_drafts) */
    uint8_t *emitted;
    const int64_t *page_table;
    int64_t context, mask, banned; /* positions that there are; the mask token; a token that is never chosen, or -1 */
    int32_t vocabulary;
    const Matrix *before, *after; /* of the Markov head, or null */
    int64_t *decisions;           /* (sequences, 4 + drafts + masks): see StepOutputs */
    float *probability;           /* (sequences, masks): of the predictions */
    char *scratch;
    int64_t scratch_bytes;
} Decoding;

/* A sequence's window: last token, drafts, then a mask group behind each of the first `early` tokens and one behind all. */
typedef struct {
    int drafts, early, masks;
    int64_t slot, token; /* `token`: the newest one, while its masks are read */
} Window;

INLINE int group_start(const Window *w, int group) { return 1 + w->drafts + group * w->masks; }
INLINE int width_of(const Window *w) { return group_start(w, w->masks ? w->early + 1 : 0); }

static void fill_window(const Decoding *d, const Window *w, int64_t *tokens, int64_t *positions,
                        int64_t *group, int64_t *offset, int64_t *reach, int width) {
    const int64_t cursor = d->cursor[w->slot];
    for (int i = 0; i < width; i++) {
        const int mask = i - 1 - w->drafts; /* its number */
        tokens[i] = -1, group[i] = offset[i] = reach[i] = 0;
        if (mask < 0) {
            tokens[i] = i ? d->state[w->slot * d->state_drafts + i - 1] : d->last[w->slot];
            offset[i] = reach[i] = i;
        } else if (i < width_of(w)) {
            const int number = mask / w->masks;
            tokens[i] = d->mask;
            group[i] = number + 1;
            reach[i] = number < w->early ? number : w->drafts;
            offset[i] = reach[i] + 1 + mask % w->masks;
        }
        positions[i] = cursor + offset[i] < d->context ? cursor + offset[i] : d->context - 1;
    }
}

/* Returns 0, or does nothing and returns how many bytes of scratch memory it needs; -1 if there is no memory. */
int64_t mars_decode(const Model *m, const Decoding *d) {
    const int n = d->sequences, columns = 4 + d->drafts + d->masks;
    size_t used = 0;
    Window *windows = carve(d->scratch, &used, n * sizeof(Window));
    int64_t *cursors = carve(d->scratch, &used, n * 8), *tokens_before = carve(d->scratch, &used, n * 8);
    if ((int64_t)used > d->scratch_bytes) return (int64_t)used;
    int width = 1;
    for (int i = 0; i < n; i++) {
        Window *w = windows + i;
        const int64_t slot = w->slot = d->slots[i];
        w->drafts = d->draft_count[slot] < d->drafts ? (int)d->draft_count[slot] : d->drafts;
        w->masks = d->groups[i] ? (d->masks_of[i] < d->masks ? (int)d->masks_of[i] : d->masks) : 0;
        w->early = (d->groups[i] < d->most_groups ? (int)d->groups[i] : d->most_groups) - 1;
        if (w->early > w->drafts) w->early = w->drafts;
        if (d->emitted[slot] || !w->masks) w->early = 0; /* emitted drafts are always accepted */
        widen(&width, width_of(w));
        cursors[i] = d->cursor[slot];
    }
    const size_t rows = (size_t)n * width;
    int64_t *arrays[7]; /* tokens, positions, group, offset, reach; rows of logits and what is chosen from them */
    for (int k = 0; k < 7; k++) arrays[k] = carve(d->scratch, &used, rows * 8);
    float *logits = carve(d->scratch, &used, rows * m->output.outputs * 4), *found = carve(d->scratch, &used, n * 4);
    Inputs inputs = {n, width, 1, d->table_pages, d->threads, arrays[0], arrays[1], arrays[2], arrays[3], arrays[4],
                     d->slots, cursors, d->page_table, logits, d->scratch + used, d->scratch_bytes - (int64_t)used};
    if (inputs.scratch_bytes < 0) inputs.scratch_bytes = 0;
    const size_t needed = used + lay_out(&(Step){.model = m, .inputs = &inputs}, 0);
    if ((int64_t)needed > d->scratch_bytes) return (int64_t)needed;
    for (int i = 0; i < n; i++) {
        const size_t at = (size_t)i * width;
        fill_window(d, windows + i, arrays[0] + at, arrays[1] + at, arrays[2] + at, arrays[3] + at, arrays[4] + at, width);
    }
    mars_step(m, &inputs);
    if (d->banned >= 0)
        for (size_t row = 0; row < rows; row++) logits[row * m->output.outputs + d->banned] = -INFINITY;

    Greedy greedy = {logits, m->output.outputs, d->vocabulary, 0, d->threads, arrays[5], 0, 0, tokens_before, arrays[6]};
    for (int i = 0; i < n; i++)
        for (int k = 0; k <= windows[i].drafts; k++) arrays[5][greedy.count++] = (int64_t)i * width + k;
    if (mars_greedy(&greedy)) return -1;
    const int64_t *chosen = arrays[6];
    for (int i = 0; i < n; i++) {
        Window *w = windows + i;
        int64_t *decision = d->decisions + (size_t)i * columns;
        const int64_t *drafts = d->state + w->slot * d->state_drafts;
        int accepted = 0;
        for (int k = 0; k < d->drafts; k++) decision[4 + k] = k < w->drafts && drafts[k] == chosen[k];
        while (accepted < w->drafts && (d->emitted[w->slot] || decision[4 + accepted])) accepted++;
        if (accepted != w->drafts && accepted >= w->early) w->masks = 0; /* no group follows these drafts */
        w->token = chosen[accepted];
        chosen += w->drafts + 1;
        decision[0] = accepted;
        decision[1] = 0;
        decision[2] = w->masks;
        decision[3] = w->token;
    }
    greedy.before = d->before, greedy.after = d->after, greedy.probability = found;
    for (int k = 0; k < d->masks; k++) {
        greedy.count = 0;
        for (int i = 0; i < n; i++) {
            const Window *w = windows + i;
            const int64_t accepted = d->decisions[(size_t)i * columns];
            if (k >= w->masks) continue;
            tokens_before[greedy.count] = w->token;
            arrays[5][greedy.count++] = (int64_t)i * width + group_start(w, accepted < w->drafts ? (int)accepted : w->early) + k;
        }
        if (greedy.count && mars_greedy(&greedy)) return -1;
        for (int i = 0, at = 0; i < n; i++) {
            const int real = k < windows[i].masks;
            if (real) windows[i].token = arrays[6][at];
            d->decisions[(size_t)i * columns + 4 + d->drafts + k] = real ? windows[i].token : 0;
            d->probability[(size_t)i * d->masks + k] = real ? found[at++] : 0;
        }
    }
    for (int i = 0; i < n; i++) {
        const int64_t *decision = d->decisions + (size_t)i * columns, slot = windows[i].slot;
        if (slot) d->cursor[slot] += 1 + decision[0]; /* slot 0 is padding */
        d->last[slot] = decision[3];
        d->emitted[slot] = !d->verifies[i];
        d->draft_count[slot] = d->verifies[i] ? decision[2] : 0;
        memcpy(d->state + slot * d->state_drafts, decision + 4 + d->drafts, d->masks * 8);
    }
    return 0;
}
