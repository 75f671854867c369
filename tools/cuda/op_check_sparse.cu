// Checks of index scores, top-k and sparse attention.
#include "tools/cuda/check.h"

namespace sluice::cuda {

struct Paged {  // sequences of given lengths over shuffled pages; rows: the last `rows_each` positions of
                // each
  std::vector<int32_t> seq_of_row, positions, page_begin, pages;
  Dev<int32_t>*a = nullptr, *b = nullptr, *c = nullptr, *d = nullptr;
  Seqs seqs;
  int num_pages = 1;
  Paged(const std::vector<int>& lengths, const std::vector<int>& rows_each, bool share_pages = false) {
    int total = 0;
    for (size_t s = 0; s < lengths.size(); ++s) {
      page_begin.push_back(int(pages.size()));
      for (int p = 0; p < (lengths[s] + 63) / 64; ++p) pages.push_back(share_pages ? p + 1 : 1 + total++);
      for (int i = 0; i < rows_each[s]; ++i) {
        seq_of_row.push_back(int(s));
        positions.push_back(lengths[s] - rows_each[s] + i);
      }
      seqs.max_context = std::max(seqs.max_context, lengths[s]);
    }
    if (share_pages) total = (seqs.max_context + 63) / 64;
    num_pages = total + 1;
    if (!share_pages) {
      std::mt19937 rng(9);
      std::shuffle(pages.begin(), pages.end(), rng);
    }
    seqs.rows = int(seq_of_row.size());
    seqs.seqs = int(lengths.size());
    a = new Dev<int32_t>(seq_of_row);
    b = new Dev<int32_t>(positions);
    c = new Dev<int32_t>(page_begin);
    d = new Dev<int32_t>(pages);
    seqs.seq_of_row = a->p;
    seqs.positions = b->p;
    seqs.page_begin = c->p;
    seqs.pages = d->p;
  }
  ~Paged() {
    delete a;
    delete b;
    delete c;
    delete d;
  }
};

__global__ void FillIndexPages(uint8_t* p, int pages, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < int64_t(pages) * 8448;
       i += int64_t(gridDim.x) * blockDim.x) {
    const int64_t at = i % 8448;
    if (at < 8192) {
      p[i] = ToE4M3(UnitNoise(seed, uint64_t(i)) * 100);
    } else if (at % 4 == 0) {
      *reinterpret_cast<float*>(p + i) = 0.01f + 0.001f * fabsf(UnitNoise(seed + 1, uint64_t(i)));
    }
  }
}

void CheckIndexer() {
  const int heads = 32;
  const auto run = [&](const char* what, const std::vector<int>& lengths, const std::vector<int>& rows_each,
                       bool check, bool time, Elem format, bool share) {
    Paged paged(lengths, rows_each, share);
    const int rows = paged.seqs.rows;
    const int64_t page_bytes = format == Elem::kE4M3 ? 8448 : 16384;
    Dev<uint8_t> pool(size_t(paged.num_pages) * page_bytes);
    if (format == Elem::kE4M3) {
      FillIndexPages<<<1024, 256, 0, stream>>>(pool.p, paged.num_pages, 61);
    } else {
      Fill((__nv_bfloat16*)pool.p, pool.n / 2, 61);
    }
    const Slab slab{(std::byte*)pool.p, int64_t(pool.n), page_bytes, 1, format};
    Ropes ropes(paged.seqs.max_context, true);
    Dev<float> q(size_t(rows) * heads * 128), hw(size_t(rows) * heads), w(size_t(rows) * 32);
    Dev<uint8_t> q8(size_t(rows) * heads * 128 * 2);
    Fill(q.p, q.n, 62);
    Fill(hw.p, hw.n, 63);
    const int64_t ld = (paged.seqs.max_context + 3) / 4 * 4;
    Dev<float> scores(size_t(rows) * ld);
    scores.Poison();
    const int padded = PaddedIndexHeads(format, heads);
    const IndexQuery iq{format, padded, q8.p, w.p};
    LaunchIndexQuery(stream, q.p, hw.p, 0.015625f, paged.seqs.positions, ropes.rope, rows, heads, 128, 64,
                     iq);
    LaunchIndexScores(stream, paged.seqs, 0, rows, heads, 128, iq, slab, scores.p, ld);
    Done();
    if (check) {
      const auto qh = q8.Get();
      const auto wh = w.Get();
      const auto ph = pool.Get();
      double diff = 0, ref = 0, beyond = 0;
      for (int i = 0; i < 3000; ++i) {
        const int r = int(Mix(i) % rows), seq = paged.seq_of_row[r];
        const int p = i % 5 == 0 ? paged.positions[r] : int(Mix(i + 1234) % (paged.positions[r] + 1));
        const uint8_t* page = ph.data() + size_t(paged.pages[paged.page_begin[seq] + p / 64]) * page_bytes;
        double want = 0;
        for (int h = 0; h < heads; ++h) {
          double dot = 0;
          for (int j = 0; j < 128; ++j) {
            const size_t qi = (size_t(r) * heads + h) * 128 + j;
            if (format == Elem::kE4M3) {
              dot += E4(qh[qi]) * E4(page[(p % 64) * 128 + j]);
            } else {
              uint16_t a, b;
              std::memcpy(&a, qh.data() + qi * 2, 2);
              std::memcpy(&b, page + ((p % 64) * 128 + j) * 2, 2);
              dot += BF(a) * BF(b);
            }
          }
          want += std::max(dot, 0.0) * wh[size_t(r) * heads + h];
        }
        if (format == Elem::kE4M3) {
          float s;
          std::memcpy(&s, page + 8192 + (p % 64) * 4, 4);
          want *= s;
        }
        const float got = scores.Get(size_t(r) * ld + p, 1)[0];
        diff += std::pow(got - want, 2);
        ref += want * want;
      }
      for (int r = 0; r < rows; r += std::max(1, rows / 100)) {
        if (paged.positions[r] + 1 < paged.seqs.max_context)
          beyond += !std::isnan(scores.Get(size_t(r) * ld + paged.positions[r] + 1, 1)[0]);
      }
      char name[96];
      std::snprintf(name, sizeof(name), "index scores %s %s", format == Elem::kE4M3 ? "fp8" : "bf16", what);
      Check(name, Norm2(diff, ref), 1e-3);
      Check("  nothing written past a row's position", beyond, 0);
    }
    if (time) {
      const double t = Time(
          [&] { LaunchIndexScores(stream, paged.seqs, 0, rows, heads, 128, iq, slab, scores.p, ld); }, 7);
      double positions = 0;
      for (int p : paged.positions) positions += p + 1;
      if (rows_each[0] >= 64) {
        Row("index scores", what, t, positions * heads * 128 * 2 / t / 1e9, "TFLOP/s",
            lengths[0] > 40000 ? 960 : 1002, "DeepGEMM");
      } else {
        double bytes = 0;
        for (int l : lengths) bytes += (l + 63) / 64 * double(page_bytes);
        Row("index scores", what, t, (bytes + 4.0 * positions) / t / 1e6, "GB/s", copy_gbs, "copy");
      }
    }
  };
  for (const Elem f : {Elem::kE4M3, Elem::kBF16}) {
    run("ragged 1-5 rows", {1, 63, 64, 65, 200, 1000, 4097}, {1, 1, 2, 4, 5, 1, 3}, true, false, f, false);
    run("extend, two sequences", {700, 333}, {300, 133}, true, false, f, false);
  }
  run("decode 64 x 32k", std::vector<int>(64, 32768), std::vector<int>(64, 1), true, true, Elem::kE4M3,
      false);
  run("decode 64 x 32k, 2 rows", std::vector<int>(64, 32768), std::vector<int>(64, 2), false, true,
      Elem::kE4M3, false);
  run("decode 1 x 128k", {131072}, {1}, false, true, Elem::kE4M3, false);
  run("prefill 4096 x 32k", {32768 + 2048}, {4096}, true, true, Elem::kE4M3, false);
  run("prefill 4096 x 128k", {131072}, {4096}, false, true, Elem::kE4M3, false);
}

void CheckTopK() {
  const int k = 2048;
  const auto make = [&](const char* kind, std::vector<float>& v, int n, int r) {
    v.resize(n);
    for (int i = 0; i < n; ++i) {
      const uint64_t z = Mix(uint64_t(r) * 1000003 + i);
      const float u = float(z >> 40) / float(1 << 24);
      if (!std::strcmp(kind, "random")) v[i] = UnitNoise(r, i);
      if (!std::strcmp(kind, "constant")) v[i] = 1.5f;
      if (!std::strcmp(kind, "ties")) v[i] = std::floor(u * 8);
      if (!std::strcmp(kind, "ascending")) v[i] = float(i);
      if (!std::strcmp(kind, "descending")) v[i] = float(-i);
      if (!std::strcmp(kind, "negative")) v[i] = -u - 1e-3f * float(i % 7);
      if (!std::strcmp(kind, "zeros and few")) v[i] = z % 50 == 0 ? u : 0.0f;
    }
  };
  for (const char* kind :
       {"random", "constant", "ties", "ascending", "descending", "negative", "zeros and few"}) {
    for (const int n : {2049, 5000, 33000, 131072}) {
      const int rows = 3;
      std::vector<float> all;
      std::vector<int32_t> pos, seq(rows, 0);
      const int64_t ld = (n + 3) / 4 * 4;
      all.assign(size_t(rows) * ld, NAN);
      for (int r = 0; r < rows; ++r) {
        std::vector<float> v;
        make(kind, v, n, r);
        std::copy(v.begin(), v.end(), all.begin() + r * ld);
        pos.push_back(n - 1 - r);
      }
      Dev<float> s(all), gap(rows);
      Dev<int32_t> dp(pos), ds(seq), sel(size_t(rows) * k), count(rows), sel2(size_t(rows) * k);
      sel.Poison();
      LaunchTopK(stream, s.p, ld, dp.p, ds.p, rows, k, n, sel.p, count.p, gap.p);
      LaunchTopK(stream, s.p, ld, dp.p, ds.p, rows, k, n, sel2.p, count.p, nullptr);
      Done();
      const auto got = sel.Get();
      double wrong = got != sel2.Get();
      const auto gaps = gap.Get();
      for (int r = 0; r < rows; ++r) {
        const int len = pos[r] + 1;
        std::vector<int32_t> order(len);
        std::iota(order.begin(), order.end(), 0);
        const float* v = all.data() + r * ld;
        std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return v[a] > v[b]; });
        if (len > k) wrong += gaps[r] != v[order[k - 1]] - v[order[k]];
        order.resize(std::min(k, len));
        std::sort(order.begin(), order.end());
        order.resize(k, -1);
        wrong += std::memcmp(order.data(), got.data() + size_t(r) * k, size_t(k) * 4) != 0;
      }
      char name[64];
      std::snprintf(name, sizeof(name), "top-k 2048 of %d, %s", n, kind);
      Check(name, wrong, 0);
    }
  }
  for (const auto& [rows, n] :
       {std::pair{4096, 32768}, {4096, 131072}, {64, 32768}, {64, 131072}, {1, 131072}}) {
    for (const char* kind : {"random", "ties"}) {
      if (!std::strcmp(kind, "ties") && rows * int64_t(n) > (int64_t(1) << 28)) continue;
      Dev<float> s(size_t(rows) * n);
      if (!std::strcmp(kind, "ties")) {
        std::vector<float> v;
        make(kind, v, n, 1);
        for (int r = 0; r < rows; ++r)
          CUDA_OK(cudaMemcpy(s.p + size_t(r) * n, v.data(), size_t(n) * 4, cudaMemcpyHostToDevice));
      } else {
        Fill(s.p, s.n, 71);
      }
      std::vector<int32_t> pos(rows, n - 1), seq(rows, 0);
      Dev<int32_t> dp(pos), ds(seq), sel(size_t(rows) * k), count(rows);
      const double t =
          Time([&] { LaunchTopK(stream, s.p, n, dp.p, ds.p, rows, k, n, sel.p, count.p, nullptr); }, 11,
               Flush::kRead);
      char shape[64];
      std::snprintf(shape, sizeof(shape), "%d x %d %s", rows, n, kind);
      Row("top-k 2048", shape, t, 4.0 * rows * n / t / 1e6, "GB/s", read_gbs, "one read pass");
    }
  }
}

__global__ void FillLatentPages(uint8_t* p, int pages, bool fp8, uint64_t seed) {
  const int row_bytes = fp8 ? 656 : 1152;
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < int64_t(pages) * 64 * 576;
       i += int64_t(gridDim.x) * blockDim.x) {
    const int64_t row = i / 576;
    const int at = int(i % 576);
    uint8_t* out = p + row * row_bytes;
    const float v = UnitNoise(seed, uint64_t(i));
    if (!fp8) {
      reinterpret_cast<__nv_bfloat16*>(out)[at] = __float2bfloat16_rn(v);
    } else if (at < 512) {
      out[at] = ToE4M3(v * 100);
      if (at % 128 == 0) *reinterpret_cast<float*>(out + 512 + at / 32) = 0.01f * (1 + 0.3f * fabsf(v));
    } else {
      reinterpret_cast<__nv_bfloat16*>(out + 528)[at - 512] = __float2bfloat16_rn(v);
    }
  }
}

void CheckAttention() {
  const auto run = [&](const char* what, const std::vector<int>& lengths, const std::vector<int>& rows_each,
                       int heads, int topk, bool sparse, bool fp8, int splits, bool check, bool time,
                       bool any, bool share, int shift) {
    Paged paged(lengths, rows_each, share);
    paged.seqs.slot_shift = shift;
    if (shift) {
      for (auto& p : paged.positions) p -= shift;
      paged.b->Put(paged.positions);
    }
    const int rows = paged.seqs.rows;
    const int64_t row_bytes = fp8 ? 656 : 1152, page_bytes = 64 * row_bytes;
    Dev<uint8_t> pool(size_t(paged.num_pages) * page_bytes);
    pool.Poison();
    FillLatentPages<<<2048, 256, 0, stream>>>(pool.p, paged.num_pages, fp8, 81);
    Dev<__nv_bfloat16> q(size_t(rows) * heads * 576), out(size_t(rows) * heads * 512);
    Fill(q.p, q.n, 82, 1.0f);
    std::vector<int32_t> sel(size_t(rows) * topk, -1), count(rows);
    for (int r = 0; r < rows; ++r) {
      const int n = paged.positions[r] + 1;
      const int c = std::min(n, topk);
      count[r] = c;
      if (n <= topk) {
        for (int i = 0; i < c; ++i) sel[size_t(r) * topk + i] = i;
      } else {  // ascending, spread at random
        const double step = double(n) / c;
        for (int i = 0; i < c; ++i)
          sel[size_t(r) * topk + i] =
              std::min(n - 1, int(i * step + double(Mix(r * 7919ull + i) % 1000) / 1000 * (step - 1)));
      }
    }
    Dev<int32_t> dsel(sel), dcount(count);
    Attend a;
    a.seqs = paged.seqs;
    a.heads = heads;
    a.kv_lora = 512;
    a.rope = 64;
    a.topk = topk;
    a.q = q.p;
    a.scale = 0.0625f;
    a.slab = {(std::byte*)pool.p, int64_t(pool.n), page_bytes, 1, fp8 ? Elem::kE4M3 : Elem::kBF16};
    a.selected = sparse ? dsel.p : nullptr;
    a.count = sparse ? dcount.p : nullptr;
    a.out = out.p;
    a.splits = splits;
    out.Poison();
    const auto go = [&] {
      if (any) {
        LaunchAttendAny(stream, a);
      } else {
        LaunchSparseMla(stream, a);
      }
    };
    go();
    Done();
    if (check) {
      const auto ph = pool.Get();
      double diff = 0, ref = 0;
      for (int i = 0; i < 24; ++i) {
        const int r = i == 0 ? rows - 1 : int(Mix(i) % rows),
                  h = i == 1 ? heads - 1 : int(Mix(i + 55) % heads), seq = paged.seq_of_row[r];
        const auto qh = q.Get((size_t(r) * heads + h) * 576, 576);
        const auto oh = out.Get((size_t(r) * heads + h) * 512, 512);
        const int n = sparse ? count[r] : paged.positions[r] + 1;
        std::vector<double> p(n), acc(512, 0), kv(size_t(n) * 576);
        double max = -1e300, sum = 0;
        for (int j = 0; j < n; ++j) {
          const int slot = (sparse ? sel[size_t(r) * topk + j] : j) + shift;
          const uint8_t* row = ph.data() +
                               size_t(paged.pages[paged.page_begin[seq] + slot / 64]) * page_bytes +
                               (slot % 64) * row_bytes;
          double dot = 0;
          for (int c = 0; c < 576; ++c) {
            double v;
            if (fp8 && c < 512) {
              float s;
              std::memcpy(&s, row + 512 + c / 128 * 4, 4);
              v = E4(row[c]) * s;
            } else {
              uint16_t b;
              std::memcpy(&b, fp8 ? row + 528 + (c - 512) * 2 : row + c * 2, 2);
              v = BF(b);
            }
            kv[size_t(j) * 576 + c] = v;
            dot += v * BF(qh[c]);
          }
          p[j] = dot * 0.0625;
          max = std::max(max, p[j]);
        }
        for (int j = 0; j < n; ++j) {
          const double e = std::exp(p[j] - max);
          sum += e;
          for (int c = 0; c < 512; ++c) acc[c] += e * kv[size_t(j) * 576 + c];
        }
        for (int c = 0; c < 512; ++c) {
          diff += std::pow(BF(oh[c]) - acc[c] / sum, 2);
          ref += std::pow(acc[c] / sum, 2);
        }
      }
      char name[96];
      std::snprintf(name, sizeof(name), "%s %s %s splits %d", any ? "attend any" : "sparse mla",
                    fp8 ? "fp8" : "bf16", what, splits);
      Check(name, Norm2(diff, ref), 6e-3);
    }
    const bool prefill = rows_each[0] > 64;
    if (fp8 && !any && (check || prefill)) {  // the same rows, dequantised page by page before
      const int n = int(paged.pages.size());
      Dev<std::byte> rows16(size_t(n) * kBF16PageBytes);
      Dev<int32_t> places(static_cast<size_t>(n));
      Dev<__nv_bfloat16> out16(out.n);
      out16.Poison();
      Attend b = a;
      b.seqs.pages = places.p;
      b.slab = {rows16.p, 0, kBF16PageBytes, 1, Elem::kBF16};
      b.out = out16.p;
      const auto whole = [&] {
        LaunchDequantisePages(stream, a.slab, a.seqs.pages, n, rows16.p, places.p);
        LaunchSparseMla(stream, b);
      };
      whole();
      Done();
      Check("  whole pages dequantised first: the same bits",
            std::memcmp(out.Get().data(), out16.Get().data(), out.n * 2) != 0, 0);
      if (time && prefill) {
        const double t = Time(whole, 9), keys = double(rows) * topk;
        Row("prefill, whole pages", what, t, keys * heads * (576 + 512) * 2 / t / 1e9, "TFLOP/s",
            lengths[0] > 40000 ? 530 : 625, "FlashMLA");
      }
    }
    if (time) {
      const double t = Time(go, 9);
      double keys = 0;
      for (int c : count) keys += c;
      const double tf = keys * heads * (576 + 512) * 2 / t / 1e9;
      char shape[96];
      std::snprintf(shape, sizeof(shape), "%s %s s%d", what, fp8 ? "fp8" : "bf16", splits);
      Row(rows_each[0] > 64 ? "sparse prefill" : "sparse decode", shape, t, tf, "TFLOP/s",
          rows_each[0] > 64 ? (lengths[0] > 40000 ? 530 : 625) : 213,
          rows_each[0] > 64 ? "FlashMLA" : "FlashMLA b64");
    }
  };
  for (const bool fp8 : {true, false}) {
    for (const int splits : {1, 2, 4, 8}) {
      run("ragged", {1, 64, 65, 130, 700, 5000}, {1, 1, 2, 4, 5, 3}, 64, 2048, true, fp8, splits, true, false,
          false, false, 0);
    }
    run("8 heads, top 128", {1, 64, 65, 130, 700, 5000}, {1, 1, 2, 4, 5, 3}, 8, 128, true, fp8, 1, true,
        false, false, false, 0);
    run("dense", {1, 64, 65, 130, 700, 3000}, {1, 1, 2, 4, 5, 3}, 64, 2048, false, fp8, 2, true, false, false,
        false, 0);
    run("dense, shift 1", {2, 64, 65, 130, 700, 3000}, {1, 1, 2, 4, 5, 3}, 16, 2048, false, fp8, 1, true,
        false, false, false, 1);
    run("any shape", {1, 64, 65, 130, 700}, {1, 1, 2, 4, 5}, 8, 128, true, fp8, 1, true, false, true, false,
        0);
  }
  for (const int b : {1, 8, 64, 128}) {
    for (const int splits : {1, 2, 4, 8}) {
      if (b * splits > 512 || (b < 8 && splits < 4)) continue;
      char what[32];
      std::snprintf(what, sizeof(what), "b %d x 32k", b);
      run(what, std::vector<int>(b, 32768), std::vector<int>(b, 1), 64, 2048, true, true, splits,
          b == 64 && splits == 2, true, false, false, 0);
    }
  }
  run("b 64 x 2 rows", std::vector<int>(64, 32768), std::vector<int>(64, 2), 64, 2048, true, true, 1, false,
      true, false, false, 0);
  run("b 128 x 2 rows", std::vector<int>(128, 32768), std::vector<int>(128, 2), 64, 2048, true, true, 1,
      false, true, false, false, 0);
  for (const bool fp8 : {true, false}) {
    run("4096 x 32k", {32768 + 4096}, {4096}, 64, 2048, true, fp8, 1, true, true, false, false, 0);
    run("4096 x 128k", {131072}, {4096}, 64, 2048, true, fp8, 1, false, true, false, false, 0);
  }
}

}  // namespace sluice::cuda
