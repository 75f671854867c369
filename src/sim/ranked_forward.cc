#include "sim/ranked_forward.h"

#include <algorithm>

namespace sluice::sim {
namespace {
constexpr uint64_t kDummyChain = 0xD0D0D0D0D0D0D0D0;
constexpr int32_t kDummyToken = -13;
constexpr uint64_t kLostChain = 0x10571057;  // as SimExecutor marks rows whose content is lost
constexpr int32_t kLostToken = -7;
}  // namespace

const RankedForward::Sequence& RankedForward::Of(const BatchSeq& part) const {
  size_t i = 0;
  while (batch_->seqs[i].slot != part.slot) ++i;
  return sequences_[i];
}

void RankedForward::Begin(const ForwardBatch& batch, std::vector<Sequence> sequences,
                          std::function<void(LogicalLayer)> need_layer) {
  batch_ = &batch;
  sequences_ = std::move(sequences);
  need_layer_ = std::move(need_layer);
  if (const Status s = split_.Plan(batch, ranks_, pool_->pages_per_lane()); !s.ok()) {
    journal_->Violation("step {}: the page plan is refused: {}", batch.step, Message(s));
    return Abandon();
  }
  exchange_.Plan(batch, split_, ranks_);
  state_.assign(size_t(ranks_), RankState());
  for (RankState& r : state_) {
    if (random_.Chance(0.2)) continue;  // slow
    r.weight = 8;
  }
  if (random_.Chance(0.2)) {
    state_[random_.Below(uint64_t(ranks_))].weight = 0;  // stalled
    journal_->Cover("ranks_stalled");
  }
  Cover();
}

void RankedForward::Cover() {
  std::vector<PageId> pages(batch_->pages);
  std::sort(pages.begin(), pages.end());
  journal_->Cover("batches_that_share_pages",
                  std::adjacent_find(pages.begin(), pages.end()) != pages.end() ? 1 : 0);
  int64_t tiny = 0, dummies = 0;
  for (const BatchSeq& s : batch_->seqs) tiny += !s.decode && s.cached > 0 && s.num_rows < 2 * ranks_;
  for (int32_t r = 0; r < ranks_; ++r)
    dummies += split_.compute_rows_per_rank() - split_.part(Rank(r)).valid_rows();
  journal_->Cover("tiny_extends_split", tiny);
  journal_->Cover("dummy_rows", dummies);
  journal_->Cover(split_.mode() == ForwardMode::kMixed ? "forwards_mixed"
                  : split_.split()                     ? "forwards_split"
                                                       : "forwards_at_home");
}

// A rank that has filled waits until all have filled; one that has stored, until all have stored.
bool RankedForward::Runnable(const RankState& r) const {
  if (r.piece == rows_->pieces()) return false;
  const auto reached = [&](const RankState& o, Phase phase) {
    return o.piece > r.piece || (o.piece == r.piece && o.phase >= phase);
  };
  return std::all_of(state_.begin(), state_.end(), [&](const RankState& o) {
    if (r.phase == Phase::kFill) return true;
    return reached(o, r.phase);
  });
}

void RankedForward::Run(int64_t turns) {
  std::vector<int32_t> can;
  for (; active() && turns != 0; --turns) {
    can.clear();
    for (int32_t r = 0; r < ranks_; ++r)
      if (Runnable(state_[size_t(r)])) can.insert(can.end(), state_[size_t(r)].weight, r);
    if (can.empty())  // only who is stalled is left
      for (int32_t r = 0; r < ranks_; ++r)
        if (Runnable(state_[size_t(r)])) can.push_back(r);
    if (can.empty()) {
      const bool ended = std::all_of(state_.begin(), state_.end(),
                                     [&](const RankState& r) { return r.piece == rows_->pieces(); });
      if (!ended) journal_->Violation("step {}: every rank waits for another", batch_->step);
      return Abandon();
    }
    Turn(can[random_.Below(can.size())]);
    if (journal_->failed()) return Abandon();
  }
}

void RankedForward::Turn(int32_t rank) {
  RankState& r = state_[size_t(rank)];
  journal_->Cover("rank_turns");
  switch (r.phase) {
    case Phase::kFill:
      Fill(rank);
      r.phase = Phase::kStore;
      return;
    case Phase::kStore:
      Store(rank);
      r.phase = Phase::kCheck;
      return;
    case Phase::kCheck:
      Check(rank);
      r.phase = Phase::kFill;
      ++r.piece;
  }
}

void RankedForward::Fill(int32_t rank) {
  RankState& r = state_[size_t(rank)];
  const RankPart& part = split_.part(Rank(rank));
  r.rows.assign(size_t(split_.compute_rows_per_rank()), {kDummyChain, kDummyToken, -1});
  for (const BatchSeq& s : part.seqs) {
    const Sequence& q = Of(s);
    for (int32_t i = 0; i < s.num_rows; ++i) {
      const int32_t p = s.start + i;
      Row& row = r.rows[size_t(part.compute_row[size_t(s.row_begin + i)].value)];
      row = q.lost ? Row{kLostChain, kLostToken, p} : Row{(*q.chain)[size_t(p)], (*q.tokens)[size_t(p)], p};
    }
  }
}

void RankedForward::Store(int32_t rank) {
  const int32_t piece = state_[size_t(rank)].piece, each = exchange_.rows_per_rank();
  for (const StoredRow& s : exchange_.stores(Rank(rank))) {
    const int32_t from = s.source.value / each;
    if (from >= ranks_ || s.local >= pool_->pages_per_lane()) {
      journal_->Violation("step {}: rank {} stores row {} of {} gathered ones on its page {}", batch_->step,
                          rank, s.source.value, each * ranks_, s.local);
      return;
    }
    const Row& row = state_[size_t(from)].rows[size_t(s.source.value % each)];
    rows_->Write(piece, PageId(s.local * ranks_ + rank), s.offset, row.chain, row.token, row.position);
  }
}

void RankedForward::Check(int32_t rank) {
  const int32_t piece = state_[size_t(rank)].piece;
  need_layer_(rows_->layer(piece));
  const RankPart& part = split_.part(Rank(rank));
  for (const BatchSeq& s : part.seqs) {
    const Sequence& q = Of(s);
    if (q.lost) continue;
    PagesSeen(batch_->seqs, batch_->pages, s, ranks_, &seen_);
    const int32_t end = s.start + s.num_rows;
    // All rows of the last pages, and some of those before.
    for (int32_t p = int32_t(random_.Below(3)); p < end; p += p + 192 < end ? 3 : 1) {
      const auto index = size_t(p / kPageTokens);
      const PageId page =
          index < seen_.size() ? PageId(seen_[index].local * ranks_ + seen_[index].owner.value) : PageId();
      if (page.valid() &&
          rows_->Is(piece, page, p % kPageTokens, (*q.chain)[size_t(p)], (*q.tokens)[size_t(p)], p))
        continue;
      journal_->Violation(
          "step {}: rank {} of {} reads position {} of slot {} on page {}, piece {}: not its row",
          batch_->step, rank, ranks_, p, s.slot.value, page.value, piece);
      return;
    }
  }
}

}  // namespace sluice::sim
