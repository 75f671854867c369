#include "exec/warm_up.h"

#include <algorithm>

namespace sluice {
namespace {

// `seqs` sequences of `rows` rows each that begin at position `start`, over scratch pages alone.
void Fill(ForwardBatch* batch, int64_t seqs, int64_t rows, int64_t start, int32_t lanes) {
  batch->Clear();
  const auto pages = int32_t(CeilDiv(start + rows, kPageTokens));
  for (int64_t s = 0; s < seqs; ++s) {
    BatchSeq q;
    q.slot = SlotId(int32_t(s));
    q.row_begin = int32_t(batch->tokens.size());
    q.num_rows = int32_t(rows);
    q.start = int32_t(start);
    q.page_begin = int32_t(batch->pages.size());
    q.num_pages = pages;
    for (int32_t p = 0; p < pages; ++p) batch->pages.push_back(PageId(p % lanes));
    batch->tokens.insert(batch->tokens.end(), size_t(rows), 0);
    batch->seqs.push_back(q);
  }
}

}  // namespace

std::string WarmUpReport::ToString() const {
  return fmt::format("warm-up: {} steps of up to {} rows and {} tokens of context in {:.1f} s", steps,
                     most_rows, longest_context, seconds);
}

std::vector<int64_t> WarmUpRows(int64_t most) {
  std::vector<int64_t> rows;
  for (int64_t n = 1; n < most; n *= 2) rows.push_back(n);
  if (most > 0) rows.push_back(most);
  return rows;
}

StatusOr<WarmUpReport> WarmUp(RankGroup& ranks, const DevicePool& pool, const ModelLimits& limits,
                              const Clock* clock) {
  const Nanos begin = clock->Now();
  // What a fresh device's memory holds may be anything; rows of zeros are read instead.
  for (int32_t lane = 0; lane < pool.lanes(); ++lane)
    for (const KvPiece& piece : pool.layout().pieces())
      pool.memory()->Fill(pool.Piece(piece, PageId(lane)), 0, piece.bytes);
  WarmUpReport report;
  ForwardBatch batch;
  ForwardOptions options;
  std::vector<int32_t> wanted;
  const auto run = [&](int64_t seqs, int64_t rows, int64_t start) -> Status {
    Fill(&batch, seqs, rows, start, pool.lanes());
    wanted.clear();
    for (const BatchSeq& s : batch.seqs) {
      if (int64_t(wanted.size()) == limits.max_logits_rows) break;
      wanted.push_back(s.row_begin + s.num_rows - 1);
    }
    for (int time = 0; time < 3;
         ++time) {  // a batch is recorded at its second coming and replayed from then on
      RETURN_IF_ERROR(ranks.Forward(batch, batch.tokens, options, false));
      ranks.Logits(wanted);
      RETURN_IF_ERROR(ranks.Wait());
      ++report.steps;
      if (seqs * rows > 256) break;
    }
    report.most_rows = std::max(report.most_rows, seqs * rows);
    report.longest_context = std::max(report.longest_context, start + rows);
    return OkStatus();
  };
  const int64_t longest = limits.max_context;
  for (const int64_t rows : WarmUpRows(std::min(limits.max_rows, longest))) {
    RETURN_IF_ERROR(run(1, rows, 0));
    RETURN_IF_ERROR(run(1, rows, longest - rows));
  }
  for (const int64_t seqs : WarmUpRows(std::min(limits.max_seqs, limits.max_rows))) {
    RETURN_IF_ERROR(run(seqs, 1, 0));
    RETURN_IF_ERROR(run(seqs, 1, longest - 1));
  }
  ranks.WarmedUp();
  report.seconds = double(clock->Now() - begin) * 1e-9;
  return report;
}

}  // namespace sluice
