/* What a round costs the host: encode a delta; decode and average the deltas of a round, and apply an outer rule.
 *
 * Plain C, called through ctypes, which lets other Python threads run meanwhile. Every result has the bits of the
 * numpy and torch code in codec.py, mean.py and outer.py: each multiply and add is rounded by itself (compiled with
 * -ffp-contract=off), sums have the same order. The loops are written so that the compiler turns them into vector
 * instructions; on x86-64 each function is compiled twice and chosen by what the processor has.
 */

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define WIDE __attribute__((target("avx2")))
#else
#define WIDE
#endif
#define INLINE static inline __attribute__((always_inline))

enum { BLOCK = 256, CHUNK = 1 << 17, PIECE = 512, LINE = 16, AHEAD = 6 * BLOCK };
enum { INFINITE = 255 }; /* a scale that no encoder makes: 0 times inf has a sign that a table of magnitudes has not */
enum { FLOAT32, BFLOAT16, E3M0, TWOBIT, CODECS };
enum { MEAN, SGD, NESTEROV };

/* The payloads of a round, and what becomes of their mean. Mirrored in kernels.py. */
typedef struct {
    const uint8_t *const *payloads;
    const float *factors;
    int32_t members, codec, rule;
    float lr, momentum, decay; /* decay: of the velocity; less than momentum when the inner learning rate falls */
    const float *anchor, *velocity;        /* the state before the round */
    float *new_anchor, *new_velocity;      /* and after it, in another place; MEAN writes the mean to new_anchor */
    uint64_t anchor_words, velocity_words; /* out: sums over the pairs of values that were written */
} Round;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
/* Asks for values of a block that comes later. Processors fetch ahead by themselves only within a page of 16 blocks:
 * encoding 32 MB takes 0.33 ns a value with it and 0.68 without. Nothing is read, so the end of the memory may be passed. */
INLINE void fetch(const float *x) { __builtin_prefetch((const void *)((uintptr_t)x + AHEAD * sizeof(float))); }
INLINE int64_t blocks(int64_t n) { return (n + BLOCK - 1) / BLOCK; }

/* ---- E3M0: 1 sign bit, 3 exponent bits below a power-of-two scale for each block (codec.py describes it) ---- */

/* Returns the scale. `largest`: the largest exponent field seen so far; all ones means inf or nan. */
INLINE uint8_t e3m0_block(const float *x, int count, uint8_t *codes, uint16_t *largest)
{
    uint32_t bits[BLOCK];
    uint16_t upper[BLOCK], most = *largest;
    uint8_t exponent[BLOCK], code[BLOCK], scale = 0;
    memcpy(bits, x, sizeof(float) * (size_t)count);
    memset(bits + count, 0, sizeof(uint32_t) * (size_t)(BLOCK - count));
    for (int i = 0; i < BLOCK; i += LINE)
        fetch(x + i);
    for (int i = 0; i < BLOCK; i++) {
        uint16_t half = (uint16_t)(bits[i] >> 16), field = half & 0x7F80;
        most = field > most ? field : most;
        upper[i] = (uint16_t)(half + 0x40); /* carries into the exponent from 1.5 times a power of two on */
    }
    for (int i = 0; i < BLOCK; i++) {
        uint8_t e = (uint8_t)(upper[i] >> 7);
        e = e > 254 ? 254 : e;
        exponent[i] = e;
        scale = e > scale ? e : scale;
    }
    scale = scale < 8 ? 0 : scale; /* codes below it would be denormals, which some processors flush to zero */
    uint8_t zero = (uint8_t)((scale > 7 ? scale : 7) - 7);
    for (int i = 0; i < BLOCK; i++) {
        uint8_t e = exponent[i] > zero ? exponent[i] : zero;
        code[i] = (uint8_t)((e - zero) | ((upper[i] >> 12) & 8));
    }
    for (int i = 0; i < BLOCK / 2; i++)
        codes[i] = (uint8_t)(code[2 * i] | (code[2 * i + 1] << 4));
    *largest = most;
    return scale;
}

/* Returns whether all values are finite. */
INLINE int e3m0_encode(const float *x, int64_t n, uint8_t *out)
{
    uint16_t largest = 0;
    for (int64_t at = 0; at < n; at += CHUNK) {
        int64_t count = least(CHUNK, n - at), heads = blocks(count);
        uint8_t *codes = out + heads;
        for (int64_t b = 0; b < heads; b++) {
            int size = (int)least(BLOCK, count - b * BLOCK);
            uint8_t block[BLOCK / 2];
            out[b] = e3m0_block(x + at + b * BLOCK, size, block, &largest);
            memcpy(codes + b * (BLOCK / 2), block, (size_t)(size + 1) / 2);
        }
        out += heads + (count + 1) / 2;
    }
    return largest < 0x7F80;
}

INLINE void e3m0_decode(const uint8_t *payload, int64_t count, int64_t from, int64_t n, float *out)
{
    const uint8_t *scales = payload, *codes = payload + blocks(count);
    for (int64_t at = from; at < from + n; at += BLOCK) {
        float scale, base[BLOCK];
        uint32_t bits[BLOCK], power = (uint32_t)scales[at / BLOCK] << 23;
        uint16_t upper[BLOCK];
        uint8_t packed[BLOCK / 2], code[BLOCK];
        int64_t size = least(BLOCK, from + n - at);
        memcpy(&scale, &power, sizeof scale);
        memcpy(packed, codes + at / 2, (size_t)(size + 1) / 2);
        for (int i = 0; i < BLOCK / 2; i++) {
            code[2 * i] = packed[i] & 15;
            code[2 * i + 1] = packed[i] >> 4;
        }
        for (int i = 0; i < BLOCK; i++) { /* code 0 is zero, codes 1..7 are 2^-6 .. 1 */
            uint16_t c = code[i], magnitude = (uint16_t)((uint16_t)((c & 7) + 120) << 7);
            upper[i] = (uint16_t)(((c & 7) ? magnitude : 0) | (uint16_t)((c & 8) << 12));
        }
        for (int i = 0; i < BLOCK; i++)
            bits[i] = (uint32_t)upper[i] << 16;
        memcpy(base, bits, sizeof base);
        for (int i = 0; i < size; i++)
            out[at - from + i] = base[i] * scale;
    }
}

/* ---- 2 bits: levels of a block (levels.py describes it) ---- */

static const float MAGNITUDES[2][2] = {{0.5675f, 1.8930f}, {0.5936f, 2.5936f}};
static const float SMALLEST = 0x1p-100f;
enum { LARGEST = 0x76800000, NOT_FINITE = 0x7F800000 }; /* the bits of 2^110 and of infinity */

/* The sum: the second half is added to the first, and so on. Overwrites x. */
INLINE float folded(float *x)
{
    for (int half = BLOCK / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            x[i] = x[i] + x[i + half];
    return x[0];
}

INLINE uint16_t to_bfloat16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (uint16_t)((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

INLINE float from_bfloat16(uint16_t upper)
{
    float x;
    uint32_t bits = (uint32_t)upper << 16;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The magnitudes of a block, at most 2^110, with zeros at its end; returns the bits of the largest before that. */
INLINE uint32_t magnitudes(const float *x, int count, float *out, uint32_t *words)
{
    uint32_t most = 0;
    memcpy(words, x, sizeof(float) * (size_t)count);
    memset(words + count, 0, sizeof(float) * (size_t)(BLOCK - count));
    for (int i = 0; i < BLOCK; i++) {
        uint32_t bits = words[i] & 0x7FFFFFFF;
        most = bits > most ? bits : most;
        bits = bits < LARGEST ? bits : LARGEST;
        memcpy(out + i, &bits, sizeof bits);
    }
    return most;
}

/* Returns the head: scale and table. */
INLINE uint16_t levels_block(const float *x, int count, uint8_t *codes, uint32_t *largest)
{
    float value[BLOCK], unit[BLOCK], level[BLOCK], product[BLOCK];
    uint32_t words[BLOCK];
    uint8_t code[BLOCK];
    uint32_t most = magnitudes(x, count, value, words);
    *largest = most > *largest ? most : *largest;
    memcpy(product, value, sizeof product);
    float mean = folded(product) / (float)count, size = mean > SMALLEST ? mean : SMALLEST, scale = 1;
    for (int i = 0; i < BLOCK; i++) {
        unit[i] = value[i] / size;
        product[i] = unit[i] * unit[i];
    }
    int tails = folded(product) / (float)count > 1.75f;
    const float *table = MAGNITUDES[tails];
    float border = (table[1] + table[0]) / 2;
    for (int step = 0; step < 2; step++) {
        float least_large = border * scale, square[BLOCK];
        for (int i = 0; i < BLOCK; i++)
            level[i] = unit[i] >= least_large ? table[1] : table[0];
        for (int i = count; i < BLOCK; i++)
            level[i] = 0;
        for (int i = 0; i < BLOCK; i++) {
            product[i] = unit[i] * level[i];
            square[i] = level[i] * level[i];
        }
        scale = folded(product) / folded(square);
    }
    uint16_t head = to_bfloat16(mean < SMALLEST ? 0 : scale * size);
    scale = from_bfloat16(head);
    border = border * scale;
    for (int i = 0; i < BLOCK; i++)
        code[i] = (uint8_t)((uint32_t)(value[i] >= border) | words[i] >> 31 << 1);
    memset(code + count, 0, (size_t)(BLOCK - count));
    for (int i = 0; i < BLOCK; i += 4)
        codes[i / 4] = (uint8_t)(code[i] | code[i + 1] << 2 | code[i + 2] << 4 | code[i + 3] << 6);
    return (uint16_t)(head | tails << 15);
}

/* Returns whether all values are finite. */
INLINE int levels_encode(const float *x, int64_t n, uint8_t *out)
{
    uint32_t largest = 0;
    for (int64_t at = 0; at < n; at += CHUNK) {
        int64_t count = least(CHUNK, n - at), heads = blocks(count);
        uint8_t *codes = out + 2 * heads;
        for (int64_t b = 0; b < heads; b++) {
            int size = (int)least(BLOCK, count - b * BLOCK);
            uint8_t block[BLOCK / 4];
            uint16_t head = levels_block(x + at + b * BLOCK, size, block, &largest);
            memcpy(out + 2 * b, &head, sizeof head);
            memcpy(codes + b * (BLOCK / 4), block, (size_t)(size + 3) / 4);
        }
        out = codes + (count + 3) / 4;
    }
    return largest < NOT_FINITE;
}

/* The values of a block's codes, by code. */
INLINE void levels_table(uint16_t head, float *table)
{
    float scale = from_bfloat16(head & 0x7FFF);
    for (int i = 0; i < 2; i++) {
        float value = MAGNITUDES[head >> 15][i] * scale;
        table[i] = value;
        table[2 + i] = -value;
    }
}

INLINE void levels_decode(const uint8_t *payload, int64_t count, int64_t from, int64_t n, float *out)
{
    const uint8_t *codes = payload + 2 * blocks(count);
    for (int64_t at = from; at < from + n; at += BLOCK) {
        float table[4];
        uint16_t head;
        memcpy(&head, payload + 2 * (at / BLOCK), sizeof head);
        levels_table(head, table);
        int64_t size = least(BLOCK, from + n - at);
        for (int64_t i = 0; i < size; i++)
            out[at - from + i] = table[codes[(at + i) / 4] >> (2 * (i % 4)) & 3];
    }
}

/* ---- the other codecs, decoding only: encoding them is as fast as memory in torch ---- */

INLINE void float32_decode(const uint8_t *payload, int64_t from, int64_t n, float *out)
{
    memcpy(out, payload + 4 * from, 4 * (size_t)n);
}

INLINE void bfloat16_decode(const uint8_t *payload, int64_t from, int64_t n, float *out)
{
    for (int64_t i = 0; i < n; i++) {
        uint16_t half;
        memcpy(&half, payload + 2 * (from + i), sizeof half);
        uint32_t bits = (uint32_t)half << 16;
        memcpy(out + i, &bits, sizeof bits);
    }
}

INLINE int64_t chunk_bytes(int codec, int64_t n)
{
    switch (codec) {
    case FLOAT32: return 4 * n;
    case BFLOAT16: return 2 * n;
    case TWOBIT: return (n + 3) / 4 + 2 * blocks(n);
    default: return (n + 1) / 2 + blocks(n);
    }
}

/* ---- the round ---- */

INLINE void decode(int codec, const uint8_t *chunk, int64_t count, int64_t from, int64_t n, float *out)
{
    switch (codec) {
    case FLOAT32: float32_decode(chunk, from, n, out); break;
    case BFLOAT16: bfloat16_decode(chunk, from, n, out); break;
    case TWOBIT: levels_decode(chunk, count, from, n, out); break;
    default: e3m0_decode(chunk, count, from, n, out);
    }
}

/* total = factor * decoded values, or total + factor * decoded values */
INLINE void add_decoded(int codec, const uint8_t *chunk, int64_t count, int64_t from, int64_t n, float factor,
                        int first, float *total)
{
    float term[PIECE];
    decode(codec, chunk, count, from, n, first ? total : term);
    if (first)
        for (int64_t i = 0; i < n; i++)
            total[i] = total[i] * factor;
    else
        for (int64_t i = 0; i < n; i++)
            total[i] = total[i] + term[i] * factor;
}

#if defined(__x86_64__)
/* A block of E3M0 has 8 magnitudes: each is scaled and weighted once, in a table of one vector. */
WIDE INLINE __m256 e3m0_table(uint8_t scale, float factor)
{
    const __m256 bases = _mm256_setr_ps(0, 0x1p-6f, 0x1p-5f, 0x1p-4f, 0x1p-3f, 0x1p-2f, 0x1p-1f, 1);
    __m256 power = _mm256_castsi256_ps(_mm256_set1_epi32((int)((uint32_t)scale << 23)));
    return _mm256_mul_ps(_mm256_mul_ps(bases, power), _mm256_set1_ps(factor));
}

/* Looks up 8 values, whose codes are in 4 bytes. */
WIDE INLINE __m256 e3m0_eight(const uint8_t *codes, __m256 table)
{
    const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    const __m256i signs = _mm256_set1_epi32((int)0x80000000u);
    int32_t eight;
    memcpy(&eight, codes, sizeof eight);
    __m256i each = _mm256_srlv_epi32(_mm256_set1_epi32(eight), shifts);
    __m256i sign = _mm256_and_si256(_mm256_slli_epi32(each, 28), signs);
    return _mm256_xor_ps(_mm256_permutevar8x32_ps(table, each), _mm256_castsi256_ps(sign));
}

/* The same for full blocks of E3M0. */
WIDE static void add_e3m0_blocks(const uint8_t *scales, const uint8_t *codes, int64_t n, float factor, int first,
                                 float *total)
{
    for (int64_t at = 0; at < n; at += BLOCK) {
        __m256 table = e3m0_table(scales[at / BLOCK], factor);
        for (int i = 0; i < BLOCK; i += 8) {
            __m256 term = e3m0_eight(codes + (at + i) / 2, table);
            float *out = total + at + i;
            _mm256_storeu_ps(out, first ? term : _mm256_add_ps(_mm256_loadu_ps(out), term));
        }
    }
}

/* The same for full blocks of levels: a block has 4 signed values, in a table of one vector. */
WIDE static inline void add_level_blocks(const uint8_t *heads, const uint8_t *codes, int64_t n, float factor, int first,
                                         float *total)
{
    const __m256i shifts = _mm256_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14);
    for (int64_t at = 0; at < n; at += BLOCK) {
        float values[8];
        uint16_t head;
        memcpy(&head, heads + 2 * (at / BLOCK), sizeof head);
        levels_table(head, values);
        memcpy(values + 4, values, 4 * sizeof(float)); /* the look-up sees 3 bits, the last of them the next code's */
        __m256 table = _mm256_mul_ps(_mm256_loadu_ps(values), _mm256_set1_ps(factor));
        for (int i = 0; i < BLOCK; i += 8) {
            int32_t eight = 0;
            memcpy(&eight, codes + (at + i) / 4, 2);
            __m256i each = _mm256_srlv_epi32(_mm256_set1_epi32(eight), shifts);
            __m256 term = _mm256_permutevar8x32_ps(table, each);
            float *out = total + at + i;
            _mm256_storeu_ps(out, first ? term : _mm256_add_ps(_mm256_loadu_ps(out), term));
        }
    }
}

WIDE static void add_decoded_wide(int codec, const uint8_t *chunk, int64_t count, int64_t from, int64_t n,
                                  float factor, int first, float *total)
{
    if (codec == TWOBIT) {
        int64_t whole = n / BLOCK * BLOCK;
        const uint8_t *heads = chunk + 2 * (from / BLOCK), *codes = chunk + 2 * blocks(count) + from / 4;
        add_level_blocks(heads, codes, whole, factor, first, total);
        if (whole < n)
            add_decoded(codec, chunk, count, from + whole, n - whole, factor, first, total + whole);
        return;
    }
    int64_t full = codec == E3M0 ? n / BLOCK * BLOCK : 0;
    const uint8_t *scales = chunk + from / BLOCK;
    for (int64_t b = 0; b < full / BLOCK; b++)
        if (scales[b] == INFINITE)
            full = 0;
    if (full)
        add_e3m0_blocks(scales, chunk + blocks(count) + from / 2, full, factor, first, total);
    if (full < n)
        add_decoded(codec, chunk, count, from + full, n - full, factor, first, total + full);
}
#else
#define add_decoded_wide add_decoded
#endif

/* v = decay * v + d; anchor = anchor - lr * (d + mu * v), each operation rounded by itself, as in outer.py */
INLINE void apply(const Round *r, const float *mean, int64_t at, int64_t n)
{
    const float *restrict anchor = r->anchor + at, *restrict velocity = r->velocity + at;
    float *restrict new_anchor = r->new_anchor + at, *restrict new_velocity = r->new_velocity + at;
    float lr = r->lr, mu = r->momentum, decay = r->decay;
    if (r->rule == SGD) {
        for (int64_t i = 0; i < n; i++)
            new_anchor[i] = anchor[i] - mean[i] * lr;
        return;
    }
    for (int64_t i = 0; i < n; i++) {
        float v = velocity[i] * decay + mean[i];
        new_velocity[i] = v;
        new_anchor[i] = anchor[i] - (v * mu + mean[i]) * lr;
    }
}

/* The sum of all pairs of values as words of 64 bits, for the fingerprint of a state. */
INLINE uint64_t words(const float *x, int64_t n)
{
    uint64_t sum = 0, word;
    for (int64_t i = 0; i + 1 < n; i += 2) {
        memcpy(&word, x + i, sizeof word);
        sum += word;
    }
    return sum;
}

/* Decode, mean and rule of `n` values from `from` on of a chunk, which begins at value `begin` and at byte `offset` of
 * each payload. */
INLINE void piece(Round *r, int wide, int codec, int64_t begin, int64_t offset, int64_t count, int64_t from, int64_t n)
{
    float total[PIECE];
    for (int m = 0; m < r->members; m++) {
        const uint8_t *chunk = r->payloads[m] + offset;
        if (wide)
            add_decoded_wide(codec, chunk, count, from, n, r->factors[m], m == 0, total);
        else
            add_decoded(codec, chunk, count, from, n, r->factors[m], m == 0, total);
    }
    int64_t at = begin + from;
    if (r->rule == MEAN) {
        memcpy(r->new_anchor + at, total, sizeof(float) * (size_t)n);
        return;
    }
    apply(r, total, at, n);
    r->anchor_words += words(r->new_anchor + at, n);
    if (r->rule == NESTEROV)
        r->velocity_words += words(r->new_velocity + at, n);
}

#if defined(__x86_64__)
enum { TABLES = 32 };

/* The same for `count` full blocks of E3M0 and Nesterov, with all of it in registers: scales[m] and codes[m] are where
 * these blocks begin in payload m. The new state is not read soon, so it is written past the caches: an ordinary store
 * would first read the memory that it is about to fill. */
WIDE INLINE void nesterov_blocks(Round *r, int members, const uint8_t **scales, const uint8_t **codes, int64_t at,
                                 int64_t count)
{
    const __m256 lr = _mm256_set1_ps(r->lr), mu = _mm256_set1_ps(r->momentum), decay = _mm256_set1_ps(r->decay);
    const float *anchor = r->anchor + at, *velocity = r->velocity + at;
    float *new_anchor = r->new_anchor + at, *new_velocity = r->new_velocity + at;
    __m256i anchor_words = _mm256_setzero_si256(), velocity_words = anchor_words;
    for (int64_t b = 0; b < count; b++) {
        __m256 table[TABLES];
        for (int m = 0; m < members; m++)
            table[m] = e3m0_table(scales[m][b], r->factors[m]);
        for (int64_t i = b * BLOCK; i < (b + 1) * BLOCK; i += 8) {
            __m256 mean = e3m0_eight(codes[0] + i / 2, table[0]);
            for (int m = 1; m < members; m++)
                mean = _mm256_add_ps(mean, e3m0_eight(codes[m] + i / 2, table[m]));
            __m256 v = _mm256_add_ps(_mm256_mul_ps(_mm256_loadu_ps(velocity + i), decay), mean);
            __m256 step = _mm256_mul_ps(_mm256_add_ps(_mm256_mul_ps(v, mu), mean), lr);
            __m256 a = _mm256_sub_ps(_mm256_loadu_ps(anchor + i), step);
            _mm256_stream_ps(new_velocity + i, v);
            _mm256_stream_ps(new_anchor + i, a);
            velocity_words = _mm256_add_epi64(velocity_words, _mm256_castps_si256(v));
            anchor_words = _mm256_add_epi64(anchor_words, _mm256_castps_si256(a));
        }
    }
    uint64_t sums[8];
    _mm256_storeu_si256((__m256i *)sums, anchor_words);
    _mm256_storeu_si256((__m256i *)(sums + 4), velocity_words);
    r->anchor_words += sums[0] + sums[1] + sums[2] + sums[3];
    r->velocity_words += sums[4] + sums[5] + sums[6] + sums[7];
    _mm_sfence(); /* another thread reads the state next */
}

/* How many values of a chunk it has done. */
WIDE static int64_t nesterov_chunk(Round *r, int64_t begin, int64_t offset, int64_t count)
{
    const uint8_t *scales[TABLES], *codes[TABLES];
    int64_t full = count / BLOCK;
    uintptr_t places = (uintptr_t)(r->new_anchor + begin) | (uintptr_t)(r->new_velocity + begin);
    if (r->members > TABLES || places % sizeof(__m256))
        return 0;
    for (int m = 0; m < r->members; m++) {
        scales[m] = r->payloads[m] + offset;
        codes[m] = scales[m] + blocks(count);
        for (int64_t b = 0; b < full; b++)
            if (scales[m][b] == INFINITE)
                return 0;
    }
    if (r->members == 2) /* a constant: both tables stay in registers */
        nesterov_blocks(r, 2, scales, codes, begin, full);
    else
        nesterov_blocks(r, r->members, scales, codes, begin, full);
    return full * BLOCK;
}
#endif

INLINE void all_pieces(Round *r, int wide, int codec, int64_t n)
{
    int64_t offset = 0;
    for (int64_t begin = 0; begin < n; begin += CHUNK) {
        int64_t count = least(CHUNK, n - begin), from = 0;
#if defined(__x86_64__)
        if (wide && codec == E3M0 && r->rule == NESTEROV)
            from = nesterov_chunk(r, begin, offset, count);
#endif
        for (; from < count; from += PIECE)
            piece(r, wide, codec, begin, offset, count, from, least(PIECE, count - from));
        offset += chunk_bytes(codec, count);
    }
}

INLINE void finish(Round *r, int wide, int64_t n)
{
    switch (r->codec) { /* a constant in each call, so that the compiler makes one loop for each codec */
    case FLOAT32: all_pieces(r, wide, FLOAT32, n); break;
    case BFLOAT16: all_pieces(r, wide, BFLOAT16, n); break;
    case TWOBIT: all_pieces(r, wide, TWOBIT, n); break;
    default: all_pieces(r, wide, E3M0, n);
    }
}

/* Returns whether all values are finite. */
INLINE int encode(int codec, const float *x, int64_t n, uint8_t *out)
{
    return codec == TWOBIT ? levels_encode(x, n, out) : e3m0_encode(x, n, out);
}

/* ---- what the hook of a training step does: take the delta, write the result ---- */

enum { COPY, SUBTRACT };

/* out = a, or a - b */
INLINE void pass(int what, const float *a, const float *b, float *out, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        out[i] = what == COPY ? a[i] : a[i] - b[i];
}

#if defined(__x86_64__)
/* The same past the caches: the values are not read soon. */
WIDE INLINE void pass_wide(int what, const float *a, const float *b, float *out, int64_t n)
{
    int64_t i = least((int64_t)(-(uintptr_t)out % sizeof(__m256) / sizeof(float)), n);
    pass(what, a, b, out, i);
    for (; i + 8 <= n; i += 8) {
        __m256 eight = _mm256_loadu_ps(a + i);
        _mm256_stream_ps(out + i, what == COPY ? eight : _mm256_sub_ps(eight, _mm256_loadu_ps(b + i)));
    }
    pass(what, a + i, b + i, out + i, n - i);
    _mm_sfence();
}
#else
#define pass_wide pass
#endif

void diloco_subtract_plain(const float *a, const float *b, float *out, int64_t n) { pass(SUBTRACT, a, b, out, n); }
WIDE void diloco_subtract_wide(const float *a, const float *b, float *out, int64_t n)
{
    pass_wide(SUBTRACT, a, b, out, n);
}
void diloco_copy_plain(const float *a, float *out, int64_t n) { pass(COPY, a, a, out, n); }
WIDE void diloco_copy_wide(const float *a, float *out, int64_t n) { pass_wide(COPY, a, a, out, n); }

/* ---- what Python calls ---- */

int diloco_pack_plain(int32_t codec, const float *x, int64_t n, uint8_t *out) { return encode(codec, x, n, out); }
WIDE int diloco_pack_wide(int32_t codec, const float *x, int64_t n, uint8_t *out) { return encode(codec, x, n, out); }
void diloco_round_plain(Round *r, int64_t n) { finish(r, 0, n); }
WIDE void diloco_round_wide(Round *r, int64_t n) { finish(r, 1, n); }

/* Tells a library that was compiled from another version. */
int64_t diloco_layout(void) { return (int64_t)(CODECS * sizeof(Round)); }

/* Whether the processor has what the wide functions need. */
int diloco_wide(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") != 0;
#else
    return 1;
#endif
}
