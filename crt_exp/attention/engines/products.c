/* Matrix products, transposes and scratch memory of the CPU kernels: see vectors.h. */

#include "vectors.h"

#include <pthread.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

enum { K_BLOCK = 96 };  /* block size of the inner dimension */
enum { HUGE_PAGE = 1 << 21, MAX_ARENA = 1 << 25 };  /* bytes: huge page; largest reused arena */

INLINE void tile(const int rows, const int vectors, int k, const float *a, int64_t ar, int64_t ac, const float *b,
                 int64_t ldb, float *c, int64_t ldc, const int add) {
    vec sum[ROWS][4];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < vectors; j++) sum[i][j] = add ? load_vec(c + i * ldc + j * LANES) : (vec){0};
    for (int p = 0; p < k; p++) {
        vec w[4];
        UNROLL for (int j = 0; j < vectors; j++) w[j] = AT(b + p * ldb + j * LANES);
        UNROLL for (int i = 0; i < rows; i++)
            UNROLL for (int j = 0; j < vectors; j++) sum[i][j] += a[i * ar + p * ac] * w[j];
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < vectors; j++) AT(c + i * ldc + j * LANES) = sum[i][j];
}

#define TILE(rows, vectors) tile(rows, vectors, k, a, ar, ac, b, ldb, c, ldc, add)
#define TILES(vectors) \
    static __attribute__((noinline)) void tiles_##vectors( \
        int rows, int k, const float *a, int64_t ar, int64_t ac, const float *b, int64_t ldb, float *c, int64_t ldc, \
        int add) { \
        switch (rows) { \
            case 6: TILE(6, vectors); break; \
            case 5: TILE(5, vectors); break; \
            case 4: TILE(4, vectors); break; \
            case 3: TILE(3, vectors); break; \
            case 2: TILE(2, vectors); break; \
            default: TILE(1, vectors); \
        } \
    }
TILES(1)
TILES(2)
TILES(3)
TILES(4)

void matmul(Triangle part, int m, int n, int k, const float *a, int64_t ar, int64_t ac, const float *b, int64_t ldb,
            float *c, int64_t ldc, int add) {
    for (int p = 0; p < k; p += K_BLOCK)
        for (int j = 0; j < n; j += VECTORS * LANES)
            for (int i = 0; i < m; i += ROWS) {
                int rows = m - i < ROWS ? m - i : ROWS, stop = p + K_BLOCK < k ? p + K_BLOCK : k, start = p;
                int columns = part == LOWER_C && i + rows < n ? i + rows : n;
                int vectors = (columns - j + LANES - 1) / LANES;
                if (vectors <= 0) continue;
                if (part == LOWER_A && i + rows < stop) stop = i + rows;
                if (part == UPPER_A) start = i;
                const float *from = a + i * ar + start * ac, *with = b + start * ldb + j;
                float *to = c + i * ldc + j;
                switch (vectors < VECTORS ? vectors : VECTORS) {
                    case 1: tiles_1(rows, stop - start, from, ar, ac, with, ldb, to, ldc, add || p); break;
                    case 2: tiles_2(rows, stop - start, from, ar, ac, with, ldb, to, ldc, add || p); break;
                    case 3: tiles_3(rows, stop - start, from, ar, ac, with, ldb, to, ldc, add || p); break;
                    default: tiles_4(rows, stop - start, from, ar, ac, with, ldb, to, ldc, add || p);
                }
            }
}

INLINE void transpose_tile(const float *from, int64_t ldf, float *to, int64_t ldt) {
    vec r[LANES];
    UNROLL for (int i = 0; i < LANES; i++) r[i] = AT(from + i * ldf);
    UNROLL for (int s = 1; s < LANES; s *= 2) {  /* swaps the off-diagonal quarters of blocks of size 2 s */
        ivec low, high;
        UNROLL for (int e = 0; e < LANES; e++) {
            low[e] = e & s ? LANES + e - s : e;
            high[e] = e & s ? LANES + e : e + s;
        }
        UNROLL for (int i = 0; i < LANES; i++)
            if (!(i & s)) {
                vec a = r[i], b = r[i + s];
                r[i] = shuffle(a, b, low);
                r[i + s] = shuffle(a, b, high);
            }
    }
    UNROLL for (int i = 0; i < LANES; i++) AT(to + i * ldt) = r[i];
}

void transpose(int m, int n, const float *from, int64_t ldf, float *to, int64_t ldt) {
    int whole_m = m / LANES * LANES, whole_n = n / LANES * LANES;
    for (int i = 0; i < whole_m; i += LANES)
        for (int j = 0; j < whole_n; j += LANES) transpose_tile(from + i * ldf + j, ldf, to + j * ldt + i, ldt);
    for (int i = 0; i < m; i++)
        for (int j = i < whole_m ? whole_n : 0; j < n; j++) to[j * ldt + i] = from[i * ldf + j];
}

void load_rows(View t, int64_t z, int64_t g, int64_t start, int n, int d, float factor, const float *shift,
               const uint8_t *mask, float *to, int ld) {
    for (int i = 0; i < n; i++, to += ld) {
        const float *from = head_ptr(t, z, g) + (start + i) * t.token;
        if (mask && !mask[start + i]) {
            memset(to, 0, sizeof(float) * ld);
            continue;
        }
        int p = 0;
        for (; p + LANES <= d; p += LANES)
            AT(to + p) = factor * AT(from + p) - (shift ? load_vec(shift + p) : (vec){0});
        for (; p < d; p++) to[p] = factor * from[p] - (shift ? shift[p] : 0);
        for (; p < ld; p++) to[p] = 0;
    }
}

/* ---- Scratch memory ---- */

static pthread_key_t arena_key;
static pthread_once_t arena_once = PTHREAD_ONCE_INIT;
static void make_arena_key(void) { pthread_key_create(&arena_key, free); }

typedef struct {
    size_t size;
    char pad[56];
} Arena;

/* NULL before the first arena of this thread. pthread_once creates the key: key 0 may belong to another library. */
static Arena *thread_arena(void) {
    pthread_once(&arena_once, make_arena_key);
    return pthread_getspecific(arena_key);
}

static float *reserve_arena(size_t count) {
    Arena *arena = thread_arena();
    if (arena && arena->size >= count) return (float *)(arena + 1);
    free(arena);
    pthread_setspecific(arena_key, NULL);
    size_t bytes = (sizeof(Arena) + sizeof(float) * count + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    if (!(arena = aligned_alloc(HUGE_PAGE, bytes))) return NULL;
#if defined(MADV_HUGEPAGE)
    madvise(arena, bytes, MADV_HUGEPAGE);
#endif
    arena->size = count;
    pthread_setspecific(arena_key, arena);
    return (float *)(arena + 1);
}

static size_t padded_size(size_t count) { return (count + PAD - 1) / PAD * PAD + PAD; }

int allocate_scratch(const Scratch *buffers, size_t n) {
    size_t count = 0;
    for (size_t i = 0; i < n; i++) count += padded_size(buffers[i].count);
    float *memory = reserve_arena(count);
    if (!memory) return 0;
    for (size_t i = 0; i < n; i++) {
        *buffers[i].pointer = memory;
        memory += padded_size(buffers[i].count);
    }
    return 1;
}

void trim_scratch(void) {
    Arena *arena = thread_arena();
    if (arena && arena->size * sizeof(float) > MAX_ARENA) {
        free(arena);
        pthread_setspecific(arena_key, NULL);
    }
}
