// Verification of drafted tokens: a run is the consecutive samples of one sequence, one per row. Each token
// is the one that plain decoding would draw at its position; the run ends after the first that differs from
// its draft, because the rows behind it stand on a token that was not produced.
#pragma once

#include "sampling/sampler.h"

namespace sluice {

// Walks the samples of a step in order. One thread; no state is left between runs.
class RunVerifier {
 public:
  explicit RunVerifier(Sampler* sampler) : sampler_(sampler) {}

  // True: the row's logits are needed, call Sample. False: *out says that the token is not drawn.
  bool Wanted(const SampleRow& row, SampledToken* out) {
    out->cut = row.cut;
    if (skip_ == 0) return true;
    --skip_;
    out->slot = row.slot;
    out->token = -1;
    out->logprob = 0;
    out->top.clear();
    out->logits_hash = 0;
    out->status = OkStatus();
    return false;
  }
  // REQUIRES Wanted(row) has just answered true.
  void Sample(const SampleRow& row, const float* logits, SampledToken* out) {
    sampler_->Sample(row, logits, out);
    Drawn(row, *out);
  }
  // In the place of Sample, for a row that was sampled in another way.
  void Drawn(const SampleRow& row, const SampledToken& out) {
    if (row.run_left > 0 && (out.token < 0 || out.token != row.expected)) skip_ = row.run_left;
  }

 private:
  Sampler* const sampler_;
  int32_t skip_ = 0;
};

}  // namespace sluice
