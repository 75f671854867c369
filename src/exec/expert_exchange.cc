#include "exec/expert_exchange.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"

namespace sluice {

Rank ExpertOwner(int32_t expert, int64_t experts, int32_t ranks) {
  return Rank(int32_t(int64_t(expert) * ranks / experts));
}

StatusOr<std::unique_ptr<ExpertExchange>> ExpertExchange::Make(ops::Backend& backend,
                                                               const ExpertExchangeOptions& options) {
  auto* sum = dynamic_cast<ops::SlotSum*>(&backend);
  if (sum == nullptr)
    return Unsupported(
        "--ep-size {}: the {} backend cannot add up expert rows of other ranks; use --ep-size 1",
        options.ranks, backend.info().device);
  if (options.experts < options.ranks)
    return Invalid("--ep-size {}: the model has {} experts; use at most as many ranks", options.ranks,
                   options.experts);
  return std::unique_ptr<ExpertExchange>(new ExpertExchange(backend, *sum, options));
}

ExpertExchange::ExpertExchange(ops::Backend& backend, ops::SlotSum& sum, const ExpertExchangeOptions& options)
    : backend_(backend), sum_(sum), o_(options), ranks_(size_t(options.ranks)) {
  // At worst every row of every rank chooses one rank's experts alone.
  const int64_t per_row = o_.topk * o_.ranks * o_.hidden * (o_.act_bytes + 4) + o_.topk * o_.hidden * 4;
  round_ = std::clamp<int64_t>(o_.buffer_bytes / per_row, 1, 512);
  const size_t pairs = size_t(round_ * o_.topk * o_.ranks);
  for (RankBuffers& b : ranks_) {
    b.base.resize(size_t(o_.ranks) + 1);
    b.out.resize(pairs * size_t(o_.hidden));
    b.expert.resize(size_t(round_ * o_.topk));
    b.x.resize(pairs * size_t(o_.hidden * o_.act_bytes));
    b.pair_expert.reserve(pairs);
    b.one.assign(pairs, 1.0f);
    b.slots.resize(size_t(round_ * o_.topk * o_.hidden));
    b.row.resize(size_t(round_ * o_.topk));
    b.next.resize(size_t(o_.ranks));
  }
}

int64_t ExpertExchange::bytes() const {
  const RankBuffers& b = ranks_[0];
  return int64_t(ranks_.size()) *
         int64_t((b.out.size() + b.one.size() + b.slots.size()) * 4 + b.x.size() + b.row.size() * 8);
}

int64_t ExpertExchange::RowsIn(const RankBuffers& b, int64_t first) const {
  return std::clamp<int64_t>(b.shown.rows - first, 0, round_);
}

void ExpertExchange::Run(Rank rank, ops::Queue& queue, const ops::MoeArgs& args, Communicator& comm) {
  RankBuffers& own = ranks_[size_t(rank.value)];
  own.shown = args;
  queue.Synchronize();  // what others read is there
  comm.Fence();
  int64_t most = 0;  // the same on every rank
  for (const RankBuffers& b : ranks_) most = std::max(most, b.shown.rows);
  for (int64_t first = 0; first < most; first += round_) {
    Fetch(own, rank, first, comm);
    ops::MoeArgs m;
    m.rows = own.base.back();
    m.topk = 1;
    m.gate_up = args.gate_up;
    m.down = args.down;
    m.x = own.x.data();
    m.expert = own.pair_expert.data();
    m.expert_weight = own.one.data();
    m.y = own.out.data();
    if (m.rows > 0) {
      std::fill_n(own.out.begin(), size_t(m.rows * o_.hidden), 0.0f);
      backend_.Moe(queue, m);
      queue.Synchronize();
    }
    comm.Fence();
    Add(own, rank, first, queue, comm);
    // Outputs stay until all have fetched theirs; the rows of the last round, until the next layer's first
    // fence.
    if (first + round_ < most) comm.Fence();
  }
}

// The rows that chose this rank's experts.
void ExpertExchange::Fetch(RankBuffers& b, Rank rank, int64_t first, Communicator& comm) {
  const size_t row_bytes = size_t(o_.hidden * o_.act_bytes);
  b.pair_expert.clear();
  for (int32_t q = 0; q < o_.ranks; ++q) {
    b.base[size_t(q)] = int32_t(b.pair_expert.size());
    const ops::MoeArgs& peer = ranks_[size_t(q)].shown;
    const int64_t rows = RowsIn(ranks_[size_t(q)], first);
    if (rows == 0) continue;
    comm.Get(Rank(q), peer.expert + first * o_.topk, size_t(rows * o_.topk) * 4, b.expert.data());
    for (int64_t r = 0; r < rows; ++r) {
      const std::byte* fetched = nullptr;  // a row crosses once, however many of its experts are here
      for (int64_t s = 0; s < o_.topk; ++s) {
        const int32_t e = b.expert[size_t(r * o_.topk + s)];
        if (e < 0 || ExpertOwner(e, o_.experts, o_.ranks) != rank) continue;
        std::byte* to = b.x.data() + b.pair_expert.size() * row_bytes;
        if (fetched == nullptr) {
          comm.Get(Rank(q), static_cast<const std::byte*>(peer.x) + size_t(first + r) * row_bytes, row_bytes,
                   to);
          fetched = to;
        } else {
          std::memcpy(to, fetched, row_bytes);
        }
        b.pair_expert.push_back(e);
      }
    }
  }
  b.base.back() = int32_t(b.pair_expert.size());
}

// This rank's rows take their slots' outputs from the owners, in the order in which the owners have laid them
// out.
void ExpertExchange::Add(RankBuffers& b, Rank rank, int64_t first, ops::Queue& queue, Communicator& comm) {
  const int64_t rows = RowsIn(b, first);
  if (rows == 0) return;
  for (int32_t o = 0; o < o_.ranks; ++o)
    comm.Get(Rank(o), &ranks_[size_t(o)].base[size_t(rank.value)], sizeof(int32_t), &b.next[size_t(o)]);
  const int32_t* expert = b.shown.expert + first * o_.topk;
  for (int64_t i = 0; i < rows * o_.topk; ++i) {
    b.row[size_t(i)] = nullptr;
    if (expert[i] < 0) continue;
    const Rank owner = ExpertOwner(expert[i], o_.experts, o_.ranks);
    const float* from =
        ranks_[size_t(owner.value)].out.data() + int64_t(b.next[size_t(owner.value)]++) * o_.hidden;
    b.row[size_t(i)] = from;
    if (owner == rank) continue;
    float* to = b.slots.data() + i * o_.hidden;
    comm.Get(owner, from, size_t(o_.hidden) * 4, to);
    b.row[size_t(i)] = to;
  }
  ops::SumSlotsArgs a;
  a.rows = rows;
  a.topk = o_.topk;
  a.hidden = o_.hidden;
  a.row = b.row.data();
  a.weight = b.shown.expert_weight + first * o_.topk;
  a.y = b.shown.y + first * o_.hidden;
  sum_.SumSlots(queue, a);
  queue.Synchronize();
}

}  // namespace sluice
