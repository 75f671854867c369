// Rows of logits reduced to what the sampler needs, at GLM-5's vocabulary. That each field is the sampler's
// own, bit for bit, is device_test's to show.
#include "base/reduced_row.h"
#include "tools/cuda/check.h"

namespace sluice::cuda {
namespace {

constexpr int kVocab = 154880;

struct Weights {  // of one row, in double precision
  std::vector<double> weight;
  double total = 0;
  int best = 0;
};

Weights WeightsOf(const std::vector<float>& logits) {
  Weights w;
  for (int i = 0; i < kVocab; ++i) {
    if (logits[i] > logits[w.best]) w.best = i;
  }
  w.weight.resize(kVocab);
  for (int i = 0; i < kVocab; ++i) w.total += w.weight[i] = std::exp(double(logits[i]) - logits[w.best]);
  return w;
}

void Reduce(int rows, const char* kind, const RowRequest& request, const Dev<float>& logits) {
  std::vector<RowRequest> requests(rows, request);
  for (int r = 0; r < rows; ++r) {
    requests[r].place = r;
    requests[r].uniform = (r + 0.5) / rows;
  }
  Dev<RowRequest> asked(requests);
  Dev<ReducedRow> out(rows);
  Dev<RowCandidate> candidates(size_t(rows) * kMostCandidates);
  const double t =
      Time([&] { CUDA_OK(LaunchReduceRows(stream, logits.p, kVocab, asked.p, rows, out.p, candidates.p)); },
           11, Flush::kRead);
  Done();
  const std::vector<ReducedRow> got = out.Get();
  double wrong = 0, sum_error = 0;
  for (int r = 0; r < rows; r += std::max(1, rows / 8)) {
    const Weights want = WeightsOf(logits.Get(size_t(r) * kVocab, kVocab));
    wrong += got[r].best != want.best || got[r].unusable;
    if (request.temperature == 0) continue;
    sum_error = std::max(sum_error, std::abs(got[r].total / want.total - 1));
    if (request
            .filtered) {  // the tokens at and above the bar hold top_p, and they are those that are counted
      double held = 0, count = 0;
      for (const double w : want.weight) {
        if (w >= got[r].threshold) {
          held += w;
          ++count;
        }
      }
      wrong += held < request.top_p * want.total * (1 - 1e-6);
      wrong += std::abs(count - got[r].candidates) > 2 + 1e-3 * count;  // float weights at the bar
    } else {  // the draw falls on the token that holds its place in the sum
      double before = 0;
      for (int i = 0; i < got[r].drawn; ++i) before += want.weight[i];
      const double at = requests[r].uniform * want.total, slack = 1e-5 * want.total;
      wrong += got[r].drawn < 0 || at < before - slack || at > before + want.weight[got[r].drawn] + slack;
    }
  }
  char text[96];
  std::snprintf(text, sizeof(text), "sampling %s, %d rows: wrong tokens or bars", kind, rows);
  Check(text, wrong, 0);
  if (request.temperature > 0) {
    std::snprintf(text, sizeof(text), "sampling %s, %d rows: sum of weights", kind, rows);
    Check(text, sum_error, 1e-5);
  }
  std::snprintf(text, sizeof(text), "%d x %d %s", rows, kVocab, kind);
  Row("sampling", text, t, double(rows) * kVocab * 4 / t / 1e6, "GB/s", read_gbs, "one read pass");
}

}  // namespace

void CheckSampling() {
  for (const int rows : {1, 128}) {
    Dev<float> logits(size_t(rows) * kVocab);
    Fill(logits.p, logits.n, 91, 6);
    Reduce(rows, "greedy", {}, logits);
    Reduce(rows, "draw", {.temperature = 1}, logits);
    Reduce(rows, "top_p", {.temperature = 1, .filtered = true, .top_p = 0.9f}, logits);
  }
}

}  // namespace sluice::cuda
