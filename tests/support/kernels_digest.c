/* Prints a digest of what the kernels compute from pseudo-random input, for each codec and rule: the same on every
 * kind of processor. Usage: kernels_digest plain|wide */

#include "../../diloco/codecs/kernels.c"

#include <stdio.h>
#include <stdlib.h>

enum { N = CHUNK + 771, MEMBERS = 3 };

static uint64_t seed = 1;

static uint32_t random_bits(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 32);
}

/* Magnitudes from 2^-30 to 2^30, both signs. */
static void fill(float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = (random_bits() & 0x807FFFFFu) | (97u + random_bits() % 61u) << 23;
        memcpy(x + i, &bits, sizeof bits);
    }
}

static void digest(const char *what, const void *data, size_t size)
{
    uint64_t sum = 14695981039346656037u; /* FNV-1a */
    for (size_t i = 0; i < size; i++)
        sum = (sum ^ ((const uint8_t *)data)[i]) * 1099511628211u;
    printf("%s %016llx\n", what, (unsigned long long)sum);
}

int main(int count, char **words)
{
    int wide = count > 1 && !strcmp(words[1], "wide");
    static float x[MEMBERS][N], anchor[N], velocity[N], new_anchor[N], new_velocity[N];
    static uint8_t bytes[MEMBERS][4 * N];
    const uint8_t *payloads[MEMBERS] = {bytes[0], bytes[1], bytes[2]};
    const float factors[MEMBERS] = {0.2f, 0.3f, 0.5f};
    fill(anchor, N);
    fill(velocity, N);
    for (int codec = FLOAT32; codec < CODECS; codec++) {
        for (int m = 0; m < MEMBERS; m++) {
            fill(x[m], N);
            if (codec >= E3M0)
                (wide ? diloco_pack_wide : diloco_pack_plain)(codec, x[m], N, bytes[m]);
            else if (codec == BFLOAT16)
                for (int64_t i = 0; i < N; i++)
                    memcpy(bytes[m] + 2 * i, (uint8_t *)&x[m][i] + 2, 2);
            else
                memcpy(bytes[m], x[m], sizeof x[m]);
        }
        if (codec >= E3M0)
            digest("encoded", bytes[0], (size_t)(chunk_bytes(codec, CHUNK) + chunk_bytes(codec, N - CHUNK)));
        for (int rule = MEAN; rule <= NESTEROV; rule++) {
            Round r = {.payloads = payloads, .factors = factors, .members = MEMBERS, .codec = codec, .rule = rule,
                       .lr = 0.4f, .momentum = 0.9f, .anchor = anchor, .velocity = velocity,
                       .new_anchor = new_anchor, .new_velocity = new_velocity};
            char what[32];
            (wide ? diloco_round_wide : diloco_round_plain)(&r, N);
            snprintf(what, sizeof what, "codec %d rule %d", codec, rule);
            digest(what, rule == NESTEROV ? new_velocity : new_anchor, sizeof anchor);
            digest("words", &r.anchor_words, sizeof r.anchor_words + sizeof r.velocity_words);
        }
    }
    return 0;
}
