/* fp32 kernels of a training step on a CPU: SwiGLU experts, causal attention with rotary embeddings, and the softmax of
   the language-model head, each with its gradients.

   Plain C with the vector extensions of GCC and Clang. The vector width follows from the target: 16 floats with
   AVX-512, 8 with AVX, else 4 (NEON, SSE). One thread computes each element of a result, in an order that does not
   depend on the number of threads, so results are bit-equal from run to run. Tensors are contiguous.
   Functions return SUCCESS, OUT_OF_MEMORY or BAD_TARGET.

   Shapes: N tokens, D model width, E experts, F expert width, K experts per token, R routed rows; B batch, S sequence,
   H query heads, G key and value heads, P head width; C rows of logits, V vocabulary. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num(void) { return 0; }
#endif

#if defined(__AVX512F__)
#define W 16 /* floats in a vector */
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX__)
#define W 8
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define W 4
#define LOW 0, 4, 1, 5
#define HIGH 2, 6, 3, 7
#endif

typedef float Vec __attribute__((vector_size(4 * W)));
typedef int32_t Ints __attribute__((vector_size(4 * W)));
typedef float Unaligned __attribute__((vector_size(4 * W), aligned(4), may_alias));

#if defined(__clang__) || __GNUC__ >= 12
#define INTERLEAVE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define INTERLEAVE(a, b, ...) __builtin_shuffle(a, b, (Ints){__VA_ARGS__})
#endif
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

enum { SUCCESS, OUT_OF_MEMORY, BAD_TARGET };

/* The sums of one tile of a matrix product are ROWS x VECTORS vectors. They must stay in registers, next to VECTORS
   vectors of the right factor: AVX-512 and NEON have 32 registers, AVX and SSE have 16. */
#if W == 8 || defined(__SSE__) && W == 4
enum { ROWS = 6, VECTORS = 2 };
#else
enum { ROWS = 6, VECTORS = 4 };
#endif
enum { LINE = 16 /* floats in a cache line */ };
enum { COPIED_ROWS = 128 }; /* rows per weight gradient: 64 to 256 were equally fast, all at once up to 12% slower */
/* rows of attention weights that the backward pass keeps: 2 to 8 * ROWS were equally fast, ROWS 14% slower */
enum { QUERIES = 4 * ROWS };

INLINE Vec load(const float *p) { return *(const Unaligned *)p; }
INLINE void store(float *p, Vec x) { *(Unaligned *)p = x; }
INLINE Vec fill(float x) { return x - (Vec){0}; }
INLINE Vec load_lanes(const float *p, long lanes) { Vec x = {0}; memcpy(&x, p, 4 * lanes); return x; }
INLINE void store_lanes(float *p, Vec x, long lanes) { memcpy(p, &x, 4 * lanes); }
INLINE Vec choose(Ints mask, Vec a, Vec b) { return (Vec)(((Ints)a & mask) | ((Ints)b & ~mask)); }
INLINE Vec larger(Vec a, Vec b) { return choose(a > b, a, b); }
INLINE long round_up(long n) { return (n + W - 1) / W * W; }
INLINE long smaller(long a, long b) { return a < b ? a : b; }

/* Reduce all lanes: each step combines lanes i and i + W/2 and repeats the results, so all lanes end up equal. */
INLINE float sum_lanes(Vec x) {
  UNROLL for (int step = 1; step < W; step *= 2) x = INTERLEAVE(x, x, LOW) + INTERLEAVE(x, x, HIGH);
  return x[0];
}

INLINE float largest_lane(Vec x) {
  UNROLL for (int step = 1; step < W; step *= 2) x = larger(INTERLEAVE(x, x, LOW), INTERLEAVE(x, x, HIGH));
  return x[0];
}

/* exp(x) = 2^n exp(r), n = round(x / ln 2), |r| <= ln 2 / 2; Cephes' polynomial. Relative error below 2e-7; 0 below
   -87.3, finite above 88.3, NaN for NaN. */
INLINE Vec vexp(Vec x) {
  const float rounding = 12582912.f; /* 1.5 * 2^23: adding it rounds to an integer, in the lowest bits of the float */
  Ints underflow = x < -87.3f;
  x = choose(underflow, fill(-87.3f), x);
  x = choose(x > 88.3f, fill(88.3f), x);
  Vec shifted = x * 1.44269504f + rounding, n = shifted - rounding;
  Vec r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.f);
  Ints exponent = ((Ints)shifted - 0x4B400000 + 127) << 23;
  return (Vec)((Ints)(p * (Vec)exponent) & ~underflow);
}

INLINE Vec sigmoid(Vec x) { return 1.f / (1.f + vexp(-x)); }

/* A matrix: row r begins at data + r * stride, or at data + index[r] * stride. */
typedef struct {
  float *data;
  long stride;
  const int64_t *index;
} Matrix;

INLINE float *row(Matrix m, long r) { return m.data + (m.index ? m.index[r] : r) * m.stride; }
INLINE Matrix matrix(const float *data, long stride) { return (Matrix){(float *)data, stride, NULL}; }
INLINE Matrix gathered(const float *data, long stride, const int64_t *index) {
  return (Matrix){(float *)data, stride, index};
}

typedef struct {
  Matrix a, b, c;
  long M, N, K;       /* c is M x N, the sum has K terms */
  int add;            /* add to c instead of overwriting it */
  const float *scale; /* factor of each row of the product, or NULL */
  const float *ahead; /* data that is needed next and is prefetched meanwhile, or NULL */
  long ahead_floats;
} Product;

/* Compute rows i to i + rows and columns j to j + vectors * W of c = a b, or of c = a^T b if `transposed`. With
   `lanes`, only that many columns of a single vector. */
INLINE void tile(const Product *q, long i, long j, const int rows, const int vectors, const int transposed,
                 const int prefetch, long lanes) {
  Vec sums[ROWS][VECTORS];
  const float *a_rows[ROWS];
  UNROLL for (int r = 0; r < rows; r++) {
    a_rows[r] = transposed ? NULL : row(q->a, i + r);
    UNROLL for (int v = 0; v < vectors; v++) sums[r][v] = (Vec){0};
  }
  const Matrix a = q->a, b = q->b;
  const long K = q->K, prefetched = (j / (VECTORS * W) * (q->M / ROWS + 1) + i / ROWS) * K * LINE;
  const float *ahead = q->ahead + prefetched, *end = q->ahead + q->ahead_floats;
  for (long k = 0; k < K; k++, ahead += LINE) {
    if (prefetch && ahead < end) __builtin_prefetch(ahead);
    const float *b_row = row(b, k) + j, *a_row = transposed ? row(a, k) + i : NULL;
    Vec right[VECTORS];
    UNROLL for (int v = 0; v < vectors; v++) right[v] = lanes ? load_lanes(b_row, lanes) : load(b_row + v * W);
    UNROLL for (int r = 0; r < rows; r++) {
      Vec left = fill(transposed ? a_row[r] : a_rows[r][k]);
      UNROLL for (int v = 0; v < vectors; v++) sums[r][v] += left * right[v];
    }
  }
  UNROLL for (int r = 0; r < rows; r++) {
    float *c_row = row(q->c, i + r) + j, factor = q->scale ? q->scale[i + r] : 1.f;
    UNROLL for (int v = 0; v < vectors; v++) {
      Vec sum = sums[r][v] * factor;
      if (lanes) store_lanes(c_row, q->add ? sum + load_lanes(c_row, lanes) : sum, lanes);
      else store(c_row + v * W, q->add ? sum + load(c_row + v * W) : sum);
    }
  }
}

INLINE void columns(const Product *q, long j, const int vectors, const int transposed, const int prefetch, long lanes) {
  long i = 0;
  for (; i + ROWS <= q->M; i += ROWS) tile(q, i, j, ROWS, vectors, transposed, prefetch, lanes);
  switch (q->M - i) {
    case 5: tile(q, i, j, 5, vectors, transposed, prefetch, lanes); break;
    case 4: tile(q, i, j, 4, vectors, transposed, prefetch, lanes); break;
    case 3: tile(q, i, j, 3, vectors, transposed, prefetch, lanes); break;
    case 2: tile(q, i, j, 2, vectors, transposed, prefetch, lanes); break;
    case 1: tile(q, i, j, 1, vectors, transposed, prefetch, lanes); break;
  }
}

INLINE void multiply(Product q, const int transposed, const int prefetch) {
  long j = 0;
  for (; j + VECTORS * W <= q.N; j += VECTORS * W) columns(&q, j, VECTORS, transposed, prefetch, 0);
  if (VECTORS > 2 && j + 2 * W <= q.N) columns(&q, j, 2, transposed, 0, 0), j += 2 * W;
  if (j + W <= q.N) columns(&q, j, 1, transposed, 0, 0), j += W;
  if (j < q.N) columns(&q, j, 1, transposed, 0, q.N - j);
}

static void product(Product q) { multiply(q, 0, 0); }            /* c = a b */
static void product_ahead(Product q) { multiply(q, 0, 1); }      /* the same, and prefetches q.ahead */
static void transposed_product(Product q) { multiply(q, 1, 1); } /* c = a^T b */

/* Write the transpose of the I x J matrix `a` to `t`, with zeros in columns I to round_up(I). */
static void transpose(Matrix a, long I, long J, float *t, long stride) {
  for (long i = 0; i < round_up(I); i += W)
    for (long j = 0; j < J; j += W) {
      Vec x[W], y[W];
      long lanes = smaller(W, J - j);
      UNROLL for (int r = 0; r < W; r++) {
        x[r] = (Vec){0};
        if (i + r < I) x[r] = lanes == W ? load(row(a, i + r) + j) : load_lanes(row(a, i + r) + j, lanes);
      }
      UNROLL for (int step = 1; step < W; step *= 2) { /* log2(W) perfect shuffles of all elements transpose them */
        UNROLL for (int r = 0; r < W / 2; r++) {
          y[2 * r] = INTERLEAVE(x[r], x[r + W / 2], LOW);
          y[2 * r + 1] = INTERLEAVE(x[r], x[r + W / 2], HIGH);
        }
        UNROLL for (int r = 0; r < W; r++) x[r] = y[r];
      }
      UNROLL for (int r = 0; r < W; r++) if (r < lanes) store(t + (j + r) * stride + i, x[r]);
    }
}

/* The sum of a b c over n elements; c may be NULL. */
static float dot(const float *a, const float *b, const float *c, long n) {
  Vec sum = {0};
  for (long i = 0; i < n; i += W) {
    long lanes = smaller(W, n - i);
    Vec product = lanes == W ? load(a + i) * load(b + i) : load_lanes(a + i, lanes) * load_lanes(b + i, lanes);
    sum += !c ? product : product * (lanes == W ? load(c + i) : load_lanes(c + i, lanes));
  }
  return sum_lanes(sum);
}

/* Memory for a call: `shared` floats used by all threads, then `each` floats per thread; freed by the caller. */
static float *allocate(long shared, long each, int threads) {
  return aligned_alloc(64, (4 * (shared + each * threads) + 63) / 64 * 64);
}

/* ---- Experts: y_t = sum_k p_tk W2_e^T (silu(Wgate_e x_t) * (Wup_e x_t)), e = expert of slot (t, k) ----

   Sorted row r is slot order[r] = t K + k, and the rows of expert e end before ends[e]. Gate and up have padded rows of
   round_up(F) floats, so that no loop over them has a remainder. Threads first share the experts; then each takes a
   range of columns of the sum over experts. A single thread finishes one expert before the next, while its rows are in
   the cache. */

typedef struct {
  const float *x, *p, *w13, *w2;
  const int64_t *order;
  const int32_t *ends;
  int64_t *tokens; /* token of each sorted row */
  float *p_R;      /* routing weight of each sorted row */
  long N, K, E, F, D, FP;
  int threads;
} Experts;

INLINE long begin_of(const Experts *m, long e) { return e ? m->ends[e - 1] : 0; }
INLINE long rows_of(const Experts *m, long e) { return m->ends[e] - begin_of(m, e); }
INLINE long columns_per_task(const Experts *m) { return m->threads == 1 ? m->D : VECTORS * W; }

static int prepare(Experts *m) {
  long R = m->ends[m->E - 1];
  m->FP = round_up(m->F);
  m->tokens = malloc(12 * R + 64);
  if (!m->tokens) return OUT_OF_MEMORY;
  m->p_R = (float *)(m->tokens + R);
  for (long r = 0; r < R; r++) m->tokens[r] = m->order[r] / m->K, m->p_R[r] = m->p[m->order[r]];
  return SUCCESS;
}

/* gate_up = x W13^T and h = silu(gate) * up for the rows of expert e */
static void expert_up(const Experts *m, long e, float *gate_up, float *h, float *packed) {
  long F = m->F, D = m->D, FP = m->FP, n = rows_of(m, e), stride = 2 * FP + W; /* + W: not a power of two */
  const float *w13 = m->w13 + e * 2 * F * D;
  if (!n) return;
  transpose(matrix(w13, D), F, D, packed, stride);
  transpose(matrix(w13 + F * D, D), F, D, packed + FP, stride);
  product_ahead((Product){gathered(m->x, D, m->tokens + begin_of(m, e)), matrix(packed, stride),
                          matrix(gate_up, 2 * FP), n, 2 * FP, D, 0, NULL, m->w2 + e * F * D, F * D});
  for (long r = 0; r < n; r++)
    for (long f = 0; f < FP; f += W) {
      Vec gate = load(gate_up + r * 2 * FP + f), up = load(gate_up + r * 2 * FP + FP + f);
      store(h + r * (FP + W) + f, gate * sigmoid(gate) * up);
    }
}

int experts_forward(const float *x, const float *p, const float *w13, const float *w2, const int64_t *order,
                    const int32_t *ends, float *gate_up, float *y, long N, long K, long E, long F, long D,
                    int threads) {
  Experts m = {x, p, w13, w2, order, ends, NULL, NULL, N, K, E, F, D, 0, threads};
  if (prepare(&m)) return OUT_OF_MEMORY;
  long group = threads == 1 ? 1 : E, FP = m.FP, each = D * (2 * FP + W), slice = columns_per_task(&m);
  float *h = allocate(ends[E - 1] * (FP + W), each, threads), *packed = h + ends[E - 1] * (FP + W);
  if (!h) return free(m.tokens), OUT_OF_MEMORY;
  memset(y, 0, 4 * N * D);
#pragma omp parallel num_threads(threads)
  for (long first = 0; first < E; first += group) {
    long start = begin_of(&m, first);
#pragma omp for schedule(dynamic)
    for (long e = first; e < first + group; e++)
      expert_up(&m, e, gate_up + begin_of(&m, e) * 2 * FP, h + (begin_of(&m, e) - start) * (FP + W),
                packed + omp_get_thread_num() * each);
#pragma omp for schedule(static)
    for (long j = 0; j < D; j += slice)
      for (long e = first; e < first + group; e++)
        product_ahead((Product){matrix(h + (begin_of(&m, e) - start) * (FP + W), FP + W), matrix(w2 + e * F * D + j, D),
                          gathered(y + j, D, m.tokens + begin_of(&m, e)), rows_of(&m, e), smaller(slice, D - j), F, 1,
                          m.p_R + begin_of(&m, e), w13 + 2 * (e + 1) * F * D, e + 1 < E ? 2 * F * D : 0});
  }
  free(h), free(m.tokens);
  return SUCCESS;
}

/* The gradients of an expert's weights and of its rows' gate, up and routing weights. With h = silu(gate) * up and
   s = sigmoid(gate): dh = dy W2^T, dp = <h, dh>, dup = p dh silu(gate), dgate = p dh up (s + silu(gate) (1 - s)),
   dW2 = (p h)^T dy, dW13 = [dgate dup]^T x. A row of `rows` receives dgate, dup and p h. */
static void expert_gradient(const Experts *m, long e, const float *dy, const float *gate_up, float *rows, float *packed,
                            float *dp, float *dw13, float *dw2) {
  long F = m->F, D = m->D, FP = m->FP, n = rows_of(m, e), begin = begin_of(m, e), stride = 3 * FP + W;
  float *h = rows + 2 * FP, *copied = packed + D * (FP + W);
  if (n) transpose(matrix(m->w2 + e * F * D, D), F, D, packed, FP + W);
  product_ahead((Product){gathered(dy, D, m->tokens + begin), matrix(packed, FP + W), matrix(h, stride), n, FP, D, 0,
                          NULL, m->w13 + 2 * e * F * D, 2 * F * D});
  for (long r = 0; r < n; r++) {
    const float *gate_r = gate_up + r * 2 * FP, p = m->p_R[begin + r];
    float *dgate_r = rows + r * stride, *h_r = h + r * stride;
    Vec sum = {0};
    for (long f = 0; f < FP; f += W) {
      Vec gate = load(gate_r + f), up = load(gate_r + FP + f), dh = load(h_r + f);
      Vec s = sigmoid(gate), silu = gate * s;
      sum += silu * up * dh;
      dh *= p;
      store(h_r + f, silu * up * p);
      store(dgate_r + f, dh * up * (silu * (1.f - s) + s));
      store(dgate_r + FP + f, dh * silu);
    }
    dp[m->order[begin + r]] = sum_lanes(sum);
  }
  long blocks = n ? (n + COPIED_ROWS - 1) / COPIED_ROWS : 1, most = n ? (n + blocks - 1) / blocks : 1;
  for (long r = 0; r == 0 || r < n; r += most) {
    const int64_t *tokens = m->tokens + begin + r;
    long count = smaller(most, n - r);
    for (int x = 0; x < 2; x++) {
      for (long i = 0; i < count; i++) memcpy(copied + i * (D + W), (x ? m->x : dy) + tokens[i] * D, 4 * D);
      for (int up = 0; up < (x && F != FP ? 2 : 1); up++)
        transposed_product((Product){matrix(x ? rows + r * stride + up * FP : h + r * stride, stride),
                                     matrix(copied, D + W),
                                     matrix(x ? dw13 + (2 * e + up) * F * D : dw2 + e * F * D, D),
                                     x && F == FP ? 2 * F : F, D, count, r > 0, NULL, m->w2 + (e + 1) * F * D,
                                     x && e + 1 < m->E ? F * D : 0});
    }
  }
}

int experts_backward(const float *dy, const float *x, const float *p, const float *w13, const float *w2,
                     const int64_t *order, const int32_t *ends, const float *gate_up, float *dx, float *dp,
                     float *dw13, float *dw2, long N, long K, long E, long F, long D, int threads) {
  Experts m = {x, p, w13, w2, order, ends, NULL, NULL, N, K, E, F, D, 0, threads};
  if (prepare(&m)) return OUT_OF_MEMORY;
  long group = threads == 1 ? 1 : E, R = ends[E - 1], FP = m.FP, stride = 3 * FP + W, slice = columns_per_task(&m);
  long each = D * (FP + W) + COPIED_ROWS * (D + W);
  float *rows = allocate(R * stride, each, threads), *packed = rows + R * stride;
  if (!rows) return free(m.tokens), OUT_OF_MEMORY;
  memset(dx, 0, 4 * N * D);
  memset(dp, 0, 4 * N * K);
#pragma omp parallel num_threads(threads)
  for (long first = 0; first < E; first += group) {
    long start = begin_of(&m, first);
#pragma omp for schedule(dynamic)
    for (long e = first; e < first + group; e++)
      expert_gradient(&m, e, dy, gate_up + begin_of(&m, e) * 2 * FP, rows + (begin_of(&m, e) - start) * stride,
                      packed + omp_get_thread_num() * each, dp, dw13, dw2);
#pragma omp for schedule(static)
    for (long j = 0; j < D; j += slice) /* dx = dgate Wgate + dup Wup */
      for (long e = first; e < first + group; e++)
        for (int up = 0; up < (F == FP ? 1 : 2); up++) /* without padding, both are one product */
          product((Product){matrix(rows + (begin_of(&m, e) - start) * stride + up * FP, stride),
                            matrix(w13 + (2 * e + up) * F * D + j, D),
                            gathered(dx + j, D, m.tokens + begin_of(&m, e)), rows_of(&m, e), smaller(slice, D - j),
                            F == FP ? 2 * F : F, 1});
  }
  free(rows), free(m.tokens);
  return SUCCESS;
}

/* ---- Attention: out = softmax(q k^T / sqrt(P)) v over the tokens up to the query's, q and k rotated ----

   A token's row of qkv holds H query, G key and G value heads; query head h uses head h / (H / G). Channels i and
   i + P/2 of a head are rotated by the angle whose cosine and sine are in row s of `rotation`, (2, S, P). */

/* Rotate a head's channels of one token, times `scale`; sign -1 rotates back. */
INLINE void rotate(const float *x, const float *cosine, const float *sine, long P, float sign, float scale,
                   float *restrict y) {
  for (long i = 0; i < P / 2; i++) {
    float a = x[i], b = x[P / 2 + i], c = scale * cosine[i], s = sign * scale * sine[i];
    y[i] = a * c - b * s;
    y[P / 2 + i] = b * c + a * s;
  }
}

/* Scores of `m` queries from token i on against all keys up to theirs; later keys get -1e30. Returns the columns. */
INLINE long scores_of(const float *q, Matrix keys, long i, long m, long P, float *scores, long stride) {
  long width = round_up(i + m);
  product((Product){matrix(q, P), keys, matrix(scores, stride), m, width, P});
  for (long r = 0; r < m; r++)
    for (long j = i + r + 1; j < width; j++) scores[r * stride + j] = -1e30f;
  return width;
}

int attention_forward(const float *qkv, const float *rotation, float *out, float *lse, long B, long S, long H, long G,
                      long P, int threads) {
  long ld = (H + 2 * G) * P, SP = round_up(S) + W, each = P * SP + (S + ROWS) * P + ROWS * SP;
  float *memory = allocate(0, each, threads), scale = 1.f / sqrtf((float)P);
  const float *cosine = rotation, *sine = rotation + S * P;
  if (!memory) return OUT_OF_MEMORY;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long task = 0; task < B * G; task++) {
    const float *base = qkv + task / G * S * ld, *k = base + (H + task % G) * P, *v = k + G * P;
    float *keys = memory + omp_get_thread_num() * each, *rotated = keys + P * SP, *q = rotated + S * P;
    float *scores = q + ROWS * P;
    for (long s = 0; s < S; s++) rotate(k + s * ld, cosine + s * P, sine + s * P, P, 1, 1, rotated + s * P);
    transpose(matrix(rotated, P), S, P, keys, SP);
    for (long h = task % G * (H / G); h < (task % G + 1) * (H / G); h++)
      for (long i = 0; i < S; i += ROWS) {
        long m = smaller(ROWS, S - i);
        for (long r = 0; r < m; r++)
          rotate(base + (i + r) * ld + h * P, cosine + (i + r) * P, sine + (i + r) * P, P, 1, scale, q + r * P);
        long width = scores_of(q, matrix(keys, SP), i, m, P, scores, SP);
        float inverse[ROWS];
        for (long r = 0; r < m; r++) {
          float *row = scores + r * SP;
          Vec most = load(row), sum = {0};
          for (long j = W; j < width; j += W) most = larger(most, load(row + j));
          float max = largest_lane(most);
          for (long j = 0; j < width; j += W) {
            Vec weight = vexp(load(row + j) - max);
            sum += weight;
            store(row + j, weight);
          }
          float total = sum_lanes(sum);
          inverse[r] = 1.f / total;
          lse[(task / G * H + h) * S + i + r] = max + logf(total);
        }
        product((Product){matrix(scores, SP), matrix(v, ld), matrix(out + (task / G * S + i) * H * P + h * P, H * P),
                          m, P, i + m, 0, inverse});
      }
  }
  free(memory);
  return SUCCESS;
}

/* With weights w = exp(q k^T - lse) and delta = <dout, out>: dv = w^T dout, ds = w (dout v^T - delta), dq = ds k,
   dk = ds^T q; dq and dk are rotated back. */
int attention_backward(const float *dout, const float *qkv, const float *rotation, const float *out, const float *lse,
                       float *dqkv, long B, long S, long H, long G, long P, int threads) {
  long ld = (H + 2 * G) * P, lo = H * P, SP = round_up(S) + W, packed = P * SP;
  long each = 2 * packed + 2 * S * P + QUERIES * (P + 2 * SP) + ROWS * P;
  float *memory = allocate(0, each, threads), scale = 1.f / sqrtf((float)P);
  const float *cosine = rotation, *sine = rotation + S * P;
  if (!memory) return OUT_OF_MEMORY;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long task = 0; task < B * G; task++) {
    long first = task / G * S, kv = (H + task % G) * P; /* the sequence's first token; the channels of its keys */
    const float *k = qkv + first * ld + kv, *v = k + G * P;
    float *keys = memory + omp_get_thread_num() * each, *values = keys + packed, *rotated = values + packed;
    float *dk = rotated + S * P, *q = dk + S * P, *w = q + QUERIES * P, *ds = w + QUERIES * SP, *dq = ds + QUERIES * SP;
    Matrix dv = matrix(dqkv + first * ld + kv + G * P, ld);
    for (long s = 0; s < S; s++) {
      rotate(k + s * ld, cosine + s * P, sine + s * P, P, 1, 1, rotated + s * P);
      memset(row(dv, s), 0, 4 * P);
    }
    memset(dk, 0, 4 * S * P);
    transpose(matrix(rotated, P), S, P, keys, SP);
    transpose(matrix(v, ld), S, P, values, SP);
    for (long h = task % G * (H / G); h < (task % G + 1) * (H / G); h++)
      for (long i = 0; i < S; i += QUERIES) {
        long queries = smaller(QUERIES, S - i);
        const float *dout_i = dout + (first + i) * lo + h * P, *out_i = out + (first + i) * lo + h * P;
        for (long b = 0; b < queries; b += ROWS) {
          long m = smaller(ROWS, queries - b), s = i + b;
          float *wb = w + b * SP, *dsb = ds + b * SP, *qb = q + b * P;
          for (long r = 0; r < m; r++)
            rotate(qkv + (first + s + r) * ld + h * P, cosine + (s + r) * P, sine + (s + r) * P, P, 1, scale,
                   qb + r * P);
          long width = scores_of(qb, matrix(keys, SP), s, m, P, wb, SP);
          product((Product){matrix(dout_i + b * lo, lo), matrix(values, SP), matrix(dsb, SP), m, width, P});
          for (long r = 0; r < m; r++) {
            float delta = dot(dout_i + (b + r) * lo, out_i + (b + r) * lo, NULL, P);
            float lse_r = lse[(task / G * H + h) * S + s + r];
            for (long j = 0; j < width; j += W) {
              Vec weight = vexp(load(wb + r * SP + j) - lse_r);
              store(wb + r * SP + j, weight);
              store(dsb + r * SP + j, weight * (load(dsb + r * SP + j) - delta));
            }
          }
          product((Product){matrix(dsb, SP), matrix(rotated, P), matrix(dq, P), m, P, s + m});
          for (long r = 0; r < m; r++)
            rotate(dq + r * P, cosine + (s + r) * P, sine + (s + r) * P, P, -1, scale,
                   dqkv + (first + s + r) * ld + h * P);
        }
        for (long j = 0; j < i + queries; j += j < i ? i : ROWS) { /* all keys before the block, then ROWS at a time */
          long skipped = j < i ? 0 : j - i, m = j < i ? i : smaller(ROWS, i + queries - j), n = queries - skipped;
          const float *dout_j = dout_i + skipped * lo;
          transposed_product((Product){matrix(w + skipped * SP + j, SP), matrix(dout_j, lo), matrix(row(dv, j), ld), m,
                                       P, n, 1});
          transposed_product((Product){matrix(ds + skipped * SP + j, SP), matrix(q + skipped * P, P),
                                       matrix(dk + j * P, P), m, P, n, 1});
        }
      }
    for (long s = 0; s < S; s++)
      rotate(dk + s * P, cosine + s * P, sine + s * P, P, -1, 1, dqkv + (first + s) * ld + kv);
  }
  free(memory);
  return SUCCESS;
}

/* ---- Head: nll = lse - logits[target], loss = sum(nll + z lse^2) / N ----

   With `gradient`, the logits are replaced by their gradient, ((1 + 2 z lse) softmax(logits) - onehot(target)) / N. */
int head_loss(float *logits, const int64_t *targets, float *nll, float *lse, long C, long V, float z, long N,
              long gradient, int threads) {
  int status = SUCCESS;
  long whole = V / W * W, rest = V - whole;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(| : status)
  for (long r = 0; r < C; r++) {
    float *row = logits + r * V;
    if (targets[r] < 0 || targets[r] >= V) {
      status = BAD_TARGET;
      continue;
    }
    float target_logit = row[targets[r]], max = row[0], total = 0;
    Vec most = fill(max), sum = {0}, tail = {0};
    for (long j = 0; j < whole; j += W) most = larger(most, load(row + j));
    max = largest_lane(most);
    for (long j = whole; j < V; j++) max = row[j] > max ? row[j] : max;
    for (long j = 0; j < whole; j += W) {
      Vec e = vexp(load(row + j) - max);
      sum += e;
      if (gradient) store(row + j, e);
    }
    if (rest) {
      tail = vexp(load_lanes(row + whole, rest) - max);
      for (long j = 0; j < rest; j++) total += tail[j];
    }
    total += sum_lanes(sum);
    lse[r] = max + logf(total);
    nll[r] = lse[r] - target_logit;
    if (!gradient) continue;
    float factor = (1.f + 2.f * z * lse[r]) / total / N;
    for (long j = 0; j < whole; j += W) store(row + j, load(row + j) * factor);
    if (rest) store_lanes(row + whole, tail * factor, rest);
    row[targets[r]] -= 1.f / N;
  }
  return status;
}

/* ---- RMSNorm: y = w x / rms, rms = sqrt(mean(x^2) + eps) ---- */

int norm_forward(const float *x, const float *w, float *y, float *inverse, long N, long D, float eps, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (long n = 0; n < N; n++) {
    inverse[n] = 1.f / sqrtf(dot(x + n * D, x + n * D, NULL, D) / D + eps);
    for (long d = 0; d < D; d++) y[n * D + d] = x[n * D + d] * inverse[n] * w[d];
  }
  return SUCCESS;
}

/* dx = (w dy - x mean(x w dy) / rms^2) / rms, dw = sum over tokens of dy x / rms; each thread sums a range of channels.
   */
int norm_backward(const float *dy, const float *x, const float *w, const float *inverse, float *dx, float *dw, long N,
                  long D, int threads) {
#pragma omp parallel num_threads(threads)
  {
#pragma omp for schedule(static)
    for (long n = 0; n < N; n++) {
      const float *x_n = x + n * D, *dy_n = dy + n * D, r = inverse[n], c = dot(x_n, dy_n, w, D) / D * r * r;
      for (long d = 0; d < D; d++) dx[n * D + d] = (w[d] * dy_n[d] - x_n[d] * c) * r;
    }
#pragma omp for schedule(static)
    for (long begin = 0; begin < D; begin += 4 * W) {
      long end = smaller(D, begin + 4 * W);
      memset(dw + begin, 0, 4 * (end - begin));
      for (long n = 0; n < N; n++)
        for (long d = begin; d < end; d++) dw[d] += dy[n * D + d] * (x[n * D + d] * inverse[n]);
    }
  }
  return SUCCESS;
}

int vector_width(void) { return W; }
