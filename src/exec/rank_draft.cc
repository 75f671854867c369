// The draft layer on all ranks.
#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "batch/row_exchange.h"
#include "exec/rank_state.h"

namespace sluice {

void RankGroup::CountDraftBytes(RankState& rank, std::span<const PageId> pages, bool with_reads,
                                int64_t moved_before) {
  if (ranks() == 1) return;
  if (rank.pages == nullptr) {
    const LogicalLayer layer = model_.config().draft_layer();
    const LayerBytes layers = BytesOfLayers(pool_.layout(), layer, LogicalLayer(layer.value + 1));
    const RankBytes bytes = BytesOf(rank.draft_seqs, pages, rank.id, ranks(), layers);
    rank.comm->CountDirect(with_reads ? bytes.got : 0, bytes.put);
  }
  draft_bytes_moved_.fetch_add(rank.BytesMoved() - moved_before, std::memory_order_relaxed);
}

// A state goes to its sequence's home, where drafting happens: the last row of a split prompt may have been
// computed elsewhere.
void RankGroup::CountStates(std::span<const int32_t> batch_rows) {
  if (ranks() == 1) return;
  const int64_t bytes = model_.config().hidden * int64_t(sizeof(float));
  for (const int32_t row : batch_rows) {
    const RankRow at = split().Where(row);
    RankState& rank = *ranks_[size_t(at.rank.value)];
    for (const BatchSeq& s : split().part(at.rank).seqs) {
      if (at.row < s.row_begin || at.row >= s.row_begin + s.num_rows) continue;
      if (HomeRank(s.slot, ranks()) == at.rank) continue;
      rank.comm->CountDirect(0, bytes);
      draft_bytes_moved_.fetch_add(bytes, std::memory_order_relaxed);
    }
  }
}

void RankGroup::FinalHidden(std::span<const int32_t> batch_rows, float* out) {
  const int64_t width = model_.config().hidden;
  CountStates(batch_rows);
  Collect(batch_rows, split().where(), width, out, [&](RankState& rank) {
    return rank.HostStates(width, [&](std::span<const int32_t> rows, float* to) {
      model_.FinalHidden(*rank.queue, rows, *rank.buffers, to);
    });
  });
}

Status RankGroup::RankState::DraftPass(const Model& model, const DevicePool& pool, ModelBatch batch,
                                       std::span<const PageId> batch_pages, ForwardOptions& with) {
  if (pages != nullptr) {
    RankPass pass;
    pass.batch = pass.seqs = draft_seqs;
    pass.pages = batch_pages;
    pass.reads = !with.kv_only;
    pass.whole = !with.dequant_only_topk;
    pass.first = pass.last = model.config().draft_layer();
    RETURN_IF_ERROR(pages->Begin(pass, &batch));
    with.hooks = draft_hooks.get();
  }
  const RankHidden own(States(0, 0), batch.rows, model.config().hidden);
  const Status done = model.DraftForward(*queue, batch, own, pool, *buffers, with);
  if (pages != nullptr) pages->End();
  queue->Synchronize();
  RETURN_IF_ERROR(done);
  return queue->status();
}

Status RankGroup::FillDraft(const ForwardBatch& batch, std::span<const int32_t> next_token) {
  const int64_t width = model_.config().hidden;
  RunOnAll([&](RankState& rank) {
    rank.status = OkStatus();
    const RankPart& part = split().part(rank.id);
    rank.draft_seqs.clear();
    rank.tokens.clear();
    rank.logits_rows.clear();
    for (const BatchSeq& s : part.seqs) {
      BatchSeq d = s;
      d.row_begin = int32_t(rank.tokens.size());
      d.start = s.start + 1;
      d.known = 0;
      d.num_rows = 0;
      for (int32_t i = 0; i < s.num_rows; ++i) {
        const int32_t row = s.row_begin + i;
        const int32_t token = next_token[size_t(part.batch_row[size_t(row)])];
        if (token < 0) break;
        rank.tokens.push_back(token);
        rank.logits_rows.push_back(row);
        ++d.num_rows;
      }
      if (d.num_rows == 0) continue;
      d.num_pages = int32_t(CeilDiv(int64_t(d.start) + d.num_rows, kPageTokens));
      rank.draft_seqs.push_back(d);
    }
    if (rank.draft_seqs.empty()) return;
    model_.FinalHidden(*rank.queue, rank.logits_rows, *rank.buffers, rank.States(rank.tokens.size(), width));
    const auto tables = rank.tables->Build(rank.draft_seqs, batch.pages, rank.tokens,
                                           model_.config().vocab_size, /*slot_shift=*/1);
    if (!tables.ok()) {
      rank.status = tables.status();
      return;
    }
    ForwardOptions options;
    options.kv_only = true;
    const int64_t before = rank.BytesMoved();
    rank.status = rank.DraftPass(model_, pool_, *tables, batch.pages, options);
    CountDraftBytes(rank, batch.pages, /*with_reads=*/false, before);
  });
  for (auto& rank : ranks_) RETURN_IF_ERROR(rank->status);
  return OkStatus();
}

Status RankGroup::DraftRows(std::span<const BatchSeq> seqs, std::span<const PageId> pages,
                            std::span<const int32_t> tokens, BatchHidden hidden, bool kv_only,
                            std::span<const int32_t> carried) {
  const int64_t width = model_.config().hidden;
  for (auto& rank : ranks_) rank->carried.clear();
  // A sequence drafts on its home rank all the time, so what it takes over is there.
  for (size_t i = 0; i < carried.size(); ++i) {
    const RankRow from = draft_where_[size_t(carried[i])];
    ranks_[size_t(from.rank.value)]->carried.push_back(from.row);
  }
  draft_where_.resize(tokens.size());
  for (auto& rank : ranks_) {
    rank->draft_seqs.clear();
    rank->tokens.clear();
    rank->logits_rows.clear();
    rank->status = OkStatus();
  }
  for (const BatchSeq& s : seqs) {
    RankState& rank = *ranks_[size_t(HomeRank(s.slot, ranks()).value)];
    BatchSeq d = s;
    d.row_begin = int32_t(rank.tokens.size());
    rank.draft_seqs.push_back(d);
    for (int32_t i = 0; i < s.num_rows; ++i) {
      draft_where_[size_t(s.row_begin + i)] = {rank.id, int32_t(rank.tokens.size())};
      rank.logits_rows.push_back(s.row_begin + i);
      rank.tokens.push_back(tokens[size_t(s.row_begin + i)]);
    }
  }
  RunOnAll([&](RankState& rank) {
    if (rank.draft_seqs.empty()) return;
    float* const states = rank.States(rank.tokens.size(), width);
    for (size_t i = 0; i < rank.logits_rows.size(); ++i)
      std::memcpy(&rank.hidden[i * size_t(width)], hidden.at(cp::GlobalRow(rank.logits_rows[i])),
                  size_t(width) * sizeof(float));
    const auto tables = rank.tables->Build(rank.draft_seqs, pages, rank.tokens, model_.config().vocab_size,
                                           /*slot_shift=*/1);
    if (!tables.ok()) {
      rank.status = tables.status();
      return;
    }
    if (rank.buffers->on_device())
      rank.queue->Upload(states, rank.hidden.data(), int64_t(rank.tokens.size()) * width * 4);
    ForwardOptions options;
    options.kv_only = kv_only;
    if (!carried.empty()) {
      SLUICE_CHECK(rank.carried.size() == rank.tokens.size(), "{} selections for {} rows",
                   rank.carried.size(), rank.tokens.size());
      options.carried_selection = rank.carried.data();
    }
    options.dequant_only_topk = rank.options.dequant_only_topk;
    const int64_t before = rank.BytesMoved();
    rank.status = rank.DraftPass(model_, pool_, *tables, pages, options);
    CountDraftBytes(rank, pages, /*with_reads=*/!kv_only, before);
  });
  for (auto& rank : ranks_) RETURN_IF_ERROR(rank->status);
  return OkStatus();
}

const float* RankGroup::DraftLogits(std::span<const int32_t> rows) {
  SLUICE_CHECK(int64_t(rows.size()) <= options_.limits.max_logits_rows, "{} logits rows of {}", rows.size(),
               options_.limits.max_logits_rows);
  const size_t vocab = size_t(model_.config().vocab_size);
  logits_.resize(std::max(logits_.size(), size_t(options_.limits.max_logits_rows) * vocab));
  return Collect(rows, draft_where_, int64_t(vocab), logits_.data(), [&](RankState& rank) {
    const float* own = model_.DraftLogits(*rank.queue, rank.logits_rows, *rank.buffers);
    rank.queue->Synchronize();
    return own;
  });
}

LogitsAnswers RankGroup::ReduceDraft(std::span<const int32_t> rows, std::span<const RowRequest> requests) {
  RankState& rank = *ranks_[0];
  rank.logits_rows.clear();
  for (const int32_t row : rows) rank.logits_rows.push_back(draft_where_[size_t(row)].row);
  return Answers(Model::LogitsKind::kDraft, requests, {}, nullptr);
}

void RankGroup::DraftHidden(std::span<const int32_t> rows, float* out) {
  Collect(rows, draft_where_, model_.config().hidden, out, [&](RankState& rank) {
    return rank.HostStates(model_.config().hidden, [&](std::span<const int32_t> own, float* to) {
      model_.DraftHidden(*rank.queue, own, *rank.buffers, to);
    });
  });
}

}  // namespace sluice
