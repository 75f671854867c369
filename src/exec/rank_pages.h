// One rank's end of the exchange of cache rows between ranks whose arenas meet in the communicator alone.
//
// The rank's ops address its own lane of the pool, and blocks of its own:
//   staged    rows that it has computed, at their COMPUTE places; dummies are holes that nobody writes
//   gathered  copies of other lanes' pages that its rows see
// Both exist twice, for even and for odd layers: the prefix pages of the next layer come in on a thread of
// the rank while this layer runs.
//
// A layer of a split forward: rows are staged > fence > each owner takes the rows of its pages out of every
// rank's staged ones (RowExchange) > fence > pages with rows of this forward are gathered. Every other pass
// (decode, verify, drafts) carries no page plan: a rank puts its rows to their owners, nobody waits, and of
// the latent rows only those that its rows have selected are fetched. Index keys are gathered for layers that
// have them, and for sequences longer than the selection.
//
// The buffer is bounded. Pages that find no room are read in place, in the owner's arena, and counted; as
// long as there are none, ops cannot reach another lane at all.
//
// A page is looked up through its sequence's own list: each pass builds one list of the batch's shape with
// the rank's addresses, used by all layers. Nothing is allocated once the lists have grown to a pass's size.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "batch/row_exchange.h"
#include "comm/communicator.h"
#include "exec/prefetcher.h"
#include "kv/device_pool.h"
#include "model/model.h"
#include "model/model_batch.h"

namespace sluice {

struct RankPagesOptions {
  int32_t ranks = 1;
  int64_t max_rows = 0;             // compute rows of a pass
  int64_t buffer_bytes = 64 << 20;  // of gathered pages, of one rank
  int64_t topk = 0;                 // of the index selection; 0: attention reads every row
  WaitMode wait = WaitMode::kBlock;
};

// What a rank is about to run. All views outlive the pass.
struct RankPass {
  std::span<const BatchSeq> batch;         // sequences of the whole batch
  std::span<const BatchSeq> seqs;          // the rank's
  std::span<const PageId> pages;           // page lists of the batch
  std::span<const cp::ComputeRow> places;  // [rows] where each is staged; empty: row r at place r
  std::span<const int32_t> prefix;         // [seqs] positions that are final before the pass; empty: none
  const RowExchange* exchange = nullptr;   // null: no page plan
  bool reads = true;                       // false: rows are stored and nothing is read
  bool whole = false;                      // attention may read rows that were not selected
  LayerHooks* loads = nullptr;             // says when a layer's pages have arrived from another tier
  LogicalLayer first, last;
};

class RankPages {
 public:
  // `pool` and `comm`, the rank's communicator, outlive it. `fetch` is the helper thread's own.
  static StatusOr<std::unique_ptr<RankPages>> Make(const DevicePool& pool, const RankPagesOptions& options,
                                                   Communicator& comm, std::unique_ptr<Communicator> fetch);
  static int64_t Bytes(const KvLayout& layout, const RankPagesOptions& options);
  int64_t bytes() const { return Bytes(pool_.layout(), options_); }
  // [ranks], itself included; before the first pass.
  void Meet(std::vector<RankPages*> peers) { peers_ = std::move(peers); }

  // Starts a pass over `batch`, which was built from the same sequences: redirects its row slots and page
  // lists. Internal when rows exceed the planned ones.
  Status Begin(const RankPass& pass, ModelBatch* batch);
  ops::OwnBlocks Own(KvComponent component, LogicalLayer layer) const;
  // The layer's rows are staged: hands them over and brings in what is read. Collective with an exchange.
  void Ready(LogicalLayer layer);
  // Fetches the selected rows that are not here yet.
  void Fetch(LogicalLayer layer, const int32_t* selected, const int32_t* count);
  void End() { prefetcher_.Finish(); }

  int64_t max_rows() const { return options_.max_rows; }
  const CommStats& fetched() const { return fetch_->stats(); }  // by the helper, between passes
  int64_t pages_in_place() const { return pages_in_place_; }    // layers of pages, since the start
  int64_t chunks_ahead() const { return prefetcher_.chunks_ahead(); }
  int64_t table_bytes() const { return int64_t(table_.size() * sizeof(PageId)); }  // of the last pass

 private:
  enum Flag : uint8_t { kLatent = 1, kIndex = 2, kLate = 4 };  // kLate: this forward writes rows of it
  struct Gathered {
    PageId page;
    uint8_t flags = 0;
  };
  // Neighbouring rows of one staged block that go to neighbouring rows of one page.
  struct RowRun {
    Rank peer;  // whose staged rows, or whose page
    int32_t place, offset, count;
    PageId page;
  };
  RankPages(const DevicePool& pool, const RankPagesOptions& options, Communicator& comm,
            std::unique_ptr<Communicator> fetch);
  void PlanMoves();
  void AddMove(Rank peer, int32_t place, PageId page, int32_t offset);
  void PlanReads();
  int32_t BlockOf(PageId page);
  void Move(LogicalLayer layer);
  void GetPage(LogicalLayer layer, int32_t block, Communicator& comm);
  std::byte* Block(KvComponent component, LogicalLayer layer, int32_t block) const;
  bool HasIndex(LogicalLayer layer) const { return pool_.layout().IndexSlot(layer).valid(); }

  const DevicePool& pool_;
  const RankPagesOptions options_;
  Communicator& comm_;
  const std::unique_ptr<Communicator> fetch_;
  const Rank rank_;
  const int32_t first_id_;  // of the staged blocks; gathered ones follow
  int32_t staged_ = 0, room_ = 0;
  std::shared_ptr<std::byte> arena_;
  std::vector<RankPages*> peers_;

  RankPass pass_;
  int32_t shift_ = 0;
  std::vector<PageId> slot_page_;     // [rows]
  std::vector<int32_t> slot_offset_;  // [rows]
  std::vector<RowRun> moves_;
  std::vector<PageId> table_;  // [pages of the batch] as the rank's ops address them
  std::vector<PageRead> seen_;
  std::vector<int32_t> cells_;      // a hash table of the blocks in use, by page; -1: empty
  std::vector<Gathered> gathered_;  // [blocks in use]
  std::vector<int32_t> early_, late_;
  std::vector<int32_t> by_row_;  // sequences whose latent rows come by selection
  std::vector<uint64_t> here_;   // [blocks in use] rows fetched in this layer
  int32_t in_place_latent_ = 0, in_place_index_ = 0;
  int64_t pages_in_place_ = 0;
  LogicalLayer ahead_;  // that the helper gathers
  Prefetcher prefetcher_;
};

}  // namespace sluice
