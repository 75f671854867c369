// What one rank of a group owns. Private to rank_group.cc and rank_draft.cc.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <span>
#include <thread>
#include <vector>

#include "exec/rank_group.h"
#include "exec/rank_pages.h"

namespace sluice {

// The group's hooks as one rank's forward sees them.
class RankGroup::Hooks final : public LayerHooks {
 public:
  Hooks(RankGroup& group, RankState& rank) : group_(group), rank_(rank) {}
  void WaitReadable(LogicalLayer layer) override;
  void LayerFinal(LogicalLayer layer) override;
  void IndexSelected(LogicalLayer layer, const int32_t* selected, const int32_t* count) override;
  bool RunExperts(ops::Queue& queue, const ops::MoeArgs& args) override;
  bool Active() const override;
  ops::OwnBlocks Own(KvComponent component, LogicalLayer layer) override;
  void BeforeAttention(LogicalLayer layer, const int32_t* selected, const int32_t* count) override;

 private:
  RankGroup& group_;
  RankState& rank_;
};

// Of the draft layer's passes with KvExchangeMode::kGather: each rank by itself.
class RankGroup::DraftHooks final : public LayerHooks {
 public:
  explicit DraftHooks(RankState& rank) : rank_(rank) {}
  void WaitReadable(LogicalLayer layer) override;
  ops::OwnBlocks Own(KvComponent component, LogicalLayer layer) override;
  void BeforeAttention(LogicalLayer layer, const int32_t* selected, const int32_t* count) override;

 private:
  RankState& rank_;
};

struct RankGroup::RankState {
  Rank id;
  std::unique_ptr<ops::Queue> queue;
  std::unique_ptr<ModelBuffers> buffers;
  std::unique_ptr<BatchTables> tables;
  struct Ahead {
    std::unique_ptr<BatchTables> tables;
    ModelBatch batch;  // without tokens
  };
  std::array<Ahead, ModelBuffers::kStages> ahead;  // of prepared batches
  std::unique_ptr<Communicator> comm;
  std::unique_ptr<Hooks> hooks;
  std::unique_ptr<RankPages> pages;  // null with one rank or kDirect
  std::unique_ptr<DraftHooks> draft_hooks;
  std::vector<int32_t> tokens;        // [valid rows]
  std::vector<int32_t> logits_rows;   // this rank's rows of a Logits call
  std::vector<int32_t> logits_place;  // and where they go in the caller's order
  const float* logits = nullptr;
  ForwardOptions options;
  Status status;
  std::vector<float> hidden;  // [valid rows, hidden] states of FillDraft, or of its DraftRows
  // Where ops read and write them: `hidden` itself, grown to `rows`, or the buffers of a device.
  float* States(size_t rows, int64_t width) {
    hidden.resize(std::max(hidden.size(), rows * size_t(width)));
    return buffers->on_device() ? buffers->draft_hidden : hidden.data();
  }
  // Brings what make(rows, out) writes for logits_rows to `hidden`.
  template <typename Make>
  const float* HostStates(int64_t width, const Make& make) {
    const std::span<const int32_t> rows(logits_rows);
    float* const out = States(rows.size(), width);
    if (!buffers->on_device()) {
      make(rows, out);
    } else {
      const auto most = size_t(buffers->limits().max_rows);
      for (size_t at = 0; at < rows.size(); at += most) {
        const auto part = rows.subspan(at, std::min(most, rows.size() - at));
        make(part, out);
        queue->Download(hidden.data() + at * size_t(width), out, int64_t(part.size()) * width * 4);
      }
    }
    queue->Synchronize();
    return hidden.data();
  }
  std::vector<BatchSeq> draft_seqs;
  std::vector<int32_t> carried;  // rows of the DraftRows before, for its rows
  int64_t BytesMoved() const {
    return comm->stats().bytes_moved() + (pages == nullptr ? 0 : pages->fetched().bytes_moved());
  }
  // The draft layer over draft_seqs, which `batch` was built from.
  Status DraftPass(const Model& model, const DevicePool& pool, ModelBatch batch,
                   std::span<const PageId> batch_pages, ForwardOptions& with);
  int64_t seen = 0;
  std::thread thread;  // none for rank 0, which runs on the caller's
};

}  // namespace sluice
