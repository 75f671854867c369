#include "exec/rank_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <limits>

#include "base/check.h"

namespace sluice {
namespace {

constexpr int32_t kPage = int32_t(kPageTokens);
constexpr int32_t kChunkPages = 8;  // that a thread takes at once

int64_t BlockBytes(const KvLayout& layout) { return layout.latent_page_bytes() + layout.index_page_bytes(); }
int64_t StagedBlocks(const RankPagesOptions& o) {
  return std::max<int64_t>(1, CeilDiv(o.max_rows, kPageTokens));
}
int64_t Room(const KvLayout& layout, const RankPagesOptions& o) {
  return std::max<int64_t>(1, o.buffer_bytes / (2 * BlockBytes(layout)));
}
// One component of one half, so that every run of blocks starts on a cache line.
int64_t RunBytes(int64_t page_bytes, int64_t blocks) { return AlignUp(page_bytes * blocks, 64); }

}  // namespace

int64_t RankPages::Bytes(const KvLayout& layout, const RankPagesOptions& o) {
  const int64_t blocks = StagedBlocks(o) + Room(layout, o);
  return 2 * (RunBytes(layout.latent_page_bytes(), blocks) + RunBytes(layout.index_page_bytes(), blocks));
}

StatusOr<std::unique_ptr<RankPages>> RankPages::Make(const DevicePool& pool, const RankPagesOptions& options,
                                                     Communicator& comm,
                                                     std::unique_ptr<Communicator> fetch) {
  const int64_t last =
      pool.lanes() * pool.pages_per_lane() + StagedBlocks(options) + Room(pool.layout(), options);
  if (last > std::numeric_limits<int32_t>::max())
    return Invalid(
        "a pool of {} lanes of {} pages and a gather buffer of {} bytes have more pages than can be "
        "numbered; use fewer --max-total-tokens or a smaller --cp-gather-buffer-mib",
        pool.lanes(), pool.pages_per_lane(), options.buffer_bytes);
  std::unique_ptr<RankPages> p(new RankPages(pool, options, comm, std::move(fetch)));
  p->staged_ = int32_t(StagedBlocks(options));
  p->room_ = int32_t(Room(pool.layout(), options));
  const auto bytes = size_t(Bytes(pool.layout(), options));
  // Committed when first touched.
  void* memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED)
    return Exhausted("gather buffer: {} bytes cannot be reserved; lower --cp-gather-buffer-mib", bytes);
  p->arena_ = std::shared_ptr<std::byte>(static_cast<std::byte*>(memory),
                                         [bytes](std::byte* at) { munmap(at, bytes); });
  p->slot_page_.reserve(size_t(options.max_rows));
  p->slot_offset_.reserve(size_t(options.max_rows));
  p->gathered_.reserve(size_t(p->room_));
  p->here_.reserve(size_t(p->room_));
  p->early_.reserve(size_t(p->room_));
  p->late_.reserve(size_t(p->room_));
  p->cells_.resize(std::bit_ceil(size_t(2 * p->room_)), -1);
  return p;
}

RankPages::RankPages(const DevicePool& pool, const RankPagesOptions& options, Communicator& comm,
                     std::unique_ptr<Communicator> fetch)
    : pool_(pool),
      options_(options),
      comm_(comm),
      fetch_(std::move(fetch)),
      rank_(fetch_->rank()),
      first_id_(int32_t(pool.lanes() * pool.pages_per_lane())),
      prefetcher_(
          [this](int32_t chunk, bool ahead) {
            if (pass_.loads != nullptr) pass_.loads->WaitReadable(ahead_);
            const size_t end = std::min(early_.size(), size_t(chunk + 1) * kChunkPages);
            for (size_t i = size_t(chunk) * kChunkPages; i < end; ++i)
              GetPage(ahead_, early_[i], ahead ? *fetch_ : comm_);
          },
          options.wait) {}

std::byte* RankPages::Block(KvComponent component, LogicalLayer layer, int32_t block) const {
  const KvLayout& l = pool_.layout();
  const int64_t blocks = staged_ + room_, latent = RunBytes(l.latent_page_bytes(), blocks);
  std::byte* half = arena_.get() + (layer.value & 1) * (latent + RunBytes(l.index_page_bytes(), blocks));
  return component == KvComponent::kLatent ? half + block * l.latent_page_bytes()
                                           : half + latent + block * l.index_page_bytes();
}

ops::OwnBlocks RankPages::Own(KvComponent component, LogicalLayer layer) const {
  return {first_id_, Block(component, layer, 0), in_place_latent_ + in_place_index_ == 0 ? rank_.value : -1};
}

Status RankPages::Begin(const RankPass& pass, ModelBatch* batch) {
  pass_ = pass;
  shift_ = batch->seqs.slot_shift;
  slot_page_.assign(size_t(batch->rows), PageId());
  slot_offset_.assign(size_t(batch->rows), 0);
  for (const BatchSeq& s : pass.seqs) {
    for (int32_t i = s.known; i < s.num_rows; ++i) {
      const auto row = size_t(s.row_begin + i);
      const int32_t place = pass.places.empty() ? int32_t(row) : pass.places[row].value;
      if (place >= staged_ * kPage)
        return Internal("rank {}: row {} is staged at place {} of {}", rank_.value, row, place,
                        staged_ * kPage);
      slot_page_[row] = PageId(first_id_ + place / kPage);
      slot_offset_[row] = place % kPage;
    }
  }
  batch->slots = {slot_page_.data(), slot_offset_.data()};
  PlanMoves();
  PlanReads();
  batch->seqs.pages = table_.data();
  ahead_ = pass.first;
  prefetcher_.Post(int32_t(CeilDiv(int64_t(early_.size()), kChunkPages)));
  return OkStatus();
}

void RankPages::AddMove(Rank peer, int32_t place, PageId page, int32_t offset) {
  if (!moves_.empty()) {
    RowRun& last = moves_.back();
    if (last.peer == peer && last.page == page && last.place + last.count == place && place % kPage != 0 &&
        last.offset + last.count == offset) {
      ++last.count;
      return;
    }
  }
  moves_.push_back({peer, place, offset, 1, page});
}

void RankPages::PlanMoves() {
  moves_.clear();
  const int32_t ranks = options_.ranks;
  if (pass_.exchange != nullptr) {
    const int32_t each = pass_.exchange->rows_per_rank();
    for (const StoredRow& row : pass_.exchange->stores(rank_)) {
      const int32_t peer = row.source.value / each;
      SLUICE_CHECK(peer < ranks && row.local < pool_.pages_per_lane(),
                   "rank {} stores row {} of {} x {} on its page {}", rank_.value, row.source.value, ranks,
                   each, row.local);
      AddMove(Rank(peer), row.source.value % each, PageId(row.local * ranks + rank_.value), row.offset);
    }
    return;
  }
  for (const BatchSeq& s : pass_.seqs) {
    for (int32_t i = s.known; i < s.num_rows; ++i) {
      const int32_t slot = s.start + i;
      const PageId page = pass_.pages[size_t(s.page_begin + slot / kPage)];
      const auto row = size_t(s.row_begin + i);
      AddMove(Rank(PageOwner(page, ranks)), (slot_page_[row].value - first_id_) * kPage + slot_offset_[row],
              page, slot % kPage);
    }
  }
}

// The page's block, a free one if it has none yet, -1 when the buffer is full.
int32_t RankPages::BlockOf(PageId page) {
  const size_t mask = cells_.size() - 1;  // at most half full
  for (size_t at = size_t(uint32_t(page.value) * 2654435761u) & mask;; at = (at + 1) & mask) {
    const int32_t block = cells_[at];
    if (block >= 0 && gathered_[size_t(block)].page == page) return block;
    if (block >= 0) continue;
    if (gathered_.size() == size_t(room_)) return -1;
    cells_[at] = int32_t(gathered_.size());
    gathered_.push_back({page, 0});
    return cells_[at];
  }
}

void RankPages::PlanReads() {
  table_.assign(pass_.pages.size(), PageId(rank_.value));  // the lane's scratch page where no row looks
  gathered_.clear();
  early_.clear();
  late_.clear();
  by_row_.clear();
  in_place_latent_ = in_place_index_ = 0;
  if (!pass_.reads) return;
  std::fill(cells_.begin(), cells_.end(), -1);
  for (size_t k = 0; k < pass_.seqs.size(); ++k) {
    const BatchSeq& s = pass_.seqs[k];
    const bool whole = pass_.whole || options_.topk == 0 || (pass_.exchange != nullptr && !s.decode);
    const bool index = options_.topk > 0 && s.start + s.num_rows - shift_ > options_.topk;
    const int32_t finals = pass_.prefix.empty() ? 0 : pass_.prefix[k] / kPage;
    bool by_row = false;
    PagesSeen(pass_.batch, pass_.pages, s, options_.ranks, &seen_);
    for (size_t i = 0; i < seen_.size(); ++i) {
      const PageId page(seen_[i].local * options_.ranks + seen_[i].owner.value);
      PageId& entry = table_[size_t(s.page_begin) + i];
      entry = page;
      if (seen_[i].owner == rank_) continue;
      const int32_t block = BlockOf(page);
      if (block < 0) {
        ++in_place_latent_;
        in_place_index_ += index;
        continue;
      }
      entry = PageId(first_id_ + staged_ + block);
      by_row = by_row || !whole;
      gathered_[size_t(block)].flags |=
          uint8_t((whole ? kLatent : 0) | (index ? kIndex : 0) | (int32_t(i) < finals ? 0 : kLate));
    }
    if (by_row) by_row_.push_back(int32_t(k));
  }
  here_.assign(gathered_.size(), 0);
  for (size_t b = 0; b < gathered_.size(); ++b) {
    const uint8_t flags = gathered_[b].flags;
    if ((flags & (kLatent | kIndex)) != 0) ((flags & kLate) != 0 ? late_ : early_).push_back(int32_t(b));
  }
}

void RankPages::GetPage(LogicalLayer layer, int32_t block, Communicator& comm) {
  const Gathered& g = gathered_[size_t(block)];
  const KvLayout& l = pool_.layout();
  const Rank owner(PageOwner(g.page, options_.ranks));
  if ((g.flags & kLatent) != 0)
    comm.Get(owner, pool_.Latent(layer, g.page), size_t(l.latent_page_bytes()),
             Block(KvComponent::kLatent, layer, staged_ + block));
  if ((g.flags & kIndex) != 0 && HasIndex(layer))
    comm.Get(owner, pool_.Index(layer, g.page), size_t(l.index_page_bytes()),
             Block(KvComponent::kIndex, layer, staged_ + block));
}

void RankPages::Move(LogicalLayer layer) {
  const bool take = pass_.exchange != nullptr;
  for (const KvComponent component : {KvComponent::kLatent, KvComponent::kIndex}) {
    if (component == KvComponent::kIndex && !HasIndex(layer)) continue;
    for (const RowRun& run : moves_) {
      const RankPages& stager = take ? *peers_[size_t(run.peer.value)] : *this;
      std::byte* block = stager.Block(component, layer, run.place / kPage);
      std::byte* page =
          component == KvComponent::kLatent ? pool_.Latent(layer, run.page) : pool_.Index(layer, run.page);
      for (const KvRowPart& part : pool_.layout().row_parts(component)) {
        std::byte* staged = block + part.offset + run.place % kPage * part.bytes;
        std::byte* stored = page + part.offset + run.offset * part.bytes;
        const auto bytes = size_t(run.count * part.bytes);
        if (take) {
          comm_.Get(run.peer, staged, bytes, stored);
        } else {
          comm_.Put(run.peer, staged, bytes, stored);
        }
      }
    }
  }
}

void RankPages::Ready(LogicalLayer layer) {
  prefetcher_.Finish();
  if (layer < pass_.last) {  // reads of the half that it fills ended with the layer before
    ahead_ = LogicalLayer(layer.value + 1);
    prefetcher_.Post(int32_t(CeilDiv(int64_t(early_.size()), kChunkPages)));
  }
  if (pass_.exchange != nullptr) {
    comm_.Fence();
    Move(layer);
    comm_.Fence();
  } else {
    Move(layer);
  }
  for (const int32_t block : late_) GetPage(layer, block, comm_);
  std::fill(here_.begin(), here_.end(), 0);
  if (in_place_latent_ == 0) return;
  const KvLayout& l = pool_.layout();
  const int32_t index = HasIndex(layer) ? in_place_index_ : 0;
  comm_.CountDirect(in_place_latent_ * l.latent_page_bytes() + index * l.index_page_bytes(), 0);
  pages_in_place_ += in_place_latent_;
}

void RankPages::Fetch(LogicalLayer layer, const int32_t* selected, const int32_t* count) {
  if (by_row_.empty()) return;
  SLUICE_CHECK(selected != nullptr, "layer {}: rows come by selection and there is none", layer.value);
  const int64_t row_bytes = pool_.layout().latent_row_bytes();
  int32_t block = -1, offset = 0, rows = 0;
  const auto flush = [&] {
    if (rows == 0) return;
    const PageId page = gathered_[size_t(block)].page;
    comm_.Get(Rank(PageOwner(page, options_.ranks)), pool_.Latent(layer, page) + offset * row_bytes,
              size_t(rows * row_bytes),
              Block(KvComponent::kLatent, layer, staged_ + block) + offset * row_bytes);
    rows = 0;
  };
  for (const int32_t k : by_row_) {
    const BatchSeq& s = pass_.seqs[size_t(k)];
    for (int32_t r = s.row_begin; r < s.row_begin + s.num_rows; ++r) {
      for (int32_t i = 0; i < count[r]; ++i) {
        const int32_t slot = selected[int64_t(r) * options_.topk + i] + shift_;
        const int32_t b = table_[size_t(s.page_begin + slot / kPage)].value - first_id_ - staged_;
        if (b < 0 || (gathered_[size_t(b)].flags & kLatent) != 0) continue;
        const uint64_t bit = uint64_t(1) << slot % kPage;
        if ((here_[size_t(b)] & bit) != 0) continue;
        here_[size_t(b)] |= bit;
        if (rows > 0 && (b != block || offset + rows != slot % kPage)) flush();
        if (rows == 0) block = b, offset = slot % kPage;
        ++rows;
      }
    }
  }
  flush();
}

}  // namespace sluice
