#include "exec/warm_up.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace sluice {
namespace {

// A batch is recorded at its second coming and replayed from then on.
constexpr int kTimes = 3;
constexpr int64_t kRecordedRows = 256;  // larger steps come once

// Page i of the pool, in the order of the lanes, without the scratch pages.
PageId PageAt(int64_t i, int32_t lanes) { return PageId(int32_t(lanes + i)); }

class WarmUpRun {
 public:
  WarmUpRun(ModelRunner& runner, const DevicePool& pool, const WarmUpLimits& limits)
      : runner_(runner), pool_(pool), limits_(limits), pages_(pool.usable_pages()) {
    // Tokens that a decoding sequence goes on by, and its own pages for them; what lies before is shared.
    ahead_ = 1;
    for (int32_t verify = 0; verify <= limits.drafts; ++verify) ahead_ += kTimes * (1 + verify);
    ahead_ += limits.drafts + 1;
    tail_pages_ = CeilDiv(ahead_, kPageTokens) + 1;
    // In a small pool some of them share their own pages, too, in a very small one all do.
    tails_ = std::min(limits.max_seqs * tail_pages_, pages_ / 2);
    if (tails_ < tail_pages_) tails_ = 0;
    prefix_pages_ = std::min(pages_ - tails_, CeilDiv(limits.max_context, kPageTokens));
    context_ = std::min(limits.max_context, prefix_pages_ * kPageTokens);
  }

  Status Run() {
    Zero();
    const int64_t last = limits_.drafts > 0 ? limits_.drafts + 1 : 0;  // tokens that drafting reaches beyond
    for (const int64_t rows : WarmUpRows(std::min(limits_.max_rows, context_ - last))) {
      const int times = rows <= kRecordedRows ? kTimes : 1;
      for (const int64_t start : {int64_t(0), context_ - last - rows})
        for (int i = 0; i < times; ++i) RETURN_IF_ERROR(Extend(rows, start));
    }
    for (const int64_t seqs : WarmUpRows(std::min(limits_.max_seqs, limits_.max_rows))) {
      RETURN_IF_ERROR(Decode(seqs, 0));
      RETURN_IF_ERROR(Decode(seqs, std::max<int64_t>(0, context_ - ahead_)));
    }
    return OkStatus();
  }

  WarmUpReport report;

 private:
  // What a fresh device's memory holds may be anything; rows of zeros are read instead.
  void Zero() {
    const int64_t local =
        std::min(CeilDiv(prefix_pages_ + tails_, int64_t(pool_.lanes())) + 1, pool_.pages_per_lane());
    for (int32_t lane = 0; lane < pool_.lanes(); ++lane) {
      for (const KvPiece& piece : pool_.layout().pieces()) {
        std::byte* first = pool_.Piece(piece, PageId(lane));
        const int64_t bytes = piece.bytes * local;
        if (pool_.memory() != nullptr) {
          pool_.memory()->Fill(first, 0, bytes);
        } else {
          std::memset(first, 0, size_t(bytes));
        }
      }
    }
  }

  // Adds rows of one sequence whose pages reach past them by what it drafts.
  void Add(int64_t s, int64_t rows, int64_t start, int64_t own_from, bool decode, int32_t verify,
           int32_t drafts) {
    BatchSeq q;
    q.slot = SlotId(int32_t(s));
    q.row_begin = batch_.rows();
    q.num_rows = int32_t(rows);
    q.start = int32_t(start);
    q.page_begin = int32_t(batch_.pages.size());
    q.num_pages = int32_t(CeilDiv(start + rows + drafts, kPageTokens));
    q.decode = decode;
    q.verify = verify;
    q.draft_next = drafts;
    for (int64_t p = 0; p < q.num_pages; ++p) {
      const bool shared = p < own_from || tails_ == 0;
      batch_.pages.push_back(
          PageAt(shared ? p : prefix_pages_ + (s * tail_pages_ + p - own_from) % tails_, pool_.lanes()));
    }
    batch_.tokens.insert(batch_.tokens.end(), size_t(rows), decode ? TokenFromSlot(q.slot) : 0);
    for (int32_t left = verify; left >= 0; --left) {
      SampleRow row;
      row.slot = q.slot;
      row.row = q.row_begin + int32_t(rows) - 1 - left;
      row.position = int32_t(start + rows) - left;
      row.run_left = left;
      switch ((s + report.steps) % 4) {
        case 0:
          row.temperature = 0;
          break;
        case 1:
          row.top_p = 0.95f;
          break;
        case 2:
          row.top_k = 50;
          break;
        default:
          break;
      }
      // A row that comes to the host as a whole.
      if (s == 0 && report.steps % 3 == 0) row.top_logprobs = 0;
      batch_.samples.push_back(row);
    }
    batch_.seqs.push_back(q);
  }

  void Begin() {
    batch_.Clear();
    result_ = StepResult();
    batch_.step = result_.step = report.steps;
  }
  void Init(int64_t s) {
    SlotInit init;
    init.slot = SlotId(int32_t(s));
    batch_.slot_inits.push_back(std::move(init));
  }

  Status Step(int64_t end) {
    runner_.Run(batch_, &result_);
    ++report.steps;
    report.draft_passes += result_.work.draft_passes;
    report.most_rows = std::max<int64_t>(report.most_rows, batch_.rows());
    report.longest_context = std::max(report.longest_context, end);
    return result_.status;
  }

  Status Extend(int64_t rows, int64_t start) {
    Begin();
    Init(0);
    Add(0, rows, start, pages_, /*decode=*/false, 0, limits_.drafts);
    return Step(start + rows);
  }

  // Every number of verified rows, each as often as it takes to be replayed.
  Status Decode(int64_t seqs, int64_t start) {
    const int64_t own_from = start / kPageTokens;
    const auto step = [&](int64_t at, int64_t rows, bool decode, int32_t verify, int32_t drafts) {
      Begin();
      for (int64_t s = 0; s < seqs; ++s) {
        if (!decode) Init(s);
        Add(s, rows, at, own_from, decode, verify, drafts);
      }
      return Step(at + rows);
    };
    RETURN_IF_ERROR(step(start, 1, false, 0, 0));
    int64_t at = start + 1;
    for (int32_t verify = 0; verify <= limits_.drafts; ++verify) {
      if (seqs * (1 + verify) > limits_.max_rows || at + kTimes * (1 + verify) + limits_.drafts > context_)
        break;
      const int times = seqs * (1 + verify) <= kRecordedRows ? kTimes : 1;
      for (int i = 0; i < times; ++i) {
        const int32_t next = i + 1 < times ? verify : std::min(verify + 1, limits_.drafts);
        RETURN_IF_ERROR(step(at, 1 + verify, true, verify, next));
        report.verify_steps += verify > 0 ? 1 : 0;
        at += 1 + verify;
      }
    }
    return OkStatus();
  }

  ModelRunner& runner_;
  const DevicePool& pool_;
  const WarmUpLimits limits_;
  const int64_t pages_;
  int64_t ahead_ = 0, tail_pages_ = 0, tails_ = 0, prefix_pages_ = 0, context_ = 0;
  ForwardBatch batch_;
  StepResult result_;
};

}  // namespace

std::string WarmUpReport::ToString() const {
  std::string text = fmt::format("warm-up: {} steps of up to {} rows and {} tokens of context", steps,
                                 most_rows, longest_context);
  if (verify_steps > 0)
    text += fmt::format(", {} of them with drafts to verify, {} draft passes", verify_steps, draft_passes);
  return text + fmt::format(" in {:.1f} s; recorded launches take {:.2f} GiB", seconds,
                            double(std::max<int64_t>(0, device_bytes)) / double(1 << 30));
}

std::vector<int64_t> WarmUpRows(int64_t most) {
  std::vector<int64_t> rows;
  for (int64_t n = 1; n < most; n *= 2) rows.push_back(n);
  if (most > 0) rows.push_back(most);
  return rows;
}

StatusOr<WarmUpReport> WarmUp(ModelRunner& runner, const DevicePool& pool, const WarmUpLimits& limits,
                              const Clock* clock) {
  const Nanos begin = clock->Now();
  const auto free_bytes = [&] { return pool.memory() == nullptr ? 0 : pool.memory()->free_bytes(); };
  const int64_t free_before = free_bytes();
  WarmUpRun run(runner, pool, limits);
  runner.BeginWarmUp();
  const Status status = run.Run();
  runner.EndWarmUp();
  RETURN_IF_ERROR(status);
  run.report.device_bytes = free_before - free_bytes();
  run.report.seconds = double(clock->Now() - begin) * 1e-9;
  return run.report;
}

}  // namespace sluice
