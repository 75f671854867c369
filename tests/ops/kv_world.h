// A pool with filled pages and the tables of a batch over it, for tests of the ops that read the KV pool.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "kv/layout_fixture.h"
#include "ops/backend.h"

namespace sluice::testing {

struct KvShape {
  int64_t kv_lora = 64, rope = 16, index_dim = 32;
  DType latent = DType::kBF16, index = DType::kBF16;
  int32_t lanes = 1;
};

inline std::vector<float> Normal(int64_t n, uint64_t seed, float scale = 1.0f) {
  std::mt19937_64 rng(seed);
  std::normal_distribution<float> d(0.0f, scale);
  std::vector<float> v(static_cast<size_t>(n));
  for (float& x : v) x = d(rng);
  return v;
}

inline ModelConfig OneLayer(const KvShape& s) {
  ModelConfig m;
  m.num_layers = 1;
  m.kv_lora_rank = s.kv_lora;
  m.qk_rope = s.rope;
  m.index.num_heads = 1;
  m.index.head_dim = s.index_dim;
  m.index.topk = 64;
  m.index.computes = {true};
  return m;
}

// cos and sin of every position for `rope` dims.
class Rope {
 public:
  Rope(int64_t positions, int64_t rope) : half_(rope / 2) {
    for (int64_t p = 0; p < positions; ++p) {
      for (int64_t i = 0; i < half_; ++i) {
        const double angle = double(p) * std::pow(10000.0, -2.0 * double(i) / double(rope));
        cos_.push_back(float(std::cos(angle)));
        sin_.push_back(float(std::sin(angle)));
      }
    }
  }
  ops::RopeTable table() const { return {cos_.data(), sin_.data(), half_}; }

 private:
  int64_t half_;
  std::vector<float> cos_, sin_;
};

// Sequences in a pool: page lists in shuffled order, all bytes of unwritten rows 0xff (NaN in every format).
class KvWorld {
 public:
  // lengths[s]: positions of sequence s that exist in the pool. `order` shuffles which pages they get.
  KvWorld(const KvShape& shape, std::vector<int64_t> lengths, uint64_t order = 1)
      : shape_(shape), lengths_(std::move(lengths)), rope_(Longest() + 1, shape.rope) {
    int64_t pages = 0;
    for (int64_t n : lengths_) pages += CeilDiv(n, kPageTokens);
    const KvLayout layout = MakeLayout(OneLayer(shape), shape.latent, shape.index);
    pool_ = std::move(DevicePool::Make(layout, shape.lanes, CeilDiv(pages, shape.lanes) + 3)).value();
    std::vector<PageId> ids;
    for (int32_t p = shape.lanes; p < shape.lanes * int32_t(pool_->pages_per_lane()); ++p)
      ids.push_back(PageId(p));
    for (PageId p : ids) pool_->Poison(p);
    std::mt19937_64 rng(order);
    std::shuffle(ids.begin(), ids.end(), rng);
    size_t next = 0;
    for (int64_t n : lengths_) {
      page_begin_.push_back(int32_t(pages_.size()));
      for (int64_t i = 0; i < CeilDiv(n, kPageTokens); ++i) pages_.push_back(ids[next++]);
    }
  }

  static constexpr LogicalLayer kLayer{0};
  const KvShape& shape() const { return shape_; }
  const DevicePool& pool() const { return *pool_; }
  ops::RopeTable rope() const { return rope_.table(); }
  PageId Page(int64_t seq, int64_t position) const {
    return pages_[size_t(page_begin_[size_t(seq)] + position / kPageTokens)];
  }

  // Writes positions [0, length) of every sequence with the backend's own ops; contents depend on (seed,
  // sequence) alone.
  void Fill(ops::Backend& backend, uint64_t seed) {
    auto queue = backend.MakeQueue(1, -1);
    for (size_t s = 0; s < lengths_.size(); ++s)
      Write(backend, *queue, int64_t(s), 0, lengths_[s], seed + 100 * s);
  }
  void Write(ops::Backend& backend, ops::Queue& queue, int64_t seq, int64_t first, int64_t last,
             uint64_t seed) {
    const int64_t n = lengths_[size_t(seq)], dim = shape_.kv_lora + shape_.rope;
    const std::vector<float> ckv = Normal(n * dim, seed), k = Normal(n * shape_.index_dim, seed + 1);
    const std::vector<float> w = Normal(shape_.kv_lora, 7), kw = Normal(shape_.index_dim, 8),
                             kb = Normal(shape_.index_dim, 9);
    std::vector<PageId> page;
    std::vector<int32_t> offset, position;
    for (int64_t p = first; p < last; ++p) {
      page.push_back(Page(seq, p));
      offset.push_back(int32_t(p % kPageTokens));
      position.push_back(int32_t(p));
    }
    backend.WriteLatent(queue, {.rows = last - first,
                                .ckv = ckv.data() + first * dim,
                                .norm_weight = w.data(),
                                .eps = 1e-6f,
                                .positions = position.data(),
                                .table = rope(),
                                .pool = pool_.get(),
                                .layer = kLayer,
                                .slots = {page.data(), offset.data()}});
    backend.WriteIndex(queue, {.rows = last - first,
                               .dim = shape_.index_dim,
                               .rope = shape_.rope,
                               .k = k.data() + first * shape_.index_dim,
                               .norm_weight = kw.data(),
                               .norm_bias = kb.data(),
                               .eps = 1e-6f,
                               .positions = position.data(),
                               .table = rope(),
                               .pool = pool_.get(),
                               .layer = kLayer,
                               .slots = {page.data(), offset.data()}});
    queue.Synchronize();
  }

  // Rows [first, last) of sequences, as a batch.
  struct Span {
    int64_t seq, first, last;
  };
  struct Batch {
    std::vector<int32_t> seq_of_row, positions, row_begin, num_rows, page_begin;
    std::vector<PageId> pages;
    ops::SeqTables tables() const {
      return {.rows = int64_t(positions.size()),
              .seqs = int64_t(row_begin.size()),
              .seq_of_row = seq_of_row.data(),
              .positions = positions.data(),
              .row_begin = row_begin.data(),
              .num_rows = num_rows.data(),
              .page_begin = page_begin.data(),
              .pages = pages.data()};
    }
  };
  Batch MakeBatch(const std::vector<Span>& spans) const {
    Batch b;
    for (const Span& s : spans) {
      b.row_begin.push_back(int32_t(b.positions.size()));
      b.num_rows.push_back(int32_t(s.last - s.first));
      b.page_begin.push_back(int32_t(b.pages.size()));
      for (int64_t p = s.first; p < s.last; ++p) {
        b.seq_of_row.push_back(int32_t(b.row_begin.size() - 1));
        b.positions.push_back(int32_t(p));
      }
      for (int64_t p = 0; p < CeilDiv(s.last, kPageTokens); ++p)
        b.pages.push_back(Page(s.seq, p * kPageTokens));
    }
    return b;
  }

 private:
  int64_t Longest() const {
    int64_t n = 1;
    for (int64_t x : lengths_) n = std::max(n, x);
    return n;
  }
  KvShape shape_;
  std::vector<int64_t> lengths_;
  Rope rope_;
  std::unique_ptr<DevicePool> pool_;
  std::vector<int32_t> page_begin_;
  std::vector<PageId> pages_;
};

}  // namespace sluice::testing
