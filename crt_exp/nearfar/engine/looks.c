/* The products of queries with all keys of the past: in vectors, or in the tiles of AMX where the processor has them and
   the system lets a process use them. */

#include "looks.h"

typedef uint32_t stored_bits __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#define PAIRS(p) (*(const stored_bits *)(p))

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

enum { TILE = 16, ASK = 0x1023, TILE_DATA = 18 };       /* rows and pairs of a tile; of arch_prctl */

static int tiles_allowed(void) {
    static int known = -1;                              /* the same whoever asks */
    int allowed = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (allowed < 0) {
        allowed = syscall(SYS_arch_prctl, ASK, TILE_DATA) == 0;
        __atomic_store_n(&known, allowed, __ATOMIC_RELAXED);
    }
    return allowed;
}

/* One or two tiles of queries, of which those behind the last are whatever lies there, and nobody's; two panels at a
   time. */
INLINE void look_in_tiles(const int both, const uint32_t *queries, int dp, const uint32_t *panels, int step, int n,
                          float *to) {
    const int row = dp / 2 * sizeof(float), ld = LOOKED * sizeof(float);
    const uint32_t *others = queries + TILE * dp / 2;
    for (int j = 0; j < n; j += 2 * PANEL) {
        const uint32_t *one = panels + j / PANEL * step, *next = one + step;
        _tile_zero(0);
        _tile_zero(1);
        if (both) _tile_zero(2);
        if (both) _tile_zero(3);
        for (int p = 0; p < dp / 2; p += TILE) {
            _tile_loadd(4, queries + p, row);
            _tile_loadd(6, one + p * PANEL, PANEL * sizeof(float));
            _tile_loadd(7, next + p * PANEL, PANEL * sizeof(float));
            if (both) _tile_loadd(5, others + p, row);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            if (both) _tile_dpbf16ps(2, 5, 6);
            if (both) _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, to + j, ld);
        _tile_stored(1, to + j + PANEL, ld);
        if (both) _tile_stored(2, to + TILE * LOOKED + j, ld);
        if (both) _tile_stored(3, to + TILE * LOOKED + j + PANEL, ld);
    }
}

static void look_by_tiles(const uint32_t *queries, int R, int dp, const uint32_t *panels, int step, int n,
                          float *to) {
    struct {
        uint8_t palette, start, none[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } sizes = {.palette = 1};
    for (int i = 0; i < 8; i++) sizes.bytes[i] = 4 * TILE, sizes.rows[i] = TILE;
    _tile_loadconfig(&sizes);
    if (R > TILE) look_in_tiles(1, queries, dp, panels, step, n, to);
    else look_in_tiles(0, queries, dp, panels, step, n, to);
    _tile_release();
}

static int in_tiles(int dp) { return dp % (2 * TILE) == 0 && tiles_allowed(); }
#else
static int in_tiles(int dp) { return 0; }
static void look_by_tiles(const uint32_t *queries, int R, int dp, const uint32_t *panels, int step, int n,
                          float *to) {}
#endif

/* sum + the products of pairs. */
INLINE vec add_pairs(vec sum, bits q, bits y) {
#if defined(__AVX512BF16__)
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)q, (__m512bh)y);
#else
    return sum + (vec)(q << 16) * (vec)(y << 16) + (vec)(q & 0xffff0000u) * (vec)(y & 0xffff0000u);
#endif
}

enum { WIDE = LANES == 16 ? 4 : 2 };                    /* vectors of keys at once */

INLINE void look_in_vectors(const int rows, const uint32_t *queries, int dp, const uint32_t *panels, int step, int j,
                            float *to) {
    vec sum[ROWS][WIDE];
    const uint32_t *at[WIDE];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int e = 0; e < WIDE; e++) sum[i][e] = (vec){0};
    UNROLL for (int e = 0; e < WIDE; e++) {
        const int key = j + e * LANES;
        at[e] = panels + key / PANEL * step + key % PANEL;
    }
    for (int p = 0; p < dp / 2; p++) {
        bits y[WIDE];
        UNROLL for (int e = 0; e < WIDE; e++) y[e] = PAIRS(at[e] + p * PANEL);
        UNROLL for (int i = 0; i < rows; i++)
            UNROLL for (int e = 0; e < WIDE; e++)
                sum[i][e] = add_pairs(sum[i][e], (bits){0} + queries[i * dp / 2 + p], y[e]);
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int e = 0; e < WIDE; e++) AT(to + i * LOOKED + j + e * LANES) = sum[i][e];
}

void look_at(const uint32_t *queries, int R, int dp, const uint32_t *panels, int step, int n,
                          float *to) {
    if (in_tiles(dp)) {                                 /* for one query too: in other sums another key could win */
        look_by_tiles(queries, R, dp, panels, step, n, to);
        return;
    }
    for (int j = 0; j < n; j += WIDE * LANES) {
        int i = 0;
        for (; i + ROWS <= R; i += ROWS)
            look_in_vectors(ROWS, queries + i * dp / 2, dp, panels, step, j, to + i * LOOKED);
        for (; i < R; i++) look_in_vectors(1, queries + i * dp / 2, dp, panels, step, j, to + i * LOOKED);
    }
}
