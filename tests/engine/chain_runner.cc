#include "chain_runner.h"

#include <cmath>

#include "base/check.h"
#include "base/random.h"
#include "kv/kv_layout.h"

namespace sluice {
namespace {

constexpr uint64_t kRoot = 0x1234567;

}  // namespace

namespace {

class ForcedPlaces final : public TokenConstraint {
 public:
  explicit ForcedPlaces(uint64_t seed) : seed_(seed) {}
  std::unique_ptr<ConstraintState> Start(std::span<const int32_t> output, int32_t) const override;
  // -1: free.
  int32_t At(size_t place) const {
    SeededStream random(seed_ * 1000003 + place / 9);
    const uint64_t forced = random.Below(9);  // of nine places, the first ones
    return place % 9 < forced ? int32_t(SeededStream(seed_ * 7919 + place).Below(40)) : -1;
  }

 private:
  const uint64_t seed_;
};

class ForcedPlace final : public ConstraintState {
 public:
  ForcedPlace(const ForcedPlaces* places, size_t at) : places_(places), at_(at) {}
  void Accept(int32_t token, int32_t) override {
    SLUICE_CHECK(places_->At(at_) < 0 || token == places_->At(at_), "token {} at {}", token, at_);
    ++at_;
  }
  std::span<const uint64_t> Mask(int32_t) override {
    const int32_t token = places_->At(at_);
    mask_ = token < 0 ? ~uint64_t(0) : uint64_t(1) << token;
    return {&mask_, 1};
  }
  void Forced(int32_t max, std::vector<int32_t>* out) override {
    for (size_t at = at_; max > 0 && places_->At(at) >= 0; --max) out->push_back(places_->At(at++));
  }

 private:
  const ForcedPlaces* const places_;
  size_t at_;
  uint64_t mask_ = 0;
};

std::unique_ptr<ConstraintState> ForcedPlaces::Start(std::span<const int32_t> output, int32_t) const {
  auto state = std::make_unique<ForcedPlace>(this, size_t(0));
  for (const int32_t token : output) state->Accept(token, 0);
  return state;
}

}  // namespace

std::shared_ptr<const TokenConstraint> ChainConstraint(uint64_t seed) {
  return std::make_shared<ForcedPlaces>(seed);
}

uint64_t ChainHash(uint64_t before, int32_t token) { return JoinLogitsHash(before, uint64_t(token) + 1); }

void ChainLogits(uint64_t hash, bool nan, std::vector<float>* logits) {
  logits->resize(kChainVocab);
  SeededStream random(hash);
  for (float& v : *logits) v = float(random.Unit() * 8);
  (*logits)[kChainEos] -= 1.5f;  // answers end now and then
  (*logits)[kChainNan] = -9;
  if (nan) (*logits)[3] = std::nanf("");
}

ChainRunner::ChainRunner(int64_t pages, int32_t num_slots, int64_t host_pages)
    : rows_(size_t((pages + 1) * kPageTokens)),
      host_rows_(size_t((host_pages + 1) * kPageTokens)),
      sampler_(kChainVocab, num_slots) {}

void ChainRunner::Copy(const CopyPlan& plan, StepResult* result) {
  const bool load = plan.direction == CopyDirection::kHostToDevice;
  const bool fails = load && random_.Chance(load_failure_share);
  (fails ? result->copies_failed : result->copies_done).push_back(plan.id);
  for (const PagePair& pair : plan.pages) {
    (load ? loaded_pages : backed_up_pages) += 1;
    for (int64_t i = 0; i < kPageTokens; ++i) {
      Row& device = rows_[size_t(pair.device.value * kPageTokens + i)];
      Row& host = host_rows_[size_t(pair.host.value * kPageTokens + i)];
      if (fails) {
        device = {0, -1, true, true};
      } else if (load) {
        device = host;
      } else {
        if (!device.written || device.lost) violations.push_back("a backup of a page that is not final");
        host = device;
      }
    }
  }
}

ChainRunner::Row& ChainRunner::At(const ForwardBatch& batch, const BatchSeq& seq, int32_t position) {
  const int32_t index = position / int32_t(kPageTokens);
  SLUICE_CHECK(index < seq.num_pages, "position {} of {} pages", position, seq.num_pages);
  const PageId page = batch.pages[size_t(seq.page_begin + index)];
  return rows_[size_t(page.value * kPageTokens + position % kPageTokens)];
}

void ChainRunner::Poison(PageId page) {
  for (int64_t i = 0; i < kPageTokens; ++i) rows_[size_t(page.value * kPageTokens + i)] = Row();
}

void ChainRunner::LoseRows(const ForwardBatch& batch) {
  for (const BatchSeq& seq : batch.seqs) {
    for (int32_t p = seq.start; p < seq.start + seq.num_rows; ++p) At(batch, seq, p) = {0, -1, true, true};
  }
}

void ChainRunner::Run(const ForwardBatch& batch, StepResult* result) {
  ++steps;
  rows += batch.rows();
  largest_step = std::max<int64_t>(largest_step, batch.rows());
  if (!fail_steps.empty()) {
    result->status = fail_steps.back();
    fail_steps.pop_back();
    if (!result->status.ok()) return LoseRows(batch);
  }
  for (const SlotInit& init : batch.slot_inits) sampler_.InitSlot(init);
  for (const PageCopy& copy : batch.page_copies) {
    for (int64_t i = 0; i < kPageTokens; ++i) {
      rows_[size_t(copy.to.value * kPageTokens + i)] = rows_[size_t(copy.from.value * kPageTokens + i)];
    }
  }
  for (const CopyPlan& plan : batch.backups) Copy(plan, result);
  for (const CopyPlan& plan : batch.loads) Copy(plan, result);
  std::vector<uint64_t> hashes(size_t(batch.rows()));
  std::vector<int32_t> tokens(size_t(batch.rows()));
  bool decodes = false, prefills = false;
  for (const BatchSeq& seq : batch.seqs) {
    (seq.decode ? decodes : prefills) = true;
    if (seq.decode && prefills) violations.push_back("a decode row after prefill rows");
    uint64_t hash = kRoot;
    bool lost = false;
    for (int32_t p = 0; p < seq.start + seq.num_rows; ++p) {
      Row& row = At(batch, seq, p);
      if (p >= seq.start) {
        const int32_t r = seq.row_begin + p - seq.start;
        const int32_t token = batch.tokens[size_t(r)];
        tokens[size_t(r)] = token >= 0 ? token : sampler_.LastToken(SlotId(-1 - token));
        lost |= tokens[size_t(r)] < 0;
        row = {lost ? 0 : ChainHash(hash, tokens[size_t(r)]), tokens[size_t(r)], true, lost};
        hashes[size_t(r)] = row.hash;
      } else if (row.lost) {
        lost = true;
      } else if (!row.written || row.hash != ChainHash(hash, row.token)) {
        violations.push_back(fmt::format("step {} slot {}: row {} is {}", batch.step, seq.slot.value, p,
                                         row.written ? "another sequence's" : "not written"));
        return;
      }
      hash = row.hash;
    }
  }
  mixed_steps += decodes && prefills;
  result->samples.resize(batch.samples.size());
  for (size_t i = 0; i < batch.samples.size(); ++i) {
    const SampleRow& sample = batch.samples[i];
    ChainLogits(hashes[size_t(sample.row)], tokens[size_t(sample.row)] == kChainNan, &logits_);
    sampler_.Sample(sample, logits_.data(), &result->samples[i]);
  }
}

ChainAnswer ChainOracle(const Request& request, int32_t choice, int64_t token_limit) {
  const SamplingParams& p = request.sampling;
  ChainAnswer answer;
  const int64_t max_new = std::min<int64_t>(p.max_tokens, token_limit - int64_t(request.prompt.size()));
  uint64_t hash = kRoot;
  int32_t last = -1;
  for (const int32_t t : request.prompt) hash = ChainHash(hash, last = t);
  Sampler sampler(kChainVocab, 1);
  SlotInit init;
  init.slot = SlotId(0);
  init.prompt_tokens = request.prompt;
  init.track_tokens = true;
  init.logit_bias = p.logit_bias;
  init.constraint = p.constraint;
  init.tokens_left = int32_t(max_new);
  init.stop_token_ids = p.stop_token_ids;
  if (!p.ignore_eos) init.stop_token_ids.push_back(kChainEos);
  const std::vector<int32_t> stops = init.stop_token_ids;
  sampler.InitSlot(init);
  std::vector<float> logits;
  answer.finish = FinishReason::kLength;
  while (int64_t(answer.tokens.size()) < max_new) {
    SampleRow row;
    row.slot = SlotId(0);
    row.position = int32_t(request.prompt.size() + answer.tokens.size());
    row.temperature = p.temperature;
    row.top_p = p.top_p;
    row.top_k = p.top_k;
    row.min_p = p.min_p;
    row.presence_penalty = p.presence_penalty;
    row.frequency_penalty = p.frequency_penalty;
    row.repetition_penalty = p.repetition_penalty;
    row.seed = p.seed;
    row.choice = choice;
    row.suppress_stop = int32_t(answer.tokens.size()) < p.min_tokens;
    row.hash_logits = p.hash_logits;
    ChainLogits(hash, last == kChainNan, &logits);
    SampledToken sampled;
    sampler.Sample(row, logits.data(), &sampled);
    if (!sampled.status.ok()) {
      answer.finish = FinishReason::kError;
      break;
    }
    answer.tokens.push_back(last = sampled.token);
    if (p.hash_logits) answer.logits_hash = JoinLogitsHash(answer.logits_hash, sampled.logits_hash);
    hash = ChainHash(hash, last);
    if (int32_t(answer.tokens.size()) > p.min_tokens &&
        std::find(stops.begin(), stops.end(), last) != stops.end()) {
      answer.finish = FinishReason::kStop;
      break;
    }
  }
  return answer;
}

}  // namespace sluice
