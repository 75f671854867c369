#include "sampling/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"
#include "base/random.h"

namespace sluice {
namespace {

constexpr uint32_t kPurposeToken =
    1;  // last word of the counter: other uses of the same seed get other numbers

Status UnusableLogits(int32_t position, const char* when) {
  return Internal(
      "logits at position {} {} hold a NaN, an infinity or no finite value; the request was ended and its "
      "cache rows were "
      "dropped",
      position, when);
}

}  // namespace

double UniformAt(uint64_t seed, int32_t choice, int32_t position) {
  const auto r = Philox4x32({uint32_t(position), uint32_t(choice), 0, kPurposeToken},
                            {uint32_t(seed), uint32_t(seed >> 32)});
  return double((uint64_t(r[0]) << 21) ^ (r[1] >> 11)) * 0x1.0p-53;
}

Sampler::Sampler(int32_t vocab_size, int32_t num_slots)
    : vocab_(vocab_size), slots_(size_t(num_slots)), work_(size_t(vocab_size)), weights_(size_t(vocab_size)) {
  SLUICE_CHECK(vocab_size > 0 && num_slots > 0, "vocab {} slots {}", vocab_size, num_slots);
  candidates_.reserve(size_t(vocab_size));
}

void Sampler::InitSlot(const SlotInit& init) {
  SLUICE_CHECK(init.slot.valid() && size_t(init.slot.value) < slots_.size(), "slot {}", init.slot.value);
  Slot& slot = slots_[size_t(init.slot.value)];
  if (init.more) {
    for (const int32_t token : init.output_tokens) Record(token, &slot);
    return;
  }
  slot.last_token = -1;
  slot.track_tokens = init.track_tokens;
  slot.logit_bias = init.logit_bias;
  slot.stop_token_ids = init.stop_token_ids;
  slot.tokens_left = init.tokens_left;
  slot.constraint =
      init.constraint == nullptr ? nullptr : init.constraint->Start(init.output_tokens, init.tokens_left);
  if (init.track_tokens) {
    slot.history.Reset(init.prompt_tokens, init.output_tokens);
  } else {
    slot.history.Reset({}, {});
  }
}

void Sampler::Record(int32_t token, Slot* slot) {
  slot->last_token = token;
  if (slot->track_tokens) slot->history.AddOutput(token);
  if (slot->constraint != nullptr) slot->constraint->Accept(token, --slot->tokens_left);
}

void Sampler::ApplyConstraint(const SampleRow& row, Slot* slot, const float* logits) {
  constexpr float kNever = -std::numeric_limits<float>::infinity();
  const std::span<const uint64_t> mask = slot->constraint->Mask(slot->tokens_left);
  bool any = false;
  for (int32_t i = 0; i < vocab_; ++i) {
    const bool allowed = size_t(i) / 64 < mask.size() && (mask[size_t(i) / 64] >> (i % 64) & 1) != 0;
    if (!allowed) work_[size_t(i)] = kNever;
    any |= work_[size_t(i)] > kNever;
  }
  if (any || !row.suppress_stop) return;
  for (const int32_t token : slot->stop_token_ids) {  // nothing but the end may come
    if (token < 0 || token >= vocab_ || size_t(token) / 64 >= mask.size()) continue;
    if ((mask[size_t(token) / 64] >> (token % 64) & 1) != 0) work_[size_t(token)] = logits[token];
  }
}

const float* Sampler::Adjust(const SampleRow& row, Slot* owner, const float* logits) {
  const Slot& slot = *owner;
  const bool penalties = slot.track_tokens && (row.repetition_penalty != 1.0f ||
                                               row.frequency_penalty != 0.0f || row.presence_penalty != 0.0f);
  const bool masks = row.suppress_stop && !slot.stop_token_ids.empty();
  if (!penalties && slot.logit_bias.empty() && !masks && slot.constraint == nullptr) return nullptr;
  std::copy(logits, logits + vocab_, work_.begin());
  if (penalties) {
    for (const auto& seen : slot.history.seen()) {
      if (seen.token < 0 || seen.token >= vocab_) continue;
      float& x = work_[size_t(seen.token)];
      x = x > 0 ? x / row.repetition_penalty : x * row.repetition_penalty;
      if (seen.produced > 0) x -= row.frequency_penalty * float(seen.produced) + row.presence_penalty;
    }
  }
  for (const auto& [token, bias] : slot.logit_bias) {
    if (token >= 0 && token < vocab_) work_[size_t(token)] += bias;
  }
  if (masks) {
    for (const int32_t token : slot.stop_token_ids) {
      if (token >= 0 && token < vocab_) work_[size_t(token)] = -std::numeric_limits<float>::infinity();
    }
  }
  if (slot.constraint != nullptr) ApplyConstraint(row, owner, logits);
  return work_.data();
}

void Sampler::Clear(const SampleRow& row, SampledToken* out) const {
  out->slot = row.slot;
  out->token = -1;
  out->logprob = 0;
  out->top.clear();
  out->logits_hash = 0;
  out->forced.clear();
  out->status = OkStatus();
}

void Sampler::Sample(const SampleRow& row, const float* logits, SampledToken* out) {
  Slot& slot = slots_[size_t(row.slot.value)];
  Clear(row, out);
  const RowScan raw = ScanRow(logits, vocab_);
  if (raw.unusable) {
    out->status = UnusableLogits(row.position, "from the model");
    return;
  }
  if (row.hash_logits) out->logits_hash = HashRow(logits, vocab_);
  if (row.sample) {
    out->token = Choose(row, &slot, logits, raw);
    if (out->token < 0) {
      out->status = UnusableLogits(row.position, "after penalties, bias, min_tokens and constraint");
      return;
    }
    Record(out->token, &slot);
    if (row.jump && slot.constraint != nullptr) slot.constraint->Forced(slot.tokens_left, &out->forced);
  }
  if (row.top_logprobs >= 0 || (!row.sample && row.logprob_of >= 0)) FillLogprobs(row, logits, raw.max, out);
}

int32_t Sampler::Choose(const SampleRow& row, Slot* slot, const float* logits, const RowScan& raw) {
  const float* x = logits;
  float max = raw.max;
  if (const float* adjusted = Adjust(row, slot, logits)) {
    const RowScan scan = ScanRow(adjusted, vocab_);
    if (scan.unusable) return -1;
    x = adjusted;
    max = scan.max;
  }
  return row.temperature == 0 || row.top_k == 1 ? FirstIndexOf(x, vocab_, max) : Draw(row, x, max);
}

int32_t Sampler::Propose(const SampleRow& row, const float* logits, float* share) {
  if (share != nullptr) *share = 0;
  const RowScan raw = ScanRow(logits, vocab_);
  if (raw.unusable) return -1;
  const int32_t token = Choose(row, &slots_[size_t(row.slot.value)], logits, raw);
  if (share != nullptr && token >= 0) *share = ShareOf(logits, vocab_, raw.max, token);
  return token;
}

int32_t Sampler::Draw(const SampleRow& row, const float* x, float max) {
  ExpWeights(x, vocab_, max, row.temperature, weights_.data());
  const double uniform = UniformAt(row.seed, row.choice, row.position);
  return Filters(row) ? DrawFiltered(row, uniform) : DrawAmongAll(uniform);
}

// Inverse of the cumulative distribution in id order, in the same blocks as SumBlocks so that both sums
// agree.
int32_t Sampler::DrawAmongAll(double uniform) const {
  const double target = uniform * SumBlocks(weights_.data(), vocab_);
  double before = 0;
  int32_t last_positive = 0;
  for (int32_t begin = 0; begin < vocab_; begin += 64) {
    double block = 0;
    const int32_t end = std::min(vocab_, begin + 64);
    for (int32_t i = begin; i < end; ++i) block += double(weights_[size_t(i)]);
    if (block > 0 && before + block > target) {
      double inside = 0;
      for (int32_t i = begin; i < end; ++i) {
        if (weights_[size_t(i)] <= 0) continue;
        last_positive = i;
        inside += double(weights_[size_t(i)]);
        if (before + inside > target) return i;
      }
      return last_positive;
    }
    before += block;
  }
  for (int32_t i = vocab_ - 1; i >= 0; --i) {
    if (weights_[size_t(i)] > 0) return i;
  }
  return last_positive;
}

// The highest weight is exactly 1. Tokens below the floor cannot be kept: by min_p, or because all tokens
// below (1 - top_p) / vocab of the total together hold less than the share that top_p leaves out.
float Sampler::Floor(const SampleRow& row, double total) const {
  const float floor = std::max(0.0f, row.min_p);
  if (TopK(row) || row.top_p >= 1.0f) return floor;
  const double left_out = 0.5 * std::min(1.0, 1.0 - double(row.top_p)) * total / double(vocab_);
  return std::max(floor, float(left_out));
}

int32_t Sampler::DrawFiltered(const SampleRow& row, double uniform) {
  const bool top_k = TopK(row);
  const double total = !top_k && row.top_p < 1.0f ? SumBlocks(weights_.data(), vocab_) : 0;
  const float floor = Floor(row, total);
  candidates_.clear();
  for (int32_t i = 0; i < vocab_; ++i) {
    const float w = weights_[size_t(i)];
    if (w > 0 && (top_k ? true : w >= floor)) candidates_.push_back({w, i});
  }
  return DrawCandidate(row, uniform, total, 0).token;
}

Sampler::Candidate Sampler::DrawCandidate(const SampleRow& row, double uniform, double total,
                                          float complete) {
  constexpr Candidate kUnsettled{0, -1};
  const auto higher = [](const Candidate& a, const Candidate& b) {
    return a.weight != b.weight ? a.weight > b.weight : a.token < b.token;
  };
  const bool top_k = TopK(row);
  if (top_k && candidates_.size() < size_t(row.top_k) && complete > 0) return kUnsettled;
  if (top_k && candidates_.size() > size_t(row.top_k)) {
    std::nth_element(candidates_.begin(), candidates_.begin() + row.top_k, candidates_.end(), higher);
    candidates_.resize(size_t(row.top_k));
  }
  std::sort(candidates_.begin(), candidates_.end(), higher);
  if (row.top_p < 1.0f) {
    if (top_k) {
      for (const Candidate& c : candidates_) total += double(c.weight);
    }
    const double wanted = std::max(0.0f, row.top_p) * total;
    double sum = 0;
    size_t keep = 0;
    bool reached = false;
    while (keep < candidates_.size() && !reached) {
      sum += double(candidates_[keep++].weight);
      reached = sum >= wanted;
    }
    if (!reached && !top_k && complete > Floor(row, total)) return kUnsettled;
    candidates_.resize(keep);
  }
  size_t keep = candidates_.size();
  while (keep > 1 && candidates_[keep - 1].weight < row.min_p) --keep;
  candidates_.resize(keep);
  double kept = 0;
  for (const Candidate& c : candidates_) kept += double(c.weight);
  const double target = uniform * kept;
  double sum = 0;
  for (const Candidate& c : candidates_) {
    sum += double(c.weight);
    if (sum > target) return c;
  }
  return candidates_.back();
}

bool Sampler::TakesReduced(const SampleRow& row) const {
  const Slot& slot = slots_[size_t(row.slot.value)];
  return row.sample && row.top_logprobs < 0 && !slot.track_tokens && slot.logit_bias.empty() &&
         slot.constraint == nullptr && !(row.suppress_stop && !slot.stop_token_ids.empty());
}

RowRequest Sampler::RequestFor(const SampleRow& row) const {
  RowRequest r;
  r.hash = row.hash_logits;
  if (row.temperature == 0 || row.top_k == 1) return r;
  r.temperature = row.temperature;
  r.uniform = UniformAt(row.seed, row.choice, row.position);
  r.filtered = Filters(row);
  r.top_k = TopK(row) ? row.top_k : 0;
  r.top_p = row.top_p;
  r.min_p = row.min_p;
  return r;
}

// token -1: not settled. A candidate of a greedy row or of a draw among all has no weight.
Sampler::Candidate Sampler::ChooseReduced(const SampleRow& row, const ReducedRow& reduced,
                                          const RowCandidate* candidates) {
  if (row.temperature == 0 || row.top_k == 1) return {0, reduced.best};
  if (!Filters(row)) return {0, reduced.drawn};
  if (reduced.candidates > kMostCandidates) return {0, -1};
  const float floor = TopK(row) ? 0.0f : Floor(row, reduced.total);
  candidates_.clear();
  for (int32_t i = 0; i < reduced.candidates; ++i)
    if (candidates[i].weight >= floor) candidates_.push_back({candidates[i].weight, candidates[i].token});
  return DrawCandidate(row, UniformAt(row.seed, row.choice, row.position), TopK(row) ? 0 : reduced.total,
                       reduced.threshold);
}

bool Sampler::SampleReduced(const SampleRow& row, const ReducedRow& reduced, const RowCandidate* candidates,
                            SampledToken* out) {
  if (reduced.unusable) {
    Clear(row, out);
    out->status = UnusableLogits(row.position, "from the model");
    return true;
  }
  const Candidate chosen = ChooseReduced(row, reduced, candidates);
  if (chosen.token < 0) return false;
  Clear(row, out);
  if (row.hash_logits) out->logits_hash = FinishHash(reduced.hash_lane, reduced.hash_tail, vocab_);
  out->token = chosen.token;
  Record(chosen.token, &slots_[size_t(row.slot.value)]);
  return true;
}

bool Sampler::ProposeReduced(const SampleRow& row, const ReducedRow& reduced, const RowCandidate* candidates,
                             int32_t* token, float* share) {
  *share = 0;
  *token = -1;
  if (reduced.unusable) return true;
  const Candidate chosen = ChooseReduced(row, reduced, candidates);
  if (chosen.token < 0) return false;
  *token = chosen.token;
  const float part = chosen.weight > 0                        ? std::pow(chosen.weight, row.temperature)
                     : row.temperature == 0 || row.top_k == 1 ? 1.0f
                                                              : std::exp(reduced.drawn_value - reduced.max);
  *share = part / reduced.near_sum;
  return true;
}

void Sampler::FillLogprobs(const SampleRow& row, const float* logits, float max, SampledToken* out) {
  const double norm = LogSumExp(logits, vocab_, max, weights_.data());
  const int32_t of = row.sample ? out->token : row.logprob_of;
  if (of >= 0 && of < vocab_) out->logprob = float(double(logits[of]) - norm);
  const size_t wanted = size_t(std::clamp(row.top_logprobs, 0, vocab_));
  if (wanted == 0) return;
  // A heap of the best so far, its worst on top; ids come in ascending order, so an equal value never
  // displaces one.
  const auto worse_on_top = [](const Candidate& a, const Candidate& b) {
    return a.weight != b.weight ? a.weight > b.weight : a.token < b.token;
  };
  candidates_.clear();
  for (int32_t i = 0; i < vocab_; ++i) {
    if (candidates_.size() < wanted) {
      candidates_.push_back({logits[i], i});
      std::push_heap(candidates_.begin(), candidates_.end(), worse_on_top);
    } else if (logits[i] > candidates_.front().weight) {
      std::pop_heap(candidates_.begin(), candidates_.end(), worse_on_top);
      candidates_.back() = {logits[i], i};
      std::push_heap(candidates_.begin(), candidates_.end(), worse_on_top);
    }
  }
  std::sort_heap(candidates_.begin(), candidates_.end(), worse_on_top);
  out->top.reserve(wanted);
  for (const Candidate& c : candidates_) out->top.push_back({c.token, float(double(c.weight) - norm)});
}

}  // namespace sluice
