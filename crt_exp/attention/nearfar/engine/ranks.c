/* The products of queries with the means of all leaves: in vectors, or in the tiles of AMX where the processor has them
   and the system lets a process use them. */

#include "pairs.h"

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

/* TILE queries; those behind the last are whatever lies there, and nobody's. */
static void rank_by_tiles(const uint32_t *queries, int dp, const uint32_t *means, int64_t most, int n, float *to,
                          int64_t ld) {
    struct {
        uint8_t palette, start, none[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } sizes = {.palette = 1};
    for (int i = 0; i < 5; i++) sizes.bytes[i] = 4 * TILE, sizes.rows[i] = TILE;
    _tile_loadconfig(&sizes);
    for (int j = 0; j < n; j += 2 * TILE) {
        _tile_zero(0);
        _tile_zero(1);
        for (int p = 0; p < dp / 2; p += TILE) {
            _tile_loadd(2, queries + p, 4 * (dp / 2));
            _tile_loadd(3, means + p * most + j, 4 * most);
            _tile_loadd(4, means + p * most + j + TILE, 4 * most);
            _tile_dpbf16ps(0, 2, 3);
            _tile_dpbf16ps(1, 2, 4);
        }
        _tile_stored(0, to + j, 4 * ld);
        _tile_stored(1, to + j + TILE, 4 * ld);
    }
    _tile_release();
}

static int in_tiles(int dp) { return dp % (2 * TILE) == 0 && tiles_allowed(); }
#else
enum { TILE = RANKED };
static int in_tiles(int dp) { return 0; }
static void rank_by_tiles(const uint32_t *queries, int dp, const uint32_t *means, int64_t most, int n, float *to,
                          int64_t ld) {}
#endif

int ranked_at_once(int dp) { return in_tiles(dp) ? TILE : 2 * ROWS; }

INLINE void rank_tile(const int rows, const uint32_t *queries, int dp, const uint32_t *means, int64_t most, float *to,
                      int64_t ld) {
    enum { VECS = LANES == 16 ? 4 : 2 };
    vec sum[ROWS][VECS];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < VECS; j++) sum[i][j] = (vec){0};
    for (int p = 0; p < dp / 2; p++) {
        bits y[VECS];
        UNROLL for (int j = 0; j < VECS; j++) y[j] = PAIRS(means + p * most + j * LANES);
        UNROLL for (int i = 0; i < rows; i++)
            UNROLL for (int j = 0; j < VECS; j++)
                sum[i][j] = add_pairs(sum[i][j], (bits){0} + queries[i * dp / 2 + p], y[j]);
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < VECS; j++) AT(to + i * ld + j * LANES) = sum[i][j];
}

void rank_leaves(const uint32_t *queries, int R, int dp, const uint32_t *means, int64_t most, int n, float *to,
                 int64_t ld) {
    const int step = LANES == 16 ? 4 * LANES : 2 * LANES;
    if (in_tiles(dp)) {                                 /* for one query too: in other sums another leaf could win */
        rank_by_tiles(queries, dp, means, most, n, to, ld);
        return;
    }
    for (int j = 0; j < n; j += step) {
        int i = 0;
        for (; i + ROWS <= R; i += ROWS)
            rank_tile(ROWS, queries + i * dp / 2, dp, means + j, most, to + i * ld + j, ld);
        for (; i < R; i++) rank_tile(1, queries + i * dp / 2, dp, means + j, most, to + i * ld + j, ld);
    }
}
