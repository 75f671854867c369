#include "model/sequence_runner.h"

#include <algorithm>
#include <numeric>
namespace sluice {

int32_t GreedyToken(std::span<const float> logits) {
  return int32_t(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

StatusOr<std::unique_ptr<SequenceRunner>> SequenceRunner::Make(const Model& model, ops::Backend& backend,
                                                               const RunnerOptions& options) {
  std::unique_ptr<SequenceRunner> r(new SequenceRunner(model, options));
  KvLayoutOptions layout_options;
  layout_options.latent_dtype = options.latent_dtype;
  layout_options.index_dtype = options.index_dtype;
  layout_options.with_draft = model.has_draft();
  layout_options.numerics_class = backend.info().numerics_class;
  layout_options.model_identity = model.identity();
  ASSIGN_OR_RETURN(const KvLayout layout, KvLayout::Make(model.config(), layout_options));
  const int64_t pages = CeilDiv(options.max_context, kPageTokens) + 1;
  ASSIGN_OR_RETURN(r->pool_, DevicePool::Make(layout, 1, pages, backend.memory()));
  ModelLimits limits;
  limits.max_rows = options.chunk;
  limits.max_seqs = 1;
  limits.max_logits_rows = std::min<int64_t>(options.chunk, 64);
  limits.max_context = options.max_context;
  RETURN_IF_ERROR(backend.Plan(OpLimits(model.config(), limits)));
  ASSIGN_OR_RETURN(r->buffers_, ModelBuffers::Make(model.config(), backend, limits));
  r->queue_ = backend.MakeQueue(options.threads, -1);
  return r;
}

// The draft rows of the slots that the chunk has just filled.
Status SequenceRunner::RunDraft(const ForwardBatch& batch, const std::vector<int32_t>& wanted,
                                std::vector<float>* draft) {
  const int64_t hidden = model_.config().hidden, n = batch.rows();
  hidden_.resize(size_t((options_.chunk + 1) * hidden));
  std::vector<int32_t> all(size_t(n), 0);
  std::iota(all.begin(), all.end(), 0);
  float* states = buffers_->on_device() ? buffers_->draft_hidden : hidden_.data() + hidden;
  model_.FinalHidden(*queue_, all, *buffers_, states);
  if (buffers_->on_device()) {
    queue_->Download(hidden_.data() + hidden, states, n * hidden * 4);
    queue_->Synchronize();
  }
  const int64_t skip = batch.seqs[0].start == 0 ? 1 : 0;  // slot 0 has no state before it
  if (n > skip) {
    ForwardBatch rows = batch;
    rows.tokens.erase(rows.tokens.begin(), rows.tokens.begin() + skip);
    rows.seqs[0].start += int32_t(skip);
    rows.seqs[0].num_rows -= int32_t(skip);
    ASSIGN_OR_RETURN(const ModelBatch m, tables_.Build(rows, rows.tokens, model_.config().vocab_size, 1));
    const float* before = hidden_.data() + skip * hidden;
    if (buffers_->on_device()) {
      queue_->Upload(states, before, m.rows * hidden * 4);
      before = states;
    }
    RETURN_IF_ERROR(
        model_.DraftForward(*queue_, m, RankHidden(before, m.rows, hidden), *pool_, *buffers_, forward_));
    for (int32_t row : wanted) {
      if (draft == nullptr || row < skip) continue;
      const int32_t at = row - int32_t(skip);
      const float* z = model_.DraftLogits(*queue_, std::span(&at, 1), *buffers_, forward_.timer);
      queue_->Synchronize();
      draft->insert(draft->end(), z, z + model_.config().vocab_size);
    }
  }
  queue_->Synchronize();
  std::copy_n(hidden_.data() + n * hidden, hidden, hidden_.data());
  return OkStatus();
}

StatusOr<std::vector<float>> SequenceRunner::Extend(std::span<const int32_t> tokens, int64_t keep,
                                                    std::vector<float>* draft) {
  const int64_t vocab = model_.config().vocab_size, total = int64_t(tokens.size());
  if (total < 1) return Invalid("no token to run");
  if (length_ + total > options_.max_context) {
    return Invalid("{} tokens after {} exceed the context of {}", total, length_, options_.max_context);
  }
  keep = std::min(keep, total);
  std::vector<float> kept;
  kept.reserve(size_t(keep * vocab));
  for (int64_t done = 0; done < total;) {
    const int64_t n = std::min(options_.chunk, total - done);
    ForwardBatch batch;
    batch.tokens.assign(tokens.begin() + done, tokens.begin() + done + n);
    BatchSeq seq;
    seq.slot = SlotId(0);
    seq.num_rows = int32_t(n);
    seq.start = int32_t(length_);
    seq.num_pages = int32_t(CeilDiv(length_ + n, kPageTokens));
    for (int32_t p = 0; p < seq.num_pages; ++p)
      batch.pages.push_back(PageId(p + 1));  // page 0 is the lane's scratch page
    batch.seqs.push_back(seq);
    ASSIGN_OR_RETURN(const ModelBatch rows, tables_.Build(batch, batch.tokens, vocab));
    RETURN_IF_ERROR(model_.Forward(*queue_, rows, *pool_, *buffers_, forward_));
    if (forward_.verify_failed_row >= 0) {
      return Internal("full dequantisation differs from the selected rows' at layer {}, position {}",
                      forward_.verify_failed_layer.value, length_ + forward_.verify_failed_row);
    }
    std::vector<int32_t> wanted;
    for (int64_t i = std::max<int64_t>(total - keep, done); i < done + n; ++i)
      wanted.push_back(int32_t(i - done));
    for (size_t at = 0; at < wanted.size();) {
      const size_t count = std::min(wanted.size() - at, size_t(buffers_->limits().max_logits_rows));
      const float* z =
          model_.Logits(*queue_, std::span(wanted).subspan(at, count), *buffers_, forward_.timer);
      queue_->Synchronize();
      RETURN_IF_ERROR(queue_->status());
      kept.insert(kept.end(), z, z + int64_t(count) * vocab);
      at += count;
    }
    if (model_.has_draft()) RETURN_IF_ERROR(RunDraft(batch, wanted, draft));
    length_ += n;
    done += n;
  }
  queue_->Synchronize();
  return kept;
}

}  // namespace sluice
