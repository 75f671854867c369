// Attention and index kernels over f32 tiles, and the softmax that all tiles share.
#include "backends/cpu/targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "backends/cpu/attention_kernels.cc"
#include "hwy/foreach_target.h"
// clang-format off
#include "hwy/highway.h"
#include "backends/cpu/vec-inl.h"
// clang-format on
#include "backends/cpu/kernel_table.h"

HWY_BEFORE_NAMESPACE();
namespace sluice::cpu::HWY_NAMESPACE {

HWY_INLINE int64_t PanelWidth() { return int64_t(2 * L()); }

void DecodeRow(const std::byte* row, RowFormat format, int64_t kv_lora, int64_t rope, void* to) {
  float* out = static_cast<float*>(to);
  const int64_t lanes = int64_t(L()), dim = kv_lora + rope;
  if (format == RowFormat::kF32) {
    __builtin_memcpy(out, row, size_t(dim) * 4);
    return;
  }
  const uint16_t* tail = reinterpret_cast<const uint16_t*>(row);
  int64_t i = 0;
  if (format == RowFormat::kFp8) {
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(row);
    const int64_t tiles = (kv_lora + 127) / 128;
    float scale[64];
    __builtin_memcpy(scale, row + kv_lora, size_t(tiles) * 4);
    for (int64_t t = 0; t < tiles; ++t) {
      const VF s = hn::Set(df, scale[t]);
      const int64_t end = t * 128 + 128 < kv_lora ? t * 128 + 128 : kv_lora;
      for (i = t * 128; i + lanes <= end; i += lanes)
        hn::StoreU(hn::Mul(DecodeE4M3(codes + i), s), df, out + i);
      for (; i < end; ++i) {
        HWY_ALIGN uint8_t one[HWY_MAX_BYTES / sizeof(float)] = {codes[i]};
        out[i] = hn::GetLane(hn::Mul(DecodeE4M3(one), s));
      }
    }
    tail = reinterpret_cast<const uint16_t*>(row + kv_lora + tiles * 4) - kv_lora;
    i = kv_lora;
  }
  for (; i + lanes <= dim; i += lanes) hn::StoreU(LoadBF16(tail + i), df, out + i);
  for (; i < dim; ++i) {
    const uint32_t u = uint32_t(tail[i]) << 16;
    __builtin_memcpy(out + i, &u, 4);
  }
}

// x [count, n] (row stride ld) -> panels of 64 columns, k = n; columns past count are zero.
HWY_INLINE void TransposeToPanels(const float* x, int64_t count, int64_t n, int64_t ld, float* panels) {
  const int64_t nr = PanelWidth();
  for (int64_t base = 0; base < 64; base += nr) {
    float* panel = panels + base / nr * (n * nr);
    for (int64_t k0 = 0; k0 < n; k0 += 16) {
      const int64_t k1 = k0 + 16 < n ? k0 + 16 : n;
      for (int64_t j = 0; j < nr; ++j) {
        if (base + j < count) {
          const float* src = x + (base + j) * ld;
          for (int64_t k = k0; k < k1; ++k) panel[k * nr + j] = src[k];
        } else {
          for (int64_t k = k0; k < k1; ++k) panel[k * nr + j] = 0.0f;
        }
      }
    }
  }
}

void LoadLatent(const LatentBlock& b) {
  const int64_t nr = PanelWidth(), dim = b.kv_lora + b.rope;
  float* rows = static_cast<float*>(b.row);
  for (int64_t j = 0; j < b.count; ++j) DecodeRow(b.rows[j], b.format, b.kv_lora, b.rope, rows + j * dim);
  TransposeToPanels(rows, b.count, dim, dim, static_cast<float*>(b.keys));
  float* values = static_cast<float*>(b.values);
  for (int64_t col = 0; col < b.kv_lora; col += nr, values += 64 * nr) {
    const int64_t width = b.kv_lora - col < nr ? b.kv_lora - col : nr;
    for (int64_t j = 0; j < 64; ++j) {
      float* dst = values + j * nr;
      if (j < b.count && width == nr) {
        hn::StoreU(hn::LoadU(df, rows + j * dim + col), df, dst);
        hn::StoreU(hn::LoadU(df, rows + j * dim + col + nr / 2), df, dst + nr / 2);
        continue;
      }
      for (int64_t i = 0; i < nr; ++i) dst[i] = j < b.count && i < width ? rows[j * dim + col + i] : 0.0f;
    }
  }
}

// Running (max, sum) of one row over blocks: each block has its own maximum, and blocks merge in order.
HWY_INLINE void MergeStats(const SoftmaxArgs& a, int64_t row, float block_max, float block_sum) {
  const float old = a.run_max[row];
  const float now = old > block_max ? old : block_max;
  HWY_ALIGN float d[HWY_MAX_BYTES / sizeof(float)] = {};
  d[0] = old - now;
  if (L() > 1) d[1] = block_max - now;
  HWY_ALIGN float e[HWY_MAX_BYTES / sizeof(float)];
  hn::Store(Exp(hn::Load(df, d)), df, e);
  float beta = e[1];
  if (L() == 1) beta = hn::GetLane(Exp(hn::Set(df, block_max - now)));
  a.run_max[row] = now;
  a.run_sum[row] = a.run_sum[row] * e[0] + block_sum * beta;
  a.alpha[row] = e[0];
  a.beta[row] = beta;
}

// P in [0, 1] relative to the block's maximum; kBF16 rounds it, and then the sum is of the rounded values.
template <bool kBF16>
void Softmax(const SoftmaxArgs& a) {
  const int64_t lanes = int64_t(L());
  const VF scale = hn::Set(df, a.scale), low = hn::Set(df, -3.0e38f);
  for (int64_t row = 0; row < a.m; ++row) {
    const int64_t valid = a.valid[row];
    float* s = a.s + row * 64;
    float* pf = static_cast<float*>(a.p) + row * 64;
    uint16_t* ph = static_cast<uint16_t*>(a.p) + row * 64;
    if (valid <= 0) {
      for (int64_t j = 0; j < 64; ++j) {
        if (kBF16) {
          ph[j] = 0;
        } else {
          pf[j] = 0;
        }
      }
      a.alpha[row] = 1;
      a.beta[row] = 0;
      continue;
    }
    VF m = low;
    for (int64_t j = 0; j < 64; j += lanes) {
      const auto in = hn::FirstN(df, size_t(valid > j ? valid - j : 0));
      const VF v = hn::IfThenElse(in, hn::Mul(hn::LoadU(df, s + j), scale), low);
      hn::StoreU(v, df, s + j);
      m = hn::Max(m, v);
    }
    const float block_max = hn::GetLane(hn::MaxOfLanes(df, m));
    const VF bm = hn::Set(df, block_max);
    VF sum = hn::Zero(df);
    for (int64_t j = 0; j < 64; j += lanes) {
      const auto in = hn::FirstN(df, size_t(valid > j ? valid - j : 0));
      const VF p = hn::IfThenElseZero(in, Exp(hn::Sub(hn::LoadU(df, s + j), bm)));
      if (kBF16) {
        StoreBF16(p, ph + j);
        sum = hn::Add(sum, LoadBF16(ph + j));
      } else {
        hn::StoreU(p, df, pf + j);
        sum = hn::Add(sum, p);
      }
    }
    MergeStats(a, row, block_max, hn::GetLane(hn::SumOfLanes(df, sum)));
  }
}

void Finish(const float* o, float sum, int64_t n, void* out, bool bf16) {
  const int64_t lanes = int64_t(L());
  const float inv = sum > 0 || sum != sum ? 1.0f / sum : 0.0f;
  const VF r = hn::Set(df, inv);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const VF v = hn::Mul(hn::LoadU(df, o + i), r);
    if (bf16) {
      StoreBF16(v, static_cast<uint16_t*>(out) + i);
    } else {
      hn::StoreU(v, df, static_cast<float*>(out) + i);
    }
  }
  for (; i < n; ++i) {
    const VF v = hn::Mul(hn::Set(df, o[i]), r);
    HWY_ALIGN float f[HWY_MAX_BYTES / sizeof(float)];
    HWY_ALIGN uint16_t h[HWY_MAX_BYTES / sizeof(float)];
    if (bf16) {
      StoreBF16(v, h);
      static_cast<uint16_t*>(out)[i] = h[0];
    } else {
      hn::Store(v, df, f);
      static_cast<float*>(out)[i] = f[0];
    }
  }
}

void LoadIndex(const std::byte* rows, int64_t count, RowFormat format, int64_t dim, void* keys) {
  // Blocks of 16 values of 64 rows go through a small buffer, so that any format shares one transpose.
  const int64_t nr = PanelWidth(), lanes = int64_t(L());
  float* panels = static_cast<float*>(keys);
  HWY_ALIGN float part[HWY_MAX_BYTES / sizeof(float) + 1024];
  const int64_t step = 1024;
  for (int64_t base = 0; base < 64; base += nr) {
    float* panel = panels + base / nr * (dim * nr);
    for (int64_t j = 0; j < nr; ++j) {
      if (base + j >= count) {
        for (int64_t k = 0; k < dim; ++k) panel[k * nr + j] = 0.0f;
        continue;
      }
      for (int64_t k0 = 0; k0 < dim; k0 += step) {
        const int64_t n = dim - k0 < step ? dim - k0 : step;
        const int64_t at = (base + j) * dim + k0;
        int64_t i = 0;
        if (format == RowFormat::kF32) {
          __builtin_memcpy(part, reinterpret_cast<const float*>(rows) + at, size_t(n) * 4);
        } else if (format == RowFormat::kBF16) {
          const uint16_t* x = reinterpret_cast<const uint16_t*>(rows) + at;
          for (; i + lanes <= n; i += lanes) hn::StoreU(LoadBF16(x + i), df, part + i);
          for (; i < n; ++i) {
            const uint32_t u = uint32_t(x[i]) << 16;
            __builtin_memcpy(part + i, &u, 4);
          }
        } else {
          const uint8_t* x = reinterpret_cast<const uint8_t*>(rows) + at;
          for (; i + lanes <= n; i += lanes) hn::StoreU(DecodeE4M3(x + i), df, part + i);
          for (; i < n; ++i) {
            HWY_ALIGN uint8_t one[HWY_MAX_BYTES / sizeof(float)] = {x[i]};
            part[i] = hn::GetLane(DecodeE4M3(one));
          }
        }
        for (i = 0; i < n; ++i) panel[(k0 + i) * nr + j] = part[i];
      }
    }
  }
}

// score[s] = key_scale[s] * sum over heads in order of w[h] * relu(q[h] . k[s])
template <int NH>
HWY_INLINE void IndexHeads(const float* q, const float* w, int64_t dim, const float* panel, VF* s0, VF* s1) {
  const int64_t nr = PanelWidth(), lanes = int64_t(L());
  VF a0[NH], a1[NH];
#pragma GCC unroll 4
  for (int h = 0; h < NH; ++h) a0[h] = a1[h] = hn::Zero(df);
  for (int64_t k = 0; k < dim; ++k) {
    const VF b0 = hn::LoadU(df, panel + k * nr), b1 = hn::LoadU(df, panel + k * nr + lanes);
#pragma GCC unroll 4
    for (int h = 0; h < NH; ++h) {
      const VF x = hn::Set(df, q[h * dim + k]);
      a0[h] = hn::MulAdd(x, b0, a0[h]);
      a1[h] = hn::MulAdd(x, b1, a1[h]);
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < NH; ++h) {
    const VF wh = hn::Set(df, w[h]);
    *s0 = hn::MulAdd(wh, hn::Max(a0[h], hn::Zero(df)), *s0);
    *s1 = hn::MulAdd(wh, hn::Max(a1[h], hn::Zero(df)), *s1);
  }
}

void IndexScores(const IndexScoreArgs& a) {
  const int64_t nr = PanelWidth(), lanes = int64_t(L());
  const float* q = static_cast<const float*>(a.q);
  for (int64_t base = 0; base < 64; base += nr) {
    const float* panel = static_cast<const float*>(a.keys) + base / nr * (a.dim * nr);
    VF s0 = hn::Zero(df), s1 = s0;
    int64_t h = 0;
    for (; h + 4 <= a.heads; h += 4) IndexHeads<4>(q + h * a.dim, a.w + h, a.dim, panel, &s0, &s1);
    for (; h < a.heads; ++h) IndexHeads<1>(q + h * a.dim, a.w + h, a.dim, panel, &s0, &s1);
    hn::StoreU(hn::Mul(s0, hn::LoadU(df, a.key_scale + base)), df, a.out + base);
    hn::StoreU(hn::Mul(s1, hn::LoadU(df, a.key_scale + base + lanes)), df, a.out + base + lanes);
  }
}

void FillAttentionHere(KernelTable* t) {
  t->load_latent = LoadLatent;
  t->decode_latent = DecodeRow;
  t->softmax = t->bf16_pairs ? Softmax<true> : Softmax<false>;
  t->finish = Finish;
  t->load_index = LoadIndex;
  t->index_scores = IndexScores;
}

}  // namespace sluice::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace sluice::cpu {
void FillAttention(Isa isa, KernelTable* t) {
  switch (isa) {
    case Isa::kAvx512Bf16:
    case Isa::kAvx512:
      return N_AVX3::FillAttentionHere(t);
    case Isa::kAvx2:
      return N_AVX2::FillAttentionHere(t);
    case Isa::kPortable:
      return HWY_NAMESPACE::FillAttentionHere(t);
  }
}
}  // namespace sluice::cpu
#endif
